# SPDX-License-Identifier: Apache-2.0
"""Gaussian components and linear regressions as families of mixtures, for many runs and clients at once."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.models.families import Custom, Family, drawn_rows, expect, products, shares, sums
from coterie.protocol import Block

__all__ = ["Custom", "Family", "Gaussian", "Regression", "expect", "shares"]

_TINY = 1e-12
_FEW = 1e-8  # rows below which a component counts as empty
_FLOOR = 1e-6  # smallest variance, relative to the mean one
_HUGE = 1e50  # features and targets beyond are taken as this: products of a few still fit


@dataclass(frozen=True)
class Gaussian:
    """Normal components that share a covariance: the identity, a diagonal, or a full one.

    The scale is W [D, D] with W W^T the inverse of the covariance, and symmetric: axes of equal variance have no directions
    of their own, and rounding would choose them. Moments are sums of rows, and how many they are.
    """

    n_features: int
    covariance: Literal["unit", "diagonal", "full"] = "unit"
    anneals = False
    has_moments = True

    @property
    def n_parameters(self) -> int:
        """Length of a mean."""
        return self.n_features

    @property
    def has_scale(self) -> bool:
        """Whether the covariance is estimated."""
        return self.covariance != "unit"

    @property
    def n_scale(self) -> int:
        """Free numbers of the covariance."""
        d = self.n_features
        return {"unit": 0, "diagonal": d, "full": d * (d + 1) // 2}[self.covariance]

    def unit_scale(self) -> Tensor:
        """The identity."""
        return torch.eye(self.n_features, dtype=torch.float64)

    def coordinates(self, theta: Tensor, scale: Tensor) -> Tensor:
        """W^T theta: lengths are Mahalanobis's."""
        return theta @ scale if self.has_scale else theta

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """Random rows."""
        return drawn_rows(n_components, data, keys.uniform(key, n_components))

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """-1/2 |W^T (x - theta)|^2 + log |W| - D/2 log 2 pi.  [S, C, N, R]"""
        mean = theta
        constant = torch.full(scale.shape[:2], -0.5 * self.n_features * math.log(2 * math.pi), dtype=theta.dtype)
        if self.has_scale:
            mean = theta @ scale
            constant = constant + torch.linalg.slogdet(scale).logabsdet
            squared = products(data.x, mean @ scale.transpose(-1, -2)).mul_(-2)
            squared += torch.matmul(data.x, scale).square().sum(-1)[..., None]
        else:
            squared = products(data.x, mean).mul_(-2)
            squared += data.once("squared lengths", lambda: data.x.square().sum(-1))[..., None]
        squared += mean.square().sum(-1)[:, :, None]
        return squared.clamp_(min=0).mul_(-0.5).add_(constant[:, :, None, None])

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """(1/n) sum_i gamma_ir (x_i - theta_r)."""
        slope, _ = self.slope(self.moments(gamma, data), theta)
        return slope / data.n.clamp(min=1)[:, None, None]

    def curvature(self, direction: Tensor, slope: Tensor, gamma: Tensor, data: Block) -> tuple[Tensor, Tensor]:
        """The same in all directions: a component's share."""
        return shares(gamma, data), direction

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Weighted means."""
        return self.solved(self.moments(gamma, data), theta)

    def moments(self, gamma: Tensor, data: Block) -> Tensor:
        """Sum_i gamma_ir (x_i, 1).  [S, C, R, D + 1]"""
        return torch.cat([sums(gamma, data.x), gamma.sum(2)[..., None]], -1)

    def solved(self, moments: Tensor, theta: Tensor) -> Tensor:
        """Weighted means."""
        total = moments[..., -1:]
        return torch.where(total > _FEW, moments[..., :-1] / total.clamp(min=_FEW), theta)

    def slope(self, moments: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Sum_i gamma_ir (x_i - theta_r), and the component's rows."""
        return moments[..., :-1] - moments[..., -1:] * theta, moments[..., -1]

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Sum_ir gamma_ir (x_i - theta_r)(x_i - theta_r)^T.  [S, C, D, D]; nothing when the covariance is known."""
        if not self.has_scale:
            return gamma.new_zeros(gamma.shape[:2])
        cross = sums(gamma, data.x).transpose(2, 3) @ theta
        # every row counts once, since gamma sums to one
        outer = data.once("outer products", lambda: torch.bmm(data.x.transpose(1, 2), data.x))
        squares = (theta * gamma.sum(2)[..., None]).transpose(2, 3) @ theta
        return outer - cross - cross.transpose(2, 3) + squares

    def scale_of(self, scatter: Tensor, n: Tensor) -> Tensor:
        """W from the covariance, which is kept away from zero; without finite numbers, the unit."""
        if not self.has_scale:
            return self.unit_scale().expand(*scatter.shape, -1, -1)
        sigma = (scatter + scatter.transpose(-1, -2)) / (2 * n.clamp(min=1.0)[..., None, None])
        sigma = torch.where(sigma.isfinite().all(-1).all(-1)[..., None, None], sigma, self.unit_scale())
        variances = sigma.diagonal(dim1=-2, dim2=-1)
        floor = _FLOOR * variances.mean(-1, keepdim=True).clamp(min=_TINY)
        if self.covariance == "diagonal":
            return torch.diag_embed((variances.clamp(min=0) + floor).rsqrt())
        values, vectors = torch.linalg.eigh(sigma)
        scale: Tensor = vectors * (values.clamp(min=0) + floor).rsqrt()[..., None, :] @ vectors.transpose(-1, -2)
        return scale


@dataclass(frozen=True)
class Regression:
    """Linear regressions with one noise variance, which is 1 or estimated. The scale is one over its root.

    Moments are sums of products x x^T and x y.

    Parameters
    ----------
    n_features : int
        D; with an intercept there is one parameter more.
    intercept : bool
        Whether there is one.
    variance : {"unit", "estimated"}
        Of the noise.
    """

    n_features: int
    intercept: bool = False
    variance: Literal["unit", "estimated"] = "unit"
    anneals = True
    has_moments = True

    @property
    def n_parameters(self) -> int:
        """Length of a coefficient vector."""
        return self.n_features + self.intercept

    @property
    def has_scale(self) -> bool:
        """Whether the variance is estimated."""
        return self.variance != "unit"

    @property
    def n_scale(self) -> int:
        """The variance."""
        return int(self.has_scale)

    def unit_scale(self) -> Tensor:
        """One."""
        return torch.ones((), dtype=torch.float64)

    def coordinates(self, theta: Tensor, scale: Tensor) -> Tensor:
        """In deviations of the noise."""
        return theta * scale[..., None, None] if self.has_scale else theta

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """Random coefficients as long as the target's deviation suggests."""
        u = keys.uniform(key, 2 * n_components * self.n_parameters).view(*key.shape, 2, n_components, -1)
        normal = (-2 * (1 - u[:, :, 0]).log()).sqrt() * (2 * math.pi * u[:, :, 1]).cos()  # Box and Muller
        x = self._features(data)
        size = torch.einsum("cn,cn->c", self._target(data).square(), data.weights)
        power = torch.einsum("cnp,cn->c", x.square(), data.weights).clamp(min=_TINY)
        return normal * (size / power).sqrt()[:, None, None]

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """-1/2 (y - <x, theta>)^2 / sigma^2 - log sigma - 1/2 log 2 pi.  [S, C, N, R]"""
        factor = scale[:, :, None, None]
        return -0.5 * (self._residuals(theta, data) * factor).square() + factor.log() - 0.5 * math.log(2 * math.pi)

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """(1/n) sum_i gamma_ir (y_i - <x_i, theta_r>) x_i."""
        x, residual = self._features(data), self._residuals(theta, data)
        return sums(gamma * residual * data.weights[..., None], x)

    def curvature(self, direction: Tensor, slope: Tensor, gamma: Tensor, data: Block) -> tuple[Tensor, Tensor]:
        """A step of power iteration with A = (1/n) sum_i gamma_ir x_i x_i^T: |A g| / |g|, and A g / |A g|."""
        image, along_slope = (self._bent(g, gamma, data) for g in (direction, slope))
        curvature = torch.maximum(image.norm(dim=-1), along_slope.norm(dim=-1).nan_to_num(nan=0.0, posinf=0.0))
        good = curvature.isfinite() & (curvature > 0)
        along = torch.where(good[..., None], image / image.norm(dim=-1, keepdim=True).clamp(min=1e-300), 0.0)
        return torch.where(good, curvature, shares(gamma, data)), along

    def _bent(self, direction: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """(1/n) sum_i gamma_ir x_i <x_i, g> / |g|.  [S, C, R, P]"""
        x, unit = self._features(data), direction / direction.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        return sums(gamma * data.weights[..., None] * products(x, unit), x)

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Weighted least squares."""
        return self.solved(self.moments(gamma, data), theta)

    def moments(self, gamma: Tensor, data: Block) -> Tensor:
        """Sum_i gamma_ir (x_i x_i^T, x_i y_i).  [S, C, R, P P + P]"""

        def made() -> Tensor:
            x = self._features(data)
            outer = (x[..., None] * x[..., None, :]).flatten(2)  # [C, N, P P]
            return torch.cat([outer, x * self._target(data)[..., None]], -1)

        return sums(gamma, data.once(("regression products", self.intercept), made))

    def solved(self, moments: Tensor, theta: Tensor) -> Tensor:
        """Weighted least squares, with a trace of ridge towards theta for components with few rows."""
        a, b = self._systems(moments)
        ridge = _FLOOR * (a.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-3)[..., None]
        a = a.clone()
        a.diagonal(dim1=-2, dim2=-1).add_(ridge)
        b = b + ridge * theta
        good = (a.sum((-1, -2)) + b.sum(-1)).isfinite()
        if not bool(good.all()):
            a = torch.where(good[..., None, None], a, torch.eye(self.n_parameters, dtype=a.dtype))
            b = torch.where(good[..., None], b, theta)
        found: Tensor = torch.linalg.solve(a, b)
        return found

    def slope(self, moments: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Sum_i gamma_ir (y_i - <x_i, theta_r>) x_i, and how the objective bends along it."""
        a, b = self._systems(moments)
        slope = b - (a @ theta[..., None])[..., 0]
        unit = slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        return slope, (unit * (a @ unit[..., None])[..., 0]).sum(-1)

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Sum_ir gamma_ir (y_i - <x_i, theta_r>)^2.  [S, C]"""
        return (gamma * self._residuals(theta, data).square()).sum((2, 3))

    def scale_of(self, scatter: Tensor, n: Tensor) -> Tensor:
        """One over the residuals' deviation."""
        if not self.has_scale:
            return self.unit_scale().expand(scatter.shape)
        found = (scatter / n.clamp(min=1.0)).clamp(min=_TINY).rsqrt()
        return torch.where(found.isfinite() & (found > 0), found, 1.0)

    def _systems(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Products of features with each other and with the target.  [..., Q] -> [..., P, P], [..., P]"""
        p = self.n_parameters
        return moments[..., : p * p].reshape(*moments.shape[:-1], p, p), moments[..., p * p :]

    def _features(self, data: Block) -> Tensor:
        """[C, N, P]"""

        def made() -> Tensor:
            x = data.x.clamp(-_HUGE, _HUGE)
            return torch.cat([x, data.real[..., None].to(x.dtype)], -1) if self.intercept else x

        return data.once(("regression features", self.intercept), made)

    def _target(self, data: Block) -> Tensor:
        """[C, N]"""
        return data.once("regression target", lambda: data.target.clamp(-_HUGE, _HUGE))

    def _residuals(self, theta: Tensor, data: Block) -> Tensor:
        """[S, C, N, R]"""
        return self._target(data)[..., None] - products(self._features(data), theta)
