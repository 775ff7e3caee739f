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


def misclustering(fit: MixtureFit, test: Ragged, good: Tensor) -> float:
    """Share of test rows in a wrong component, mean over the good clients.

    Components have no names: each client's are matched one to one to the classes of its test rows, as well as possible.

    Parameters
    ----------
    fit : MixtureFit
        Of the same clients.
    test : Ragged
        Rows with classes 0, 1, ... as targets.
    good : Tensor
        [M] whose errors count.
    """
    assert isinstance(test.y, Tensor)
    found, owner = labels(fit, test), torch.from_numpy(test.owners)
    size = max(fit.theta.shape[1], int(test.y.max()) + 1)
    together = torch.zeros(test.n_clients, size, size)
    together.index_put_((owner, found, test.y), torch.ones(()), accumulate=True)
    errors = []
    for client in good.nonzero()[:, 0].tolist():
        table = together[client].numpy()
        right = table[linear_sum_assignment(table, maximize=True)].sum()
        errors.append(1 - right / table.sum())
    return float(np.mean(errors))
