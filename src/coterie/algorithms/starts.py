# SPDX-License-Identifier: Apache-2.0
"""Where clustered models begin: random, balanced, spread, or warm.

From one random start, collapse (all clients in one cluster) is the common outcome, so the start decides everything.
`balanced` redraws until every cluster attracts clients; `spread` takes models of single clients that others serve badly, as
k-means++ does with points, in the manner of Bahmani et al., "Scalable K-Means++", VLDB 2012: many candidates are drawn at
once, twice, and the K best of them are chosen. That takes three messages, whatever K is.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.robust import LOSSES
from coterie.errors import ConfigError
from coterie.local import Training, client_losses, outputs, train, worst_if_nan
from coterie.local.least_squares import ridge
from coterie.models import Dense, Model
from coterie.protocol import (
    NOBODY,
    Ask,
    Block,
    ByCluster,
    Lowest,
    Replies,
    Save,
    Stack,
    Sum,
    Tensors,
    answers,
    from_sums,
)

__all__ = [
    "Start", "another_model", "attract", "compete", "exchanged", "first_models", "first_smallest", "fit_alone",
    "nearest_candidate", "potential", "serve",
]  # fmt: skip

Run = Generator[Ask | Save, Replies | None, Any]

_BALANCED_DRAWS = 8  # candidate starts in one question
_BALANCED_QUESTIONS = 25
_DRAWS = 2  # of candidates: by rows, and by what the first ones leave
_TINY = 1e-200  # the weight of who is served perfectly: drawn after all others, and still by lot
_FAR = 1e30  # the loss of a model that diverged


@dataclass(frozen=True)
class Start:
    """How models begin.

    Parameters
    ----------
    kind : {"random", "balanced", "spread", "warm"}
        See the module's words.
    theta : Tensor, optional
        [K, P] the given models, for "warm".
    candidates : int
        Clients whose models are tried for each model of "spread"; those that leave the lowest total loss are taken.
    fit : Training
        How a client fits a model alone, where there is no closed form.
    step_size : float
        Of that fit.
    """

    kind: Literal["random", "balanced", "spread", "warm"] = "spread"
    theta: Tensor | None = None
    candidates: int = 5
    fit: Training = Training(steps=50)  # noqa: RUF009  (frozen)
    step_size: float = 0.1


def first_models(model: Model, n_clusters: int, start: Start, seed: int) -> Run:
    """Make the first K models and say what happened.  -> theta [K, P], events"""
    draw = keys.generator(seed, "start")
    if start.kind == "warm":
        if start.theta is None or start.theta.shape != (n_clusters, model.n_parameters):
            raise ConfigError(
                f"a warm start needs models of shape ({n_clusters}, {model.n_parameters})", "give them as start models"
            )
        return start.theta.to(model.dtype), []
    if start.kind == "random" or n_clusters == 1:
        return model.initial(n_clusters, draw), []
    if start.kind == "balanced":
        return (yield from _balanced(model, n_clusters, draw))
    return (yield from _spread(model, n_clusters, start, seed)), []


def _balanced(model: Model, n_clusters: int, draw: torch.Generator) -> Run:
    """Redraw until each cluster attracts a minimum share: 35 % for two clusters, 10 % for four."""
    wanted = 0.35 if n_clusters == 2 else 0.4 / n_clusters
    best, best_share = model.initial(n_clusters, draw), -1.0
    for _ in range(_BALANCED_QUESTIONS):
        theta = model.initial(_BALANCED_DRAWS * n_clusters, draw).view(_BALANCED_DRAWS, n_clusters, -1)
        got = yield Ask(
            attract,
            {"model": model, "theta": theta.flatten(0, 1), "n_clusters": n_clusters},
            fold={"count": Sum()},
            scratch=_BALANCED_DRAWS * n_clusters * model.n_outputs,
        )
        if got is None or got.n == 0:
            continue
        share = (got["count"] / got["count"].sum(1, keepdim=True).clamp(min=1)).min(1).values  # [draws]
        winner = int(share.argmax())
        if float(share[winner]) > best_share:
            best, best_share = theta[winner], float(share[winner])
        if best_share >= wanted:
            return best, []
    drawn = _BALANCED_QUESTIONS * _BALANCED_DRAWS
    if best_share < 0:
        return best, ["nobody answered: the start is random"]
    return best, [f"no balanced start among {drawn}; the best leaves {best_share:.0%} of the clients to a cluster"]


def _spread(model: Model, n_clusters: int, start: Start, seed: int) -> Run:
    """Draw candidates by rows, then by what these leave, and choose the best K.  -> [K, P]"""
    pool = torch.zeros(0, model.n_parameters, dtype=model.dtype)
    number = math.ceil(n_clusters * start.candidates / _DRAWS)
    for draw in range(_DRAWS):
        found = yield from _candidates(model, pool, number, start, keys.key(seed, draw, "spread"))
        pool = torch.cat([pool, found])
    chosen = pool
    if len(pool) > n_clusters:
        got = yield Ask(
            nearest_candidate,
            {"model": model, "theta": pool},
            {"loss": ByCluster("share")},
            scratch=_scratch(model, pool),
            limits={"loss": LOSSES},
        )
        if got is not None and got.n:
            chosen = pool[_medoids(got["loss"].sum, n_clusters)]
    few = model.initial(n_clusters, keys.generator(seed, "few"))  # where fewer have rows than there are models
    return torch.cat([chosen, few])[:n_clusters]


def _candidates(model: Model, theta: Tensor, number: int, start: Start, key: Tensor) -> Run:
    """Models of clients of their own, drawn by how badly `theta` [J, P] serves them.  -> [at most number, P]"""
    shared = {
        "model": model, "theta": theta, "base": model.initial(1, keys.generator(int(key), "base"))[0],
        "training": start.fit, "step_size": torch.tensor(start.step_size, dtype=torch.float64), "key": key,
        "number": number,
    }  # fmt: skip
    fold = {"theta": Lowest("score", "key", number)}
    got = yield Ask(
        compete, shared, fold, work=start.fit.work(), scratch=_scratch(model, theta), limits={"score": LOSSES}
    )
    return theta[:0] if got is None or got.n == 0 else got["theta"]


def _medoids(loss: Tensor, n: int) -> Tensor:
    """Choose n candidates that leave the lowest total: one after the other, then by exchanges while these help.  [n]

    loss [J, J]: what clients that candidate j serves best would lose under each, all together.
    """
    chosen = torch.zeros(0, dtype=torch.int64)
    for _ in range(n):
        chosen = torch.cat([chosen, torch.tensor([first_smallest(_left(loss, chosen))])])
    return exchanged(loss, chosen, gain=1e-9, most=n * len(loss))[0]  # what differs by rounding is equal


def exchanged(loss: Tensor, chosen: Tensor, *, gain: float, most: int) -> tuple[Tensor, int]:
    """Exchange a chosen candidate for another, while that lowers the total by this share of it.  -> chosen, exchanges

    Parameters
    ----------
    loss : Tensor
        [J, J] what clients that candidate j serves best would lose under each, all together.
    chosen : Tensor
        [n] candidates.
    """
    chosen, n = chosen.clone(), len(chosen)
    for number in range(most):
        totals = torch.stack([_left(loss, chosen[torch.arange(n) != k]) for k in range(n)])  # [n, J]
        k, j = divmod(first_smallest(totals), len(loss))
        if not float(totals[k, j]) < (1 - gain) * float(totals[0, chosen[0]]):
            return chosen, number
        chosen[k] = j
    return chosen, most


def first_smallest(values: Tensor) -> int:
    """Number of the smallest, of those that differ by rounding the first; NaN is the largest."""
    values = worst_if_nan(values.flatten())
    least = values.min()
    return int((values <= least + 1e-9 * least.abs()).int().argmax()) if bool(least.isfinite()) else 0


def _left(loss: Tensor, chosen: Tensor) -> Tensor:
    """Total loss if each candidate joined the chosen.  [J]"""
    if not len(chosen):
        return loss.sum(0)
    return torch.minimum(loss, loss[:, chosen].min(1, keepdim=True).values).sum(0)


def another_model(model: Model, theta: Tensor, start: Start, key: Tensor) -> Run:
    """Fit a model at a client that `theta` [J, P] serves badly.  -> [P]

    Several clients are drawn with probability proportional to their total loss; the one whose own model would lower
    everybody's loss most is taken.
    """
    found = yield from _candidates(model, theta, start.candidates, start, key)
    if not len(found):
        return model.initial(1, keys.generator(int(key), "base"))[0]
    total = yield Ask(
        potential,
        {"model": model, "theta": theta, "found": found},
        {"loss": Sum()},
        scratch=_scratch(model, theta, found),
        limits={"loss": LOSSES},
    )
    return found[int(worst_if_nan(total["loss"]).argmin()) if total is not None and total.n else 0]


def _scratch(model: Model, *thetas: Tensor) -> int:
    return sum(len(theta) for theta in thetas) * model.n_outputs


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(count=Sum())
@from_sums
def attract(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Count whom each model of several candidate starts attracts.  theta [S, draws K, P] -> [S, C, draws, K]"""
    model, theta, k = shared["model"], shared["theta"], shared["n_clusters"]
    loss = client_losses(model, outputs(model, theta, data), data)  # [S, draws K, C]
    label = loss.view(len(loss), -1, k, loss.shape[-1]).argmin(2)  # [S, draws, C]
    return {"count": one_hot(label, k).transpose(1, 2) * (data.n > 0)[:, None, None]}, {}


