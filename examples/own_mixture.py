# SPDX-License-Identifier: Apache-2.0
"""A mixture of your own family, and shops that do not belong: kinds of days, found in what 30 shops sell.

A family is the log density of one row. Here it is Poisson's, for counts. Steps are as long as suits normal components of
variance one, so choose parameters whose Fisher information is about one: for a rate, twice its root. Two shops' tills are
broken. They do not spoil the others' mixtures, and are named.

Run it: `python examples/own_mixture.py`
"""

import math

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.mixture_starts import MixtureStart
from coterie.data.ragged import Ragged
from coterie.methods.mixture.fit import fit_mixture, labels
from coterie.models.mixtures import Custom


def log_p(sold: Tensor, _: Tensor | None, theta: Tensor) -> Tensor:
    """Log density of one day's counts: Poisson, independent products, theta = 2 sqrt(rate)."""
    rate = (theta / 2).square().clamp(min=1e-6)
    return (sold * rate.log() - rate - torch.lgamma(sold + 1)).sum()


def first(sold: Tensor, _: Tensor) -> Tensor:
    """Where a component may begin: at one day's counts."""
    return 2 * (sold + 0.5).sqrt()


draw = np.random.default_rng(0)
shop, kind = np.repeat(np.arange(30), 60), draw.integers(3, size=1800)  # 60 days each, of three kinds, told to nobody
usual = np.array([[2.0, 6.0, 1.0, 4.0], [8.0, 2.0, 3.0, 1.0], [4.0, 4.0, 9.0, 9.0]])  # mean sales of four products
own = usual * np.exp(0.1 * draw.normal(size=(30, 3, 4)))  # every shop is a little different
sold = draw.poisson(own[shop, kind])
broken = np.isin(shop, (7, 19))
sold[broken] = draw.poisson(20, size=(broken.sum(), 4))
rows = Ragged.from_groups(
    torch.tensor(sold, dtype=torch.float64), None, np.array([f"shop-{number:02d}" for number in shop])
)

family = Custom(log_p, n_parameters=4, first=first, steps=5)
start = MixtureStart(restarts=4, iterations=10)  # autograd takes its time, and counts are easy
fit = fit_mixture(rows, family, 3, candidates=(0.0, 0.5, 1.0, 2.0, math.inf), start=start, rounds=100, tol=1e-4)

print(f"C_lambda = {fit.c_lambda:g}, chosen on held-out days, where 0 is every shop alone and inf the same for all")
for rates, share in zip((fit.centre / 2).square().tolist(), fit.weights[~fit.outliers].mean(0).tolist(), strict=True):
    print("  a kind of day sells", " ".join(f"{rate:.1f}" for rate in rates), f"in {100 * share:.0f} % of the days")
for name, score in zip(rows.names[fit.outliers.numpy()], fit.outlier_score[fit.outliers].tolist(), strict=True):
    print(f"  outlier: {name}, score {score:.1f}")
first_shop = labels(fit, rows)[torch.from_numpy(rows.owners == 0)]
print("the first days of shop-00 are of kinds", first_shop[:10].tolist())
