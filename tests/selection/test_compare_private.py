# SPDX-License-Identifier: Apache-2.0
"""Comparisons with a privacy budget: what was planted is chosen, noise is in the errors, and the budget is kept."""

from typing import Any

import pytest
import torch

from coterie.algorithms.private_candidates import Judged, simplest
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.errors import ConfigError, DataError
from coterie.selection.private import PrivateChoice, compare_private
from coterie.studies.data.planted import Truth, planted_structure

pytestmark = pytest.mark.usefixtures("counted_noise")


def clients_of(truth: Truth, size: int = 1, *, seed: int, n_clients: int = 500, rows: int = 40) -> Clients:
    made = planted_structure(truth, size, n_clients=n_clients, rows=rows, n_features=10, noise=0.5, seed=seed)
    assert isinstance(made.x, torch.Tensor)
    assert isinstance(made.y, torch.Tensor)
    return from_arrays(made.x.numpy(), made.y.numpy(), made.names[made.owners], task="regression", seed=seed)


def word(found: PrivateChoice) -> tuple[str, dict[str, int]]:
    return found.chosen.structure, found.chosen.setting


@pytest.mark.parametrize(
    ("truth", "size", "wanted"),
    [
        ("global", 1, ("global", {})),
        ("clusters", 2, ("clusters", {"n_clusters": 2})),
        ("clusters", 3, ("clusters", {"n_clusters": 3})),
        ("local", 1, ("local", {})),
    ],
)
def test_what_was_planted_is_chosen_with_an_epsilon_of_8(truth: Truth, size: int, wanted: Any) -> None:
    found = [word(compare_private(clients_of(truth, size, seed=seed), epsilon=8, seed=seed)) for seed in range(1, 6)]
    assert found.count(wanted) >= 4  # the study asks for nine of ten


def test_the_budget_is_spent_and_not_exceeded() -> None:
    for secure in (False, True):
        found = compare_private(clients_of("clusters", 2, seed=1), epsilon=4, delta=1e-6, seed=1, secure=secure)
        assert 3.9 < found.privacy["spent"] <= 4
        assert found.privacy["delta"] == 1e-6
        assert {one["purpose"] for one in found.privacy["questions"]} == {
            "scales of columns", "means of columns", "how clients' models vary", "directions of clients' models",
            "groups of clients' models", "the best of groups", "scores of candidates",
        }  # fmt: skip


def judged(mean: list[float], spread: float, deviation: float) -> Judged:
    second = torch.diag(torch.full((len(mean),), spread**2, dtype=torch.float64))
    second[0, 0] = 0.0
    return Judged(
        1.0, torch.tensor(mean, dtype=torch.float64), second + torch.outer(*[torch.tensor(mean)] * 2), deviation, 100
    )


def test_errors_are_those_of_clients_and_of_noise() -> None:
    found = judged([0.0, -0.5, -0.55], 0.2, 0.03)
    assert found.error(1, 1) == pytest.approx((2 * 0.03**2) ** 0.5)
    assert found.error(0, 1) == pytest.approx((0.2**2 / 100 + 0.03**2) ** 0.5, rel=1e-6)
    assert found.error(1, 2) == pytest.approx((2 * 0.2**2 / 100 + 2 * 0.03**2) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(("deviation", "wanted"), [(0.0, 2), (0.05, 1), (1.0, 0)])
def test_the_simplest_within_the_error_is_chosen_and_noise_is_in_it(deviation: float, wanted: int) -> None:
    found = judged([0.0, -0.5, -0.55], 0.01, deviation)
    assert simplest(found, range(3), 0.0, 1.0) == wanted


def test_fewer_groups_that_lose_a_small_share_of_the_gain_are_as_good() -> None:
    found = judged([0.0, -0.5, -0.52], 0.001, 0.0)
    assert simplest(found, [1, 2], 0.0, 1.0) == 2
    assert simplest(found, [1, 2], 0.0, 1.0, gain=0.08) == 1


def test_a_budget_that_tells_no_groups_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="times as large as what tells them apart") as error:
        compare_private(clients_of("global", seed=1), epsilon=0.3)
    assert "it takes" in str(error.value.hint)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(DataError, match="more rows than the 11 parameters"):
        compare_private(clients_of("global", seed=1, rows=8), epsilon=8)
    made = clients_of("global", seed=1)
    labels = torch.arange(len(made.train.owners)) % 2
    classes = from_arrays(
        torch.randn(len(labels), 3, dtype=torch.float64).numpy(), labels.numpy(), made.train.names[made.train.owners],
        task="classification", seed=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="of linear regressions"):
        compare_private(classes, epsilon=8)
