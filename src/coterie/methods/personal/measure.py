# SPDX-License-Identifier: Apache-2.0
"""How well do personal models serve clients? Each is judged with its own stored part, and all of them count.

A model's parameters are in two parts: `theta`, which everybody shares, and the personal part, which is private state of the
client (`personal`, and `visits`: how often the client has trained it). A client that was never visited, or is brand new,
fits its personal part to its own training rows first, with the shared part fixed; then every client is judged on its own
test rows. Where one model is for all, clients may fine-tune it first. All of that happens on copies: measuring leaves the
model, the private state and the rows as they are, bit by bit.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.fine_tuning import fine_tuning
from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.evaluate import EACH, ROWS, Measured, judged, measure_own_ask
from coterie.local import Training, served
from coterie.local.personal import train_part
from coterie.methods.session import Session
from coterie.models import Model, Split, split
from coterie.models.outcomes import metric_of
from coterie.protocol import Ask, Block, Stack, Tensors, answers

__all__ = [
    "Distribution",
    "Fit",
    "PersonalMeasured",
    "distribution",
    "fit_personal_ask",
    "judge_personal_ask",
    "measure_fine_tuned",
    "measure_personal",
    "personal_start",
]

_DECILE = 0.1


@dataclass(frozen=True)
class Fit:
    """How a client that has no personal part gets one.

    Attributes
    ----------
    start : Tensor
        [P - Q] where it begins, such as `personal_start`.
    step_size : float
        Of its training.
    training : Training
        What it does with its rows.
    seed : int
        What minibatches are drawn from.
    """

    start: Tensor
    step_size: float
    training: Training
    seed: int = 0

    def record(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All of it, as tensors and words."""
        return {"start": self.start}, {
            "step_size": self.step_size, "training": asdict(self.training), "seed": self.seed,
        }  # fmt: skip


def personal_start(model: Model, personal: tuple[str, ...], *, seed: int) -> Tensor:
    """The personal part that clients begin with in a run with this seed.  [P - Q]"""
    return split(model, personal).parts(model.initial(1, keys.generator(seed, "start"))[0])[1]


@dataclass(frozen=True)
class PersonalMeasured(Measured):
    """How well its personal model serves each of M clients."""

    fitted: Tensor  # [M] whether the personal part was fitted for this, because the client had none


@dataclass(frozen=True)
class Distribution:
    """How a figure is spread over clients, who count alike however many rows they have.

    Attributes
    ----------
    values : Tensor
        [M] each client's figure; not a number for clients without rows, who do not count.
    mean, median : float
        Over clients.
    worst_decile, best_decile : float
        Mean over the tenth of the clients who fare worst, and best; one client at least.
    """

    values: Tensor
    mean: float
    median: float
    worst_decile: float
    best_decile: float

    def said(self) -> dict[str, float]:
        """Without the clients' own figures."""
        return {name: getattr(self, name) for name in ("mean", "median", "worst_decile", "best_decile")}

    @classmethod
    def of(cls, values: Tensor, rows: Tensor, *, larger_is_better: bool = True) -> "Distribution":
        """Describe clients' figures [M], which rest on so many rows [M]; a model that diverged is the worst there is.

        Raises
        ------
        DataError
            If no client has rows.
        """
        if not bool((rows > 0).any()):
            raise DataError("no client has test rows", "give clients test rows")
        values = torch.where(values.isnan(), -torch.inf if larger_is_better else torch.inf, values.double())
        ranked = values[rows > 0].sort(descending=larger_is_better).values  # the best first
        few = math.ceil(_DECILE * len(ranked))
        return cls(
            torch.where(rows > 0, values, torch.nan),
            float(ranked.mean()),
            float(ranked.quantile(0.5)),
            float(ranked[-few:].mean()),
            float(ranked[:few].mean()),
        )


def distribution(model: Model, measured: Measured) -> Distribution:
    """Tell how accuracy (for numbers: the mean squared error) is spread over clients."""
    return Distribution.of(measured.metric, measured.rows, larger_is_better=metric_of(model.loss) != "rmse")


