# SPDX-License-Identifier: Apache-2.0
"""Planted mixed linear regression: the synthetic benchmark of IFCA, and its random starts.

Ghosh et al., NeurIPS 2020, Section 6.1 and Figure 2. The text rescales the planted models to norm R; the authors' code
multiplies 0/1 coordinates by r instead, which makes them about sqrt(D / 2) times as long. Both are here, as presets.
Departure: a planted model that is zero or equals an earlier one is drawn again (with few features it would happen).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError

__all__ = ["Planted", "Preset", "bernoulli_starts", "mixed_regression", "oracle_error"]

Preset = Literal["paper", "official"]


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


def oracle_error(noise: float, n_features: int, p: float, n_clients: int, rows: int) -> float:
    """Error scale of a cluster's least-squares fit when the clusters are known: sigma sqrt(D / (p m n)).

    Parameters
    ----------
    noise : float
        Standard deviation of the noise.
    n_features : int
        D.
    p : float
        Share of the clients that belong to the cluster.
    n_clients, rows : int
        m clients with n rows each.
    """
    return noise * math.sqrt(n_features / (p * n_clients * rows))


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
