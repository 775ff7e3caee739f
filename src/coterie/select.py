# SPDX-License-Identifier: Apache-2.0
"""The choice among candidates: the simplest that is as good as the best, by differences that are paired over clients.

Means of scores, and standard errors of their paired differences, follow from sums over clients: how many they are, of their
scores, and of products of two scores. So nobody needs single clients' scores to choose: see `Paired`. Structures, their
settings, numbers of clusters and of components, and penalties are all chosen here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtrit  # of scipy.stats, which takes most of a second to load, the same
from torch import Tensor

__all__ = ["Difference", "Paired", "as_good", "difference", "mean_and_error", "simplest"]

_WORST = 1e12  # stands for scores below, and for those of models that diverged
_ROUNDING = 1e-13  # relative to the score: a mean difference below is none


@dataclass(frozen=True)
class Difference:
    """A score minus another, paired over judged clients that are no outliers; above 0 it is better.

    `low` and `high` are the ends of a 95 % interval (t distribution), in nats per row.
    """

    mean: float
    stderr: float
    low: float
    high: float
    clients: int

    @property
    def clear(self) -> bool:
        """Whether the interval does not contain 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Paired:
    """Sums over clients from which J candidates are compared; larger scores are better.

    Attributes
    ----------
    products : ndarray
        [J + 2, J + 2] sums of products of any two of: 1; the first candidate's score, less `centre`; and every candidate's
        score, less the first one's. So differences that are small beside the scores keep their digits.
    centre : float
        About the first candidate's mean.
    """

    products: np.ndarray
    centre: float = 0.0

    @classmethod
    def of(cls, scores: Tensor) -> "Paired":
        """Of scores that are here; who lacks one of them (NaN) does not count.  [J, M]"""
        values = scores.double().numpy()
        values = values[:, ~np.isnan(values).any(0)].clip(-_WORST, _WORST)
        centre = float(values[0].mean()) if values.shape[1] else 0.0
        terms = np.concatenate([np.ones_like(values[:1]), values[:1] - centre, values - values[:1]])
        return cls(terms @ terms.T, centre)

    @cached_property
    def n(self) -> float:
        """Clients that count; where they were drawn again, each as often as it was drawn."""
        return float(self.products[0, 0])

    @cached_property
    def means(self) -> np.ndarray:
        """[J] of every candidate; NaN of nobody."""
        if self.n <= 0:
            return np.full(len(self.products) - 2, math.nan)
        found: np.ndarray = self.centre + self._mean[0] + self._mean[1:]
        return found

    @cached_property
    def _mean(self) -> np.ndarray:
        """[J + 1] of all but 1."""
        found: np.ndarray = self.products[0, 1:] / max(self.n, 1e-300)
        return found

    @cached_property
    def _squares(self) -> np.ndarray:
        """[J + 1, J + 1] sums of products of deviations from means."""
        found: np.ndarray = self.products[1:, 1:] - self.n * np.outer(self._mean, self._mean)
        return found

    def gap(self, one: int, other: int) -> tuple[float, float]:
        """Mean of a candidate's score minus another's, and its standard error, NaN of one client."""
        if self.n <= 0:
            return math.nan, math.nan
        a, b, s = one + 1, other + 1, self._squares
        mean = float(self._mean[a] - self._mean[b])
        if abs(mean) <= _ROUNDING * (abs(self.means[one]) + abs(self._mean[a]) + abs(self._mean[b])):
            mean = 0.0
        return mean, self._error(float(s[a, a] + s[b, b] - 2 * s[a, b]))

    def mean_and_error(self, one: int) -> tuple[float, float]:
        """Of a candidate's score."""
        s, a = self._squares, one + 1
        return float(self.means[one]), self._error(float(s[0, 0] + s[a, a] + 2 * s[0, a]))

    def _error(self, squares: float) -> float:
        return math.sqrt(max(squares, 0.0) / (self.n - 1) / self.n) if self.n > 1 else math.nan


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean over clients, and its standard error; NaN stands for who was not measured.  [M]"""
    return Paired.of(values[None]).mean_and_error(0)


def difference(scores: Paired, one: int, other: int) -> Difference:
    """A candidate's score minus another's, with a 95 % interval by the t distribution."""
    mean, error = scores.gap(one, other)
    reach = float(stdtrit(scores.n - 1, 0.975)) * error if scores.n > 1 else math.nan
    return Difference(mean, error, mean - reach, mean + reach, round(scores.n))


def as_good(
    scores: Paired, among: Sequence[int] = (), *, errors: float = 1.0, tolerance: float = 0.0, tie: float = 1e-9
) -> list[bool]:
    """Who is within some standard errors, or within the tolerance, of the best?

    Parameters
    ----------
    among : sequence of int
        The candidates that this is about; all by default.
    errors : float
        Standard errors, of paired differences, that a candidate may be behind the best.
    tolerance : float
        Or that it may be behind in any case.
    tie : float
        Relative to the best score, what rounding may be.
    """
    some = list(among) or list(range(len(scores.means)))
    means = np.nan_to_num(scores.means[some], nan=-math.inf)
    best = some[int(means.argmax())]
    rounding = tie * abs(float(means.max())) + 1e-12
    good = []
    for one in some:
        behind, error = scores.gap(best, one)
        within = max(tolerance, 0.0 if math.isnan(error) else errors * error)  # a single client has no error
        good.append(bool(scores.means[one] > -_WORST / max(scores.n, 1.0) / 2 and behind <= within + rounding))
    return good


def simplest(scores: Paired, among: Sequence[int] = (), *, eligible: Sequence[bool] = (), **how: float) -> int:
    """The first that is `as_good` as the best of those that may be taken; the first of them if none is."""
    some = list(among) or list(range(len(scores.means)))
    may = [j for at, j in enumerate(some) if not len(eligible) or eligible[at]] or some
    good = as_good(scores, may, **how)
    return may[good.index(True)] if any(good) else may[0]
