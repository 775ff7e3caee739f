# SPDX-License-Identifier: Apache-2.0
"""What estimators of personal models share: fitting, taking clients in, predicting and scoring."""

import warnings
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.config import FitOptions
from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.errors import DataError
from coterie.estimators.parameters import options_of
from coterie.estimators.rows import as_clients, as_rows, check_shape, classes_of, in_given_order, labelled
from coterie.evaluate import Measured
from coterie.methods.base import Fitted
from coterie.methods.baselines import target_variance
from coterie.methods.fit import fit
from coterie.methods.personal.model import Adopted, Personal
from coterie.methods.session import Watch
from coterie.models import Model
from coterie.participation import Clock

__all__ = ["Personalised"]


class Personalised(BaseEstimator):  # type: ignore[misc]
    """What estimators of personal models share."""

    method: ClassVar[str]  # what it is called in the options
    model: nn.Module | Model | None
    clock: str | Clock | None
    personal_: Personal
    scaling_: Scaling
    schema_: Schema

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
        clock = None if isinstance(self.clock, str) else self.clock
        fitted = fit(data, self._options(), module=self.model, clock=clock, watch=watch)
        self.fitted_, self.history_, self.spread_ = fitted, fitted.rounds, fitted.extra["spread"]
        self._know(fitted)
        self.classes_ = classes_of(self.schema_, y)
        for said in fitted.warnings:
            if "diverged" in said or "training ended with" in said:
                warnings.warn(said, ConvergenceWarning, stacklevel=2)
        return self

    def adopt(self, clients: Any, y: Any = None, groups: Any = None) -> Self:
        """Take clients in that were not there in training: they fit their personal part to these labelled rows, and keep it.

        A client that has one gets a new one. What all share stays as it is.
        """
        self.personal_ = self.personal_.joined(self.assign(clients, y, groups))
        self.client_names_ = self.personal_.names
        return self

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Adopted:
        """Fit personal parts of clients, old or new, to their labelled rows, without keeping them."""
        self._check_fitted()
        return self.personal_.adopt(self.prepared(labelled(self._rows(clients, y, groups))))

    def predict(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Predict every row, each client by its own model: a class name or a number, in the order of the rows given.

        A client that is not known fits its personal part to its labelled rows, so it needs targets, or `adopt` first. Of a
        `Clients`, the test rows (or else the training rows) are predicted, client after client in the order of their
        names.
        """
        self._check_fitted()
        rows = self._rows(clients, None, groups)
        return in_given_order(self.predict_stored(rows, self.parts_of(rows)), rows, clients, groups)

    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Accuracy, or R^2, over all rows, each client by its own model; one that is not known is fitted to these rows."""
        self._check_fitted()
        rows = self.prepared(labelled(self._rows(clients, y, groups)))
        measured = self._measured(rows)
        if self.personal_.model.loss == "cross_entropy":
            return measured.mean_right
        return 1.0 - measured.mean_right / max(target_variance(rows), 1e-300)

    def client_scores(self, clients: Any, y: Any = None, groups: Any = None) -> dict[str, float]:
        """Accuracy, or root mean squared error, of every client that has rows, by name."""
        self._check_fitted()
        rows = self.prepared(labelled(self._rows(clients, y, groups)))
        measured = self._measured(rows)
        right = measured.right.double()
        if self.personal_.model.loss != "cross_entropy":
            right = right.clamp(min=0).sqrt() * self.scaling_.y_scale
        scores = zip(rows.names.tolist(), right.tolist(), measured.rows.tolist(), strict=True)
        return {name: value for name, value, n in scores if n}

    def parts_of(self, rows: Ragged) -> Tensor:
        """[M, ...] each client's personal part: its own, or fitted to its labelled rows."""
        return self._parts_of(self.prepared(rows))

    def predict_stored(self, rows: Ragged, own: Tensor) -> np.ndarray:
        """Predict rows in the order of storage, each client with its personal part `own` [M, ...]."""
        out = self.personal_.outputs(self.prepared(rows), own)
        if self.personal_.model.loss == "cross_entropy":
            return np.asarray(self.classes_[out.argmax(-1).numpy()])
        return np.asarray(self.scaling_.back(out.squeeze(-1)).double())

    def prepared(self, rows: Ragged) -> Ragged:
        """Scale rows as in training."""
        check_shape(rows, self.scaling_)
        return rows.scaled(self.scaling_).to(self.personal_.model.dtype)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _options(self) -> FitOptions:
        said = self.clock if isinstance(self.clock, str) else None
        return options_of(self, self.method, clock=said)  # a clock of one's own has no word

    def _restore(self, run: Fitted) -> None:
        """Become what a finished run has fitted."""
        self._know(run)
        self.classes_ = classes_of(run.schema, None)

    def _know(self, fitted: Fitted) -> None:
        found: Personal = fitted.models
        self.personal_, self.scaling_, self.schema_ = found, found.scaling, fitted.schema
        self.client_names_, self.theta_ = found.names, found.theta
        self.scores_ = {score.method: score for score in fitted.scores}

    def _check_fitted(self) -> None:
        if not hasattr(self, "personal_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted: call fit first")

    def _rows(self, data: Any, y: Any, groups: Any) -> Ragged:
        return as_rows(data, y, groups, self.schema_, alone=False)

    def _measured(self, prepared: Ragged) -> Measured:
        return self.personal_.measured(prepared, self._parts_of(prepared))

    def _parts_of(self, prepared: Ragged) -> Tensor:
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
