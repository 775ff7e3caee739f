# SPDX-License-Identifier: Apache-2.0
"""Families of mixtures: densities, gradients and M-steps against independent calculations."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from torch import Tensor

from coterie.local.k_means import k_means
from coterie.models.mixtures import Custom, Family, Gaussian, Regression, expect, shares
from coterie.protocol import Block
from helpers import one_block, ragged

COUNTS = (6, 9, 9)


def block(seed: int = 0, counts: tuple[int, ...] = COUNTS) -> Block:
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in counts]
    ys = [torch.randn(n, generator=draw, dtype=torch.float64) for n in counts]
    return one_block(ragged(xs, ys))


def parameters(family: Family, runs: int = 2, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(runs, len(COUNTS), 4, family.n_parameters, generator=draw, dtype=torch.float64)


def gammas(data: Block, runs: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    raw = torch.rand(runs, *data.x.shape[:2], 4, generator=draw, dtype=torch.float64)
    return raw / raw.sum(-1, keepdim=True) * data.real[..., None]


def scale_of(family: Family) -> Tensor:
    """[2, 1, ...], of two runs."""
    if not isinstance(family, Gaussian):
        return torch.tensor([[1.0], [2.0]]).double() if family.has_scale else torch.ones(2, 1).double()
    if not family.has_scale:
        return torch.eye(3, dtype=torch.float64).expand(2, 1, 3, 3)
    some = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [0.1, 0.3, 0.7]], dtype=torch.float64)
    return torch.stack([torch.eye(3, dtype=torch.float64), some])[:, None]


NORMAL = Custom(
    lambda x, y, theta: -0.5 * (x - theta).square().sum() - 1.5 * math.log(2 * math.pi), 3, lambda x, u: x + 0 * u
)
GAUSSIANS = [Gaussian(3), Gaussian(3, "diagonal"), Gaussian(3, "full")]
REGRESSIONS = [Regression(3), Regression(3, intercept=True), Regression(3, variance="estimated")]
every = pytest.mark.parametrize("family", [*GAUSSIANS, *REGRESSIONS], ids=str)


# -- densities --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", GAUSSIANS, ids=str)
def test_gaussian_densities_equal_scipy(family: Gaussian) -> None:
    data, theta, scale = block(), parameters(family), scale_of(family)
    found = family.log_density(theta, scale, data)
    for s in range(2):
        precision = (scale[s, 0] @ scale[s, 0].T).numpy()
        for c, r in [(0, 0), (1, 2), (2, 3)]:
            law = multivariate_normal(theta[s, c, r].numpy(), np.linalg.inv(precision))
            np.testing.assert_allclose(found[s, c, :, r].numpy(), law.logpdf(data.x[c].numpy()), rtol=1e-9)


@pytest.mark.parametrize("family", REGRESSIONS, ids=str)
def test_regression_densities_equal_scipy(family: Regression) -> None:
    data, theta, scale = block(), parameters(family), scale_of(family)
    found = family.log_density(theta, scale, data)
    for s, c, r in [(0, 1, 0), (1, 2, 3)]:
        x = torch.cat([data.x[c], torch.ones(9, 1)], 1) if family.intercept else data.x[c]
        law = norm((x @ theta[s, c, r]).numpy(), 1 / float(scale[s, 0]))
        np.testing.assert_allclose(found[s, c, :, r].numpy(), law.logpdf(data.target[c].numpy()), rtol=1e-9)


@pytest.mark.parametrize("family", [*GAUSSIANS, *REGRESSIONS, NORMAL], ids=lambda f: "" if f is NORMAL else str(f))
def test_responsibilities_sum_to_one_and_rows_far_away_keep_them_finite(family: Family) -> None:
    data = block()
    data.x[1, 0], data.x[1, 1], data.x[2, 0] = 1e6, 1e200, -1e200
    data.target[1, 2], data.target[2, 2] = 1e200, -1e6
    weights = torch.tensor([0.0, 0.2, 0.3, 0.5], dtype=torch.float64).expand(2, 3, 4)
    gamma, likelihood = expect(family.log_density(parameters(family), scale_of(family), data), weights, data)
    torch.testing.assert_close(gamma.sum(-1), data.real.double().expand(2, -1, -1))
    assert likelihood.isfinite().all()
    torch.testing.assert_close(shares(gamma, data).sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_a_component_that_has_lost_all_weight_can_win_rows_back() -> None:
    data, family = block(), Gaussian(3)
    theta, weights = torch.full((1, 3, 2, 3), 50.0, dtype=torch.float64), torch.zeros(1, 3, 2, dtype=torch.float64)
    theta[:, :, 0], weights[..., 1] = 0.0, 1.0  # rows are about 0
    gamma, _ = expect(family.log_density(theta, scale_of(family)[:1], data), weights, data)
    torch.testing.assert_close(shares(gamma, data), weights.flip(-1))


def test_the_likelihood_is_the_mean_over_real_rows() -> None:
    data, family = block(), Gaussian(3)
    theta, weights = parameters(family, 1), torch.full((1, 3, 4), 0.25, dtype=torch.float64)
    _, found = expect(family.log_density(theta, scale_of(family)[:1], data), weights, data)
    laws = [multivariate_normal(theta[0, 0, r].numpy()) for r in range(4)]
    n = int(data.n[0])
    density = sum(0.25 * law.pdf(data.x[0, :n].numpy()) for law in laws)
    assert float(found[0, 0]) == pytest.approx(float(np.log(density).mean()))


# -- gradients and M-steps --------------------------------------------------------------------------------------------
@every
def test_ascent_is_the_gradient_times_the_variance(family: Any) -> None:
    data, gamma, scale = block(), gammas(block()), scale_of(family)[:1].expand(2, *scale_of(family).shape[1:])
    theta = parameters(family).requires_grad_()
    (gamma * family.log_density(theta, scale, data) * data.weights[..., None]).sum().backward()
    torch.testing.assert_close(family.ascent(theta.detach(), gamma, data), theta.grad)  # the variance is one


@every
def test_the_m_step_has_no_slope_left(family: Any) -> None:
    data, gamma = block(), gammas(block())
    theta = family.maximise(parameters(family), gamma, data)
    left = family.ascent(theta, gamma, data)
    torch.testing.assert_close(left, torch.zeros_like(left), atol=1e-4, rtol=0)  # a trace of ridge


def hessians(family: Any, gamma: Tensor, data: Block) -> Tensor:
    """(1/n) sum_i gamma_ir x_i x_i^T of regressions, gamma_ir I of others.  [S, C, R, P, P]"""
    n = data.n[:, None, None, None]
    if isinstance(family, Gaussian):
        return gamma.sum(2)[..., None, None] * torch.eye(3, dtype=torch.float64) / n
    x = torch.cat([data.x, data.real[..., None].double()], -1) if family.intercept else data.x
    return torch.einsum("scnr,cnp,cnq->scrpq", gamma, x, x) / n


def along(hessian: Tensor, direction: Tensor) -> Tensor:
    """How much the objective bends along a direction.  [S, C, R]"""
    unit = direction / direction.norm(dim=-1, keepdim=True)
    return torch.einsum("scrp,scrpq,scrq->scr", unit, hessian, unit)


@every
def test_slopes_from_moments_equal_those_from_rows(family: Any) -> None:
    data, gamma, theta = block(), gammas(block()), parameters(family)
    slope, bend = family.slope(family.moments(gamma, data), theta)
    n = data.n[:, None]
    torch.testing.assert_close(slope / n[..., None], family.ascent(theta, gamma, data))
    torch.testing.assert_close(bend / n, along(hessians(family, gamma, data), slope))


@every
def test_curvature_grows_to_the_largest_and_bounds_the_best_step(family: Any) -> None:
    data, gamma, theta = block(), gammas(block()), parameters(family)
    hessian, slope = hessians(family, gamma, data), family.ascent(theta, gamma, data)
    direction = torch.ones_like(slope)
    for _ in range(300):
        bend, direction = family.curvature(direction, slope, gamma, data)
        assert (bend >= along(hessian, slope) - 1e-12).all()  # a step of one over it is no longer than the best
    torch.testing.assert_close(bend, torch.linalg.eigvalsh(hessian)[..., -1], rtol=1e-3, atol=0)
    torch.testing.assert_close(along(hessian, direction), bend, rtol=1e-3, atol=0)


@every
def test_a_component_without_rows_keeps_its_parameters(family: Any) -> None:
    data, gamma, theta = block(), gammas(block()), parameters(family)
    gamma[..., 2] = 0
    torch.testing.assert_close(family.maximise(theta, gamma, data)[:, :, 2], theta[:, :, 2], atol=1e-8, rtol=1e-6)


def test_weighted_least_squares_equals_numpy() -> None:
    data, gamma, family = block(), gammas(block()), Regression(3)
    found = family.maximise(torch.zeros(2, 3, 4, 3, dtype=torch.float64), gamma, data)
    root = gamma[1, 2, :, 0].sqrt()
    want = np.linalg.lstsq((data.x[2] * root[:, None]).numpy(), (data.target[2] * root).numpy(), rcond=None)[0]
    np.testing.assert_allclose(found[1, 2, 0].numpy(), want, rtol=1e-4)


def test_scatter_and_scale_give_the_within_covariance() -> None:
    data, gamma, family = block(), gammas(block()), Gaussian(3, "full")
    theta = parameters(family)
    scatter = family.scatter(theta, gamma, data)
    want = torch.zeros(3, 3, dtype=torch.float64)
    for i in range(9):
        for r in range(4):
            d = data.x[1, i] - theta[0, 1, r]
            want += gamma[0, 1, i, r] * torch.outer(d, d)
    torch.testing.assert_close(scatter[0, 1], want)
    scale = family.scale_of(scatter, torch.full((2, 3), 9.0, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.inv(scale @ scale.transpose(-1, -2))[0, 1], want / 9, rtol=1e-4, atol=1e-4)
    broken = family.scale_of(scatter * torch.inf, torch.full((2, 3), 9.0, dtype=torch.float64))
    assert broken.isfinite().all()


def test_rounding_does_not_turn_the_axes_of_a_round_covariance() -> None:
    family, draw = Gaussian(3, "full"), torch.Generator().manual_seed(0)
    scatter = 4.0 * torch.eye(3, dtype=torch.float64)  # every direction is an axis
    for _ in range(5):
        noise = 1e-12 * torch.randn(3, 3, generator=draw, dtype=torch.float64)
        scale = family.scale_of(scatter + noise + noise.T, torch.tensor(1.0).double())
        torch.testing.assert_close(scale, 0.5 * torch.eye(3).double(), rtol=0, atol=1e-6)  # a floor of 1e-6 is added


def test_regression_scale_is_one_over_the_residuals_deviation() -> None:
    family = Regression(3, variance="estimated")
    assert float(family.scale_of(torch.tensor(18.0), torch.tensor(2.0))) == pytest.approx(1 / 3)
    assert float(family.scale_of(torch.tensor(math.inf), torch.tensor(2.0))) == 1.0


def test_a_family_given_by_its_density_equals_the_closed_form() -> None:
    data, gamma, theta = block(), gammas(block()), parameters(Gaussian(3))
    plain, unit = Gaussian(3), torch.ones(2, 1, dtype=torch.float64)
    torch.testing.assert_close(NORMAL.log_density(theta, unit, data), plain.log_density(theta, scale_of(plain), data))
    torch.testing.assert_close(NORMAL.ascent(theta, gamma, data), plain.ascent(theta, gamma, data))
    torch.testing.assert_close(
        NORMAL.maximise(theta, gamma, data), plain.maximise(theta, gamma, data), atol=1e-4, rtol=0
    )


# -- k-means ----------------------------------------------------------------------------------------------------------
def test_k_means_is_as_good_as_scikit_learns() -> None:
    from sklearn.cluster import KMeans

    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 3, generator=draw, dtype=torch.float64) + 4 * (torch.arange(n) % 5)[:, None] for n in (60, 80)]
    data = one_block(ragged(xs, None))
    member = k_means(data.x, data, 5, torch.arange(20)[:, None] + data.keys, 50)
    for c, x in enumerate(xs):
        n = len(x)
        own = member[c, :n]
        assert own.sum(1).tolist() == [1.0] * n
        assert float(member[c, n:].sum()) == 0
        centres = own.T @ x / own.sum(0)[:, None]
        cost = float((x - own @ centres).square().sum())
        assert cost <= 1.02 * KMeans(5, n_init=20, random_state=0).fit(x.numpy()).inertia_


def test_k_means_survives_copies_no_rows_and_rows_far_away() -> None:
    xs = [torch.zeros(0, 2), torch.ones(4, 2), torch.tensor([[1e200, 0.0], [0.0, 0.0], [1.0, 1.0]]), torch.ones(1, 2)]
    data = one_block(ragged([x.double() for x in xs], None))
    member = k_means(data.x, data, 3, torch.arange(2)[:, None] + data.keys, 10)
    assert not member.isnan().any()
    assert torch.equal(member.sum(-1), data.real.double())
