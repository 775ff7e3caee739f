# SPDX-License-Identifier: Apache-2.0
"""Mixtures of regressions within clients: every row has one of R common models, in proportions of the client's own.

EM with components from sums over all clients (as FedEM: Marfoq et al., NeurIPS 2021). Several random starts, with densities
that are flat at first, advance in lockstep; then the likeliest goes on. Clients have too few rows here to begin with mixtures
of their own, as FedGrEM does.

A mixture also gains where noise is merely not normal, or wider at some rows than at others. What a model of the noise brings,
around one model for all, is therefore fitted as well, to be taken off: its variance is log-linear in the features, and
what is left of its shape is a mixture (`Shape`). As for all structures, noise is as wide as a client's own rows say.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.compare.problem import NOISE_ROWS, Problem
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors

__all__ = [
    "Mixed", "Shape", "expect_noise", "expect_rows", "fit_mixed", "fit_shape", "judge_mixed", "judge_mixed_ask",
    "judge_shape", "judge_shape_ask", "widen_noise",
]  # fmt: skip

Run = Generator[Ask | Save, Replies | None, Any]

_COLD = 0.1  # densities begin with this power
_TRIAL = 0.35  # share of the rounds in which all starts advance
_OWN_ROWS = 2.0  # common proportions count as so many rows of a client
_LEAST = 0.05  # smallest variance of a component, relative to all noise together
_FAR = 25.0  # squared residuals, in units of the variance, that count as no larger
_WIDTH_STEPS = 8  # of Newton's method, for the noise's variance
_WEIGHT_STEPS = 20  # in which a client finds its proportions


@dataclass(frozen=True)
class Mixed:
    """Mixtures, in each of F fits and J starts."""

    theta: Tensor  # [F, J, R, P]
    weights: Tensor  # [F, J, R] common proportions
    noise: Tensor  # [F, J, R] variances
    likelihood: Tensor  # [F, J] of all training rows


@dataclass(frozen=True)
class Shape:
    """Noise around one model for all, in each of F fits: scaled by the square root of exp(<x, width>), a mixture."""

    theta: Tensor  # [F, P] the model
    spread: Tensor  # [F] variance of the noise, were it normal and alike everywhere
    width: Tensor  # [F, P]
    centre: Tensor  # [F, R]
    weights: Tensor  # [F, R]
    noise: Tensor  # [F, R] variances


def fit_mixed(
    base: Tensor, spread: Tensor, problem: Problem, *, n_components: int, starts: int, rounds: int, seed: int
) -> Run:
    """Fit mixtures, and take the likeliest start of every fit.  -> Mixed with J = 1

    Parameters
    ----------
    base, spread : Tensor
        [F, P], [F] one model for all, and the variance around it.
    """
    state = _begin(base, spread, n_components, starts, seed)
    trial = max(1, round(_TRIAL * rounds))
    for round_ in range(rounds):
        if round_ == trial:
            state = _likeliest(state)
        power = torch.tensor(min(1.0, _COLD ** (1 - round_ / max(trial - 3, 1))), dtype=torch.float64)
        fold = {name: Sum() for name in ("moments", "rows", "likelihood")}
        shared = {"problem": problem, **vars(state), "power": power}
        name = f"weights {n_components} {state.weights.shape[1]}"
        fresh = {name: torch.full(state.weights.shape, -1.0, dtype=torch.float64)}
        got = yield Ask(expect_rows, shared, fold, fresh=fresh, scratch=_scratch(state, problem))
        if got is not None and got.n:
            state = _maximised(state, got, spread)
        yield Save(state)
    return _likeliest(state)


def _begin(base: Tensor, spread: Tensor, n_components: int, starts: int, seed: int) -> Mixed:
    """Components as far from the model for all as noise is wide."""
    fits, size = base.shape
    draw = keys.generator(seed, n_components, "mixed starts")
    offset = torch.randn(starts, n_components, size, generator=draw, dtype=torch.float64) * size**-0.5
    theta = base[:, None, None] + spread[:, None, None, None].sqrt() * offset
    equal = torch.full((fits, starts, n_components), 1.0 / n_components, dtype=torch.float64)
    noise = spread[:, None, None].expand_as(equal).clone()
    return Mixed(theta, equal, noise, torch.zeros(fits, starts, dtype=torch.float64))


def _likeliest(state: Mixed) -> Mixed:
    best = state.likelihood.argmax(1)
    at = torch.arange(len(best))
    return Mixed(*(value[at, best][:, None] for value in vars(state).values()))


def _maximised(state: Mixed, got: Replies, spread: Tensor) -> Mixed:
    """The M-step, from sums of products by responsibility."""
    moments = _square(got["moments"], state.theta.shape[-1] + 1)  # [F, J, R, Q, Q]
    rows = got["rows"].clamp(min=1e-9)
    little = 1e-6 * (1 + rows[..., None]).expand_as(state.theta)
    theta = torch.linalg.solve(moments[..., :-1, :-1] + torch.diag_embed(little), moments[..., :-1, -1])
    residual = torch.cat([theta, -torch.ones_like(theta[..., :1])], -1)
    squares = torch.einsum("fjrp,fjrpq,fjrq->fjr", residual, moments, residual).clamp(min=0)
    noise = torch.maximum(squares / rows, _LEAST * spread[:, None, None])
    return replace(state, theta=theta, noise=noise, weights=_shares(got["rows"]), likelihood=got["likelihood"])


def _square(packed: Tensor, size: int) -> Tensor:
    """Symmetric matrices from their upper triangles."""
    i, j = torch.triu_indices(size, size)
    out = packed.new_empty(*packed.shape[:-1], size, size)
    out[..., i, j] = packed
    out[..., j, i] = packed
    return out


def _shares(rows: Tensor) -> Tensor:
    """Proportions that are never zero, since their logarithms are taken."""
    return ((rows + 1e-6) / (rows + 1e-6).sum(-1, keepdim=True)).clamp(min=1e-12)


def fit_shape(base: Tensor, spread: Tensor, problem: Problem, *, n_components: int, rounds: int) -> Run:
    """Fit the noise around the model for all.  -> Shape"""
    steps = torch.linspace(-1.0, 1.0, n_components, dtype=torch.float64).expand(len(base), -1)
    equal = torch.full_like(steps, 1.0 / n_components)
    width = torch.zeros_like(base)
    width[:, -1] = spread.log()
    state = Shape(base, spread, width, steps, equal, torch.ones_like(steps))
    for _ in range(_WIDTH_STEPS):
        fold = {"slope": Sum(), "information": Sum()}
        got = yield Ask(widen_noise, {"problem": problem, **vars(state)}, fold, scratch=6 * len(base))
        if got is not None and got.n:
            ridge = torch.eye(base.shape[1], dtype=torch.float64)  # as if by one more row
            move = torch.linalg.solve(got["information"] + ridge, got["slope"])
            state = replace(state, width=state.width + move.clamp(-1.0, 1.0))
    for _ in range(rounds):
        got = yield Ask(
            expect_noise, {"problem": problem, **vars(state)}, {"moments": Sum()}, scratch=6 * equal.numel()
        )
        if got is not None and got.n:
            n, first, second = got["moments"].clamp(min=1e-9), *got["moments"][..., 1:].unbind(-1)
            centre = first / n[..., 0]
            noise = (second / n[..., 0] - centre.square()).clamp(min=_LEAST)
            state = replace(state, centre=centre, noise=noise, weights=_shares(n[..., 0]))
        yield Save(state)
    return state


def judge_mixed_ask(found: Mixed, problem: Problem) -> Ask:
    """Ask clients how likely held-out rows are, once they have found their proportions in the training rows."""
    fold = {name: Stack() for name in ("loss", "right", "rows")}
    return Ask(judge_mixed, {"problem": problem, **vars(found)}, fold, scratch=_scratch(found, problem))


def judge_shape_ask(found: Shape, problem: Problem) -> Ask:
    """Ask clients how likely held-out rows are, with the noise's shape and with plain normal noise."""
    shared, fold = {"problem": problem, **vars(found)}, {"loss": Stack(), "plain": Stack()}
    return Ask(judge_shape, shared, fold, scratch=6 * found.weights.numel())


