# SPDX-License-Identifier: Apache-2.0
"""Closed forms for linear models with squared loss, one client each, many at once."""

import torch
from torch import Tensor

from coterie.models import Dense
from coterie.protocol import Block

__all__ = ["gram", "ridge", "solve_ridge"]


def ridge(model: Dense, data: Block, l2: float) -> Tensor:
    """Fit every client alone: mean squared error plus l2 |w|^2, the intercept free.  [C, P]

    The n x n dual is solved where a client has fewer rows than features, so with a small l2 the answer tends to the
    shortest vector that fits.
    """
    w = data.weights
    x_mean, y_mean = (
        _centre(data, w) if model.intercept else (data.x.new_zeros(len(w), data.x.shape[-1]), w.new_zeros(len(w)))
    )
    x = (data.x - x_mean[:, None]) * w.sqrt()[..., None]  # [C, N, D] so that x^T x is a client's covariance
    y = (data.target - y_mean[:, None]) * w.sqrt()
    if x.shape[1] < x.shape[2]:
        a = _regularised(torch.bmm(x, x.transpose(1, 2)), l2)
        weights = torch.einsum("cnd,cn->cd", x, torch.linalg.solve(a, y))
    else:
        a = _regularised(torch.bmm(x.transpose(1, 2), x), l2)
        weights = torch.linalg.solve(a, torch.einsum("cnd,cn->cd", x, y))
    if not model.intercept:
        return weights
    return torch.cat([weights, (y_mean - (x_mean * weights).sum(1))[:, None]], 1)


def gram(model: Dense, data: Block) -> Tensor:
    """Sums of products of features, intercept and target: all that ridge needs of a client.  [C, P + 1, P + 1]"""
    parts = [data.x]
    if model.intercept:
        parts.append(torch.ones_like(data.x[..., :1]))
    z = torch.cat([*parts, data.target[..., None]], -1) * data.real[..., None]
    return torch.bmm(z.transpose(1, 2), z)


def solve_ridge(model: Dense, total: Tensor, n_rows: float, l2: float) -> Tensor:
    """Ridge regression from summed products: mean squared error plus l2 |w|^2, the intercept free.  [P]"""
    p = model.n_parameters
    penalty = torch.full((p,), l2, dtype=total.dtype)
    if model.intercept:
        penalty[-1] = 0
    a = total[:p, :p] / max(n_rows, 1.0) + torch.diag(penalty)
    b = total[:p, p] / max(n_rows, 1.0)
    solution: Tensor = torch.linalg.lstsq(a, b[:, None], driver="gelsd").solution[:, 0]
    return solution


def _centre(data: Block, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.einsum("cnd,cn->cd", data.x, w), torch.einsum("cn,cn->c", data.target, w)


def _regularised(a: Tensor, l2: float) -> Tensor:
    """Add the penalty, and a trace of it where a client has no rows or constant ones."""
    floor = 1e-9 * a.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-9)
    return a + (l2 + floor)[:, None, None] * torch.eye(a.shape[-1], dtype=a.dtype)
