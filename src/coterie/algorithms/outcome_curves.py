# SPDX-License-Identifier: Apache-2.0
"""Losses by fold of outcomes that are neither numbers nor classes, with their derivatives: see `linear_by_fold.py`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.algorithms.log_odds import projected, with_intercept
from coterie.models.cox import Risk, concordance
from coterie.models.outcomes import ROWS, RowOutcome
from coterie.protocol import Block

if TYPE_CHECKING:
    from coterie.algorithms.linear_by_fold import Problem

__all__ = ["Likelihood", "PartialLikelihood"]

_LEAST_BEND = 0.1  # of its squared slope: what the curvature of an extra parameter is at least, for every client


class Likelihood:
    """Other outcomes: every pass looks at the rows. Weights and intercept make eta; extra parameters are as they are."""

    def __init__(self, problem: "Problem", data: Block) -> None:
        self.problem, self.data = problem, data
        self.x = data.once("features and intercept", lambda: with_intercept(data))  # [C, N, D + 1]
        self.y = data.target
        self.train, self.held = problem.masks(data)
        self.n, self.n_held = self.train.sum(-1)[:, None], self.held.sum(-1)[:, None]

    @property
    def _outcome(self) -> RowOutcome:
        return ROWS[self.problem.outcome]

    def loss(self, theta: Tensor) -> Tensor:
        return self._sum(self._outcome.loss(self._outputs(theta), self.y), self.train)

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self._outputs(theta)  # [F, J, C, N, 1 + Q]
        mask = self.train[:, None, ..., None]
        first = self._outcome.first(outputs, self.y) * mask
        second = self._outcome.second(outputs, self.y) * mask[..., None]
        by_features = torch.einsum("fjcno,cnd->fjcod", first[..., :1], self.x).flatten(-2)
        gradient = torch.cat([by_features, first[..., 1:].sum(3)], -1)
        return (
            self._sum(self._outcome.loss(outputs, self.y), self.train),
            gradient,
            self._hessian(first, second),
        )

    def along(self, theta: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, gradient, hessian = self.quadratic(theta)
        return loss, *projected(root, gradient, hessian)

    def _hessian(self, first: Tensor, second: Tensor) -> Tensor:
        """Of weights and intercept, mixed, and of extra parameters.  [F, J, C, N, 1 + Q, 1 + Q] -> [F, J, C, P, P]"""
        size = self.x.shape[-1]
        d, e = torch.triu_indices(size, size)
        pairs = self.data.once("pairs of features", lambda: self.x[..., d] * self.x[..., e])
        packed = torch.einsum("fjcn,cnp->fjcp", second[..., 0, 0], pairs)
        made = packed.new_zeros(*packed.shape[:-1], self.problem.n_parameters, self.problem.n_parameters)
        made[..., d, e] = packed
        made[..., e, d] = packed
        if self.problem.n_extra:
            mixed = torch.einsum("fjcnq,cnd->fjcdq", second[..., 0, 1:], self.x)
            made[..., :size, size:] = mixed
            made[..., size:, :size] = mixed.transpose(-2, -1)
            extra = second[..., 1:, 1:].sum(3)
            if self.problem.n_extra == 1:  # a dispersion's may be negative, far from where it belongs
                extra = torch.maximum(extra, _LEAST_BEND * first[..., 1:, None].square().sum(3))
            made[..., size:, size:] = extra
        return made

    def spread_slope(self, theta: Tensor, covariance: Tensor) -> Tensor:
        """How the loss changes with extra parameters since weights are known up to a covariance only.

        [F, J, C, P], [F, J, C, P, P] -> [F, J, C, Q]
        """
        size = self.x.shape[-1]
        unsure = torch.einsum("cnd,fjcde,cne->fjcn", self.x, covariance[..., :size, :size], self.x)
        stiffer = self._outcome.stiffening(self._outputs(theta), self.y)
        return 0.5 * torch.einsum("fjcnq,fjcn,fcn->fjcq", stiffer, unsure, self.train)

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self._outputs(theta)
        values = self._outcome.loss(outputs, self.y), self._outcome.hit(outputs, self.y)
        return self._sum(values[0], self.held), self._sum(values[1], self.held)

    def least(self, theta: Tensor) -> Tensor:
        """The loss of held-out rows that are predicted exactly.  [F, J, C, P] -> [F, J, C]"""
        return self._sum(self._outcome.least(self._outputs(theta), self.y), self.held)

    def _outputs(self, theta: Tensor) -> Tensor:
        """[F, J, C | 1, P] -> [F, J, C, N, 1 + Q]"""
        size = self.x.shape[-1]
        theta = theta.expand(-1, -1, len(self.x), -1)
        eta = torch.einsum("cnd,fjcd->fjcn", self.x, theta[..., :size])[..., None]
        if not self.problem.n_extra:
            return eta
        return torch.cat([eta, theta[..., None, size:].expand(*eta.shape[:-1], -1)], -1)

    def _sum(self, values: Tensor, mask: Tensor) -> Tensor:
        return torch.einsum("fjcn,fcn->fjc", values, mask)


class PartialLikelihood(Likelihood):
    """Times to an event: rows are compared with those of the same client that are still at risk."""

    def __init__(self, problem: "Problem", data: Block) -> None:
        super().__init__(problem, data)
        self.x = torch.cat([data.x, torch.zeros_like(data.x[..., :1])], -1)  # the baseline has the intercept

    def loss(self, theta: Tensor) -> Tensor:
        return self._risk(self._outputs(theta)[..., 0], self.train).losses.sum(-1)

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        risk = self._risk(self._outputs(theta)[..., 0], self.train)
        gradient = torch.einsum("fjcn,cnd->fjcd", risk.hazards - risk.events, self.x)
        return risk.losses.sum(-1), gradient, risk.hessian(self.x)

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """By how much held-out rows change the partial likelihood, beside training rows (Verweij, van Houwelingen, 1993)."""
        eta = self._outputs(theta)[..., 0]
        found = concordance(eta, self.y, self.held[:, None])
        return self._added(eta), found * self.n_held

    def least(self, theta: Tensor) -> Tensor:
        return self._added(torch.zeros_like(self._outputs(theta)[..., 0]))

    def _added(self, eta: Tensor) -> Tensor:
        every, before = (self._risk(eta, mask).losses.sum(-1) for mask in (self.train + self.held, self.train))
        return every - before

    def _risk(self, eta: Tensor, mask: Tensor) -> Risk:
        return Risk(eta, self.y, mask[:, None], self.problem.outcome == "cox")
