# SPDX-License-Identifier: Apache-2.0
"""What sums with normal noise cost together, in closed form: for a node, which trusts nobody's arithmetic but its own.

Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8. Sums with multipliers z
are together what one with mu^2 = sum of 1 / z^2 is (Dong, Roth, Su, "Gaussian Differential Privacy", 2022).
"""

import math

__all__ = ["gaussian_epsilon"]

_HALVINGS = 100
_MOST = 1e6


def gaussian_epsilon(loss: float, delta: float) -> float:
    """Epsilon of sums with normal noise, whose squared inverse multipliers add up to `loss`."""
    if loss <= 0 or _delta(0.0, math.sqrt(loss)) <= delta:
        return 0.0
    mu, low, high = math.sqrt(loss), 0.0, 1.0
    while _delta(high, mu) > delta:
        low, high = high, 2 * high
        if high > _MOST:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _delta(middle, mu) <= delta else (middle, high)
    return high


def _delta(epsilon: float, mu: float) -> float:
    far = _below(-mu / 2 - epsilon / mu)
    return _below(mu / 2 - epsilon / mu) - (math.exp(epsilon + math.log(far)) if far > 0 else 0.0)


def _below(x: float) -> float:
    """The standard normal distribution."""
    return math.erfc(-x / math.sqrt(2)) / 2
