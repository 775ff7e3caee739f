# SPDX-License-Identifier: Apache-2.0
"""The linear mixed model against hand calculation, and against the density of all rows in dense matrices."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from torch import Tensor

from coterie.algorithms.mixed_clients import adapt_mixed_ask
from coterie.algorithms.mixed_model import State, mixed_model
from coterie.algorithms.profiled import derivatives, factor, independent, pivoted, profile
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.models import linear_regression


def run(rows: Ragged, **how: Any) -> tuple[State, list[Any]]:
    done = InProcess(rows).run([partial(mixed_model, **how)])
    return done.states[0], done.rounds


def setting(columns: list[int], d: int, **more: Any) -> dict[str, Any]:
    """Random effects of some columns of features and intercept, as they are."""
    basis = torch.eye(d + 1, dtype=torch.float64)[columns]
    units = torch.eye(len(columns), dtype=torch.float64)
    return {"basis": basis, "units": units, "order": tuple(range(d)), **more}


# -- by hand ------------------------------------------------------------------------------------------------------------
# Three clients with two rows each, and no features: means 2, 5 and 11 around 6. Squares within clients are 6 on 3 degrees,
# so that the noise has variance 2; between them 84 on 2 degrees, 42 each.
# REML: (42 - 2) / 2 = 20; ML: (2/3 42 - 2) / 2 = 13.
HAND = Ragged.from_groups(
    torch.zeros(6, 1, dtype=torch.float64), torch.tensor([1.0, 3, 4, 6, 10, 12], dtype=torch.float64), list("aabbcc")
)


@pytest.mark.parametrize(("reml", "variance", "error"), [(True, 20.0, 7.0), (False, 13.0, 28 / 6)])
def test_a_balanced_table_matches_hand_calculation(reml: bool, variance: float, error: float) -> None:
    state, _ = run(HAND, **setting([1], 1, reml=reml))
    kept = state.kept((0,))
    assert kept == (1,)  # the column of zeros tells nothing
    at = profile(state.total, float(state.logdet), state.n, kept, reml)
    noise = at.squares / at.freedom
    assert noise == pytest.approx(2.0, rel=1e-8)
    assert noise * float(state.theta) ** 2 == pytest.approx(variance, rel=1e-8)
    assert at.beta.tolist() == pytest.approx([0.0, 6.0])
    assert noise * float(at.inverse[1, 1]) == pytest.approx(error, rel=1e-8)  # (2 variance + noise) / 6


def test_effects_are_shrunk_as_by_hand() -> None:
    """By 2 * 20 / (2 * 20 + 2); what is left of the variance is 20 * 2 / 42."""
    engine, one = InProcess(HAND), torch.ones(1, dtype=torch.float64)
    beta = torch.tensor([0.0, 6.0], dtype=torch.float64)
    ask = adapt_mixed_ask(
        linear_regression(1), setting([1], 1)["basis"], one[:, None], beta, 10 * one[:, None], 2 * one[0]
    )
    engine.ask(ask)
    kept = engine.private[0]
    assert kept["effects"][:, 0].tolist() == pytest.approx([-4 * 40 / 42, -1 * 40 / 42, 5 * 40 / 42])
    assert kept["deviation"][:, 0].tolist() == pytest.approx([math.sqrt(40 / 42)] * 3)
    assert kept["theta"][:, 1].tolist() == pytest.approx([6 - 160 / 42, 6 - 40 / 42, 6 + 200 / 42])


def test_own_estimates_differ_as_by_hand() -> None:
    """Means have precision 2 / 2 = 1 each, so Q = 16 + 1 + 25 about their mean."""
    state, _ = run(HAND, **setting([1], 1))
    count, weight, squared, first, second = state.spread[:, 0].tolist()
    assert (count, weight, squared) == pytest.approx((3, 3, 3))
    assert second - first**2 / weight == pytest.approx(42.0)


# -- dense --------------------------------------------------------------------------------------------------------------
def planted(seed: int, clients: int = 12, sd: tuple[float, ...] = (0.7, 0.4)) -> tuple[Ragged, Any]:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 9, clients)
    groups = np.repeat([f"{i:02}" for i in range(clients)], sizes)
    x = draw.normal(size=(len(groups), 2))
    own = np.repeat(draw.normal(size=(clients, 2)) * sd, sizes, 0)
    y = 1 + x @ [0.5, -1.0] + own[:, 0] + own[:, 1] * x[:, 0] + draw.normal(size=len(groups))
    return Ragged.from_groups(torch.tensor(x), torch.tensor(y), groups), (x, y, groups)


def dense(psi: np.ndarray, columns: list[int], data: Any, reml: bool) -> float:
    """Minus twice the log-likelihood, with fixed effects and noise at their best, from the covariance of all rows."""
    x, y, groups = data
    w = np.column_stack([x, np.ones(len(y))])
    v = np.eye(len(y)) + (w[:, columns] @ psi @ w[:, columns].T) * (groups[:, None] == groups)
    inverse = np.linalg.inv(v)
    information = w.T @ inverse @ w
    beta = np.linalg.solve(information, w.T @ inverse @ y)
    left = y - w @ beta
    n = len(y) - (w.shape[1] if reml else 0)
    noise = left @ inverse @ left / n
    found = -2 * multivariate_normal(w @ beta, noise * v).logpdf(y)
    if reml:  # the integral over beta: 2 pi for each, and the determinant of its precision
        found += np.linalg.slogdet(information / noise)[1] - w.shape[1] * np.log(2 * np.pi)
    return float(found)


@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize(
    ("columns", "diagonal"), [([2], False), ([2, 0], False), ([2, 0], True), ([0], False), ([0, 1], False)]
)
def test_the_deviance_at_the_minimum_is_that_of_dense_matrices_and_nothing_is_lower(
    columns: list[int], diagonal: bool, reml: bool
) -> None:
    rows, data = planted(1)
    state, rounds = run(rows, **setting(columns, 2, reml=reml, diagonal=diagonal))
    assert state.stage == 3
    assert len(rounds) - 1 < 20  # messages
    kept, size = state.kept((0, 1)), len(columns)

    def at(theta: np.ndarray) -> float:
        lower = factor(torch.as_tensor(theta), size, diagonal).numpy()
        return dense(lower @ lower.T, columns, data, reml)

    ours = profile(state.total, float(state.logdet), state.n, kept, reml).deviance
    assert ours == pytest.approx(at(state.theta.numpy()), abs=1e-8)
    best = min(minimize(at, s * state.theta.numpy() + 0.1, method="Nelder-Mead").fun for s in (0.3, 1.0, 2.0))
    assert ours <= best + 1e-6


@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize("diagonal", [True, False])
def test_derivatives_are_those_of_finite_differences(reml: bool, diagonal: bool) -> None:
    rows, data = planted(2)
    how = setting([2, 0], 2, reml=reml, diagonal=diagonal)
    theta = torch.tensor([0.4, 0.5] if diagonal else [0.4, -0.2, 0.5], dtype=torch.float64)  # the second is larger
    sums, at = at_factor(rows, how, theta)
    root, free = pivoted(factor(theta, 2, diagonal), diagonal)
    gradient, hessian = derivatives(root, free, sums, at, reml=reml, diagonal=diagonal, expected=False)

    def f(move: Tensor) -> float:
        moved = root.clone()
        moved[free] += move
        return dense((moved @ moved.T).numpy(), [2, 0], data, reml)

    unit = 1e-4 * torch.eye(len(theta), dtype=torch.float64)
    slopes = [(f(e) - f(-e)) / 2e-4 for e in unit]
    assert gradient.tolist() == pytest.approx(slopes, abs=1e-5)
    bends = [[(f(a + b) - f(a - b) - f(b - a) + f(-a - b)) / 4e-8 for b in unit] for a in unit]
    np.testing.assert_allclose(hessian.numpy(), bends, atol=2e-3)


def at_factor(rows: Ragged, how: dict[str, Any], theta: Tensor) -> Any:
    """Sums at a factor, with the weights that belong to it."""
    from coterie.algorithms import mixed_model as file

    engine, wide = InProcess(rows), how["basis"].shape[1] + 1
    weight = torch.zeros(wide, wide, dtype=torch.float64)
    for _ in range(2):
        got = engine.ask(file._sums_ask(theta, how["basis"], weight, how["diagonal"]))
        sums = file.Sums(*(got[name] for name in file._SUMS))
        plain = engine.ask(file.plain_sums_ask(how["basis"].shape[1] - 1))["total"]
        kept = independent(plain, how["order"])
        at = profile(sums.total, float(sums.logdet), float(got["n"]), kept, how["reml"])
        weight = at.weight(how["reml"])
    return sums, at


# -- at the boundary ----------------------------------------------------------------------------------------------------
def test_a_variance_that_is_not_there_becomes_zero() -> None:
    """Means of clients differ less than rows within them do."""
    y = torch.tensor([1.0, -1, 2, -2, 3, -3, 1.5, -1.4], dtype=torch.float64)
    rows = Ragged.from_groups(torch.zeros(8, 1, dtype=torch.float64), y, list("aabbccdd"))
    state, _ = run(rows, **setting([1], 1))
    assert state.stage == 3
    assert abs(float(state.theta)) < 1e-6


def test_a_correlation_of_one_is_found() -> None:
    """Slopes are twice the intercepts, and hardly any noise hides it: the factor loses its last entry."""
    draw = np.random.default_rng(0)
    groups = np.repeat([f"{i:02}" for i in range(30)], 5)
    x, own = draw.normal(size=(150, 1)), np.repeat(draw.normal(size=30), 5)
    y = own + 2 * own * x[:, 0] + draw.normal(size=150)
    state, rounds = run(Ragged.from_groups(torch.tensor(x), torch.tensor(y), groups), **setting([1, 0], 1))
    lower = factor(state.theta, 2, False)
    psi = lower @ lower.T
    assert state.stage == 3
    assert float(psi[0, 1] / (psi[0, 0] * psi[1, 1]).sqrt()) > 0.97
    assert len(rounds) - 1 < 25
