# SPDX-License-Identifier: Apache-2.0
"""Mixtures of regressions within clients: every row has one of several common models, in proportions of the client's own.

EM with components from sums over all clients. Several random starts, with densities that are flat at first, advance in
lockstep; then the likeliest goes on. Clients have too few rows here to begin with mixtures of their own, as FedGrEM does. As
for all structures, noise is as wide as a client's own rows say.

Mixtures of several sizes are fitted in the same passes over the rows: their components lie side by side. Shares of a row add
up to one, so that sums for the last component of each follow from those of the others and of all rows.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.linear_by_fold import NOISE_ROWS, Problem
from coterie.algorithms.robust import COUNT
from coterie.algorithms.score_sums import fresh_judged, keep_judged
from coterie.protocol import (
    Algorithm,
    Ask,
    Block,
    Replies,
    RowProduct,
    Save,
    Sum,
    Tensors,
    answers,
    one_run_at_a_time,
)

__all__ = [
    "LEAST", "Mixed", "State", "by_size", "expect_rows", "judge_mixed", "judge_mixed_ask", "responsible", "row_mixture",
    "rows_of", "settled", "shares",
]  # fmt: skip

_COLD = 0.1  # densities begin with this power
_TRIAL = 0.35  # share of the rounds in which all starts advance
_OWN_ROWS = 2.0  # common proportions count as so many rows of a client
LEAST = 0.05  # smallest variance of a component, relative to all noise together
_WEIGHT_STEPS = 20  # in which a client finds its proportions


@dataclass(frozen=True)
class Mixed:
    """Mixtures of L sizes, in each of F fits and J starts: R components of all of them, side by side."""

    theta: Tensor  # [F, J, R, P]
    weights: Tensor  # [F, J, R] common proportions
    noise: Tensor  # [F, J, R] variances
    likelihood: Tensor  # [F, J, L] of all training rows

    def last(self) -> "Mixed":
        """The fit to all training rows."""
        return Mixed(self.theta[-1:], self.weights[-1:], self.noise[-1:], self.likelihood[-1:])


@dataclass(frozen=True)
class State(Mixed):
    """After a round."""

    round: int = 0


def row_mixture(
    state: State | None, *, base: Tensor, spread: Tensor, problem: Problem, sizes: tuple[int, ...], starts: int,
    rounds: int, seed: int,
) -> Algorithm:  # fmt: skip
    """Fit mixtures of several sizes, and take the likeliest start of every fit.

    Parameters
    ----------
    base, spread : Tensor
        [F, P], [F] one model for all, and the variance around it.
    sizes : tuple of int
        Numbers of components: see `by_size`.
    """
    if state is None:
        state = _begin(base, spread, sizes, starts, seed)
        yield Save(state)
    trial = max(1, round(_TRIAL * rounds))
    while state.round < rounds:
        if state.round == trial:
            state = _likeliest(state, sizes)
        power = min(1.0, _COLD ** (1 - state.round / max(trial - 3, 1)))
        told = power == 1 or state.round + 1 == trial  # nobody asks how likely flat densities are
        fold = {name: Sum() for name in ("moments", "rows", *(["likelihood"] if told else []))}
        name = f"weights {sizes} {state.weights.shape[1]}"
        fresh = {name: torch.full(state.weights.shape, -1.0, dtype=torch.float64)}
        shared = {**_shared(state, problem), "sizes": sizes, "power": power, "told": told, "own": name}
        got = yield Ask(expect_rows, shared, fold, fresh=fresh, scratch=_scratch(state), limits={"rows": COUNT})
        state = replace(state, round=state.round + 1)
        if got is not None and got.n:
            state = _maximised(state, got, spread, sizes)
        yield Save(state)
    return _likeliest(state, sizes)


def by_size(found: Mixed, sizes: tuple[int, ...]) -> list[Mixed]:
    """The mixtures of each size."""
    every = (torch.split(value, list(sizes), 2) for value in (found.theta, found.weights, found.noise))
    return [Mixed(*values) for values in zip(*every, torch.split(found.likelihood, 1, 2), strict=True)]


def _shared(mixed: Mixed, problem: Problem) -> dict[str, Any]:
    return {"problem": problem, "theta": mixed.theta, "weights": mixed.weights, "noise": mixed.noise}


def _begin(base: Tensor, spread: Tensor, sizes: tuple[int, ...], starts: int, seed: int) -> State:
    """Components as far from the model for all as noise is wide."""
    fits, width = base.shape
    draws = [(size, keys.generator(seed, size, "mixed starts")) for size in sizes]
    offset = torch.cat([torch.randn(starts, r, width, generator=draw, dtype=torch.float64) for r, draw in draws], 1)
    theta = base[:, None, None] + spread[:, None, None, None].sqrt() * (offset * width**-0.5)
    equal = torch.cat([torch.full((fits, starts, r), 1.0 / r, dtype=torch.float64) for r in sizes], 2)
    noise = spread[:, None, None].expand_as(equal).clone()
    return State(theta, equal, noise, torch.zeros(fits, starts, len(sizes), dtype=torch.float64))


def _likeliest(state: State, sizes: tuple[int, ...]) -> State:
    best = state.likelihood.argmax(1)  # [F, L]
    start = best.repeat_interleave(torch.tensor(sizes), 1)[:, None]  # [F, 1, R]
    theta = state.theta.gather(1, start[..., None].expand(-1, -1, -1, state.theta.shape[-1]))
    weights, noise = (value.gather(1, start) for value in (state.weights, state.noise))
    return State(theta, weights, noise, state.likelihood.gather(1, best[:, None]), state.round)


def _maximised(state: State, got: Replies, spread: Tensor, sizes: tuple[int, ...]) -> State:
    """The M-step, from sums of products by responsibility."""
    fits, starts, components, width = state.theta.shape
    some, every = got["moments"].T.split([fits * starts * (components - len(sizes)), fits])
    parts = some.view(fits, starts, components - len(sizes), -1).split([size - 1 for size in sizes], 2)
    packed = torch.cat([one for part in parts for one in (part, every[:, None, None] - part.sum(2, keepdim=True))], 2)
    moments = _square(packed, width + 1)  # [F, J, R, Q, Q]
    rows = got["rows"].clamp(min=1e-9)
    little = 1e-6 * (1 + rows[..., None]).expand_as(state.theta)
    theta = torch.linalg.solve(moments[..., :-1, :-1] + torch.diag_embed(little), moments[..., :-1, -1])
    residual = torch.cat([theta, -torch.ones_like(theta[..., :1])], -1)
    squares = torch.einsum("fjrp,fjrpq,fjrq->fjr", residual, moments, residual).clamp(min=0)
    noise = torch.maximum(squares / rows, LEAST * spread[:, None, None])
    weights = torch.cat([shares(own) for own in got["rows"].split(sizes, 2)], 2)
    likelihood = got.values.get("likelihood", state.likelihood)
    return replace(state, theta=theta, noise=noise, weights=weights, likelihood=likelihood)


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


def judge_mixed_ask(found: Mixed, problem: Problem, tag: str) -> Ask:
    """Let clients keep how likely held-out rows are under mixtures of one size, once they have found their proportions."""
    fold = {name: Sum() for name in ("loss", "rows", "there")}
    limits = {"rows": COUNT}  # losses are minus log densities, which may be negative
    fresh, shared = fresh_judged(problem, tag, found.theta.shape[1]), {**_shared(found, problem), "tag": tag}
    return Ask(judge_mixed, shared, fold, fresh=fresh, scratch=_scratch(found), limits=limits)


def _scratch(state: Mixed) -> int:
    return 6 * state.weights.numel()


# -- on the client: values lie [F, J, R, C, N], so that rows of all clients are columns of one matrix --------------------
@answers(moments=Sum(), rows=Sum(), likelihood=Sum())
@one_run_at_a_time
def expect_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The E-step: sums of products of training rows by responsibility, and new proportions of the client's own.

    Products are summed for all components of each mixture but the last, and in the last F columns for all training rows.
    """
    name, sizes, data = shared["own"], shared["sizes"], shared["problem"].training(data)
    common, own = shared["weights"][..., None], private[name].movedim(0, -1)  # [F, J, R, 1], [F, J, R, C]
    train = shared["problem"].masks(data)[0]  # [F, C, N]
    joint = _joint(shared, torch.where(own < 0, common, own), data)  # [F, J, R, C, N]
    joint = joint if shared["power"] == 1 else joint.mul_(shared["power"])
    kept, likelihood = [], []
    for part, proportions in zip(torch.split(joint, list(sizes), 2), torch.split(common, list(sizes), 2), strict=True):
        gamma, top, total = responsible(part, train[:, None])
        kept.append((gamma[:, :, :-1], _proportions(gamma.sum(-1), proportions)))
        if shared["told"]:
            likelihood.append(((top + total.log()) * train[:, None]).sum(-1))  # [F, J, C]
    gamma = _side_by_side([gamma for gamma, _ in kept], train)
    reply: dict[str, Any] = {
        "moments": RowProduct(rows_of(data), gamma.permute(1, 2, 0), pairs=True),
        "rows": joint.sum(-1).movedim(3, 0),
    }
    if likelihood:
        reply["likelihood"] = torch.stack(likelihood, -1).movedim(2, 0)
    return reply, {name: torch.cat([own for _, own in kept], 2).movedim(3, 0)}


