# SPDX-License-Identifier: Apache-2.0
"""What noise costs, beside dp-accounting itself and beside a formula that has nothing to do with it."""

import math
import subprocess
import sys
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld
from scipy.optimize import brentq
from scipy.stats import norm

from coterie.errors import ConfigError
from coterie.privacy.accountant import Release, epsilon_of, least_noise
from coterie.privacy.gaussian import gaussian_epsilon


def analytic_delta(epsilon: float, multiplier: float) -> float:
    """Balle and Wang, ICML 2018, Theorem 8: of one sum with normal noise, whose sensitivity is 1."""
    a, b = 1 / (2 * multiplier), epsilon * multiplier
    return float(norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b))


def analytic_noise(epsilon: float, delta: float) -> float:
    return float(brentq(lambda z: analytic_delta(epsilon, z) - delta, 0.1, 1000.0))


def by_dp_accounting(event: Any, delta: float) -> float:
    made = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return float(made.compose(event).get_epsilon(delta))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_noise_of_one_sum_is_that_of_the_analytic_mechanism(epsilon: float, delta: float) -> None:
    found = least_noise(lambda z: {Release(z): 1}, epsilon, delta)
    assert found == pytest.approx(analytic_noise(epsilon, delta), rel=1e-3)
    assert found >= analytic_noise(epsilon, delta)  # never less


def test_sums_over_everyone_cost_what_one_with_less_noise_does() -> None:
    several = {Release(3.0): 4, Release(5.0): 10, Release(2.5): 1}
    together = (4 / 3.0**2 + 10 / 5.0**2 + 1 / 2.5**2) ** -0.5
    epsilon = epsilon_of(several, 1e-5)
    assert analytic_delta(epsilon, together) == pytest.approx(1e-5, rel=0.02)
    assert analytic_delta(epsilon, together) <= 1e-5


@pytest.mark.parametrize("sampling", [0.1, 0.5])
def test_sampled_rounds_cost_what_dp_accounting_says(sampling: float) -> None:
    round_ = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(1.5))
    all_ = dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(round_, 30), dp_accounting.GaussianDpEvent(4.0)]
    )
    ours = epsilon_of({Release(1.5, sampling): 30, Release(4.0): 1}, 1e-5)
    assert ours == pytest.approx(by_dp_accounting(all_, 1e-5), rel=2e-3)
    assert ours < epsilon_of({Release(1.5): 30, Release(4.0): 1}, 1e-5) / 2  # lots help


def test_nothing_costs_nothing_and_more_costs_more() -> None:
    assert epsilon_of({}, 1e-5) == 0
    costs = [epsilon_of({Release(4.0): n}, 1e-5) for n in (1, 2, 5, 20)]
    assert costs == sorted(costs)
    assert costs[0] > 0


def test_found_noise_keeps_the_budget_and_hardly_more() -> None:
    def releases(z: float) -> dict[Release, int]:
        return {Release(z, 0.2): 25, Release(6.0): 2}

    found = least_noise(releases, 2.0, 1e-6)
    assert epsilon_of(releases(found), 1e-6) <= 2.0
    assert epsilon_of(releases(found * 0.99), 1e-6) > 2.0


def test_a_budget_that_is_spent_before_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no noise is enough for an epsilon of 0.5"):
        least_noise(lambda z: {Release(z): 1, Release(1.0): 1}, 0.5, 1e-5)


@pytest.mark.parametrize("loss", [1e-4, 0.01, 0.3, 2.8, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_nodes_find_the_same_in_closed_form(loss: float, delta: float) -> None:
    found = gaussian_epsilon(loss, delta)
    assert found == pytest.approx(epsilon_of({Release(loss**-0.5): 1}, delta), rel=2e-3, abs=2e-3)
    assert analytic_delta(found, loss**-0.5) <= delta * (1 + 1e-9)


def test_nodes_that_told_nothing_have_spent_nothing() -> None:
    assert gaussian_epsilon(0.0, 1e-5) == 0


def test_dp_accounting_is_loaded_where_a_budget_is_given_and_nowhere_else() -> None:
    code = "import sys, coterie, coterie.cli.commands, coterie.methods.fit; assert 'dp_accounting' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
