# SPDX-License-Identifier: Apache-2.0
"""Who takes part: reproducible, different every round, and decided by the client's name."""

import numpy as np
import pytest
import torch

from coterie import keys
from coterie.errors import ConfigError
from coterie.participation import Everyone, Sampled

NAMES = np.array([f"client-{i:03d}" for i in range(200)])
CLIENTS = keys.name_keys(NAMES)


def sampled(share: float, round_: int, seed: int, clients: torch.Tensor = CLIENTS) -> list[int]:
    who = Sampled(share).choose(round_, clients, seed)
    asked = who.asked
    assert torch.equal(asked, who.answered)
    assert torch.equal(asked, asked.unique())  # ascending, nobody twice
    return asked.tolist()


def test_everyone_is_everyone() -> None:
    who = Everyone().choose(3, CLIENTS, 0)
    assert who.asked.tolist() == who.answered.tolist() == list(range(200))


def test_a_sample_is_reproducible_and_changes_with_round_and_seed() -> None:
    assert sampled(0.1, 4, 0) == sampled(0.1, 4, 0)
    assert sampled(0.1, 4, 0) != sampled(0.1, 5, 0)
    assert sampled(0.1, 4, 0) != sampled(0.1, 4, 1)


@pytest.mark.parametrize(("share", "n"), [(0.1, 20), (0.013, 3), (0.001, 1), (1.0, 200)])
def test_a_sample_has_the_asked_size_and_at_least_one_client(share: float, n: int) -> None:
    assert len(sampled(share, 0, 0)) == n


def test_who_is_drawn_depends_on_names_and_not_on_numbers() -> None:
    half = {str(NAMES[i]) for i in sampled(0.5, 2, 7)}
    other = np.array(sorted([*NAMES, "aaa", "zzz"]))  # a newcomer in front shifts every number
    again = {str(other[i]) for i in sampled(0.5, 2, 7, keys.name_keys(other))}
    # Two newcomers can push out one client at most: 101 of 202 are drawn, not 100 of 200.
    assert len(half - again) <= 1
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    drawn = torch.tensor(sampled(0.5, 2, 7, CLIENTS[shuffled]))
    assert {str(NAMES[i]) for i in shuffled[drawn]} == half


def test_over_many_rounds_all_clients_are_drawn_about_equally() -> None:
    rounds = 400
    drawn = torch.zeros(200)
    for round_ in range(rounds):
        drawn[sampled(0.25, round_, 0)] += 1
    share = drawn / rounds
    # Binomial(400, 1/4): a deviation is 0.0217; 200 clients stay within 4.5 of them.
    assert (share - 0.25).abs().max() < 0.1
    assert 0.7 < float(share.std()) / 0.0217 < 1.3


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_what_is_not_a_share_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="not a share"):
        Sampled(share)
