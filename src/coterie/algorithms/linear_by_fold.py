# SPDX-License-Identifier: Apache-2.0
"""Linear models by fold: a client's loss on its training rows and on its held-out rows, in several fits at once.

Every row has the number of a fold (`Block.fold`). There is one fit for every fold, on the rows of all the others, and a last
one on all of them: that one is judged by test rows, whose number is `n_folds` and which nobody trains on. So the F =
n_folds + 1 fits share every pass over the rows, and no fit sees what it is judged by.

Models are linear: regression, log odds (two classes), one output for every class, or the linear predictor of another
outcome (`models/outcomes.py`), whose extra parameters follow the weights and the intercept. For regression, sums of products
by fold are all that is needed of the rows; clients form them when they are first asked, and keep them as private state.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie.algorithms.outcome_curves import Likelihood, PartialLikelihood
from coterie.algorithms.robust import LOSSES
from coterie.models.outcomes import outcome_of
from coterie.protocol import Block, Limit, Tensors

__all__ = ["NOISE_ROWS", "Curves", "Problem", "curves", "noise_level"]

NOISE_ROWS = 10.0  # a client's own noise variance counts as if the common one had been seen in so many rows


@dataclass(frozen=True)
class Problem:
    """A linear model, and which rows are held out in turn.

    Attributes
    ----------
    n_features : int
        D.
    n_classes : int
        0 for regression; 1 where there is no target, and nothing linear to fit.
    n_folds : int
        V. Rows with this number are never trained on.
    held : tuple of int
        Numbers of the rows that are held out of the F fits.
    outcome : str
        What the target is, where it is neither a plain number nor one of several classes; else "".
    """

    n_features: int
    n_classes: int
    n_folds: int
    held: tuple[int, ...]
    outcome: str = ""

    @property
    def n_outputs(self) -> int:
        """One for regression, for two classes and for other outcomes."""
        return self.n_classes if self.n_classes > 2 and not self.outcome else 1

    @property
    def n_extra(self) -> int:
        """Q: parameters beside weights and intercepts, which clients have in common."""
        return outcome_of(self.outcome).n_extra(self.n_classes) if self.outcome else 0

    @property
    def n_parameters(self) -> int:
        """P: weights and intercept of every output, and extra ones."""
        return self.n_outputs * (self.n_features + 1) + self.n_extra

    @property
    def is_regression(self) -> bool:
        """Whether there is noise to estimate."""
        return self.n_classes == 0 and not self.outcome

    @property
    def is_number(self) -> bool:
        """Whether predictions are numbers, with squared errors."""
        return self.is_regression or (bool(self.outcome) and outcome_of(self.outcome).metric == "rmse")

    @property
    def is_stratified(self) -> bool:
        """Whether every client has a baseline of its own, so that intercepts mean nothing."""
        return bool(self.outcome) and outcome_of(self.outcome).metric == "concordance"

    @property
    def slopes(self) -> Tensor:
        """[P] 1 for weights and 0 for intercepts and extra parameters, which nobody penalises."""
        one = torch.ones(self.n_features + 1, dtype=torch.float64)
        one[-1] = 0.0
        return torch.cat([one.repeat(self.n_outputs), one.new_zeros(self.n_extra)])

    @property
    def own(self) -> Tensor:
        """[P] 1 for what clients may have of their own: all but extra parameters."""
        one = torch.ones(self.n_parameters, dtype=torch.float64)
        one[self.n_parameters - self.n_extra :] = 0.0
        return one

    @property
    def losses(self) -> Limit:
        """What a client's loss may be: densities may be above 1, so that minus their logarithms are below 0."""
        return Limit() if self.outcome else LOSSES

    @property
    def fresh(self) -> Tensors:
        """What clients keep: for regression, sums of products by fold."""
        if not self.is_regression:
            return {}
        size = self.n_features + 2
        return {"products": torch.zeros(self.n_folds + 1, size, size, dtype=torch.float64)}

    def masks(self, data: Block) -> tuple[Tensor, Tensor]:
        """Which rows are trained on, and which are held out.  [F, C, N]"""
        numbers = torch.tensor(self.held).view(-1, 1, 1)
        train = (data.folds != numbers) & (data.folds != self.n_folds) & data.real
        return train.to(data.x.dtype), ((data.folds == numbers) & data.real).to(data.x.dtype)

    @property
    def scratch(self) -> int:
        """Numbers that a pass over the rows holds for each row and fit."""
        if self.is_regression:
            return 2
        if self.is_stratified:
            return len(self.held) * (30 + 4 * self.n_features)
        if self.outcome:
            return len(self.held) * (8 + (1 + self.n_extra) ** 2)
        return len(self.held) * (3 * max(self.n_classes, 2) + self.n_outputs**2)


