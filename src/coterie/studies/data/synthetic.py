# SPDX-License-Identifier: Apache-2.0
"""Planted mixed linear regression: the synthetic benchmarks of IFCA (with its random starts) and of moment descent.

`mixed_regression`: Ghosh et al., NeurIPS 2020, Section 6.1 and Figure 2. The text rescales the planted models to norm R; the
authors' code multiplies 0/1 coordinates by r instead, which makes them about sqrt(D / 2) times as long. Both are here, as
presets. Departure: a planted model that is zero or equals an earlier one is drawn again (with few features it would happen).

`unequal_mixture`: Su, Xu, Yang, NeurIPS 2022, appendix C, with clients of any lengths; beyond the paper's normal features
with one covariance, other laws and a covariance for each cluster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import Layout, Ragged
from coterie.errors import ConfigError

__all__ = [
    "Covariance",
    "Law",
    "Planted",
    "Preset",
    "bernoulli_starts",
    "mixed_regression",
    "normal_models",
    "unequal_mixture",
]

Preset = Literal["paper", "official"]
Law = Literal["normal", "rademacher", "uniform", "laplace"]
Covariance = Literal["same", "differs"]

_AT_ONCE = 1 << 16  # rows that are drawn together: more would not be faster, and need room


@dataclass(frozen=True, eq=False)
class Planted:
    """Clients whose clusters and models are known.

    Attributes
    ----------
    rows : Ragged
        The clients' rows.
    truth : Tensor
        [M] cluster of each client, int64.
    theta : Tensor
        [K, D] model of each cluster.
    """

    rows: Ragged
    truth: Tensor
    theta: Tensor


def mixed_regression(
    *,
    n_clients: int,
    rows: int,
    n_features: int,
    n_clusters: int,
    noise: float,
    separation: float,
    preset: Preset = "paper",
    seed: int,
    dtype: torch.dtype = torch.float64,
) -> Planted:
    """Draw clients of equal length from K linear models: x ~ N(0, I), y = <x, theta_j> + N(0, noise^2).

    Parameters
    ----------
    n_clients, rows, n_features, n_clusters : int
        M clients of `rows` rows each, D features, K clusters. Client i belongs to cluster i mod K.
    noise : float
        Standard deviation of the noise, the paper's sigma.
    separation : float
        `paper`: norm R of every planted model. `official`: the r that multiplies its 0/1 coordinates.
    preset : {"paper", "official"}
        How the planted models are scaled.
    seed : int
        The same seed plants the same models for both presets and every precision; rows are drawn in `dtype`, so that
        float32 and float64 rows are different draws.
    dtype : torch.dtype
        Of features, targets and models.

    Returns
    -------
    Planted
        Rows, clusters and models.

    Raises
    ------
    ConfigError
        If the sizes make no sense, or there are fewer different models than clusters.
    """
    _check(n_clients, rows, n_features, n_clusters, noise, separation, preset)
    theta = _planted_models(n_clusters, n_features, seed)  # [K, D]
    if preset == "paper":
        theta = theta / theta.norm(dim=1, keepdim=True)
    theta = (separation * theta).to(dtype)
    truth = torch.arange(n_clients) % n_clusters  # [M]
    draws = keys.generator(seed, "mixed regression rows")
    x = torch.randn(n_clients, rows, n_features, generator=draws, dtype=dtype)  # [M, N, D]
    y = (x @ theta[truth, :, None]).squeeze(-1)  # [M, N]
    y += noise * torch.randn(y.shape, generator=draws, dtype=dtype)
    return Planted(Ragged.from_blocks(x, y), truth, theta)


def unequal_mixture(
    *,
    rows: Tensor,
    shares: Sequence[float],
    n_features: int,
    noise: float,
    features: Law = "normal",
    covariance: Covariance = "same",
    seed: int,
) -> Planted:
    """Draw clients of given lengths from K linear models theta_j ~ (2 / sqrt D) N(0, I), in float64.

    Parameters
    ----------
    rows : Tensor
        [M] rows of each client, int64; none is allowed.
    shares : sequence of float
        [K] probability that a client belongs to each cluster; their sum is taken as 1.
    n_features : int
        D.
    noise : float
        Standard deviation of the noise in y = <x, theta_j> + noise.
    features : {"normal", "rademacher", "uniform", "laplace"}
        Law of independent coordinates with mean 0 and variance 1.
    covariance : {"same", "differs"}
        "differs" multiplies these by the root of the cluster's own covariance, whose directions are random and whose
        eigenvalues lie within 0.5 and 2.
    seed : int
        The same seed plants the same models and clusters whatever the features.

    Returns
    -------
    Planted
        Rows, clusters and models.

    Raises
    ------
    ConfigError
        If the sizes, shares or names make no sense.
    """
    _check_mixture(rows, shares, n_features, noise, features, covariance)
    draws = keys.generator(seed, "mixture")
    theta = normal_models(len(shares), n_features, draws)
    weights = torch.tensor(shares, dtype=torch.float64)
    truth = torch.multinomial(weights, len(rows), replacement=True, generator=draws)  # [M]
    roots = _covariance_roots(len(shares), n_features, draws) if covariance == "differs" else None
    names = np.char.zfill(np.arange(len(rows)).astype(str), len(str(len(rows) - 1)))
    layout = Layout.plan(names, rows.numpy())
    order = torch.from_numpy(layout.order)
    cluster = truth[order].repeat_interleave(rows[order])  # [N] of every row, as stored
    x = torch.empty(len(cluster), n_features, dtype=torch.float64)
    for start in range(0, len(x), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        _draw(x[part], features, draws)
        if roots is not None:
            for k, root in enumerate(roots):
                own = cluster[part] == k
                x[part][own] = x[part][own] @ root
    y = (x @ theta.T).gather(1, cluster[:, None])[:, 0]
    y += noise * torch.randn(y.shape, generator=draws, dtype=torch.float64)
    return Planted(Ragged(layout, x, y), truth, theta)


def normal_models(n: int, n_features: int, generator: torch.Generator) -> Tensor:
    """Draw models as appendix C does, planted ones and starts alike: (2 / sqrt D) N(0, I).  [n, D]"""
    return 2 / math.sqrt(n_features) * torch.randn(n, n_features, generator=generator, dtype=torch.float64)


def _draw(out: Tensor, law: Law, draws: torch.Generator) -> None:
    """Fill with independent draws of mean 0 and variance 1."""
    if law == "normal":
        out.normal_(generator=draws)
    elif law == "rademacher":
        out.bernoulli_(0.5, generator=draws).mul_(2).sub_(1)
    elif law == "uniform":
        out.uniform_(-math.sqrt(3), math.sqrt(3), generator=draws)
    else:  # the difference of two exponential variables, each of variance 1/2
        out.exponential_(math.sqrt(2), generator=draws)
        out -= torch.empty_like(out).exponential_(math.sqrt(2), generator=draws)


def _covariance_roots(n: int, n_features: int, draws: torch.Generator) -> Tensor:
    """Symmetric roots of random covariances, with eigenvalues log-uniform within 0.5 and 2.  [n, D, D]"""
    q = torch.linalg.qr(torch.randn(n, n_features, n_features, generator=draws, dtype=torch.float64)).Q
    values = 2 ** (2 * torch.rand(n, 1, n_features, generator=draws, dtype=torch.float64) - 1)
    root: Tensor = (q * values.sqrt()) @ q.transpose(1, 2)
    return root


def bernoulli_starts(
    n_starts: int,
    n_clusters: int,
    n_features: int,
    *,
    seed: int,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Draw random starts with independent Bernoulli(0.5) coordinates, times `scale`.

    Start s depends on the seed and s only: asking for more starts keeps the first ones.

    Parameters
    ----------
    n_starts, n_clusters, n_features : int
        S starts of K models with D coordinates.
    seed : int
        A seed may be shared with `mixed_regression`: starts and planted models are drawn apart.
    scale : float
        1 is the authors' code, whatever the separation. What matters is the ratio to the planted coordinates
        (`separation` for the preset `official`, about ``separation / sqrt(D / 2)`` for `paper`). From far longer starts
        the larger cluster runs ahead and takes every client before the labels mean anything, unless the first labels
        happen to split evenly: with `official`, separation 0.1, noise 0.1, K = 2, M = N = 100, D = 1000, step 0.1 and
        300 rounds, 11 of 100 starts succeed at scale 1, and 72 of 100 at scale 0.1.
    dtype : torch.dtype
        Of the starts.

    Returns
    -------
    Tensor
        [S, K, D] starts.
    """
    each = keys.key(seed, "bernoulli starts", torch.arange(n_starts))  # [S]
    u = keys.uniform(each, n_clusters * n_features).view(n_starts, n_clusters, n_features)
    return scale * (u < 0.5).to(dtype)


