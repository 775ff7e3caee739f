# SPDX-License-Identifier: Apache-2.0
"""What clients agree on before training, from sums alone: means and scales of the columns, and a safe step size."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.local.monomials import monomials, n_monomials
from coterie.models import Dense
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, from_sums

__all__ = [
    "Scaling",
    "column_sums",
    "curvature",
    "learn_scaling",
    "monomial_sums",
    "safe_step_size",
    "squared_length",
    "steepness",
]

Run = Generator[Ask | Save, Replies | None, Any]

_POWER = 16  # (sum of 16th powers)^(1/16) is at least the maximum and hardly more: a maximum made of a sum
_ITERATIONS = 30


@dataclass(frozen=True)
class Scaling:
    """Centre and scale features and a real-valued target; missing features become the mean.

    With a degree above 1 the scaled features are multiplied in all ways, and the products centred and scaled in turn:
    powers of features that are not centred would nearly be multiples of each other, and descent would crawl.

    Attributes
    ----------
    fill : Tensor
        [...] what a missing feature becomes.
    mean, scale : Tensor
        [...] of every feature; 0 and 1 leave it as it is.
    y_mean, y_scale : Tensor
        [] of the target, likewise.
    degree : int
        Of the polynomial feature map; 1 is none.
    monomial_mean, monomial_scale : Tensor or None
        [M] of what the map makes; None when there is none.
    """

    fill: Tensor
    mean: Tensor
    scale: Tensor
    y_mean: Tensor
    y_scale: Tensor
    degree: int = 1
    monomial_mean: Tensor | None = None
    monomial_scale: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        """Fill in, scale and, where there is a feature map, multiply features."""
        filled = torch.where(x.isnan(), self.fill.to(x.dtype), x)
        scaled = filled.sub_(self.mean.to(x.dtype)).div_(self.scale.to(x.dtype))
        if self.monomial_mean is None or self.monomial_scale is None:
            return scaled
        made = monomials(scaled, self.degree)
        return made.sub_(self.monomial_mean.to(x.dtype)).div_(self.monomial_scale.to(x.dtype))

    def target(self, y: Tensor) -> Tensor:
        """Scale targets; class numbers stay."""
        return (y - self.y_mean.to(y.dtype)) / self.y_scale.to(y.dtype) if y.is_floating_point() else y

    def back(self, outputs: Tensor) -> Tensor:
        """Turn outputs into the target's own units."""
        return outputs * self.y_scale.to(outputs.dtype) + self.y_mean.to(outputs.dtype)


def learn_scaling(
    state: Scaling | None, *, shape: tuple[int, ...], divide: bool, real_target: bool, degree: int = 1
) -> Run:
    """Learn means and scales in two exchanges: sums and counts first, then squares about the mean.

    Parameters
    ----------
    state : Scaling or None
        What is known already: then nothing is asked.
    shape : tuple of int
        Of one row's features.
    divide : bool
        Whether columns are centred and scaled; if not, only the means for missing values are learnt.
    real_target : bool
        Whether the target is scaled too.
    degree : int
        Of the feature map; its products need two more exchanges when they are scaled.
    """
    if state is not None:
        return state
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    fold = {name: Sum() for name in ("n", "sum", "square", "y_n", "y_sum", "y_square")}
    shared: dict[str, Any] = {"mean": torch.zeros(shape, dtype=torch.float64), "y_mean": zero, "real": real_target}
    got = yield Ask(column_sums, shared, fold)
    assert got is not None
    mean = got["sum"] / got["n"].clamp(min=1)
    y_mean = got["y_sum"] / got["y_n"].clamp(min=1) if real_target else zero
    got = yield Ask(column_sums, {**shared, "mean": mean, "y_mean": y_mean}, fold)
    assert got is not None
    if divide:
        y_scale = _deviation(got["y_square"], got["y_n"], y_mean) if real_target else one
        state = Scaling(mean, mean, _deviation(got["square"], got["n"], mean), y_mean, y_scale)
    else:
        state = Scaling(mean, torch.zeros_like(mean), torch.ones_like(mean), zero, one)
    if degree > 1:
        state = yield from _with_map(state, n_monomials(shape[0], degree), degree, divide)
    yield Save(state)
    return state


