# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import torch

from coterie.algorithms.linear_by_fold import NOISE_ROWS, Problem
from coterie.methods.linear.choice import outlying, outlying_classes
from coterie.methods.linear.scores import common_noise, judged_newcomers, judged_rows, normal_score
from coterie.protocol import Replies

NAN = math.nan


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_client_that_no_shared_structure_serves_is_an_outlier() -> None:
    scores = torch.tensor([np.linspace(-1.1, -0.9, 21).tolist(), [-1.5] * 21], dtype=torch.float64)
    scores[:, 3] = -4.0
    scores[0, 5], scores[1, 5] = -4.0, -1.0  # served badly by one structure only
    scores[:, 7] = NAN
    found = outlying(scores, torch.full((21,), 400.0))
    assert found[3] > 3.5
    assert bool((found[[i for i in range(21) if i not in (3, 7)]] < 3.5).all())
    assert bool(found[7].isnan())
    # with 2 rows a score of -2 is chance: the standard deviation of a mean of 2 is 0.5
    scores[:, 3] = -2.0
    assert outlying(scores, torch.full((21,), 2.0))[3] < 3.5 < outlying(scores, torch.full((21,), 400.0))[3]


def test_of_classes_an_outlier_is_who_gains_much_by_a_model_of_its_own() -> None:
    rate = np.linspace(0.01, 0.06, 21)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))  # what the true model scores: lower where less rare
    shared = torch.tensor(-entropy, dtype=torch.float64)[None]
    rows = torch.full((21,), 1000.0, dtype=torch.float64)
    assert bool((outlying_classes(shared, shared - 0.001, rows) < 3.5).all())
    own = shared.clone()
    own[0, 3] += 0.1  # 100 nats over 1000 rows: sqrt(1000 * 0.1 / 2) = 7.1 standard errors
    own[0, 4] += 0.005  # 5 nats: 1.6
    found = outlying_classes(shared, own, rows)
    assert float(found[3]) == pytest.approx(math.sqrt(50), rel=1e-3)
    assert float(found[4]) == pytest.approx(math.sqrt(2.5), rel=1e-3)
    shared[0, 7] = NAN
    assert bool(outlying_classes(shared, own, rows)[7].isnan())


def test_noise_is_the_clients_own_and_drawn_to_the_harmonic_mean() -> None:
    half, n = tensor(2.0, 8.0, 100.0), tensor(8.0, 8.0, 8.0)
    noise, common = common_noise(half, n)
    for i in range(3):
        assert float(noise[i]) == pytest.approx(
            (NOISE_ROWS * float(common) + 2 * float(half[i])) / (NOISE_ROWS + 8), rel=1e-3
        )
    assert float(common) == pytest.approx(3 / sum(1 / float(v) for v in noise), rel=1e-3)
    assert float(common) < float((2 * half / n).mean())  # the wild client hardly counts


def test_a_score_is_the_mean_log_density_of_held_out_rows_with_the_noise_of_the_other_folds() -> None:
    problem = Problem(1, 0, 2, (0, 1, 2))
    half = torch.tensor([[[1.0], [3.0], [2.0]], [[2.0], [2.0], [1.0]]], dtype=torch.float64)  # [M, F, J]
    rows = torch.tensor([[[4.0], [4.0], [2.0]], [[4.0], [4.0], [1.0]]], dtype=torch.float64)
    found = judged_rows(
        Replies({"loss": half, "metric": 2 * half, "rows": rows}, torch.arange(2), torch.arange(0)), problem
    )
    zero, _ = common_noise(tensor(3.0, 2.0), tensor(4.0, 4.0))  # the noise for fold 0 comes from fold 1
    first, _ = common_noise(tensor(1.0, 2.0), tensor(4.0, 4.0))
    both, common = common_noise(tensor(4.0, 4.0), tensor(8.0, 8.0))

    def density(half_squares: float, n: int, noise: float) -> float:
        return -0.5 * n * math.log(2 * math.pi * noise) - half_squares / noise

    expected = (density(1.0, 4, float(zero[0])) + density(3.0, 4, float(first[0]))) / 8
    assert float(found.score[0, 0]) == pytest.approx(expected)
    assert float(found.test_score[0, 0]) == pytest.approx(density(2.0, 2, float(both[0])) / 2)
    assert float(found.metric[0, 1]) == pytest.approx(1.0)
    assert float(found.noise[0]) == pytest.approx(float(common))


def test_new_clients_are_judged_with_the_common_noise() -> None:
    got = Replies(
        {"loss": torch.full((2, 1, 1), 3.0), "metric": torch.full((2, 1, 1), 6.0), "rows": torch.full((2, 1, 1), 4.0)},
        torch.arange(2), torch.arange(0),
    )  # fmt: skip
    score, right, rows = judged_newcomers(got, Problem(1, 0, 2, (2,)), tensor(2.0))
    assert float(score[0, 1]) == pytest.approx(-0.5 * math.log(4 * math.pi) - 3 / 2 / 4)
    assert float(right[0, 0]) == 1.5
    assert rows.tolist() == [4.0, 4.0]
    assert float(normal_score(tensor(3.0), tensor(4.0), tensor(2.0))) == pytest.approx(4 * float(score[0, 0]))