def _planted_models(n_clusters: int, n_features: int, seed: int) -> Tensor:
    """Draw 0/1 models, none of them zero and no two equal.  [K, D] float64"""
    draws = keys.generator(seed, "mixed regression models")
    models: list[Tensor] = []
    while len(models) < n_clusters:
        theta = (torch.rand(n_features, generator=draws, dtype=torch.float64) < 0.5).to(torch.float64)
        if theta.any() and not any(torch.equal(theta, other) for other in models):
            models.append(theta)
    return torch.stack(models)


def _check(
    n_clients: int, rows: int, n_features: int, n_clusters: int, noise: float, separation: float, preset: str
) -> None:
    if preset not in get_args(Preset):
        raise ConfigError(f"there is no preset {preset!r}", "choose 'paper' or 'official'")
    if min(rows, n_features, n_clusters) < 1 or noise < 0 or separation <= 0:
        raise ConfigError(
            f"cannot draw {rows} rows, {n_features} features, {n_clusters} clusters with noise {noise} and "
            f"separation {separation}",
            "sizes are at least 1, the noise is not negative, the separation is positive",
        )
    if n_clients < n_clusters:
        raise ConfigError(
            f"{n_clients} clients cannot fill {n_clusters} clusters", "ask for more clients or fewer clusters"
        )
    if n_features < 63 and n_clusters > 2**n_features - 1:
        raise ConfigError(
            f"{n_features} features give only {2**n_features - 1} different models for {n_clusters} clusters",
            "ask for more features or fewer clusters",
        )


def _check_mixture(
    rows: Tensor, shares: Sequence[float], n_features: int, noise: float, features: str, covariance: str
) -> None:
    if features not in get_args(Law) or covariance not in get_args(Covariance):
        raise ConfigError(
            f"there are no {features!r} features with {covariance!r} covariance",
            f"choose features among {', '.join(get_args(Law))}, and covariance among {', '.join(get_args(Covariance))}",
        )
    if not len(rows) or int(rows.min()) < 0 or n_features < 1 or not noise >= 0:
        raise ConfigError(
            f"cannot draw {len(rows)} clients with {n_features} features and noise {noise}",
            "there is at least one client and one feature, and neither rows nor noise are negative",
        )
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ConfigError(
            f"{list(shares)} are not shares of clients", "give numbers of which none is negative, one at least positive"
        )
