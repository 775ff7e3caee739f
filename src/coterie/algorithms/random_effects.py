# SPDX-License-Identifier: Apache-2.0
"""Random effects: clients' models are drawn around a common one. Local, shrunk and low-rank models are the same thing here.

Client i has the model w_i = m + B v_i with v_i ~ N(0, I), so its models vary by B B^T around m. With a wide B that nobody
learns these are local ridge regressions; with B learnt from all clients, models shrunk towards the common one, in every
direction as far as clients differ there; with a B of few columns, linear representations with heads v_i. m and B are found
by EM (Laird and Ware, 1982; for classification with a normal approximation at every client's mode): clients answer with
products like v_i v_i^T, of which the sum is taken, and keep v_i. For regression every client has a noise variance of its
own, drawn to a common one.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from coterie.algorithms.effects_of_squares import FromCovariance, effects_of_squares
from coterie.algorithms.linear_by_fold import Curves, Problem, Squares, curves, noise_level
from coterie.algorithms.outcome_curves import Likelihood
from coterie.algorithms.robust import COUNT, LOSSES, ONCE, SQUARES
from coterie.algorithms.score_sums import fresh_judged, keep_judged, kept_name
from coterie.models import Dense
from coterie.models.outcomes import OUTCOMES
from coterie.protocol import (
    Algorithm,
    Ask,
    Block,
    Fold,
    Limit,
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
    "OWN", "Kind", "Prior", "State", "adapt_effects", "adapt_effects_ask", "as_dense", "expect_effects", "fresh_model",
    "judge_effects", "judge_effects_ask", "keeps_covariance", "low_rank", "random_effects", "ridge_prior",
]  # fmt: skip

Kind = Literal["intercept", "same", "diagonal", "full"]

OWN = "own model"  # under this name clients keep a model of their own
_MOMENTS, _ABOUT_MEAN = 1, 2  # what clients are asked for beside their noise: bits of a number
_NOISE_STEPS = 3  # of a client's own noise, which depends on its model, which depends on the noise
_FAR = 0.5  # log odds of a standard deviation by which the mean of classifiers moves in a round, at most
_CENTRE_EVERY = 4  # rounds: the mean moves little, and takes clients long
_OUTCOME_CENTRE_EVERY = 2  # of other outcomes, whose extra parameters move with it
_HALVINGS = 4
_OUTCOME_HALVINGS = 12  # exponentials overshoot far
_SURE = 1e-3  # of a Newton step's gain in nats: so near the mode log odds change too little for it to go too far
_STILL = 1e-22  # likewise: after such a step nothing is left to gain, whoever else is in the block
_LEAST_STRETCH, _MOST_STRETCH = 0.5, 1.0  # by how much columns of B shrink and grow in a round, at most
_UNCERTAIN = 64  # parameters of a model whose covariance is kept, at most
_FLAT = 100.0  # variance of what is free, in a local model: intercepts

_LIMITS = {
    "count": ONCE, "precision": Limit(kind="positive"), "second": replace(SQUARES, out=1e4), "stiffness": SQUARES,
    "stretch": Limit(out=1e4), "loss": LOSSES, "metric": LOSSES, "rows": COUNT, "df": LOSSES,
}  # fmt: skip


@dataclass(frozen=True)
class Prior:
    """Where clients' models come from, in each of F fits and J settings."""

    mean: Tensor  # [F, J, P] m
    root: Tensor  # [F, J, P, R] B
    noise: Tensor  # [F, J] common noise variance; 1 for classification

    def setting(self, j: int) -> "Prior":
        """One setting alone."""
        at = slice(j, j + 1)
        return Prior(self.mean[:, at], self.root[:, at], self.noise[:, at])

    def last(self) -> "Prior":
        """The fit to all training rows."""
        return Prior(self.mean[-1:], self.root[-1:], self.noise[-1:])


@dataclass(frozen=True)
class State(Prior):
    """After a round."""

    round: int = 0


