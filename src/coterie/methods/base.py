# SPDX-License-Identifier: Apache-2.0
"""What a family of methods is, what any fit leaves behind, and what only Python can hand to a fit."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import pyarrow as pa
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.schema import Schema
from coterie.engines.drive import Round, Traffic
from coterie.methods.session import Session
from coterie.models import Model
from coterie.participation import Clock

__all__ = ["ClientModels", "Family", "Fitted", "Given", "Score"]

_IN_MODELS = {"theta", "placed", "model", "scaling", "names", "descended"}  # where attributes of earlier versions are
_IN_EXTRA = {"chosen_run", "counted", "settled", "spread", "virtual_time"}


@dataclass(frozen=True)
class Score:
    """How one method does, over all rows: accuracy, or root mean squared error in the target's units.

    For regression there is R^2 beside it: 1 - MSE / variance of the same rows' targets. Of a mixture it is the mean
    log-likelihood of a row in the columns' own units, with R^2 and the root mean squared error where there is a target.
    New clients show half of their rows first; those without labels are served by the population model.
    """

    method: str
    label: str
    train: float | None
    test: float | None
    new_clients: float | None = None
    train_r2: float | None = None
    test_r2: float | None = None
    new_clients_r2: float | None = None
    new_clients_unlabelled: float | None = None


@dataclass(frozen=True)
class Given:
    """What only Python can give.

    Attributes
    ----------
    module : nn.Module or Model or None
        The model, in place of the one that the options describe.
    start : Tensor or None
        Where to begin: [K, P] models for IFCA with `init="warm"`, [P] one model for moment descent.
    clock : Clock or None
        What time it takes clients, in place of what the options say.
    """

    module: nn.Module | Model | None = None
    start: Tensor | None = None
    clock: Clock | None = None


class ClientModels(Protocol):
    """What a fit leaves behind, whatever the method: a model for every client, old or new."""

    summary: ClassVar[tuple[str, ...]]  # fields of the results that tell a run in short

    @property
    def names(self) -> np.ndarray:
        """[M] clients of the training, ascending."""

    @property
    def scaling(self) -> Scaling:
        """Of the columns."""

    @property
    def metric(self) -> str:
        """What scores count."""

    def save(self, folder: Path, schema: Schema) -> None:
        """Write all that predicting and placing need into a run folder."""

    @classmethod
    def load(cls, folder: Path, document: Mapping[str, Any], module: nn.Module | Model | None) -> tuple[Self, Schema]:
        """Read what `save` wrote; `document` is the run's, and the user's own network is given."""

    def results(self, fitted: "Fitted") -> dict[str, Any]:
        """What the run's document says of the models, as JSON."""

    def clients(self, fitted: "Fitted") -> dict[str, Any]:
        """Columns of the table of clients, as far as only this kind of models knows them."""

    def rounds(self, fitted: "Fitted") -> pa.Table:
        """A row for each round."""

    def remarks(self, fitted: "Fitted") -> list[str]:
        """What is said below the scores."""

    def arrays(self) -> dict[str, Tensor]:
        """What all clients share, by name."""


@dataclass(frozen=True)
class Fitted:
    """All that came of a fit, or, of a finished run, all that is read back: that has no rounds.

    Attributes
    ----------
    options : FitOptions
        What was asked for.
    schema : Schema
        Of the data.
    models : ClientModels
        Everybody's.
    scores : list of Score
        Of the method, then of the baselines.
    per_client : dict
        [M] each: what was measured of every client.
    rounds : list of Round
        What happened.
    warnings : list of str
        What a user should know.
    extra : dict
        What this method alone has to tell.
    seconds : float
        That it took.
    traffic : Traffic or None
        Messages and bytes; None of a run of a version that did not count.
    """

    options: FitOptions
    schema: Schema
    models: Any  # ClientModels; each method knows its own kind
    scores: list[Any]
    per_client: dict[str, Tensor] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    traffic: Traffic | None = None

    @property
    def metric(self) -> str:
        """What scores count."""
        found: str = self.models.metric
        return found

    def __getattr__(self, name: str) -> Any:
        """Find what stood here in earlier versions, with a warning."""
        if name in _IN_MODELS:
            where, found = f"models.{name}", getattr(self.models, name, None)
        elif name in ("personal", "mixtures"):
            where, found = "models", self.models
        elif name in _IN_EXTRA:
            where, found = f"extra['{name}']", self.extra.get(name)
        else:
            raise AttributeError(f"what was fitted has no attribute '{name}'")
        warnings.warn(f"Fitted.{name} is now Fitted.{where}", DeprecationWarning, stacklevel=2)
        return found


@dataclass(frozen=True)
class Family:
    """How methods of one kind are checked, trained and stored; what they are called and take is in `coterie.registry`.

    Attributes
    ----------
    models : type
        Of what they leave behind.
    check : callable
        Refuses what cannot work, before anything is written.
    train : callable
        Fits, and measures.
    score : type
        Of their scores.
    """

    models: type[Any]
    check: Callable[[Clients, FitOptions, Given], None]
    train: Callable[[Session, Clients, Given], Fitted]
    score: type[Score] = Score
