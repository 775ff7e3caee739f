# SPDX-License-Identifier: Apache-2.0
"""Who is an outlier among clients with mixtures: a robust z of the distance from the centre.

A distance is judged against the others' spread, but never as if it were known better than chance allows: clients that happen
to agree do not make an outlier of one that is merely as far from the truth as its few rows explain.
"""

import math

import torch
from torch import Tensor

__all__ = ["chance", "outlier_scores", "scored", "usual"]


def chance(n: Tensor, n_components: int, n_parameters: int) -> Tensor:
    """How much distances from the truth vary by chance where estimates have n rows, in units of the scale.  n [...] -> [...]

    A component's share of the rows is n / R, and each of its P parameters has a variance of one over that: the distance is
    about sqrt(P R / n). Half of it is a cautious guess of its deviation, since shares are not equal.
    """
    return 0.5 * (n_parameters * n_components / n.clamp(min=1).to(torch.float64)).sqrt()


def usual(distance: Tensor) -> tuple[float, float]:
    """The median, and 1.4826 times the median absolute deviation, which is a normal law's deviation.  [M]"""
    if not len(distance):
        return 0.0, 0.0
    middle = float(distance.median())
    return middle, 1.4826 * float((distance - middle).abs().nan_to_num(nan=math.inf).median())


def scored(distance: Tensor, middle: Tensor, spread: Tensor) -> Tensor:
    """(distance - middle) / spread; an infinite distance has an infinite score, and a usual one 0 whatever the spread."""
    score = (distance - middle) / spread.clamp(min=1e-300)
    return torch.where(distance == middle, 0.0, score).nan_to_num(nan=math.inf, posinf=math.inf)


def outlier_scores(distance: Tensor, noise: Tensor) -> Tensor:
    """Robust z of every client's distance, whose spread is that of all distances or, if this is larger, its own noise.

    Of normal distances about one in a thousand has more than 3.

    Parameters
    ----------
    distance : Tensor
        [M] from the centre.
    noise : Tensor
        [M] what each owes to chance; 0 where this is not known.
    """
    middle, spread = usual(distance)
    return scored(distance, distance.new_tensor(middle), noise.clamp(min=spread))