class Curves(Protocol):
    """Losses of C clients, of F fits with J models each. Regression: half the squared errors; else minus log-likelihood."""

    n: Tensor  # [F, 1, C] training rows
    n_held: Tensor  # [F, 1, C]

    def loss(self, theta: Tensor) -> Tensor:
        """Sum over training rows.  [F, J, C | 1, P] -> [F, J, C]"""

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and second derivatives on training rows.  -> [F, J, C], [F, J, C, P], [F, J | 1, C, P, P]"""

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over held-out rows: the loss, and squared errors or rows predicted right.  -> [F, J, C] each"""


def curves(problem: Problem, private: Tensors, data: Block) -> tuple[Curves, Tensors]:
    """Look at a block of clients, and say what they keep of their rows."""
    if problem.outcome:
        return (PartialLikelihood if problem.is_stratified else Likelihood)(problem, data), {}
    if not problem.is_regression:
        return _LogOdds(problem, data), {}
    products = private["products"]  # [C, V + 1, Q, Q]
    if bool(((products[..., -2, -2].sum(1) == 0) & (data.n > 0)).any()):  # not formed yet
        products = _products(problem, data)
    return _Squares(problem, products), {"products": products}


def noise_level(half_squares: Tensor, n: Tensor, common: Tensor) -> Tensor:
    """A client's noise variance: its own squared errors, and the common variance as if it had been seen in some rows."""
    return (NOISE_ROWS * common + 2 * half_squares) / (NOISE_ROWS + n)


class _Squares:
    """Regression from sums of products, kept by fold: [C, V + 1, Q, Q] with Q = D + 2 (features, intercept, target)."""

    def __init__(self, problem: Problem, products: Tensor) -> None:
        last = problem.n_folds
        every = products[:, :last].sum(1, keepdim=True)
        held = products[:, list(problem.held)]
        judged_by_test = torch.tensor([h == last for h in problem.held]).view(1, -1, 1, 1)
        train = torch.where(judged_by_test, every, every - held)
        self.train, self.held = train.transpose(0, 1), held.transpose(0, 1)  # [F, C, Q, Q]
        self.n, self.n_held = self.train[:, None, :, -2, -2], self.held[:, None, :, -2, -2]

    def loss(self, theta: Tensor) -> Tensor:
        return 0.5 * _squared_errors(self.train, theta)

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.train[..., :-1, :-1], self.train[..., :-1, -1]
        gradient = torch.einsum("fcpq,fjcq->fjcp", a, theta.expand(-1, -1, a.shape[1], -1)) - b[:, None]
        return self.loss(theta), gradient, a[:, None]

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        squares = _squared_errors(self.held, theta)
        return 0.5 * squares, squares


def _squared_errors(products: Tensor, theta: Tensor) -> Tensor:
    """[F, C, Q, Q], [F, J, C | 1, Q - 1] -> [F, J, C]; rounding may not make them negative."""
    theta = theta.expand(-1, -1, products.shape[1], -1)
    residual = torch.cat([theta, -torch.ones_like(theta[..., :1])], -1)
    return torch.einsum("fjcp,fcpq,fjcq->fjc", residual, products, residual).clamp(min=0.0)


