# SPDX-License-Identifier: Apache-2.0
"""Component families of mixtures: log densities of rows, gradients and exact M-steps, for many runs and clients at once.

Densities are only ever combined as logarithms, so that a row far from every component keeps finite responsibilities.
Gradients are those of the log density times the component's variance: a step of size 1 / weight is then a whole M-step of a
Gaussian mixture, whatever the units.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from coterie import keys
from coterie.protocol import Block

__all__ = ["Custom", "Family", "Gaussian", "Regression", "expect"]

_TINY = 1e-12  # weight that a component keeps at least, so that its logarithm exists
_LOWEST = -1e300  # log density of a row that is infinitely far from everything


class Family(Protocol):
    """What a mixture is made of. S runs, C clients, N rows, R components, P parameters of each."""

    @property
    def n_parameters(self) -> int:
        """P."""

    @property
    def has_scale(self) -> bool:
        """Whether a scale is estimated."""

    @property
    def anneals(self) -> bool:
        """Whether EM should begin with blurred densities, since random starts are poor."""

    def unit_scale(self) -> Tensor:
        """The scale that means variance one."""

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """Random first parameters of every client.  scale [S, ...], key [S, C] -> [S, C, R, P]"""

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """Every row under every component.  theta [S, C, R, P], scale [S, ...] -> [S, C, N, R]"""

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block, clip: float) -> Tensor:
        """(1/n) sum_i gamma_ir (d log p / d theta_r) times the variance.  gamma [S, C, N, R] -> [S, C, R, P]

        No row's own gradient is longer than `clip`.
        """

    def curvature(self, data: Block) -> Tensor:
        """How much steeper a client's objective is than a Gaussian's: steps are divided by it.  [C]"""

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """The exact M-step; a component without rows keeps its theta.  -> [S, C, R, P]"""

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Sum over rows of what the scale is made of, given gamma.  -> [S, C, ...]"""

    def scale_of(self, scatter: Tensor, n: float) -> Tensor:
        """The scale, from scatters summed over clients with n rows."""


def expect(log_density: Tensor, weights: Tensor, data: Block) -> tuple[Tensor, Tensor]:
    """E-step: responsibilities, zero on padding, and every client's mean log-likelihood.  -> [S, C, N, R], [S, C]

    Parameters
    ----------
    log_density : Tensor
        [S, C, N, R]
    weights : Tensor
        [S, C, R] mixture proportions.
    """
    joint = log_density.nan_to_num(nan=_LOWEST, neginf=_LOWEST) + weights.clamp(min=_TINY).log()[:, :, None]
    total = joint.logsumexp(-1, keepdim=True)
    gamma = (joint - total).exp_().mul_(data.real[..., None])
    return gamma, torch.einsum("scn,cn->sc", total[..., 0], data.weights)


