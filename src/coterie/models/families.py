# SPDX-License-Identifier: Apache-2.0
"""What a mixture is made of: the contract of component families, the E-step, and families given by a density alone.

Densities are only ever combined as logarithms, so that a row far from every component keeps finite responsibilities.
Gradients are those of the log density times the component's variance: a step of size 1 / weight is then a whole M-step of a
Gaussian mixture, whatever the units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie import keys
from coterie.protocol import Block, Tensors

__all__ = [
    "Custom",
    "Family",
    "drawn_row",
    "drawn_rows",
    "expect",
    "gradient_step",
    "products",
    "shares",
    "sums",
    "typical_length",
]

_FLAT = 1e-7  # slopes up to this, relative to the parameters, are none
_TINY = 1e-12  # weight that a component keeps at least, so that its logarithm exists
_FAR = 1e4  # where estimates stay that steps of any length have led away, as in the code of FedGrEM's authors
_LOWEST = -1e300  # log density of a row that is infinitely far from everything


class Family(Protocol):
    """Components of one kind. S runs, C clients, N rows, R components, P parameters of each, Q sums that an M-step needs.

    A scale is what components share: a covariance, a noise variance. It has an axis of runs and one of clients, [S, C, ...];
    where it is common to all clients, the latter is 1.
    """

    @property
    def n_parameters(self) -> int:
        """P."""

    @property
    def has_scale(self) -> bool:
        """Whether a scale is estimated."""

    @property
    def n_scale(self) -> int:
        """How many numbers are estimated for the scale."""

    @property
    def anneals(self) -> bool:
        """Whether starts are random and EM begins with blurred densities; else k-means does well."""

    @property
    def has_moments(self) -> bool:
        """Whether the M-step has a closed form in sums over rows."""

    def unit_scale(self) -> Tensor:
        """The scale that means variance one."""

    def coordinates(self, theta: Tensor, scale: Tensor) -> Tensor:
        """Parameters in units of the scale, in which lengths mean something.  [..., R, P], [..., scale] -> [..., R, P]"""

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """Random first parameters of every client.  key [S, C] -> [S, C, R, P]"""

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """Every row under every component.  theta [S, C | 1, R, P] -> [S, C, N, R]"""

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """(1/n) sum_i gamma_ir (d log p / d theta_r) times the variance.  gamma [S, C, N, R] -> [S, C, R, P]"""

    def curvature(self, direction: Tensor, slope: Tensor, gamma: Tensor, data: Block) -> tuple[Tensor, Tensor]:
        """How much the objective bends, and a direction in which it bends more than in the given one.

        It is the most that is known: no less than along the slope, so that a step of one over it is never too long.
        -> [S, C, R], [S, C, R, P]
        """

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """The exact M-step; a component without rows keeps its theta.  -> [S, C, R, P]"""

    def moments(self, gamma: Tensor, data: Block) -> Tensor:
        """Sums over rows that the M-step needs.  -> [S, C, R, Q]"""

    def solved(self, moments: Tensor, theta: Tensor) -> Tensor:
        """The M-step from moments; a component without rows keeps its theta.  [..., R, Q] -> [..., R, P]"""

    def slope(self, moments: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Ascent and curvature from moments, not yet divided by the rows.  -> [..., R, P], [..., R]"""

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Sum over rows of what the scale is made of, given gamma.  -> [S, C, ...]"""

    def scale_of(self, scatter: Tensor, n: Tensor) -> Tensor:
        """The scale, from sums of scatters over n rows.  [..., scatter], [...] -> [..., scale]"""


def expect(log_density: Tensor, weights: Tensor, data: Block) -> tuple[Tensor, Tensor]:
    """E-step: responsibilities, zero on padding, and every client's mean log-likelihood.  -> [S, C, N, R], [S, C]

    Parameters
    ----------
    log_density : Tensor
        [S, C, N, R]
    weights : Tensor
        [S, C | 1, R] mixture proportions.
    """
    joint = log_density.nan_to_num(nan=_LOWEST, neginf=_LOWEST).add_(weights.clamp(min=_TINY).log()[:, :, None])
    top = joint.amax(-1, keepdim=True)
    gamma = (joint - top).exp_()
    total = gamma.sum(-1, keepdim=True)
    likelihood = torch.einsum("scn,cn->sc", (top + total.log())[..., 0], data.weights)
    gamma.div_(total)
    return (gamma if data.mask is None else gamma.mul_(data.real[..., None])), likelihood


def products(x: Tensor, theta: Tensor) -> Tensor:
    """Every row times every component.  [C, N, P], [S, C | 1, R, P] -> [S, C, N, R]

    By einsum, which multiplies a client's rows once for all runs; matmul copies them for each.
    """
    return torch.einsum("cnp,scrp->scnr", x, theta.expand(-1, len(x), -1, -1))


def sums(gamma: Tensor, x: Tensor) -> Tensor:
    """Sum of rows by responsibility.  [S, C, N, R], [C, N, Q] -> [S, C, R, Q]"""
    return torch.einsum("scnr,cnq->scrq", gamma, x)


def shares(gamma: Tensor, data: Block) -> Tensor:
    """Mean responsibilities: new mixture proportions, zero for who has no rows.  [S, C, N, R] -> [S, C, R]"""
    return gamma.sum(2) / data.n.clamp(min=1).to(gamma.dtype)[:, None]


def typical_length(theta: Tensor, scale: Tensor, family: Family) -> float:
    """Mean length of components, in units of the scale, and at least 1: what moves are compared with.  theta [R, P]"""
    return float(family.coordinates(theta, scale).norm(dim=-1).mean().clamp(min=1.0, max=1e150))


def gradient_step(
    family: Family,
    theta: Tensor,
    gamma: Tensor,
    data: Block,
    private: Tensors,
    c_eta: Tensor,
    *,
    capped: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Step along the gradient: c_eta over a component's first weight, and never more than c_eta of the best step.

    That step is the best where the objective bends most; one that suits the gradient's own direction alone would swing for
    ever where estimates are drawn to a centre after each.

    Parameters
    ----------
    theta, gamma : Tensor
        [S, C, R, P], [S, C, N, R]
    private : Tensors
        first_weights [S, C, R], proportions at the start; along [S, C, R, P], where the objective bent most, or zero.
    c_eta : Tensor
        [S]
    capped : bool
        Whether a step is never more than c_eta of the best one.

    Returns
    -------
    theta, along : Tensor
        [S, C, R, P]
    length : Tensor
        [S, C, R] of the step, in units of the gradient.
    """
    slope = family.ascent(theta, gamma, data)
    if not capped:
        length = c_eta[:, None, None] / private["first_weights"].clamp(min=1e-9)
        return (theta + length[..., None] * slope).nan_to_num(nan=0.0).clamp(-_FAR, _FAR), private["along"], length
    known = (private["along"] != 0).any(-1, keepdim=True)
    flat = slope.norm(dim=-1, keepdim=True) <= _FLAT * (1 + theta.norm(dim=-1, keepdim=True))
    steep = torch.where(flat, 0.0, slope)  # what is left of a slope by rounding has no direction
    curvature, along = family.curvature(torch.where(known, private["along"], 1.0), steep, gamma, data)
    length = c_eta[:, None, None] / torch.maximum(private["first_weights"], curvature).clamp(min=1e-9)
    return theta + length[..., None] * slope, along, length


