# SPDX-License-Identifier: Apache-2.0
"""Label alignment: number the components of every client's mixture alike.

Tian, Weng, Feng, "Towards the Theory of Unsupervised Federated Learning: Non-asymptotic Analysis of Federated EM
Algorithms", ICML 2024, Section C.2. The score of an alignment is the sum over components and pairs of clients of the
distance between their parameters.

Departures: the stepwise search runs over several random orders of the clients and solves each step by the Hungarian method,
so that its cost is polynomial in R; then clients are realigned one by one to a robust centre (the coordinatewise median),
which outlier clients cannot drag; the order with the smallest robust score wins: distances are capped, so that outliers,
whom no permutation fits, do not decide.
"""

import itertools

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie import keys

__all__ = ["align", "exhaustive", "score"]

_ORDERS = 10
_REFINEMENTS = 20


def score(theta: Tensor) -> float:
    """Sum over components and pairs of clients of the distance.  theta [M, R, P]"""
    parts = theta.transpose(0, 1)  # [R, M, P]
    return float(torch.cdist(parts, parts).sum())


def exhaustive(theta: Tensor) -> Tensor:
    """Try all permutations of all clients but the first: for tiny problems.  theta [M, R, P] -> order [M, R]"""
    clients, components = theta.shape[:2]
    each = list(itertools.permutations(range(components)))
    first = tuple(range(components))
    best = min(
        itertools.product([first], *[each] * (clients - 1)),
        key=lambda orders: score(_permuted(theta, torch.tensor(orders))),
    )
    return torch.tensor(best)


def align(theta: Tensor, seed: int, *, orders: int = _ORDERS) -> Tensor:
    """Find an order of every client's components such that they are numbered alike.

    Parameters
    ----------
    theta : Tensor
        [M, R, P] parameters as every client numbers them.
    seed : int
        Of the random orders.

    Returns
    -------
    Tensor
        [M, R] component number `order[k, r]` of client k is called r.
    """
    clients, components = theta.shape[:2]
    if clients < 2 or components < 2:
        return torch.arange(components).expand(clients, -1).clone()
    safe = theta.nan_to_num(nan=0.0, posinf=1e150, neginf=-1e150).double()
    draw = keys.generator(seed, "alignment")
    found = [_refined(safe, _stepwise(safe, torch.randperm(clients, generator=draw))) for _ in range(orders)]
    reach = min(_typical(safe, order) for order in found)
    return min(found, key=lambda order: _capped(safe, order, 3 * reach))


def _stepwise(theta: Tensor, visit: Tensor) -> Tensor:
    """Alignment Algorithm 2 in the given order: each client joins those before it as well as it can."""
    components = theta.shape[1]
    order = torch.arange(components).repeat(len(theta), 1)
    before = [theta[visit[0]]]
    for k in visit[1:].tolist():
        cost = torch.cdist(torch.stack(before), theta[k][None]).sum(0)  # [R, R]: name r, own component
        order[k] = torch.from_numpy(linear_sum_assignment(cost.numpy())[1])
        before.append(theta[k][order[k]])
    return order


def _refined(theta: Tensor, order: Tensor) -> Tensor:
    """Realign everybody to the median of the others' until nothing changes."""
    for _ in range(_REFINEMENTS):
        centre = _permuted(theta, order).median(0).values  # [R, P]
        cost = torch.cdist(centre[None], theta)  # [M, R, R]
        new = torch.stack([torch.from_numpy(linear_sum_assignment(c)[1]) for c in cost.numpy()])
        if torch.equal(new, order):
            break
        order = new
    return order


def _permuted(theta: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(theta, order[..., None], 1)


def _from_centre(theta: Tensor, order: Tensor) -> Tensor:
    """Distance of every client's components from the median.  [M, R]"""
    placed = _permuted(theta, order)
    return (placed - placed.median(0).values).norm(dim=-1)


def _typical(theta: Tensor, order: Tensor) -> float:
    return float(np.median(_from_centre(theta, order).numpy()))


def _capped(theta: Tensor, order: Tensor, cap: float) -> float:
    return float(_from_centre(theta, order).clamp(max=max(cap, 1e-300)).sum())
