# SPDX-License-Identifier: Apache-2.0
"""Estimators of personal models: what all share, and what is each client's own."""

from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from coterie.data.ragged import Ragged
from coterie.errors import DataError, RunError
from coterie.estimators.base import Budgeted, OfOutcomes, estimator
from coterie.estimators.rows import labelled
from coterie.estimators.supervised import Supervised
from coterie.evaluate import Measured
from coterie.methods.base import Fitted
from coterie.methods.effects import EffectModels
from coterie.methods.personal.model import Adopted, Personal
from coterie.models import Model
from coterie.models.outcomes import metric_of
from coterie.option_fields import Rounds, Stages, parameters
from coterie.participation import Clock
from coterie.registry import (
    DittoOptions,
    FedRepOptions,
    LocalOptions,
    MAMLOptions,
    RepresentationOptions,
    ShrunkOptions,
    SplitOptions,
)

__all__ = [
    "MAML",
    "Ditto",
    "FedPer",
    "FedRep",
    "LGFedAvg",
    "Local",
    "LowRank",
    "Personalised",
    "RandomEffects",
    "Trained",
]


@parameters
class Personalised(Supervised):
    """What estimators of personal models share."""

    doubts: ClassVar[tuple[str, ...]] = ("diverged", "training ended with")

    personal_: Personal = field(init=False)

    def adopt(self, clients: Any, y: Any = None, groups: Any = None) -> Self:
        """Add new clients: they fit their personal parameters to these labelled rows, and keep them.

        A known client fits its personal parameters again. Shared parameters do not change.
        """
        self.personal_ = self.personal_.joined(self.assign(clients, y, groups))
        self.client_names_ = self.personal_.names
        return self

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Adopted:
        """Fit personal parameters of clients, old or new, to their labelled rows, without storing them.

        How well that serves them is measured on each half of their rows, with parameters of the other half.
        """
        rows = self.prepared(labelled(self._rows(clients, y, groups)))
        return Adopted(rows.names, self._fitted(rows), self._measured_crossed(rows), self.knows(rows.names))

    def client_scores(self, clients: Any, y: Any = None, groups: Any = None) -> dict[str, float]:
        """Accuracy, or root mean squared error, of every client that has rows; new ones are judged as by `score`."""
        rows = self.prepared(labelled(self._rows(clients, y, groups)))
        sums: dict[str, list[float]] = {}
        for part, measured in self._judged(rows):
            for name, value, n in zip(
                part.names.tolist(), measured.metric.tolist(), measured.rows.tolist(), strict=True
            ):
                found = sums.setdefault(name, [0.0, 0.0])
                found[0], found[1] = found[0] + value * n, found[1] + n
        right = {name: value / n for name, (value, n) in sums.items() if n}
        if metric_of(self.model_.loss) != "rmse":
            return right
        scale = float(self.scaling_.y_scale)
        return {name: max(value, 0.0) ** 0.5 * scale for name, value in right.items()}

    # -- inside -------------------------------------------------------------------------------------------------------
    def _know(self, found: Fitted) -> None:
        super()._know(found)
        self.personal_, self.model_, self.theta_ = found.models, found.models.model, found.models.theta
        if "spread" in found.extra:
            self.spread_ = found.extra["spread"]

    def _mixture(self) -> tuple[Tensor, Tensor]:
        if not len(self.personal_.names):  # who is new cannot be told here
            raise RunError(
                "personal parameters are stored at the clients",
                "predict there: coterie predict RUN DATA --state FOLDER",
            )
        common = self.personal_.population
        if common is None:
            common = self.personal_.for_all(None)  # of a run of an earlier version, or of parts that stayed on a node
        if common is None:
            raise DataError(
                "the client is new and has no targets, and there is no model for all", "give `adopt` some labelled rows"
            )
        return common[None], torch.ones(1, dtype=torch.float64)

    def _known_parts(self, names: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.personal_.of(names)

    def _fitted(self, prepared: Ragged) -> Tensor:
        return self.personal_.fitted(prepared)

    def _variance(self, prepared: Ragged, known: Tensor) -> Tensor | None:
        return self.personal_.variance(prepared, known) if isinstance(self.personal_, EffectModels) else None

    def _outputs(self, prepared: Ragged, own: Tensor) -> Tensor:
        return self.personal_.outputs(prepared, own)

    def _measured(self, prepared: Ragged, own: Tensor) -> Measured:
        return self.personal_.measured(prepared, own)


@parameters
class Trained(Personalised, Stages, Rounds):
    """What estimators share whose models are trained in rounds."""

    model: nn.Module | Model | None = None
    weighting: Literal["clients", "rows"] | None = "clients"
    clock: str | Clock | None = None  # type: ignore[assignment]  # one's own, too


@estimator
class FedRep(Trained, Budgeted, FedRepOptions):
    """A shared representation, and a personal head for each client (Collins et al., 2021; SRPFL with `stragglers`).

    The head is the last layer, or `layers`.

    Attributes
    ----------
    client_names_ : ndarray
        [M] clients with personal parameters.
    personal_ : Personal
        All models: `theta` (shared) and `own` (personal).
    theta_ : Tensor
        [Q] the representation.
    scores_ : dict
        How the method does, and with baselines "global" and "local".
    spread_ : dict
        How the held-out metric is spread over clients: mean, median, worst and best tenth; not of a loaded run.
    history_ : list of Round
        What happened, by round; `time` is the clock's. Not of a loaded run.
    """

    method = "fedrep"

    hidden: tuple[int, ...] = (64,)


@estimator
class LGFedAvg(Trained, Budgeted, SplitOptions):
    """A personal representation for each client, and shared layers on top of it (Liang et al., 2020).

    The representation is all layers but the last two, or `layers`.

    Attributes
    ----------
    theta_ : Tensor
        [Q] the layers on top.
    client_names_, personal_, scores_, spread_, history_
        As of `FedRep`.
    """

    method = "lg-fedavg"

    hidden: tuple[int, ...] = (64,)


@estimator
class FedPer(Trained, Budgeted, SplitOptions):
    """A shared body and a personal head for each client, trained together (Arivazhagan et al., 2019).

    The head is the last layer, or `layers`.

    Attributes
    ----------
    theta_ : Tensor
        [Q] the body.
    client_names_, personal_, scores_, spread_, history_
        As of `FedRep`.
    """

    method = "fedper"

    hidden: tuple[int, ...] = (64,)


@estimator
class MAML(Trained, MAMLOptions):
    """One model for all, trained to fit each client after a fine-tuning step (Per-FedAvg; Fallah et al., 2020).

    Attributes
    ----------
    theta_ : Tensor
        [P] the common model, which clients fine-tune.
    client_names_, personal_, scores_, spread_, history_
        As of `FedRep`.
    """

    method = "maml"


@estimator
class Ditto(Trained, Budgeted, DittoOptions):
    """A personal model for every client, pulled to a common one that is trained by FedAvg (Li et al., 2021).

    Attributes
    ----------
    theta_ : Tensor
        [P] the common model.
    client_names_, personal_, scores_, spread_, history_
        As of `FedRep`; ``personal_.own`` [M, P] are the models, for scaled rows.
    """

    method = "ditto"


@estimator
class Local(Personalised, Budgeted, OfOutcomes, LocalOptions):
    """A linear model for every client alone, by ridge regression.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `FedRep`; ``personal_.own`` [M, P] are the models, for scaled rows.
    """

    method = "local"


@estimator
class RandomEffects(Personalised, Budgeted, OfOutcomes, ShrunkOptions):
    """Random effects: a linear model for every client, shrunk towards a common one.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `Local`; ``theta_`` [P] is the common model.
    """

    method = "shrunk"


@estimator
class LowRank(Personalised, OfOutcomes, RepresentationOptions):
    """Low-rank random effects: linear models that differ from a common one in a few common directions.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `Local`; ``theta_`` [P] is the common model.
    """

    method = "representation"
