# SPDX-License-Identifier: Apache-2.0
"""Clients whose structure is planted: groups, low-rank heads, deviations from a common model, and others.

Every client has rows x ~ N(0, I) and y = <x, w> + b + noise. Models have unit length on average, so that the signal's
deviation is 1 and `noise` is relative to it.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError

__all__ = ["Truth", "planted_costs", "planted_counts", "planted_intercepts", "planted_rare", "planted_structure"]

_RARE = -4.4  # log odds, around which rows are positive in 2 of 100 cases
Truth = Literal["global", "clusters", "representation", "shrunk", "local", "mixture"]


def planted_structure(
    truth: Truth,
    size: int = 1,
    *,
    n_clients: int,
    rows: int,
    n_features: int,
    noise: float,
    outliers: float = 0.0,
    seed: int,
) -> Ragged:
    """Draw clients.

    Parameters
    ----------
    truth : str
        What they have in common: everything; a group's model; a subspace; a centre around which they deviate by half of
        the signal's variance; nothing; or components, of which every row has one, in proportions of the client's own.
    size : int
        Groups, dimensions of the subspace, or components.
    noise : float
        Standard deviation.
    outliers : float
        Share of the clients that have a model of their own, three times as long.
    """
    if truth not in get_args(Truth):
        raise ConfigError(f"there is no structure {truth!r} to plant", f"choose among {', '.join(get_args(Truth))}")
    if not 1 <= size <= n_clients or min(rows, n_features) < 1 or noise < 0 or not 0 <= outliers < 1:
        raise ConfigError(f"cannot plant {truth} of size {size} at {n_clients} clients", "sizes are at least 1")
    draw = keys.generator(seed, "planted structure")
    x = torch.randn(n_clients, rows, n_features, generator=draw, dtype=torch.float64)
    x1 = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    models = _models(truth, size, n_clients, n_features + 1, draw)
    if truth == "mixture":
        clean = _mixed(x1, models[:size], draw)
    else:
        odd = torch.randperm(n_clients, generator=draw)[: round(outliers * n_clients)]
        models[odd] = 3.0 * _normal(len(odd), n_features + 1, draw)
        clean = torch.einsum("cnd,cd->cn", x1, models)
    y = clean + noise * torch.randn(n_clients, rows, generator=draw, dtype=torch.float64)
    return Ragged.from_blocks(x, y)


def planted_intercepts(icc: float, *, n_clients: int, rows: int, n_features: int, noise: float, seed: int) -> Ragged:
    """Draw clients that share one model but for their intercepts, whose share of the variance beside the signal is `icc`."""
    if not 0 < icc < 1 or min(n_clients, rows, n_features) < 1 or noise <= 0:
        raise ConfigError(f"cannot plant intercepts with a share of {icc} of the variance", "it is between 0 and 1")
    draw = keys.generator(seed, "planted intercepts")
    x = torch.randn(n_clients, rows, n_features, generator=draw, dtype=torch.float64)
    own = noise * math.sqrt(icc / (1 - icc)) * torch.randn(n_clients, 1, generator=draw, dtype=torch.float64)
    y = x @ _normal(1, n_features, draw)[0] + own
    return Ragged.from_blocks(x, y + noise * torch.randn(n_clients, rows, generator=draw, dtype=torch.float64))


def planted_rare(*, n_clients: int, rows: int, n_features: int, seed: int) -> Ragged:
    """Draw clients with about 2 % of positive rows, whose log odds have intercepts of their own (standard deviation 0.8)."""
    draw = keys.generator(seed, "planted rare classes")
    x = torch.randn(n_clients, rows, n_features, generator=draw, dtype=torch.float64)
    own = 0.8 * torch.randn(n_clients, 1, generator=draw, dtype=torch.float64)
    odds = _RARE + own + 0.6 * (x @ _normal(1, n_features, draw)[0])
    drawn = torch.rand(n_clients, rows, generator=draw, dtype=torch.float64) < odds.sigmoid()
    return Ragged.from_blocks(x, drawn.to(torch.int64))


def planted_counts(
    groups: int = 1, *, spread: float = 0.0, mean: float = 2.0, n_clients: int, rows: int, n_features: int, seed: int
) -> Ragged:
    """Draw clients with Poisson counts, whose logarithmic means are linear: <x, w> + b.

    Parameters
    ----------
    groups : int
        How many models w there are, of length 0.7 on average; clients have them in turn.
    spread : float
        Standard deviation of clients' intercepts b: random intercepts.
    mean : float
        exp(b) of a client in the middle.
    """
    draw = keys.generator(seed, "planted counts")
    x, eta = _log_means(groups, spread, mean, n_clients, rows, n_features, draw)
    return Ragged.from_blocks(x, torch.poisson(eta.exp(), generator=draw))


def planted_costs(
    groups: int = 1, *, spread: float = 0.0, mean: float = 1000.0, deviation: float = 1.0, n_clients: int, rows: int,
    n_features: int, seed: int,
) -> Ragged:  # fmt: skip
    """Draw clients with log-normal costs, whose logarithms are linear, as of `planted_counts`, with normal noise.

    Parameters
    ----------
    groups, spread
        As of `planted_counts`.
    mean : float
        exp(b) of a client in the middle.
    deviation : float
        Of the logarithm, around what is linear: with 1, costs are as skewed as hospitals' are.
    """
    draw = keys.generator(seed, "planted costs")
    x, eta = _log_means(groups, spread, mean, n_clients, rows, n_features, draw)
    noise = torch.randn(eta.shape, generator=draw, dtype=torch.float64)
    return Ragged.from_blocks(x, (eta + deviation * noise).exp())


def _log_means(
    groups: int, spread: float, mean: float, n_clients: int, rows: int, n_features: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Features, and <x, w> + b.  [M, N, D], [M, N]"""
    if not 1 <= groups <= n_clients or min(rows, n_features) < 1 or spread < 0 or mean <= 0:
        raise ConfigError(f"cannot plant {groups} groups at {n_clients} clients", "sizes are at least 1")
    x = torch.randn(n_clients, rows, n_features, generator=draw, dtype=torch.float64)
    weights = 0.7 * _normal(groups, n_features, draw)[torch.arange(n_clients) % groups]
    own = spread * torch.randn(n_clients, 1, generator=draw, dtype=torch.float64)
    return x, torch.einsum("cnd,cd->cn", x, weights) + math.log(mean) + own


