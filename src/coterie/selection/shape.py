# SPDX-License-Identifier: Apache-2.0
"""What a model of the noise brings, around one model for all.

A mixture of regressions also gains where noise is merely not normal, or wider at some rows than at others. That is no
structure, and so is taken off: here the noise's variance is log-linear in the features, and what is left of its shape is a
mixture of normal laws.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.protocol import Ask, Block, Save, Stack, Sum, Tensors
from coterie.selection.mixed import LEAST, masks, normal, rows_of, settled, shares
from coterie.selection.problem import Problem, Run

__all__ = ["Shape", "expect_noise", "fit_shape", "judge_shape", "judge_shape_ask", "widen_noise"]

_FAR = 25.0  # squared residuals, in units of the variance, that count as no larger
_WIDTH_STEPS = 8  # of Newton's method, for the noise's variance


@dataclass(frozen=True)
class Shape:
    """Noise around one model for all, in each of F fits: scaled by the square root of exp(<x, width>), a mixture."""

    theta: Tensor  # [F, P] the model
    spread: Tensor  # [F] variance of the noise, were it normal and alike everywhere
    width: Tensor  # [F, P]
    centre: Tensor  # [F, R]
    weights: Tensor  # [F, R]
    noise: Tensor  # [F, R] variances


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
            n, first, second = (got["moments"][..., power] for power in range(3))
            centre = first / n.clamp(min=1e-9)
            noise = (second / n.clamp(min=1e-9) - centre.square()).clamp(min=LEAST)
            state = replace(state, centre=centre, noise=noise, weights=shares(n))
        yield Save(state)
    return state


def judge_shape_ask(found: Shape, problem: Problem) -> Ask:
    """Ask clients how likely held-out rows are, with the noise's shape and with plain normal noise."""
    shared, fold = {"problem": problem, **vars(found)}, {"loss": Stack(), "plain": Stack()}
    return Ask(judge_shape, shared, fold, scratch=6 * found.weights.numel())


# -- on the client ----------------------------------------------------------------------------------------------------
def widen_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A step of Fisher's scoring for a variance that is log-linear in the features.  -> [1, C, F, P], [1, C, F, P, P]"""
    train, _ = masks(shared["problem"], data)
    x = rows_of(data)[..., :-1]
    residual, _ = _scaled_residuals(shared, data)
    excess = 0.5 * (residual.square().clamp(max=_FAR) - 1) * train  # one row does not make noise wide
    slope = torch.einsum("fcn,cnp->cfp", excess, x)
    return {"slope": slope[None], "information": 0.5 * torch.einsum("fcn,cnp,cnq->cfpq", train, x, x)[None]}, {}


def expect_noise(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of residuals' powers by responsibility.  -> [1, C, F, R, 3]"""
    train, _ = masks(shared["problem"], data)
    residual, density = _noise_density(shared, data)
    gamma = (shared["weights"][0][:, None, None].log() + density).softmax(-1) * train[..., None]
    powers = torch.stack([torch.ones_like(residual), residual, residual.square()], -1)  # [F, C, N, 3]
    return {"moments": torch.einsum("fcnr,fcnk->cfrk", gamma, powers)[None]}, {}


def judge_shape(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Minus the log-likelihood of held-out rows, with the noise's shape and with normal noise.  -> [1, C, F] each"""
    train, held = masks(shared["problem"], data)
    scaled, log_variance = _scaled_residuals(shared, data)
    centre, noise = shared["centre"][0][:, None, None], shared["noise"][0][:, None, None]
    common = shared["weights"][0][:, None]
    loss, _ = settled(scaled[..., None] - centre, noise, common, train, held, own=False)
    loss = loss + 0.5 * (log_variance * held).sum(-1)
    width = shared["spread"][0][:, None, None, None]
    residual = (scaled * (0.5 * log_variance).exp())[..., None]
    plain, _ = settled(residual, width, torch.ones_like(common[..., :1]), train, held, own=False)
    return {"loss": loss.T[None], "plain": plain.T[None]}, {}


def _noise_density(shared: dict[str, Any], data: Block) -> tuple[Tensor, Tensor]:
    """Scaled residuals [F, C, N], and the residuals' log density under every component [F, C, N, R]."""
    residual, log_variance = _scaled_residuals(shared, data)
    centre, noise = shared["centre"][0][:, None, None], shared["noise"][0][:, None, None]
    return residual, normal(residual[..., None] - centre, noise) - 0.5 * log_variance[..., None]


def _scaled_residuals(shared: dict[str, Any], data: Block) -> tuple[Tensor, Tensor]:
    """Residuals over their deviation, and the logarithm of its square.  [F, C, N]"""
    z = rows_of(data)
    outputs, log_variance = (torch.einsum("cnp,fp->fcn", z[..., :-1], shared[name][0]) for name in ("theta", "width"))
    log_variance = log_variance.clamp(-_FAR, _FAR)
    return (z[..., -1] - outputs) * (-0.5 * log_variance).exp(), log_variance