@dataclass(frozen=True)
class Gaussian:
    """Normal components that share a covariance: the identity, a diagonal, or a full one.

    The scale is W [D, D] with W W^T the inverse of the covariance.
    """

    n_features: int
    covariance: Literal["unit", "diagonal", "full"] = "unit"
    anneals = False

    @property
    def n_parameters(self) -> int:
        """Length of a mean."""
        return self.n_features

    @property
    def has_scale(self) -> bool:
        """Whether the covariance is estimated."""
        return self.covariance != "unit"

    def unit_scale(self) -> Tensor:
        """The identity."""
        return torch.eye(self.n_features, dtype=torch.float64)

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """k-means++: each next mean is a row, drawn by its squared distance from those before."""
        u = keys.uniform(key, n_components)  # [S, C, R]
        x = self._white(data.x, scale)  # [S | 1, C, N, D]
        far = data.real.to(torch.float64).expand(len(key), -1, -1)  # [S, C, N]
        chosen: list[Tensor] = []
        for r in range(n_components):
            row = _drawn_row(far, u[..., r])  # [S, C]
            chosen.append(row)
            picked = torch.take_along_dim(x.expand(len(key), -1, -1, -1), row[..., None, None], 2)
            squared = (x - picked).square().sum(-1) * data.real
            far = squared if r == 0 else torch.minimum(far, squared)
        return data.x[torch.arange(len(data.n))[None, :, None], torch.stack(chosen, -1)]

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """-1/2 |W^T (x - theta)|^2 + log |W| - D/2 log 2 pi.  [S, C, N, R]"""
        x, mean = self._white(data.x, scale), theta
        log_volume = torch.zeros(len(theta), dtype=theta.dtype)
        if self.has_scale:
            mean = torch.einsum("scrd,sde->scre", theta, scale)
            log_volume = torch.linalg.slogdet(scale).logabsdet
        squared = torch.matmul(x, mean.transpose(-1, -2)).mul_(-2)
        squared += x.square().sum(-1)[..., None]
        squared += mean.square().sum(-1)[:, :, None]
        constant = log_volume - 0.5 * self.n_features * math.log(2 * math.pi)
        return squared.clamp_(min=0).mul_(-0.5).add_(constant[:, None, None, None])

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block, clip: float) -> Tensor:
        """(1/n) sum_i gamma_ir (x_i - theta_r)."""
        weighted = gamma * data.weights[..., None]
        if math.isfinite(clip):
            weighted = weighted * (clip / torch.cdist(data.x.expand(len(theta), -1, -1, -1), theta)).clamp(max=1.0)
        return weighted.transpose(2, 3) @ data.x - weighted.sum(2)[..., None] * theta

    def curvature(self, data: Block) -> Tensor:
        """One."""
        return torch.ones(len(data.n), dtype=torch.float64)

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Weighted means."""
        total = gamma.sum(2)[..., None]  # [S, C, R, 1]
        return torch.where(total > 1e-8, gamma.transpose(2, 3) @ data.x / total.clamp(min=1e-8), theta)

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Sum_ir gamma_ir (x_i - theta_r)(x_i - theta_r)^T.  [S, C, D, D]; nothing when the covariance is known."""
        if not self.has_scale:
            return gamma.new_zeros(gamma.shape[:2])
        sums = gamma.transpose(2, 3) @ data.x  # [S, C, R, D]
        cross = sums.transpose(2, 3) @ theta
        outer = torch.bmm(data.x.transpose(1, 2), data.x)  # every row counts once: gamma sums to one
        squares = (theta * gamma.sum(2)[..., None]).transpose(2, 3) @ theta
        return outer - cross - cross.transpose(2, 3) + squares

    def scale_of(self, scatter: Tensor, n: float) -> Tensor:
        """W from the covariance, which is kept away from zero.  [D, D]"""
        if not self.has_scale:
            return self.unit_scale()
        sigma = scatter / max(n, 1.0)
        floor = 1e-6 * sigma.diagonal().mean().clamp(min=1e-12)
        if self.covariance == "diagonal":
            return torch.diag((sigma.diagonal() + floor).rsqrt())
        values, vectors = torch.linalg.eigh((sigma + sigma.T) / 2)
        return vectors * (values.clamp(min=0) + floor).rsqrt()

    def _white(self, x: Tensor, scale: Tensor) -> Tensor:
        """Rows in the metric of the covariance.  [C, N, D] -> [S | 1, C, N, D]"""
        if not self.has_scale:
            return x[None]
        return torch.matmul(x, scale[:, None])


def _drawn_row(weight: Tensor, u: Tensor) -> Tensor:
    """Draw a row with probability proportional to its weight.  weight [S, C, N], u [S, C] in [0, 1) -> [S, C]"""
    if not weight.shape[-1]:
        return torch.zeros(weight.shape[:2], dtype=torch.int64)
    total = weight.cumsum(-1)
    at = torch.searchsorted(total, (u * total[..., -1])[..., None], right=True).squeeze(-1)
    return at.clamp(max=weight.shape[-1] - 1)


@dataclass(frozen=True)
class Regression:
    """Linear regressions with one noise variance, which is 1 or estimated. The scale is one over its root.

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

    @property
    def n_parameters(self) -> int:
        """Length of a coefficient vector."""
        return self.n_features + self.intercept

    @property
    def has_scale(self) -> bool:
        """Whether the variance is estimated."""
        return self.variance != "unit"

    def unit_scale(self) -> Tensor:
        """One."""
        return torch.ones((), dtype=torch.float64)

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """Random coefficients as long as the target's deviation suggests."""
        u = keys.uniform(key, 2 * n_components * self.n_parameters).view(*key.shape, 2, n_components, -1)
        normal = (-2 * (1 - u[:, :, 0]).log()).sqrt() * (2 * math.pi * u[:, :, 1]).cos()  # Box and Muller
        x = self._features(data)
        size = torch.einsum("cn,cn->c", data.target.square(), data.weights)
        power = torch.einsum("cnp,cn->c", x.square(), data.weights).clamp(min=_TINY)
        return normal * (size / power).sqrt()[:, None, None]

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """-1/2 (y - <x, theta>)^2 / sigma^2 - log sigma - 1/2 log 2 pi.  [S, C, N, R]"""
        factor = scale[:, None, None, None]
        return -0.5 * (self._residuals(theta, data) * factor).square() + factor.log() - 0.5 * math.log(2 * math.pi)

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block, clip: float) -> Tensor:
        """(1/n) sum_i gamma_ir (y_i - <x_i, theta_r>) x_i."""
        x, residual = self._features(data), self._residuals(theta, data)
        if math.isfinite(clip):
            length = residual.abs() * x.norm(dim=-1)[..., None]
            residual = residual * (clip / length.clamp(min=_TINY)).clamp(max=1.0)
        return (gamma * residual * data.weights[..., None]).transpose(2, 3) @ x

    def curvature(self, data: Block) -> Tensor:
        """Largest eigenvalue of the rows' second moments, bounded from above by three powers of them."""
        x = self._features(data) * data.weights.sqrt()[..., None]
        second = torch.bmm(x.transpose(1, 2), x)
        fourth = second @ second
        return torch.linalg.matrix_norm(fourth @ fourth).pow(0.25).clamp(min=1.0)

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Weighted least squares, with a trace of ridge towards theta for components with few rows."""
        x = self._features(data)
        a = torch.matmul((gamma.transpose(2, 3)[..., None] * x[:, None]).transpose(-1, -2), x[:, None])  # [S,C,R,P,P]
        b = torch.matmul((gamma * data.target[..., None]).transpose(2, 3), x)
        ridge = 1e-6 * (a.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-3)[..., None]
        a = a + torch.diag_embed(ridge.expand(*ridge.shape[:-1], self.n_parameters))
        found: Tensor = torch.linalg.solve(a, b + ridge * theta)
        return found

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Sum_ir gamma_ir (y_i - <x_i, theta_r>)^2.  [S, C]"""
        return (gamma * self._residuals(theta, data).square()).sum((2, 3))

    def scale_of(self, scatter: Tensor, n: float) -> Tensor:
        """One over the residuals' deviation."""
        if not self.has_scale:
            return self.unit_scale()
        return (scatter / max(n, 1.0)).clamp(min=1e-12).rsqrt()

    def _features(self, data: Block) -> Tensor:
        return torch.cat([data.x, data.real[..., None].to(data.x.dtype)], -1) if self.intercept else data.x

    def _residuals(self, theta: Tensor, data: Block) -> Tensor:
        """[S, C, N, R]"""
        return data.target[..., None] - torch.matmul(self._features(data), theta.transpose(-1, -2))


