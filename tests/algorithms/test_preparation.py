# SPDX-License-Identifier: Apache-2.0
"""Scaling and step sizes from federated sums, against numpy, scikit-learn and autograd on pooled rows."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from torch import Tensor

from coterie.algorithms.preparation import Scaling, learn_scaling, safe_step_size, steepness
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.models import Dense, linear_regression, row_loss, softmax_regression
from helpers import ragged

DOUBLE = torch.float64


def clients(counts: Sequence[int], d: int, *, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Rows whose location and scale differ by column and by client."""
    draw = torch.Generator().manual_seed(seed)
    places = 10 * torch.randn(len(counts), 1, d, generator=draw, dtype=DOUBLE)
    xs = [torch.randn(n, d, generator=draw, dtype=DOUBLE) * 3 + place for n, place in zip(counts, places, strict=True)]
    return xs, [x.sum(1) * 100 + 7 for x in xs]


def scaled(
    rows: Ragged, *, divide: bool = True, real_target: bool = True, degree: int = 1, block_bytes: int = 1 << 20
) -> Scaling:
    program = partial(learn_scaling, shape=rows.shape, divide=divide, real_target=real_target, degree=degree)
    made: Scaling = InProcess(rows, block_bytes=block_bytes).run([program]).states[0]
    return made


def bound(rows: Ragged, model: Dense) -> float:
    return float(InProcess(rows).run([partial(safe_step_size, model=model)]).states[0].value)


def largest(xs: Sequence[Tensor], *, intercept: bool) -> float:
    """The true largest eigenvalue of any client's second moments."""
    found = []
    for x in xs:
        if len(x):
            full = np.c_[x.numpy(), np.ones(len(x))] if intercept else x.numpy()
            found.append(np.linalg.eigvalsh(full.T @ full / len(x))[-1])
    return float(max(found))


# -- scaling ----------------------------------------------------------------------------------------------------------
def test_scaling_equals_that_of_pooled_rows() -> None:
    xs, ys = clients((5, 0, 17, 1, 40), 4)
    found, pooled = scaled(ragged(xs, ys)), StandardScaler().fit(torch.cat(xs).numpy())
    np.testing.assert_allclose(found.mean, pooled.mean_, rtol=1e-12)
    np.testing.assert_allclose(found.scale, pooled.scale_, rtol=1e-12)
    y = torch.cat(ys).numpy()
    assert float(found.y_mean) == pytest.approx(y.mean(), rel=1e-12)
    assert float(found.y_scale) == pytest.approx(y.std(), rel=1e-12)


def test_missing_values_are_left_out_of_the_sums_and_become_the_mean() -> None:
    xs, ys = clients((6, 9, 3), 3)
    gap = torch.rand(18, 3, generator=torch.Generator().manual_seed(1)).split([6, 9, 3])
    xs = [torch.where(g < 0.3, torch.nan, x) for x, g in zip(xs, gap, strict=True)]
    found, pooled = scaled(ragged(xs, ys)), torch.cat(xs).numpy()
    assert np.isnan(pooled).sum() > 5
    np.testing.assert_allclose(found.mean, np.nanmean(pooled, 0), rtol=1e-12)
    np.testing.assert_allclose(found.scale, np.nanstd(pooled, 0), rtol=1e-12)
    filled = np.where(np.isnan(pooled), np.nanmean(pooled, 0), pooled)
    want = (filled - np.nanmean(pooled, 0)) / np.nanstd(pooled, 0)
    np.testing.assert_allclose(found.features(torch.from_numpy(pooled)), want, atol=1e-12)


def test_constant_columns_become_zero_whatever_their_size() -> None:
    xs, ys = clients((50, 71), 5)
    for x in xs:
        x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 0.0, 0.1, 1e9 + 0.1, -1e-15
    found = scaled(ragged(xs, ys))
    made = found.features(torch.cat(xs))
    assert found.scale[:4].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert float(made[:, :4].abs().max()) < 1e-5  # the mean of 1e9 + 0.1 is known to 16 digits
    assert float(made[:, 4].std(correction=0)) == pytest.approx(1)


def test_columns_of_tiny_or_huge_values_are_scaled_like_any_other() -> None:
    xs, ys = clients((30, 30), 2)
    plain = scaled(ragged(xs, ys)).features(torch.cat(xs))
    units = torch.tensor([1e-15, 1e15], dtype=DOUBLE)
    other = scaled(ragged([x * units for x in xs], ys)).features(torch.cat(xs) * units)
    torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-10)


def test_a_column_with_a_large_mean_keeps_its_small_spread() -> None:
    xs, ys = clients((30, 30), 1)
    found = scaled(ragged([x + 1e9 for x in xs], ys))
    assert float(found.scale) == pytest.approx(float(torch.cat(xs).std(correction=0)), rel=1e-6)


