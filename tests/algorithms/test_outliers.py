# SPDX-License-Identifier: Apache-2.0
"""Outlier scores: robust z values, and nobody an outlier by chance."""

import math

import pytest
import torch
from torch import Tensor

from coterie.algorithms.outliers import chance, outlier_scores


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_scores_are_robust_z_values() -> None:
    # The median is 3, absolute deviations are 2, 1, 0, 1, 97, inf, 0.5: their median is 1.
    distance = numbers(1, 2, 3, 4, 100, math.inf, 2.5)
    want = [(v - 3) / 1.4826 for v in distance.tolist()]
    assert outlier_scores(distance, torch.zeros(7, dtype=torch.float64)).tolist() == pytest.approx(want)


def test_whoever_differs_from_clients_that_agree_exactly_has_a_huge_score_unless_chance_explains_it() -> None:
    distance = numbers(0.1, 0.1, 0.1, 0.6)
    assert outlier_scores(distance, numbers(0, 0, 0, 0))[3] > 1e100
    assert outlier_scores(distance, numbers(0.5, 0.5, 0.5, 0.5)).tolist() == pytest.approx([0, 0, 0, 1])
    assert outlier_scores(distance, numbers(9, 9, 9, 0.05)).tolist() == pytest.approx([0, 0, 0, 10])


def test_chance_is_what_estimates_of_equal_components_owe_to_it() -> None:
    # 2 components of 4 parameters share 32 rows: 16 each, variance 1/16 of each parameter, length sqrt(4 / 16); half of it.
    assert chance(torch.tensor([32, 0]), 2, 4).tolist() == pytest.approx([0.25, math.sqrt(2)], rel=1e-12)  # roots round
    draw = torch.Generator().manual_seed(0)
    alike = torch.randn(1000, 2, 4, generator=draw, dtype=torch.float64).div(4).norm(dim=-1)  # [M, R]
    assert float(alike.square().mean().sqrt()) == pytest.approx(0.5, rel=0.05)
    assert float(outlier_scores(alike.mean(1), chance(torch.full((1000,), 32), 2, 4)).max()) < 3.5


def test_nobody_and_infinities_have_scores() -> None:
    assert outlier_scores(numbers(), numbers()).tolist() == []
    assert outlier_scores(numbers(7), numbers(0)).tolist() == [0.0]
    assert outlier_scores(numbers(math.inf, math.inf, 1), numbers(0, 0, 0)).isnan().sum() == 0
