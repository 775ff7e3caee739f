# SPDX-License-Identifier: Apache-2.0
"""The profiled deviance of a linear mixed model, from sums over clients, and safeguarded Newton steps towards its minimum.

Of y = X beta + Z b_i + e with e ~ N(0, s^2 I) and b_i ~ N(0, s^2 Psi), Psi = L L^T, and V_i = I + Z_i Psi Z_i^T, the fixed
effects beta and s^2 have closed forms given the factor L (Bates et al., "Fitting linear mixed-effects models using lme4",
2015, equations 32 to 41). What is left is a function of theta, the free entries of L. Columns of L may change their signs,
so that theta needs no bounds: where a variance is zero, the minimum is at zero like any other.
"""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "Profile", "Sums", "derivatives", "descent", "entries", "factor", "independent", "lowered", "of_factor", "pivoted",
    "placed_anew", "profile",
]  # fmt: skip

_State = TypeVar("_State")

_FLOOR = 1e-7  # of the largest curvature: flatter directions count as so steep
_TRACE = 1e-12  # the least eigenvalue, where columns that differ for all clients do not for those who have answered
_EXACT = 1e-14  # of the squares of the target: residuals that are smaller are rounding
_WIDEST = 1e4  # entries of a root: standard deviations between clients over that of the noise
_ALIKE = 1e-9  # share of a column's squares that columns before it leave unexplained: below, it says nothing new


@dataclass(frozen=True)
class Sums:
    """Sums over clients at one factor; W is [X, y], with Q columns.

    Attributes
    ----------
    total : Tensor
        [Q, Q] W^T V^-1 W.
    logdet : Tensor
        [] log |V|.
    inner : Tensor
        [R, R] C = Z^T V^-1 Z.
    outer : Tensor
        [K, Q, Q] B^T E_k B with B = Z^T V^-1 W, for each free entry of Psi.
    information : Tensor
        [K, K] trace of E_k C E_l C.
    curvature : Tensor
        [K, K] trace of E_k C E_l B weight B^T.
    """

    total: Tensor
    logdet: Tensor
    inner: Tensor
    outer: Tensor
    information: Tensor
    curvature: Tensor


@dataclass(frozen=True)
class Profile:
    """The best that can be had at one factor.

    Attributes
    ----------
    deviance : float
        Minus twice the (restricted) log-likelihood.
    beta : Tensor
        [Q - 1] fixed effects, 0 for columns that are left out.
    inverse : Tensor
        [Q, Q] of X^T V^-1 X, 0 for columns that are left out and for the target.
    squares : float
        The weighted sum of squared residuals.
    freedom : float
        Rows, for restricted likelihood less the fixed effects.
    """

    deviance: float
    beta: Tensor
    inverse: Tensor
    squares: float
    freedom: float

    @property
    def residual(self) -> Tensor:
        """[Q] what makes residuals of the columns of W."""
        return torch.cat([-self.beta, torch.ones(1, dtype=torch.float64)])

    def weight(self, reml: bool) -> Tensor:
        """[Q, Q] what clients are sent, to weigh the columns of B with."""
        made = torch.outer(self.residual, self.residual) * (self.freedom / self.squares)
        return made + self.inverse if reml else made


def placed_anew(state: _State) -> _State:
    """A state whose tensors begin where memory is aligned: products round by that, and a resumed run must be bit-equal."""
    return replace(state, **{name: v.clone() for name, v in vars(state).items() if isinstance(v, Tensor)})  # type: ignore[type-var]


