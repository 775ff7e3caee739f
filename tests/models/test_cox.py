# SPDX-License-Identifier: Apache-2.0
"""Cox's partial likelihood: against loops over events, automatic differentiation, and a case by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.models.cox import Risk, concordance
from coterie.models.outcomes import OUTCOMES

N = 24


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, 2], times with ties of which about two thirds are events, and a mask that leaves some rows out."""
    draw = np.random.default_rng(seed)
    times = np.ceil(4 * draw.exponential(size=N)) / 2
    y = np.where(draw.random(N) < 0.67, times, -times)
    mask = (draw.random(N) < 0.8).astype(float)
    return torch.from_numpy(draw.normal(size=(N, 2))), torch.from_numpy(y), torch.from_numpy(mask)


def looped(eta: np.ndarray, y: np.ndarray, mask: np.ndarray, *, efron: bool) -> float:
    """Time after time, over all events."""
    total = 0.0
    for time in np.unique(np.abs(y)):
        here = (y == time) & (mask > 0)
        at_risk = np.exp(eta[(np.abs(y) >= time) & (mask > 0)]).sum()
        for number in range(here.sum()):
            gone = number / here.sum() * np.exp(eta[here]).sum() if efron else 0.0
            total += np.log(at_risk - gone)
        total -= eta[here].sum()
    return float(total)


@pytest.mark.parametrize("efron", [True, False])
def test_the_likelihood_is_that_of_a_loop_over_events(efron: bool) -> None:
    for seed in range(5):
        x, y, mask = case(seed)
        eta = x @ torch.tensor([0.8, -0.5], dtype=torch.float64)
        found = float(Risk(eta, y, mask, efron).losses.sum())
        assert found == pytest.approx(looped(eta.numpy(), y.numpy(), mask.numpy(), efron=efron), rel=1e-12)


@pytest.mark.parametrize("efron", [True, False])
def test_derivatives_are_those_of_the_likelihood(efron: bool) -> None:
    x, y, mask = case(1)

    def loss(theta: Tensor) -> Tensor:
        return Risk(x @ theta, y, mask, efron).losses.sum()

    theta = torch.tensor([0.8, -0.5], dtype=torch.float64)
    risk = Risk(x @ theta, y, mask, efron)
    slope = torch.autograd.functional.jacobian(loss, theta)
    torch.testing.assert_close((risk.hazards - risk.events) @ x, slope, rtol=1e-9, atol=1e-9)
    bend = torch.autograd.functional.hessian(loss, theta)
    torch.testing.assert_close(risk.hessian(x), bend, rtol=1e-9, atol=1e-9)


def test_two_rows_by_hand() -> None:
    """The first has its event while both are at risk: log(e^1 + e^0) - 1; the second is alone at risk: 0."""
    y, outputs = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    loss = OUTCOMES["cox"].loss(outputs, y)
    torch.testing.assert_close(loss, torch.tensor([np.log(np.e + 1) - 1, 0.0], dtype=torch.float64))


def test_padding_changes_nothing_and_clients_do_not_mix() -> None:
    x, y, _ = case(2)
    eta = x @ torch.tensor([0.8, -0.5], dtype=torch.float64)
    outcome = OUTCOMES["cox"]
    padded = outcome.loss(torch.cat([eta, eta.new_full((5,), 3.0)])[:, None], torch.cat([y, y.new_zeros(5)]))
    torch.testing.assert_close(padded[:N], outcome.loss(eta[:, None], y))
    assert not bool(padded[N:].any())
    two = outcome.loss(torch.stack([eta, -eta])[..., None], torch.stack([y, y.flip(0)]))
    torch.testing.assert_close(two[1], outcome.loss(-eta[:, None], y.flip(0)))


def test_nobody_with_an_event_has_no_loss() -> None:
    x, y, mask = case(3)
    risk = Risk(x[:, 0], -y.abs(), mask, True)
    assert float(risk.losses.abs().sum()) == 0.0
    assert bool((risk.hessian(x) == 0).all())
    assert float(Risk(x[:, 0], y, torch.zeros_like(mask), True).losses.abs().sum()) == 0.0


def test_concordance_counts_pairs() -> None:
    """Counted by hand: one pair in order and one tied, of those that can be compared."""
    y = torch.tensor([1.0, -2.0, 3.0, -3.0], dtype=torch.float64)  # pairs: 1-2, 1-3, 1-4, 3-4
    eta = torch.tensor([1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    # 1 over 2: right; 1 and 3: tied; 1 under 4: wrong; 3 under 4, who was there at the same time and later: wrong
    assert float(concordance(eta, y, torch.ones_like(y))) == pytest.approx(1.5 / 4)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert float(concordance(eta, y, mask)) == pytest.approx(1.5 / 2)
    assert float(concordance(eta, -y.abs(), torch.ones_like(y))) == 0.5


def test_concordance_is_that_of_lifelines() -> None:
    utils = pytest.importorskip("lifelines.utils")
    for seed in range(3):
        x, y, _ = case(seed)
        eta = (10 * x[:, 0]).round() / 10  # ties
        theirs = utils.concordance_index(y.abs().numpy(), -eta.numpy(), (y > 0).numpy())
        assert float(concordance(eta, y, torch.ones_like(y))) == pytest.approx(theirs, rel=1e-12)
