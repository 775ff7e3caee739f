# SPDX-License-Identifier: Apache-2.0
"""FedAvg and FedProx as an estimator."""

from typing import ClassVar, Literal

from torch import nn

from coterie.estimators.federated import Federated
from coterie.models import Model

__all__ = ["FedAvg"]


class FedAvg(Federated):
    """One model for all clients; with `proximal` > 0 this is FedProx.

    Parameters
    ----------
    model, hidden, degree, l2, rounds, step_size, ... :
        As for `IFCA`.
    proximal : float
        mu of FedProx.
    exact : bool
        Whether a client's proximal step is solved in closed form: for linear regression.
    """

    method: ClassVar[str] = "fedavg"

    def __init__(
        self,
        *,
        model: nn.Module | Model | None = None,
        hidden: tuple[int, ...] = (),
        degree: int = 1,
        intercept: bool = True,
        l2: float = 0.0,
        rounds: int = 100,
        step_size: float | None = None,
        local_steps: int = 10,
        epochs: int | None = None,
        batch_size: int | None = None,
        momentum: float = 0.0,
        proximal: float = 0.0,
        exact: bool = False,
        decay: float = 1.0,
        participation: float = 1.0,
        weighting: Literal["clients", "rows"] = "rows",
        tol: float = 0.0,
        standardise: bool = True,
        baselines: bool = False,
        random_state: int = 0,
    ) -> None:
        self.model = model
        self.hidden = hidden
        self.degree = degree
        self.intercept = intercept
        self.l2 = l2
        self.rounds = rounds
        self.step_size = step_size
        self.local_steps = local_steps
        self.epochs = epochs
        self.batch_size = batch_size
        self.momentum = momentum
        self.proximal = proximal
        self.exact = exact
        self.decay = decay
        self.participation = participation
        self.weighting = weighting
        self.tol = tol
        self.standardise = standardise
        self.baselines = baselines
        self.random_state = random_state
