# SPDX-License-Identifier: Apache-2.0
"""The choice: the simplest that is as good as the best, by differences that are paired over clients."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from coterie.algorithms.outliers import outlier_scores
from coterie.selection.result import Difference

__all__ = ["OUTLIER", "as_good", "difference", "mean_and_error", "names_where", "outlying", "simplest"]

OUTLIER = 3.5  # score above which a client is called an outlier
_ROW_DEVIATION = math.sqrt(0.5)  # of a row's log density under normal noise: half of a squared normal variable


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
    reach = float(stats.t.ppf(0.975, n - 1)) * error if n > 1 else math.nan
    return Difference(mean, error, mean - reach, mean + reach, n)


def as_good(scores: Tensor, tolerance: float) -> list[bool]:
    """Who is within one standard error, or within the tolerance, of the best?  scores [J, M], NaN for who is not judged"""
    means = scores.nanmean(1).nan_to_num(nan=-math.inf)
    best = scores[int(means.argmax())]
    out = []
    for score, mean in zip(scores, means.tolist(), strict=True):
        gap = difference(best, score)
        error = 0.0 if math.isnan(gap.stderr) else gap.stderr
        out.append(math.isfinite(mean) and gap.mean <= max(error, tolerance, 1e-12))
    return out


def simplest(scores: Tensor, tolerance: float = 0.0, eligible: Sequence[bool] = ()) -> int:
    """The first that is as good as the best of those that may be taken.  scores [J, M], the simplest first"""
    may = [j for j in range(len(scores)) if not len(eligible) or eligible[j]] or list(range(len(scores)))
    good = as_good(scores[may], tolerance)
    return may[good.index(True)]


def outlying(shared: Tensor, rows: Tensor) -> Tensor:
    """Outlier score of every client: how far it lies below the others, under whatever shared structure suits it best.

    Parameters
    ----------
    shared : Tensor
        [J, M] scores under shared structures, NaN for who is not judged.
    rows : Tensor
        [M] that the scores rest on.
    """
    best = shared.nan_to_num(nan=-math.inf).amax(0)
    judged = best.isfinite()
    out = torch.full(best.shape, math.nan, dtype=torch.float64)
    out[judged] = outlier_scores(-best[judged], _ROW_DEVIATION / rows[judged].clamp(min=1).sqrt())
    return out


def names_where(names: np.ndarray, mask: Tensor | np.ndarray) -> tuple[str, ...]:
    """Names of the clients for whom it is so."""
    return tuple(str(name) for name in names[np.asarray(mask)])