# -- factors ----------------------------------------------------------------------------------------------------------
def entries(size: int, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Rows and columns of the free entries of a lower factor.  [K] each"""
    if diagonal:
        return torch.arange(size), torch.arange(size)
    rows, columns = torch.tril_indices(size, size)
    return rows, columns


def factor(theta: Tensor, size: int, diagonal: bool) -> Tensor:
    """L from its free entries.  [..., K] -> [..., R, R]"""
    rows, columns = entries(size, diagonal)
    made = theta.new_zeros(*theta.shape[:-1], size, size)
    made[..., rows, columns] = theta
    return made


def of_factor(lower: Tensor, diagonal: bool) -> Tensor:
    """The free entries of L, with a diagonal that is not negative.  [R, R] -> [K]"""
    sign = torch.where(lower.diagonal() < 0, -1.0, 1.0)
    return (lower * sign)[entries(len(lower), diagonal)]


def pivoted(lower: Tensor, diagonal: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A root A of the same Psi = A A^T, and rows and columns of its free entries.  [R, R] -> [R, R], ([K], [K])

    It is lower once its rows are in order, the largest variance first, then the largest that this leaves, and so on. So what
    is zero is at its end. If it were in the middle, columns after it could be turned into each other without changing Psi,
    and steps to the minimum would go in circles.
    """
    size = len(lower)
    if diagonal:
        return lower, entries(size, True)
    left = lower @ lower.T
    order: list[int] = []
    for _ in range(size):
        found = left.diagonal().clone()
        found[order] = -1.0
        at = int(found.argmax())
        order.append(at)
        left = left - torch.outer(left[at], left[at]) / left[at, at].clamp(min=torch.finfo(torch.float64).tiny)
    rows, columns = entries(size, False)
    root = torch.zeros_like(lower)
    root[order] = lowered(lower[order])
    return root, (torch.tensor(order)[rows], columns)


def lowered(root: Tensor) -> Tensor:
    """The lower factor of A A^T.  [R, R]"""
    made: Tensor = torch.linalg.qr(root.T).R.T
    return made.clamp(-_WIDEST, _WIDEST)


# -- the deviance -----------------------------------------------------------------------------------------------------
def independent(products: Tensor, order: tuple[int, ...]) -> tuple[int, ...]:
    """Columns that are no combination of those before them, of which products of all pairs are given.  -> ascending

    The intercept is the last column but one of `products` and comes first; the others come in this order.
    """
    scale = products.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    left = products / torch.outer(scale, scale)
    found = []
    for at in (len(products) - 2, *order):
        if left[at, at] > _ALIKE:
            found.append(at)
            left = left - torch.outer(left[at], left[at]) / left[at, at]
    return tuple(sorted(found))


def profile(total: Tensor, logdet: float, n: float, kept: tuple[int, ...], reml: bool) -> Profile:
    """Fixed effects, noise and deviance at one factor, from its sums; `kept` are the columns that have fixed effects."""
    at = torch.tensor(kept)
    a, b = total[at][:, at], total[at, -1]
    scale = a.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    even = a / torch.outer(scale, scale)
    root, failed = torch.linalg.cholesky_ex(even)
    if bool(failed):
        values, vectors = torch.linalg.eigh(even)
        root = torch.linalg.qr((vectors * values.clamp(min=_TRACE).sqrt()).T).R.T
    inverse = torch.cholesky_inverse(root) / torch.outer(scale, scale)
    solved = torch.cholesky_solve((b / scale)[:, None], root)[:, 0] / scale
    squares = max(float(total[-1, -1] - b @ solved), _EXACT * float(total[-1, -1]), 1e-300)
    freedom = max(n - len(kept) * reml, 1.0)
    deviance = float(logdet) + freedom * (1 + math.log(2 * math.pi * squares / freedom))
    if reml:
        deviance += 2 * float(root.diagonal().log().sum() + scale.log().sum())
    beta, whole = total.new_zeros(len(total) - 1), torch.zeros_like(total)
    beta[at] = solved
    whole[at[:, None], at] = inverse
    return Profile(deviance, beta, whole, squares, freedom)


def derivatives(
    root: Tensor, free: tuple[Tensor, Tensor], sums: Sums, at: Profile, *, reml: bool, diagonal: bool, expected: bool
) -> tuple[Tensor, Tensor]:
    """Gradient and second derivatives of the deviance in the free entries of a root of Psi.  -> [K], [K, K]

    The gradient is exact. Among the second derivatives, one term rests on the weights that clients were sent, which are
    those of the factor before: near the minimum that makes no difference. With `expected` it is left to its expectation.
    """
    rows, columns = entries(len(sums.inner), diagonal)
    v, ratio = at.residual, at.freedom / at.squares
    seen = sums.outer @ v  # [K, Q]
    shrinks = -(seen @ v)  # [K] derivatives of the squares
    slope = sums.inner[rows, columns] * torch.where(rows == columns, 1.0, 2.0) + ratio * shrinks
    bend = sums.information if expected else 2 * sums.curvature - sums.information
    bend = bend - 2 * ratio * seen @ at.inverse @ seen.T - ratio / at.squares * torch.outer(shrinks, shrinks)
    if reml:
        turned = sums.outer @ at.inverse  # [K, Q, Q]
        slope = slope - turned.diagonal(dim1=-2, dim2=-1).sum(-1)
        bend = bend - torch.einsum("kab,lba->kl", turned, turned)
    # Psi = A A^T changes by e_r a_c^T + a_c e_r^T with the entry (r, c) of A.
    r, c = free
    half = torch.einsum("ja,bj->jab", torch.eye(len(root), dtype=torch.float64)[r], root[:, c])
    change = (half + half.transpose(1, 2))[:, rows, columns]  # [K, K]
    symmetric = torch.zeros_like(root)
    symmetric[rows, columns] = slope * torch.where(rows == columns, 1.0, 0.5)
    symmetric = symmetric + symmetric.T - torch.diag(symmetric.diagonal())
    same = (c[:, None] == c).to(torch.float64)
    return change @ slope, change @ bend @ change.T + 2 * same * symmetric[r][:, r]


def descent(at: Tensor, gradient: Tensor, hessian: Tensor) -> tuple[Tensor, float]:
    """Newton's step, downhill whatever the curvature and not too far, and twice what it should gain.  -> [K], number"""
    values, vectors = torch.linalg.eigh((hessian + hessian.T) / 2)
    steep = values.abs().clamp(min=_FLOOR * float(values.abs().max().clamp(min=1e-300)))
    step = -vectors @ ((vectors.T @ gradient) / steep)
    far = 2 * (1 + float(at.abs().max()))
    step = step * min(1.0, far / max(float(step.abs().max()), 1e-300))
    return step, -float(gradient @ step)
