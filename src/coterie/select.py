# SPDX-License-Identifier: Apache-2.0
"""The choice among candidates: the simplest that is as good as the best, by differences that are paired over clients.

Scores are [J, M]: candidates, the simplest first, by clients; larger is better, and NaN stands for who is not judged.
Structures, their settings, numbers of clusters and of components, and penalties are all chosen here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # of scipy.stats, which takes most of a second to load, the same
from torch import Tensor

__all__ = ["Difference", "as_good", "difference", "mean_and_error", "simplest"]


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


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean over clients, and its standard error; NaN stands for who was not measured.  [M]"""
    there = values[~values.isnan()]
    if not len(there):
        return math.nan, math.nan
    error = float(there.std()) / math.sqrt(len(there)) if len(there) > 1 else math.nan
    return float(there.mean()), error


def difference(one: Tensor, other: Tensor) -> Difference:
    """Paired over clients, with a 95 % interval by the t distribution.  [M] each"""
    gap = one - other
    mean, error = mean_and_error(gap)
    n = int((~gap.isnan()).sum())
    reach = float(stdtrit(n - 1, 0.975)) * error if n > 1 else math.nan
    return Difference(mean, error, mean - reach, mean + reach, n)


def as_good(scores: Tensor, *, errors: float = 1.0, tolerance: float = 0.0, tie: float = 1e-9) -> list[bool]:
    """Who is within some standard errors, or within the tolerance, of the best?  scores [J, M]

    Parameters
    ----------
    errors : float
        Standard errors, of paired differences, that a candidate may be behind the best.
    tolerance : float
        Or that it may be behind in any case.
    tie : float
        Relative to the best score, what rounding may be.
    """
    means = scores.nanmean(1).nan_to_num(nan=-math.inf)
    at = int(means.argmax())
    rounding = tie * abs(float(means[at])) + 1e-12
    gap = scores[at] - scores
    n, behind = (~gap.isnan()).sum(1), gap.nanmean(1)
    square = (gap - behind[:, None]).square().nansum(1)
    error = (square / (n - 1).clamp(min=1) / n.clamp(min=1)).sqrt()  # 0 for a single client
    within = (errors * error).clamp(min=tolerance)
    good: list[bool] = (behind.isfinite() & (behind <= within + rounding)).tolist()
    return good


def simplest(scores: Tensor, *, eligible: Sequence[bool] = (), **how: float) -> int:
    """The first that is `as_good` as the best of those that may be taken; the first of them if none is.  scores [J, M]"""
    may = [j for j in range(len(scores)) if not len(eligible) or eligible[j]] or list(range(len(scores)))
    good = as_good(scores[may], **how)
    return may[good.index(True)] if any(good) else may[0]
