# SPDX-License-Identifier: Apache-2.0
"""One model for all, and clusters: every client takes the model that serves it best, and models are fitted to their clients.

This is IFCA (Ghosh et al., NeurIPS 2020) with a Newton step in place of local gradient steps: exact for regression. Clusters
are grown one at a time. To the best K models the own model of a client is added whom they serve badly, several clients are
tried in lockstep, and what fits the training rows best goes on. Own models are those shrunk towards the common one
(`prior.py`), in whose subspace clusters stand out even where clients have fewer rows than features.

For regression a client's noise is its own, so that a client which no model serves does not draw one to it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.local import worst_if_nan
from coterie.protocol import Ask, Block, Fold, Save, Stack, Sum, Tensors
from coterie.selection.prior import OWN, fresh_model
from coterie.selection.problem import NOISE_ROWS, Curves, Problem, Run, curves, noise_level

__all__ = [
    "ByLabel", "Clusters", "cluster_step", "fit_clusters", "fit_global", "grow", "judge_clusters", "judge_clusters_ask",
    "own_model", "promise", "regret",
]  # fmt: skip

_DRAWN = 4  # clients that are asked for their own models, for every start
_FAR = 1.0  # log odds of a standard deviation by which a classifier moves in a round, at most
_STILL = 1e-4  # a move, relative to the largest parameter, after which nothing more is expected


@dataclass(frozen=True)
class Clusters:
    """Models of clusters, in each of F fits and J settings or starts."""

    theta: Tensor  # [F, J, K, P]
    noise: Tensor  # [F, J] common noise variance; 1 for classification
    objective: Tensor  # [F, J] what was minimised, on training rows
    bend: Tensor  # [F, P, P] mean second derivatives, of all clients together


@dataclass(frozen=True)
class ByLabel:
    """Sums over the clients of each cluster: of values [1, C, F, J | 1, ...] by shares [1, C, F, J, K]."""

    share: str

    @property
    def needs(self) -> tuple[str, ...]:
        """The shares."""
        return (self.share,)

    def part(self, value: Tensor, reply: Tensors) -> Tensors:
        """Sum the block.  [1, F, J, K, ...]"""
        share = reply[self.share]
        flat = value.flatten(4) if value.dim() > 4 else value[..., None]
        if flat.shape[3] == 1:
            total = torch.einsum("scfjk,scfp->sfjkp", share, flat[:, :, :, 0])
        else:
            total = torch.einsum("scfjk,scfjp->sfjkp", share, flat)
        return {"sum": total.reshape(*total.shape[:4], *value.shape[4:])}

    def merge(self, a: Tensors, b: Tensors) -> Tensors:
        """Add."""
        return {"sum": a["sum"] + b["sum"]}

    def finish(self, part: Tensors) -> Tensor:
        """Hand over the sums."""
        return part["sum"]


def fit_global(problem: Problem, penalties: tuple[float, ...], rounds: int) -> Run:
    """Fit one model for all with each penalty.  -> Clusters with K = 1"""
    shape = (len(problem.held), len(penalties))
    start = torch.zeros(*shape, 1, problem.n_parameters, dtype=torch.float64)
    return (yield from fit_clusters(start, torch.ones(shape, dtype=torch.float64), problem, penalties, rounds))


def fit_clusters(theta: Tensor, noise: Tensor, problem: Problem, penalties: tuple[float, ...], rounds: int) -> Run:
    """Label clients and fit models in turn, until nothing moves.  -> Clusters

    Parameters
    ----------
    theta, noise : Tensor
        [F, J, K, P], [F, J] where to begin.
    penalties : tuple of float
        Of squared weights, for the mean loss of a row and unit noise: one for every setting, or one for all.
    """
    penalty = torch.tensor(penalties, dtype=torch.float64)[:, None, None] * problem.slopes  # [J | 1, 1, P]
    state = Clusters(theta, noise, noise, torch.zeros(0, dtype=torch.float64))
    for _ in range(rounds):
        fold: dict[str, Fold] = {"hessian": ByLabel("share"), "gradient": ByLabel("share"), "rows": ByLabel("share")}
        fold |= {name: Sum() for name in ("objective", "precision", "there", "bend", "n")}
        got = yield Ask(
            cluster_step, {"problem": problem, "theta": state.theta, "noise": state.noise}, fold, fresh=problem.fresh,
            scratch=problem.scratch * theta.shape[1] * theta.shape[2],
        )  # fmt: skip
        if got is None or got.n == 0:
            continue
        before = state.theta
        pull = penalty * got["rows"][..., None]  # [F, J, K, P]
        a = got["hessian"] + torch.diag_embed(pull + 1e-9 * (1 + got["rows"][..., None]))
        step = torch.linalg.solve(a, got["gradient"] + pull * before)
        if not problem.is_regression:
            step = step.clamp(-_FAR, _FAR)
        bend = got["bend"][:, 0] / got["n"][..., None].clamp(min=1)
        common = got["there"] / got["precision"] if problem.is_regression else state.noise
        state = Clusters(before - step, common, got["objective"], bend)
        yield Save(state)
        if float(step.abs().max()) < _STILL * (1 + float(before.abs().max())):
            break
    return state


def grow(found: Clusters, problem: Problem, *, penalty: float, starts: int, rounds: int, seed: int) -> Run:
    """Make K + 1 clusters of K.  -> Clusters, with the best of the starts in every fit"""
    further = yield from _further(found, problem, starts, seed)
    if further is None:
        return found
    runs = further.shape[1]
    begin = torch.cat([found.theta.expand(-1, runs, -1, -1), further[:, :, None]], 2)
    grown: Clusters = yield from fit_clusters(begin, found.noise.expand(-1, runs), problem, (penalty,), rounds)
    best = worst_if_nan(grown.objective).argmin(1)
    at = torch.arange(len(best))
    theta, noise, objective = (value[at, best][:, None] for value in (grown.theta, grown.noise, grown.objective))
    return replace(grown, theta=theta, noise=noise, objective=objective)


def _further(found: Clusters, problem: Problem, starts: int, seed: int) -> Run:
    """Own models of clients that are served badly, and that would serve others too.  -> [F, J, P], or None

    What helps one client only is an outlier's; so some more are drawn, and those taken whose models help everybody most.
    """
    n_clusters = found.theta.shape[2]
    shared = {"problem": problem, "theta": found.theta, "noise": found.noise}
    kept: dict[str, Any] = {"fresh": {**problem.fresh, **fresh_model(problem)}, "scratch": problem.scratch * n_clusters}
    got = yield Ask(regret, shared, {"regret": Stack()}, **kept)
    if got is None or got.n == 0:
        return None
    picks = _drawn(
        got["regret"], _DRAWN * starts, keys.generator(seed, n_clusters, "growth")
    )  # [F, L] places in got.ids
    named, place = np.unique(picks.numpy(), return_inverse=True)
    own = yield Ask(own_model, {}, {"theta": Stack()}, to=got.ids[torch.from_numpy(named)], **kept)
    if own is None or own.n < len(named):
        return None
    fits = torch.arange(len(picks))[:, None]
    models = own["theta"][torch.from_numpy(place).view(picks.shape), fits]  # [F, L, P]
    told = yield Ask(
        promise, {**shared, "models": models}, {"gain": Sum()}, fresh=problem.fresh, scratch=kept["scratch"]
    )
    if told is None or told.n == 0:
        return None
    best = told["gain"].argsort(1, descending=True)[:, :starts]
    return models[fits, best]


def _drawn(regrets: Tensor, n: int, draw: torch.Generator) -> Tensor:
    """The client that is served worst, and others in proportion to how badly they are served.  [C, F] -> [F, L]"""
    badly = regrets.T.nan_to_num(nan=0.0, posinf=0.0).clamp(min=0) + 1e-12
    n = min(n, badly.shape[1])
    worst = badly.argmax(1, keepdim=True)
    if n == 1:
        return worst
    others = badly.scatter(1, worst, 0.0)
    return torch.cat([worst, torch.multinomial(others, n - 1, generator=draw)], 1)


def judge_clusters_ask(found: Clusters, problem: Problem) -> Ask:
    """Ask clients for their cluster, and how well it serves their held-out rows."""
    fold = {name: Stack() for name in ("loss", "right", "rows", "label", "margin")}
    shared = {"problem": problem, "theta": found.theta, "noise": found.noise}
    return Ask(
        judge_clusters, shared, fold, fresh=problem.fresh,
        scratch=problem.scratch * found.theta.shape[1] * found.theta.shape[2],
    )  # fmt: skip


# -- on the client ----------------------------------------------------------------------------------------------------
def cluster_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Take the model that serves best; answer with first and second derivatives there."""
    problem, theta, common = shared["problem"], shared["theta"][0], shared["noise"][0][..., None]
    at = curves(problem, private, data)
    label = _losses(at, theta).argmin(2)  # [F, J, C]
    own = _taken(theta, label)
    loss, gradient, hessian = at.quadratic(own)
    there = (at.n > 0).to(torch.float64)
    noise = noise_level(loss, at.n, common) if problem.is_regression else torch.ones_like(loss)
    share = one_hot(label, theta.shape[2]) * (there / noise)[..., None]
    reply = {
        "share": share,
        "hessian": hessian,
        "gradient": gradient,
        "rows": at.n.expand(-1, hessian.shape[1], -1),
        "bend": hessian[:, :1],
        "n": at.n,
        "there": there,
        "precision": there / noise,
        "objective": _objective(problem, loss, at.n, common),
    }
    return {name: value.movedim(2, 0)[None] for name, value in reply.items()}, dict(private)


