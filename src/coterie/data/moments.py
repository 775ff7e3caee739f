# SPDX-License-Identifier: Apache-2.0
"""Counts, means and sums of products of clients' rows, and rows that have them.

Linear regression asks no more of rows than these. So rows that were made to have the same ones stand in for rows that may
not be seen: whatever is computed by linear regression comes out the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.data.ragged import Layout, Ragged

__all__ = ["Moments", "moments_of", "rows_with", "spectrum"]

_ROUNDING = 1e-14  # relative to the mean: a column that varies by no more is constant


@dataclass(frozen=True)
class Moments:
    """Of M clients' rows in V parts; features and target are E numbers, the target last.

    Products are about the mean of their part: about zero, a large mean would cost their digits.

    Attributes
    ----------
    n : Tensor
        [M, V] rows.
    mean : Tensor
        [M, V, E] zero where there are no rows.
    products : Tensor
        [M, V, E, E] sum over rows of (z - mean) (z - mean)^T.
    """

    n: Tensor
    mean: Tensor
    products: Tensor

    @classmethod
    def side_by_side(cls, several: Sequence["Moments"]) -> "Moments":
        """Put the parts of the same clients side by side."""
        return cls(*(torch.cat([getattr(one, name) for one in several], 1) for name in ("n", "mean", "products")))

    def parts(self, numbers: Sequence[int]) -> "Moments":
        """Some of the parts."""
        at = list(numbers)
        return Moments(self.n[:, at], self.mean[:, at], self.products[:, at])

    def clients(self, ids: np.ndarray) -> "Moments":
        """Some of the clients."""
        at = torch.from_numpy(ids)
        return Moments(self.n[at], self.mean[at], self.products[at])

    def together(self) -> "Moments":
        """All parts as one."""
        n = self.n.sum(1, keepdim=True)
        share = self.n.to(torch.float64) / n.clamp(min=1)
        mean = torch.einsum("mv,mve->me", share, self.mean)[:, None]
        off = self.mean - mean
        products = self.products.sum(1) + torch.einsum("mv,mve,mvf->mef", self.n.to(torch.float64), off, off)
        return Moments(n, mean, products[:, None])


def moments_of(rows: Ragged) -> Moments:
    """Look at every row, a block at a time.  -> with V = 1"""
    size = rows.shape[0] + 1
    mean = torch.zeros(rows.n_clients, size, dtype=torch.float64)
    products = torch.zeros(rows.n_clients, size, size, dtype=torch.float64)
    for block in rows.blocks():
        z = torch.cat([block.x, block.target[..., None].to(block.x.dtype)], -1).to(torch.float64)
        weights, real = block.weights.to(torch.float64), block.real[..., None]
        centre = torch.einsum("cne,cn->ce", z, weights)
        about = (z - centre[:, None]) * real
        about = (about - torch.einsum("cne,cn->ce", about, weights)[:, None]) * real  # the mean is known to rounding
        varies = about.abs().amax(1) > _ROUNDING * centre.abs()
        about = about * varies[:, None]
        mean[block.ids], products[block.ids] = centre, about.transpose(1, 2) @ about
    return Moments(rows.counts[:, None], mean[:, None], products[:, None])


def rows_with(names: np.ndarray, moments: Moments) -> tuple[Layout, Tensor, Tensor, Tensor]:
    """Make rows that have these moments.  -> layout, features [N, D], targets [N], the part of every row [N]

    Part by part, z = mean + H R^T, where R R^T are the products and the columns of H are orthonormal and sum to zero.
    There are n - 1 such columns, and of n rows the products have no larger rank.
    """
    layout = Layout.plan(names, moments.n.sum(1).numpy())
    n, size = moments.n.flatten(), moments.mean.shape[-1]
    before = (moments.n.cumsum(1) - moments.n + torch.from_numpy(layout.starts)[:, None]).flatten()
    mean, root = moments.mean.flatten(0, 1), _root(moments.products).flatten(0, 1)
    part = torch.arange(moments.n.shape[1]).repeat(len(names))
    z, fold = torch.zeros(layout.n_rows, size, dtype=torch.float64), torch.zeros(layout.n_rows, dtype=torch.int64)
    for rows in np.unique(n.numpy()).tolist():
        alike = (n == rows).nonzero()[:, 0]
        at = before[alike, None] + torch.arange(rows)
        contrasts = _contrasts(rows, min(max(rows - 1, 0), size))
        z[at] = mean[alike, None] + contrasts @ root[alike, :, : contrasts.shape[1]].transpose(1, 2)
        fold[at] = part[alike, None].expand(-1, rows)
    return layout, z[:, :-1].contiguous(), z[:, -1].contiguous(), fold


def spectrum(products: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, the largest first, and eigenvectors of products whose columns were scaled to one.  [..., E], [..., E, E]

    Columns have units of their own: without scaling, a column of small numbers would be lost beside large ones.
    """
    scale = _scale(products)
    values, vectors = torch.linalg.eigh(products / (scale[..., :, None] * scale[..., None, :]))
    return values.flip(-1), vectors.flip(-1)


def _root(products: Tensor) -> Tensor:
    """R with R R^T = products, its columns by size."""
    values, vectors = spectrum(products)
    return _scale(products)[..., None] * vectors * values.clamp(min=0).sqrt()[..., None, :]


def _scale(products: Tensor) -> Tensor:
    """[..., E] by which columns are divided; a constant one stays as it is."""
    scale = products.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    return torch.where(scale > 0, scale, 1.0)


def _contrasts(n: int, many: int) -> Tensor:
    """Columns that are orthonormal and sum to zero: cosines.  [n, many]"""
    row, column = torch.arange(n, dtype=torch.float64)[:, None] + 0.5, torch.arange(1, many + 1, dtype=torch.float64)
    return math.sqrt(2 / max(n, 1)) * torch.cos(math.pi / max(n, 1) * row * column)
