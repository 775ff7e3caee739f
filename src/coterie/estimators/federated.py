# SPDX-License-Identifier: Apache-2.0
"""Estimators of K models with labels: IFCA, moment descent, and one model for all."""

from dataclasses import field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from coterie.data.ragged import Ragged
from coterie.estimators.base import Budgeted, OfOutcomes, estimator
from coterie.estimators.rows import labelled
from coterie.estimators.supervised import Supervised
from coterie.evaluate import Measured, Placed
from coterie.local import outputs
from coterie.methods.base import Fitted
from coterie.methods.baselines import measured_models, placed
from coterie.models import Model
from coterie.option_fields import parameters
from coterie.registry import FedAvgOptions, IFCAOptions, MomentDescentOptions

__all__ = ["IFCA", "FedAvg", "Federated", "MixedRegression"]


@parameters
class Federated(Supervised):
    """What estimators of K models with labels share."""

    doubts = ("are empty",)

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Placed:
        """Place clients, old or new, by the loss on their labelled rows; they come in the order of their names."""
        rows = labelled(self._rows(clients, y, groups))
        return placed(self.model_, self.theta_, self.prepared(rows))

    def known_labels(self, names: np.ndarray) -> Tensor:
        """[M] the cluster of each client in training, -1 for one that was not there; all 0 when there is one model."""
        if len(self.theta_) == 1:
            return torch.zeros(len(names), dtype=torch.int64)
        return torch.tensor([self._known.get(str(name), -1) for name in names], dtype=torch.int64)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _know(self, found: Fitted) -> None:
        super()._know(found)
        models = found.models
        self.model_, self.theta_, self.cluster_sizes_ = models.model, models.theta, models.sizes
        if models.placed is not None:
            self.labels_, self.margins_ = models.placed.label.numpy(), models.placed.margin.numpy()
            self.certain_ = models.placed.certain.numpy()
        self._known, self._shares = models.labels, models.shares

    def _rows(self, data: Any, y: Any, groups: Any, *, alone: bool = False) -> Ragged:
        return super()._rows(data, y, groups, alone=hasattr(self, "theta_") and len(self.theta_) == 1)

    def _mixture(self) -> tuple[Tensor, Tensor]:
        return self.theta_, self._shares

    def _known_parts(self, names: np.ndarray) -> tuple[Tensor, Tensor]:
        label = self.known_labels(names)
        return label, label >= 0

    def _fitted(self, prepared: Ragged) -> Tensor:
        return placed(self.model_, self.theta_, prepared).label

    def _outputs(self, prepared: Ragged, own: Tensor) -> Tensor:
        made = [torch.zeros(0, self.model_.n_outputs)]
        for block in prepared.blocks():
            scores = outputs(self.model_, self.theta_[None], block)[0]  # [K, C, N, O]
            made.append(scores[own[block.ids], torch.arange(len(block.ids))][block.real])
        return torch.cat(made[1:] or made)

    def _measured(self, prepared: Ragged, own: Tensor) -> Measured:
        return measured_models(self.model_, self.theta_, own, prepared)


@estimator
class FedAvg(Federated, Budgeted, OfOutcomes, FedAvgOptions):
    """One model for all clients; with `proximal` > 0 this is FedProx.

    Attributes
    ----------
    theta_, history_, scores_, classes_
        As of `IFCA`.
    """

    method = "fedavg"

    model: nn.Module | Model | None = None
    weighting: Literal["clients", "rows"] | None = "rows"


@estimator
class IFCA(Federated, Budgeted, OfOutcomes, IFCAOptions):
    """Find groups of clients, and train a model for each (Ghosh et al., 2020).

    Attributes
    ----------
    labels_ : ndarray
        [M] cluster of each client, in the order of `client_names_`. With `secure`, clients keep it to themselves, and this
        and the next two are not there.
    margins_, certain_ : ndarray
        [M] loss margin to the second-best model, and whether it is more than two standard errors.
    cluster_sizes_ : list of int
        [K] clients of each cluster.
    theta_ : Tensor
        [K, P] the models.
    history_ : list of Round
        What happened.
    scores_ : dict
        How the method and its baselines do.
    classes_ : ndarray
        The classes: values of `y`, or names in a file.
    """

    method = "ifca"

    n_clusters: int | None = field(default=2, kw_only=False)
    model: nn.Module | Model | None = None
    start: Tensor | None = None
    weighting: Literal["clients", "rows"] | None = "clients"


@estimator
class MixedRegression(Federated, MomentDescentOptions):
    """Find groups of clients that follow the same linear regression, from any start (Su et al., 2022).

    Phase 1, moment descent, moves the models of a few clients, the anchors, to those of their groups. Phase 2 assigns all
    clients and refines the models by FedAvg (`local_steps`) or FedProx (`proximal`, `exact`).

    Attributes
    ----------
    labels_, margins_, certain_, theta_, history_, scores_
        As of `IFCA`.
    n_clusters_ : int
        Number of groups that were found.
    anchors_ : ndarray
        [A] names of the anchors.
    anchor_models_ : Tensor
        [A, P] their models after Phase 1.
    spectrum_ : Tensor
        [L] singular values of the moments at the anchors, mean over anchors, in the last iteration. Of a loaded run
        without its state file, this and the two above are not there.
    """

    method = "moment-descent"

    n_clusters: int | None = field(default=None, kw_only=False)
    start: Tensor | None = None
    weighting: Literal["clients", "rows"] | None = "rows"

    def _know(self, found: Fitted) -> None:
        super()._know(found)
        self.n_clusters_, done = len(self.theta_), found.models.descended
        if done is not None:
            self.anchors_, self.anchor_models_, self.spectrum_ = done.anchors, done.theta, done.spectrum