def ridge_prior(
    problem: Problem, penalties: tuple[float, ...], n_fits: int, noise: Tensor, common: Tensor | None = None
) -> Prior:
    """Local models: weights around zero with variance 1 / penalty, intercepts free.  noise [F]

    Of outcomes that are neither numbers nor classes, intercepts are free around that of a common model [F, P], and extra
    parameters are as there.
    """
    slopes = problem.slopes
    variance = torch.stack([slopes / l2 + (1 - slopes) * _FLAT for l2 in penalties]) * problem.own  # [J, P]
    root = torch.diag_embed(variance.sqrt()).expand(n_fits, -1, -1, -1)
    mean = torch.zeros(n_fits, *variance.shape, dtype=torch.float64)
    if problem.outcome and common is not None:
        mean = mean + (common * (1 - slopes))[:, None]
    return Prior(mean, root, noise[:, None].expand(-1, len(penalties)))


def low_rank(prior: Prior, hessian: Tensor, ranks: tuple[int, ...]) -> Prior:
    """Keep the directions in which clients differ most, as far as predictions show it.

    Parameters
    ----------
    prior : Prior
        With one setting, of all directions.
    hessian : Tensor
        [F, P, P] mean second derivatives: how much predictions change along a direction.
    ranks : tuple of int
        One setting for each, with columns of zeros where the rank is not the largest.
    """
    size = hessian.shape[-1]
    floor = 1e-9 * hessian.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(size, dtype=hessian.dtype)
    metric = torch.linalg.cholesky(hessian + floor)  # [F, P, P]
    seen = metric.transpose(-2, -1) @ prior.root[:, 0]
    u, s, _ = torch.linalg.svd(seen)
    back = torch.linalg.solve_triangular(metric.transpose(-2, -1), u * s[:, None], upper=True)[..., : max(ranks)]
    columns = torch.arange(max(ranks))
    root = torch.stack([back * (columns < r) for r in ranks], 1)
    n = len(ranks)
    return Prior(prior.mean.expand(-1, n, -1), root, prior.noise.expand(-1, n))


def random_effects(
    state: State | None, *, start: Prior, problem: Problem, kinds: tuple[Kind, ...], rounds: int, tag: str,
    learn: bool = True,
) -> Algorithm:  # fmt: skip
    """Improve a prior by EM.

    Parameters
    ----------
    start : Prior
        Where to begin.
    kinds : tuple
        What the covariance of each setting may be: of intercepts only, of weights that all vary alike ("same") and of
        intercepts, diagonal, full (within the columns of B).
    tag : str
        Under which clients keep their v_i, so as not to begin anew every round.
    learn : bool
        Whether m and B are learnt; else only the common noise, and extra parameters of outcomes.
    """
    if state is None:
        state = State(start.mean, start.root, start.noise)
        yield Save(state)
    while state.round < rounds:
        every = _OUTCOME_CENTRE_EVERY if problem.outcome else _CENTRE_EVERY
        centre = state.round % every == 0 if learn else problem.n_extra > 0
        fold: dict[str, Fold] = {"count": Sum(), "precision": Sum()}
        if learn:
            fold |= {name: Sum() for name in ("second", "stretch", "stiffness")}
        if centre:
            fold |= {name: Sum() for name in ("slope", "information")}
        wanted = _MOMENTS * learn + _ABOUT_MEAN * centre
        got = yield _ask(expect_effects, state, problem, tag, fold, steps=_steps(problem, state.round), wanted=wanted)
        if got is not None and got.n:
            state = _maximised(state, got, problem, kinds if learn else ())
        state = replace(state, round=state.round + 1)
        yield Save(state)
    return state


def _steps(problem: Problem, round_: int) -> int:
    """Of Newton's method: clients go on from where they were, and regression needs one."""
    return 6 if round_ == 0 else 1 if problem.is_regression else 2


