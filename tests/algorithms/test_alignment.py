# SPDX-License-Identifier: Apache-2.0
"""Label alignment: equal to exhaustive search where that is possible, and right where it is not."""

import pytest
import torch
from torch import Tensor

from coterie.algorithms.alignment import _refined, align, exhaustive, score


def permuted(theta: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(theta, order[..., None], 1)


def planted(
    clients: int, components: int, seed: int, *, outliers: int = 0, noise: float = 0.3, colluding: bool = False
) -> tuple[Tensor, Tensor]:
    """Noisy copies of one mixture, shuffled, the last clients' nonsense.  -> [M, R, P], true order up to a renaming"""
    draw = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(components, 4, generator=draw, dtype=torch.float64)
    theta = centres + noise * torch.randn(clients, components, 4, generator=draw, dtype=torch.float64)
    shuffle = torch.stack([torch.randperm(components, generator=draw) for _ in range(clients)])
    theta = permuted(theta, shuffle)
    if outliers:
        shape = (1 if colluding else outliers, components, 4)
        theta[-outliers:] = 20 * torch.randn(shape, generator=draw, dtype=torch.float64) + 5
    return theta, shuffle.argsort(1)


def test_score_is_the_sum_of_distances_over_ordered_pairs() -> None:
    theta = torch.tensor([[[0.0], [1.0]], [[3.0], [1.5]]], dtype=torch.float64)
    assert score(theta) == pytest.approx(2 * (3.0 + 0.5))


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (4, 3), (2, 5), (3, 4)], ids=str)
def test_equals_exhaustive_search_on_tiny_problems(shape: tuple[int, int]) -> None:
    for seed in range(3):
        theta, _ = planted(*shape, seed)
        assert torch.equal(align(theta, seed), exhaustive(theta))


def test_the_stepwise_search_is_as_good_as_exhaustive_search_just_beyond_tiny_problems() -> None:
    theta, _ = planted(4, 4, 1)  # 13,824 alignments
    assert score(permuted(theta, align(theta, 0))) == pytest.approx(score(permuted(theta, exhaustive(theta))))


@pytest.mark.parametrize("colluding", [False, True], ids=["each for itself", "colluding"])
@pytest.mark.parametrize("seed", range(3))
def test_recovers_permutations_of_a_hundred_clients_with_twenty_outliers(seed: int, colluding: bool) -> None:
    theta, truth = planted(100, 10, seed, outliers=20, colluding=colluding)
    found, good = align(theta, seed)[:80], truth[:80]
    assert torch.equal(found, good[:, good[0].argsort()])  # the first client's components keep their numbers


def test_recovers_most_permutations_of_noisy_clients_and_scores_no_worse_than_the_truth() -> None:
    theta, truth = planted(100, 10, 0, noise=1.0)  # centres are about 8 apart, and some by less than 4
    found = align(theta, 0)
    truth = truth[:, truth[0].argsort()]
    assert float((found == truth).double().mean()) > 0.97
    assert score(permuted(theta, found)) <= score(permuted(theta, truth))


def test_nobody_would_rather_be_numbered_otherwise() -> None:
    theta, _ = planted(100, 10, 0, noise=1.5)
    found = align(theta, 0)
    assert torch.equal(_refined(theta, found, 1.0), found)


def test_what_is_found_does_not_depend_on_how_clients_number_their_components() -> None:
    theta, _ = planted(40, 8, 3, outliers=8)
    draw = torch.Generator().manual_seed(9)
    other = torch.stack([torch.randperm(8, generator=draw) for _ in range(40)])
    other[0] = torch.arange(8)  # which names the components
    found = permuted(permuted(theta, other), align(permuted(theta, other), 0))
    torch.testing.assert_close(found[:32], permuted(theta, align(theta, 0))[:32])


def test_huge_and_broken_parameters_do_not_disturb_the_others() -> None:
    theta, truth = planted(30, 6, 0)
    theta[3], theta[7], theta[11] = 1e200, torch.nan, -torch.inf
    good = torch.tensor([k for k in range(30) if k not in (3, 7, 11)])
    found = align(theta, 0)
    assert torch.equal(found[good], truth[good][:, truth[0].argsort()])
    assert torch.equal(found.sort(1).values, torch.arange(6).repeat(30, 1))


def test_a_third_of_the_clients_with_huge_parameters_does_not_disturb_the_others() -> None:
    theta, truth = planted(30, 6, 1)
    theta[21:] *= 1e150
    assert torch.equal(align(theta, 0)[:21], truth[:21][:, truth[0].argsort()])


def test_realigning_to_the_median_mends_a_bad_start() -> None:
    theta, truth = planted(40, 6, 2)
    bad = truth.clone()
    bad[28:] = bad[28:].flip(1)  # 12 of 40 clients are numbered the other way round
    assert torch.equal(_refined(theta, bad, 1.0), truth)


def test_one_client_or_one_component_needs_no_alignment() -> None:
    assert align(torch.randn(1, 3, 2), 0).tolist() == [[0, 1, 2]]
    assert align(torch.randn(4, 1, 2), 0).tolist() == [[0]] * 4


@pytest.mark.parametrize("clients", [6, 12], ids=["all orders tried", "stepwise"])
def test_rounding_does_not_decide_among_orders_that_are_as_good_as_each_other(clients: int) -> None:
    # The first client found one component twice: names for its two are as good either way, and everybody else hangs on them.
    theta, _ = planted(clients, 2 if clients == 6 else 3, 5)
    theta[0, 1] = theta[0, 0]
    theta[2] = theta[2, :1]
    found = align(theta, 0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(8):
        noise = 1e-9 * (2 * torch.rand(theta.shape, generator=draw, dtype=torch.float64) - 1)
        assert torch.equal(align(theta + noise, 0), found)