def _objective(problem: Problem, loss: Tensor, n: Tensor, common: Tensor) -> Tensor:
    """Minus log-likelihood of the training rows; for regression with the client's own noise integrated out."""
    if not problem.is_regression:
        return loss
    prior = NOISE_ROWS * common
    return 0.5 * (NOISE_ROWS + n) * (prior + 2 * loss).log() - 0.5 * NOISE_ROWS * prior.log()


def regret(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How much better its own model would serve a client than the best of those that there are."""
    problem, common = shared["problem"], shared["noise"][0][..., None]
    at = curves(problem, private, data)
    best = _losses(at, shared["theta"][0]).amin(2)  # [F, 1, C]
    own = at.loss(private[OWN][0].transpose(0, 1)[:, None])
    values = [_objective(problem, loss, at.n, common) for loss in (best, own)]
    return {"regret": (values[0] - values[1])[:, 0].T[None]}, dict(private)


def promise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How much better a client would be served if a further model were there.  -> [1, C, F, L]"""
    problem, common = shared["problem"], shared["noise"][0][..., None]
    at = curves(problem, private, data)
    best = _losses(at, shared["theta"][0]).amin(2)  # [F, 1, C]
    further = torch.minimum(_losses(at, shared["models"][0][:, :, None])[:, :, 0], best)  # [F, L, C]
    gain = _objective(problem, best, at.n, common) - _objective(problem, further, at.n, common)
    return {"gain": gain.movedim(2, 0)[None]}, dict(private)


def own_model(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The client's own model, in every fit."""
    return {"theta": private[OWN]}, dict(private)


def judge_clusters(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Take the model that serves the training rows best, and judge it by the held-out ones."""
    problem, theta, common = shared["problem"], shared["theta"][0], shared["noise"][0][..., None]
    at = curves(problem, private, data)
    losses = _losses(at, theta)  # [F, J, K, C]
    label = losses.argmin(2)
    loss, right = at.held_out(_taken(theta, label))
    two = losses.topk(min(2, theta.shape[2]), 2, largest=False).values
    values = [_objective(problem, value, at.n, common) for value in (two[:, :, -1], two[:, :, 0])]
    margin = (values[0] - values[1]) / at.n.clamp(min=1)
    reply = {"loss": loss, "right": right, "rows": at.n_held, "label": label, "margin": margin}
    return {name: value.movedim(2, 0)[None] for name, value in reply.items()}, dict(private)


def _losses(at: Curves, theta: Tensor) -> Tensor:
    """Of every model; one that diverged loses infinitely.  [F, J, K, P] -> [F, J, K, C]"""
    every = at.loss(theta.flatten(1, 2)[:, :, None])
    return worst_if_nan(every.view(*theta.shape[:3], every.shape[-1]))


def _taken(theta: Tensor, label: Tensor) -> Tensor:
    """The models that clients have chosen.  [F, J, K, P], [F, J, C] -> [F, J, C, P]"""
    return theta.gather(2, label[..., None].expand(-1, -1, -1, theta.shape[-1]))
