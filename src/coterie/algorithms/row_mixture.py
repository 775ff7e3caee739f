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
    "LEAST", "Mixed", "State", "expect_rows", "judge_mixed", "judge_mixed_ask", "responsible", "row_mixture", "rows_of",
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


# -- on the client: values lie [F, J, R, C, N], so that rows of all clients are columns of one matrix --------------------
@answers(moments=Sum(), rows=Sum(), likelihood=Sum())
@one_run_at_a_time
def expect_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The E-step: sums of products of training rows by responsibility, and new proportions of the client's own."""
    name, power = shared["own"], shared["power"]
    common, own = shared["weights"][..., None], private[name].movedim(0, -1)  # [F, J, R, 1], [F, J, R, C]
    weights = torch.where(own < 0, common, own)
    train = shared["problem"].masks(data)[0][:, None]  # [F, 1, C, N]
    joint = _joint(shared, weights, data)
    likelihood = (joint.logsumexp(2) * train).sum(-1)  # [F, J, C]
    gamma = responsible(joint if float(power) == 1 else joint.mul_(power), train)
    pairs = data.once("pairs of columns", lambda: _pairs(data))  # [C, N, Q (Q + 1) / 2]
    rows = gamma.sum(-1)  # [F, J, R, C]
    reply = {
        "moments": RowProduct(pairs, gamma.permute(3, 4, 0, 1, 2)),
        "rows": rows.movedim(3, 0),
        "likelihood": likelihood.movedim(2, 0),
    }
    return reply, {name: _proportions(rows, common).movedim(3, 0)}


@answers(loss=Stack(), metric=Stack(), rows=Stack())
@one_run_at_a_time
def judge_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the client's proportions and noise in its training rows, and judge the mixture by the held-out ones."""
    train, held = (mask[:, None] for mask in shared["problem"].masks(data))  # [F, 1, C, N]
    noise, common = shared["noise"][..., None], shared["weights"][..., None]
    squares = _scaled_residuals(shared, data).square_()
    loss, weights = settled(squares, noise, common, train, held, own=True)
    z = rows_of(data)
    theta = torch.einsum("fjrc,fjrp->cfjp", weights, shared["theta"])
    expected = (theta.flatten(1, 2) @ z[..., :-1].transpose(1, 2)).view(*theta.shape[:3], -1)  # [C, F, J, N]
    wrong = ((expected - z[..., -1][:, None, None]).square().movedim(0, 2) * held).sum(-1)
    reply = {"loss": loss, "metric": wrong, "rows": held.sum(-1)}  # [F, J, C]
    return {name: value.movedim(2, 0) for name, value in reply.items()}, {}


def settled(
    squares: Tensor, noise: Tensor, common: Tensor, train: Tensor, held: Tensor, *, own: bool
) -> tuple[Tensor, Tensor]:
    """Minus the log-likelihood of held-out rows, once the client knows how wide its noise is, and its proportions if `own`.

    squares [..., R, C, N] of residuals over the noise, noise and common [..., R, 1], masks [..., C, N]
    -> [..., C], weights [..., R, C]
    """
    weights = common.expand(squares.shape[:-1])
    wide = torch.ones_like(squares[..., 0, :, 0])  # [..., C] factor on all variances
    n, constant, joint = train.sum(-1), 0.5 * (2 * torch.pi * noise).log(), torch.empty_like(squares)
    for _ in range(_WEIGHT_STEPS):
        level = (weights.log() - constant)[..., None]  # up to a constant
        gamma = responsible(_normal(squares, wide, level, joint), train)
        if own:
            weights = _proportions(gamma.sum(-1), common)
        wide = (NOISE_ROWS + gamma.mul_(squares).sum((-3, -1))) / (NOISE_ROWS + n)
    level = (weights.log() - constant - 0.5 * wide.log()[..., None, :])[..., None]
    likelihood = _normal(squares, wide, level, joint).logsumexp(-3)
    return -(likelihood * held).sum(-1), weights


def _normal(squares: Tensor, wide: Tensor, level: Tensor, out: Tensor) -> Tensor:
    """Log densities: of [..., R, C, N] squares, with variances [..., C] times as wide."""
    made: Tensor = torch.addcmul(level, squares, (-0.5 / wide)[..., None, :, None], out=out)
    return made


def responsible(joint: Tensor, mass: Tensor) -> Tensor:
    """Shares of components in rows that count as much as `mass` [..., C, N], in place of log densities [..., R, C, N].

    Passes over rows take as long as the memory that they touch is new: so nothing is allocated that is as large.
    """
    gamma = joint.sub_(joint.amax(-3, keepdim=True)).exp_()
    return gamma.mul_((mass / gamma.sum(-3)).unsqueeze(-3))


def _proportions(rows: Tensor, common: Tensor) -> Tensor:
    """Of a client's own.  [..., R, C], [..., R, 1] -> [..., R, C]"""
    return (rows + _OWN_ROWS * common) / (rows.sum(-2, keepdim=True) + _OWN_ROWS)


def rows_of(data: Block) -> Tensor:
    """Features, intercept and target.  [C, N, Q]"""
    return data.once("rows", lambda: torch.cat([data.x, torch.ones_like(data.x[..., :1]), data.target[..., None]], -1))


def _pairs(data: Block) -> Tensor:
    """Products of columns, one column after another: so they are formed fastest, and multiplied.  [C, N, Q (Q + 1) / 2]"""
    columns = rows_of(data).movedim(2, 0).contiguous()
    i, j = torch.triu_indices(len(columns), len(columns))
    return (columns[i] * columns[j]).movedim(0, 2)


def _joint(shared: dict[str, Any], weights: Tensor, data: Block) -> Tensor:
    """Log densities of every row and component, with the client's proportions [F, J, R, C].  [F, J, R, C, N]"""
    residual = _scaled_residuals(shared, data)
    level = weights.log() - 0.5 * (2 * torch.pi * shared["noise"]).log()[..., None]
    return torch.addcmul(level[..., None], residual, residual, value=-0.5, out=residual)


def _scaled_residuals(shared: dict[str, Any], data: Block) -> Tensor:
    """Of every row under every component, over the noise's deviation: in one product.  [F, J, R, C, N]"""
    z, theta = rows_of(data), shared["theta"]
    residual = torch.cat([theta, -torch.ones_like(theta[..., :1])], -1) / shared["noise"][..., None].sqrt()
    made: Tensor = residual.flatten(0, 2) @ z.flatten(0, 1).T
    return made.view(*theta.shape[:3], *z.shape[:2])