def test_a_column_that_nobody_has_is_left_alone() -> None:
    xs, ys = clients((4, 4), 2)
    for x in xs:
        x[:, 1] = torch.nan
    found = scaled(ragged(xs, ys))
    assert found.features(torch.cat(xs))[:, 1].tolist() == [0.0] * 8


def test_targets_are_scaled_and_come_back() -> None:
    xs, ys = clients((6, 9), 2)
    found, y = scaled(ragged(xs, ys)), torch.cat(ys)
    made = found.target(y)
    assert float(made.mean()) == pytest.approx(0, abs=1e-12)
    assert float(made.std(correction=0)) == pytest.approx(1, rel=1e-12)
    torch.testing.assert_close(found.back(made), y, rtol=1e-12, atol=1e-12)


def test_class_numbers_stay() -> None:
    xs, _ = clients((6, 9), 2)
    ys = [torch.arange(len(x)) % 3 for x in xs]
    found = scaled(ragged(xs, ys), real_target=False)
    assert torch.equal(found.target(ys[1]), ys[1])
    assert (float(found.y_mean), float(found.y_scale)) == (0.0, 1.0)


def test_without_division_only_missing_values_change() -> None:
    xs, ys = clients((6, 9), 2)
    xs[0][2, 1] = torch.nan
    found, pooled = scaled(ragged(xs, ys), divide=False), torch.cat(xs)
    made = found.features(pooled)
    there = ~pooled.isnan()
    assert torch.equal(made[there], pooled[there])
    assert float(made[2, 1]) == pytest.approx(np.nanmean(pooled[:, 1].numpy()), rel=1e-12)
    assert torch.equal(found.target(ys[0]), ys[0])


def test_images_are_scaled_pixel_by_pixel() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.rand(n, 2, 3, generator=draw) for n in (4, 7)]
    found = scaled(ragged(xs, [torch.zeros(4), torch.ones(7)]))
    pooled = torch.cat(xs).double().numpy()
    assert found.mean.shape == (2, 3)
    np.testing.assert_allclose(found.mean, pooled.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.scale, pooled.std(0), rtol=1e-12)


def test_features_are_not_changed_in_place() -> None:
    xs, ys = clients((6,), 2)
    found, before = scaled(ragged(xs, ys)), xs[0].clone()
    found.features(xs[0])
    assert torch.equal(xs[0], before)


