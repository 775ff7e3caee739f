# SPDX-License-Identifier: Apache-2.0
"""Planted mixtures: clients whose components and proportions are known, and some clients that have neither.

Tian, Weng, Feng, ICML 2024, appendix B.1: Gaussian mixtures (`gmm`) and mixtures of regressions (`mor`) of R = 5
components in 10 dimensions, whose parameters are at distance h from common ones, in a random direction; outlier clients have
one component that has nothing to do with them. The text lost the last entry of the second centre; it is -1. The authors'
code draws the outliers otherwise than the text says: both are here, as presets. Other centres may be given, of any number
and dimension.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError

__all__ = ["CENTRES", "Kind", "Outliers", "PlantedMixture", "drawn_centres", "matched", "planted_mixture"]

Kind = Literal["gmm", "mor"]
Outliers = Literal["paper", "official"]

CENTRES = torch.tensor(
    [
        [1, 0, 3, -1, 1, -1, 0, 1, 1, -1],
        [0, 1, -1, -3, 2, -1, 2, -1, 1, -1],
        [-3, -1, 2, -1, 2, -1, 1, -3, -1, -2],
        [1, -2, 0, -1, -2, 2, 1, 3, 1, -1],
        [3, 1, 2, -1, -2, 1, 2, -1, -1, 2],
    ],
    dtype=torch.float64,
)  # [R, D]

_DEVIATION, _WIDER = 1.5, 1.02  # of centres that are drawn at first, and after every draw with two that are too close
_CONCENTRATION = 5  # of the Dirichlet law of proportions
_OUTLIER_MEAN = {"paper": 2.0, "official": 2.5}  # gmm: of every coordinate ...
_OUTLIER_VARIANCE = {"paper": 3.0, "official": 4.0}
_OUTLIER_COEFFICIENT = {"paper": 3.0, "official": -3.0}  # mor: of every feature


@dataclass(frozen=True, eq=False)
class PlantedMixture:
    """Clients and what their rows were drawn from.

    Attributes
    ----------
    rows : Ragged
        The clients' rows; a target for mixtures of regressions only.
    theta : Tensor
        [M, R, D] parameters of the components; an outlier client's are those that it does not have.
    weights : Tensor
        [M, R] proportions, likewise.
    good : Tensor
        [M] false for outlier clients, which are the last ones.
    """

    rows: Ragged
    theta: Tensor
    weights: Tensor
    good: Tensor


def planted_mixture(
    kind: Kind,
    *,
    n_clients: int = 10,
    n_outliers: int = 1,
    rows: int | None = None,
    h: float = 0.0,
    outliers: Outliers = "paper",
    centres: Tensor = CENTRES,
    seed: int,
) -> PlantedMixture:
    """Draw clients from mixtures that are alike.

    Parameters
    ----------
    kind : {"gmm", "mor"}
        Normal components with unit covariance, or regressions on standard normal features with unit noise.
    n_clients, n_outliers : int
        M, and how many of them are outliers.
    rows : int, optional
        Of every client; 150 for `gmm` and 200 for `mor` by default.
    h : float
        Distance of every client's parameters from the common centres.
    outliers : {"paper", "official"}
        Outliers as in the text (N(2, 3 I); coefficients 3) or as in the authors' code (N(2.5, 4 I); coefficients -3).
    centres : Tensor
        [R, D] the common parameters; the paper's by default.
    seed : int
        The same seed draws the same directions, proportions and noise for every h.

    Raises
    ------
    ConfigError
        If the sizes make no sense.
    """
    _check(kind, n_clients, n_outliers, rows, h, outliers)
    rows = rows or (150 if kind == "gmm" else 200)
    n_components, n_features = centres.shape
    draws = keys.generator(seed, "planted mixture")
    direction = torch.randn(n_clients, n_components, n_features, generator=draws, dtype=torch.float64)
    theta = centres + h * direction / direction.norm(dim=-1, keepdim=True)  # [M, R, D]
    weights = _dirichlet(n_clients, n_components, draws)  # [M, R]
    label = torch.multinomial(weights, rows, replacement=True, generator=draws)  # [M, N]
    own = torch.take_along_dim(theta, label[..., None], 1)  # [M, N, D] parameters of every row's component
    good = torch.arange(n_clients) < n_clients - n_outliers
    x = torch.randn(n_clients, rows, n_features, generator=draws, dtype=torch.float64)
    if kind == "gmm":
        odd = _OUTLIER_MEAN[outliers] + math.sqrt(_OUTLIER_VARIANCE[outliers]) * x
        return PlantedMixture(
            Ragged.from_blocks(torch.where(good[:, None, None], own + x, odd), None), theta, weights, good
        )
    own[~good] = _OUTLIER_COEFFICIENT[outliers]
    y = (x * own).sum(-1) + torch.randn(n_clients, rows, generator=draws, dtype=torch.float64)
    return PlantedMixture(Ragged.from_blocks(x, y), theta, weights, good)


def drawn_centres(n_components: int, n_features: int, *, apart: float, seed: int) -> Tensor:
    """Draw centres from a normal law, again and ever more widely until all are far enough from each other.  [R, D]"""
    draws, deviation = keys.generator(seed, "planted centres"), _DEVIATION
    while True:
        centres = deviation * torch.randn(n_components, n_features, generator=draws, dtype=torch.float64)
        if n_components < 2 or float(torch.pdist(centres).min()) >= apart:
            return centres
        deviation *= _WIDER


def matched(theta: Tensor, weights: Tensor, planted: PlantedMixture) -> tuple[float, float]:
    """Largest errors of the good clients: of parameters (length of the difference), and of proportions.

    Components have no numbers, so every client's are matched to the planted ones by the one permutation with the smallest
    maximal error of parameters; proportions are compared under that same permutation.

    Parameters
    ----------
    theta : Tensor
        [M, R, D] estimates.
    weights : Tensor
        [M, R] likewise.
    planted : PlantedMixture
        The truth.
    """
    every = torch.tensor(list(itertools.permutations(range(theta.shape[1]))))  # [R!, R]
    distance = torch.cdist(planted.theta, theta)  # [M, R planted, R estimated]
    paired = distance[:, torch.arange(theta.shape[1]), every]  # [M, R!, R]
    error, best = paired.max(-1).values.min(-1)  # [M]
    gap = (torch.take_along_dim(weights, every[best], 1) - planted.weights).abs().max(-1).values
    return float(error[planted.good].max()), float(gap[planted.good].max())


def _dirichlet(n_clients: int, n_components: int, draws: torch.Generator) -> Tensor:
    """Gamma variables with a whole shape are sums of exponential ones; their shares are Dirichlet.  [M, R]"""
    u = torch.rand(n_clients, n_components, _CONCENTRATION, generator=draws, dtype=torch.float64)
    gamma = -torch.log1p(-u).sum(-1)
    return gamma / gamma.sum(-1, keepdim=True)


def _check(kind: str, n_clients: int, n_outliers: int, rows: int | None, h: float, outliers: str) -> None:
    if kind not in get_args(Kind) or outliers not in get_args(Outliers):
        raise ConfigError(
            f"there are no planted mixtures {kind!r} with outliers {outliers!r}",
            f"choose among {', '.join(get_args(Kind))} and {', '.join(get_args(Outliers))}",
        )
    if not 0 <= n_outliers < n_clients or (rows is not None and rows < 1):
        raise ConfigError(
            f"cannot draw {n_outliers} outliers among {n_clients} clients",
            "ask for fewer outliers than clients, and a row",
        )
    if not 0 <= h < math.inf:
        raise ConfigError(f"the distance h is {h}, and must be finite and not negative", "give h between 0 and 2")
