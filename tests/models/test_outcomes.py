# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of outcomes: against scipy, and their derivatives against automatic differentiation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from coterie.models.outcomes import OUTCOMES, explained
from outcomes import ALL, NUMBERS, drawn

N = 50


def case(outcome: str) -> tuple[Tensor, Tensor]:
    """Outputs [N, 1 + Q] and targets [N]."""
    eta = np.linspace(-1.5, 2.5, N)
    extra = {"poisson": [], "ordinal": [0.3, -0.2]}.get(outcome, [-0.4])
    outputs = torch.cat([torch.from_numpy(eta)[:, None], torch.tensor(extra, dtype=torch.float64).expand(N, -1)], 1)
    y = torch.from_numpy(drawn(outcome, eta))
    return outputs, y.long() if outcome == "ordinal" else y


DENSITIES: dict[str, Callable[..., np.ndarray]] = {  # of targets, given means and the extra parameter
    "poisson": lambda y, mean, _: stats.poisson.logpmf(y, mean),
    "negative-binomial": lambda y, mean, alpha: stats.nbinom.logpmf(y, 1 / alpha, 1 / (1 + alpha * mean)),
    "gamma": lambda y, mean, shape: stats.gamma.logpdf(y, shape, scale=mean / shape),
    "log-normal": lambda y, mean, sigma: stats.lognorm.logpdf(y, sigma, scale=mean),
}


@pytest.mark.parametrize("outcome", NUMBERS)
def test_losses_are_minus_the_log_densities_of_scipy(outcome: str) -> None:
    outputs, y = case(outcome)
    extra = float(outputs[0, 1:].exp()) if outcome != "poisson" else None
    expected = DENSITIES[outcome](y.numpy(), outputs[:, 0].exp().numpy(), extra)
    np.testing.assert_allclose(-OUTCOMES[outcome].loss(outputs, y).numpy(), expected, rtol=1e-10, atol=1e-10)


def test_ordered_classes_have_the_probabilities_of_proportional_odds() -> None:
    outputs, y = case("ordinal")
    places = np.array([0.0, np.exp(0.3), np.exp(0.3) + np.exp(-0.2)])
    at_most = 1 / (1 + np.exp(outputs[:, :1].numpy() - places))  # P(y <= k)
    p = np.diff(np.column_stack([np.zeros(N), at_most, np.ones(N)]))
    loss = OUTCOMES["ordinal"].loss(outputs, y).numpy()
    np.testing.assert_allclose(np.exp(-loss), p[np.arange(N), y.numpy()], rtol=1e-10)
    assert np.array_equal(OUTCOMES["ordinal"].mean(outputs).numpy(), p.argmax(1))


@pytest.mark.parametrize("outcome", ALL)
def test_first_derivatives_are_those_of_the_loss(outcome: str) -> None:
    outputs, y = case(outcome)
    outputs.requires_grad_()
    (expected,) = torch.autograd.grad(OUTCOMES[outcome].loss(outputs, y).sum(), outputs)
    torch.testing.assert_close(OUTCOMES[outcome].first(outputs, y), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("outcome", ALL)
def test_second_derivatives_by_eta_are_those_of_the_loss(outcome: str) -> None:
    outputs, y = case(outcome)
    outputs.requires_grad_()
    (slope,) = torch.autograd.grad(OUTCOMES[outcome].loss(outputs, y).sum(), outputs, create_graph=True)
    (expected,) = torch.autograd.grad(slope[:, 0].sum(), outputs, create_graph=True)
    bend = OUTCOMES[outcome].second(outputs, y)[:, 0, 0]
    torch.testing.assert_close(bend, expected[:, 0], rtol=1e-9, atol=1e-9)
    if outputs.shape[1] > 1:  # and how it grows with the extra parameters
        (more,) = torch.autograd.grad(expected[:, 0].sum(), outputs)
        torch.testing.assert_close(OUTCOMES[outcome].stiffening(outputs, y), more[:, 1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("outcome", ALL)
def test_second_derivatives_are_exact_where_slopes_are_zero(outcome: str) -> None:
    """At the maximum over many rows, by one eta for all of them: there Newton's method is quadratic."""
    y = torch.from_numpy(drawn(outcome, np.full(4000, 0.7)))
    y = y.long() if outcome == "ordinal" else y
    family = OUTCOMES[outcome]
    at = family.start(family.statistics(y, 4).sum(0))
    for _ in range(30):
        outputs = at.expand(len(y), -1)
        step = torch.linalg.solve(family.second(outputs, y).sum(0), family.first(outputs, y).sum(0))
        at = at - step
    assert float(step.abs().max()) < 1e-8
    exact = torch.autograd.functional.hessian(lambda o: family.loss(o.expand(len(y), -1), y).sum(), at)
    found = family.second(at.expand(len(y), -1), y).sum(0)
    # Of the negative binomial the mixed derivative is zero on average only: a few in sqrt(4000).
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=150.0 if outcome == "negative-binomial" else 1e-3)


def test_padding_and_far_predictors_have_finite_losses() -> None:
    for outcome in ALL:
        outputs, y = case(outcome)
        y = torch.zeros_like(y)
        for far in (-1e4, 1e4):
            moved = torch.cat([torch.full_like(outputs[:, :1], far), outputs[:, 1:]], 1)
            family = OUTCOMES[outcome]
            for value in (family.loss(moved, y), family.first(moved, y), family.second(moved, y)):
                assert bool(value.isfinite().all()), outcome


def test_explained_deviance_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import d2_tweedie_score

    for outcome, power in (("poisson", 1), ("gamma", 2)):
        outputs, y = case(outcome)
        expected = d2_tweedie_score(y.numpy(), outputs[:, 0].exp().numpy(), power=power)
        assert explained(outcome, outputs, y) == pytest.approx(expected, rel=1e-8)


def test_the_mean_of_a_log_normal_target_is_predicted_not_its_median() -> None:
    outputs = torch.tensor([[1.0, 0.5 * np.log(0.5)]], dtype=torch.float64)  # variance 0.5 of the logarithm
    assert float(OUTCOMES["log-normal"].mean(outputs)) == pytest.approx(np.exp(1.25))