def _scratch(state: Mixed, problem: Problem) -> int:
    return 6 * state.weights.numel() + (problem.n_features + 2) * (problem.n_features + 3) // 2


# -- on the client ----------------------------------------------------------------------------------------------------
def expect_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The E-step: sums of products of training rows by responsibility, and new proportions of the client's own."""
    (name,) = private
    common = shared["weights"][0][:, :, None]  # [F, J, 1, R]
    own = private[name][0].permute(1, 2, 0, 3)  # [F, J, C, R]
    weights = torch.where(own < 0, common, own)
    train, _ = _masks(shared["problem"], data)
    joint = weights[..., None, :].log() + _density(shared, data)  # [F, J, C, N, R]
    gamma = (shared["power"][0] * joint).softmax(-1) * train[:, None, ..., None]
    pairs = data.once("pairs of columns", lambda: _pairs(data))  # [C, N, Q (Q + 1) / 2]
    flat = gamma.permute(2, 0, 1, 4, 3).flatten(1, 3)  # [C, F J R, N]
    moments = torch.bmm(flat, pairs).unflatten(1, (*gamma.shape[:2], gamma.shape[-1]))
    rows = gamma.sum(3)
    reply = {
        "moments": moments,
        "rows": rows.movedim(2, 0),
        "likelihood": (joint.logsumexp(-1) * train[:, None]).sum(-1).movedim(2, 0),
    }
    kept = _proportions(rows, common).permute(2, 0, 1, 3)
    return {field: value[None] for field, value in reply.items()}, {name: kept[None]}


