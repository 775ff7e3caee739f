# SPDX-License-Identifier: Apache-2.0
"""Mixtures of regressions within clients: every row has one of R common models, in proportions of the client's own.

EM with components from sums over all clients. Several random starts, with densities that are flat at first, advance in
lockstep; then the likeliest goes on. Clients have too few rows here to begin with mixtures of their own, as FedGrEM does. As
for all structures, noise is as wide as a client's own rows say.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.linear_by_fold import NOISE_ROWS, Problem
from coterie.algorithms.robust import COUNT, LOSSES
from coterie.protocol import (
    Algorithm,
    Ask,
    Block,
    Replies,
    RowProduct,
    Save,
    Stack,
    Sum,
    Tensors,
    answers,
    one_run_at_a_time,
)

__all__ = [
    "LEAST", "Mixed", "State", "expect_rows", "judge_mixed", "judge_mixed_ask", "normal", "row_mixture", "rows_of",
    "settled", "shares",
]  # fmt: skip

_COLD = 0.1  # densities begin with this power
_TRIAL = 0.35  # share of the rounds in which all starts advance
_OWN_ROWS = 2.0  # common proportions count as so many rows of a client
LEAST = 0.05  # smallest variance of a component, relative to all noise together
_WEIGHT_STEPS = 20  # in which a client finds its proportions


@dataclass(frozen=True)
class Mixed:
    """Mixtures, in each of F fits and J starts."""

    theta: Tensor  # [F, J, R, P]
    weights: Tensor  # [F, J, R] common proportions
    noise: Tensor  # [F, J, R] variances
    likelihood: Tensor  # [F, J] of all training rows

    def last(self) -> "Mixed":
        """The fit to all training rows."""
        return Mixed(self.theta[-1:], self.weights[-1:], self.noise[-1:], self.likelihood[-1:])


@dataclass(frozen=True)
class State(Mixed):
    """After a round."""

    round: int = 0


def row_mixture(
    state: State | None, *, base: Tensor, spread: Tensor, problem: Problem, n_components: int, starts: int, rounds: int,
    seed: int,
) -> Algorithm:  # fmt: skip
    """Fit mixtures, and take the likeliest start of every fit.

    Parameters
    ----------
    base, spread : Tensor
        [F, P], [F] one model for all, and the variance around it.
    """
    if state is None:
        state = _begin(base, spread, n_components, starts, seed)
        yield Save(state)
    trial = max(1, round(_TRIAL * rounds))
    while state.round < rounds:
        if state.round == trial:
            state = _likeliest(state)
        power = torch.tensor(min(1.0, _COLD ** (1 - state.round / max(trial - 3, 1))), dtype=torch.float64)
        fold = {name: Sum() for name in ("moments", "rows", "likelihood")}
        name = f"weights {n_components} {state.weights.shape[1]}"
        fresh = {name: torch.full(state.weights.shape, -1.0, dtype=torch.float64)}
        shared = {**_shared(state, problem), "power": power, "own": name}
        got = yield Ask(
            expect_rows, shared, fold, fresh=fresh, scratch=_scratch(state, problem), limits={"rows": COUNT}
        )
        state = replace(state, round=state.round + 1)
        if got is not None and got.n:
            state = _maximised(state, got, spread)
        yield Save(state)
    return _likeliest(state)


def _shared(mixed: Mixed, problem: Problem) -> dict[str, Any]:
    return {"problem": problem, "theta": mixed.theta, "weights": mixed.weights, "noise": mixed.noise}


def _begin(base: Tensor, spread: Tensor, n_components: int, starts: int, seed: int) -> State:
    """Components as far from the model for all as noise is wide."""
    fits, size = base.shape
    draw = keys.generator(seed, n_components, "mixed starts")
    offset = torch.randn(starts, n_components, size, generator=draw, dtype=torch.float64) * size**-0.5
    theta = base[:, None, None] + spread[:, None, None, None].sqrt() * offset
    equal = torch.full((fits, starts, n_components), 1.0 / n_components, dtype=torch.float64)
    noise = spread[:, None, None].expand_as(equal).clone()
    return State(theta, equal, noise, torch.zeros(fits, starts, dtype=torch.float64))


def _likeliest(state: State) -> State:
    best = state.likelihood.argmax(1)
    at = torch.arange(len(best))
    theta, weights, noise, likelihood = (
        value[at, best][:, None] for value in (state.theta, state.weights, state.noise, state.likelihood)
    )
    return State(theta, weights, noise, likelihood, state.round)


def _maximised(state: State, got: Replies, spread: Tensor) -> State:
    """The M-step, from sums of products by responsibility."""
    moments = _square(got["moments"].movedim(0, -1), state.theta.shape[-1] + 1)  # [F, J, R, Q, Q]
    rows = got["rows"].clamp(min=1e-9)
    little = 1e-6 * (1 + rows[..., None]).expand_as(state.theta)
    theta = torch.linalg.solve(moments[..., :-1, :-1] + torch.diag_embed(little), moments[..., :-1, -1])
    residual = torch.cat([theta, -torch.ones_like(theta[..., :1])], -1)
    squares = torch.einsum("fjrp,fjrpq,fjrq->fjr", residual, moments, residual).clamp(min=0)
    noise = torch.maximum(squares / rows, LEAST * spread[:, None, None])
    return replace(state, theta=theta, noise=noise, weights=shares(got["rows"]), likelihood=got["likelihood"])


def _square(packed: Tensor, size: int) -> Tensor:
    """Symmetric matrices from their upper triangles."""
    i, j = torch.triu_indices(size, size)
    out = packed.new_empty(*packed.shape[:-1], size, size)
    out[..., i, j] = packed
    out[..., j, i] = packed
    return out


def shares(rows: Tensor) -> Tensor:
    """Proportions that are never zero, since their logarithms are taken."""
    return ((rows + 1e-6) / (rows + 1e-6).sum(-1, keepdim=True)).clamp(min=1e-12)


def judge_mixed_ask(found: Mixed, problem: Problem) -> Ask:
    """Ask clients how likely held-out rows are, once they have found their proportions in the training rows."""
    fold = {name: Stack() for name in ("loss", "metric", "rows")}
    limits = {"metric": LOSSES, "rows": COUNT}  # losses are minus log densities, which may be negative
    return Ask(judge_mixed, _shared(found, problem), fold, scratch=_scratch(found, problem), limits=limits)


def _scratch(state: Mixed, problem: Problem) -> int:
    return 6 * state.weights.numel() + (problem.n_features + 2) * (problem.n_features + 3) // 2


# -- on the client: values lie [C, F, J, R, N], with rows last ----------------------------------------------------------
@answers(moments=Sum(), rows=Sum(), likelihood=Sum())
@one_run_at_a_time
def expect_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The E-step: sums of products of training rows by responsibility, and new proportions of the client's own."""
    name = shared["own"]
    common, own = shared["weights"], private[name]  # [F, J, R], [C, F, J, R]
    weights = torch.where(own < 0, common, own)
    train, _ = _masks(shared["problem"], data)
    joint = normal(_residuals(shared, data), shared["noise"][..., None]) + weights.log()[..., None]  # [C, F, J, R, N]
    gamma = (shared["power"] * joint).softmax(3) * train[:, :, None, None]
    pairs = data.once("pairs of columns", lambda: _pairs(data))  # [C, N, Q (Q + 1) / 2]
    rows = gamma.sum(-1)
    reply = {
        "moments": RowProduct(pairs, gamma.permute(0, 4, 1, 2, 3)),
        "rows": rows,
        "likelihood": (joint.logsumexp(3) * train[:, :, None]).sum(-1),
    }
    return reply, {name: _proportions(rows, common)}


