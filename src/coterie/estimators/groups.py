# SPDX-License-Identifier: Apache-2.0
"""Parameters that estimators have in common, by the groups of the options: an estimator is made of those that it takes.

Defaults are those of `coterie.config`, but for `weighting`, which there is left to the method, and `baselines`.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeVar, dataclass_transform

from torch import Tensor, nn

from coterie.models import Model
from coterie.participation import Clock

__all__ = ["Everyone", "Groups", "Momentum", "Networks", "Products", "Rounds", "Stages", "Steps", "parameters"]

_Class = TypeVar("_Class")


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def parameters(kind: type[_Class]) -> type[_Class]:
    """Make a constructor of a class's fields, which stores them as scikit-learn wants it; editors show its signature."""
    return dataclass(kw_only=True, eq=False, repr=False)(kind)


@parameters
class Everyone:
    """Of every fit."""

    standardise: bool = True
    baselines: bool = False
    random_state: int = 0


@parameters
class Products(Everyone):
    """Of linear models."""

    degree: int = 1


@parameters
class Networks(Products):
    """Of models that may have hidden layers, or be the user's own."""

    model: nn.Module | Model | None = None
    hidden: tuple[int, ...] = ()
    intercept: bool = True
    l2: float = 0.0


@parameters
class Rounds:
    """Of training in rounds."""

    rounds: int = 100
    step_size: float | None = None
    batch_size: int | None = None
    decay: float = 1.0
    participation: float = 1.0
    weighting: Literal["clients", "rows"] = "clients"
    tol: float = 0.0


@parameters
class Momentum:
    """Of local steps."""

    momentum: float = 0.0
    proximal: float = 0.0


@parameters
class Steps(Momentum):
    """Of local work that is counted in steps."""

    local_steps: int = 10
    epochs: int | None = None
    exact: bool = False


@parameters
class Groups:
    """Of clusters of clients."""

    averaging: Literal["model", "gradient"] = "model"
    average_over: Literal["cluster", "everyone"] = "cluster"
    start: Tensor | None = None
    shared_layers: tuple[str, ...] = ()
    soft: bool = False
    temperature: float | None = None
    patience: int = 5
    resample: int = 0


@parameters
class Stages:
    """Of local work that is counted in passes, by clients of which some are slow."""

    body_epochs: int = 5
    stragglers: Literal["none", "srpfl"] = "none"
    n0: int | None = None
    stages: Literal["fixed", "theory", "adaptive"] = "fixed"
    stage_rounds: int = 10
    contraction: float = 0.25
    clock: str | Clock | None = None
    sigma: float = 1.0
    trace: str | None = None
    communication: float = 0.0
