# SPDX-License-Identifier: Apache-2.0
"""What all estimators share: scikit-learn's manners around fitting, placing clients, predicting and scoring."""

import warnings
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from torch import Tensor, nn

from coterie.config import FitOptions
from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.estimators.parameters import options_of
from coterie.estimators.rows import as_clients, as_rows, check_shape, classes_of, in_given_order, labelled
from coterie.evaluate import Placed
from coterie.local import outputs
from coterie.methods.base import Fitted
from coterie.methods.baselines import measured_models, placed, target_variance
from coterie.methods.cluster_models import ClusterModels, Descended
from coterie.methods.fit import fit
from coterie.methods.session import Watch
from coterie.models import Model

__all__ = ["Federated"]


class Federated(BaseEstimator):  # type: ignore[misc]
    """What all estimators share: fitting, placing clients, predicting, scoring."""

    method: ClassVar[str]  # what it is called in the options
    model: nn.Module | Model | None = None
    start: Tensor | None = None

    def fit(self, clients: Any, y: Any = None, groups: Any = None, *, watch: Watch | None = None) -> Self:
        """Fit to clients.

        Parameters
        ----------
        clients : Clients or array
            From `coterie.read`, or features [N, ...] together with y [N] and groups [N] (the client of each row).
        watch : callable, optional
            Told of every round.
        """
        data = as_clients(clients, y, groups)
        start = None if self.start is None else torch.as_tensor(self.start)
        self._keep(fit(data, self._options(), module=self.model, start=start, watch=watch))
        self.classes_ = classes_of(self.schema_, y)
        return self

    def predict(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Predict every row: a class name or a number, in the order of the rows given.

        A client that was there in training is served by its own model; another is placed by its labelled rows, so it
        needs targets. Of a `Clients`, the test rows (or else the training rows) are predicted, client after client in the
        order of their names.
        """
        self._check_fitted()
        rows = self._rows(clients, None, groups)
        return in_given_order(self.predict_stored(rows, self.labels_of(rows)), rows, clients, groups)

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Placed:
        """Place clients, old or new, by the loss on their labelled rows; they come in the order of their names."""
        self._check_fitted()
        return placed(self.model_, self.theta_, self._prepared(labelled(self._rows(clients, y, groups))))

    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Accuracy, or R^2, over all rows; known clients are served by their own model, others placed by these rows."""
        self._check_fitted()
        rows = self._prepared(labelled(self._rows(clients, y, groups)))
        measured = measured_models(self.model_, self.theta_, self._labels_of(rows), rows)
        if self.model_.loss == "cross_entropy":
            return measured.mean_right
        return 1.0 - measured.mean_right / max(target_variance(rows), 1e-300)

    def known_labels(self, names: np.ndarray) -> Tensor:
        """[M] the cluster of each client in training, -1 for one that was not there; all 0 when there is one model."""
        if len(self.theta_) == 1:
            return torch.zeros(len(names), dtype=torch.int64)
        return torch.tensor([self._known.get(str(name), -1) for name in names], dtype=torch.int64)

    def labels_of(self, rows: Ragged) -> Tensor:
        """[M] each client's cluster: known from training, or found from its labelled rows."""
        return self._labels_of(self._prepared(rows))

    def predict_stored(self, rows: Ragged, label: Tensor) -> np.ndarray:
        """Predict rows in the order of storage, each client by model number `label` [M]."""
        prepared = self._prepared(rows)
        parts = []
        for block in prepared.blocks():
            scores = outputs(self.model_, self.theta_[None], block)[0]  # [K, C, N, O]
            own = scores[label[block.ids], torch.arange(len(block.ids))]  # [C, N, O]
            parts.append(own[block.real])
        out = torch.cat(parts) if parts else torch.zeros(0, self.model_.n_outputs)
        if self.model_.loss == "cross_entropy":
            return np.asarray(self.classes_[out.argmax(-1).numpy()])
        return np.asarray(self.scaling_.back(out.squeeze(-1)).double())

    # -- inside -------------------------------------------------------------------------------------------------------
    def _options(self) -> FitOptions:
        return options_of(self, self.method)

    def _keep(self, fitted: Fitted) -> None:
        self.fitted_, self.history_ = fitted, fitted.rounds
        self._know(fitted)
        for said in fitted.warnings:
            if "are empty" in said:
                warnings.warn(said, ConvergenceWarning, stacklevel=3)

    def _restore(self, run: Fitted) -> None:
        """Become what a finished run has fitted."""
        self._know(run)
        self.classes_ = classes_of(run.schema, None)

    def _know(self, fitted: Fitted) -> None:
        found: ClusterModels = fitted.models
        self.model_, self.scaling_, self.schema_ = found.model, found.scaling, fitted.schema
        self.theta_, self.client_names_, self.labels_ = found.theta, found.names, found.placed.label.numpy()
        self.margins_, self.certain_ = found.placed.margin.numpy(), found.placed.certain.numpy()
        self._known = found.labels
        self.scores_ = {score.method: score for score in fitted.scores}
        self._know_descent(found.descended)

    def _know_descent(self, found: Descended | None) -> None:
        """Take note of Phase 1, where a method has one."""

    def _check_fitted(self) -> None:
        if not hasattr(self, "theta_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted: call fit first")

    def _rows(self, data: Any, y: Any, groups: Any) -> Ragged:
        return as_rows(data, y, groups, self.schema_, alone=len(self.theta_) == 1)

    def _prepared(self, rows: Ragged) -> Ragged:
        check_shape(rows, self.scaling_)
        return rows.scaled(self.scaling_).to(self.model_.dtype)

    def _labels_of(self, prepared: Ragged) -> Tensor:
        known = self.known_labels(prepared.names)
        strangers = prepared.names[(known < 0).numpy()]
        if not len(strangers):
            return known
        if prepared.y is None:
            raise DataError(
                f"client '{strangers[0]}' is new and has no targets",
                "new clients need some labelled rows: use `assign`",
            )
        return torch.where(known < 0, placed(self.model_, self.theta_, prepared).label, known)
