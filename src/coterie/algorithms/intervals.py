# SPDX-License-Identifier: Apache-2.0
"""Conformal prediction intervals: a prediction, plus and minus a quantile of residuals on rows that nobody trained on.

Split conformal prediction (Papadopoulos et al., 2002; Lei et al., 2018), client by client: of n calibration rows of a
client, the interval to the ceil((n + 1) c)-th smallest absolute residual covers a further row of that client with
probability c at least. Where a client has too few rows for that, and for clients that were not there, clients are what is
exchangeable, not rows: every client counts alike, whatever rows it has, and one more client counts as never covered
(Lee, Barber, Willett, 2023: hierarchical conformal prediction). That takes sums over clients only: each tells which share
of its residuals is in each of many narrow bins.

Departure: a new client is served by a population model to which calibration clients have contributed training rows, so that
its guarantee is that of the paper only as far as no single client moves that model.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.local import served
from coterie.protocol import Ask, Block, Fold, Limit, Stack, Sum, Tensors, answers

__all__ = [
    "calibrate_ask", "calibrate_intervals", "cover_ask", "cover_intervals", "least_rows", "pooled_quantiles",
    "uncertainty",
]  # fmt: skip

_BINS = 2048
_SMALL, _LARGE = 1e-4, 1e4  # residuals beyond count as these, in deviations of the target


def least_rows(coverage: float) -> int:
    """Calibration rows, or clients, that a finite interval needs: ceil((n + 1) c) is at most n."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def calibrate_ask(judge: Ask, levels: Sequence[float]) -> Ask:
    """Ask for residuals of the models that another ask judges: shares by bin, and every client's quantiles."""
    shared = {**judge.shared, "levels": torch.tensor(levels, dtype=torch.float64)}
    fold: dict[str, Fold] = {"shares": Sum(), "there": Sum(), "quantiles": Stack()}
    limits = {"quantiles": Limit(finite=False)}  # of clients with too few rows
    return replace(judge, step=calibrate_intervals, shared=shared, fold=fold, limits=limits, scratch=_BINS // 8)


def cover_ask(judge: Ask, width: Tensor, z: Tensor, covariance: Tensor | None = None, *, own: bool = False) -> Ask:
    """Ask how many rows lie within given distances of predictions, by client.

    Parameters
    ----------
    width : Tensor
        [M, L] distances of every client, in L ways.
    z : Tensor
        [L] how many deviations of the model's own uncertainty come on top; 0: none.
    covariance : Tensor, optional
        [P, P] of that uncertainty, of a linear model.
    own : bool
        Whether clients keep one of their own.
    """
    shared = {**judge.shared, "z": z} | ({} if covariance is None else {"covariance": covariance})
    fresh = dict(judge.fresh)
    if own:
        n = judge.shared["model"].n_parameters
        fresh["covariance"] = torch.zeros(n, n, dtype=torch.float64)
    fold = {name: Stack() for name in ("covered", "width", "rows")}
    return replace(
        judge, step=cover_intervals, shared=shared, each={"width": width}, fresh=fresh, to=torch.arange(len(width)),
        fold=fold, limits={"width": Limit(finite=False)}, scratch=4 * width.shape[1],
    )  # fmt: skip


def pooled_quantiles(shares: Tensor, clients: float, levels: Sequence[float]) -> Tensor:
    """Distances that cover a row of one more client, each client counting alike; infinite with too few.  [BINS] -> [L]"""
    reached = shares.cumsum(0)
    edges = _edges()
    out = []
    for level in levels:
        place = int(torch.searchsorted(reached, torch.tensor(level * (clients + 1) - 1e-9, dtype=torch.float64)))
        out.append(float(edges[place]) if place < len(edges) else math.inf)
    return torch.tensor(out, dtype=torch.float64)


def _edges() -> Tensor:
    """Upper edges of the bins, 0.9 % apart.  [BINS]"""
    return torch.logspace(math.log10(_SMALL), math.log10(_LARGE), _BINS, dtype=torch.float64)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(shares=Sum(), there=Sum(), quantiles=Stack())
def calibrate_intervals(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """The share of a client's residuals in every bin, and its own conformal quantiles (infinite with too few rows)."""
    residual = _residuals(shared, private, data).abs().contiguous()  # [S, C, N]
    place = torch.searchsorted(_edges(), residual).clamp(max=_BINS - 1)
    weights = data.weights.double().expand_as(residual)
    shares = torch.zeros(*residual.shape[:2], _BINS, dtype=torch.float64).scatter_add_(-1, place, weights)
    ordered = torch.where(data.real, residual, torch.inf).sort(-1).values
    ordered = torch.cat([ordered, torch.full_like(ordered[..., :1], torch.inf)], -1)
    rank = torch.ceil((data.n[:, None] + 1) * shared["levels"][:, None] - 1e-9).long()  # [S, C, L]
    last = ordered.shape[-1] - 1
    quantiles = ordered.gather(-1, torch.where(rank <= data.n[:, None], rank - 1, last).clamp(0, last))
    there = (data.n > 0).double().expand(len(residual), -1)
    return {"shares": shares, "there": there, "quantiles": quantiles}, {}


@answers(covered=Stack(), width=Stack(), rows=Stack())
def cover_intervals(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How many of a client's rows lie within its intervals, and how far these reach on average."""
    residual = _residuals(shared, private, data).abs()[..., None]  # [S, C, N, 1]
    width = each["width"][:, :, None]  # [S, C, 1, L]
    covariance = private.get("covariance", shared.get("covariance"))  # [S, C, P, P], or [S, P, P] of all
    if covariance is not None:
        covariance = covariance if covariance.dim() == 4 else covariance[:, None]
        variance = uncertainty(data.x.double(), covariance)  # [S, C, N]
        width = (width.square() + shared["z"][:, None, None].square() * variance[..., None]).sqrt()
    inside = (residual <= width) & data.real[..., None]
    reach = torch.where(data.real[..., None], width, 0.0).sum(2) / data.n.clamp(min=1)[:, None]
    return {"covered": inside.sum(2).double(), "width": reach, "rows": data.n[None]}, {}


def uncertainty(x: Tensor, covariance: Tensor) -> Tensor:
    """Variance of a linear model's prediction, intercept last.  x [..., N, D], covariance [..., D + 1, D + 1] -> [..., N]"""
    z = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    return ((z @ covariance) * z).sum(-1).clamp(min=0)


def _residuals(shared: dict[str, Any], private: Tensors, data: Block) -> Tensor:
    """[S, C, N]"""
    return data.target.double() - served(shared, private, data).squeeze(-1).double()
