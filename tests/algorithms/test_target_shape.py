# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from scipy.stats import entropy, skew

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.target_shape import Shape, target_shape
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess


def shape_of(y: np.ndarray, n_classes: int, zero: float = 0.0, folds: int = 2) -> Shape:
    owner = np.array([f"c{i % 5}" for i in range(len(y))])
    rows = Ragged.from_groups(torch.zeros(len(y), 1, dtype=torch.float64), torch.from_numpy(y), owner)
    folded = rows.with_folds(folds, seed=0)
    problem = Problem(1, n_classes, folds, tuple(range(folds + 1)))
    found = InProcess(folded).run([lambda state: target_shape(problem, zero)]).states[0]
    assert isinstance(found, Shape)
    return found


def test_skewness_is_that_of_all_rows_together() -> None:
    y = np.random.default_rng(0).exponential(size=500) + 3.0
    found = shape_of(y, 0, zero=2.9)
    assert found.skewness == pytest.approx(skew(y), rel=1e-6)
    assert found.positive
    assert found.entropy is None
    assert not shape_of(y, 0, zero=float(y.min())).positive


def test_a_constant_target_is_not_skewed() -> None:
    assert shape_of(np.full(20, 0.1), 0).skewness == 0.0


def test_entropy_is_that_of_the_frequencies_of_classes() -> None:
    y = np.repeat([0, 1, 2], [90, 9, 1])
    assert shape_of(y, 3).entropy == pytest.approx(entropy([90, 9, 1]))


def test_test_rows_are_left_out() -> None:
    names = np.repeat(["a", "b"], 10)
    train, test = (Ragged.from_groups(torch.zeros(20, 1).double(), torch.full((20,), k), names) for k in (0, 1))
    rows = train.with_folds(2, seed=0, test=test)
    problem = Problem(1, 2, 2, (0, 1, 2))
    assert InProcess(rows).run([lambda state: target_shape(problem, 0.0)]).states[0].entropy == 0.0
