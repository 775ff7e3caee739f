# SPDX-License-Identifier: Apache-2.0
"""Scores from sums over clients, against direct computation with every client's own values."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import NOISE_ROWS, Problem
from coterie.algorithms.outliers import outlier_scores
from coterie.algorithms.score_sums import ERRORS, PLAIN, ROW_DEVIATION, keep_judged, normal_score
from coterie.methods.linear.scores import Judged, Table, distances, joined, judged, paired, with_noise
from coterie.methods.linear.sources import Here, finished
from coterie.protocol import Replies
from coterie.select import Paired

V = 3
PROBLEM = Problem(1, 0, V, tuple(range(V + 1)))


def here(half: Tensor, rows: Tensor, kind: int = ERRORS, problem: Problem = PROBLEM) -> tuple[Here, Judged]:
    """Clients that keep half squared errors [M, F, J] of rows [M, F, 1]."""
    kept = keep_judged(problem, "x", {"loss": half, "metric": 2 * half, "rows": rows})
    got = Replies({"loss": half.sum(0), "rows": rows.sum(0)}, torch.arange(1), torch.arange(0))
    return Here(kept, 1 + torch.arange(len(half))), judged(got, problem, "x", kind)


def drawn(clients: int = 12, settings: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, 9, (clients, V + 1, 1), generator=draw).double()
    wide = torch.rand(clients, 1, 1, generator=draw).double() + 0.2
    half = 0.5 * rows * wide * (0.8 + 0.4 * torch.rand(clients, V + 1, settings, generator=draw).double())
    return half, rows


def of(source: Here, one: Judged) -> Paired:
    found: Paired = finished(paired(source, Table.of({"x": one}, PROBLEM)))[0][0]
    return found


def by_hand(half: np.ndarray, rows: np.ndarray, f: int) -> float:
    """The common noise without a fold: iterated until nothing moves."""
    others = [g for g in range(V) if g != f]
    h, n = half[:, others].sum(1), rows[:, others].sum(1)
    common = 2 * h.sum() / n.sum()
    for _ in range(5000):
        common = len(h) / ((NOISE_ROWS + n) / (NOISE_ROWS * common + 2 * h)).sum()
    return float(common)


@pytest.mark.parametrize("wild", [1.0, 1e6])
def test_the_common_noise_is_the_harmonic_mean_of_clients_own(wild: float) -> None:
    half, rows = drawn()
    half[3] *= wild  # a client that nothing serves hardly counts
    source, one = here(half, rows)
    table = finished(with_noise(source, Table.of({"x": one}, PROBLEM)))
    for f in range(V + 1):
        for j in range(4):
            want = by_hand(half[..., j].numpy(), rows[..., 0].numpy(), f)
            assert float(table.noise[0, f, j]) == pytest.approx(want, rel=1e-6)


def test_scores_are_mean_log_densities_of_held_out_rows_with_the_noise_of_the_other_folds() -> None:
    half, rows = drawn()
    source, one = here(half, rows)
    table = finished(with_noise(source, Table.of({"x": one}, PROBLEM)))
    scores, _, n = finished(paired(source, table))
    want = np.zeros((4, len(half)))
    for c in range(len(half)):
        for j in range(4):
            for f in range(V):
                others = [g for g in range(V) if g != f]
                h, m = float(half[c, others, j].sum()), float(rows[c, others].sum())
                noise = (NOISE_ROWS * float(table.noise[0, f, j]) + 2 * h) / (NOISE_ROWS + m)
                own = float(rows[c, f, 0])
                want[j, c] += -0.5 * own * math.log(2 * math.pi * noise) - float(half[c, f, j]) / noise
            want[j, c] /= float(rows[c, :V].sum())
    same = Paired.of(torch.from_numpy(want))
    np.testing.assert_allclose(scores[0].means, same.means, rtol=1e-10)
    for j in range(4):
        assert scores[0].mean_and_error(j) == pytest.approx(same.mean_and_error(j), rel=1e-9)
        assert scores[0].gap(j, 0) == pytest.approx(same.gap(j, 0), rel=1e-8, abs=1e-14)
    assert n == float(rows[:, :V].sum())


def test_clients_with_few_rows_or_that_judged_only_some_do_not_count() -> None:
    half, rows = drawn()
    rows[2, :V], half[2, :V] = 0.0, 0.0
    half[5] = math.nan
    source, one = here(half, rows, PLAIN)
    scores, _, _ = finished(paired(source, Table.of({"x": one}, PROBLEM)))
    assert scores[0].n == len(half) - 2
    more = keep_judged(
        PROBLEM, "y", {"loss": half, "metric": half, "rows": rows * (torch.arange(12) != 7)[:, None, None]}
    )
    both = joined([one, Judged((("y scores", 4),), one.kind, one.loss, one.rows, one.shape)])
    scores, _, _ = finished(paired(Here({**source.kept, **more}, source.keys), Table.of({"x": both}, PROBLEM)))
    assert scores[0].n == len(half) - 3


def test_clients_are_drawn_again_by_their_keys_and_as_often_as_they_are_there() -> None:
    half, rows = drawn(clients=40)
    source, one = here(half, rows, PLAIN)
    how: dict[str, Any] = {"repetitions": 300, "key": torch.tensor(7)}
    every, _, _ = finished(paired(source, Table.of({"x": one}, PROBLEM), **how))
    counts = np.array([one.n for one in every[1:]])
    assert abs(counts.mean() - 40) < 4 * math.sqrt(40 / 300)  # Poisson's law: four standard errors
    assert 0.8 < counts.var() / 40 < 1.25
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = Here({name: value[order] for name, value in source.kept.items()}, source.keys[order])
    again, _, _ = finished(paired(moved, Table.of({"x": one}, PROBLEM), **how))
    for first, second in zip(every, again, strict=True):
        np.testing.assert_allclose(first.products, second.products, atol=1e-9)


@pytest.mark.parametrize("far", [1.0, 1e5])
def test_usual_distances_are_found_by_counts(far: float) -> None:
    draw = torch.Generator().manual_seed(0)
    score = -1.0 + 0.1 * torch.randn(31, generator=draw).double()
    score[3] = -1 - far
    rows = torch.full((31, V + 1, 1), 100.0).double()
    source, one = here(-score[:, None, None] * rows, rows, PLAIN)
    about = {"shared": (0,), "own": (), "least": 0}
    middle, spread = finished(distances(source, Table.of({"x": one}, PROBLEM), about, of(source, one)))
    median = float((-score).median())
    assert middle == pytest.approx(median, abs=2e-3)  # a fiftieth of the deviation
    assert spread == pytest.approx(1.4826 * float((-score - median).abs().median()), abs=3e-3)
    table = Table(PROBLEM, {"x": slice(0, 1)}, one, torch.ones_like(one.loss), {**about, "usual": (middle, spread)})
    scores, _, _ = finished(paired(source, table))
    noise = torch.full((31,), ROW_DEVIATION / math.sqrt(300)).double()
    assert scores[0].n == int((outlier_scores(-score, noise) <= 3.5).sum()) == 30


def test_of_classes_an_outlier_is_who_gains_much_by_a_model_of_its_own() -> None:
    rate = np.linspace(0.01, 0.06, 21)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))  # what the true model scores: lower where less rare
    loss = torch.from_numpy(np.stack([entropy, entropy], 1))[:, None].expand(-1, V + 1, -1).clone()
    loss[3, :, 1] -= 0.15  # 45 nats over 300 rows: sqrt(22.5) = 4.7 standard errors
    loss[4, :, 1] -= 0.015  # 4.5 nats: 1.5
    rows = torch.full((21, V + 1, 1), 100.0).double()
    source, one = here(loss * rows, rows, PLAIN)
    about = {"shared": (0,), "own": (1,), "least": 0}
    usual = finished(distances(source, Table.of({"x": one}, PROBLEM), about, of(source, one)))
    table = Table(PROBLEM, {"x": slice(0, 2)}, one, torch.ones_like(one.loss), {**about, "usual": usual})
    scores, _, _ = finished(paired(source, table))
    assert scores[0].n == 20
    by_score = {"shared": (0,), "own": (), "least": 0}
    usual = finished(distances(source, Table.of({"x": one}, PROBLEM), by_score, of(source, one)))
    assert usual[1] > 0.01  # the scores of clients with rarer classes spread


def test_a_score_of_new_clients_takes_the_common_noise() -> None:
    half, n = torch.tensor(3.0).double(), torch.tensor(4.0).double()
    want = 4 * (-0.5 * math.log(4 * math.pi) - 3 / 2 / 4)
    assert float(normal_score(half, n, torch.tensor(2.0).double())) == pytest.approx(want)
