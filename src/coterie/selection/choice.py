# SPDX-License-Identifier: Apache-2.0
"""Clients that have no part in the choice: whom nothing that others share serves."""

import math

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.outliers import outlier_scores

__all__ = ["OUTLIER", "names_where", "outlying"]

OUTLIER = 3.5  # score above which a client is called an outlier
_ROW_DEVIATION = math.sqrt(0.5)  # of a row's log density under normal noise: half of a squared normal variable


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
