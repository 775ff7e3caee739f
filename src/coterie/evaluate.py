# SPDX-License-Identifier: Apache-2.0
"""How well do models serve clients, where does a client belong, and does what was found match what was planted?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import DataError
from coterie.local import chosen, client_losses, outputs, own_outputs, served, worst_if_nan
from coterie.models import Model, decided, row_loss, row_metric
from coterie.protocol import Ask, Block, Limit, Replies, Stack, Sum, Tensors, WeightedMean, answers, from_sums

__all__ = [
    "EACH",
    "ROWS",
    "Labels",
    "Measured",
    "Placed",
    "adjusted_rand",
    "agreement",
    "class_counts_ask",
    "judged",
    "match_errors",
    "match_labels",
    "match_models",
    "measure_ask",
    "measure_mixed_ask",
    "measure_own_ask",
    "measure_placed_ask",
    "measured_in",
    "place_ask",
    "place_together_ask",
    "residual_products_ask",
    "summed",
    "target_ask",
    "target_sums",
]

Labels = Tensor | np.ndarray | Sequence[int]

EACH, ROWS = (Stack(), WeightedMean("rows")), (Stack(), Sum())  # every client's own, or of all together
_FAR = 1e30  # stands for the distance of a diverged model, which the assignment could not take


@dataclass(frozen=True)
class Placed:
    """Where each of M clients belongs.

    Attributes
    ----------
    label : Tensor
        [M] the model with the lowest loss on the client's rows; ties go to the lowest number.
    losses : Tensor
        [M, K] mean loss under every model.
    margin : Tensor
        [M] how much more the runner-up loses (0 when there is one model only).
    margin_error : Tensor
        [M] standard error of the margin, from the rows' paired differences; infinite with fewer than two rows, and NaN
        where rows are not known, but only their sums.
    rows : Tensor
        [M] rows that this rests on.
    """

    label: Tensor
    losses: Tensor
    margin: Tensor
    margin_error: Tensor
    rows: Tensor

    @property
    def certain(self) -> Tensor:
        """[M] whether the margin is more than two standard errors: otherwise it is within noise, as far as that is known."""
        if self.losses.shape[1] == 1:
            return torch.ones_like(self.label, dtype=torch.bool)
        unknown = self.margin_error.isnan() & self.margin.isfinite()
        return (self.margin > 2 * self.margin_error) | unknown

    @property
    def knows_errors(self) -> bool:
        """Whether margins have standard errors: sums of products alone do not tell them."""
        return not bool(self.margin_error.isnan().all())


@dataclass(frozen=True)
class Measured:
    """How well a given model serves each of M clients, on rows that it may not have seen.

    Where only sums are known, all clients together are one.
    """

    loss: Tensor  # [M] mean loss
    metric: Tensor  # [M] classification: share of rows predicted right; regression: mean squared error
    rows: Tensor  # [M]

    @property
    def mean_metric(self) -> float:
        """Over all rows."""
        return float((self.metric * self.rows).sum() / self.rows.sum().clamp(min=1))


def summed(ask: Ask) -> Ask:
    """Ask for a measure over all clients together, in place of every client's own."""
    fold = {name: Sum() if name == "rows" else WeightedMean("rows") for name in ("loss", "metric", "rows")}
    return replace(ask, fold=fold)


def measured_in(got: Replies) -> Measured:
    """What clients said of their models, each, or all together."""
    return Measured(**{name: got[name].reshape(-1) for name in ("loss", "metric", "rows")})


def place_ask(model: Model, theta: Tensor) -> Ask:
    """Ask clients where they belong among models theta [K, P]; make a `Placed` of the replies' values.

    They keep it to themselves as well, for `measure_placed_ask`.
    """
    return Ask(
        place,
        {"model": model, "theta": theta},
        {name: Stack() for name in ("label", "losses", "margin", "margin_error", "rows")},
        fresh={"placed": torch.tensor(0)},
        scratch=len(theta) * model.n_outputs,
        limits=dict.fromkeys(
            ("losses", "margin", "margin_error"), Limit(finite=False)
        ),  # of one row, or of models that diverged
    )


