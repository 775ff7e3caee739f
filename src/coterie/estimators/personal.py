# SPDX-License-Identifier: Apache-2.0
"""Estimators of personal models: what all share, and what is each client's own."""

from dataclasses import field
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.estimators.base import OfOutcomes, Supervised, estimator
from coterie.estimators.rows import labelled
from coterie.evaluate import Measured
from coterie.methods.base import Fitted
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

    doubts = ("diverged", "training ended with")

    personal_: Personal = field(init=False)

    def adopt(self, clients: Any, y: Any = None, groups: Any = None) -> Self:
        """Add new clients: they fit their personal parameters to these labelled rows, and keep them.

        A known client fits its personal parameters again. Shared parameters do not change.
        """
        self.personal_ = self.personal_.joined(self.assign(clients, y, groups))
        self.client_names_ = self.personal_.names
        return self

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Adopted:
        """Fit personal parameters of clients, old or new, to their labelled rows, without storing them."""
        rows = labelled(self._rows(clients, y, groups))
        return self.personal_.adopt(self.prepared(rows))

    def client_scores(self, clients: Any, y: Any = None, groups: Any = None) -> dict[str, float]:
        """Accuracy, or root mean squared error, of every client that has rows, by name."""
        rows = self.prepared(labelled(self._rows(clients, y, groups)))
        measured = self._measured(rows, self._own(rows))
        right = measured.metric.double()
        if metric_of(self.model_.loss) == "rmse":
            right = right.clamp(min=0).sqrt() * self.scaling_.y_scale
        scores = zip(rows.names.tolist(), right.tolist(), measured.rows.tolist(), strict=True)
        return {name: value for name, value, n in scores if n}

    def parts_of(self, rows: Ragged) -> Tensor:
        """[M, ...] each client's personal part: its own, or fitted to its labelled rows."""
        return self._own(self.prepared(rows))

    # -- inside -------------------------------------------------------------------------------------------------------
    def _know(self, found: Fitted) -> None:
        self.personal_, self.model_, self.theta_ = found.models, found.models.model, found.models.theta
        if "spread" in found.extra:
            self.spread_ = found.extra["spread"]

    def _own(self, prepared: Ragged) -> Tensor:
        own, known = self.personal_.of(prepared.names)
        strangers = np.flatnonzero(~known.numpy())
        if not len(strangers):
            return own
        if prepared.y is None:
            raise DataError(
                f"client '{prepared.names[strangers[0]]}' is new and has no targets",
                "new clients need some labelled rows: give them to `adopt` first",
            )
        own = own.clone()
        own[torch.from_numpy(strangers)] = self.personal_.fitted(prepared.only(strangers))
        return own

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
class FedRep(Trained, FedRepOptions):
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
class LGFedAvg(Trained, SplitOptions):
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
class FedPer(Trained, SplitOptions):
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
class Ditto(Trained, DittoOptions):
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
class Local(Personalised, OfOutcomes, LocalOptions):
    """A linear model for every client alone, by ridge regression.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `FedRep`; ``personal_.own`` [M, P] are the models, for scaled rows.
    """

    method = "local"


@estimator
class RandomEffects(Personalised, OfOutcomes, ShrunkOptions):
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