@answers(loss=Stack(), metric=Stack(), rows=Stack())
@one_run_at_a_time
def judge_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the client's proportions and noise in its training rows, and judge the mixture by the held-out ones."""
    train, held = (mask[:, :, None] for mask in _masks(shared["problem"], data))  # [C, F, 1, N]
    noise, common = shared["noise"][..., None], shared["weights"]
    loss, weights = settled(_residuals(shared, data), noise, common, train, held, own=True)
    z = rows_of(data)
    theta = torch.einsum("cfjr,fjrp->cfjp", weights, shared["theta"])
    expected = (theta.flatten(1, 2) @ z[..., :-1].transpose(1, 2)).view(*theta.shape[:3], -1)  # [C, F, J, N]
    squares = (expected - z[..., -1][:, None, None]).square()
    return {"loss": loss, "metric": (squares * held).sum(-1), "rows": held.sum(-1)}, {}


def settled(
    residual: Tensor, noise: Tensor, common: Tensor, train: Tensor, held: Tensor, *, own: bool
) -> tuple[Tensor, Tensor]:
    """Minus the log-likelihood of held-out rows, once the client knows how wide its noise is, and its proportions if `own`.

    residual [C, ..., R, N], noise [..., R, 1], common [..., R], masks [C, ..., N] -> [C, ...], weights [C, ..., R]
    """
    weights = common.expand(len(residual), *common.shape)
    wide = torch.ones_like(residual[..., 0, 0])  # [C, ...] factor on all variances
    n, squares = train.sum(-1), residual.square() / noise
    constant = (2 * torch.pi * noise).log()
    for _ in range(_WEIGHT_STEPS):
        joint = weights.log()[..., None] - 0.5 * (squares / wide[..., None, None] + constant)  # up to a constant
        gamma = joint.softmax(-2) * train[..., None, :]
        if own:
            weights = _proportions(gamma.sum(-1), common)
        wide = (NOISE_ROWS + (gamma * squares).sum((-2, -1))) / (NOISE_ROWS + n)
    density = normal(residual, noise * wide[..., None, None])
    likelihood = (weights.log()[..., None] + density).logsumexp(-2)
    return -(likelihood * held).sum(-1), weights


def _proportions(rows: Tensor, common: Tensor) -> Tensor:
    return (rows + _OWN_ROWS * common) / (rows.sum(-1, keepdim=True) + _OWN_ROWS)


def _masks(problem: Problem, data: Block) -> tuple[Tensor, Tensor]:
    """Of training and of held-out rows.  [C, F, N]"""
    train, held = (mask.transpose(0, 1) for mask in problem.masks(data))
    return train, held


def rows_of(data: Block) -> Tensor:
    """Features, intercept and target.  [C, N, Q]"""
    return data.once("rows", lambda: torch.cat([data.x, torch.ones_like(data.x[..., :1]), data.target[..., None]], -1))


def _pairs(data: Block) -> Tensor:
    z = rows_of(data)
    i, j = torch.triu_indices(z.shape[-1], z.shape[-1])
    return z[..., i] * z[..., j]


def _residuals(shared: dict[str, Any], data: Block) -> Tensor:
    """Of every row under every component.  [C, F, J, R, N]"""
    z, theta = rows_of(data), shared["theta"]
    outputs = torch.matmul(theta.flatten(0, 2), z[..., :-1].transpose(1, 2))  # [C, F J R, N]
    return (z[..., -1][:, None] - outputs).view(len(z), *theta.shape[:3], -1)


def normal(residual: Tensor, noise: Tensor) -> Tensor:
    """Log density of normal residuals."""
    return -0.5 * (residual.square() / noise + (2 * torch.pi * noise).log())