def place_together_ask(model: Model, theta: Tensor) -> Ask:
    """Ask clients to place themselves, and keep to themselves where; of all together, how many are where, and are unsure.

    What the models are worth to them is told as well: see `measured_in`.
    """
    ask = place_ask(model, theta)
    return replace(ask, fold={**summed(ask).fold, "count": Sum(), "unsure": Sum()}, limits={})


def measure_placed_ask(model: Model, theta: Tensor) -> Ask:
    """Ask clients how well the model of theta [K, P] serves them that they were placed at; make a `Measured` of it."""
    return Ask(
        measure_placed,
        {"model": model, "theta": theta},
        {name: Stack() for name in ("loss", "metric", "rows")},
        fresh={"placed": torch.tensor(0)},
        scratch=len(theta) * model.n_outputs,
    )


def measure_ask(model: Model, theta: Tensor, label: Tensor) -> Ask:
    """Ask clients how well model number `label` [M] of theta [K, P] serves them; make a `Measured` of the values."""
    return Ask(
        measure,
        {"model": model, "theta": theta},
        {name: Stack() for name in ("loss", "metric", "rows")},
        each={"label": label},
        to=torch.arange(len(label)),
        scratch=len(theta) * model.n_outputs,
    )


def measure_own_ask(model: Model) -> Ask:
    """Ask clients how well their own, private models serve them; make a `Measured` of the values."""
    fresh = {"theta": torch.zeros(model.n_parameters, dtype=model.dtype)}
    return Ask(measure_own, {"model": model}, {name: Stack() for name in ("loss", "metric", "rows")}, fresh=fresh)


def measure_mixed_ask(model: Model, theta: Tensor, share: Tensor) -> Ask:
    """Ask clients how well the mixture of models theta [K, P] with shares [K] serves them; make a `Measured` of it."""
    return Ask(
        measure_mixed,
        {"model": model, "theta": theta, "share": share},
        {name: Stack() for name in ("loss", "metric", "rows")},
        scratch=len(theta) * model.n_outputs,
    )


def residual_products_ask(model: Model, theta: Tensor) -> Ask:
    """Ask for sums of products of the residuals of models theta [K, P]: how well any mixture of them serves clients.

    With shares w [K], the squared errors of the mixture are w^T R w. `client` adds up clients' means, and `row` all rows.
    """
    fields = ("client", "clients", "row", "rows")
    limits = dict.fromkeys(("client", "row"), Limit(finite=False))  # of models that diverged
    return Ask(
        residual_products,
        {"model": model, "theta": theta},
        {name: Sum() for name in fields},
        scratch=2 * len(theta),
        limits=limits,
    )


def class_counts_ask(n_classes: int) -> Ask:
    """Ask how many rows there are of every class."""
    return Ask(class_counts, {"n_classes": n_classes}, {"count": Sum()}, scratch=n_classes)


