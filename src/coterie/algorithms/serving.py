# SPDX-License-Identifier: Apache-2.0
"""What clients do with a mixture that is there: find their own proportions, and say how well it predicts their targets."""

from typing import Any

import torch
from torch import Tensor

from coterie.models.families import Family, expect, shares
from coterie.models.mixtures import Regression
from coterie.protocol import Ask, Block, Stack, Tensors

__all__ = ["adopt", "adopt_ask", "error_ask", "expectations", "squared_errors"]

_STEPS = 50  # of EM; with components that stay it is concave and soon there


def adopt_ask(family: Family, theta: Tensor, weights: Tensor, scale: Tensor) -> Ask:
    """Ask clients, old or new, for proportions of components that stay as they are, and for how well these then fit.

    Replies: weights [M, R]; mean and standard deviation of the rows' log-likelihood [M]; n [M].

    Parameters
    ----------
    theta : Tensor
        [R, P]
    weights : Tensor
        [R] proportions to begin with, and to end with where there are no rows.
    scale : Tensor
        [...] of the family.
    """
    shared = {"family": family, "theta": theta, "weights": weights, "scale": scale}
    fold = {name: Stack() for name in ("weights", "likelihood", "deviation", "n")}
    return Ask(adopt, shared, fold, work=float(_STEPS), scratch=4 * len(theta))


def error_ask(family: Regression, theta: Tensor, weights: Tensor) -> Ask:
    """Ask every client for its mean squared error, when targets are predicted by its own mixture.

    Parameters
    ----------
    theta, weights : Tensor
        [M, R, P], [M, R]
    """
    each = {"line": torch.einsum("mr,mrp->mp", weights, theta)}
    fold = {"error": Stack(), "n": Stack()}
    return Ask(squared_errors, {"family": family}, fold, each=each, to=torch.arange(len(theta)))


def expectations(family: Regression, line: Tensor, data: Block) -> Tensor:
    """E[y | x] of every row.  line [C, P] -> [C, N]

    Proportions do not depend on x, so the expectation is linear: the proportions' mean of the components, `line`.
    """
    slope = line[:, : family.n_features, None]
    made: Tensor = (data.x @ slope)[..., 0]
    return made + line[:, family.n_features, None] if family.intercept else made


# -- on the client ----------------------------------------------------------------------------------------------------
def adopt(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """EM in the proportions alone."""
    density = shared["family"].log_density(shared["theta"][:, None], shared["scale"][:, None], data)  # [S, C, N, R]
    weights = shared["weights"][:, None].expand(-1, len(data.n), -1)
    present = (data.n > 0)[:, None]
    for _ in range(_STEPS):
        weights = torch.where(present, shares(expect(density, weights, data)[0], data), weights)
    _, likelihood = expect(density, weights, data)
    rows = (density.clamp(min=-1e300) + weights.clamp(min=1e-12).log()[:, :, None]).logsumexp(-1)  # [S, C, N]
    about = ((rows - likelihood[..., None]) * data.real).clamp(min=-1e150, max=1e150)
    deviation = (about.square() * data.weights).sum(-1).sqrt()
    return {"weights": weights, "likelihood": likelihood, "deviation": deviation, "n": data.n[None]}, {}


def squared_errors(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Mean squared error of every client's own line."""
    made = torch.stack([expectations(shared["family"], line, data) for line in each["line"]])  # [S, C, N]
    error = ((made - data.target).square() * data.weights).sum(-1)
    return {"error": error, "n": data.n[None]}, {}
