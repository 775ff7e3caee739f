# SPDX-License-Identifier: Apache-2.0
"""Clients' effects v_i in regression, given their noise: exactly, from sums of products.

With squared errors, v_i has the precision G / s + 1 with G = B^T H B and the client's noise variance s, and the mean
-(G / s + 1)^-1 B^T g / s with the gradient g at m. The noise depends on v_i, so that several are tried: what does not depend
on it is formed once. Where weights all vary alike, as in local ridge regressions, H is turned to its axes once, and any
noise and any penalty then takes no products of matrices at all.
"""

from functools import cached_property

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Squares
from coterie.algorithms.log_odds import projected

__all__ = ["Alike", "Factored", "FromCovariance", "effects_of_squares"]


def effects_of_squares(at: Squares, mean: Tensor, root: Tensor) -> "Factored | Alike":
    """Effects of C clients around m [F, J, P] along the columns of B [F, J, P, R], before their noise is known."""
    return Alike(at, mean, root) if _vary_alike(root) else Factored(at, mean, root)


def _vary_alike(root: Tensor) -> bool:
    """Whether B is diagonal, with the same number for all weights; intercepts, which come last, have another."""
    if root.shape[-2] != root.shape[-1] or bool((root.diagonal(dim1=-2, dim2=-1) <= 0).any()):
        return False
    d = root.diagonal(dim1=-2, dim2=-1)
    return bool((d[..., :-1] == d[..., :1]).all()) and torch.equal(torch.diag_embed(d), root)


class FromCovariance:
    """What follows from the covariance of v_i, which is (G / s + 1)^-1."""

    covariance: Tensor  # [F, J, C, R, R]

    @property
    def variance(self) -> Tensor:
        """[F, J, C, R]"""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def freedom(self) -> Tensor:
        """[F, J, C] the trace of G / s (G / s + 1)^-1."""
        return (1 - self.variance).sum(-1).clamp(min=0)


class Factored(FromCovariance):
    """By Cholesky's factors, for any B."""

    v: Tensor  # [F, J, C, R]
    noise: Tensor  # [F, J, C] that v rests on
    next_noise: Tensor
    loss: Tensor  # [F, J, C]

    def __init__(self, at: Squares, mean: Tensor, root: Tensor) -> None:
        self._loss, gradient, hessian = at.quadratic(mean[:, :, None])
        self._slope, self.projected = projected(root, gradient, hessian)

    def settle(self, noise: Tensor) -> None:
        """Find v_i, its covariance and the loss with this noise."""
        precision = self.projected / noise[..., None, None]
        precision.diagonal(dim1=-2, dim2=-1).add_(1.0)
        factor = torch.linalg.cholesky(precision)
        self.covariance = torch.cholesky_inverse(factor)
        self.v = -(self.covariance @ (self._slope / noise[..., None])[..., None])[..., 0]
        self.loss = _loss_at(self._loss, self._slope, self.v, noise, self.v.square().sum(-1))
        self.noise = noise


class Alike:
    """On the axes of H = U L U^T, where B has a on its diagonal and b for the intercept.

    The precision of w = B v is H / s + 1/a^2 + k e e^T with k = 1/b^2 - 1/a^2 and e the intercept's unit vector: a diagonal
    matrix on these axes, and one of rank one, whose inverse Sherman and Morrison give.
    """

    noise: Tensor
    next_noise: Tensor
    loss: Tensor
    freedom: Tensor

    def __init__(self, at: Squares, mean: Tensor, root: Tensor) -> None:
        self._at, self._root = at, root
        self._values, self._vectors = at.train.axes  # [F, C, P], [F, C, P, P]
        self._loss, gradient, _ = at.quadratic(mean[:, :, None])
        self._slope = self._turned(gradient, self._vectors)
        d = root.diagonal(dim1=-2, dim2=-1)
        self._d = d[:, :, None]  # [F, J, 1, P]
        self._flat, free = (d[..., at_, None].square().reciprocal() for at_ in (0, -1))  # [F, J, 1]
        self._k = free - self._flat
        self._intercept = self._vectors[:, None, :, -1]  # [F, 1, C, P]

    def settle(self, noise: Tensor) -> None:
        """Find v_i, how free it is, and the loss with this noise."""
        self.noise, q, k = noise, self._intercept, self._k
        s = (self._values[:, None] / noise[..., None] + self._flat[..., None]).reciprocal()  # [F, J, C, P]
        qs = q * s
        t = (qs * q).sum(-1)
        share = k / (1 + k * t)  # [F, J, C]
        along = (qs * self._slope).sum(-1)
        w = (qs * (share * along)[..., None] - s * self._slope) / noise[..., None]
        corner = t - share * t.square()
        trace = s.sum(-1) - share * qs.square().sum(-1)
        self.freedom = (s.shape[-1] - self._flat * trace - k * corner).clamp(min=0)
        length = self._flat * w.square().sum(-1) + k * (q * w).sum(-1).square()
        self.loss = _loss_at(self._loss, self._slope, w, noise, length)
        self._w, self._s, self._share = w, s, share

    @property
    def v(self) -> Tensor:
        """[F, J, C, P]"""
        return self._turned(self._w, self._vectors.transpose(-2, -1)) / self._d

    @property
    def projected(self) -> Tensor:
        """[F, J, C, P, P]"""
        return projected(self._root, self._slope, self._at.train.a[:, None])[1]

    @cached_property
    def covariance(self) -> Tensor:
        """[F, J, C, P, P], once nothing is settled any more."""
        u = self._vectors[:, None]
        r = self._turned(self._s * self._intercept, self._vectors.transpose(-2, -1))
        inner = (u * self._s[..., None, :]) @ u.transpose(-2, -1)
        inner = inner - self._share[..., None, None] * r[..., None] * r[..., None, :]
        return inner / (self._d[..., None] * self._d[..., None, :])

    @property
    def variance(self) -> Tensor:
        """[F, J, C, P]"""
        return self.covariance.diagonal(dim1=-2, dim2=-1)

    @staticmethod
    def _turned(rows: Tensor, vectors: Tensor) -> Tensor:
        """[F, J, C, P], [F, C, P, P] -> [F, J, C, P]"""
        return (rows.transpose(1, 2) @ vectors).transpose(1, 2)


def _loss_at(loss: Tensor, slope: Tensor, move: Tensor, noise: Tensor, length: Tensor) -> Tensor:
    """The loss at the mode, from that at m and from the step there: its slope there is -s v, so that H need not be asked."""
    return (loss + 0.5 * ((slope * move).sum(-1) - noise * length)).clamp(min=0.0)
