# SPDX-License-Identifier: Apache-2.0
"""Classification by linear log odds: losses of clients by fold, with first and second derivatives.

Every pass looks at the rows, and where clients have few rows most of the time goes into moving numbers. So values lie client
after client, [C, F, J, O, N] with the rows last: products come out of one batched multiplication in that order, and sums
over classes run along rows that lie side by side.
"""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from coterie.protocol import Block

if TYPE_CHECKING:
    from coterie.algorithms.linear_by_fold import Problem

__all__ = ["LogOdds", "projected", "with_intercept"]

_FEW_ROWS = 24  # of a client: up to here putting numbers in place takes longer than multiplying more of them


class LogOdds:
    """Minus log-likelihoods of C clients, of F fits with J models each: see `linear_by_fold.Curves`."""

    def __init__(self, problem: "Problem", data: Block) -> None:
        self.problem, self.data = problem, data
        self.x = data.once("features and intercept", lambda: with_intercept(data))  # [C, N, D + 1]
        outputs = problem.n_outputs
        self.y = data.once(("classes", outputs), lambda: _classes(data, outputs))  # [C, 1, 1, O, N]
        masks = data.once(("masks", problem), lambda: _masks(problem, data))  # [2, C, F, 1, N]
        self.train, self.held = masks  # [C, F, 1, N]
        alike = replace(problem, class_weights=())  # rows count as rows, whatever their classes count in training
        counts = data.once(("masks", alike), lambda: _masks(alike, data))
        self.n, self.n_held = (mask.sum(-1).permute(1, 2, 0) for mask in counts)

    def loss(self, theta: Tensor) -> Tensor:
        """Sum over training rows.  [F, J, C | 1, P] -> [F, J, C]"""
        scores = self._scores(theta)
        return self._summed(self._lost(scores, _total(scores)), self.train)

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and second derivatives on training rows.  -> [F, J, C], [F, J, C, P], [F, J, C, P, P]"""
        loss, p, error = self._expected(theta)
        gradient = (error.flatten(1, 3) @ self.x).view(*p.shape[:3], -1).movedim(0, 2)
        return loss, gradient, self._hessian(p, self.train[..., None, :])

    def along(self, theta: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same along the columns of B [F, J, P, R].  -> [F, J, C], [F, J, C, R], [F, J, C, R, R]

        Along few directions it takes no second derivatives in all of them: (diag(p) - p p^T) is the covariance of an output
        that is drawn by p, so B^T H B is that of what B makes of a row, summed over rows.
        """
        size, columns = root.shape[2:]
        if self.problem.n_outputs == 1 or 2 * columns > size or self.x.shape[1] > _FEW_ROWS:
            loss, gradient, hessian = self.quadratic(theta)
            return loss, *projected(root, gradient, hessian)
        loss, p, error = self._expected(theta)
        clients, fits, settings, outputs, rows = p.shape
        ways = root.view(fits, settings, outputs, -1, columns).permute(3, 0, 1, 2, 4).flatten(1)  # [D + 1, F J O R]
        made = (self.x.flatten(0, 1) @ ways).view(clients, rows, fits, settings, outputs, columns)
        made = made.permute(0, 2, 3, 4, 1, 5).contiguous()  # [C, F, J, O, N, R]
        slope = error.flatten(3)[..., None, :] @ made.flatten(3, 4)  # [C, F, J, 1, R]
        made -= (p[..., None] * made).sum(3, keepdim=True)
        made *= (p * self.train[..., None, :]).sqrt()[..., None]
        flat = made.flatten(3, 4)  # [C, F, J, O N, R]
        curve = flat.transpose(-2, -1) @ flat
        return loss, slope[..., 0, :].movedim(0, 2), curve.movedim(0, 2)

    def _expected(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss [F, J, C], and of every row probabilities and their errors [C, F, J, O, N]."""
        scores = self._scores(theta)
        total = _total(scores)
        p = (scores - total[..., None, :]).exp_()  # of two classes, that of the second
        error = (p - self.y) * self.train[..., None, :]
        return self._summed(self._lost(scores, total), self.train), p, error

    def _hessian(self, p: Tensor, mask: Tensor) -> Tensor:
        """Sum over rows of (diag(p) - p p^T) x x^T.  -> [F, J, C, P, P]

        Of few rows from all pairs of outputs and of features; of many from different pairs only, which are put in place
        afterwards.
        """
        outputs, size, shape = p.shape[3], self.x.shape[-1], p.shape[:3]
        weighted = p * mask
        if p.shape[-1] <= _FEW_ROWS:
            every = (weighted[:, :, :, :, None] * p[:, :, :, None]).neg_()  # [C, F, J, O, O, N]
            every.diagonal(dim1=3, dim2=4).add_(weighted.transpose(-1, -2))
            squares = self.data.once("squares", lambda: (self.x[..., None] * self.x[..., None, :]).flatten(2))
            made = (every.flatten(1, 4) @ squares).view(*shape, outputs, outputs, size, size)
            return made.transpose(4, 5).reshape(*shape, outputs * size, outputs * size).movedim(0, 2)
        o, q, same, place = _places(outputs, size)
        pairs = weighted.index_select(3, o).mul_(p.index_select(3, q)).neg_()  # [C, F, J, O (O + 1) / 2, N]
        pairs[:, :, :, same] += weighted
        d, e = torch.triu_indices(size, size)
        features = self.data.once("pairs of features", lambda: self.x[..., d] * self.x[..., e])
        packed = (pairs.flatten(1, 3) @ features).view(*shape, -1)  # [C, F, J, pairs of both]
        return packed.index_select(3, place).view(*shape, outputs * size, outputs * size).movedim(0, 2)

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over held-out rows: the loss, and rows predicted right.  -> [F, J, C] each"""
        scores = self._scores(theta)
        lost = self._lost(scores, _total(scores))
        best = scores.argmax(3) if self.problem.n_outputs > 1 else (scores[..., 0, :] > 0).to(torch.int64)
        right = (best == self.data.target[:, None, None]).to(scores.dtype)
        return self._summed(lost, self.held), self._summed(right, self.held)

    def _scores(self, theta: Tensor) -> Tensor:
        """Log odds of every output.  [F, J, C | 1, P] -> [C, F, J, O, N]"""
        fits, settings, clients, _ = theta.shape
        weights = theta.movedim(2, 0).reshape(clients, -1, self.x.shape[-1])  # [C | 1, F J O, D + 1]
        made = torch.matmul(weights, self.x.transpose(1, 2))
        return made.view(len(self.x), fits, settings, self.problem.n_outputs, -1)

    def _lost(self, scores: Tensor, total: Tensor) -> Tensor:
        """Minus the log-likelihood of every row.  -> [C, F, J, N]"""
        return total - (scores * self.y).sum(3)

    @staticmethod
    def _summed(value: Tensor, mask: Tensor) -> Tensor:
        """Sum over some of the rows.  [C, F, J, N], [C, F, 1, N] -> [F, J, C]"""
        return (value * mask).sum(-1).movedim(0, 2)


def projected(root: Tensor, gradient: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """B^T g and B^T H B; a diagonal B needs no products of matrices.

    [F, J, P, R], [F, J, C, P], [F, J | 1, C, P, P] -> [F, J, C, R], [F, J, C, R, R]
    """
    if root.shape[-2] == root.shape[-1] and not bool(root.tril(-1).any()) and not bool(root.triu(1).any()):
        d = root.diagonal(dim1=-2, dim2=-1)[:, :, None]
        return d * gradient, (d[..., None] * d[..., None, :]) * hessian
    if hessian.shape[1] == 1:  # the same for all settings: one product with all their columns
        columns = root.transpose(1, 2).flatten(2)  # [F, P, J R]
        half = (hessian[:, 0].flatten(1, 2) @ columns).view(*hessian[:, 0].shape[:3], root.shape[1], -1)
        curve = torch.einsum("fjpr,fcpjs->fjcrs", root, half)
    else:
        curve = torch.einsum("fjpr,fjcpq,fjqs->fjcrs", root, hessian, root)
    return torch.einsum("fjpr,fjcp->fjcr", root, gradient), curve


def _total(scores: Tensor) -> Tensor:
    """Log of the sum over classes; of two classes the first has log odds 0.  [C, F, J, O, N] -> [C, F, J, N]"""
    return softplus(scores[..., 0, :]) if scores.shape[3] == 1 else scores.logsumexp(3)


def with_intercept(data: Block) -> Tensor:
    """[C, N, D + 1]"""
    return torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1)


def _classes(data: Block, outputs: int) -> Tensor:
    """1 where a row has the class of an output.  [C, 1, 1, O, N]"""
    y = data.target
    there = (y == 1)[..., None] if outputs == 1 else one_hot(y, outputs)
    return there.to(data.x.dtype).transpose(1, 2).contiguous()[:, None, None]


def _masks(problem: "Problem", data: Block) -> Tensor:
    """Of training rows, and of held-out ones.  [2, C, F, 1, N]"""
    return torch.stack(problem.masks(data)).transpose(1, 2).contiguous()[:, :, :, None]


@cache
def _places(outputs: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs of outputs, which of them are of one output, and where [P P] second derivatives lie among packed ones."""
    o, q = torch.triu_indices(outputs, outputs)
    of_outputs, of_features = (_square(n) for n in (outputs, size))
    place = of_outputs[:, None, :, None] * (size * (size + 1) // 2) + of_features[None, :, None, :]
    return o, q, (o == q).nonzero()[:, 0], place.reshape(-1)


def _square(n: int) -> Tensor:
    """The number of every pair, in the order of `triu_indices`.  [n, n]"""
    i, j = torch.triu_indices(n, n)
    number = torch.zeros(n, n, dtype=torch.int64)
    number[i, j] = number[j, i] = torch.arange(len(i))
    return number
