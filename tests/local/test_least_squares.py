# SPDX-License-Identifier: Apache-2.0
"""Closed forms against scikit-learn and numpy, client by client."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor

from coterie.errors import ConfigError
from coterie.local.least_squares import gram, proximal_step, ridge, solve_ridge
from coterie.models import Dense, linear_regression, softmax_regression
from coterie.protocol import Block
from helpers import one_block, ragged

D = 6
LONG, SHORT, MIXED = (7, 9, 20), (1, 2, 4, 5), (0, 1, 3, 6, 15)  # primal, dual, and a block padded beyond the features


def clients(counts: Sequence[int], *, offset: float = 3.0, seed: int = 0) -> Block:
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, D, generator=draw, dtype=torch.float64) + 0.5 for n in counts]
    ys = [x.sum(1) + offset + 0.3 * torch.randn(len(x), generator=draw, dtype=torch.float64) for x in xs]
    return one_block(ragged(xs, ys))


def rows_of(block: Block, c: int) -> tuple[np.ndarray, np.ndarray]:
    n = int(block.n[c])
    return block.x[c, :n].numpy(), block.target[c, :n].numpy()


def packed(fit: Any, intercept: bool) -> Tensor:
    return torch.tensor([*fit.coef_, *([fit.intercept_] if intercept else [])], dtype=torch.float64)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("l2", [1e-3, 0.5])
@pytest.mark.parametrize("counts", [LONG, SHORT, MIXED], ids=["primal", "dual", "mixed"])
def test_ridge_agrees_with_scikit_learn(counts: tuple[int, ...], l2: float, intercept: bool) -> None:
    block = clients(counts)
    got = ridge(linear_regression(D, intercept=intercept), block, l2)
    assert got.shape == (len(counts), D + intercept)
    for c, n in enumerate(block.n.tolist()):
        if n == 0:
            assert not got[c].any()  # nothing is known: all zero
            continue
        # Ours: mean squared error + l2 |w|^2; scikit-learn's: sum of squares + alpha |w|^2. So alpha = n l2.
        fit = Ridge(alpha=n * l2, fit_intercept=intercept).fit(*rows_of(block, c))
        # A trace of 1e-9 is always added to the penalty: 1e-6 of it, at the smaller l2 with a spectrum of order 1.
        torch.testing.assert_close(got[c], packed(fit, intercept), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("intercept", [True, False])
def test_without_penalty_it_is_least_squares(intercept: bool) -> None:
    block = clients(LONG)
    got = ridge(linear_regression(D, intercept=intercept), block, 0.0)
    for c in range(len(LONG)):
        fit = LinearRegression(fit_intercept=intercept).fit(*rows_of(block, c))
        torch.testing.assert_close(got[c], packed(fit, intercept), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [SHORT, (*SHORT, 15)], ids=["dual", "in a long block"])
def test_with_fewer_rows_than_features_and_no_penalty_it_is_the_shortest_vector_that_fits(
    counts: tuple[int, ...],
) -> None:
    block = clients(counts, offset=0.0)
    got = ridge(linear_regression(D, intercept=False), block, 0.0)
    for c in range(len(SHORT)):
        x, y = rows_of(block, c)
        want = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0])
        torch.testing.assert_close(got[c], want, rtol=1e-5, atol=1e-5)


def test_padding_has_no_influence() -> None:
    model, block = linear_regression(D), clients(MIXED)
    assert block.mask is not None
    together = ridge(model, block, 0.1)
    for c in range(len(MIXED)):
        part = block.clients(slice(c, c + 1))
        n = max(int(block.n[c]), 0)
        own = Block(part.ids, part.keys, part.x[:, :n], part.target[:, :n], part.n, None)
        # Alone, a short client is solved in the dual: the same numbers up to rounding.
        torch.testing.assert_close(together[c], ridge(model, own, 0.1)[0], rtol=1e-9, atol=1e-9)


def test_constant_and_repeated_columns_give_finite_weights() -> None:
    x = torch.randn(10, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 1] = 4.0
    x[:, 3] = x[:, 2]
    block = one_block(ragged([x], [x[:, 0] + x[:, 2]]))
    got = ridge(linear_regression(D), block, 0.0)[0]
    assert got.isfinite().all()
    torch.testing.assert_close(x @ got[:D] + got[D], x[:, 0] + x[:, 2], rtol=1e-5, atol=1e-5)


def test_ridge_is_where_the_gradient_of_training_with_the_halved_penalty_vanishes() -> None:
    # Dense.l2 is l2/2 |w|^2 and ridge's is l2 |w|^2: one is twice the other.
    block, l2 = clients(LONG), 0.4
    theta = ridge(linear_regression(D), block, l2 / 2)
    model = linear_regression(D, l2=l2)
    gradient = model.gradient(theta[None], block.x, block.target, block.weights)
    assert gradient.abs().max() < 1e-7


# -- the proximal step ------------------------------------------------------------------------------------------------
def starts(n: int, size: int) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("l2", [0.0, 0.4])
@pytest.mark.parametrize("mu", [1e-3, 2.0])
@pytest.mark.parametrize("counts", [LONG, SHORT, MIXED], ids=["long", "short", "mixed"])
def test_the_proximal_step_is_least_squares_with_rows_for_its_penalties(
    counts: tuple[int, ...], mu: float, l2: float, intercept: bool
) -> None:
    block, model = clients(counts), linear_regression(D, intercept=intercept, l2=l2)
    p = model.n_parameters
    theta = starts(len(counts), p)
    got = proximal_step(model, theta, block, mu)
    penalised = np.eye(p)[:D]  # not the intercept
    for c, n in enumerate(block.n.tolist()):
        if n == 0:
            continue
        # mean (y - z w)^2 + mu/2 |w - theta|^2 + l2/2 |w without intercept|^2, as one sum of squares.
        x, y = rows_of(block, c)
        z = np.column_stack([x, np.ones(n)]) if intercept else x
        a = np.vstack([z / np.sqrt(n), np.sqrt(mu / 2) * np.eye(p), np.sqrt(l2 / 2) * penalised])
        b = np.concatenate([y / np.sqrt(n), np.sqrt(mu / 2) * theta[c].numpy(), np.zeros(D)])
        want = torch.from_numpy(np.linalg.lstsq(a, b, rcond=None)[0])
        # With mu = 1e-3 and fewer rows than features the system's condition is about 1e5.
        torch.testing.assert_close(got[c], want, rtol=1e-9, atol=1e-9)


def test_the_proximal_step_by_hand() -> None:
    # One row x = 2, y = 6, from theta = 1 with mu = 2: minimise (6 - 2 w)^2 + (w - 1)^2, so w = 13 / 5.
    block = one_block(ragged([torch.tensor([[2.0]]).double()], [torch.tensor([6.0]).double()]))
    got = proximal_step(linear_regression(1, intercept=False), torch.ones(1, 1, dtype=torch.float64), block, 2.0)
    assert got.item() == pytest.approx(13 / 5)


@pytest.mark.parametrize("l2", [0.0, 0.4])
def test_a_client_without_rows_does_not_step(l2: float) -> None:
    block, theta = clients(MIXED), starts(len(MIXED), D + 1)
    got = proximal_step(linear_regression(D, l2=l2), theta, block, 0.5)
    assert int(block.n[0]) == 0
    assert torch.equal(got[0], theta[0])  # not even towards zero
    assert not torch.isclose(got[1:], theta[1:]).all(1).any()


@pytest.mark.parametrize(
    "model", [Dense((D, 4, 1), "squared"), softmax_regression(D, 3)], ids=["hidden layer", "classes"]
)
def test_a_proximal_step_without_a_closed_form_is_refused(model: Dense) -> None:
    with pytest.raises(ConfigError, match="needs linear regression") as caught:
        proximal_step(model, starts(len(LONG), model.n_parameters), clients(LONG), 1.0)
    assert "exact=False" in caught.value.hint


@pytest.mark.parametrize("mu", [0.0, -1.0, float("nan")])
def test_a_proximal_step_without_a_positive_mu_is_refused(mu: float) -> None:
    with pytest.raises(ConfigError, match="is not defined"):
        proximal_step(linear_regression(D), starts(len(LONG), D + 1), clients(LONG), mu)


# -- sums of products -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("intercept", [True, False])
def test_sums_of_products_are_those_of_the_real_rows(intercept: bool) -> None:
    block = clients(MIXED)
    block.x[0] = 7.0  # the padding of a client without rows: must not count
    got = gram(linear_regression(D, intercept=intercept), block)
    for c in range(len(MIXED)):
        x, y = rows_of(block, c)
        z = np.column_stack([x, *([np.ones(len(x))] if intercept else []), y])
        torch.testing.assert_close(got[c], torch.from_numpy(z.T @ z), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_pooled_ridge_from_sums_agrees_with_scikit_learn_on_pooled_rows(l2: float, intercept: bool) -> None:
    block, model = clients(MIXED), linear_regression(D, intercept=intercept)
    n = int(block.n.sum())
    got = solve_ridge(model, gram(model, block).sum(0), n, l2)
    x, y = (np.concatenate(parts) for parts in zip(*(rows_of(block, c) for c in range(len(MIXED))), strict=True))
    fit = Ridge(alpha=n * l2, fit_intercept=intercept).fit(x, y) if l2 else LinearRegression(fit_intercept=intercept)
    fit = fit.fit(x, y)
    torch.testing.assert_close(got, packed(fit, intercept), rtol=1e-8, atol=1e-8)


def test_pooled_ridge_of_nothing_is_zero() -> None:
    model = linear_regression(D)
    for l2 in (0.0, 0.1):
        assert not solve_ridge(model, torch.zeros(D + 2, D + 2, dtype=torch.float64), 0.0, l2).any()
