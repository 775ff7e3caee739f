# SPDX-License-Identifier: Apache-2.0
"""What the studies of comparisons plant, and how they count."""

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.studies.choices import CASES as CASE_NAMES
from coterie.studies.choices import REAL_DATA
from coterie.studies.compare_planted import CASES, Case, Settings, planted_clients, run
from coterie.studies.compare_real import TASKS, _over_seeds
from coterie.studies.data.planted import planted_intercepts, planted_rare


@pytest.mark.parametrize("icc", [0.05, 0.4])
def test_intercepts_have_their_share_of_the_variance_beside_the_signal(icc: float) -> None:
    made = planted_intercepts(icc, n_clients=400, rows=50, n_features=3, noise=0.5, seed=0)
    assert isinstance(made.x, Tensor)
    assert isinstance(made.y, Tensor)
    x = made.x.view(400, 50, 3)
    y = made.y.view(400, 50)
    within = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    slope = torch.linalg.lstsq(within[0].flatten(0, 1), within[1].flatten()[:, None]).solution[:, 0]
    rest = y - x @ slope
    inside = float((rest - rest.mean(1, keepdim=True)).square().sum()) / (400 * 49)
    between = float(rest.mean(1).var()) - inside / 50
    assert inside == pytest.approx(0.25, rel=0.05)
    assert between / (between + inside) == pytest.approx(icc, abs=0.06)


def test_two_in_a_hundred_are_positive_and_levels_differ() -> None:
    made = planted_rare(n_clients=200, rows=500, n_features=3, seed=0)
    assert isinstance(made.y, Tensor)
    rate = made.y.view(200, 500).double().mean(1).numpy()
    assert 0.012 < rate.mean() < 0.03
    chance = np.sqrt(rate.mean() * (1 - rate.mean()) / 500)
    assert rate.std() > 1.5 * chance


def test_intercepts_without_a_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"share of 1\.0"):
        planted_intercepts(1.0, n_clients=4, rows=4, n_features=1, noise=0.5, seed=0)


def test_the_command_line_knows_all_names() -> None:
    assert tuple(case.name for case in CASES) == CASE_NAMES
    assert tuple(task.name for task in TASKS) == REAL_DATA


@pytest.mark.parametrize("case", [case for case in CASES if case.outcome], ids=lambda case: case.name)
def test_counts_and_costs_are_planted_as_the_case_says(case: Case) -> None:
    """Own models of the logarithm: levels differ by the spread alone, or slopes by the group alone."""
    clients = planted_clients(Settings(clients=40, rows=4000, features=2), case, 1000, test_size=0.0)
    assert clients.schema.outcome == case.outcome
    assert isinstance(clients.train.x, Tensor)
    assert isinstance(clients.train.y, Tensor)
    x, y = clients.train.x.view(40, 4000, 2), clients.train.y.view(40, 4000).double()
    assert bool((y >= 0).all())
    x1 = torch.cat([x.double(), torch.ones(40, 4000, 1).double()], -1)
    if case.outcome == "poisson":
        assert torch.equal(y, y.floor())
        own = torch.stack([_poisson(a, b) for a, b in zip(x1, y, strict=True)])
    else:
        own = torch.linalg.lstsq(x1, y.log()[..., None]).solution[..., 0]
    groups = torch.arange(40) % case.size
    for k in range(case.size):  # standard errors are below 0.03
        assert float(own[groups == k][:, :2].std(0).max()) < 0.05
    level = own[:, 2].std()
    assert float(level) == pytest.approx(case.spread, rel=0.3) if case.spread else float(level) < 0.05
    if case.size == 2:
        assert float((own[0, :2] - own[1, :2]).norm()) > 0.1


def _poisson(x: Tensor, y: Tensor) -> Tensor:
    """Poisson regression by Newton's method."""
    theta = torch.tensor([0.0, 0.0, float(y.mean().log())], dtype=torch.float64)
    for _ in range(20):
        mean = (x @ theta).exp()
        theta = theta + torch.linalg.solve(x.T @ (mean[:, None] * x), x.T @ (y - mean))
    return theta


def test_a_study_of_counts_and_costs_counts_what_was_found() -> None:
    names = ("counts in 2 groups", "costs with own intercepts")
    found = run(Settings(cases=names, clients=16, rows=30, features=2, reps=1, quick=True, jobs=1, seed=1000))
    assert [row["case"] for row in found.rows] == list(names)
    assert [row["truth"] for row in found.rows] == ["clusters", "shrunk"]
    assert all(np.isfinite(row["loss"]) and row["excess"] >= 0 for row in found.rows)


def test_seeds_are_compared_by_words_and_by_what_will_do() -> None:
    def line(headline: str, chosen: str, *will_do: str) -> dict[str, object]:
        return {
            "data": "x", "headline": headline, "chosen_name": chosen, "chosen": chosen, "will_do": [chosen, *will_do],
            "behind": 0.1, "seconds": 2.0,
        }  # fmt: skip

    found = _over_seeds([line("A or B.", "a", "b"), line("A or B.", "b", "a"), line("A.", "a")])
    assert found["same_headline"] == pytest.approx(2 / 3)
    assert found["agree"] == pytest.approx(5 / 6)  # the second chooses b, which the third does not name
    assert found["every_choice"] == "a, b"
    assert _over_seeds([line("A.", "a")])["agree"] == 1.0
