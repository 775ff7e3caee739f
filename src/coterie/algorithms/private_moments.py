# SPDX-License-Identifier: Apache-2.0
"""Moments of clients' own linear models, differentially private: where they are long, and how much they differ.

Every client fits its model to its own rows, and shortens it; sums of products and of squares have noise.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.local import Training, client_losses, own_outputs, train
from coterie.local.least_squares import ridge
from coterie.models import Dense, Model
from coterie.protocol import Ask, Block, Noise, Replies, Save, Sum, Tensors, answers

__all__ = [
    "Directions", "Spread", "directions", "longest", "model_moments", "own_models", "private_spread", "spread_moments",
]  # fmt: skip

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
class Directions:
    """Directions in which clients' models are long.

    Attributes
    ----------
    basis : Tensor
        [P, d] the last is that of the longest.
    length : Tensor
        [d] root of the mean square along each.
    """

    basis: Tensor
    length: Tensor


def directions(*, shared: dict[str, Any], n: int, multiplier: float, n_clients: int) -> Run:
    """Find n directions.  -> Directions"""
    bound, size = shared["bound"], shared["model"].n_parameters
    noise = Noise(multiplier, {"second": bound**2}, {"second": 1.0}, purpose="directions of clients' models")
    got = yield Ask(model_moments, shared, {"second": Sum()}, noise=noise, scratch=size)
    assert got is not None
    second = (got["second"] + got["second"].T) / (2 * n_clients)
    values, vectors = torch.linalg.eigh(second)
    return Directions(vectors[:, -min(n, size) :], values[-min(n, size) :].clamp(min=0).sqrt())


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
    theta = own_models(shared, data)  # [C, P]
    return {"second": (theta[:, :, None] * theta[:, None])[None]}, {}


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


def own_models(shared: dict[str, Any], data: Block) -> Tensor:
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
