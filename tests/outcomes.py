# SPDX-License-Identifier: Apache-2.0
"""Targets of every outcome, drawn from linear predictors."""

import numpy as np

from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients

NUMBERS = ("poisson", "negative-binomial", "gamma", "log-normal")
ALL = (*NUMBERS, "ordinal")
CUTS = (-0.5, 0.8, 2.0)  # thresholds of the four ordered classes


def drawn(outcome: str, eta: np.ndarray, seed: int = 0) -> np.ndarray:
    """[N] targets: dispersion 1/2, shape 3, deviation 0.6 of the logarithm."""
    draw, mean = np.random.default_rng(seed), np.exp(eta)
    return {
        "poisson": lambda: draw.poisson(mean),
        "negative-binomial": lambda: draw.negative_binomial(2, 2 / (2 + mean)),
        "gamma": lambda: draw.gamma(3.0, mean / 3),
        "log-normal": lambda: np.exp(eta + 0.6 * draw.normal(size=len(eta))),
        "ordinal": lambda: np.digitize(eta + draw.logistic(size=len(eta)), CUTS),
    }[outcome]().astype(np.float64)


def rows(outcome: str, *, n_clients: int = 12, each: int = 60, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Features [N, 3], targets and clients of one model for all: 0.7 + 0.4 x0 - 0.3 x1 + 0.1 x2."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n_clients * each, 3))
    return x, drawn(outcome, 0.7 + x @ [0.4, -0.3, 0.1], seed), np.repeat(np.arange(n_clients), each)


def clients(outcome: str, **how: float) -> Clients:
    x, y, groups = rows(outcome)
    return from_arrays(x, y, groups, outcome=outcome, **{"test_size": 0.0, **how})  # type: ignore[arg-type]
