# SPDX-License-Identifier: Apache-2.0
"""What answers with normal noise cost together, and how much noise a budget asks for: privacy loss distributions.

All arithmetic of privacy is that of `dp-accounting`; it is loaded where a budget is given, and nowhere else. Neighbours are
federations of which one has one client more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from coterie.errors import ConfigError

__all__ = ["Release", "epsilon_of", "least_noise"]

_INTERVAL = 1e-3  # of privacy losses; coarser ones make epsilon larger, never smaller
_HALVINGS = 40
_NEAR = 1e-4  # of the multiplier, relative
_MOST = 1e6


@dataclass(frozen=True, order=True)
class Release:
    """A sum with noise.

    Attributes
    ----------
    multiplier : float
        Standard deviation over what one client can change.
    sampling : float
        Probability with which each client is asked.
    """

    multiplier: float
    sampling: float = 1.0


def epsilon_of(releases: Mapping[Release, int], delta: float) -> float:
    """Epsilon of all releases together, each so many times."""
    return _epsilon(tuple(sorted((one, n) for one, n in releases.items() if n)), delta)


@lru_cache(maxsize=256)
def _epsilon(releases: tuple[tuple[Release, int], ...], delta: float) -> float:
    if not releases:
        return 0.0
    dp: Any = _dp_accounting()
    spent = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=_INTERVAL)
    whole = sum(n / one.multiplier**2 for one, n in releases if one.sampling == 1)
    if whole:  # sums over everyone are together what one with less noise is
        spent.compose(dp.GaussianDpEvent(whole**-0.5))
    for one, n in releases:
        if one.sampling < 1:
            event = dp.PoissonSampledDpEvent(one.sampling, dp.GaussianDpEvent(one.multiplier))
            spent.compose(dp.SelfComposedDpEvent(event, n))
    return float(spent.get_epsilon(delta))


def least_noise(releases: Callable[[float], Mapping[Release, int]], epsilon: float, delta: float) -> float:
    """The smallest multiplier with which some releases stay within a budget; `releases` makes them of a multiplier."""

    def fits(multiplier: float) -> bool:
        return epsilon_of(releases(multiplier), delta) <= epsilon

    low, high = 1e-2, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > _MOST:
            raise ConfigError(f"no noise is enough for an epsilon of {epsilon:g}", "give a larger privacy.epsilon")
    for _ in range(_HALVINGS):
        if high / low < 1 + _NEAR:
            break
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _dp_accounting() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dp_accounting
        import dp_accounting.pld
    return dp_accounting
