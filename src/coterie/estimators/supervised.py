# SPDX-License-Identifier: Apache-2.0
"""What estimators share where every client has a model of the target: predicting, and scoring without looking at answers.

Who was there in training is served by its own model. Who was not is served by the population model, or, as far as its rows
have targets, by a model of its own; a row is never predicted by a model that has seen its target for that.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import NotFittedError
from torch import Tensor

from coterie.data.draws import SUPPORT, Share
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError, RunError
from coterie.estimators.base import Estimator
from coterie.estimators.rows import check_shape, in_given_order, labelled
from coterie.evaluate import Measured, measure_mixed_ask
from coterie.local import outputs
from coterie.local.served import mixed_outputs
from coterie.methods.base import Fitted
from coterie.methods.intervals import COVERAGE, How, Intervals, normal_quantile
from coterie.methods.measuring import target_variance
from coterie.methods.session import Session, shown_and_judged
from coterie.models import Model, decided
from coterie.models.ordinal import Ordinal
from coterie.models.outcomes import OUTCOMES, ROWS, explained, measured, metric_of
from coterie.option_fields import parameters

__all__ = ["Served", "Supervised"]

_MEASURED = ("loss", "metric", "rows")


@dataclass(frozen=True)
class Served:
    """What models make of rows."""

    outputs: Tensor  # [N, O] in the order of storage
    own: Tensor  # [M, ...] what makes clients' models; of new ones only where they were shown labelled rows
    known: Tensor  # [M] who was there in training
    fitted: Tensor  # [M] who is new and has a model by its labelled rows; the others have the population's


@parameters
class Supervised(Estimator):
    """What estimators share where every client has a model of the target.

    A kind of models says what makes a client's model, what that makes of rows, and how well it does.
    """

    model_: Model = field(init=False)
    intervals_: Intervals | None = field(init=False)

    def predict(self, clients: Any, groups: Any = None, *, threshold: float | None = None) -> np.ndarray:
        """Predict every row, each client by its own model: a class name or a number, in the order of the rows given.

        A client that was not there in training is served by the population model; where rows have targets, it gets a model
        by these, and each row is predicted without its own target (by a model of the other half of the client's rows). Of a
        `Clients`, the test rows (or else the training rows) are predicted, in the order of `clients.test.y`.

        Parameters
        ----------
        threshold : float, optional
            Of two classes, the probability of the second from which on it is predicted; that of the fit by default.
        """
        rows = self._rows(clients, None, groups)
        made = self.decided(self.served(self.prepared(rows)).outputs, threshold)
        return in_given_order(made, rows, clients)

    def predict_proba(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Probability of every class for every row, in the order of `classes_` and of the rows given.  [N, O]

        Clients are served as by `predict`.
        """
        self._needs(("cross_entropy", "ordinal"), "probabilities are of classes", "call predict")
        rows = self._rows(clients, None, groups)
        made = self.probabilities(self.served(self.prepared(rows)).outputs)
        return in_given_order(made, rows, clients)

    def predict_interval(
        self, clients: Any, groups: Any = None, *, coverage: float = COVERAGE, how: How | None = None
    ) -> np.ndarray:
        """Where the target of every row lies with some probability: lower and upper end, in the order of the rows.  [N, 2]

        Clients are served as by `predict`; new ones have the intervals of the population model, which are wider.

        Parameters
        ----------
        coverage : float
            The probability.
        how : {"conformal", "model"}, optional
            From calibration rows, where the fit has held such rows out (`coverage`), or normal, from training residuals and
            the model's own uncertainty. By default the first where it can be.
        """
        self._needs(("squared",), "intervals are of plain numbers", "call predict, or predict_proba for classes")
        rows = self._rows(clients, None, groups)
        prepared = self.prepared(rows)
        return in_given_order(self.interval(prepared, self.served(prepared), coverage, how), rows, clients)

    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Accuracy, or R^2, over all rows, each client by its own model; of counts and positive numbers, explained deviance.

        One that was not there in training gets a model by half of its rows, which is judged by the other half, and the other
        way round; with a single row it is served by the population model.
        """
        rows = self.prepared(labelled(self._rows(clients, y, groups)))
        if self.model_.loss in OUTCOMES and metric_of(self.model_.loss) == "rmse":
            return explained(self.model_.loss, self.served(rows).outputs, _targets(rows))
        mean = self._all_judged(rows).mean_metric
        if metric_of(self.model_.loss) != "rmse":
            return mean
        return 1.0 - mean / max(target_variance(rows), 1e-300)

    def measures(self, clients: Any, y: Any = None, groups: Any = None) -> dict[str, float]:
        """All that is measured of an outcome over rows, by name, each client by its own model, as of `score`.

        The mean log-likelihood of a row; of counts and positive numbers, root mean squared error and explained deviance; of
        ordered classes, accuracy and ranked probability score; of times, concordance within clients.
        """
        rows, name = self.prepared(labelled(self._rows(clients, y, groups))), self.model_.loss
        if name not in OUTCOMES:
            raise ConfigError("measures are told of outcomes", "use `score`, or fit with outcome=")
        found, metric = self._all_judged(rows), metric_of(name)
        value = found.mean_metric**0.5 if metric == "rmse" else found.mean_metric
        likelihood = -float((found.loss * found.rows).sum() / found.rows.sum().clamp(min=1))
        more = measured(name, self.served(rows).outputs, _targets(rows)) if name in ROWS else {}
        return {metric: value, "log_likelihood": likelihood, **more}

    def decided(self, outputs: Tensor, threshold: float | None = None) -> np.ndarray:
        """What is predicted where a model says this: a class name or a number.  [N, O] -> [N]"""
        if self.model_.loss in OUTCOMES:
            made = OUTCOMES[self.model_.loss].mean(outputs).numpy()
            return np.asarray(self.classes_[made]) if self.schema_.task == "classification" else np.asarray(made)
        if self.model_.loss != "cross_entropy":
            return np.asarray(self.scaling_.back(outputs.squeeze(-1)).double())
        if threshold is not None and (self.model_.n_outputs != 2 or not 0 < threshold < 1):
            raise ConfigError(
                f"threshold is {threshold:g}, and there are {self.model_.n_outputs} classes",
                "give a probability between 0 and 1, of the second of two classes",
            )
        at = decided(outputs, self.model_.threshold if threshold is None else threshold)
        return np.asarray(self.classes_[at.numpy()])

    def probabilities(self, outputs: Tensor) -> np.ndarray:
        """Of every class, where a model says this.  [N, O] -> [N, K]"""
        one = OUTCOMES.get(self.model_.loss)
        return (one.probabilities(outputs) if isinstance(one, Ordinal) else outputs.double().softmax(-1)).numpy()

    def interval(self, prepared: Ragged, found: Served, coverage: float, how: How | None) -> np.ndarray:
        """Lower and upper ends for rows that are served, in the order of storage.  [N, 2]"""
        known = self.intervals_
        if known is None:
            raise RunError("this run is of a version that knew no prediction intervals", "fit again")
        how = how or ("conformal" if known.levels else "model")
        width = known.widths(prepared.names, coverage, how)[torch.from_numpy(prepared.owners)]
        extra = self._variance(prepared, found.known) if how == "model" else None
        if extra is not None:
            width = (width.square() + normal_quantile(coverage) ** 2 * extra).sqrt()
        middle = found.outputs.squeeze(-1).double()
        return np.stack([np.asarray(self.scaling_.back(middle + side * width)) for side in (-1, 1)], 1)

    def knows(self, names: np.ndarray) -> Tensor:
        """[M] which clients were there in training."""
        return self._known_parts(names)[1]

    def prepared(self, rows: Ragged) -> Ragged:
        """Scale rows as in training."""
        check_shape(rows, self.scaling_)
        return rows.scaled(self.scaling_).to(self.model_.dtype)

    def served(self, prepared: Ragged, shown: Ragged | None = None) -> Served:
        """What every row's client makes of it, in the order of storage; `shown` are labelled rows that are not these."""
        own, known = self._known_parts(prepared.names)
        out, fitted = self._outputs(prepared, own), torch.zeros_like(known)
        strangers = np.flatnonzero(~known.numpy())
        if not len(strangers):
            return Served(out, own, known, fitted)
        new, at = prepared.only(strangers), _places(prepared, strangers)
        if shown is None and prepared.y is not None:
            for rows, places, part in self._crossed(new, at):
                out[places] = self._outputs_of(rows, part)
            fitted[torch.from_numpy(strangers)] = new.counts > 1
            return Served(out, own, known, fitted)
        out[at] = self._population(new)
        if shown is None:
            return Served(out, own, known, fitted)
        which = strangers[np.isin(prepared.names[strangers], shown.names)]
        if len(which):
            part = self._fitted(shown.only(np.flatnonzero(np.isin(shown.names, prepared.names[which]))))
            out[_places(prepared, which)] = self._outputs(prepared.only(which), part)
            own, numbers = own.clone(), torch.from_numpy(which)
            own[numbers], fitted[numbers] = part.to(own.dtype), True
        return Served(out, own, known, fitted)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _know(self, found: Fitted) -> None:
        self.intervals_ = found.extra.get("intervals")

    def _needs(self, losses: tuple[str, ...], what: str, hint: str) -> None:
        if not hasattr(self, "schema_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted: call fit first")
        if self.model_.loss not in losses:
            has = {"cross_entropy": "has classes", "squared": "has none"}.get(
                self.model_.loss, f"is {self.model_.loss}"
            )
            raise ConfigError(f"{what}, and the target {has}", hint)

    def _all_judged(self, prepared: Ragged) -> Measured:
        parts = [measured for _, measured in self._judged(prepared)]
        return Measured(*(torch.cat([getattr(part, name) for part in parts]) for name in _MEASURED))

    def _judged(self, prepared: Ragged) -> list[tuple[Ragged, Measured]]:
        """How well clients are served, on rows that they were not fitted to."""
        own, known = self._known_parts(prepared.names)
        if bool(known.all()):
            return [(prepared, self._measured(prepared, own))]
        old, strangers = np.flatnonzero(known.numpy()), np.flatnonzero(~known.numpy())
        parts = [(prepared.only(old), own[known])] if len(old) else []
        new = prepared.only(strangers)
        crossed = [(rows, part) for rows, _, part in self._crossed(new, torch.arange(new.layout.n_rows))]
        return [(rows, self._measured_of(rows, part)) for rows, part in [*parts, *crossed]]

    def _measured_crossed(self, prepared: Ragged) -> Measured:
        """How well clients would be served if all were new, in the order of their names."""
        sums = torch.zeros(prepared.n_clients, 3, dtype=torch.float64)
        for rows, _, part in self._crossed(prepared, torch.arange(prepared.layout.n_rows)):
            found = self._measured_of(rows, part)
            n = found.rows.double()
            at = torch.from_numpy(np.searchsorted(prepared.names, rows.names))
            sums.index_add_(0, at, torch.stack([found.loss.double() * n, found.metric.double() * n, n], 1))
        loss, metric, n = sums.unbind(1)
        return Measured(loss / n.clamp(min=1), metric / n.clamp(min=1), n.long())

    def _crossed(self, new: Ragged, places: Tensor) -> list[tuple[Ragged, Tensor, Tensor | None]]:
        """Halves of clients' rows, where they lie, and what makes their clients' models, of the other half.

        Clients with a single row have nothing that does.
        """
        parts: list[tuple[Ragged, Tensor, Tensor | None]] = []
        one, several = (np.flatnonzero(few) for few in (new.layout.counts < 2, new.layout.counts >= 2))
        if len(one):
            parts.append((new.only(one), places[_places(new, one)], None))
        if not len(several):
            return parts
        rows, at = new.only(several), places[_places(new, several)]
        halves = self._halves(rows)
        for half, other, place in zip(halves, reversed(halves), self._halves(rows.numbered()), strict=True):
            assert isinstance(place.y, Tensor)
            parts.append((half, at[place.y], self._fitted(other)))
        return parts

    def _halves(self, rows: Ragged) -> tuple[Ragged, Ragged]:
        found = shown_and_judged(rows, Share(SUPPORT), seed=self.random_state, purpose="support")
        assert found is not None
        return found

    def _outputs_of(self, prepared: Ragged, own: Tensor | None) -> Tensor:
        return self._population(prepared) if own is None else self._outputs(prepared, own)

    def _measured_of(self, prepared: Ragged, own: Tensor | None) -> Measured:
        if own is not None:
            return self._measured(prepared, own)
        theta, share = self._mixture()
        return Measured(**Session().ask(prepared, measure_mixed_ask(self.model_, theta, share)).values)

    def _population(self, prepared: Ragged) -> Tensor:
        """What the population model makes of rows, in the order of storage.  [N, O]"""
        theta, share = self._mixture()
        made = [torch.zeros(0, self.model_.n_outputs, dtype=self.model_.dtype)]
        for block in prepared.blocks():
            scores = outputs(self.model_, theta[None], block)  # [1, K, C, N, O]
            made.append(mixed_outputs(self.model_, scores, share[None])[0][block.real])
        return torch.cat(made)

    def _variance(self, prepared: Ragged, known: Tensor) -> Tensor | None:
        """How uncertain models themselves are about rows, in the order of storage; None where that is not known.  [N]"""
        return None

    @abstractmethod
    def _mixture(self) -> tuple[Tensor, Tensor]:
        """Models [K, P] and their shares [K] in what serves a client of which nothing is known."""

    @abstractmethod
    def _known_parts(self, names: np.ndarray) -> tuple[Tensor, Tensor]:
        """[M, ...] what makes the model of each client of the training, and [M] who was there; others have anything."""

    @abstractmethod
    def _fitted(self, prepared: Ragged) -> Tensor:
        """[M, ...] what makes the model of each client, from its labelled rows."""

    @abstractmethod
    def _outputs(self, prepared: Ragged, own: Tensor) -> Tensor:
        """What every row's client makes of it, in the order of storage.  [N, O]"""

    @abstractmethod
    def _measured(self, prepared: Ragged, own: Tensor) -> Measured:
        """How well clients are served."""


def _places(rows: Ragged, ids: np.ndarray) -> Tensor:
    """Where some clients' rows lie in the order of storage, in the order in which `only` has them."""
    found = rows.numbered().only(ids).y
    assert isinstance(found, Tensor)
    return found


def _targets(rows: Ragged) -> Tensor:
    """[N] in the order of storage."""
    return torch.cat([block.target[block.real] for block in rows.blocks()])