def test_scaling_does_not_depend_on_blocks() -> None:
    xs, ys = clients((5, 17, 1, 40), 4)
    one, many = scaled(ragged(xs, ys)), scaled(ragged(xs, ys), block_bytes=1)
    torch.testing.assert_close(many.mean, one.mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(many.scale, one.scale, rtol=1e-13, atol=0)


# -- feature maps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("degree", [2, 3])
def test_a_feature_map_multiplies_scaled_features_and_scales_the_products(degree: int) -> None:
    xs, ys = clients((5, 0, 17, 1, 40), 4)
    found, pooled = scaled(ragged(xs, ys), degree=degree), torch.cat(xs)
    theirs = make_pipeline(StandardScaler(), PolynomialFeatures(degree, include_bias=False), StandardScaler())
    made = found.features(pooled)
    np.testing.assert_allclose(made, theirs.fit_transform(pooled.numpy()), atol=1e-10)
    assert float(made.mean(0).abs().max()) < 1e-12
    np.testing.assert_allclose(made.std(0, correction=0), 1, atol=1e-12)
    other = scaled(ragged(xs, ys), degree=degree, block_bytes=1).features(pooled)
    torch.testing.assert_close(other, made, rtol=1e-10, atol=1e-10)


def test_missing_features_are_filled_before_they_are_multiplied() -> None:
    xs, ys = clients((6, 9), 2)
    xs[0][2, 1] = xs[1][4, 0] = torch.nan
    found, pooled = scaled(ragged(xs, ys), degree=2), torch.cat(xs).numpy()
    filled = np.where(np.isnan(pooled), np.nanmean(pooled, 0), pooled)
    standard = (filled - np.nanmean(pooled, 0)) / np.nanstd(pooled, 0)
    products = PolynomialFeatures(2, include_bias=False).fit_transform(standard)
    want = (products - products.mean(0)) / products.std(0)
    np.testing.assert_allclose(found.features(torch.from_numpy(pooled)), want, atol=1e-10)


def test_a_feature_map_without_division_is_of_the_columns_as_they_are() -> None:
    xs, ys = clients((6, 9), 2)
    made = scaled(ragged(xs, ys), divide=False, degree=3).features(torch.cat(xs))
    np.testing.assert_allclose(
        made, PolynomialFeatures(3, include_bias=False).fit_transform(torch.cat(xs).numpy()), rtol=1e-12
    )


def test_products_that_are_the_same_everywhere_become_zero() -> None:
    side = torch.tensor([1.0, -1.0] * 6, dtype=DOUBLE)[:, None]
    made = scaled(ragged([side], [side[:, 0]]), degree=2).features(side)
    assert made.tolist() == [[1.0, 0.0], [-1.0, 0.0]] * 6  # its square is 1


# -- step size --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("counts", [(40,), (5, 0, 7, 1, 12, 30), (8,) * 50])
def test_bound_is_above_the_largest_eigenvalue_and_close(counts: tuple[int, ...], unit: float, intercept: bool) -> None:
    xs, ys = clients(counts, 6)
    xs = [x * unit for x in xs]
    found = bound(ragged(xs, ys), linear_regression(6, intercept=intercept))
    true = largest(xs, intercept=intercept)
    assert true <= found <= true * len(counts) ** (1 / 16) * 1.05 * 1.1


def test_bound_sees_directions_in_which_features_oppose_each_other() -> None:
    # Indicators of two categories, standardised, are each other's negative: a vector of ones is blind to them.
    side = torch.tensor([1.0, -1.0] * 10, dtype=DOUBLE)
    x = torch.stack([side, -side] * 3, 1)
    assert largest([x], intercept=True) == pytest.approx(6)
    assert 6 <= bound(ragged([x], [side]), linear_regression(6)) <= 6 * 1.05 * 1.1


def test_bound_of_no_features_at_all_is_harmless() -> None:
    zero = torch.zeros(4, 3, dtype=DOUBLE)
    found = bound(ragged([zero], [zero[:, 0]]), linear_regression(3, intercept=False))
    assert found < 1e-9


@pytest.mark.parametrize("l2", [0.0, 3.0])
@pytest.mark.parametrize("unit", [1.0, 0.01])  # with the small one, the penalty's curvature is the largest
@pytest.mark.parametrize("classes", [0, 3])
def test_step_times_curvature_is_at_most_one_anywhere(classes: int, unit: float, l2: float) -> None:
    draw = torch.Generator().manual_seed(2)
    xs, _ = clients((15, 4, 9), 3)
    xs = [x * unit for x in xs]
    ys = [torch.randint(3, (len(x),), generator=draw) if classes else x[:, 0] for x in xs]
    model = softmax_regression(3, 3, l2=l2) if classes else linear_regression(3, l2=l2)
    step = steepness(model, bound(ragged(xs, ys), model))
    weights = torch.zeros(model.n_parameters, dtype=DOUBLE)
    weights[model.layers["0.weight"]] = 1.0
    for x, y in zip(xs, ys, strict=True):

        def loss(theta: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            fit = row_loss(model.loss, model._forward(theta, x), y).mean()
            return fit + l2 / 2 * (weights * theta**2).sum()

        for scale in (0.0, 0.01, 1.0):
            theta = scale * model.initial(1, draw)[0]
            hessian = torch.autograd.functional.hessian(loss, theta)
            assert step * float(torch.linalg.eigvalsh(hessian)[-1]) <= 1


def test_descent_with_the_step_never_climbs_on_badly_scaled_clients() -> None:
    draw = np.random.default_rng(3)
    units = np.array([1e-3, 1.0, 50.0])
    xs = [draw.normal(size=(n, 3)) * units + 20 * units * (i == 1) for i, n in enumerate((12, 30, 5))]
    ys = [x @ [300.0, 1.0, 0.1] + draw.normal(size=len(x)) for x in xs]
    rows = ragged([torch.from_numpy(x) for x in xs], [torch.from_numpy(y) for y in ys])
    step = steepness(linear_regression(3), bound(rows, linear_regression(3)))
    for x, y in zip(xs, ys, strict=True):
        full, theta, last = np.c_[x, np.ones(len(x))], np.zeros(4), np.inf
        for _ in range(300):
            error = full @ theta - y
            assert (error**2).mean() <= last
            last = (error**2).mean()
            theta -= step * 2 * full.T @ error / len(x)
        assert last < (y**2).mean()


def test_descent_with_the_step_finds_the_maximum_likelihood_classifier() -> None:
    draw = np.random.default_rng(4)
    x = draw.normal(size=(80, 2))
    y = (x @ [1.0, -2.0] + draw.logistic(size=80) > 0).astype(int)
    model = softmax_regression(2, 2, l2=0.1)
    rows = ragged([torch.from_numpy(x)], [torch.from_numpy(y)])
    step = steepness(model, bound(rows, model))
    theta = torch.zeros(1, 6, dtype=DOUBLE)
    block = next(rows.blocks())
    for _ in range(2000):
        theta = theta - step * model.gradient(theta[None], block.x, block.target, block.weights)[0]
    # Two outputs with weights u, v and penalty l2/2 (|u|^2 + |v|^2) are one output with w = v - u and l2/4 |w|^2.
    one = LogisticRegression(C=1 / (80 * 0.1 / 2), tol=1e-12, max_iter=1000).fit(x, y)
    np.testing.assert_allclose(theta[0, 2:4] - theta[0, 0:2], one.coef_[0], atol=1e-6)
