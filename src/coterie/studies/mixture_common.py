# SPDX-License-Identifier: Apache-2.0
"""What FedGrEM's studies share: the methods, means with standard errors, and mis-clustering."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.methods.mixture import fit as mixture_fit
from coterie.methods.mixture.fit import MixtureFit, labels

__all__ = ["METHODS", "mean_and_error", "misclustering"]

METHODS = mixture_fit.METHODS


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over repetitions and its standard error, which takes two of them."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(np.mean(values)), error


def misclustering(fit: MixtureFit, train: Ragged, test: Ragged, good: Tensor) -> tuple[float, float]:
    """Share of test rows in a wrong component, mean over the good clients: with one matching for all, and each with its own.

    Components have no names, but those of all clients are numbered alike. They are matched one to one to the classes, as
    well as possible on training rows: once on those of all good clients, and once on each client's own. On its few test rows
    a client would look better than it is.

    Parameters
    ----------
    fit : MixtureFit
        Of the same clients.
    train, test : Ragged
        Rows with classes 0, 1, ... as targets.
    good : Tensor
        [M] whose errors count.
    """
    assert isinstance(train.y, Tensor)
    assert isinstance(test.y, Tensor)
    size = max(fit.theta.shape[1], int(train.y.max()) + 1, int(test.y.max()) + 1)
    learnt, told = _together(fit, train, size)[good], _together(fit, test, size)[good]  # [G, size, size]
    n = told.sum((1, 2))
    common = torch.from_numpy(linear_sum_assignment(learnt.sum(0), maximize=True)[1])  # the class of every component
    own = torch.stack([torch.from_numpy(linear_sum_assignment(table, maximize=True)[1]) for table in learnt])
    right = [torch.take_along_dim(told, named[..., None], 2).sum((1, 2)) for named in (common.expand(len(n), -1), own)]
    with_common, with_own = (float((1 - share / n)[n > 0].mean()) for share in right)
    return with_common, with_own


def _together(fit: MixtureFit, rows: Ragged, size: int) -> Tensor:
    """How many of a client's rows are in a component and of a class.  [M, size, size]"""
    assert isinstance(rows.y, Tensor)
    count = torch.zeros(rows.n_clients, size, size, dtype=torch.float64)
    place = (torch.from_numpy(rows.owners), labels(fit, rows), rows.y)
    return count.index_put_(place, torch.ones((), dtype=torch.float64), accumulate=True)