@answers(loss=Stack())
@from_sums
def serve(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say how badly the models so far serve a client: the total loss of the best; with no model yet, the row count."""
    model, theta = shared["model"], shared["theta"]  # [S, J, P]
    n = data.n.to(torch.float64)
    if theta.shape[1] == 0:
        return {"loss": n.expand(len(theta), -1)}, {}
    loss = client_losses(model, outputs(model, theta, data), data).min(1).values  # [S, C]
    return {"loss": loss * n}, {}


@answers(theta=Lowest)
@from_sums
def compete(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Draw clients by how badly they are served, and fit the models of those who may be drawn.

    Who has the lowest scores E / w, with E ~ Exp(1) by the client's key and w its total loss, is as if drawn one after the
    other with probabilities w (Efraimidis, Spirakis, 2006). Only the lowest of a block can be among the lowest of all.
    """
    theta, number = shared["theta"], shared["number"]
    badly = serve(shared, each, private, data)[0]["loss"].nan_to_num(nan=0.0, posinf=0.0)  # what diverged says nothing
    lot = keys.uniform(keys.key(shared["key"][:, None], data.keys), 1)[..., 0]  # [S, C]
    score = torch.where(data.n > 0, -torch.log1p(-lot) / badly.to(torch.float64).clamp(min=_TINY), NOBODY)
    found = theta.new_zeros(*score.shape, theta.shape[-1])
    for s in range(len(score)):
        at = score[s].argsort(stable=True)[:number]
        own = {name: v[s : s + 1] if isinstance(v, Tensor) else v for name, v in shared.items()}
        found[s, at] = fit_alone(own, {}, {}, data.clients(at))[0]["theta"][0]
    sound = found.isfinite().all(-1)
    score = torch.where(sound, score, NOBODY)
    reply = {"theta": torch.where(sound[..., None], found, 0.0), "score": score, "key": data.keys.expand_as(score)}
    return reply, {}


@answers()
@from_sums
def fit_alone(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Fit a model to a client's own rows: in closed form for linear regression, by gradient descent otherwise."""
    model, base = shared["model"], shared["base"]  # [S, P]
    if isinstance(model, Dense) and model.is_linear and model.loss == "squared":
        return {"theta": ridge(model, data, l2=max(model.l2 / 2, 1e-3)).expand(len(base), -1, -1)}, {}
    theta = base[:, None].expand(-1, len(data.n), -1)
    return {"theta": train(model, theta, data, shared["step_size"], shared["training"], shared["key"])}, {}


@answers(loss=ByCluster("share"))
@from_sums
def nearest_candidate(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """Total loss under every candidate, and which of them is best.  -> [S, C, J] each"""
    model, theta = shared["model"], shared["theta"]  # [S, J, P]
    loss = client_losses(model, outputs(model, theta, data), data).transpose(1, 2).to(torch.float64)
    loss = worst_if_nan(loss).clamp(max=_FAR) * data.n[:, None]
    share = one_hot(loss.argmin(-1), loss.shape[-1]) * (data.n > 0)[:, None]
    return {"loss": loss, "share": share.to(torch.float64)}, {}


@answers(loss=Sum())
@from_sums
def potential(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Total loss that a client would have if each candidate joined the models so far.  -> [S, C, L]"""
    model, theta, found = shared["model"], shared["theta"], shared["found"]  # [S, J, P], [S, L, P]
    loss = client_losses(model, outputs(model, torch.cat([theta, found], 1), data), data)  # [S, J + L, C]
    j = theta.shape[1]
    joined = loss[:, j:] if j == 0 else torch.minimum(loss[:, j:], loss[:, :j].min(1, keepdim=True).values)
    total = torch.where(data.n > 0, joined * data.n, 0.0)  # [S, L, C]; 0 times infinity is not 0
    return {"loss": total.transpose(1, 2).to(torch.float64)}, {}
