# SPDX-License-Identifier: Apache-2.0
"""Choices on held-out rows: the simplest candidate that is as good, and numbers of clusters that nobody gave."""

import numpy as np
import torch

import coterie
from coterie.choosing import _simplest


def test_the_smallest_number_within_one_standard_error_of_the_best_wins() -> None:
    draw = torch.Generator().manual_seed(0)
    base = torch.rand(100, generator=draw, dtype=torch.float64)
    noise = torch.randn(100, generator=draw, dtype=torch.float64)
    noise -= noise.mean()  # so that candidates 1 and 2 differ by the given means only
    worse, equal, best = base + 1.0, base + 0.01 * noise + 0.0005, base
    assert _simplest(torch.stack([worse, equal, best]), 1.0) == 1  # 0.05 in all is less than the error 0.01 * sqrt(100)
    assert _simplest(torch.stack([worse, base + 0.01 * noise + 0.005, best]), 1.0) == 2  # 0.5 is more
    assert _simplest(torch.stack([base, base, base]), 1.0) == 0


def test_a_candidate_that_diverged_is_never_chosen() -> None:
    good = torch.ones(5, dtype=torch.float64)
    assert _simplest(torch.stack([torch.full_like(good, torch.nan), good]), 1.0) == 1


def _people(slopes: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients with 30 rows and two features; every client has its own slopes [M, 2]."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(len(slopes), 30, 2))
    y = np.einsum("mnd,md->mn", x, slopes) + 0.3 * draw.normal(size=x.shape[:2])
    return x.reshape(-1, 2), y.ravel(), np.repeat([f"p{i:03d}" for i in range(len(slopes))], 30)


def test_groups_that_stand_out_are_counted() -> None:
    slopes = np.array([[2.0, 0.0], [-2.0, 1.0], [0.0, -3.0]])[np.arange(60) % 3]
    model = coterie.MixedRegression(random_state=0).fit(*_people(slopes))
    assert model.n_clusters_ == 3
    assert [len(np.unique(model.labels_[k::3])) for k in range(3)] == [1, 1, 1]


def test_a_group_that_hides_among_small_clients_is_found() -> None:
    draw = np.random.default_rng(0)
    counts, group = np.array([50] * 40 + [10] * 110), draw.choice(3, 150, p=[0.2, 0.3, 0.5])
    slopes = draw.normal(size=(3, 20)) * 2 / np.sqrt(20)
    x = draw.normal(size=(counts.sum(), 20))
    names = np.repeat([f"c{i:03d}" for i in range(150)], counts)
    y = (x * slopes[np.repeat(group, counts)]).sum(1) + 0.2 * draw.normal(size=len(x))
    model = coterie.MixedRegression(random_state=0).fit(x, y, names)
    assert model.n_clusters_ == 3
    assert model.score(x, y, names) > 0.97


def test_where_clients_differ_by_degrees_the_number_is_chosen_on_held_out_rows() -> None:
    draw = np.random.default_rng(1)
    angle = draw.uniform(0, 2 * np.pi, 80)  # evenly around a circle: no groups, yet one model serves nobody
    data = _people(2 * np.stack([np.cos(angle), np.sin(angle)], 1))
    chosen = coterie.MixedRegression(random_state=0).fit(*data)
    one = coterie.MixedRegression(n_clusters=1, random_state=0).fit(*data)
    assert chosen.n_clusters_ > 2
    assert chosen.score(*data) > one.score(*data) + 0.5


def test_one_group_is_found_to_be_one() -> None:
    model = coterie.MixedRegression(random_state=0).fit(*_people(np.tile([1.0, -1.0], (40, 1))))
    assert model.n_clusters_ == 1
