# SPDX-License-Identifier: Apache-2.0
"""Draws from keys: what they depend on, and what they must not depend on."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie import keys

M64 = (1 << 64) - 1


def splitmix(z: int) -> int:
    """SplitMix64's output function in plain integers (Steele, Lea, Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def unsigned(value: torch.Tensor) -> int:
    return int(value) & M64


def test_draws_are_those_of_splitmix64_in_plain_integers() -> None:
    # The published sequence of seed 0 begins 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4; a draw is its upper 53 bits.
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    for seed in (0, 1, 2**63 - 1, -1, -(2**63)):
        want = [(splitmix((seed + 0x9E3779B97F4A7C15 * (j + 1)) & M64) >> 11) / 2**53 for j in range(20)]
        assert keys.uniform(torch.tensor(seed), 20).tolist() == want


def test_the_same_parts_make_the_same_key_and_other_parts_another() -> None:
    made = [
        keys.key(1, 2, "batch"),
        keys.key(2, 1, "batch"),
        keys.key(1, 2, "test"),
        keys.key(1, 2),
        keys.key(1),
        keys.key(1, 2, "batch", 0),
        keys.key("batch", 1, 2),
    ]
    assert len({int(k) for k in made}) == len(made)
    assert int(keys.key(1, 2, "batch")) == int(made[0])


def test_keys_broadcast_over_tensors_as_one_by_one() -> None:
    clients = torch.tensor([5, -3, 2**62])
    together = keys.key(7, 3, "batch", clients)
    assert together.tolist() == [int(keys.key(7, 3, "batch", int(c))) for c in clients]
    square = keys.key(7, clients[:, None], torch.arange(4))
    assert square.shape == (3, 4)
    assert int(square[1, 2]) == int(keys.key(7, -3, 2))


def test_seeds_beyond_63_bits_are_taken_and_differ() -> None:
    assert len({int(keys.key(seed)) for seed in (0, -1, 2**63, 2**63 - 1, 12345678901234567890)}) == 5


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(1, 8), st.integers(1, 30))
def test_draws_do_not_depend_on_place_in_the_batch_nor_on_how_many_are_drawn(
    ks: list[int], width: int, more: int
) -> None:
    together = keys.uniform(torch.tensor(ks), width + more)
    for i, k in enumerate(ks):
        assert torch.equal(together[i, :width], keys.uniform(torch.tensor(k), width))
    assert torch.equal(together[:, width - 1], keys.uniform_at(torch.tensor(ks), torch.tensor(width - 1)))


@pytest.mark.parametrize("seed", range(3))
def test_draws_are_uniform_along_counters_and_along_clients(seed: int) -> None:
    n = 20_000
    along_counters = keys.uniform(keys.key(seed, "counters"), n).numpy()
    clients = keys.name_keys(np.array([f"client-{i}" for i in range(n)]))
    along_clients = keys.uniform(keys.key(seed, 0, "clients", clients), 1)[:, 0].numpy()
    for u in (along_counters, along_clients):
        assert u.min() >= 0
        assert u.max() < 1
        # Six fixed draws: a p-value below 0.001 would come by chance once in 170 sets of seeds.
        assert stats.kstest(u, "uniform").pvalue > 1e-3
        # Neighbours are unrelated: their correlation is 0 +- 1/sqrt(n) = 0.007; four deviations are allowed.
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(n)


def test_rounds_and_purposes_are_unrelated() -> None:
    clients = keys.name_keys(np.array([str(i) for i in range(5000)]))
    draws = [
        keys.uniform(keys.key(0, round_, purpose, clients), 1)[:, 0] for round_ in (0, 1) for purpose in ("a", "b")
    ]
    off_diagonal = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    assert off_diagonal.abs().max() < 4 / np.sqrt(5000)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_permuted_shuffles_the_real_rows_and_puts_padding_last(seed: int, counts: list[int]) -> None:
    n = torch.tensor(counts)
    mask = torch.arange(max(*counts, 1)) < n[:, None]
    ks = keys.key(seed, torch.arange(len(counts)))
    order = keys.permuted(ks, mask)
    for i, count in enumerate(counts):
        assert sorted(order[i, :count].tolist()) == list(range(count))
        assert order[i, count:].tolist() == list(range(count, mask.shape[1]))
        alone = keys.permuted(ks[i : i + 1], torch.ones(1, count, dtype=torch.bool))[0]
        assert torch.equal(order[i, :count], alone)


def test_every_permutation_of_three_rows_is_about_as_likely() -> None:
    order = keys.permuted(keys.key(0, torch.arange(6000)), torch.ones(6000, 3, dtype=torch.bool))
    _, counts = torch.unique(order, dim=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_permuted_takes_a_run_axis() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    ks = keys.key(torch.arange(4)[:, None], torch.arange(2))
    assert torch.equal(keys.permuted(ks, mask)[2], keys.permuted(ks[2], mask))


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=8))
def test_name_keys_depend_on_the_name_only(names: list[str]) -> None:
    together = keys.name_keys(np.array(names))
    wide = keys.name_keys(np.array([*names, "x" * 40]))[:-1]
    assert torch.equal(together, wide)
    for name, key in zip(names, together, strict=True):
        assert int(keys.name_keys(np.array([name]))[0]) == int(key)
    assert len({int(k) for k in together}) == len(set(names))


def test_names_that_are_nearly_alike_have_different_keys() -> None:
    names = ["1", "01", "10", "001", "a", "A", "aa", "aaa", "ab", "ba", "é", "e", "client 1", "client 10", " 1"]
    assert len({int(k) for k in keys.name_keys(np.array(names))}) == len(names)


def test_a_hundred_thousand_names_have_as_many_keys() -> None:
    made = keys.name_keys(np.arange(100_000).astype(str))
    assert len(torch.unique(made)) == 100_000


def test_no_names_have_no_keys() -> None:
    assert keys.name_keys(np.array([], dtype=str)).shape == (0,)


def test_generators_are_seeded_by_their_parts() -> None:
    one, same, other = (torch.rand(3, generator=keys.generator(*p)) for p in ((1, "start"), (1, "start"), (2, "start")))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
