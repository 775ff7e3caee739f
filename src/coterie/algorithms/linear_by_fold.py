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
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from coterie.algorithms.log_odds import LogOdds, projected
from coterie.algorithms.outcome_curves import Likelihood, PartialLikelihood
from coterie.algorithms.robust import LOSSES
from coterie.models import weighted
from coterie.models.outcomes import outcome_of
from coterie.protocol import Block, Limit, Tensors

__all__ = ["NOISE_ROWS", "Curves", "Problem", "Squares", "curves", "noise_level"]

_FEW_ROWS = 16  # of a client, over which its matrix of second derivatives is counted
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
    class_weights : tuple of float
        What a row of each class counts in training; () counts all alike. Held-out rows always do.
    outcome : str
        What the target is, where it is neither a plain number nor one of several classes; else "".
    deal : int
        Which deal of rows to folds this is: clients keep how they are served by each.
    """

    n_features: int
    n_classes: int
    n_folds: int
    held: tuple[int, ...]
    class_weights: tuple[float, ...] = ()
    outcome: str = ""
    deal: int = 0

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
        """How much rows count that are trained on, and those that are held out; the others are 0.  [F, C, N]"""
        return data.once(("masks", self), lambda: self._masks(data))

    def training(self, data: Block) -> Block:
        """The block without test rows, which no fit is trained on."""

        def made() -> Block | None:
            test = (data.folds == self.n_folds) & data.real
            return data.rows(~test) if bool(test.any()) else None

        return data.once(("training rows", self.n_folds), made) or data

    def _masks(self, data: Block) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor(self.held).view(-1, 1, 1)
        train = (data.folds != numbers) & (data.folds != self.n_folds)
        mass, held = train * data.mass, (data.folds == numbers) * data.mass
        return weighted(self.class_weights, data.target, mass) if self.class_weights else mass, held

    def scratch(self, models: int, second: int = 0) -> int:
        """Numbers that a pass holds for each row: of so many models in each fit, and of so many second derivatives.

        A client's matrices are by far fastest where those of a block stay in the cache.
        """
        fits, squares = len(self.held), 3 * self.n_parameters**2 // _FEW_ROWS
        if self.is_regression:
            return 2 * max(models, second) + fits * squares * second
        if self.is_stratified:
            return fits * (30 * models + (4 * self.n_features + squares) * second)
        if self.outcome:
            return fits * ((8 + self.n_extra) * models + ((1 + self.n_extra) ** 2 + squares) * second)
        pairs = self.n_outputs * (self.n_outputs + 1)
        return 3 * fits * (4 * max(self.n_classes, 2) * models + (pairs + squares) * second)


class Curves(Protocol):
    """Losses of C clients, of F fits with J models each. Regression: half the squared errors; else minus log-likelihood."""

    n: Tensor  # [F, 1, C] training rows
    n_held: Tensor  # [F, 1, C]

    def loss(self, theta: Tensor) -> Tensor:
        """Sum over training rows.  [F, J, C | 1, P] -> [F, J, C]"""

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, gradient and second derivatives on training rows.  -> [F, J, C], [F, J, C, P], [F, J | 1, C, P, P]"""

    def along(self, theta: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same along the columns of B [F, J, P, R].  -> [F, J, C], [F, J, C, R], [F, J, C, R, R]"""

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over held-out rows: the loss, and squared errors or rows predicted right.  -> [F, J, C] each"""


def curves(problem: Problem, private: Tensors, data: Block) -> tuple[Curves, Tensors]:
    """Look at a block of clients, and say what they keep of their rows."""
    if problem.outcome:
        return (PartialLikelihood if problem.is_stratified else Likelihood)(problem, data), {}
    if not problem.is_regression:
        return LogOdds(problem, data), {}
    products = private["products"]  # [C, V + 1, Q, Q]
    formed = not bool(((products[..., -2, -2].sum(1) == 0) & (data.n > 0)).any())
    products = products if formed else _products(problem, data)
    train = data.once(("training sums", problem.n_folds, problem.held), lambda: _training_sums(problem, products))
    return Squares(problem, products, train), {} if formed else {"products": products}


def noise_level(half_squares: Tensor, n: Tensor, common: Tensor) -> Tensor:
    """A client's noise variance: its own squared errors, and the common variance as if it had been seen in some rows."""
    return (NOISE_ROWS * common + 2 * half_squares) / (NOISE_ROWS + n)


class Squares:
    """Regression from sums of products, kept by fold: [C, V + 1, Q, Q] with Q = D + 2 (features, intercept, target)."""

    def __init__(self, problem: Problem, products: Tensor, train: "_Sums") -> None:
        self._parts, self._numbers, self.train = products, problem.held, train
        self.n, self.n_held = self.train.n, products[:, list(problem.held), -2, -2].T[:, None]

    def loss(self, theta: Tensor) -> Tensor:
        return self.train.loss(theta)

    def quadratic(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.train.loss_and_gradient(theta), self.train.a[:, None]

    def along(self, theta: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss, gradient, hessian = self.quadratic(theta)
        return loss, *projected(root, gradient, hessian)

    def held_out(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        loss = _Sums(torch.stack([self._parts[:, h] for h in self._numbers])).loss(theta)
        return loss, 2 * loss


def _training_sums(problem: Problem, products: Tensor) -> "_Sums":
    last = problem.n_folds
    every = products[:, :last].sum(1)
    return _Sums(torch.stack([every if h == last else every - products[:, h] for h in problem.held]))


class _Sums:
    """Half the squared errors of some rows, from sums of their products [F, C, Q, Q]: (t^T A t - 2 t^T b + y^T y) / 2."""

    def __init__(self, products: Tensor) -> None:
        self.a, self.b = products[..., :-1, :-1].contiguous(), products[..., :-1, -1].contiguous()
        self.squares, self.n = (
            products[:, None, :, at, at].clone() for at in (-1, -2)
        )  # [F, 1, C]: a view would keep all

    @cached_property
    def axes(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of second derivatives.  [F, C, P], [F, C, P, P]"""
        values, vectors = torch.linalg.eigh(self.a)
        return values.clamp(min=0), vectors

    def loss(self, theta: Tensor) -> Tensor:
        """[F, J, C | 1, P] -> [F, J, C]; of models that clients have in common, as one product for all clients."""
        if theta.shape[2] != 1 or self.a.shape[1] == 1:
            return self.loss_and_gradient(theta)[0]
        outer = (theta * theta.transpose(-2, -1)).flatten(2)  # [F, J, P P]
        twice = outer @ self.a.flatten(2).transpose(1, 2) - 2 * theta[:, :, 0] @ self.b.transpose(1, 2)
        return _half(twice + self.squares)

    def loss_and_gradient(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """[F, J, C | 1, P] -> [F, J, C], [F, J, C, P]"""
        gradient = (theta.transpose(1, 2) @ self.a).transpose(1, 2) - self.b[:, None]
        return _half(((gradient - self.b[:, None]) * theta).sum(-1) + self.squares), gradient


def _half(squares: Tensor) -> Tensor:
    """Rounding may not make them negative."""
    return 0.5 * squares.clamp(min=0.0)


def _products(problem: Problem, data: Block) -> Tensor:
    """Sums of products by fold.  [C, V + 1, Q, Q]"""
    z = torch.cat([data.x, torch.ones_like(data.x[..., :1]), data.target[..., None].to(data.x.dtype)], -1)
    z = z * data.real[..., None]
    z_t, fold = (z * data.mass[..., None]).transpose(1, 2), data.folds[..., None]
    return torch.stack([torch.bmm(z_t, z * (fold == number)) for number in range(problem.n_folds + 1)], 1)