def _normal(n: int, size: int, draw: torch.Generator) -> Tensor:
    """Models of unit length on average.  [n, size]"""
    return torch.randn(n, size, generator=draw, dtype=torch.float64) / math.sqrt(size)


def _models(truth: Truth, size: int, n_clients: int, n_parameters: int, draw: torch.Generator) -> Tensor:
    """Every client's model; for mixtures the components come first.  [M, P]"""
    if truth in ("global", "clusters"):
        return _normal(size if truth == "clusters" else 1, n_parameters, draw)[torch.arange(n_clients) % size]
    if truth == "representation":
        basis = torch.linalg.qr(torch.randn(n_parameters, size, generator=draw, dtype=torch.float64)).Q
        within: Tensor = _normal(n_clients, size, draw) @ basis.T
        return within
    if truth == "shrunk":
        return math.sqrt(0.5) * (_normal(1, n_parameters, draw) + _normal(n_clients, n_parameters, draw))
    return _normal(n_clients, n_parameters, draw)


def _mixed(x: Tensor, components: Tensor, draw: torch.Generator) -> Tensor:
    """Rows of which each has one of the components, in proportions of the client's own.  [M, N]"""
    weights = torch.rand(len(x), len(components), generator=draw, dtype=torch.float64) + 0.25
    label = torch.multinomial(weights, x.shape[1], replacement=True, generator=draw)  # [M, N]
    return torch.einsum("cnd,cnd->cn", x, components[label])