class _LogOdds:
    """Classification: every pass looks at the rows."""

    def __init__(self, problem: Problem, data: Block) -> None:
        self.problem, self.data = problem, data
        self.x = torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1)  # [C, N, D + 1]
        self.y = data.target
        self.train, self.held = problem.masks(data)
        self.n, self.n_held = self.train.sum(-1)[:, None], self.held.sum(-1)[:, None]

    def loss(self, theta: Tensor) -> Tensor:
        return -self._sum(self._log_p(theta), self.train)

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p = self._log_p(theta)  # [F, J, C, N, K]
        first = log_p.shape[-1] - self.problem.n_outputs  # of two classes the first has log odds 0
        p = log_p.exp()[..., first:]
        there = torch.nn.functional.one_hot(self.y, log_p.shape[-1])[..., first:].to(p.dtype)
        mask = self.train[:, None, ..., None]
        gradient = torch.einsum("fjcno,cnd->fjcod", (p - there) * mask, self.x).flatten(-2)
        return -self._sum(log_p, self.train), gradient, self._hessian(p * mask, p)

    def _hessian(self, weighted: Tensor, p: Tensor) -> Tensor:
        """Sum over rows of (diag(p) - p p^T) x x^T, from pairs of outputs and pairs of features.  -> [F, J, C, P, P]"""
        outputs, size = p.shape[-1], self.x.shape[-1]
        o, q = torch.triu_indices(outputs, outputs)
        hessian = (
            torch.where(o == q, weighted[..., o], 0.0) - weighted[..., o] * p[..., q]
        )  # [F, J, C, N, O (O + 1) / 2]
        d, e = torch.triu_indices(size, size)
        pairs = self.data.once("pairs of features", lambda: self.x[..., d] * self.x[..., e])
        flat = hessian.permute(2, 0, 1, 4, 3).flatten(1, 3) @ pairs  # [C, F J O.., D..]
        packed = flat.view(len(flat), *p.shape[:2], len(o), len(d)).movedim(0, 2)  # [F, J, C, O.., D..]
        half = packed.new_empty(*packed.shape[:-1], size, size)
        half[..., d, e] = packed
        half[..., e, d] = packed
        full = half.new_empty(*half.shape[:3], outputs, size, outputs, size)
        full[..., o, :, q, :] = half.movedim(3, 0)
        full[..., q, :, o, :] = half.movedim(3, 0)
        out: Tensor = full.flatten(-2).flatten(-3, -2)
        return out

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        log_p = self._log_p(theta)
        right = (log_p.argmax(-1) == self.y).to(log_p.dtype)
        return -self._sum(log_p, self.held), torch.einsum("fjcn,fcn->fjc", right, self.held)

    def _log_p(self, theta: Tensor) -> Tensor:
        """Log probability of every class.  [F, J, C | 1, P] -> [F, J, C, N, K]"""
        weights = theta.reshape(*theta.shape[:-1], self.problem.n_outputs, -1).expand(-1, -1, len(self.x), -1, -1)
        scores = torch.einsum("cnd,fjcod->fjcno", self.x, weights)
        if self.problem.n_outputs == 1:
            scores = torch.cat([torch.zeros_like(scores), scores], -1)
        return scores.log_softmax(-1)

    def _sum(self, log_p: Tensor, mask: Tensor) -> Tensor:
        index = self.y.expand(log_p.shape[:-1])[..., None]
        return torch.einsum("fjcn,fcn->fjc", log_p.gather(-1, index)[..., 0], mask)


def _products(problem: Problem, data: Block) -> Tensor:
    """Sums of products by fold.  [C, V + 1, Q, Q]"""
    z = torch.cat([data.x, torch.ones_like(data.x[..., :1]), data.target[..., None].to(data.x.dtype)], -1)
    z = z * data.real[..., None]
    z_t, fold = z.transpose(1, 2), data.folds[..., None]
    return torch.stack([torch.bmm(z_t, z * (fold == number)) for number in range(problem.n_folds + 1)], 1)
