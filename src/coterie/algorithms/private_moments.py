# SPDX-License-Identifier: Apache-2.0
"""Moments of clients' own models, differentially private: where clusters begin, and how much models differ.

A start is found in the few directions in which clients' models are long: the second moments of their models tell these, and
k-means in them, from several random starts side by side, tells the centres. All clients are asked every time, each fits its
model to its own rows, shortens it, and is one point.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.local import Training, client_losses, own_outputs, train
from coterie.local.least_squares import ridge
from coterie.models import Dense, Model
from coterie.protocol import Ask, Block, Noise, Replies, Save, Sum, Tensors, answers

__all__ = [
    "START_QUESTIONS", "Begun", "Spread", "longest", "model_moments", "nearest_centres", "private_spread", "private_start",
    "spread_moments", "total_distance",
]  # fmt: skip

_LLOYD = 4  # steps of k-means
START_QUESTIONS = 2 + _LLOYD
_STARTS = 10  # of k-means, at most
_DRAWS = 50  # of which each start is the one whose centres are farthest apart
_FEW = 0.25  # of the clients of a cluster of average size
_CLEAR = 0.15  # of the bound: noise in a coordinate of a centre that several starts may bring about
_PENALTY = 0.05  # of models that only tell where clusters begin
_STEPS = 50  # of models without a closed form
_SMALL = 1e-3
_ERRORS = 0.5  # bound of a model's squared standard errors, in units of the target's variance
_SURE = 1.0  # standard deviations of the noise that a variance between clients must have

Run = Generator[Ask | Save, Replies | None, Any]


def longest(model: Model) -> float:
    """The length to which clients' models are shortened: in standardised columns, few are longer."""
    return 1.5 if model.loss == "squared" else 4.0


@dataclass(frozen=True)
class Begun:
    """Where clusters begin.

    Attributes
    ----------
    theta : Tensor
        [K, P]
    stage : int
        How far the start is.
    """

    theta: Tensor
    stage: int = 1


def private_start(
    state: Begun | None,
    *,
    model: Model,
    n_clusters: int,
    multiplier: float,
    n_clients: int,
    step_size: float,
    seed: int,
    louder: float = 1.0,
) -> Run:
    """Find K models to begin with; every question has noise of `multiplier`, and what comes `louder` times as much."""
    if state is not None:
        return state
    bound, size = longest(model), model.n_parameters
    shared = {"model": model, "step_size": torch.tensor(step_size, dtype=torch.float64), "bound": bound}
    noise = Noise(multiplier, {"second": bound**2}, {"second": 1.0}, purpose="a start: directions")
    got = yield Ask(model_moments, shared, {"second": Sum()}, noise=noise, scratch=size)
    assert got is not None
    second = (got["second"] + got["second"].T) / (2 * n_clients)
    values, vectors = torch.linalg.eigh(second)
    basis = vectors[:, -min(n_clusters, size) :]  # [P, d]
    spread = values[-min(n_clusters, size) :].clamp(min=0).sqrt()  # [d]
    starts = _how_many(louder * multiplier, n_clusters, n_clients, bound)
    draw = keys.generator(seed, "private start")
    centres = _drawn(spread, starts, n_clusters, draw)  # [R, K, d]
    wide = math.sqrt(starts)
    for step in range(_LLOYD):
        noise = Noise(
            multiplier, {"sum": wide * bound, "count": wide}, {"sum": 0.85, "count": 0.15}, purpose="a start: k-means"
        )
        got = yield Ask(
            nearest_centres, {**shared, "basis": basis, "centres": centres, "step": step}, {"sum": Sum(), "count": Sum()},
            noise=noise, scratch=starts * n_clusters,
        )  # fmt: skip
        assert got is not None
        centres = _moved(got["sum"], got["count"], n_clients, spread if step < _LLOYD - 1 else None, draw)
        centres = centres * (bound / centres.norm(dim=-1, keepdim=True).clamp(min=bound))
    cap = bound**2
    noise = Noise(multiplier, {"distance": wide * cap}, {"distance": 1.0}, purpose="a start: the best of several")
    got = yield Ask(
        total_distance, {**shared, "basis": basis, "centres": centres, "cap": cap}, {"distance": Sum()}, noise=noise,
        scratch=starts * n_clusters,
    )  # fmt: skip
    assert got is not None
    best = centres[int(got["distance"].argmin())]
    state = Begun((best @ basis.T).to(model.dtype))
    yield Save(state)
    return state


def _how_many(multiplier: float, n_clusters: int, n_clients: int, bound: float) -> int:
    """As many starts as noise lets: with more of them, each has more noise."""
    alone = multiplier * bound * n_clusters / n_clients
    return max(1, min(_STARTS, int((_CLEAR * bound / alone) ** 2)))


def _drawn(spread: Tensor, starts: int, n_clusters: int, draw: torch.Generator) -> Tensor:
    """Centres as long as clients' models, those of a start far from each other.  [R, K, d]"""
    made = torch.randn(starts, _DRAWS, n_clusters, len(spread), generator=draw, dtype=torch.float64) * spread
    made = made * (spread.norm() / made.norm(dim=-1, keepdim=True).clamp(min=1e-12))
    apart = torch.cdist(made, made) + 1e9 * torch.eye(n_clusters, dtype=torch.float64)
    best = apart.flatten(2).min(2).values.argmax(1)
    chosen: Tensor = made[torch.arange(starts), best]
    return chosen


