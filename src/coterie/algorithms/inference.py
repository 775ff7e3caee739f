# SPDX-License-Identifier: Apache-2.0
"""What clients do with a mixture that is there: find proportions, say how rows scatter, predict targets."""

from typing import Any

import torch
from torch import Tensor

from coterie.models.families import Family, expect, shares
from coterie.models.mixtures import Regression
from coterie.protocol import Ask, Block, Stack, Sum, Tensors, answers

__all__ = ["about_centre", "adopt", "adopt_ask", "error_ask", "expectations", "spread_ask", "squared_errors"]

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


def spread_ask(family: Family, centre: Tensor, theta: Tensor, weights: Tensor, scale: Tensor, good: Tensor) -> Ask:
    """Ask how rows scatter about the centre's components, each row with the one that its client's own mixture gives it.

    Parameters
    ----------
    centre : Tensor
        [R, P]
    theta, weights, scale : Tensor
        [M, R, P], [M, R], [M | 1, ...] of every client.
    good : Tensor
        [M] whose rows count.
    """
    each = {"theta": theta, "weights": weights, "scale": scale.expand(len(theta), *scale.shape[1:]), "good": good}
    fold = {"scatter": Sum(), "n": Sum()}
    shared = {"family": family, "centre": centre}
    return Ask(about_centre, shared, fold, each=each, to=torch.arange(len(theta)), scratch=4 * len(centre))


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
@answers(weights=Stack(), likelihood=Stack(), deviation=Stack(), n=Stack())
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


@answers(scatter=Sum(), n=Sum())
def about_centre(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Scatter of a client's rows about the centre."""
    family = shared["family"]
    gamma, _ = expect(family.log_density(each["theta"], each["scale"], data), each["weights"], data)
    scatter = family.scatter(shared["centre"][:, None].expand_as(each["theta"]), gamma, data)
    good = each["good"]
    scatter = torch.where(good.view(*good.shape, *(1,) * (scatter.dim() - 2)), scatter, 0.0)
    return {"scatter": scatter, "n": (good * data.n).to(torch.float64)}, {}


@answers(error=Stack(), n=Stack())
def squared_errors(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Mean squared error of every client's own line."""
    made = torch.stack([expectations(shared["family"], line, data) for line in each["line"]])  # [S, C, N]
    error = ((made - data.target).square() * data.weights).sum(-1)
    return {"error": error, "n": data.n[None]}, {}
