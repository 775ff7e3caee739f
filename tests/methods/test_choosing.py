# SPDX-License-Identifier: Apache-2.0
"""Choices on held-out rows: the simplest candidate that is as good, and numbers of clusters that nobody gave."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.methods import choosing


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


# -- the search, where every number's loss is known beforehand --------------------------------------------------------
def searched(
    patch: pytest.MonkeyPatch, *, true: int, found: int, given: int | None = None, n_clients: int = 200
) -> tuple[int, str, list[tuple[int, int]]]:
    """Search where anchors tell `found` and the loss falls up to the true number: what is chosen, why, what was tried."""
    tried: list[tuple[int, int]] = []

    def attempt(self: Any, low: int, high: int) -> None:
        tried.append((low, high))
        clients = torch.linspace(1.0, 1.1, 50, dtype=torch.float64)
        self.losses |= {k: clients + max(true - k, 0) for k in range(low, high + 1)}

    patch.setattr(choosing._Search, "attempt", attempt)
    state = SimpleNamespace(theta=torch.zeros(found, 2))
    phases = SimpleNamespace(
        options=SimpleNamespace(moments=SimpleNamespace(max_clusters=given, iterations=1)),
        run=lambda *_: SimpleNamespace(states=[state]),
    )
    made = SimpleNamespace(rows=SimpleNamespace(n_clients=n_clients))
    chosen, said = choosing.number_of_clusters(phases, made, lambda k, rounds: None)  # type: ignore[arg-type, return-value]
    return chosen, said, tried


@pytest.mark.parametrize(
    ("true", "found", "tried"),
    [
        (3, 3, [(2, 6)]),
        (6, 4, [(3, 6), (7, 12)]),  # the winner is the largest that was tried
        (10, 6, [(5, 6), (7, 12)]),
        (20, 6, [(5, 6), (7, 12), (13, 24)]),
        (2, 3, [(2, 6), (1, 1)]),  # the smallest
        (3, 9, [(8, 9), (4, 7), (2, 3)]),  # anchors told too many
        (1, 1, [(1, 6)]),
    ],
)
def test_the_search_widens_at_its_bounds_and_comes_down(
    monkeypatch: pytest.MonkeyPatch, true: int, found: int, tried: list[tuple[int, int]]
) -> None:
    chosen, said, was = searched(monkeypatch, true=true, found=found)
    assert (chosen, was) == (true, tried)
    assert "the largest number tried" not in said


@pytest.mark.parametrize("given", [1, 2, 5, 6, 7, 9])
@pytest.mark.parametrize("found", [1, 6, 12])
def test_the_maximum_is_never_exceeded_and_is_checked(monkeypatch: pytest.MonkeyPatch, given: int, found: int) -> None:
    chosen, said, tried = searched(monkeypatch, true=10, found=found, given=given)
    assert chosen == given
    assert all(high <= given for _, high in tried)
    assert said.startswith(
        "moments.max_clusters is 1" if given == 1 else "the largest number tried (moments.max_clusters)"
    )
    below, _, _ = searched(monkeypatch, true=2, found=found, given=given)
    assert below == min(2, given)  # not taken for granted


def test_without_a_maximum_there_is_one_by_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, true=99, found=3)[0] == 24
    assert searched(monkeypatch, true=99, found=3, n_clients=50)[0] == 10  # five clients to each
    assert searched(monkeypatch, true=99, found=3, n_clients=4)[0] == 4


# -- planted numbers --------------------------------------------------------------------------------------------------
def _many(k: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """80 clients with 20 rows and six features, of k models that are at least 1.5 apart, where noise is 0.2."""
    draw = np.random.default_rng(seed)
    slopes = draw.normal(size=(400, 6)) * 1.5
    kept = [slopes[0]]
    for slope in slopes[1:]:
        if len(kept) < k and min(np.linalg.norm(slope - other) for other in kept) > 1.5:
            kept.append(slope)
    x = draw.normal(size=(80, 20, 6))
    y = np.einsum("mnd,md->mn", x, np.stack(kept)[np.arange(80) % k]) + 0.2 * draw.normal(size=(80, 20))
    return x.reshape(-1, 6), y.ravel(), np.repeat([f"p{i:03d}" for i in range(80)], 20)


@pytest.mark.parametrize(("k", "seed"), [(8, 0), (10, 1)])
def test_more_groups_than_are_looked_for_at_first_are_found(k: int, seed: int) -> None:
    model = coterie.MixedRegression(rounds=20, random_state=0).fit(*_many(k, seed))
    assert model.n_clusters_ == k
    assert [len(np.unique(model.labels_[i::k])) for i in range(k)] == [1] * k


def test_no_more_groups_than_were_given_are_found() -> None:
    model = coterie.MixedRegression(rounds=10, max_clusters=3, random_state=0).fit(*_many(8, 0))
    assert model.n_clusters_ == 3