def _with_map(state: Scaling, size: int, degree: int, divide: bool) -> Run:
    """Add the feature map, and learn means and scales of what it makes.  -> Scaling"""
    mean, scale = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    if divide:
        shared = {"fill": state.fill, "centre": state.mean, "scale": state.scale, "degree": degree}
        fold = {name: Sum() for name in ("n", "sum", "square")}
        got = yield Ask(monomial_sums, {**shared, "mean": mean}, fold, scratch=size)
        assert got is not None
        mean = got["sum"] / got["n"].clamp(min=1)
        got = yield Ask(monomial_sums, {**shared, "mean": mean}, fold, scratch=size)
        assert got is not None
        scale = _deviation(got["square"], got["n"], mean)
    return replace(state, degree=degree, monomial_mean=mean, monomial_scale=scale)


def _deviation(square: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Standard deviation; 1 for a constant column, which so becomes 0. The mean itself is only known to rounding."""
    deviation = (square / n.clamp(min=1)).sqrt()
    return torch.where(deviation > 1e-12 * mean.abs(), deviation, 1.0)


def safe_step_size(state: "Steepness | None", *, model: Dense) -> Run:
    """Find a step with which no client's gradient descent diverges: one over the largest curvature of a linear model.

    Each client finds its own largest eigenvalue; the maximum over clients is bounded by a sum of their 16th powers. The
    powers are of eigenvalues relative to a sum that is known to be larger, since they would overflow otherwise.
    """
    if state is None:
        got = yield Ask(squared_length, {"model": model}, {"length": Sum()})
        assert got is not None
        scale = got["length"].clamp(min=1e-300)
        got = yield Ask(curvature, {"model": model, "scale": scale}, {"power": Sum()})
        assert got is not None
        state = Steepness(float(scale) * float(got["power"]) ** (1 / _POWER))
        yield Save(state)
    return state


@dataclass(frozen=True)
class Steepness:
    """A bound on every client's largest eigenvalue of its features' second moments."""

    value: float


def steepness(model: Dense, bound: float) -> float:
    """Step size from the bound: second derivatives are 2 x x^T (squared loss), at most x x^T / 2 (cross-entropy)."""
    return 1.0 / max((2.0 if model.loss == "squared" else 0.5) * bound + model.l2, 1e-12)


# -- on the client ----------------------------------------------------------------------------------------------------
@from_sums
def column_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Counts, sums and squares about a given centre of every column, missing values left out."""
    real = data.real.view(*data.real.shape, *(1,) * (data.x.dim() - 2))
    there = real & ~data.x.isnan()
    x = torch.where(there, data.x, 0).to(torch.float64) - shared["mean"][0] * there
    reply = {"n": there.sum(1, dtype=torch.float64), "sum": x.sum(1), "square": (x * x).sum(1)}
    n = data.n.to(torch.float64)
    y = torch.zeros_like(data.weights, dtype=torch.float64)
    if shared["real"]:
        y = (data.target.to(torch.float64) - shared["y_mean"][0]) * data.real
    reply |= {"y_n": n, "y_sum": y.sum(1), "y_square": (y * y).sum(1)}
    return {name: value[None] for name, value in reply.items()}, {}


def monomial_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Count, sums and squares about a given centre of every monomial of the scaled features."""
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    scaling = Scaling(shared["fill"][0], shared["centre"][0], shared["scale"][0], zero, one)
    made = monomials(scaling.features(data.x.to(torch.float64)), shared["degree"])
    about = (made - shared["mean"][0]) * data.real[..., None]
    reply = {"n": data.n.to(torch.float64), "sum": about.sum(1), "square": (about * about).sum(1)}
    return {name: value[None] for name, value in reply.items()}, {}


@from_sums
def squared_length(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Mean squared length of each client's rows: the sum of its eigenvalues, so at least the largest."""
    x = _with_intercept(shared["model"], data).to(torch.float64)
    return {"length": torch.einsum("cnd,cnd,cn->c", x, x, data.weights.to(torch.float64))[None]}, {}


@from_sums
def curvature(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Largest eigenvalue of each client's mean x x^T by power iteration, over `scale`, to the 16th power."""
    x = _with_intercept(shared["model"], data)
    # Any direction that data do not know about: ones would be orthogonal to, say, the indicators of two categories.
    v = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.dtype)
    v = v.expand(len(x), -1)
    value = x.new_zeros(len(x))
    for _ in range(_ITERATIONS):
        v = v / v.norm(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        projected = torch.einsum("cnd,cd->cn", x, v) * data.weights
        v = torch.einsum("cnd,cn->cd", x, projected)
        value = v.norm(dim=1)
    return {"power": (1.05 * value.to(torch.float64) / shared["scale"][0])[None] ** _POWER}, {}


def _with_intercept(model: Dense, data: Block) -> Tensor:
    return torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1) if model.intercept else data.x
