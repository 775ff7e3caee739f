# SPDX-License-Identifier: Apache-2.0
"""What a model of the noise brings, around one model for all.

A mixture of regressions also gains where noise is merely not normal, or wider at some rows than at others. That is no
structure, and so is taken off: here the noise's variance is log-linear in the features, and what is left of its shape is a
mixture of normal laws.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.row_mixture import LEAST, responsible, rows_of, settled, shares
from coterie.protocol import Algorithm, Ask, Block, Replies, Save, Sum, Tensors, answers, one_run_at_a_time

__all__ = [
    "NoiseModel", "State", "by_size", "expect_noise", "judge_noise", "judge_noise_ask", "noise_model", "widen_noise",
]  # fmt: skip

_FAR = 25.0  # squared residuals, in units of the variance, that count as no larger
_WIDTH_STEPS = 8  # of Newton's method, for the noise's variance


@dataclass(frozen=True)
class NoiseModel:
    """Noise around one model for all, in each of F fits: scaled by the square root of exp(<x, width>), a mixture.

    Mixtures of several sizes lie side by side: R is the number of all their components.
    """

    theta: Tensor  # [F, P] the model
    spread: Tensor  # [F] variance of the noise, were it normal and alike everywhere
    width: Tensor  # [F, P]
    centre: Tensor  # [F, R]
    weights: Tensor  # [F, R]
    noise: Tensor  # [F, R] variances

    def last(self) -> "NoiseModel":
        """The fit to all training rows."""
        return NoiseModel(*(value[-1:] for value in _tensors(self).values()))


@dataclass(frozen=True)
class State(NoiseModel):
    """After a round."""

    round: int = 0


def noise_model(
    state: State | None, *, base: Tensor, spread: Tensor, problem: Problem, sizes: tuple[int, ...], rounds: int
) -> Algorithm:
    """Fit the noise around one model for all: its width first, then its shape, as mixtures of several sizes.

    base [F, P], spread [F]
    """
    if state is None:
        steps, equal = (
            torch.cat(parts).expand(len(base), -1)
            for parts in (
                [torch.linspace(-1.0, 1.0, size, dtype=torch.float64) for size in sizes],
                [torch.full((size,), 1.0 / size, dtype=torch.float64) for size in sizes],
            )
        )
        width = torch.zeros_like(base)
        width[:, -1] = spread.log()
        state = State(base, spread, width, steps, equal, torch.ones_like(steps))
        yield Save(state)
    while state.round < _WIDTH_STEPS + rounds:
        wide = state.round < _WIDTH_STEPS
        fold = {name: Sum() for name in (("slope", "information") if wide else ("moments",))}
        shared = {"problem": problem, **_tensors(state), **({} if wide else {"sizes": sizes})}
        scratch = 6 * len(base) * (1 if wide else sum(sizes))
        got = yield Ask(widen_noise if wide else expect_noise, shared, fold, scratch=scratch)
        state = replace(state, round=state.round + 1)
        if got is not None and got.n:
            state = _widened(state, got) if wide else _shaped(state, got, sizes)
        yield Save(state)
    return state


def _tensors(model: NoiseModel) -> Tensors:
    return {field.name: getattr(model, field.name) for field in fields(NoiseModel)}


def _widened(state: State, got: Replies) -> State:
    ridge = torch.eye(state.width.shape[1], dtype=torch.float64)  # as if by one more row
    move = torch.linalg.solve(got["information"] + ridge, got["slope"])
    return replace(state, width=state.width + move.clamp(-1.0, 1.0))


def _shaped(state: State, got: Replies, sizes: tuple[int, ...]) -> State:
    n, first, second = (got["moments"][..., power] for power in range(3))
    centre = first / n.clamp(min=1e-9)
    noise = (second / n.clamp(min=1e-9) - centre.square()).clamp(min=LEAST)
    return replace(state, centre=centre, noise=noise, weights=torch.cat([shares(own) for own in n.split(sizes, 1)], 1))


def by_size(found: NoiseModel, sizes: tuple[int, ...]) -> list[NoiseModel]:
    """The models whose mixtures have each size."""
    every = (torch.split(value, list(sizes), 1) for value in (found.centre, found.weights, found.noise))
    return [NoiseModel(found.theta, found.spread, found.width, *own) for own in zip(*every, strict=True)]


def judge_noise_ask(found: NoiseModel, problem: Problem) -> Ask:
    """Ask clients how likely held-out rows are, with a shape of the noise of one size and with plain normal noise."""
    fold = {"loss": Sum(), "plain": Sum()}
    return Ask(judge_noise, {"problem": problem, **_tensors(found)}, fold, scratch=6 * found.weights.numel())


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(slope=Sum(), information=Sum())
@one_run_at_a_time
def widen_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A step of Fisher's scoring for a variance that is log-linear in the features.  -> [C, F, P], [C, F, P, P]"""
    problem = shared["problem"]
    data = problem.training(data)
    train, _ = problem.masks(data)
    x = rows_of(data)[..., :-1]
    residual, _ = _scaled_residuals(shared, data)
    excess = 0.5 * (residual.square().clamp(max=_FAR) - 1) * train  # one row does not make noise wide
    slope = torch.einsum("fcn,cnp->cfp", excess, x)
    information = data.once(("information", problem), lambda: 0.5 * torch.einsum("fcn,cnp,cnq->cfpq", train, x, x))
    return {"slope": slope, "information": information}, {}