def widen_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A step of Fisher's scoring for a variance that is log-linear in the features.  -> [1, C, F, P], [1, C, F, P, P]"""
    train, _ = _masks(shared["problem"], data)
    x = _rows(data)[..., :-1]
    residual, _ = _scaled_residuals(shared, data)
    excess = 0.5 * (residual.square().clamp(max=_FAR) - 1) * train  # one row does not make noise wide
    slope = torch.einsum("fcn,cnp->cfp", excess, x)
    return {"slope": slope[None], "information": 0.5 * torch.einsum("fcn,cnp,cnq->cfpq", train, x, x)[None]}, {}


def expect_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of residuals' powers by responsibility.  -> [1, C, F, R, 3]"""
    train, _ = _masks(shared["problem"], data)
    residual, density = _noise_density(shared, data)
    gamma = (shared["weights"][0][:, None, None].log() + density).softmax(-1) * train[..., None]
    powers = torch.stack([torch.ones_like(residual), residual, residual.square()], -1)  # [F, C, N, 3]
    return {"moments": torch.einsum("fcnr,fcnk->cfrk", gamma, powers)[None]}, {}


def judge_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the client's proportions and noise in its training rows, and judge the mixture by the held-out ones."""
    train, held = _masks(shared["problem"], data)
    residual, common = _residuals(shared, data), shared["weights"][0][:, :, None]
    noise = shared["noise"][0][:, :, None, None]
    loss, weights = _settled(residual, noise, common, train[:, None], held[:, None], own=True)
    z = _rows(data)
    expected = torch.einsum("fjcp,cnp->fjcn", torch.einsum("fjcr,fjrp->fjcp", weights, shared["theta"][0]), z[..., :-1])
    squares = (expected - z[..., -1]).square()
    reply = {"loss": loss, "right": (squares * held[:, None]).sum(-1), "rows": held.sum(-1)[:, None]}
    return {field: value.movedim(2, 0)[None] for field, value in reply.items()}, {}