def measure_personal(
    model: Model,
    theta: Tensor,
    private: Mapping[str, Tensor] | None,
    *,
    personal: tuple[str, ...],
    rows: Ragged,
    train_rows: Ragged,
    fit: Fit,
) -> PersonalMeasured:
    """Judge every client on its rows, with its own stored personal part.

    Parameters
    ----------
    model : Model
        Both parts together.
    theta : Tensor
        [Q] the shared part.
    private : mapping, optional
        The clients' private state, `personal` [M, P - Q] and `visits` [M], such as ``engine.worker.private[run]``. None, or
        empty, for brand-new clients.
    personal : tuple of str
        The personal layers, by the beginnings of their names.
    rows : Ragged
        What clients are judged on.
    train_rows : Ragged
        The same clients' training rows, which those without a personal part fit it to.
    fit : Fit
        How they do that.

    Returns
    -------
    PersonalMeasured
        Loss, accuracy and rows of every client. Nothing that was given has changed.

    Raises
    ------
    DataError
        If rows and private state are not of the same clients.
    """
    parts = split(model, personal)
    _check_same_clients(rows, train_rows)
    kept = _checked(private, rows.n_clients, fit)
    new = kept["visits"] == 0  # [M]
    if bool(new.any()):
        kept = {name: value.clone() for name, value in kept.items()}  # who fits does so in the copy
        Session().ask(train_rows, fit_personal_ask(model, theta, parts, fit, to=new.nonzero()[:, 0]), {0: kept})
    values = Session().ask(rows, judge_personal_ask(model, theta, parts), {0: kept}).values
    return PersonalMeasured(**values, fitted=new)


def measure_fine_tuned(
    model: Model,
    theta: Tensor,
    *,
    rows: Ragged,
    train_rows: Ragged,
    step_size: float,
    training: Training,
    seed: int = 0,
) -> Measured:
    """Judge every client on its rows, after it has fine-tuned a copy of the common model on its training rows.

    Parameters
    ----------
    model : Model
        What was trained.
    theta : Tensor
        [P] the common model, which stays as it is.
    rows, train_rows : Ragged
        What clients are judged on, and the same clients' training rows.
    step_size, training, seed
        How they fine-tune.

    Raises
    ------
    DataError
        If rows are not of the same clients.
    """
    _check_same_clients(rows, train_rows)
    session = Session()
    how: dict[str, Any] = {"step_size": step_size, "training": training, "seed": seed}
    session.run(None, train_rows, [lambda state: fine_tuning(state, model=model, theta=theta, **how)], None, 1)
    return Measured(**session.ask(rows, measure_own_ask(model), session.engine(train_rows).private).values)


def _check_same_clients(rows: Ragged, train_rows: Ragged) -> None:
    if not np.array_equal(rows.names, train_rows.names):
        raise DataError("test rows and training rows belong to different clients", "give both sides of one partition")


def _checked(private: Mapping[str, Tensor] | None, n_clients: int, fit: Fit) -> Tensors:
    """Take what is wanted of the clients' private state; new clients begin at the start."""
    if not private:
        return {"personal": fit.start.expand(n_clients, -1), "visits": torch.zeros(n_clients, dtype=torch.int64)}
    if len(private["visits"]) != n_clients:
        raise DataError(
            f"private state is of {len(private['visits'])} clients and rows are of {n_clients}",
            "give the rows of the clients that were trained; new clients have no private state: None",
        )
    return {name: private[name] for name in ("personal", "visits")}


def fit_personal_ask(model: Model, theta: Tensor, parts: Split, fit: Fit, to: Tensor | None = None) -> Ask:
    """Ask clients that have no personal part to fit one; it stays with them, and they still count as never visited."""
    return Ask(
        fit_personal,
        {
            "model": model,
            "split": parts,
            "theta": theta,
            "step_size": torch.tensor(fit.step_size, dtype=torch.float64),
            "key": keys.key(fit.seed, "fit personal"),
            "training": fit.training,
        },
        fold={},
        to=to,
        fresh={"personal": fit.start, "visits": torch.tensor(0)},
        work=fit.training.work(),
        scratch=model.n_outputs,
    )


def judge_personal_ask(model: Model, theta: Tensor, parts: Split) -> Ask:
    """Ask clients how well their personal models serve them; make a `Measured` of the values."""
    own = torch.zeros(model.n_parameters - len(theta), dtype=theta.dtype)
    return Ask(
        judge_personal,
        {"model": model, "split": parts, "theta": theta},
        {name: Stack() for name in ("loss", "metric", "rows")},
        fresh={"personal": own},
        scratch=model.n_outputs,
    )


# -- on the client ----------------------------------------------------------------------------------------------------
@answers()
def fit_personal(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Fit the personal part of clients who have none to their rows, with the shared part fixed."""
    own, new = private["personal"], private["visits"] == 0  # [S, C, P - Q], [S, C]
    at = new.any(0).nonzero()[:, 0]
    if not len(at):
        return {}, {"personal": own}
    _, fitted = train_part(
        shared["model"], shared["split"], "personal", shared["theta"][:, None], own[:, at], data.clients(at),
        shared["step_size"], shared["training"], shared["key"],
    )  # fmt: skip
    own = own.clone()
    own[:, at] = torch.where(new[:, at, None], fitted, own[:, at])
    return {}, {"personal": own}


@answers(loss=EACH, metric=EACH, rows=ROWS)
def judge_personal(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Judge each client's personal model on its rows, and leave it as it is."""
    return judged(shared["model"], served(shared, private, data), data), {}