@dataclass(frozen=True)
class Custom:
    """Any family given by the log density of one row; gradients come from autograd.

    Parameters
    ----------
    log_p : callable
        (x [D], y [] or None, theta [P]) -> log density, a scalar, in torch operations.
    n_parameters : int
        P.
    first : callable
        (x [D], u [P]) -> first parameters, from a random row of the client and uniform random numbers.
    steps : int
        Gradient steps that stand for an exact M-step.
    """

    log_p: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    n_parameters: int
    first: Callable[[Tensor, Tensor], Tensor]
    steps: int = 20
    anneals = True
    has_scale = False

    def unit_scale(self) -> Tensor:
        """The density has its own."""
        return torch.ones((), dtype=torch.float64)

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """What `first` makes of random rows."""
        u = keys.uniform(key, n_components * (self.n_parameters + 1)).view(*key.shape, n_components, -1)
        real = data.real.to(torch.float64).expand(len(key), -1, -1)
        row = torch.stack([_drawn_row(real, u[..., r, 0]) for r in range(n_components)], -1)
        if not data.x.shape[1]:
            return torch.zeros(*u.shape[:3], self.n_parameters, dtype=torch.float64)
        x = data.x[torch.arange(len(data.n))[None, :, None], row]  # [S, C, R, D]
        made = torch.func.vmap(self.first)(x.flatten(0, 2), u[..., 1:].flatten(0, 2))
        return made.view(*u.shape[:3], self.n_parameters)

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """Every row of every client under every component of its own.  [S, C, N, R]"""
        with_y = None if data.y is None else 0
        components = torch.func.vmap(self.log_p, in_dims=(None, None, 0))
        rows = torch.func.vmap(components, in_dims=(0, with_y, None))
        clients = torch.func.vmap(rows, in_dims=(0, with_y, 0))
        return torch.stack([clients(data.x, data.y, own) for own in theta])

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block, clip: float) -> Tensor:
        """By autograd, gamma fixed; a row's gradient cannot be seen alone, so a client's is clipped."""
        weighted = gamma * data.weights[..., None]

        def objective(at: Tensor) -> Tensor:
            return (weighted * self.log_density(at, self.unit_scale(), data)).sum()

        found: Tensor = torch.func.grad(objective)(theta)
        if math.isfinite(clip):
            found = found * (clip / found.norm(dim=-1, keepdim=True).clamp(min=_TINY)).clamp(max=1.0)
        return found

    def curvature(self, data: Block) -> Tensor:
        """Unknown, taken as one: choose parameters of unit size, or lower c_eta."""
        return torch.ones(len(data.n), dtype=torch.float64)

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Some gradient steps, each as long as a component's weight allows."""
        share = torch.einsum("scnr,cn->scr", gamma, data.weights).clamp(min=1e-3)[..., None]
        for _ in range(self.steps):
            theta = theta + 0.5 * self.ascent(theta, gamma, data, math.inf) / share
        return theta

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Nothing."""
        return gamma.new_zeros(gamma.shape[:2])

    def scale_of(self, scatter: Tensor, n: float) -> Tensor:
        """The unit."""
        return self.unit_scale()