def judge_shape(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Minus the log-likelihood of held-out rows, with the noise's shape and with normal noise.  -> [1, C, F] each"""
    train, held = _masks(shared["problem"], data)
    scaled, log_variance = _scaled_residuals(shared, data)
    centre, noise = shared["centre"][0][:, None, None], shared["noise"][0][:, None, None]
    common = shared["weights"][0][:, None]
    loss, _ = _settled(scaled[..., None] - centre, noise, common, train, held, own=False)
    loss = loss + 0.5 * (log_variance * held).sum(-1)
    width = shared["spread"][0][:, None, None, None]
    residual = (scaled * (0.5 * log_variance).exp())[..., None]
    plain, _ = _settled(residual, width, torch.ones_like(common[..., :1]), train, held, own=False)
    return {"loss": loss.T[None], "plain": plain.T[None]}, {}


def _settled(
    residual: Tensor, noise: Tensor, common: Tensor, train: Tensor, held: Tensor, *, own: bool
) -> tuple[Tensor, Tensor]:
    """Minus the log-likelihood of held-out rows, once the client knows how wide its noise is, and its proportions if `own`.

    residual [..., C, N, R], noise and common [..., 1, 1, R], [..., 1, R], masks [..., C, N] -> [..., C], weights [..., C, R]
    """
    weights = common.expand(*residual.shape[:-2], -1)
    wide = torch.ones_like(residual[..., 0, 0])  # [..., C] factor on all variances
    n = train.sum(-1)
    for _ in range(_WEIGHT_STEPS):
        density = _normal(residual, noise * wide[..., None, None])
        gamma = (weights[..., None, :].log() + density).softmax(-1) * train[..., None]
        if own:
            weights = _proportions(gamma.sum(-2), common)
        wide = (NOISE_ROWS + (gamma * residual.square() / noise).sum((-2, -1))) / (NOISE_ROWS + n)
    density = _normal(residual, noise * wide[..., None, None])
    likelihood = (weights[..., None, :].log() + density).logsumexp(-1)
    return -(likelihood * held).sum(-1), weights


def _proportions(rows: Tensor, common: Tensor) -> Tensor:
    return (rows + _OWN_ROWS * common) / (rows.sum(-1, keepdim=True) + _OWN_ROWS)


def _rows(data: Block) -> Tensor:
    """Features, intercept and target.  [C, N, Q]"""
    return torch.cat([data.x[..., :-1], torch.ones_like(data.x[..., :1]), data.target[..., None]], -1)


def _pairs(data: Block) -> Tensor:
    z = _rows(data)
    i, j = torch.triu_indices(z.shape[-1], z.shape[-1])
    return z[..., i] * z[..., j]


def _masks(problem: Problem, data: Block) -> tuple[Tensor, Tensor]:
    """Which rows are trained on, and which are held out.  [F, C, N]"""
    fold = data.x[..., -1]
    numbers = torch.tensor(problem.held, dtype=fold.dtype).view(-1, 1, 1)
    train = (fold != numbers) & (fold != problem.n_folds) & data.real
    return train.to(data.x.dtype), ((fold == numbers) & data.real).to(data.x.dtype)


def _density(shared: dict[str, Any], data: Block) -> Tensor:
    """Log density of every row under every component.  [F, J, C, N, R]"""
    return _normal(_residuals(shared, data), shared["noise"][0][:, :, None, None])


def _residuals(shared: dict[str, Any], data: Block) -> Tensor:
    """Of every row under every component.  [F, J, C, N, R]"""
    z, theta = _rows(data), shared["theta"][0]
    outputs = (z[..., :-1].flatten(0, 1) @ theta.flatten(0, 2).T).view(*z.shape[:2], *theta.shape[:3])
    return (z[..., -1, None, None, None] - outputs).permute(2, 3, 0, 1, 4)


def _noise_density(shared: dict[str, Any], data: Block) -> tuple[Tensor, Tensor]:
    """Scaled residuals [F, C, N], and the residuals' log density under every component [F, C, N, R]."""
    residual, log_variance = _scaled_residuals(shared, data)
    centre, noise = shared["centre"][0][:, None, None], shared["noise"][0][:, None, None]
    return residual, _normal(residual[..., None] - centre, noise) - 0.5 * log_variance[..., None]


def _scaled_residuals(shared: dict[str, Any], data: Block) -> tuple[Tensor, Tensor]:
    """Residuals over their deviation, and the logarithm of its square.  [F, C, N]"""
    z = _rows(data)
    outputs, log_variance = (torch.einsum("cnp,fp->fcn", z[..., :-1], shared[name][0]) for name in ("theta", "width"))
    log_variance = log_variance.clamp(-_FAR, _FAR)
    return (z[..., -1] - outputs) * (-0.5 * log_variance).exp(), log_variance


def _normal(residual: Tensor, noise: Tensor) -> Tensor:
    return -0.5 * (residual.square() / noise + (2 * torch.pi * noise).log())
