# SPDX-License-Identifier: Apache-2.0
"""Matching what was found to what was planted."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from coterie.errors import DataError
from coterie.evaluate import adjusted_rand, match_errors, match_labels, match_models


def test_models_are_matched_one_to_one_where_nearest_would_not_be() -> None:
    truth = torch.tensor([[0.0], [10.0]])
    theta = torch.tensor([[1.0], [2.0]])  # both nearest to 0: the mean of nearest distances would be 1.5
    error, assignment = match_models(theta, truth)
    assert error == pytest.approx((1 + 8) / 2)
    assert assignment.tolist() == [0, 1]


def test_error_is_zero_for_permuted_models_and_the_assignment_undoes_the_permutation() -> None:
    truth = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    error, assignment = match_models(truth[order], truth)
    assert error == 0.0
    assert assignment.tolist() == order.tolist()


def test_error_is_the_least_mean_over_all_permutations() -> None:
    draws = torch.Generator().manual_seed(1)
    for _ in range(20):
        theta = torch.randn(4, 3, generator=draws, dtype=torch.float64)
        truth = torch.randn(4, 3, generator=draws, dtype=torch.float64)
        best = min(float((theta - truth[list(p)]).norm(dim=1).mean()) for p in itertools.permutations(range(4)))
        assert match_models(theta, truth)[0] == pytest.approx(best, abs=1e-12)


def test_models_of_any_shape_are_compared_as_vectors() -> None:
    truth = torch.zeros(2, 3, 4)
    theta = truth.clone()
    theta[1, 1, 1], theta[1, 2, 3] = 3.0, 4.0
    assert match_models(theta, truth)[0] == pytest.approx(2.5)


def test_left_over_models_are_marked_and_do_not_count() -> None:
    error, assignment = match_models(torch.tensor([[5.0], [100.0], [1.0]]), torch.tensor([[1.0], [6.0]]))
    assert error == pytest.approx(0.5)
    assert assignment.tolist() == [1, -1, 0]


def test_too_few_models_are_refused() -> None:
    with pytest.raises(DataError, match="1 models cannot be matched to 2"):
        match_models(torch.zeros(1, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_diverged_model_makes_the_error_infinite(bad: float) -> None:
    error, assignment = match_models(torch.tensor([[bad], [2.0]]), torch.tensor([[2.0], [7.0]]))
    assert error == float("inf")
    assert assignment.tolist() == [1, 0]


def test_runs_are_matched_each_on_its_own() -> None:
    truth = torch.tensor([[0.0], [10.0]])
    theta = torch.tensor([[[0.0], [10.0]], [[11.0], [0.0]], [[1.0], [2.0]], [[float("nan")], [0.0]]])
    assert match_errors(theta, truth).tolist() == [0.0, 0.5, 4.5, float("inf")]


def test_names_of_labels_do_not_matter() -> None:
    truth = torch.tensor([0, 0, 1, 1, 2, 2])
    labels = [7, 7, 3, 3, 5, 5]
    assert match_labels(labels, truth) == 1.0
    assert adjusted_rand(labels, truth) == 1.0


def test_collapsed_labels_count_as_the_largest_cluster_only() -> None:
    truth = np.array([0, 0, 0, 1, 1])
    assert match_labels(np.zeros(5, dtype=int), truth) == pytest.approx(3 / 5)
    assert adjusted_rand(np.zeros(5, dtype=int), truth) == 0.0


def test_labels_are_matched_one_to_one_where_majority_would_not_be() -> None:
    truth = [0, 0, 0, 0, 1]
    labels = [0, 0, 1, 1, 1]  # both labels have cluster 0 in the majority: purity would be 4/5
    assert match_labels(labels, truth) == pytest.approx(3 / 5)


def test_a_split_cluster_counts_its_larger_part() -> None:
    assert match_labels([0, 0, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1]) == pytest.approx(5 / 6)


def test_adjusted_rand_by_hand() -> None:
    # Pairs together: in both 2, in labels 3, in truth 6, of 15. Expected 3 * 6 / 15 = 1.2, most (3 + 6) / 2 = 4.5.
    assert adjusted_rand([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]) == pytest.approx((2 - 1.2) / (4.5 - 1.2))


@pytest.mark.parametrize("clients", [1, 2, 7, 100])
def test_adjusted_rand_is_that_of_scikit_learn(clients: int) -> None:
    rng = np.random.default_rng(clients)
    for groups in ((1, 1), (1, 3), (2, 2), (4, 3), (clients, clients)):
        labels, truth = (rng.integers(0, k, clients) for k in groups)
        assert adjusted_rand(labels, truth) == pytest.approx(adjusted_rand_score(truth, labels), abs=1e-12)


def test_adjusted_rand_is_about_zero_by_chance() -> None:
    draws = torch.Generator().manual_seed(0)
    labels, truth = torch.randint(4, (2, 5000), generator=draws)
    assert abs(adjusted_rand(labels, truth)) < 0.005


@pytest.mark.parametrize(("labels", "truth"), [([0, 1], [0, 1, 1]), ([], []), ([[0], [1]], [[0], [1]])])
def test_labels_that_do_not_belong_together_are_refused(labels: list[int], truth: list[int]) -> None:
    for score in (match_labels, adjusted_rand):
        with pytest.raises(DataError, match="hint:"):
            score(labels, truth)
