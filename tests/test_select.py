# SPDX-License-Identifier: Apache-2.0
"""The choice among candidates: paired differences, and the simplest that is as good as the best."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import sem, ttest_rel

from coterie.select import Difference, Paired, as_good, difference, mean_and_error, simplest

NAN = math.nan


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(*scores: torch.Tensor) -> Paired:
    return Paired.of(torch.stack(scores))


def paired(one: torch.Tensor, other: torch.Tensor) -> Difference:
    return difference(of(one, other), 0, 1)


def test_difference_is_paired_with_a_t_interval() -> None:
    gap = paired(tensor(1.0, 2.0, 3.0, NAN), tensor(0.0, 2.0, 1.0, 5.0))  # differences 1, 0, 2
    assert gap.mean == pytest.approx(1.0)
    assert gap.stderr == pytest.approx(1.0 / math.sqrt(3))
    assert (gap.low, gap.high) == pytest.approx((1 - 4.302653 / math.sqrt(3), 1 + 4.302653 / math.sqrt(3)), abs=1e-5)
    assert gap.clients == 3
    assert not gap.clear


def test_a_difference_of_one_client_has_no_error() -> None:
    gap = paired(tensor(1.0, NAN), tensor(0.5, NAN))
    assert gap.mean == 0.5
    assert math.isnan(gap.stderr)
    assert mean_and_error(tensor(NAN, NAN))[0] != mean_and_error(tensor(NAN, NAN))[0]


def test_the_simplest_within_one_standard_error_is_chosen() -> None:
    best = tensor(1.0, 2.0, 3.0, 4.0)
    near = best - tensor(0.3, -0.1, 0.3, -0.1)  # mean 0.1, standard error 0.231 / 2
    far = best - tensor(0.3, 0.1, 0.3, 0.1)  # mean 0.2, standard error 0.115 / 2
    assert as_good(of(far, near, best)) == [False, True, True]
    assert simplest(of(far, near, best)) == 1
    assert simplest(of(far, near, best), tolerance=0.21) == 0
    assert simplest(of(far, near, best), eligible=[True, False, True]) == 2
    assert simplest(of(far, near, best), eligible=[False] * 3) == 1


def test_equal_scores_choose_the_first_and_a_diverged_one_is_never_chosen() -> None:
    same = tensor(1.0, 2.0)
    assert simplest(of(same, same)) == 0
    assert simplest(of(tensor(-math.inf, 1.0), same)) == 1
    assert simplest(of(tensor(-math.inf, -math.inf), same)) == 1


def test_more_standard_errors_allow_a_simpler_candidate() -> None:
    best = tensor(1.0, 2.0, 3.0, 4.0)
    far = best - tensor(0.3, 0.1, 0.3, 0.1)  # mean 0.2, standard error 0.0577: 3.46 errors behind
    assert simplest(of(far, best), errors=3.4) == 1
    assert simplest(of(far, best), errors=3.5) == 0


def test_candidates_that_differ_by_rounding_are_alike() -> None:
    base = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sign in (1, -1):  # the same models summed in another order: the first wins whichever is a little larger
        assert simplest(of(base * (1 + sign * 1e-14), base)) == 0


def test_where_all_candidates_diverged_the_first_is_taken() -> None:
    assert simplest(Paired.of(torch.full((2, 3), -math.inf, dtype=torch.float64))) == 0


@given(seed=st.integers(0, 10_000), candidates=st.integers(2, 6), clients=st.integers(3, 40))
def test_sums_give_what_the_scores_themselves_give(seed: int, candidates: int, clients: int) -> None:
    draw = np.random.default_rng(seed)
    scores = 5 + draw.normal(size=clients) + 0.01 * draw.normal(size=(candidates, clients))
    scores[:, draw.random(clients) < 0.2] = np.nan
    there = scores[:, ~np.isnan(scores[0])]
    found = Paired.of(torch.from_numpy(scores))
    assert found.n == there.shape[1]
    if there.shape[1] < 2:
        return
    np.testing.assert_allclose(found.means, there.mean(1), rtol=1e-12)
    for j in range(candidates):
        assert found.mean_and_error(j)[1] == pytest.approx(sem(there[j]), rel=1e-9)
        for k in range(j):
            gap = there[j] - there[k]
            want = ttest_rel(there[j], there[k]).confidence_interval()
            got = difference(found, j, k)
            assert (got.mean, got.stderr) == pytest.approx((gap.mean(), sem(gap)), rel=1e-8, abs=1e-13)
            assert (got.low, got.high) == pytest.approx((want.low, want.high), rel=1e-7, abs=1e-12)


def test_a_client_that_counts_twice_is_two_clients() -> None:
    scores = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    twice = Paired.of(torch.cat([scores, scores[:, :1]], 1))
    again = [Paired.of(scores[:, [at]]) for at in (0, 0, 1, 2, 3, 4)]
    centred = [scores[0, at] - twice.centre for at in (0, 0, 1, 2, 3, 4)]
    total = np.zeros((5, 5))
    for one, level in zip(again, centred, strict=True):
        terms = np.array([1.0, float(level), *one.products[0, 2:]])
        total += np.outer(terms, terms)
    np.testing.assert_allclose(twice.products, total, atol=1e-12)


def test_differences_beside_large_scores_keep_their_digits() -> None:
    scores = torch.full((2, 50), 1e6, dtype=torch.float64)
    scores[0] += torch.linspace(-1e5, 1e5, 50, dtype=torch.float64)
    scores[1] = scores[0] + torch.linspace(0.0, 1e-3, 50, dtype=torch.float64)
    gap = difference(Paired.of(scores), 1, 0)
    want = (scores[1] - scores[0]).numpy()
    assert (gap.mean, gap.stderr) == pytest.approx((want.mean(), sem(want)), rel=1e-6)
