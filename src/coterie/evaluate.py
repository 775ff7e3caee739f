# SPDX-License-Identifier: Apache-2.0
"""Compare what was found with what was planted: models and labels, matched one to one."""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from coterie.errors import DataError

__all__ = ["Labels", "adjusted_rand", "match_errors", "match_labels", "match_models"]

Labels = Tensor | np.ndarray | Sequence[int]

_FAR = 1e30  # stands for the distance of a diverged model, which the assignment could not take


def match_models(theta: Tensor, truth: Tensor) -> tuple[float, Tensor]:
    """Match models to true ones, one to one, so that their mean distance is least.

    Parameters
    ----------
    theta : Tensor
        [J, ...] models found, at least as many as there are true ones.
    truth : Tensor
        [K, ...] true models.

    Returns
    -------
    error : float
        mean_j ||theta_j - theta*_j|| over the true models; infinite when a diverged model is needed.
    assignment : Tensor
        [J] the true model of each model found, -1 for one that is left over.
    """
    if len(theta) < len(truth):
        raise DataError(f"{len(theta)} models cannot be matched to {len(truth)}", "compare at least as many models")
    gap = torch.cdist(_vectors(theta), _vectors(truth), compute_mode="donot_use_mm_for_euclid_dist").numpy()  # [J, K]
    finite = np.isfinite(gap)
    found, true = linear_sum_assignment(np.where(finite, gap, _FAR))
    assignment = torch.full((len(theta),), -1)
    assignment[found] = torch.from_numpy(true)
    return float(np.where(finite, gap, np.inf)[found, true].mean()), assignment


def match_errors(theta: Tensor, truth: Tensor) -> Tensor:
    """Error of `match_models` for each of several runs.  theta [S, J, ...], truth [K, ...] -> [S]"""
    return torch.tensor([match_models(run, truth)[0] for run in theta], dtype=torch.float64)


def match_labels(labels: Labels, truth: Labels) -> float:
    """Share of clients whose label is right when labels are matched to true clusters one to one, as well as possible.

    Parameters
    ----------
    labels, truth : Tensor, array or sequence
        [M] found and true label of each client; what the labels are called does not matter.
    """
    found, true = _codes(labels, truth)
    together = np.zeros((found.max() + 1, true.max() + 1), dtype=np.int64)
    np.add.at(together, (found, true), 1)
    best = linear_sum_assignment(together, maximize=True)
    return float(together[best].sum() / len(found))


def adjusted_rand(labels: Labels, truth: Labels) -> float:
    """Adjusted Rand index of two labelings: 1 when they agree up to names, about 0 by chance.

    Parameters
    ----------
    labels, truth : Tensor, array or sequence
        [M] found and true label of each client.
    """
    from sklearn.metrics import adjusted_rand_score

    found, true = _codes(labels, truth)
    return float(adjusted_rand_score(true, found))


def _vectors(models: Tensor) -> Tensor:
    return models.detach().to("cpu", torch.float64).reshape(len(models), -1)


def _codes(labels: Labels, truth: Labels) -> tuple[np.ndarray, np.ndarray]:
    """Number both labelings from zero."""
    found, true = np.asarray(labels), np.asarray(truth)
    if found.shape != true.shape or found.ndim != 1 or not len(found):
        raise DataError(
            f"labels of shape {found.shape} cannot be compared with {true.shape}",
            "give one label for each client in both",
        )
    return np.unique(found, return_inverse=True)[1], np.unique(true, return_inverse=True)[1]