@answers(moments=Sum())
@one_run_at_a_time
def expect_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of residuals' powers by responsibility.  -> [C, F, R, 3]"""
    data = shared["problem"].training(data)
    train, _ = shared["problem"].masks(data)
    residual, _ = _scaled_residuals(shared, data)
    noise = shared["noise"][..., None, None]  # [F, R, 1, 1]
    joint = residual[:, None] - shared["centre"][..., None, None]  # [F, R, C, N]
    level = shared["weights"].log()[..., None, None] - 0.5 * (2 * torch.pi * noise).log()
    torch.addcmul(level, joint.square_(), -0.5 / noise, out=joint)
    for part in joint.split(shared["sizes"], 1):
        responsible(part, train)
    sums = [joint.sum(-1)]
    for _ in range(2):
        sums.append(joint.mul_(residual[:, None]).sum(-1))
    return {"moments": torch.stack(sums, -1).movedim(2, 0)}, {}


@answers(loss=Sum(), plain=Sum())
@one_run_at_a_time
def judge_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Minus the log-likelihood of held-out rows, with the noise's shape and with normal noise.  -> [C, F] each"""
    train, held = shared["problem"].masks(data)  # [F, C, N]
    scaled, log_variance = _scaled_residuals(shared, data)
    noise, common = shared["noise"][..., None], shared["weights"][..., None]
    squares = (scaled[:, None] - shared["centre"][..., None, None]).square_().div_(noise[..., None])  # [F, R, C, N]
    loss, _ = settled(squares, noise, common, train, held, own=False)
    loss = loss + 0.5 * (log_variance * held).sum(-1)
    width = shared["spread"][:, None, None]
    squares = scaled.square() * log_variance.exp() / width
    plain, _ = settled(squares[:, None], width, torch.ones_like(common[:, :1]), train, held, own=False)
    return {"loss": loss.T, "plain": plain.T}, {}


def _scaled_residuals(shared: dict[str, Any], data: Block) -> tuple[Tensor, Tensor]:
    """Residuals over their deviation, and the logarithm of its square.  [F, C, N]"""
    z = rows_of(data)
    theta, width = shared["theta"], shared["width"]
    lines = torch.cat([torch.cat([-theta, torch.ones_like(theta[:, :1])], 1), torch.nn.functional.pad(width, (0, 1))])
    residual, log_variance = (lines @ z.flatten(0, 1).T).view(2, len(theta), *z.shape[:2])
    log_variance = log_variance.clamp(-_FAR, _FAR)
    return residual * (-0.5 * log_variance).exp(), log_variance
