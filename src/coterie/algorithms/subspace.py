# SPDX-License-Identifier: Apache-2.0
"""The leading subspace of a matrix that nobody holds: clients answer with their share of its product with a thin matrix.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, Algorithm 3 (federated
orthogonal iteration). The randomised range finder (Halko, Martinsson, Tropp, SIAM Review 2011, Algorithms 4.3 and 5.1) takes
more columns than are wanted and needs one to three exchanges. No D x D matrix is ever formed or sent.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.protocol import Ask, Replies, Save

__all__ = ["Subspaces", "leading_range", "orthogonal_iteration", "range_finder"]

Run = Generator[Ask | Save, Replies | None, Any]
Multiply = Callable[[Tensor, bool], Generator[Ask | Save, Replies | None, Tensor | None]]


@dataclass(frozen=True)
class Subspaces:
    """Leading left singular vectors of several matrices.

    Attributes
    ----------
    basis : Tensor
        [A, D, K] orthonormal; of the range finder, the leading direction first.
    values : Tensor
        [A, L] singular values, descending; as many as columns were multiplied.
    """

    basis: Tensor
    values: Tensor


def orthogonal_iteration(multiply: Multiply, start: Tensor, rank: int, iterations: int) -> Run:
    """Algorithm 3: Y^T, then Y, then orthonormalise, and again.  -> Subspaces, or None if nobody answered

    Parameters
    ----------
    multiply : callable
        (Q [A, D, L], transposed) -> a generator that asks clients and returns Y Q, or Y^T Q.  [A, D, L]
    start : Tensor
        [A, D, L]; the first `rank` columns are used.
    rank : int
        K.
    iterations : int
        Of two exchanges each: the paper's T, halved.
    """
    q: Any = torch.linalg.qr(start[..., :rank]).Q
    r = torch.zeros(len(q), rank, rank, dtype=q.dtype)
    for _ in range(iterations):
        for transposed in (True, False):  # lines 5 and 8
            q = yield from _finite(multiply, q, transposed)
            if q is None:
                return None
        q, r = torch.linalg.qr(q)  # line 9: Y Y^T Q = Q R
    return Subspaces(q, torch.linalg.svdvals(r).sqrt())  # those of Y Y^T are squares


def range_finder(multiply: Multiply, start: Tensor, rank: int, exchanges: int) -> Run:
    """Find the subspace from a start with more columns than `rank`, in few exchanges.  -> Subspaces, or None

    With two exchanges it is Q = qr(Y start) and the singular vectors of Q^T Y; each further one is a power step.
    """
    q = torch.linalg.qr(start).Q
    product: Tensor | None = None
    for remaining in range(exchanges, 0, -1):  # Y and Y^T in turn, Y^T last
        product = yield from _finite(multiply, q, remaining % 2 == 1)
        if product is None:
            return None
        if remaining > 1:
            q = torch.linalg.qr(product).Q
    assert product is not None
    outer, values, inner = torch.linalg.svd(
        product, full_matrices=False
    )  # product = Y^T q = V S U^T: of Y, q U are best
    if exchanges == 1 and q.shape[-1] < q.shape[-2]:  # q was no product of Y yet, and V is
        return Subspaces(outer[..., :rank], values)
    return Subspaces((q @ inner.transpose(1, 2))[..., :rank], values)


def leading_range(multiply: Multiply, start: Tensor, rank: int, exchanges: int) -> Run:
    """Find the subspace as that of the last product.  -> Subspaces, or None

    With one exchange it is the leading left singular vectors of Y start: one power step, which will do if the start is near
    the subspace, as that of an iteration before.
    """
    q = torch.linalg.qr(start).Q
    product: Tensor | None = None
    for remaining in range(exchanges, 0, -1):  # Y^T and Y in turn, Y last
        product = yield from _finite(multiply, q, remaining % 2 == 0)
        if product is None:
            return None
        if remaining > 1:
            q = torch.linalg.qr(product).Q
    assert product is not None
    found, values, _ = torch.linalg.svd(product, full_matrices=False)
    return Subspaces(found[..., :rank], values)


def _finite(multiply: Multiply, q: Tensor, transposed: bool) -> Run:
    """Multiply; what diverged is zero, alone.  -> [A, D, L], or None if nobody answered"""
    product: Tensor | None = yield from multiply(q, transposed)
    if product is None:
        return None
    return torch.where(product.isfinite().all(2).all(1)[:, None, None], product, 0.0)
