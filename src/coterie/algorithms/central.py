# SPDX-License-Identifier: Apache-2.0
"""FedGrEM's central update, solved until it converges or for a few steps: a robust centre, to which estimates are drawn.

Tian, Weng, Feng, ICML 2024, Algorithm 1 and appendix B.1, equation (6); appendix D for a centre that is sparse.
"""

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["central_update", "central_weights", "drawn", "shrunk"]

_INNER = 1000  # steps at most
_FAR = 1e300  # squared distances beyond are all the same


def central_update(tilde: Tensor, n: Tensor, lam: float, start: Tensor, sparse: float = 0.0) -> Tensor:
    """Minimise sum_k n_k/2 |nu_k - tilde_k|^2 + sqrt(n_k) lam |nu_k - centre|, plus sparse |centre|_1, over nu and centre.

    Parameters
    ----------
    tilde : Tensor
        [M, R, P]
    n : Tensor
        [M] rows.
    lam : float
        Penalty; 0 (nobody cares for the centre) is taken as the limit of small ones: a geometric median.
    start : Tensor
        [R, P] where to begin.
    sparse : float
        l1 penalty of appendix D on the centre; 0 is Algorithm 1's.

    Returns
    -------
    Tensor
        [R, P] the centre; nu_k is `shrunk(tilde_k, centre, lam / sqrt(n_k))`.
    """
    return (central_weights(tilde, n, lam, start, sparse=sparse) * tilde).sum(0)


def central_weights(
    tilde: Tensor, n: Tensor, lam: float, start: Tensor, steps: int | None = None, sparse: float = 0.0
) -> Tensor:
    """How much each client counts for the centre, which is then the weighted sum of theirs.  -> [M, R, P]

    Given the centre, nu_k is soft-thresholded; what is left for the centre is Huber's loss of the distances, minimised by
    reweighted means: weight n_k within lam / sqrt(n_k), and falling like one over the distance beyond. With `steps`, it is
    so many of the paper's from the mean, wherever one is told to start. Weights sum to one over clients, unless the centre
    is `sparse`: then it is the mean with every coordinate soft-thresholded by `sparse` over the sum of weights. Rows may be
    given for every component, n [M, R]; who has none does not count.
    """
    rows = (n[:, None] if n.dim() == 1 else n).to(tilde.dtype)  # [M, 1 | R]
    if math.isinf(lam):  # all are within
        return _stepped(tilde, rows, lam, 0, sparse)
    if steps is not None:
        return _stepped(tilde, rows, lam, steps, sparse)
    weight, left = _reweighted(tilde.numpy(), rows.numpy(), max(lam, 1e-9), start.numpy(), sparse)
    return torch.from_numpy(weight)[..., None] * torch.from_numpy(left)


def _stepped(tilde: Tensor, rows: Tensor, lam: float, steps: int, sparse: float) -> Tensor:
    """Alternate D_k = soft-threshold(tilde_k - centre) and centre = mean of tilde_k - D_k, from the mean.  -> [M, R, P]"""
    total = rows.sum(0)  # [1 | R]
    share, reach, threshold = rows / total, lam / rows.sqrt(), (sparse / total)[:, None]
    weight = share[..., None].expand(tilde.shape)
    for step in range(steps + 1):
        if step > 0:
            distance = (tilde - (weight * tilde).sum(0)).norm(dim=-1)  # [M, R]
            kept = share * (reach / distance.clamp(min=1e-300)).clamp(max=1.0)
            # tilde_k - D_k: so much of tilde_k, else centre
            weight = kept[..., None] + (1 - kept.sum(0))[..., None] * weight
        if sparse:
            weight = weight * (1 - threshold / (weight * tilde).sum(0).abs().clamp(min=1e-300)).clamp(min=0.0)
    return weight


def _reweighted(
    tilde: np.ndarray, rows: np.ndarray, lam: float, centre: np.ndarray, sparse: float
) -> tuple[np.ndarray, np.ndarray]:
    """Reweight until the centre stays. In numpy: on arrays as small as these a step takes a fifth of torch's time.

    -> weights [M, R], and what a soft threshold leaves of their mean [R, P]
    """
    parts = np.ascontiguousarray(tilde.transpose(1, 0, 2))  # [R, M, P]
    size, reach = rows.T, lam / np.sqrt(np.maximum(rows.T, 1e-300))  # [1 | R, M]
    precision, left = (
        1e-10 * (1.0 + np.abs(centre).max(1)),
        np.ones_like(centre),
    )  # [R]: one far away is not the others'
    for _ in range(_INNER):
        difference = parts - centre[:, None]
        distance = np.sqrt(np.minimum(np.einsum("rmp,rmp->rm", difference, difference), _FAR))
        weight = size * (reach / np.maximum(distance, reach))  # [R, M]
        total = weight.sum(1, keepdims=True)
        weight /= total
        before, centre = centre, (weight[:, None] @ parts)[:, 0]
        if sparse:
            left = np.maximum(1.0 - sparse / total / np.maximum(np.abs(centre), 1e-300), 0.0)
            centre = left * centre
        if (np.abs(centre - before).max(1) <= precision).all():
            break
    return np.asarray(weight.T), left


def shrunk(tilde: Tensor, centre: Tensor, reach: Tensor, at: Tensor | None = None) -> Tensor:
    """centre + soft-threshold(tilde - centre, reach).  reach [...] for tilde [..., P]

    Parameters
    ----------
    at : Tensor, optional
        [..., P] the difference in the coordinates that lengths are measured in; the difference itself by default.
    """
    difference = tilde - centre
    length = (difference if at is None else at).norm(dim=-1, keepdim=True).clamp(min=1e-300, max=1e150)
    left: Tensor = difference * (1.0 - reach[..., None] / length).clamp(min=0.0)
    return centre + left


def drawn(tilde: Tensor, centre: Tensor, c: Tensor, step: Tensor) -> Tensor:
    """Proximal step of C^2 / 2 |nu - centre|^2: what is left of a difference is 1 / (1 + step C^2).

    After gradient steps of the same length this ends where the penalised likelihood is largest, whatever the length.

    Parameters
    ----------
    tilde, centre : Tensor
        [..., P]
    c : Tensor
        [...] C; where it is infinite, nothing is left.
    step : Tensor
        [...] length of the gradient step over the client's rows.
    """
    left = torch.where(c.isinf(), 0.0, 1.0 / (1.0 + step * torch.where(c.isinf(), 0.0, c).square()))
    return centre + left[..., None] * (tilde - centre)