def drawn_row(weight: Tensor, u: Tensor) -> Tensor:
    """Draw a row with probability proportional to its weight.  weight [S, C, N], u [S, C] in [0, 1) -> [S, C]"""
    total = weight.cumsum(-1)
    at = torch.searchsorted(total, (u * total[..., -1])[..., None], right=True).squeeze(-1)
    return at.clamp(max=weight.shape[-1] - 1)


def drawn_rows(n: int, data: Block, u: Tensor) -> Tensor:
    """Draw n rows of every client; who has none draws zeros.  u [S, C, n] -> [S, C, n, D]"""
    if not data.x.shape[1]:
        return torch.zeros(*u.shape, data.x.shape[2], dtype=data.x.dtype)
    real = data.real.to(torch.float64).expand(len(u), -1, -1)
    row = torch.stack([drawn_row(real, u[..., r]) for r in range(n)], -1)
    return data.x[torch.arange(len(data.n))[None, :, None], row]


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
    has_moments = False
    n_scale = 0

    def unit_scale(self) -> Tensor:
        """The density has its own."""
        return torch.ones((), dtype=torch.float64)

    def coordinates(self, theta: Tensor, scale: Tensor) -> Tensor:
        """The parameters themselves."""
        return theta

    def draw(self, n_components: int, scale: Tensor, data: Block, key: Tensor) -> Tensor:
        """What `first` makes of random rows."""
        u = keys.uniform(key, n_components * (self.n_parameters + 1)).view(*key.shape, n_components, -1)
        x = drawn_rows(n_components, data, u[..., 0])  # [S, C, R, D]
        made = torch.func.vmap(self.first)(x.flatten(0, 2), u[..., 1:].flatten(0, 2))
        return made.view(*u.shape[:3], self.n_parameters)

    def log_density(self, theta: Tensor, scale: Tensor, data: Block) -> Tensor:
        """Every row of every client under every component of its own.  [S, C, N, R]"""
        return self._every(self.log_p, theta, data)

    def ascent(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """By autograd, gamma fixed."""
        weighted = gamma * data.weights[..., None]

        def objective(at: Tensor) -> Tensor:
            density = self.log_density(at, self.unit_scale(), data)
            return torch.where(weighted > 0, weighted * density, 0.0).sum()

        found: Tensor = torch.func.grad(objective)(theta).nan_to_num(nan=0.0)
        return found

    def _every(self, function: Callable[..., Tensor], theta: Tensor, data: Block) -> Tensor:
        """A function of (x, y, theta), for every row and component of every client and run.  [S, C, N, R, ...]"""
        with_y = None if data.y is None else 0
        components = torch.func.vmap(function, in_dims=(None, None, 0))
        rows = torch.func.vmap(components, in_dims=(0, with_y, None))
        clients = torch.func.vmap(rows, in_dims=(0, with_y, 0))
        return torch.stack([clients(data.x, data.y, each) for each in theta.expand(-1, len(data.n), -1, -1)])

    def curvature(self, direction: Tensor, slope: Tensor, gamma: Tensor, data: Block) -> tuple[Tensor, Tensor]:
        """Unknown, taken as a Gaussian's: choose parameters of unit size, or lower c_eta."""
        return shares(gamma, data), direction

    def maximise(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Some gradient steps, each as long as a component's weight allows."""
        share = shares(gamma, data).clamp(min=1e-3)[..., None]
        for _ in range(self.steps):
            theta = theta + 0.5 * self.ascent(theta, gamma, data) / share
        return theta

    def moments(self, gamma: Tensor, data: Block) -> Tensor:
        """There are none: see `has_moments`."""
        return gamma.new_zeros(*gamma.shape[:2], gamma.shape[3], 0)

    def solved(self, moments: Tensor, theta: Tensor) -> Tensor:
        """Nothing is known without rows."""
        return theta

    def slope(self, moments: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing is known without rows."""
        return torch.zeros_like(theta), torch.zeros_like(theta[..., 0])

    def scatter(self, theta: Tensor, gamma: Tensor, data: Block) -> Tensor:
        """Nothing."""
        return gamma.new_zeros(gamma.shape[:2])

    def scale_of(self, scatter: Tensor, n: Tensor) -> Tensor:
        """The unit."""
        return self.unit_scale().expand(scatter.shape)
