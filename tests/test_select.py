# SPDX-License-Identifier: Apache-2.0
"""The choice among candidates: paired differences, and the simplest that is as good as the best."""

import math

import pytest
import torch

from coterie.select import as_good, difference, mean_and_error, simplest

NAN = math.nan


def tensor(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_difference_is_paired_with_a_t_interval() -> None:
    gap = difference(tensor(1.0, 2.0, 3.0, NAN), tensor(0.0, 2.0, 1.0, 5.0))  # differences 1, 0, 2
    assert gap.mean == pytest.approx(1.0)
    assert gap.stderr == pytest.approx(1.0 / math.sqrt(3))
    assert (gap.low, gap.high) == pytest.approx((1 - 4.302653 / math.sqrt(3), 1 + 4.302653 / math.sqrt(3)), abs=1e-5)
    assert gap.clients == 3
    assert not gap.clear


def test_a_difference_of_one_client_has_no_error() -> None:
    gap = difference(tensor(1.0, NAN), tensor(0.5, NAN))
    assert gap.mean == 0.5
    assert math.isnan(gap.stderr)
    assert mean_and_error(tensor(NAN, NAN))[0] != mean_and_error(tensor(NAN, NAN))[0]


def test_the_simplest_within_one_standard_error_is_chosen() -> None:
    best = tensor(1.0, 2.0, 3.0, 4.0)
    near = best - tensor(0.3, -0.1, 0.3, -0.1)  # mean 0.1, standard error 0.231 / 2
    far = best - tensor(0.3, 0.1, 0.3, 0.1)  # mean 0.2, standard error 0.115 / 2
    assert as_good(torch.stack([far, near, best])) == [False, True, True]
    assert simplest(torch.stack([far, near, best])) == 1
    assert simplest(torch.stack([far, near, best]), tolerance=0.21) == 0
    assert simplest(torch.stack([far, near, best]), eligible=[True, False, True]) == 2
    assert simplest(torch.stack([far, near, best]), eligible=[False] * 3) == 1


def test_equal_scores_choose_the_first_and_a_diverged_one_is_never_chosen() -> None:
    same = tensor(1.0, 2.0)
    assert simplest(torch.stack([same, same])) == 0
    assert simplest(torch.stack([tensor(-math.inf, 1.0), same])) == 1
    assert simplest(torch.stack([tensor(NAN, NAN), same])) == 1


def test_more_standard_errors_allow_a_simpler_candidate() -> None:
    best = tensor(1.0, 2.0, 3.0, 4.0)
    far = best - tensor(0.3, 0.1, 0.3, 0.1)  # mean 0.2, standard error 0.0577: 3.46 errors behind
    assert simplest(torch.stack([far, best]), errors=3.4) == 1
    assert simplest(torch.stack([far, best]), errors=3.5) == 0


def test_candidates_that_differ_by_rounding_are_alike() -> None:
    base = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sign in (1, -1):  # the same models summed in another order: the first wins whichever is a little larger
        assert simplest(torch.stack([base * (1 + sign * 1e-14), base])) == 0


def test_where_all_candidates_diverged_the_first_is_taken() -> None:
    assert simplest(torch.full((2, 3), -math.inf, dtype=torch.float64)) == 0