def _maximised(prior: State, got: Replies, problem: Problem, kinds: tuple[Kind, ...]) -> State:
    """The M-step: the common noise, and where they are learnt a new root of the covariance that the kind admits, and a mean.

    Columns of B are stretched on the way, as far as the rows want it (PX-EM: Liu, Rubin, Wu, Biometrika 1998), and the mean
    is that of generalised least squares, v_i integrated out. Without that, variances that begin too small or too large, and
    means in directions in which clients do not differ, would take hundreds of rounds.
    """
    count = got["count"].clamp(min=1)  # [F, 1]
    if problem.is_regression:
        prior = replace(prior, noise=count / got["precision"])
    if not kinds:
        return _with_extra(prior, got, problem)
    stretch = _solved(got["stiffness"], got["stretch"]).clamp(-_LEAST_STRETCH, _MOST_STRETCH)
    wide, spread = prior.root * (1 + stretch)[:, :, None], got["second"] / count[..., None, None]
    root = torch.stack([_root(wide[:, j], spread[:, j], kind, problem) for j, kind in enumerate(kinds)], 1)
    if problem.is_regression and set(kinds) == {"intercept"}:
        root = root[..., -1:]  # nothing else differs: so clients have one effect, and no matrices to factor
    mean = prior.mean
    if "information" in got.values:
        step = _solved(got["information"], got["slope"])
        mean = mean - (step if problem.is_regression else step.clamp(-_FAR, _FAR))  # modes are only nearly so
    return replace(prior, mean=mean, root=root)


def _with_extra(prior: State, got: Replies, problem: Problem) -> State:
    """Move extra parameters alone."""
    if not problem.n_extra:
        return prior
    at = slice(problem.n_parameters - problem.n_extra, None)
    step = _solved(got["information"][..., at, at], got["slope"][..., at]).clamp(-_FAR, _FAR)
    mean = prior.mean.clone()
    mean[..., at] -= step
    return replace(prior, mean=mean)


def _solved(a: Tensor, b: Tensor) -> Tensor:
    """Solve, with a trace of ridge where nothing is known.  [..., N, N], [..., N] -> [..., N]"""
    floor = 1e-6 * a.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=1e-6)[..., None, None]
    found: Tensor = torch.linalg.solve(a + floor * torch.eye(a.shape[-1], dtype=a.dtype), b)
    return found


