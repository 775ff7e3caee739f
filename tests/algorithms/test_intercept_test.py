# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from coterie.algorithms.intercept_test import intercepts_differ
from coterie.algorithms.linear_by_fold import NOISE_ROWS, Problem
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess

FOLDS = 4
NOISE = 2.0


def drawn(seed: int, spread: float, *, clients: int = 40, rows: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, linear predictors with intercepts of clients, and whose rows they are."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(clients), rows)
    x = rng.normal(size=(len(owner), 2))
    return x, x @ [0.5, -1.0] + spread * rng.normal(size=clients)[owner], owner


def folded(x: np.ndarray, y: np.ndarray, owner: np.ndarray) -> Ragged:
    names = np.array([f"c{i:02d}" for i in owner])
    return Ragged.from_groups(torch.from_numpy(x), torch.from_numpy(y), names).with_folds(FOLDS, seed=0)


def statistic(rows: Ragged, theta: list[float], n_classes: int = 0, *, whole: bool = True) -> float:
    problem = Problem(2, n_classes, FOLDS, tuple(range(FOLDS + whole)))
    about = (torch.tensor(theta, dtype=torch.float64), torch.tensor(NOISE, dtype=torch.float64))
    found = InProcess(rows).run([lambda state: intercepts_differ(problem, *about)]).states[0]
    assert isinstance(found, float)
    return found


def by_hand(rows: Ragged, error: np.ndarray, scale: bool) -> float:
    """A loop over clients and pairs of folds.  error [N, outputs], in the order of the rows"""
    assert rows.fold is not None
    products, chance, at = 0.0, 0.0, 0
    for n in rows.counts.tolist():
        own, folds = error[at : at + n], rows.fold[at : at + n].numpy()
        noise = (NOISE_ROWS * NOISE + (own**2).sum()) / (NOISE_ROWS + n) if scale else 1.0
        sums = [own[folds == v].sum(0) / noise for v in range(FOLDS)]
        for v in range(FOLDS):
            for w in range(FOLDS):
                if v != w:
                    products += sums[v] @ sums[w]
                    chance += 2 * (sums[v] @ sums[w]) ** 2
        at += n
    return products / chance**0.5


@pytest.mark.parametrize("whole", [True, False])  # with a fit to all rows, or without
def test_of_numbers_it_is_that_of_a_loop(whole: bool) -> None:
    x, eta, owner = drawn(0, 0.5)
    y = eta + np.random.default_rng(1).normal(size=len(eta))
    rows = folded(x, y, owner)
    error = x @ [0.4, -0.9] + 0.1 - y
    assert statistic(rows, [0.4, -0.9, 0.1], whole=whole) == pytest.approx(
        by_hand(rows, error[:, None], True), rel=1e-9
    )


def test_of_two_classes_it_is_that_of_a_loop() -> None:
    x, eta, owner = drawn(0, 0.5)
    y = (np.random.default_rng(1).uniform(size=len(eta)) < expit(eta)).astype(np.int64)
    rows = folded(x, y, owner)
    error = expit(x @ [0.4, -0.9] + 0.1) - y
    assert statistic(rows, [0.4, -0.9, 0.1], 2) == pytest.approx(by_hand(rows, error[:, None], False), rel=1e-9)


def test_of_three_classes_it_takes_all_intercepts() -> None:
    x, _, owner = drawn(0, 0.0)
    y = np.random.default_rng(1).integers(0, 3, len(x))
    rows = folded(x, y, owner)
    theta = np.array([[0.2, 0.1, 0.0], [0.0, -0.3, 0.4], [0.1, 0.0, -0.2]])
    error = softmax(x @ theta[:, :2].T + theta[:, 2], axis=1) - np.eye(3)[y]
    assert statistic(rows, theta.ravel().tolist(), 3) == pytest.approx(by_hand(rows, error, False), rel=1e-9)


def test_it_is_about_standard_normal_where_intercepts_do_not_differ() -> None:
    found = []
    for seed in range(60):
        x, eta, owner = drawn(seed, 0.0)
        noise = np.random.default_rng(1000 + seed).normal(size=len(eta)) * (1.0 + (owner % 3))  # clients' own
        found.append(statistic(folded(x, eta + noise, owner), [0.5, -1.0, 0.0]))
    assert abs(np.mean(found)) < 0.6  # four standard errors
    assert 0.6 < np.std(found) < 1.4


def test_rare_classes_do_not_pass_for_clients_that_differ() -> None:
    found = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x, _, owner = drawn(seed, 0.0)
        y = (rng.uniform(size=len(x)) < 0.03).astype(np.int64)
        found.append(statistic(folded(x, y, owner), [0.0, 0.0, float(np.log(0.03 / 0.97))], 2))
    assert abs(np.mean(found)) < 0.6
    assert np.std(found) < 1.5


def test_intercepts_with_a_small_variance_are_seen() -> None:
    for seed in range(10):
        x, eta, owner = drawn(seed, 0.35)  # 11 % of the variance beside the signal
        y = eta + np.random.default_rng(1000 + seed).normal(size=len(eta))
        assert statistic(folded(x, y, owner), [0.5, -1.0, 0.0]) > 2.5


def test_a_single_client_does_not_bring_it_above_the_root_of_the_pairs_of_folds() -> None:
    x, eta, owner = drawn(0, 0.0)
    y = eta + np.random.default_rng(1).normal(size=len(eta)) + 1e6 * (owner == 3)
    assert statistic(folded(x, y, owner), [0.5, -1.0, 0.0]) <= (FOLDS * (FOLDS - 1) / 2) ** 0.5 + 1e-9


def test_without_rows_in_several_folds_nobody_can_tell() -> None:
    x, eta, owner = drawn(0, 0.0, rows=1)
    assert np.isnan(statistic(folded(x, eta, owner), [0.5, -1.0, 0.0]))
