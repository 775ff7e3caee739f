# SPDX-License-Identifier: Apache-2.0
"""IFCA (Ghosh et al., NeurIPS 2020) by Newton's method: clients take their best model, and models fit their clients.

A Newton step in place of local gradient steps is exact for regression. With one cluster this is one model for all. Clusters
are grown one at a time: to the best K models the own model of a client is added whom they serve badly, several clients are
tried in lockstep, and what fits the training rows best goes on. Own models are those shrunk towards the common one
(`random_effects.py`), in whose subspace clusters stand out even where clients have fewer rows than features.

For regression a client's noise is its own, so that a client which no model serves does not draw one to it.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.linear_by_fold import NOISE_ROWS, Curves, Problem, curves, noise_level
from coterie.algorithms.outcome_curves import Likelihood
from coterie.algorithms.random_effects import OWN, Prior, fresh_model
from coterie.algorithms.robust import COUNT, ONCE, SQUARES
from coterie.algorithms.score_sums import fresh_judged, keep_judged, normal_score
from coterie.local import worst_if_nan
from coterie.protocol import (
    Algorithm,
    Ask,
    Block,
    Fold,
    Replies,
    Save,
    Stack,
    Sum,
    Tensors,
    answers,
    from_sums,
    one_run_at_a_time,
)

__all__ = [
    "ByLabel", "Clusters", "State", "candidate_gain", "cluster_step", "judge_clusters", "judge_clusters_ask", "loss_gap",
    "newton_ifca", "nobody_yet", "own_model",
]  # fmt: skip

_DRAWN = 4  # clients that are asked for their own models, for every start
_TRIED = 5  # models that are drawn where clients are not asked, for each that goes on
_FAR = 1.0  # log odds of a standard deviation by which a classifier moves in a round, at most
_STILL = 1e-4  # a move, relative to the largest parameter, after which nothing more is expected
_SETTLED = 1e-3  # and after which it is known which clients belong together, so that clusters may grow again


@dataclass(frozen=True)
class Clusters:
    """Models of clusters, in each of F fits and J settings or starts."""

    theta: Tensor  # [F, J, K, P]
    noise: Tensor  # [F, J] common noise variance; 1 for classification
    objective: Tensor  # [F, J] what was minimised, on training rows
    hessian: Tensor  # [F, P, P] mean second derivatives, of all clients together

    def setting(self, j: int) -> "Clusters":
        """One setting alone."""
        at = slice(j, j + 1)
        return Clusters(self.theta[:, at], self.noise[:, at], self.objective[:, at], self.hessian)

    def last(self) -> "Clusters":
        """The fit to all training rows."""
        return Clusters(*(value[-1:] for value in (self.theta, self.noise, self.objective, self.hessian)))


@dataclass(frozen=True)
class State(Clusters):
    """After a round; `left` are rounds that this number of clusters may still take, `done` [F] fits that need no more."""

    done: Tensor
    round: int = 0
    left: int = 0


@dataclass(frozen=True)
class ByLabel:
    """Sums over the clients of each cluster: of values [1, C, F, J | 1, ...] by shares [1, C, F, J, K]."""

    individual: ClassVar[bool] = False
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


def nobody_yet(problem: Problem, settings: int) -> Clusters:
    """One model for all, before anybody was asked."""
    shape = (len(problem.held), settings)
    one = torch.ones(shape, dtype=torch.float64)
    hessian = torch.zeros(shape[0], problem.n_parameters, problem.n_parameters, dtype=torch.float64)
    return Clusters(torch.zeros(*shape, 1, problem.n_parameters, dtype=torch.float64), one, one, hessian)


def newton_ifca(
    state: State | None, *, start: Clusters, problem: Problem, n_clusters: int, penalties: tuple[float, ...], rounds: int,
    starts: int = 1, seed: int = 0, still: float = _STILL, drawn: Prior | None = None,
) -> Algorithm:  # fmt: skip
    """Label clients and fit models in turn until nothing moves; then grow, where more clusters are wanted.

    Parameters
    ----------
    start : Clusters
        Where to begin: at the models of `n_clusters` clusters, or at fewer, which were fitted.
    n_clusters : int
        How many are wanted. What is grown has one setting: in every fit the best of the starts, not polished: to begin at
        it again polishes.
    penalties : tuple of float
        Of squared weights, for the mean loss of a row and unit noise: one for every setting, or one for all.
    rounds : int
        At most, for every number of clusters.
    starts : int
        Clients whose own models are tried as the next cluster's.
    still : float
        A move, relative to the largest parameter, after which nothing more is expected.
    drawn : Prior, optional
        Where models are drawn from as the next cluster's, in place of those of single clients.
    """
    grows = n_clusters > start.theta.shape[2]
    if state is None:
        none = torch.zeros(len(start.theta), dtype=torch.bool)
        state = State(start.theta, start.noise, start.objective, start.hessian, none, left=0 if grows else rounds)
        yield Save(state)
    penalty = torch.tensor(penalties, dtype=torch.float64)[:, None, None] * problem.slopes  # [J | 1, 1, P]
    while True:
        while state.left:
            got = yield _step_ask(state, problem)
            state = replace(state, round=state.round + 1, left=state.left - 1)
            if got is not None and got.n:
                state = _moved(state, got, problem, penalty, _SETTLED if grows else still)
            if grows and state.theta.shape[1] > starts:
                state = _best(state, starts)
            yield Save(state)
        if grows:
            state = _best(state)
        if state.theta.shape[2] == n_clusters:
            return state
        if drawn is None:
            further = yield from _further(state, problem, starts, seed)
        else:
            further = yield from _further_drawn(state, problem, drawn, starts, seed)
        if further is None:  # nobody answered
            return state
        runs = further.shape[1]
        begin = torch.cat([state.theta.expand(-1, runs, -1, -1), further[:, :, None]], 2)
        state = replace(
            state, theta=begin, noise=state.noise.expand(-1, runs), done=torch.zeros_like(state.done), left=rounds
        )


def _step_ask(state: State, problem: Problem) -> Ask:
    fold: dict[str, Fold] = {"hessian": ByLabel("share"), "gradient": ByLabel("share"), "rows": ByLabel("share")}
    fold |= {name: Sum() for name in ("objective", "precision", "there", "curvature", "n")}
    settings, clusters = state.theta.shape[1:3]
    second = 1 if problem.is_regression else settings  # derivatives of squares are the same for all
    return Ask(
        cluster_step, {"problem": problem, "theta": state.theta, "noise": state.noise}, fold, fresh=problem.fresh,
        scratch=problem.scratch(settings * clusters, second),
        limits={"hessian": SQUARES, "curvature": SQUARES, "rows": COUNT, "n": COUNT, "there": ONCE},
    )  # fmt: skip


def _moved(state: State, got: Replies, problem: Problem, penalty: Tensor, still: float) -> State:
    """Take Newton's step; one that moves nothing of a fit by more than `still` is that fit's last.

    So no fit depends on how long others take: they are trained on what it is judged by.
    """
    pull = penalty * got["rows"][..., None]  # [F, J, K, P]
    a = got["hessian"] + torch.diag_embed(pull + 1e-9 * (1 + got["rows"][..., None]))
    step = torch.linalg.solve(a, got["gradient"] + pull * state.theta)
    if not problem.is_regression:
        step = step.clamp(-_FAR, _FAR)
    new = {
        "theta": state.theta - step,
        "noise": got["there"] / got["precision"] if problem.is_regression else state.noise,
        "objective": got["objective"],
        "hessian": got["curvature"][:, 0] / got["n"][..., None].clamp(min=1),
    }
    kept: dict[str, Any] = {
        name: torch.where(_of(state.done, value), getattr(state, name), value) for name, value in new.items()
    }
    last = step.abs().amax((1, 2, 3)) < still * (1 + state.theta.abs().amax((1, 2, 3)))  # [F]
    done = state.done | last
    return replace(state, **kept, done=done, left=0 if bool(done.all()) else state.left)


def _of(fits: Tensor, value: Tensor) -> Tensor:
    """[F] beside a value of every fit."""
    return fits.view(-1, *(1,) * (value.dim() - 1))


def _best(state: State, n: int = 1) -> State:
    """The best n of the starts, in every fit."""
    best = worst_if_nan(state.objective).argsort(dim=1, stable=True)[:, :n]  # [F, n]
    at = torch.arange(len(best))[:, None]
    theta, noise, objective = (value[at, best] for value in (state.theta, state.noise, state.objective))
    return replace(state, theta=theta, noise=noise, objective=objective)


def _further(found: Clusters, problem: Problem, starts: int, seed: int) -> Algorithm:
    """Own models of clients that are served badly, and that would serve others too.  -> [F, J, P], or None

    What helps one client only is an outlier's; so some more are drawn, and those go on whose models help everybody most.
    """
    n_clusters = found.theta.shape[2]
    shared = {"problem": problem, "theta": found.theta, "noise": found.noise}
    kept: dict[str, Any] = {"fresh": {**problem.fresh, **fresh_model(problem)}, "scratch": problem.scratch(n_clusters)}
    got = yield Ask(loss_gap, shared, {"gap": Stack(), "n": Sum()}, limits={"n": COUNT}, **kept)
    if got is None or got.n == 0:
        return None
    picks = _drawn(got["gap"], _DRAWN * starts, keys.generator(seed, n_clusters, "growth"))  # [F, L] places in got.ids
    named, place = np.unique(picks.numpy(), return_inverse=True)
    own = yield Ask(own_model, {}, {"theta": Stack()}, to=got.ids[torch.from_numpy(named)], **kept)
    if own is None or not own.n:
        return None
    fits, places = torch.arange(len(picks))[:, None], torch.from_numpy(place).view(picks.shape)
    every = own["theta"].new_zeros(
        len(named), *own["theta"].shape[1:]
    )  # who does not answer is tried as a model of zeros
    every[torch.isin(got.ids[torch.from_numpy(named)], own.ids)] = own["theta"]
    models = every[places, fits]  # [F, L, P]
    if problem.is_regression:  # a step costs little: all make one, which tells as well who helps most
        return models
    told = yield Ask(
        candidate_gain, {**shared, "models": models}, {"gain": Sum()}, fresh=problem.fresh, scratch=kept["scratch"]
    )
    if told is None or told.n == 0:
        return None
    best = told["gain"].argsort(1, descending=True)[:, :starts]
    return models[fits, best]


def _further_drawn(found: Clusters, problem: Problem, prior: Prior, starts: int, seed: int) -> Algorithm:
    """Models that are drawn as clients' are, of which those go on that help everybody most.  -> [F, J, P], or None"""
    n_clusters, many = found.theta.shape[2], starts if not problem.is_regression else _DRAWN * starts
    draw = keys.generator(seed, n_clusters, "growth")
    z = torch.randn(_TRIED * many, prior.root.shape[-1], generator=draw, dtype=torch.float64)
    models = prior.mean[:, :1] + torch.einsum("fpr,lr->flp", prior.root[:, 0], z)  # [F, L, P]
    told = yield Ask(
        candidate_gain, {"problem": problem, "theta": found.theta, "noise": found.noise, "models": models},
        {"gain": Sum()}, fresh=problem.fresh, scratch=problem.scratch(n_clusters + len(z)),
    )  # fmt: skip
    if told is None or told.n == 0:
        return None
    best = told["gain"].argsort(1, descending=True)[:, :many]
    return models[torch.arange(len(models))[:, None], best]