def target_ask(about: Tensor) -> Ask:
    """Ask for sums over all rows' targets: how many there are, of them, and of their squares about a value."""
    return Ask(target_sums, {"about": about}, {name: Sum() for name in ("n", "sum", "square")})


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    label=Stack(), losses=Stack(), margin=Stack(), margin_error=Stack(), metric=EACH, rows=ROWS,
    loss=WeightedMean("rows"), count=Sum(), unsure=Sum(),
)  # fmt: skip
@from_sums
def place(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Compare all models on a client's rows."""
    model, theta = shared["model"], shared["theta"]  # [S, K, P]
    scores = outputs(model, theta, data)
    per_row = row_loss(model.loss, scores, data.target)  # [S, K, C, N]
    loss = worst_if_nan(torch.einsum("skcn,cn->skc", per_row, data.weights))
    label = loss.argmin(1)  # a model that diverged loses infinitely: nobody belongs to it
    margin = loss.new_zeros(label.shape)
    error = loss.new_zeros(label.shape)
    if theta.shape[1] > 1:
        second = loss.scatter(1, label[:, None], torch.inf).argmin(1)
        difference = chosen(per_row, second) - chosen(per_row, label)  # [S, C, N]
        margin = chosen(loss, second) - chosen(loss, label)
        spread = ((difference - margin[..., None]) ** 2 * data.weights).sum(-1)
        error = torch.where(data.n > 1, (spread / (data.n - 1).clamp(min=1)).sqrt(), torch.inf)
        error = torch.where(margin.isinf(), 0, error)  # all the others diverged
    reply = {
        "label": label,
        "losses": loss.transpose(1, 2),
        "margin": margin,
        "margin_error": error,
        "metric": _metric(model, chosen(scores, label), chosen(loss, label), data),
        "rows": data.n[None],
        "loss": chosen(loss, label),
        "count": torch.nn.functional.one_hot(label, theta.shape[1]) * (data.n > 0)[:, None],
        "unsure": (margin <= 2 * error) & (data.n > 0) & (theta.shape[1] > 1),
    }
    return reply, {"placed": label}


@answers(loss=EACH, metric=EACH, rows=ROWS)
@from_sums
def measure(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Judge each client's given model on its rows."""
    scores = chosen(outputs(shared["model"], shared["theta"], data), each["label"])  # [S, C, N, O]
    return judged(shared["model"], scores, data), {}


@answers(loss=EACH, metric=EACH, rows=ROWS)
@from_sums
def measure_placed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Judge the model that each client was placed at on its rows."""
    return measure(shared, {"label": private["placed"]}, {}, data)


@answers(loss=EACH, metric=EACH, rows=ROWS)
@from_sums
def measure_own(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Judge each client's private model on its rows, and leave it as it is."""
    return judged(shared["model"], own_outputs(shared["model"], private["theta"], data), data), dict(private)


@answers(loss=EACH, metric=EACH, rows=ROWS)
@from_sums
def measure_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Judge a mixture of models that is the same for all clients."""
    return judged(shared["model"], served(shared, {}, data), data), {}


@answers(client=Sum(), clients=Sum(), row=Sum(), rows=Sum())
@from_sums
def residual_products(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """Products of the residuals of several models, of squared loss.  -> [S, C, K, K]"""
    residual = data.target - outputs(shared["model"], shared["theta"], data)[..., 0]  # [S, K, C, N]
    mean = torch.einsum("sjcn,skcn,cn->scjk", residual, residual, data.weights).to(torch.float64)
    there = (data.n > 0).to(torch.float64)
    reply = {"client": mean, "clients": there[None], "row": mean * data.n[:, None, None], "rows": data.n[None]}
    return reply, {}


@answers(count=Sum())
def class_counts(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Count a client's rows by class."""
    there = torch.nn.functional.one_hot(data.target, shared["n_classes"]) * data.real[..., None]
    return {"count": there.sum(1).double()[None]}, {}


@answers(n=Sum(), sum=Sum(), square=Sum())
@from_sums
def target_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums over a client's targets."""
    y = data.target.to(torch.float64)
    about = shared["about"][:, None, None]  # [S, 1, 1]
    square = ((y - about).square() * data.real).sum(-1)
    return {"n": data.n[None], "sum": (y * data.real).sum(-1)[None], "square": square}, {}


def judged(model: Model, scores: Tensor, data: Block) -> Tensors:
    """Loss and accuracy (or squared error) of every client, from its model's outputs.  [S, C, N, O] -> [S, C] each"""
    loss = client_losses(model, scores, data)  # [S, C]
    return {"loss": loss, "metric": _metric(model, scores, loss, data), "rows": data.n[None]}


def _metric(model: Model, scores: Tensor, loss: Tensor, data: Block) -> Tensor:
    """Share of rows predicted right; of numbers, the mean squared error.  [S, C, N, O], [S, C] -> [S, C]"""
    if model.loss == "squared":
        return loss
    if model.loss == "cross_entropy":
        right = decided(scores, model.threshold) == data.target
    else:
        right = row_metric(model.loss, scores, data.target)
    return torch.einsum("scn,cn->sc", right.to(data.weights.dtype), data.weights)


# -- against planted truth --------------------------------------------------------------------------------------------
def match_models(theta: Tensor, truth: Tensor) -> tuple[float, Tensor]:
    """Match models to true ones, one to one, so that their mean distance is least.

    Parameters
    ----------
    theta : Tensor
        [J, ...] models found, at least as many as there are true ones.
    truth : Tensor
        [K, ...] true models.

    Returns
    -------
    error : float
        mean_j ||theta_j - theta*_j|| over the true models; infinite when a diverged model is needed.
    assignment : Tensor
        [J] the true model of each model found, -1 for one that is left over.
    """
    from scipy.optimize import linear_sum_assignment  # here: only servers need it, and it is slow to load

    if len(theta) < len(truth):
        raise DataError(f"{len(theta)} models cannot be matched to {len(truth)}", "compare at least as many models")
    gap = torch.cdist(_vectors(theta), _vectors(truth), compute_mode="donot_use_mm_for_euclid_dist").numpy()  # [J, K]
    finite = np.isfinite(gap)
    found, true = linear_sum_assignment(np.where(finite, gap, _FAR))
    assignment = torch.full((len(theta),), -1)
    assignment[found] = torch.from_numpy(true)
    return float(np.where(finite, gap, np.inf)[found, true].mean()), assignment


def match_errors(theta: Tensor, truth: Tensor) -> Tensor:
    """Error of `match_models` for each of several runs.  theta [S, J, ...], truth [K, ...] -> [S]"""
    return torch.tensor([match_models(run, truth)[0] for run in theta], dtype=torch.float64)


def match_labels(labels: Labels, truth: Labels) -> float:
    """Share of clients whose label is right when labels are matched to true clusters one to one, as well as possible.

    Parameters
    ----------
    labels, truth : Tensor, array or sequence
        [M] found and true label of each client; what the labels are called does not matter.
    """
    from scipy.optimize import linear_sum_assignment  # here: only servers need it, and it is slow to load

    together = _clients_in_both(labels, truth)
    best = linear_sum_assignment(together, maximize=True)
    return float(together[best].sum() / together.sum())


def adjusted_rand(labels: Labels, truth: Labels) -> float:
    """Adjusted Rand index of two labelings: 1 when they agree up to names, about 0 by chance.

    As `sklearn.metrics.adjusted_rand_score`, which takes longer to load than most fits take.

    Parameters
    ----------
    labels, truth : Tensor, array or sequence
        [M] found and true label of each client.
    """
    return agreement(_clients_in_both(labels, truth))


def agreement(together: np.ndarray) -> float:
    """Adjusted Rand index of two labelings, from how many clients have each pair of labels.  [J, K]"""
    pairs, found, true, all_pairs = (
        float((n * (n - 1)).sum()) / 2 for n in (together, together.sum(1), together.sum(0), together.sum())
    )
    chance = found * true / max(all_pairs, 1.0)
    most = (found + true) / 2
    return 1.0 if most == chance else (pairs - chance) / (most - chance)


def _vectors(models: Tensor) -> Tensor:
    return models.detach().to("cpu", torch.float64).reshape(len(models), -1)


def _clients_in_both(labels: Labels, truth: Labels) -> np.ndarray:
    """How many clients have each pair of labels.  -> [J, K]"""
    found, true = np.asarray(labels), np.asarray(truth)
    if found.shape != true.shape or found.ndim != 1 or not len(found):
        raise DataError(
            f"labels of shape {found.shape} cannot be compared with {true.shape}",
            "give one label for each client in both",
        )
    found, true = (np.unique(names, return_inverse=True)[1] for names in (found, true))
    together = np.zeros((found.max() + 1, true.max() + 1), dtype=np.int64)
    np.add.at(together, (found, true), 1)
    return together
