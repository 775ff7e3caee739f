# SPDX-License-Identifier: Apache-2.0
"""A planted mixed regression, and how far models are from what was planted.

Su, Xu, Yang, NeurIPS 2022, appendix C: the error is the largest of the clusters', models matched to them as well as can be.
"""

import itertools
import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.studies.common import one_of
from coterie.studies.data.synthetic import Covariance, Law, Planted, unequal_mixture

__all__ = ["MOST_CLUSTERS", "Problem", "worst_errors"]

MOST_CLUSTERS = 7  # all orders of the models are tried


@dataclass(frozen=True)
class Problem:
    """What is planted.

    Attributes
    ----------
    clients : tuple of pairs
        (how many, rows of each), for every size of client.
    shares : tuple of float
        p, the probability of each cluster.
    n_features, noise : int, float
        D and sigma.
    features, covariance : str
        See `unequal_mixture`.
    """

    clients: tuple[tuple[int, int], ...]
    shares: tuple[float, ...] = (1 / 3, 1 / 3, 1 / 3)
    n_features: int = 100
    noise: float = 0.2
    features: Law = "normal"
    covariance: Covariance = "same"

    def __post_init__(self) -> None:
        one_of("--features", self.features, get_args(Law))
        one_of("--covariance", self.covariance, get_args(Covariance))
        if not 1 <= len(self.shares) <= MOST_CLUSTERS:
            raise ConfigError(
                f"{len(self.shares)} clusters are not for this study", f"plant 1 to {MOST_CLUSTERS} clusters"
            )
        if not any(m > 0 and n > 1 for m, n in self.clients):
            raise ConfigError("no client could be an anchor", "give some clients two rows or more")

    def plant(self, seed: int) -> Planted:
        """Draw clients."""
        rows = torch.cat([torch.full((m,), n) for m, n in self.clients])
        return unequal_mixture(
            rows=rows, shares=self.shares, n_features=self.n_features, noise=self.noise, features=self.features,
            covariance=self.covariance, seed=seed,
        )  # fmt: skip


def worst_errors(theta: Tensor, truth: Tensor) -> Tensor:
    """Largest distance to a planted model, models matched one to one so that it is smallest; infinite if one diverged.

    Parameters
    ----------
    theta : Tensor
        [T, J, D] models at T moments. With fewer than there are planted ones, every planted one takes the nearest.
    truth : Tensor
        [K, D] planted models.

    Returns
    -------
    Tensor
        [T]
    """
    far = torch.cdist(truth, theta, compute_mode="donot_use_mm_for_euclid_dist")  # [T, K, J]
    far = far.nan_to_num(nan=math.inf, posinf=math.inf)
    if theta.shape[1] < len(truth):
        return far.min(2).values.max(1).values
    orders = torch.tensor(list(itertools.permutations(range(theta.shape[1]), len(truth))))  # [O, K]
    return far[:, torch.arange(len(truth)), orders].max(2).values.min(1).values
