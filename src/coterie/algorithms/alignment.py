# SPDX-License-Identifier: Apache-2.0
"""Label alignment: number the components of every client's mixture alike.

Tian, Weng, Feng, "Towards the Theory of Unsupervised Federated Learning: Non-asymptotic Analysis of Federated EM
Algorithms", ICML 2024, Section C.2. The score of an alignment is the sum over components and pairs of clients of the
distance between their parameters.

Departures: the stepwise search runs over several random orders of the clients, until one outcome has recurred, and solves
each step by the Hungarian method, so that its cost is polynomial in R; then clients are realigned to a robust centre (the
coordinatewise median), which outlier clients cannot drag; the order with the smallest robust score wins. Distances are
capped throughout, so that outliers, whom no permutation fits, do not decide. A client may have found the same component
twice; then orders are as good as each other, and it is the first of them, not rounding, that decides.
"""

import itertools
import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from coterie import keys

__all__ = ["align", "exhaustive", "forget", "score"]

_ORDERS = 10
_RECURS = 3  # outcomes alike that end the search
_REFINEMENTS = 20
_TINY = 600  # alignments that are simply all tried
_HUGE = 1e100  # where squares still fit
_TIE = 1e-6  # scores and distances, relative, that are the same: rounding must not decide


def score(theta: Tensor) -> float:
    """Sum over components and pairs of clients of the distance.  theta [M, R, P]"""
    parts = theta.transpose(0, 1)  # [R, M, P]
    return float(torch.cdist(parts, parts).sum())


def exhaustive(theta: Tensor) -> Tensor:
    """Try all permutations of all clients but the first: for tiny problems.  theta [M, R, P] -> order [M, R]"""
    clients, components = theta.shape[:2]
    each = list(itertools.permutations(range(components)))
    first = tuple(range(components))
    every = [torch.tensor(orders) for orders in itertools.product([first], *[each] * (clients - 1))]
    return _first_of_the_best(every, [score(_permuted(theta, order)) for order in every])


def align(theta: Tensor, seed: int, *, orders: int = _ORDERS) -> Tensor:
    """Find an order of every client's components such that they are numbered alike.

    Parameters
    ----------
    theta : Tensor
        [M, R, P] parameters as every client numbers them.
    seed : int
        Of the random orders.
    orders : int
        How many are tried at most.

    Returns
    -------
    Tensor
        [M, R] component number `order[k, r]` of client k is called r; the first client's keep their numbers.
    """
    clients, components = theta.shape[:2]
    if clients < 2 or components < 2:
        return torch.arange(components).repeat(clients, 1)
    safe = theta.double().nan_to_num(nan=0.0, posinf=_HUGE, neginf=-_HUGE).clamp(-_HUGE, _HUGE)
    return _aligned(safe.numpy().tobytes(), tuple(safe.shape), seed, orders).clone()


@lru_cache(maxsize=8)
def _aligned(numbers: bytes, shape: tuple[int, ...], seed: int, orders: int) -> Tensor:
    """Align; runs in lockstep that begin alike are aligned once."""
    safe = torch.frombuffer(bytearray(numbers), dtype=torch.float64).view(shape)
    clients, components = shape[:2]
    if math.factorial(components) ** min(clients - 1, 10) <= _TINY:
        return exhaustive(safe)
    cap = _usual_distance(safe)
    draw = keys.generator(seed, "alignment")
    found: list[Tensor] = []
    for _ in range(orders):
        stepwise = _stepwise(safe, torch.randperm(clients, generator=draw), cap)
        found.append(_named_by_first(_refined(safe, stepwise, cap)))
        if sum(torch.equal(found[-1], other) for other in found) == _RECURS:
            return found[-1]
    reach = min(float(_from_centre(safe, order).median()) for order in found)
    return _first_of_the_best(found, [float(_from_centre(safe, order).clamp(max=3 * reach).sum()) for order in found])


def forget() -> None:
    """Forget what was aligned: a fit that is timed should not profit from one before it."""
    _aligned.cache_clear()


def _first_of_the_best(orders: list[Tensor], scores: list[float]) -> Tensor:
    """The first whose score is the smallest, but for rounding."""
    enough = min(scores) * (1 + _TIE)
    return next(order for order, value in zip(orders, scores, strict=True) if value <= enough)


def _assigned(cost: np.ndarray, unit: float) -> Tensor:
    """Every name's own component at the least cost; where costs are the same, the nearest number.  [R, R] -> [R]"""
    from scipy.optimize import linear_sum_assignment  # here: only servers need it, and it is slow to load

    number = np.arange(len(cost))
    away = np.sqrt(np.abs(number[:, None] - number) + number[:, None] / len(cost))  # sums of two orders differ
    return torch.from_numpy(linear_sum_assignment(cost + _TIE * unit * away)[1])


def _usual_distance(theta: Tensor) -> float:
    """Four times the lower quartile of all distances: about as far as components of good clients may be."""
    flat = theta.flatten(0, 1)
    distance = torch.pdist(flat[torch.linspace(0, len(flat) - 1, min(len(flat), 1000)).long()])
    return max(4 * float(distance.kthvalue(1 + len(distance) // 4).values), 1e-300)


def _stepwise(theta: Tensor, visit: Tensor, cap: float) -> Tensor:
    """Alignment Algorithm 2 in the given order: each client joins those before it as well as it can."""
    order = torch.arange(theta.shape[1]).repeat(len(theta), 1)
    placed = theta[visit]  # [M, R, P], in the order of the visits
    for i, k in enumerate(visit.tolist()):
        if i:
            cost = torch.cdist(placed[:i], theta[k][None]).clamp_(max=cap).mean(0)  # [R, R]: name r, own component
            order[k] = _assigned(cost.numpy(), cap)
            placed[i] = theta[k][order[k]]
    return order


def _refined(theta: Tensor, order: Tensor, cap: float) -> Tensor:
    """Realign everybody to the median until nothing changes."""
    for _ in range(_REFINEMENTS):
        centre = _permuted(theta, order).median(0).values  # [R, P]
        cost = torch.cdist(centre[None], theta)  # [M, R, R]
        new = torch.stack([_assigned(c, cap) for c in cost.numpy()])
        if torch.equal(new, order):
            break
        order = new
    return order


def _named_by_first(order: Tensor) -> Tensor:
    """Rename components for all clients alike, such that the first client's keep their numbers."""
    return order[:, order[0].argsort()]


def _permuted(theta: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(theta, order[..., None], 1)


def _from_centre(theta: Tensor, order: Tensor) -> Tensor:
    """Distance of every client's components from the median.  [M, R]"""
    placed = _permuted(theta, order)
    away: Tensor = (placed - placed.median(0).values).norm(dim=-1)
    return away