def _drawn(gaps: Tensor, n: int, draw: torch.Generator) -> Tensor:
    """The client that is served worst, and others in proportion to how badly they are served.  [C, F] -> [F, L]"""
    badly = gaps.T.nan_to_num(nan=0.0, posinf=0.0).clamp(min=0) + 1e-12
    n = min(n, badly.shape[1])
    worst = badly.argmax(1, keepdim=True)
    if n == 1:
        return worst
    others = badly.scatter(1, worst, 0.0)
    return torch.cat([worst, torch.multinomial(others, n - 1, generator=draw)], 1)


def judge_clusters_ask(found: Clusters, problem: Problem, tag: str) -> Ask:
    """Let clients keep their cluster and how well it serves their held-out rows; of all together, tell sums.

    `level` is the sum of clients' scores, with the common noise of the fits: see `score_sums.py` for how they are compared.
    """
    fold = {name: Sum() for name in ("loss", "rows", "level", "sizes", "there")}
    shared = {"problem": problem, "theta": found.theta, "noise": found.noise, "tag": tag}
    return Ask(
        judge_clusters, shared, fold, fresh={**problem.fresh, **fresh_judged(problem, tag, found.theta.shape[1])},
        scratch=problem.scratch(found.theta.shape[1] * found.theta.shape[2]),
        limits={"loss": problem.losses, "rows": COUNT},
    )  # fmt: skip


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    hessian=ByLabel("share"),
    gradient=ByLabel("share"),
    rows=ByLabel("share"),
    objective=Sum(),
    precision=Sum(),
    there=Sum(),
    curvature=Sum(),
    n=Sum(),
)
@from_sums
@one_run_at_a_time
def cluster_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Take the model that serves best; answer with first and second derivatives there."""
    problem, theta, common = shared["problem"], shared["theta"], shared["noise"][..., None]
    at, kept = curves(problem, private, data)
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
        "curvature": hessian[:, :1],
        "n": at.n,
        "there": there,
        "precision": there / noise,
        "objective": _objective(problem, loss, at.n, common),
    }
    return {name: value.movedim(2, 0) for name, value in reply.items()}, kept


def _objective(problem: Problem, loss: Tensor, n: Tensor, common: Tensor) -> Tensor:
    """Minus log-likelihood of the training rows; for regression with the client's own noise integrated out."""
    if not problem.is_regression:
        return loss
    prior = NOISE_ROWS * common
    return 0.5 * (NOISE_ROWS + n) * (prior + 2 * loss).log() - 0.5 * NOISE_ROWS * prior.log()


