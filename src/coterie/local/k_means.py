# SPDX-License-Identifier: Apache-2.0
"""k-means at many clients at once, from several starts one after the other: so they fit the cache, and stop when settled."""

import math

import torch
from torch import Tensor

from coterie import keys
from coterie.models.families import drawn_row
from coterie.protocol import Block

__all__ = ["k_means"]

_TIE = 1e-9  # costs, relative, that are the same: rounding must not decide
_FAR = 1e140  # where squares, summed over rows, still fit


def k_means(x: Tensor, data: Block, n_clusters: int, key: Tensor, steps: int) -> Tensor:
    """Cluster every client's rows.

    Parameters
    ----------
    x : Tensor
        [C, N, D] the rows, in coordinates in which distances mean something; padding is zero.
    data : Block
        Whose rows they are.
    key : Tensor
        [B, C] of every start and client.
    steps : int
        At most.

    Returns
    -------
    Tensor
        [C, N, K] one where a row belongs to a cluster of the client's best start, zero elsewhere and on padding.
    """
    x = x.clamp(-_FAR, _FAR)
    best = x.new_zeros(*x.shape[:2], n_clusters)
    if not x.shape[1]:
        return best
    least = torch.full((len(x),), math.inf, dtype=x.dtype)
    real = data.real.to(x.dtype)
    for own in key:
        member, cost = _lloyd(x, real, _seeds(x, real, n_clusters, own), steps)
        better = cost < (1 - _TIE) * least
        best, least = torch.where(better[:, None, None], member, best), torch.where(better, cost, least)
    return best


def _seeds(x: Tensor, real: Tensor, n_clusters: int, key: Tensor) -> Tensor:
    """Greedy k-means++: each next centre is a row, the best of a few drawn by their squared distance from those before."""
    tries = 2 + int(math.log(n_clusters))
    u = keys.uniform(key, n_clusters * tries).view(len(x), n_clusters, tries)
    far, client = real, torch.arange(len(x))
    centres = []
    for k in range(n_clusters):
        row = drawn_row(far[:, None].expand(-1, tries, -1), u[:, k])  # [C, T]
        squared = torch.cdist(x[client[:, None], row], x).square_()  # [C, T, N]
        left = (squared if k == 0 else torch.minimum(far[:, None], squared)) * real[:, None]
        pick = left.sum(-1).argmin(-1)  # [C]
        centres.append(x[client, row[client, pick]])
        far = left[client, pick]
    return torch.stack(centres, 1)


def _lloyd(x: Tensor, real: Tensor, centres: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Assign rows and average until nothing changes.  -> [C, N, K], sum of squares [C]"""
    member = x.new_zeros(*x.shape[:2], centres.shape[1])
    label = torch.full(x.shape[:2], -1)
    for _ in range(steps + 1):
        halves = centres.square().sum(-1)[:, None] / 2
        before, label = label, torch.baddbmm(halves, x, centres.transpose(1, 2), alpha=-1).argmin(-1)
        if torch.equal(label, before):
            break
        member.zero_().scatter_(2, label[..., None], real[..., None])
        count = member.sum(1)[..., None]
        centres = torch.where(count > 0, torch.bmm(member.transpose(1, 2), x) / count.clamp(min=1), centres)
    own = torch.take_along_dim(centres, label[..., None], 1)
    return member, ((x - own).square().sum(-1) * real).sum(1)