def _moved(total: Tensor, count: Tensor, n_clients: int, spread: Tensor | None, draw: torch.Generator) -> Tensor:
    """Means of clusters; who has hardly anybody shares the largest cluster, if anything comes after.  [R, K, d]"""
    least = _FEW * n_clients / count.shape[1]
    centres, count = total / count.clamp(min=least)[..., None], count.clone()
    for r, k in (count < least).nonzero().tolist() if spread is not None else ():
        assert spread is not None
        largest = int(count[r].argmax())
        aside = torch.randn(len(spread), generator=draw, dtype=torch.float64)
        aside = aside * (0.5 * spread.norm() / aside.norm())
        centres[r, k], centres[r, largest] = centres[r, largest] + aside, centres[r, largest] - aside
        count[r, largest] /= 2
    return centres


@dataclass(frozen=True)
class Spread:
    """How clients' linear models vary.

    Attributes
    ----------
    mean, variance : Tensor
        [P] of models, beside the errors of their estimates.
    noise : float
        Variance of rows.
    """

    mean: Tensor
    variance: Tensor
    noise: float


def private_spread(
    state: Spread | None, *, model: Dense, multiplier: float, n_clients: int, louder: float = 1.0
) -> Run:
    """Mean and variance of clients' linear regressions, from moments and from standard errors that they know themselves.

    `n_clients` have more rows than parameters, and only these say something; noise is `louder` than was asked for.
    """
    if state is not None:
        return state
    bound = longest(model)
    noise = Noise(
        multiplier, {"mean": bound, "square": bound**2, "error": _ERRORS, "noise": 1.0},
        {"mean": 0.3, "square": 0.4, "error": 0.2, "noise": 0.1}, purpose="how clients' models vary",
    )  # fmt: skip
    fold = {name: Sum() for name in noise.bounds}
    got = yield Ask(spread_moments, {"model": model, "bound": bound}, fold, noise=noise, scratch=model.n_parameters)
    assert got is not None
    mean, square, error = (got[name] / n_clients for name in ("mean", "square", "error"))
    unsure = louder * _SURE * (noise.deviation("square") ** 2 + noise.deviation("error") ** 2) ** 0.5 / n_clients
    variance = square - mean**2 - error.clamp(min=0)
    variance = torch.where(variance > unsure, variance, 0.0)
    state = Spread(mean, variance, max(float(got["noise"]) / n_clients, _SMALL))
    yield Save(state)
    return state


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(second=Sum())
def model_moments(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Products of the client's own model."""
    theta = _own(shared, data)  # [C, P]
    return {"second": (theta[:, :, None] * theta[:, None])[None]}, {}


@answers(sum=Sum(), count=Sum())
def nearest_centres(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The client's own model, put to the nearest centre of every start.  -> [S, C, R, K, d], [S, C, R, K]"""
    point = _own(shared, data) @ shared["basis"][0]  # [C, d]
    gap = torch.cdist(point[None].expand(len(shared["centres"][0]), -1, -1), shared["centres"][0])  # [R, C, K]
    share = one_hot(gap.argmin(-1), gap.shape[-1]).transpose(0, 1) * (data.n > 0)[:, None, None]  # [C, R, K]
    share = share.to(torch.float64)
    return {"sum": (share[..., None] * point[:, None, None])[None], "count": share[None]}, {}


@answers(distance=Sum())
def total_distance(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Squared distance to the nearest centre of every start.  -> [S, C, R]"""
    point = _own(shared, data) @ shared["basis"][0]
    gap = torch.cdist(point[None].expand(len(shared["centres"][0]), -1, -1), shared["centres"][0]).min(-1).values
    return {"distance": gap.T.square().clamp(max=shared["cap"])[None]}, {}


@answers(mean=Sum(), square=Sum(), error=Sum(), noise=Sum())
def spread_moments(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The client's own regression, its squares, squared standard errors, and the variance of its rows."""
    model: Dense = shared["model"]
    theta = ridge(model, data, _SMALL)
    loss = client_losses(model, own_outputs(model, theta[None], data), data)[0]  # [C]
    spare = data.n - model.n_parameters
    there = spare > 0
    noise = torch.where(there, loss * data.n / spare.clamp(min=1), 0.0)
    x = torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1) * data.real[..., None]
    products = torch.bmm(x.transpose(1, 2), x) + _SMALL * torch.eye(x.shape[-1], dtype=x.dtype)
    error = noise[:, None] * torch.linalg.inv(products).diagonal(dim1=1, dim2=2)
    theta = _shortened(theta, shared["bound"]) * there[:, None]
    reply = {"mean": theta, "square": theta**2, "error": error * there[:, None], "noise": noise}
    return {name: value.to(torch.float64)[None] for name, value in reply.items()}, {}


def _own(shared: dict[str, Any], data: Block) -> Tensor:
    """Each client's own model: in closed form for linear regression, else by steps from zero.  [C, P]"""
    model: Model = shared["model"]
    if isinstance(model, Dense) and model.is_linear and model.loss == "squared":
        theta = ridge(model, data, _PENALTY)
    else:
        start = torch.zeros(1, len(data.n), model.n_parameters, dtype=model.dtype)
        theta = train(model, start, data, shared["step_size"], Training(steps=_STEPS), keys.key(0, "own")[None])[0]
    return _shortened(theta.to(torch.float64) * (data.n > 0)[:, None], float(shared["bound"]))


def _shortened(theta: Tensor, bound: float) -> Tensor:
    factor: Tensor = bound / theta.norm(dim=1, keepdim=True).clamp(min=bound)
    return theta * factor
