# SPDX-License-Identifier: Apache-2.0
"""Means and scales of columns, differentially private for clients, of columns in whatever units.

Every client votes for the decimal order of magnitude of each of its columns, and the median of the votes, which have noise,
is a unit. In these units clients' means and mean squares are bounded, and their noised averages are the means and scales.

Clients count alike here, and not by their rows.
"""

import math
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.preparation import Scaling
from coterie.protocol import Ask, Block, Noise, Replies, Save, Sum, Tensors, answers

__all__ = ["QUESTIONS", "column_means", "column_votes", "private_scaling"]

QUESTIONS = 2
_LOW, _PER_DECADE, _BINS = -8.0, 4, 64  # orders of magnitude: 1e-8 to 1e8
_FAR = 4.0  # units: a client's mean may be so far from zero
_TYPICAL = 1.5  # root of a column's mean square plus its square, of clients that are as most are
_LEAST = 0.05  # of a unit: a scale is not less
_SIGNIFICANT = 2.0  # standard deviations: votes below are noise


def private_scaling(
    state: Scaling | None,
    *,
    shape: tuple[int, ...],
    real_target: bool,
    multiplier: float,
    n_clients: int,
    louder: float = 1.0,
) -> Generator[Ask | Save, Replies | None, Scaling]:  # fmt: skip
    """Learn means and scales, each question with noise of `multiplier`; what comes has `louder` times as much."""
    if state is not None:
        return state
    width = math.prod(shape) + real_target
    shared = {"real": real_target}
    noise = Noise(multiplier, {"vote": math.sqrt(width)}, {"vote": 1.0}, purpose="scales of columns")
    got = yield Ask(column_votes, shared, {"vote": Sum()}, noise=noise, scratch=1)
    assert got is not None
    unit = _median(got["vote"], louder * noise.deviation("vote"))  # [D]
    bound = _TYPICAL * math.sqrt(2 * width)
    noise = Noise(multiplier, {"moments": bound}, {"moments": 1.0}, purpose="means of columns")
    got = yield Ask(column_means, {**shared, "unit": unit}, {"moments": Sum()}, noise=noise)
    assert got is not None
    mean, square = got["moments"] / n_clients  # [D] each
    scale = (square - mean**2).clamp(min=0).sqrt().clamp(min=_LEAST) * unit
    mean = mean * unit
    features = slice(0, width - real_target)
    x_mean, x_scale = mean[features].reshape(shape), scale[features].reshape(shape)
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    last = (mean[-1], scale[-1]) if real_target else (zero, one)
    state = Scaling(x_mean, x_mean, x_scale, *last)
    yield Save(state)
    return state


def _median(votes: Tensor, deviation: float) -> Tensor:
    """The unit of each column: the upper edge of the bin with the median vote; 1 where all votes are noise."""
    sure = torch.where(votes > _SIGNIFICANT * deviation, votes, 0.0)  # [D, B]
    total = sure.sum(1, keepdim=True)
    at = (sure.cumsum(1) < total / 2).sum(1)
    unit = 10.0 ** (_LOW + (at + 1) / _PER_DECADE)
    return torch.where(total[:, 0] > 0, unit, 1.0)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(vote=Sum())
def column_votes(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Vote for each column's order of magnitude; columns of zeros have none.  -> [S, C, D, B]"""
    _, square = _means(shared, data)
    size = square.sqrt().log10()
    at = ((size - _LOW) * _PER_DECADE).floor().nan_to_num(0.0, 0.0, 0.0).clamp(0, _BINS - 1).to(torch.int64)
    vote = torch.nn.functional.one_hot(at, _BINS) * (square > 0)[..., None]
    return {"vote": vote.to(torch.float64)[None]}, {}


@answers(moments=Sum())
def column_means(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A client's means and mean squares, in units, neither of them far from those of others.  -> [S, C, 2, D]"""
    mean, square = _means(shared, data)
    unit = shared["unit"][0]
    near = torch.stack([(mean / unit).clamp(-_FAR, _FAR), (square / unit**2).clamp(max=_FAR**2)], 1)
    return {"moments": near[None]}, {}


def _means(shared: dict[str, Any], data: Block) -> tuple[Tensor, Tensor]:
    """Means and mean squares of every column, and of a target that is a number; missing values left out.  [C, D] each"""
    x = data.x.to(torch.float64).flatten(2)
    there = data.real[..., None] & ~x.isnan()
    x = torch.where(there, x, 0.0)
    if shared["real"]:
        x = torch.cat([x, (data.target.to(torch.float64) * data.real)[..., None]], 2)
        there = torch.cat([there, data.real[..., None]], 2)
    n = there.sum(1).clamp(min=1)
    return x.sum(1) / n, x.square().sum(1) / n