def _side_by_side(some: list[Tensor], train: Tensor) -> Tensor:
    """Responsibilities [F, J, R', C, N] of several mixtures, and then masks [F, C, N].  -> [F J (sum of R') + F, C, N]"""
    fits, starts, _, *rows = some[0].shape
    components = sum(part.shape[2] for part in some)
    made = train.new_empty(fits * (starts * components + 1), *rows)
    torch.cat(some, 2, out=made[:-fits].view(fits, starts, components, *rows))
    made[-fits:] = train
    return made


@answers(loss=Sum(), rows=Sum(), there=Sum())
@one_run_at_a_time
def judge_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the client's proportions and noise in its training rows, judge the mixture by held-out ones, and keep that."""
    train, held = (mask[:, None] for mask in shared["problem"].masks(data))  # [F, 1, C, N]
    noise, common = shared["noise"][..., None], shared["weights"][..., None]
    squares = _scaled_residuals(shared, data).square_()
    loss, weights = settled(squares, noise, common, train, held, own=True)
    z = rows_of(data)
    theta = torch.einsum("fjrc,fjrp->cfjp", weights, shared["theta"])
    expected = (theta.flatten(1, 2) @ z[..., :-1].transpose(1, 2)).view(*theta.shape[:3], -1)  # [C, F, J, N]
    wrong = ((expected - z[..., -1][:, None, None]).square().movedim(0, 2) * held).sum(-1)
    reply = {"loss": loss, "metric": wrong, "rows": held.sum(-1).expand_as(loss)}  # [F, J, C]
    reply = {name: value.movedim(2, 0) for name, value in reply.items()}
    told = {"loss": reply["loss"], "rows": reply["rows"][:, :, :1]}
    told["there"] = (reply["rows"] > 0).flatten(1).any(1).to(torch.float64)
    return told, keep_judged(shared["problem"], shared["tag"], reply)


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
        gamma, _, _ = responsible(_normal(squares, wide, level, joint), train)
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


def responsible(joint: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shares of components in rows that count as much as `mass` [..., C, N], in place of log densities [..., R, C, N].

    Passes over rows take as long as the memory that they touch is new: so nothing is allocated that is as large. Beside the
    shares come the largest log density and the sum of densities over it, [..., C, N] each.
    """
    top = joint.amax(-3)
    gamma = joint.sub_(top.unsqueeze(-3)).exp_()
    total = gamma.sum(-3)
    return gamma.mul_((mass / total).unsqueeze(-3)), top, total


def _proportions(rows: Tensor, common: Tensor) -> Tensor:
    """Of a client's own.  [..., R, C], [..., R, 1] -> [..., R, C]"""
    return (rows + _OWN_ROWS * common) / (rows.sum(-2, keepdim=True) + _OWN_ROWS)


def rows_of(data: Block) -> Tensor:
    """Features, intercept and target, one column after another: so they are multiplied fastest.  [C, N, Q]"""

    def made() -> Tensor:
        x, y = data.x.movedim(2, 0), data.target[None]
        return torch.cat([x, torch.ones_like(x[:1]), y.to(x.dtype)]).movedim(0, 2)

    return data.once("rows", made)


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