@answers(gap=Stack(), n=Sum())
@from_sums
@one_run_at_a_time
def loss_gap(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How much better its own model would serve a client than the best of those that there are."""
    problem, common = shared["problem"], shared["noise"][..., None]
    at, kept = curves(problem, private, data)
    best = _losses(at, shared["theta"]).amin(2)  # [F, 1, C]
    own = at.loss(private[OWN].transpose(0, 1)[:, None])
    values = [_objective(problem, loss, at.n, common) for loss in (best, own)]
    return {"gap": (values[0] - values[1])[:, 0].T, "n": at.n[:, 0].T}, kept


@answers(gain=Sum())
@from_sums
@one_run_at_a_time
def candidate_gain(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How much better a client would be served if a further model were there.  -> [C, F, L]"""
    problem, common = shared["problem"], shared["noise"][..., None]
    at, kept = curves(problem, private, data)
    best = _losses(at, shared["theta"]).amin(2)  # [F, 1, C]
    further = torch.minimum(_losses(at, shared["models"][:, :, None])[:, :, 0], best)  # [F, L, C]
    gain = _objective(problem, best, at.n, common) - _objective(problem, further, at.n, common)
    return {"gain": gain.movedim(2, 0)}, kept


@answers(theta=Stack())
@from_sums
@one_run_at_a_time
def own_model(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The client's own model, in every fit."""
    return {"theta": private[OWN]}, {}


@answers(loss=Sum(), rows=Sum(), level=Sum(), sizes=Sum(), there=Sum())
@from_sums
@one_run_at_a_time
def judge_clusters(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Take the model that serves the training rows best, judge it by the held-out ones, and keep what comes of it."""
    problem, theta, common = shared["problem"], shared["theta"], shared["noise"][..., None]
    at, kept = curves(problem, private, data)
    losses = _losses(at, theta)  # [F, J, K, C]
    label = losses.argmin(2)
    loss, right = at.held_out(_taken(theta, label))
    two = losses.topk(min(2, theta.shape[2]), 2, largest=False).values
    values = [_objective(problem, value, at.n, common) for value in (two[:, :, -1], two[:, :, 0])]
    margin = (values[0] - values[1]) / at.n.clamp(min=1)
    there = (at.n_held > 0).flatten(0, 1).any(0)  # [C]
    reply = {"loss": loss, "metric": right, "rows": at.n_held.expand_as(loss), "label": label, "margin": margin}
    if isinstance(at, Likelihood):
        reply["least"] = at.least(_taken(theta, label))
    reply = {name: value.movedim(2, 0) for name, value in reply.items()}  # [C, F, J]
    told = {"loss": reply["loss"], "rows": reply["rows"][:, :, :1], "there": there.to(torch.float64)}
    told["level"] = _level(problem, reply, shared["noise"])
    told["sizes"] = one_hot(reply["label"][:, -1], theta.shape[2]) * told["there"][:, None, None]  # [C, J, K]
    return told, {**kept, **keep_judged(problem, shared["tag"], reply)}


def _level(problem: Problem, reply: Tensors, common: Tensor) -> Tensor:
    """Scores of a client with rows enough.  [C, F, J], [F, J] -> [C, J]"""
    loss, n = (reply[name][:, : problem.n_folds] for name in ("loss", "rows"))
    rows = n.sum(1)
    value = -loss
    if problem.is_regression:
        h, m = loss.sum(1, keepdim=True) - loss, rows[:, None] - n
        value = normal_score(loss, n, noise_level(h, m, common[: problem.n_folds]))
    return value.sum(1) / rows.clamp(min=1) * (rows >= problem.n_folds)


def _losses(at: Curves, theta: Tensor) -> Tensor:
    """Of every model; one that diverged loses infinitely.  [F, J, K, P] -> [F, J, K, C]"""
    every = at.loss(theta.flatten(1, 2)[:, :, None])
    return worst_if_nan(every.view(*theta.shape[:3], every.shape[-1]))


def _taken(theta: Tensor, label: Tensor) -> Tensor:
    """The models that clients have chosen.  [F, J, K, P], [F, J, C] -> [F, J, C, P]"""
    return theta.gather(2, label[..., None].expand(-1, -1, -1, theta.shape[-1]))
