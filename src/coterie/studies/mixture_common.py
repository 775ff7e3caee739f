# SPDX-License-Identifier: Apache-2.0
"""What FedGrEM's studies share: the methods, means with standard errors, and mis-clustering."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.mixture import fit as mixture_fit
from coterie.mixture.fit import MixtureFit, labels

__all__ = ["METHODS", "mean_and_error", "misclustering"]

METHODS = mixture_fit.METHODS


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over repetitions and its standard error, which takes two of them."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(np.mean(values)), error


def misclustering(fit: MixtureFit, train: Ragged, test: Ragged, good: Tensor) -> float:
    """Share of test rows in a wrong component, mean over the good clients.

    Components have no names, but those of all clients are numbered alike. They are matched one to one to the classes, as
    well as possible, once for everybody and on the good clients' training rows: who had its few test rows matched for itself
    would look better than it is.

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
    learnt = _together(fit, train, size)[good].sum(0)
    _, named = linear_sum_assignment(learnt.numpy(), maximize=True)  # the class of every component
    together = _together(fit, test, size)[good]  # [G, size, size]
    right, n = together[:, np.arange(size), named].sum(1), together.sum((1, 2))
    return float((1 - right / n)[n > 0].mean())


def _together(fit: MixtureFit, rows: Ragged, size: int) -> Tensor:
    """How many of a client's rows are in a component and of a class.  [M, size, size]"""
    assert isinstance(rows.y, Tensor)
    count = torch.zeros(rows.n_clients, size, size, dtype=torch.float64)
    place = (torch.from_numpy(rows.owners), labels(fit, rows), rows.y)
    return count.index_put_(place, torch.ones((), dtype=torch.float64), accumulate=True)