def _root(root: Tensor, spread: Tensor, kind: Kind, problem: Problem) -> Tensor:
    """B of B S B^T, for one setting.  [F, P, R], [F, R, R] -> [F, P, R]"""
    if kind == "full":
        values, vectors = torch.linalg.eigh(spread)  # the symmetric root: what clients keep stays near where it was
        own: Tensor = root @ (vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.transpose(-2, -1)
        return own
    variance = torch.einsum("fpr,frs,fps->fp", root, spread, root).clamp(min=0)
    slopes = problem.slopes
    if kind == "intercept":
        variance = variance * (1 - slopes)
    if kind == "same":
        alike = (variance * slopes).sum(-1, keepdim=True) / slopes.sum()
        variance = torch.where(slopes > 0, alike, variance)
    return torch.diag_embed(variance.sqrt())


def judge_effects_ask(
    prior: Prior, problem: Problem, tag: str, *, keep: int | None = None, effects: bool = False
) -> Ask:
    """Let clients keep how well the models that they make of the prior serve their held-out rows.

    Of all together, sums are told, and how free these models are.

    Parameters
    ----------
    keep : int, optional
        The setting whose model a client keeps as its own.
    effects : bool
        Whether clients tell v_i, for a map of them, and nothing else.
    """
    if effects:
        return _ask(judge_effects, prior, problem, tag, {"effects": Stack()}, steps=8)
    fold: dict[str, Fold] = {name: Sum() for name in ("loss", "rows", "df")}
    ask = _ask(judge_effects, prior, problem, tag, fold, steps=8, keep=keep)
    return replace(ask, fresh={**ask.fresh, **fresh_judged(problem, tag, prior.mean.shape[1])})


def adapt_effects_ask(prior: Prior, problem: Problem, model: Dense) -> Ask:
    """Ask clients to make models of the prior and of their rows, and to keep them as parameters of `model`."""
    ask = _ask(adapt_effects, prior, problem, "own", {}, steps=8)
    fresh = {**ask.fresh, "theta": torch.zeros(model.n_parameters, dtype=torch.float64)}
    if keeps_covariance(problem):
        fresh["covariance"] = torch.zeros(model.n_parameters, model.n_parameters, dtype=torch.float64)
    return replace(ask, shared={**ask.shared, "model": model}, fresh=fresh)


def keeps_covariance(problem: Problem) -> bool:
    """Whether clients keep how uncertain their models are: of numbers, and unless it is large."""
    return problem.is_regression and problem.n_parameters <= _UNCERTAIN


def as_dense(model: Dense, theta: Tensor) -> Tensor:
    """Weights and intercept, output by output, in the order of `Dense`; of two classes the first has log odds 0.

    Extra parameters of an outcome are outputs that no feature changes.  theta [..., O (D + 1) + Q] -> [..., P]
    """
    if model.loss in OUTCOMES:
        size, extra = model.sizes[0], theta.shape[-1] - model.sizes[0] - 1
        nothing = theta.new_zeros(*theta.shape[:-1], extra * size)
        return torch.cat([theta[..., :size], nothing, theta[..., size:]], -1)
    outputs = theta.reshape(*theta.shape[:-1], -1, model.sizes[0] + 1)
    if outputs.shape[-2] < model.n_outputs:
        outputs = torch.cat([torch.zeros_like(outputs), outputs], -2)
    return torch.cat([outputs[..., :-1].flatten(-2), outputs[..., -1]], -1)


def fresh_model(problem: Problem) -> Tensors:
    """A client's own model, before it has one."""
    return {OWN: torch.zeros(len(problem.held), problem.n_parameters, dtype=torch.float64)}


def _ask(
    step: Any, prior: Prior, problem: Problem, tag: str, fold: dict[str, Any], *, steps: int, keep: int | None = None,
    wanted: int = 0,
) -> Ask:  # fmt: skip
    shared = {
        "problem": problem, "mean": prior.mean, "root": prior.root, "noise": prior.noise, "tag": tag, "steps": steps,
        "keep": keep, "wanted": wanted,
    }  # fmt: skip
    shape = prior.root.shape
    nothing = torch.zeros(shape[0], shape[1], shape[3], dtype=torch.float64)
    fresh = {**problem.fresh, f"{tag} noise": nothing[..., 0].clone()}
    if not problem.is_regression:  # whose effects are found at once, from anywhere
        fresh[f"{tag} effects"] = nothing
    if keep is not None:
        fresh |= fresh_model(problem)
    limits = {name: limit for name, limit in (_LIMITS | {"loss": problem.losses}).items() if name in fold}
    return Ask(
        step, shared, fold, fresh=fresh, scratch=problem.scratch(shape[1], shape[1]), work=float(steps), limits=limits
    )


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(count=Sum(), precision=Sum(), second=Sum(), stretch=Sum(), stiffness=Sum(), slope=Sum(), information=Sum())
@from_sums
@one_run_at_a_time
def expect_effects(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The E-step: moments of v_i, and the precision of the client's noise."""
    at, products = curves(shared["problem"], private, data)
    found = _effects(shared, private, at)
    there = (at.n > 0).to(torch.float64)  # [F, 1, C]: who has no training rows would only repeat the prior
    reply = {"count": there, "precision": there / found.next_noise}
    if shared["wanted"] & _MOMENTS:
        reply |= _moments(found, there)
    if shared["wanted"] & _ABOUT_MEAN:
        reply |= _about_mean(shared, at, found, there)
    return _by_client(reply), {**products, **_kept(shared, found)}


def _moments(found: "_Effects", there: Tensor) -> Tensors:
    """Second moments of v_i, and how the likelihood changes as columns of B are stretched."""
    outer = torch.addcmul(found.covariance, found.v[..., None], found.v[..., None, :])
    pull = found.v.square() + found.variance - 1  # at the mode the slope is -v, and B^T H B times the covariance 1 - it
    stiffness = (found.projected * outer).div_(found.noise[..., None, None])
    moments = {"second": outer, "stretch": pull, "stiffness": stiffness}
    if bool(there.all()):
        return moments
    return {name: value * there.view(*there.shape, *(1,) * (value.dim() - 3)) for name, value in moments.items()}


def _about_mean(shared: dict[str, Any], at: Curves, found: "_Effects", there: Tensor) -> Tensors:
    """Slope and curvature of minus the log-likelihood in m, v_i integrated out: H - H B (B^T H B + I)^-1 B^T H."""
    root = shared["root"]
    models = _models(shared["mean"], shared["root"], found.v)
    _, gradient, hessian = at.quadratic(models)
    scaled = hessian / found.noise[..., None, None]  # [F, J, C, P, P]
    seen = torch.einsum("fjcpq,fjqr->fjcpr", scaled, root)
    known = scaled.sub_(seen @ found.covariance @ seen.transpose(-2, -1))
    slope = gradient / found.noise[..., None]
    if isinstance(at, Likelihood) and shared["problem"].n_extra:
        unsure = torch.einsum("fjpr,fjcrs,fjqs->fjcpq", root, found.covariance, root)
        wider = at.spread_slope(models, unsure)
        slope = torch.cat([slope[..., : -wider.shape[-1]], slope[..., -wider.shape[-1] :] + wider], -1)
    return {"slope": there[..., None] * slope, "information": there[..., None, None] * known}


@answers(loss=Sum(), rows=Sum(), effects=Stack(), df=Sum())
@from_sums
@one_run_at_a_time
def judge_effects(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Make a model of the prior and of the client's training rows, judge it by the held-out ones, and keep that."""
    at, products = curves(shared["problem"], private, data)
    found = _effects(shared, private, at)
    models = _models(shared["mean"], shared["root"], found.v)
    loss, right = at.held_out(models)
    kept = {**products, **_kept(shared, found)}
    if shared["keep"] is not None:
        kept[OWN] = models[:, shared["keep"]].transpose(0, 1)
    told = _by_client({"effects": found.v, "df": found.freedom})
    if kept_name(shared["problem"], shared["tag"]) in private:
        judged = _by_client({"loss": loss, "metric": right, "rows": at.n_held.expand_as(loss)})
        told |= {"loss": judged["loss"], "rows": judged["rows"][:, :, :1]}
        kept |= keep_judged(shared["problem"], shared["tag"], judged)
    return told, kept


@answers()
@from_sums
@one_run_at_a_time
def adapt_effects(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Make a model of the prior and of the client's rows, and keep it: that of the last fit and the first setting."""
    at, products = curves(shared["problem"], private, data)
    found = _effects(shared, private, at)
    own = {"theta": as_dense(shared["model"], _models(shared["mean"], shared["root"], found.v)[-1, 0])}
    if keeps_covariance(shared["problem"]):
        root = shared["root"][-1, 0]  # [P, R]
        own["covariance"] = root @ found.covariance[-1, 0] @ root.T  # [C, P, P]
    return {}, {**products, **_kept(shared, found), **own}


class _Effects(Protocol):
    """What is known of v_i, given the noise."""

    @property
    def v(self) -> Tensor:
        """[F, J, C, R] mode"""

    @property
    def noise(self) -> Tensor:
        """[F, J, C] that mode and covariance rest on"""

    @property
    def next_noise(self) -> Tensor:
        """[F, J, C] that follows from them"""

    @property
    def projected(self) -> Tensor:
        """[F, J, C, R, R] B^T H B"""

    @property
    def covariance(self) -> Tensor:
        """[F, J, C, R, R] (B^T H B / noise + 1)^-1"""

    @property
    def variance(self) -> Tensor:
        """[F, J, C, R] its diagonal"""

    @property
    def freedom(self) -> Tensor:
        """[F, J, C] the trace of the hat matrix"""


def _effects(shared: dict[str, Any], private: Tensors, at: Curves) -> _Effects:
    """Every client's v_i given its training rows, and its noise."""
    tag, common = shared["tag"], shared["noise"][..., None]  # [F, J, 1]
    before = private[f"{tag} noise"].permute(1, 2, 0)  # [F, J, C]
    noise = torch.where(before > 0, before, common)
    if isinstance(at, Squares):
        found = effects_of_squares(at, shared["mean"], shared["root"])
        for _ in range(min(shared["steps"], _NOISE_STEPS)):
            found.settle(noise)
            noise = noise_level(found.loss + 0.5 * found.noise * found.freedom, at.n, common)
        found.next_noise = noise
        return found
    v = private[f"{tag} effects"].permute(1, 2, 0, 3)  # [C, F, J, R] -> [F, J, C, R]
    return _AtMode(*_mode(shared, at, v, shared["steps"]), noise)


class _AtMode(FromCovariance):
    """A normal approximation, where there is no noise."""

    def __init__(self, v: Tensor, factor: Tensor, projected: Tensor, noise: Tensor) -> None:
        """Of v_i [F, J, C, R], by a factor of its precision [F, J, C, R, R]."""
        self.v, self.projected, self.noise, self.next_noise = v, projected, noise, noise
        self.covariance = torch.cholesky_inverse(factor)


def _mode(shared: dict[str, Any], at: Curves, v: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method for loss(m + B v) + |v|^2 / 2.  -> mode, factor of the precision there, B^T H B

    Settings for which it has come to rest, for all these clients, take no further steps.
    """
    one = torch.eye(v.shape[-1], dtype=v.dtype)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []  # of settings that rest: v, factor, B^T H B
    places, on = [], torch.arange(v.shape[1])
    mean, root = shared["mean"], shared["root"]  # [F, J, P], [F, J, P, R]
    halvings = _OUTCOME_HALVINGS if shared["problem"].outcome else _HALVINGS
    for left in range(steps - 1, -1, -1):
        loss, pull, projected = at.along(_models(mean, root, v), root)
        slope, factor = pull + v, torch.linalg.cholesky(projected + one)
        step = torch.cholesky_solve(slope[..., None], factor)[..., 0]
        gain = (slope * step).sum(-1)  # [F, J, C] twice what the step gains, were the loss quadratic
        if bool((gain < _SURE).all()):
            v = v - step
        else:
            v = _halved(mean, root, at, v, step, loss + 0.5 * v.square().sum(-1), halvings)
        moves = gain.amax((0, 2)) > _STILL if left else torch.zeros(len(on), dtype=torch.bool)  # [J]
        if bool(moves.all()):
            continue
        parts.append((v[:, ~moves], factor[:, ~moves], projected[:, ~moves]))
        places.append(on[~moves])
        on, v, mean, root = on[moves], v[:, moves], mean[:, moves], root[:, moves]
        if not len(on):
            break
    if len(parts) == 1:
        return parts[0]
    order = torch.cat(places).argsort()
    v, factor, projected = (torch.cat(part, 1)[:, order] for part in zip(*parts, strict=True))
    return v, factor, projected


def _halved(mean: Tensor, root: Tensor, at: Curves, v: Tensor, step: Tensor, before: Tensor, halvings: int) -> Tensor:
    """Take the step, or as much of it as does not make things worse."""
    length = torch.ones_like(before)
    for _ in range(halvings):
        new = v - length[..., None] * step
        worse = at.loss(_models(mean, root, new)) + 0.5 * new.square().sum(-1) > before + 1e-9 * before.abs()
        if not bool(worse.any()):
            return new
        length = torch.where(worse, 0.5 * length, length)
    return torch.where(worse[..., None], v, new)


def _models(mean: Tensor, root: Tensor, v: Tensor) -> Tensor:
    """m + B v.  [F, J, P], [F, J, P, R], [F, J, C, R] -> [F, J, C, P]"""
    made: Tensor = mean[:, :, None] + torch.einsum("fjpr,fjcr->fjcp", root, v)
    return made


def _kept(shared: dict[str, Any], found: _Effects) -> Tensors:
    kept = {f"{shared['tag']} noise": found.next_noise.permute(2, 0, 1)}
    if not shared["problem"].is_regression:
        kept[f"{shared['tag']} effects"] = found.v.permute(2, 0, 1, 3)
    return kept


def _by_client(reply: Tensors) -> Tensors:
    """[F, J, C, ...] -> [C, F, J, ...]"""
    return {name: value.movedim(2, 0) for name, value in reply.items()}
