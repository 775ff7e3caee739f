# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Curves, Problem, curves
from coterie.data.draws import First
from coterie.data.ragged import Ragged
from helpers import federation, ragged

V = 3
HELD = tuple(range(V + 1))


def looked_at(rows: Ragged, problem: Problem) -> tuple[Curves, Tensor, Tensor, Tensor]:
    """The clients' curves, and their features, targets and folds as they are, one block."""
    (block,) = rows.blocks(budget=1 << 40)
    at, _ = curves(problem, {name: v.expand(len(block.n), *v.shape) for name, v in problem.fresh.items()}, block)
    return at, block.x, block.target, block.folds


def some_rows(n_classes: int = 0) -> Ragged:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, 14, 2, generator=draw, dtype=torch.float64)
    fold = torch.randint(0, V + 1, (3, 14), generator=draw)
    y = torch.randint(0, max(n_classes, 1), (3, 14), generator=draw)
    rows = Ragged.from_blocks(x, y if n_classes else x.sum(-1) + 0.1 * fold**2)
    return replace(rows, fold=fold.flatten())


def test_every_row_is_held_out_once_and_test_rows_are_never_trained_on() -> None:
    made = federation((8, 5, 1), seed=2)
    train, test = made.rows.split(0.3, seed=0)
    both = train.with_folds(V, seed=0, test=test)
    assert both.counts.tolist() == made.rows.counts.tolist()
    for client in range(3):
        block = both.client(client)
        x, fold = block.x[0], block.folds[0]
        n_train = int(train.counts[client])
        assert int((fold == V).sum()) == int(test.counts[client])
        sizes = torch.bincount(fold[fold < V], minlength=V)
        assert int(sizes.sum()) == n_train
        assert int(sizes.max() - sizes.min()) <= 1
        held = {tuple(row.tolist()) for row in test.client(client).x[0]}
        assert {tuple(row.tolist()) for row in x[fold == V]} == held


def test_folds_depend_on_a_clients_name_and_not_on_the_others() -> None:
    made = federation((9, 7), seed=2)
    alone = ragged([made.xs[0]], [made.ys[0]], ["site-000"])
    both = made.rows.with_folds(V, seed=4)
    assert torch.equal(alone.with_folds(V, seed=4).client(0).folds, both.client(0).folds)
    assert not torch.equal(alone.with_folds(V, seed=5).client(0).folds, both.client(0).folds)


def test_new_clients_show_a_few_rows() -> None:
    rows = federation((9, 3), seed=2).rows
    query, support = rows.divide(First(5), seed=0, purpose="few shots")
    assert support.counts.tolist() == [5, 3]
    assert query.counts.tolist() == [4, 0]
    shown = support.with_folds(1, seed=0, test=query)  # the last fit learns from fold 0, and is judged by number 1
    assert [shown.client(i).folds[0].sort().values.tolist() for i in range(2)] == [5 * [0] + 4 * [1], 3 * [0]]
    assert torch.equal(shown.client(0).x[0][shown.client(0).folds[0] == 1], query.client(0).x[0])


def test_rows_fold_by_fold_are_those_that_are_held_out() -> None:
    rows = federation((9, 4, 7), seed=2).rows
    numbered = rows.with_folds(V, seed=1)
    for fold, (part, held) in enumerate(rows.fold_by_fold(V, seed=1)):
        for client in range(3):
            x, own = numbered.client(client).x[0], numbered.client(client).folds[0]
            assert torch.equal(held.client(client).x[0], x[own == fold])
            assert torch.equal(part.client(client).x[0], x[own != fold])


def test_thinning_keeps_at_most_so_many_rows() -> None:
    rows = federation((9, 4, 7), seed=2).rows
    few = rows.thinned(5, seed=0)
    assert few.counts.tolist() == [5, 4, 5]
    assert rows.thinned(9, seed=0) is rows
    mine = {tuple(row.tolist()) for row in rows.client(0).x[0]}
    assert {tuple(row.tolist()) for row in few.client(0).x[0]} < mine


def test_regression_from_products_is_regression_from_rows() -> None:
    problem = Problem(2, 0, V, HELD)
    at, x, y, folds = looked_at(some_rows(), problem)
    theta = torch.randn(len(HELD), 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss, gradient, hessian = at.quadratic(theta)
    held_loss, squares = at.held_out(theta)
    for f, number in enumerate(HELD):
        for c in range(3):
            own = folds[c]
            train = (own != number) & (own != V)
            design = torch.cat([x[c, :, :2], torch.ones(14, 1, dtype=torch.float64)], 1)
            residual = y[c] - design @ theta[f, 1, c]
            torch.testing.assert_close(loss[f, 1, c], 0.5 * residual[train].square().sum())
            torch.testing.assert_close(gradient[f, 1, c], -design[train].T @ residual[train])
            torch.testing.assert_close(hessian[f, 0, c], design[train].T @ design[train])
            torch.testing.assert_close(squares[f, 1, c], residual[own == number].square().sum())
            assert int(at.n[f, 0, c]) == int(train.sum())
    torch.testing.assert_close(held_loss, 0.5 * squares)


def test_derivatives_of_classification_are_those_of_autograd() -> None:
    for n_classes in (2, 4):
        problem = Problem(2, n_classes, V, HELD)
        at, *_ = looked_at(some_rows(n_classes), problem)
        draw = torch.Generator().manual_seed(0)
        theta = torch.randn(len(HELD), 2, 3, problem.n_parameters, generator=draw, dtype=torch.float64)
        loss, gradient, hessian = at.quadratic(theta)
        free = theta.clone().requires_grad_()
        (slope,) = torch.autograd.grad(at.loss(free).sum(), free, create_graph=True)
        torch.testing.assert_close(loss, at.loss(theta))
        torch.testing.assert_close(gradient, slope.detach())
        for p in range(problem.n_parameters):
            (bend,) = torch.autograd.grad(slope[..., p].sum(), free, retain_graph=True)
            torch.testing.assert_close(hessian[..., p, :], bend)


def test_held_out_rows_of_classification_are_judged_one_by_one() -> None:
    problem = Problem(2, 3, V, HELD)
    at, x, y, folds = looked_at(some_rows(3), problem)
    theta = torch.randn(len(HELD), 1, 1, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss, right = at.held_out(theta)
    for f, number in enumerate(HELD):
        weights = theta[f, 0, 0].view(3, 3).numpy()
        for c in range(3):
            own = (folds[c] == number).numpy()
            scores = x[c, :, :2].numpy()[own] @ weights[:, :2].T + weights[:, 2]
            p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            target = y[c].numpy()[own]
            assert np.isclose(float(loss[f, 0, c]), -np.log(p[np.arange(len(p)), target]).sum())
            assert int(right[f, 0, c]) == int((p.argmax(1) == target).sum())
