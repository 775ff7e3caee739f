# SPDX-License-Identifier: Apache-2.0
"""The leading subspace of a matrix that nobody holds: clients answer with their share of its product with a thin matrix.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, Algorithm 3 (federated
orthogonal iteration). The randomised range finder (Halko, Martinsson, Tropp, SIAM Review 2011, Algorithms 4.3 and 5.1) takes
more columns than are wanted and needs two or three exchanges. No D x D matrix is ever formed or sent.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.protocol import Ask, Replies, Save

__all__ = ["Subspaces", "orthogonal_iteration", "range_finder"]

Run = Generator[Ask | Save, Replies | None, Any]
Multiply = Callable[[Tensor, bool], Generator[Ask | Save, Replies | None, Tensor | None]]


@dataclass(frozen=True)
class Subspaces:
    """Leading left singular vectors of several matrices.

    Attributes
    ----------
    basis : Tensor
        [A, D, K] orthonormal, the leading direction first.
    values : Tensor
        [A, L] singular values, descending; as many as columns were multiplied.
    """

    basis: Tensor
    values: Tensor


def orthogonal_iteration(multiply: Multiply, start: Tensor, rank: int, iterations: int) -> Run:
    """Algorithm 3: multiply by Y^T and Y in turn and orthonormalise in between.  -> Subspaces, or None if nobody answered

    Parameters
    ----------
    multiply : callable
        (Q [A, D, L], transposed) -> a generator that asks clients and returns Y Q, or Y^T Q.  [A, D, L]
    start : Tensor
        [A, D, L] with L = `rank` columns.
    rank : int
        K.
    iterations : int
        T_1, of two exchanges each.
    """
    return (yield from _alternate(multiply, start[..., :rank], rank, 2 * iterations))


def range_finder(multiply: Multiply, start: Tensor, rank: int, exchanges: int) -> Run:
    """Find the subspace from a start with more columns than `rank`, in few exchanges.  -> Subspaces, or None

    With two exchanges it is Q = qr(Y start) and the singular vectors of Q^T Y; each further one is a power step.
    """
    return (yield from _alternate(multiply, start, rank, exchanges))


def _alternate(multiply: Multiply, start: Tensor, rank: int, exchanges: int) -> Run:
    """Alternate Y and Y^T, Y^T last: of Y's left singular vectors, Q U are best where Q = qr(Y ...) and Q^T Y = U S V^T."""
    q = torch.linalg.qr(start).Q
    product: Tensor | None = None
    for remaining in range(exchanges, 0, -1):
        product = yield from multiply(q, remaining % 2 == 1)
        if product is None:
            return None
        product = torch.where(product.isfinite().all(2).all(1)[:, None, None], product, 0.0)  # who diverged, alone
        if remaining > 1:
            q = torch.linalg.qr(product).Q
    assert product is not None
    _, values, inner = torch.linalg.svd(product, full_matrices=False)  # product = Y^T q = V S U^T
    return Subspaces((q @ inner.transpose(1, 2))[..., :rank], values)
