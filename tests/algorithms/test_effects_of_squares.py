# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import Tensor

from coterie.algorithms.effects_of_squares import Alike, Factored, effects_of_squares
from coterie.algorithms.linear_by_fold import Problem, Squares, curves
from coterie.protocol import Block

CLIENTS, ROWS, FEATURES, FITS = 5, 7, 4, 3
PROBLEM = Problem(FEATURES, 0, 2, (0, 1, 2))


def block() -> Block:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(CLIENTS, ROWS, *size, generator=draw, dtype=torch.float64) for size in ((FEATURES,), ()))
    fold = torch.arange(CLIENTS * ROWS).view(CLIENTS, ROWS) % 3
    ids = torch.arange(CLIENTS)
    return Block(ids, ids, x, y, torch.full((CLIENTS,), ROWS), None, fold)


def squares(data: Block) -> Squares:
    at, _ = curves(PROBLEM, {"products": PROBLEM.fresh["products"].expand(CLIENTS, -1, -1, -1)}, data)
    assert isinstance(at, Squares)
    return at


def prior(*diagonals: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """A mean, and roots with one number for weights and one for the intercept.  [F, J, P], [F, J, P, P]"""
    root = torch.stack([torch.diag(torch.tensor([a] * FEATURES + [b], dtype=torch.float64)) for a, b in diagonals])
    mean = torch.linspace(-1, 1, FITS * len(diagonals) * (FEATURES + 1), dtype=torch.float64)
    return mean.view(FITS, len(diagonals), -1), root.expand(FITS, -1, -1, -1)


NOISE = torch.linspace(0.3, 2.0, FITS * 2 * CLIENTS, dtype=torch.float64).view(FITS, 2, CLIENTS)


@pytest.mark.parametrize("kind", [Factored, Alike])
def test_effects_are_those_of_ridge_regression_around_the_mean(kind: type[Factored] | type[Alike]) -> None:
    data = block()
    at, (mean, root) = squares(data), prior((0.2, 10.0), (3.0, 0.5))
    found = kind(at, mean, root)
    for noise in (torch.ones_like(NOISE), NOISE):  # what is settled again does not depend on what was before
        found.settle(noise)
    f, j, c = 1, 1, 2  # the fit without rows of fold 1
    rows = data.folds[c] == 0
    x = torch.cat([data.x[c], torch.ones(ROWS, 1, dtype=torch.float64)], 1)[rows]
    y, b, s = data.target[c][rows], root[f, j], NOISE[f, j, c]
    precision = b.T @ x.T @ x @ b / s + torch.eye(FEATURES + 1, dtype=torch.float64)
    v = torch.linalg.solve(precision, b.T @ x.T @ (y - x @ mean[f, j]) / s)
    torch.testing.assert_close(found.v[f, j, c], v)
    torch.testing.assert_close(found.covariance[f, j, c], precision.inverse())
    torch.testing.assert_close(found.variance[f, j, c], precision.inverse().diagonal())
    torch.testing.assert_close(found.projected[f, j, c], b.T @ x.T @ x @ b)
    torch.testing.assert_close(found.freedom[f, j, c], (x @ b @ precision.inverse() @ b.T @ x.T / s).trace())
    torch.testing.assert_close(found.loss[f, j, c], 0.5 * (y - x @ (mean[f, j] + b @ v)).square().sum())


def test_axes_serve_where_weights_vary_alike_only() -> None:
    at = squares(block())
    mean, root = prior((0.2, 10.0))
    assert isinstance(effects_of_squares(at, mean, root), Alike)
    for place in ((0, 0, 1, 1), (0, 0, 1, 0)):  # one weight varies more, and two together
        other = root.clone()
        other[place] = 0.7
        assert isinstance(effects_of_squares(at, mean, other), Factored)
    only_intercepts = prior((0.0, 1.0))[1]
    assert isinstance(effects_of_squares(at, mean, only_intercepts), Factored)


def test_loss_of_common_models_is_that_of_the_same_models_as_clients_own() -> None:
    at = squares(block())
    theta = torch.linspace(-2, 2, FITS * 4 * (FEATURES + 1), dtype=torch.float64).view(FITS, 4, 1, -1)
    torch.testing.assert_close(at.loss(theta), at.loss(theta.expand(-1, -1, CLIENTS, -1)))
    for common, own in zip(at.held_out(theta), at.held_out(theta.expand(-1, -1, CLIENTS, -1)), strict=True):
        torch.testing.assert_close(common, own)
