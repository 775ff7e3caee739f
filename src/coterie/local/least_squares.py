# SPDX-License-Identifier: Apache-2.0
"""Closed forms for linear models with squared loss, one client each, many at once."""

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.models import Dense, Model
from coterie.protocol import Block

__all__ = ["gram", "proximal_step", "ridge", "solve_ridge"]


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


def proximal_step(model: Model, theta: Tensor, data: Block, mu: float) -> Tensor:
    """Minimise every client's loss plus mu/2 |theta' - theta|^2, from its own model.  theta [C, P] -> [C, P]

    With A = X^T X / n, r the residuals and l the ridge penalty, the step solves (2 A + mu + l) d = 2 X^T r / n - l theta.
    Clients with fewer rows than parameters are better off in `row_space.py`, where the n x n dual is solved.
    """
    if not isinstance(model, Dense) or not model.is_linear or model.loss != "squared":
        raise ConfigError("an exact proximal step needs linear regression", "train in steps: exact=False")
    if not mu > 0:
        raise ConfigError(f"an exact proximal step with mu = {mu:g} is not defined", "give proximal above 0")
    x = data.x if not model.intercept else torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1)
    x = x * (2 * data.weights).sqrt()[..., None]  # [C, N, P] so that x^T x = 2 A
    damping = torch.full((x.shape[-1],), mu, dtype=x.dtype)
    pull = torch.zeros_like(theta)
    if model.l2:
        slopes = slice(0, data.x.shape[-1])  # the intercept is not penalised
        damping[slopes] += model.l2
        pull[:, slopes] = model.l2 * theta[:, slopes] * (data.n > 0)[:, None]  # without rows, a client stays
    y = data.target * (2 * data.weights).sqrt()
    b = torch.einsum("cnp,cn->cp", x, y - torch.einsum("cnp,cp->cn", x, theta)) - pull
    a = torch.bmm(x.transpose(1, 2), x) + torch.diag(damping)
    step: Tensor = torch.linalg.solve(a, b)
    return theta + step


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
