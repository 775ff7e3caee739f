# SPDX-License-Identifier: Apache-2.0
"""What clients agree on before training, from sums alone: means and scales of the columns, and a safe step size."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.local.monomials import monomials, n_monomials
from coterie.models import Dense
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, answers, from_sums

__all__ = [
    "Scaling",
    "column_sums",
    "curvature",
    "learn_scaling",
    "monomial_sums",
    "safe_step_size",
    "steepness",
]

Run = Generator[Ask | Save, Replies | None, Any]

_POWER = 16  # (sum of 16th powers)^(1/16) is at least the maximum and hardly more: a maximum made of a sum
_UNITS = 10.0 ** torch.arange(-144, 145, 36, dtype=torch.float64)  # any eigenvalue is near enough to one of them
_LARGE = 1e18  # times the unit: here powers end, since those above would overflow
_FINE_UNITS = 10.0 ** torch.arange(-144, 145, 2, dtype=torch.float64)  # for sums that hold fewer powers of ten
_FINE_LARGE = 10.0
_ITERATIONS = 30
_DIGITS = 1e-3  # of the mean square that the variance must be: three of sixteen digits may be lost


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
    """Learn means and scales from counts, sums and squares: in one exchange, or two where squares about zero cost digits.

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
        Of the feature map; its products need as many exchanges again when they are scaled.
    """
    if state is not None:
        return state
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    names = ("n", "sum", "square", *(("y_n", "y_sum", "y_square") if real_target else ()))
    ask = Ask(
        column_sums,
        {"mean": torch.zeros(shape, dtype=torch.float64), "y_mean": zero, "real": real_target},
        {name: Sum() for name in names},
    )
    moments = yield from _moments(ask, ["", "y_"] if real_target else [""], divide)
    mean, scale = moments[""]
    y_mean, y_scale = moments["y_"] if real_target else (zero, one)
    if divide:
        state = Scaling(mean, mean, scale, y_mean, y_scale)
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
        shared = {"fill": state.fill, "centre": state.mean, "scale": state.scale, "degree": degree, "mean": mean}
        ask = Ask(monomial_sums, shared, {name: Sum() for name in ("n", "sum", "square")}, scratch=size)
        mean, scale = (yield from _moments(ask, [""], True))[""]
    return replace(state, degree=degree, monomial_mean=mean, monomial_scale=scale)


def _moments(ask: Ask, kinds: Sequence[str], divide: bool) -> Run:
    """Ask for sums about zero, and again about the means where spreads are wanted and would lose digits.  -> mean, scale"""
    got = yield ask
    assert got is not None
    mean = {kind: got[f"{kind}sum"] / got[f"{kind}n"].clamp(min=1) for kind in kinds}
    spread = {kind: got[f"{kind}square"] - got[f"{kind}n"] * mean[kind] ** 2 for kind in kinds}
    exact = all(bool((spread[kind] >= _DIGITS * got[f"{kind}square"]).all()) for kind in kinds)
    if divide and not exact:
        about = {f"{kind}mean": mean[kind] for kind in kinds}
        got = yield replace(ask, shared={**ask.shared, **about})
        assert got is not None
        spread = {kind: got[f"{kind}square"] for kind in kinds}
    return {kind: (mean[kind], _deviation(spread[kind], got[f"{kind}n"], mean[kind])) for kind in kinds}


def _deviation(square: Tensor, n: Tensor, mean: Tensor) -> Tensor:
    """Standard deviation; 1 for a constant column, which so becomes 0. The mean itself is only known to rounding."""
    deviation = (square / n.clamp(min=1)).sqrt()
    return torch.where(deviation > 1e-12 * mean.abs(), deviation, 1.0)


def safe_step_size(state: "Steepness | None", *, model: Dense, fine: bool = False) -> Run:
    """Find a step with which no client's gradient descent diverges: one over the largest curvature of a linear model.

    Each client finds its own largest eigenvalue; the maximum over clients is bounded by a sum of their 16th powers. Powers
    overflow, so that they are taken in several units, and the smallest is used in which none of them is too large. With
    `fine`, units are so many that powers stay between 1e-16 and 1e16, as fixed point needs it.
    """
    if state is None:
        units, large = (_FINE_UNITS, _FINE_LARGE) if fine else (_UNITS, _LARGE)
        shared = {"model": model, "unit": units, **({"large": large} if fine else {})}
        got = yield Ask(curvature, shared, {"power": Sum()})
        assert got is not None
        at = min(int((got["power"] >= large**_POWER).sum()), len(units) - 1)
        state = Steepness(float(units[at]) * float(got["power"][at]) ** (1 / _POWER))
        yield Save(state)
    return state


@dataclass(frozen=True)
class Steepness:
    """A bound on every client's largest eigenvalue of its features' second moments."""

    value: float


def steepness(model: Dense, bound: float) -> float:
    """Step size from the bound: second derivatives are 2 x x^T (squared loss), at most x x^T / 2 (cross-entropy)."""
    heaviest = max(model.class_weights, default=1.0)
    return 1.0 / max((2.0 if model.loss == "squared" else 0.5 * heaviest) * bound + model.l2, 1e-12)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(n=Sum(), sum=Sum(), square=Sum(), y_n=Sum(), y_sum=Sum(), y_square=Sum())
@from_sums
def column_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Counts, sums and squares about a given centre of every column, missing values left out."""
    real = data.real.view(*data.real.shape, *(1,) * (data.x.dim() - 2))
    there = real & ~data.x.isnan()
    x = torch.where(there, data.x, 0).to(torch.float64) - shared["mean"][0] * there
    y = torch.zeros_like(data.weights, dtype=torch.float64)
    if shared["real"]:
        y = (data.target.to(torch.float64) - shared["y_mean"][0]) * data.real
    if data.weight is None:
        reply = {"n": there.sum(1, dtype=torch.float64), "sum": x.sum(1), "square": (x * x).sum(1)}
        reply |= {"y_n": data.n.to(torch.float64), "y_sum": y.sum(1), "y_square": (y * y).sum(1)}
    else:
        mass, each_y = data.mass.to(torch.float64).view(real.shape), data.mass.to(torch.float64)
        reply = {"n": (there * mass).sum(1), "sum": (x * mass).sum(1), "square": (x * x * mass).sum(1)}
        reply |= {"y_n": each_y.sum(1), "y_sum": (y * each_y).sum(1), "y_square": (y * y * each_y).sum(1)}
    return {name: value[None] for name, value in reply.items()}, {}


@answers(n=Sum(), sum=Sum(), square=Sum())
def monomial_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Count, sums and squares about a given centre of every monomial of the scaled features."""
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    scaling = Scaling(shared["fill"][0], shared["centre"][0], shared["scale"][0], zero, one)
    made = monomials(scaling.features(data.x.to(torch.float64)), shared["degree"])
    about, mass = made - shared["mean"][0], data.mass.to(torch.float64)[..., None]
    reply = {"n": mass.sum((1, 2)), "sum": (about * mass).sum(1), "square": (about * about * mass).sum(1)}
    return {name: value[None] for name, value in reply.items()}, {}


@answers(power=Sum())
@from_sums
def curvature(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Largest eigenvalue of each client's mean x x^T by power iteration, over every unit, to the 16th power."""
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
    ratio = 1.05 * value.to(torch.float64)[:, None] / shared["unit"][0]  # [C, units]
    return {"power": ratio.clamp(max=shared.get("large", _LARGE))[None] ** _POWER}, {}


def _with_intercept(model: Dense, data: Block) -> Tensor:
    return torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1) if model.intercept else data.x
