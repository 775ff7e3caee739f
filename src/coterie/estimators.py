# SPDX-License-Identifier: Apache-2.0
"""The scikit-learn face: constructors store parameters, `fit` learns, results end in an underscore."""

import warnings
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from torch import Tensor, nn

from coterie.config import FitOptions, options
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.readers import from_arrays
from coterie.data.schema import Schema
from coterie.data.values import name_of
from coterie.errors import DataError
from coterie.evaluate import Placed
from coterie.fitting import Fitted, Watch, fit, measured_models, placed
from coterie.local import outputs
from coterie.models import Model
from coterie.runs import Loaded, load_run

__all__ = ["IFCA", "FedAvg", "Federated", "load"]


class Federated(BaseEstimator):  # type: ignore[misc]
    """What all estimators share: fitting, placing clients, predicting, scoring."""

    model: nn.Module | Model | None
    random_state: int

    def fit(self, clients: Any, y: Any = None, groups: Any = None, *, watch: Watch | None = None) -> Self:
        """Fit to clients.

        Parameters
        ----------
        clients : Clients or array
            From `coterie.read`, or features [N, ...] together with y [N] and groups [N] (the client of each row).
        watch : callable, optional
            Told of every round.
        """
        data = _as_clients(clients, y, groups, test_size=0.0, seed=self.random_state)
        self._keep(fit(data, self._options(), module=self.model, start=self._start(), watch=watch))
        return self

    def predict(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Predict every row: a class name or a number, in the order of the rows given.

        A client that was there in training is served by its own model; another is placed by its labelled rows, so it
        needs targets. Of a `Clients`, the test rows (or else the training rows) are predicted, client after client in the
        order of their names.
        """
        self._check_fitted()
        rows = _rows(clients, None, groups, self.schema_)
        made = self.predict_stored(rows, self.labels_of(rows))
        if isinstance(clients, Clients | Ragged):
            return made[np.argsort(rows.owners, kind="stable")]
        out = np.empty_like(made)
        out[rows.order_of(np.zeros(len(made), dtype=int) if groups is None else groups)] = made
        return out

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Placed:
        """Place clients, old or new, by the loss on their labelled rows."""
        self._check_fitted()
        return placed(self.model_, self.theta_, self._prepared(_rows(clients, y, groups, self.schema_)))

    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Accuracy, or R^2, over all rows; known clients are served by their own model, others placed by these rows."""
        self._check_fitted()
        rows = self._prepared(_rows(clients, y, groups, self.schema_))
        measured = measured_models(self.model_, self.theta_, self._labels_of(rows), rows)
        if self.model_.loss == "cross_entropy":
            return measured.mean_right
        total = torch.cat([block.target[block.real] for block in rows.blocks()]).double()
        return 1.0 - measured.mean_right / max(float(total.var(correction=0)), 1e-300)

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
            return np.asarray(np.asarray(self.schema_.classes)[out.argmax(-1).numpy()])
        return np.asarray(self.scaling_.back(out.squeeze(-1)).double())

    # -- inside -------------------------------------------------------------------------------------------------------
    def _options(self) -> FitOptions:
        raise AssertionError("every estimator says what it fits")  # pragma: no cover

    def _start(self) -> Tensor | None:
        return None

    def _keep(self, fitted: Fitted) -> None:
        self.fitted_ = fitted
        self.model_, self.scaling_, self.schema_, self.theta_ = (
            fitted.model,
            fitted.scaling,
            fitted.schema,
            fitted.theta,
        )
        self.client_names_, self.labels_ = fitted.names, fitted.placed.label.numpy()
        self.margins_, self.certain_ = fitted.placed.margin.numpy(), fitted.placed.certain.numpy()
        self.history_ = fitted.rounds
        self.scores_ = {score.method: score for score in fitted.scores}
        self._known = dict(zip(fitted.names.tolist(), self.labels_.tolist(), strict=True))
        for said in fitted.warnings:
            if "ended empty" in said:
                warnings.warn(said, ConvergenceWarning, stacklevel=3)

    def _check_fitted(self) -> None:
        if not hasattr(self, "theta_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted: call fit first")

    def _prepared(self, rows: Ragged) -> Ragged:
        if rows.shape != tuple(self.scaling_.mean.shape):
            raise DataError(
                f"rows have shape {rows.shape}, training rows had {tuple(self.scaling_.mean.shape)}",
                "give the same features as in training",
            )
        return rows.changed(self.scaling_.features, self.scaling_.target).to(self.model_.dtype)

    def _labels_of(self, prepared: Ragged) -> Tensor:
        known = torch.tensor([self._known.get(str(name), -1) for name in prepared.names])
        if len(self.theta_) == 1:
            return torch.zeros_like(known)
        strangers = [str(name) for name, label in zip(prepared.names, known, strict=True) if label < 0]
        if strangers and prepared.y is None:
            raise DataError(
                f"client '{strangers[0]}' was not there in training and has no targets to place it by",
                "place new clients with labelled rows first: `coterie assign`",
            )
        if strangers:
            known = torch.where(known < 0, placed(self.model_, self.theta_, prepared).label, known)
        return known


class IFCA(Federated):
    """Clients fall into groups: find them, and train a model for each (paper 004).

    Parameters
    ----------
    n_clusters : int
        Number of groups.
    model : nn.Module or Model, optional
        What is trained; linear (or softmax) regression by default, with `hidden` layers a network.
    init : {"spread", "random", "balanced", "warm"}
        Where models begin; "warm" begins at `start`.
    n_init : int
        Starts that are advanced in lockstep; the best on held-out rows wins and is fitted on all rows.
    rounds, local_steps, step_size, ... :
        See `coterie.config`; `step_size=None` chooses a safe one for linear models.
    random_state : int
        Seed.

    Attributes
    ----------
    labels_ : ndarray
        [M] cluster of each client, in the order of `client_names_`.
    margins_, certain_ : ndarray
        [M] loss margin to the runner-up, and whether it is beyond noise.
    theta_ : Tensor
        [K, P] the models.
    history_ : list of Round
        What happened.
    scores_ : dict
        How the method and its baselines do.
    """

    def __init__(
        self,
        n_clusters: int = 2,
        *,
        model: nn.Module | Model | None = None,
        hidden: tuple[int, ...] = (),
        l2: float = 0.0,
        averaging: Literal["model", "gradient"] = "model",
        init: Literal["random", "balanced", "spread", "warm"] = "spread",
        start: Tensor | None = None,
        n_init: int = 1,
        rounds: int = 100,
        step_size: float | None = None,
        local_steps: int = 10,
        epochs: int | None = None,
        batch_size: int | None = None,
        momentum: float = 0.0,
        decay: float = 1.0,
        participation: float = 1.0,
        weighting: Literal["clients", "rows"] = "clients",
        shared_layers: tuple[str, ...] = (),
        soft: bool = False,
        patience: int = 5,
        tol: float = 0.0,
        standardise: bool = True,
        baselines: bool = False,
        random_state: int = 0,
    ) -> None:
        self.n_clusters = n_clusters
        self.model = model
        self.hidden = hidden
        self.l2 = l2
        self.averaging = averaging
        self.init = init
        self.start = start
        self.n_init = n_init
        self.rounds = rounds
        self.step_size = step_size
        self.local_steps = local_steps
        self.epochs = epochs
        self.batch_size = batch_size
        self.momentum = momentum
        self.decay = decay
        self.participation = participation
        self.weighting = weighting
        self.shared_layers = shared_layers
        self.soft = soft
        self.patience = patience
        self.tol = tol
        self.standardise = standardise
        self.baselines = baselines
        self.random_state = random_state

    def _options(self) -> FitOptions:
        own = ("n_clusters", "averaging", "init", "n_init", "soft", "shared_layers", "patience")
        return _options_of(self, "ifca", clusters={name: getattr(self, name) for name in own})

    def _start(self) -> Tensor | None:
        return self.start


class FedAvg(Federated):
    """One model for all clients; with `proximal` > 0 this is FedProx.

    Parameters
    ----------
    model, hidden, l2, rounds, step_size, ... :
        As for `IFCA`.
    proximal : float
        mu of FedProx.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Model | None = None,
        hidden: tuple[int, ...] = (),
        l2: float = 0.0,
        rounds: int = 100,
        step_size: float | None = None,
        local_steps: int = 10,
        epochs: int | None = None,
        batch_size: int | None = None,
        momentum: float = 0.0,
        proximal: float = 0.0,
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
        self.l2 = l2
        self.rounds = rounds
        self.step_size = step_size
        self.local_steps = local_steps
        self.epochs = epochs
        self.batch_size = batch_size
        self.momentum = momentum
        self.proximal = proximal
        self.decay = decay
        self.participation = participation
        self.weighting = weighting
        self.tol = tol
        self.standardise = standardise
        self.baselines = baselines
        self.random_state = random_state

    def _options(self) -> FitOptions:
        return _options_of(self, "fedavg", training={"proximal": self.proximal})


def load(folder: str | Path, *, model: nn.Module | Model | None = None) -> Federated:
    """Load a finished run as a fitted estimator.

    Parameters
    ----------
    folder : str or Path
        What `coterie fit --out` wrote.
    model : nn.Module, optional
        The network that was trained, when it was your own.
    """
    run = load_run(Path(folder), module=model)
    t, c, o = run.options.training, run.options.clusters, run.options
    common: dict[str, Any] = {
        "model": model, "hidden": o.model.hidden, "l2": o.model.l2, "rounds": t.rounds, "step_size": t.step_size,
        "local_steps": t.local_steps, "random_state": o.seed,
    }  # fmt: skip
    made: Federated = IFCA(c.n_clusters, **common) if o.method == "ifca" else FedAvg(**common)
    _restore(made, run)
    return made


def _restore(estimator: Federated, run: Loaded) -> None:
    estimator.model_, estimator.scaling_, estimator.schema_ = run.model, run.scaling, run.schema
    estimator.theta_ = run.theta
    estimator._known = run.labels
    estimator.client_names_ = np.asarray(list(run.labels))
    estimator.labels_ = np.asarray(list(run.labels.values()))


def _options_of(estimator: Any, method: str, **more: dict[str, Any]) -> FitOptions:
    training = {
        name: getattr(estimator, name)
        for name in (
            "rounds", "step_size", "local_steps", "epochs", "batch_size", "momentum", "decay", "participation",
            "weighting", "tol",
        )
    }  # fmt: skip
    tree: dict[str, Any] = {
        "method": method, "seed": estimator.random_state, "baselines": estimator.baselines,
        "data": {"standardise": estimator.standardise}, "model": {"hidden": estimator.hidden, "l2": estimator.l2},
        "training": training | more.pop("training", {}), **more,
    }  # fmt: skip
    return options(tree)


def _as_clients(data: Any, y: Any, groups: Any, *, test_size: float, seed: int) -> Clients:
    if isinstance(data, Clients):
        return data
    if groups is None:
        raise DataError("fit needs to know the client of each row", "pass groups=, or read a file with coterie.read")
    return from_arrays(data, y, groups, test_size=test_size, seed=seed)


def _rows(data: Any, y: Any, groups: Any, schema: Schema) -> Ragged:
    """Rows of known columns: as they are, the held-out part of a `Clients`, or arrays."""
    if isinstance(data, Ragged):
        return data
    if isinstance(data, Clients):
        return data.train if data.test is None else data.test
    x = torch.as_tensor(np.asarray(data))
    x = x if x.is_floating_point() else x.to(torch.float32)
    names = np.zeros(len(x), dtype=int) if groups is None else np.asarray(groups)
    if len(names) != len(x) or (y is not None and len(y) != len(x)):
        raise DataError(f"there are {len(x)} rows, but not as many groups or targets", "give one of each per row")
    return Ragged.from_groups(x, None if y is None else _targets(np.asarray(y), schema), names)


def _targets(y: np.ndarray, schema: Schema) -> Tensor:
    if schema.task != "classification":
        return torch.as_tensor(y).to(torch.float64)
    number = {name: i for i, name in enumerate(schema.classes)}
    names = [name_of(value) for value in y.tolist()]
    strange = sorted(set(names) - set(number))
    if strange:
        raise DataError(f"class '{strange[0]}' was not there in training", f"training had {', '.join(schema.classes)}")
    return torch.tensor([number[name] for name in names])
