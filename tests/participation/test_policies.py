# SPDX-License-Identifier: Apache-2.0
"""Policies on a clock: who is asked, who is heard, and how long that takes."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

from coterie import keys
from coterie.algorithms.fedavg import fedavg
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.participation import (
    Deadline,
    Everyone,
    Exponential,
    FastestFirst,
    FirstReplies,
    Participation,
    Sampled,
    Then,
    VirtualClock,
)
from coterie.protocol import Ask, Block, Replies, Stack, Tensors
from helpers import LINE, STEPS, Late, federation, run_one

CLIENTS = keys.name_keys(np.array([f"c{i}" for i in range(6)]))
TIMES = torch.tensor([3.0, 1.0, 2.0, 9.0, 1.5, 4.0], dtype=torch.float64)


def chosen(policy: Participation, *, times: torch.Tensor | None = TIMES, **options: Any) -> tuple[list[int], list[int]]:
    who = policy.choose(0, CLIENTS, 0, times, **options)
    return who.asked.tolist(), who.answered.tolist()


# -- one policy -------------------------------------------------------------------------------------------------------
def test_fastest_first_asks_nobody_else() -> None:
    assert chosen(FastestFirst(3)) == ([1, 2, 4], [1, 2, 4])
    assert chosen(FastestFirst(99)) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert chosen(FastestFirst(), enough=2) == ([1, 4], [1, 4])
    assert chosen(FastestFirst(3), enough=5) == ([1, 2, 4], [1, 2, 4])
    assert chosen(FastestFirst())[0] == list(range(6))


def test_first_replies_asks_all_and_hears_the_fastest() -> None:
    assert chosen(FirstReplies(2)) == ([0, 1, 2, 3, 4, 5], [1, 4])


def test_a_deadline_hears_who_is_in_time_and_passes_in_full_if_somebody_is_not() -> None:
    assert chosen(Deadline(3.0)) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 4])
    assert Deadline(3.0).choose(0, CLIENTS, 0, TIMES).until == 3.0
    assert Deadline(10.0).choose(0, CLIENTS, 0, TIMES).until == 0.0
    assert chosen(Deadline(0.5))[1] == []


def test_a_sample_may_be_a_number() -> None:
    asked, answered = chosen(Sampled(number=4))
    assert len(asked) == 4
    assert asked == answered
    assert chosen(Sampled(number=99))[0] == list(range(6))
    assert chosen(Sampled(number=3)) == chosen(Sampled(0.5))


def test_policies_combine_one_after_the_other() -> None:
    sample = chosen(Sampled(number=4))[0]
    by_speed = sorted(sample, key=lambda i: float(TIMES[i]))
    assert chosen(Then(Sampled(number=4), FastestFirst(2))) == (sorted(by_speed[:2]),) * 2
    assert chosen(Then(Sampled(number=4), FirstReplies(2))) == (sample, sorted(by_speed[:2]))
    assert chosen(Then(Sampled(number=4), FastestFirst()), enough=3)[0] == sorted(by_speed[:3])
    in_time = [i for i in sample if TIMES[i] <= 2.0]
    assert chosen(Then(Sampled(number=4), Deadline(2.0))) == (sample, in_time)
    # Who answers must do so to both: of the three first, those in time.
    assert chosen(Then(FirstReplies(3), Deadline(1.5)))[1] == [1, 4]
    assert Then(Deadline(2.0), FirstReplies(1)).choose(0, CLIENTS, 0, TIMES).until == 2.0


def test_without_a_clock_lots_decide_who_is_fast() -> None:
    heard = [FirstReplies(2).choose(r, CLIENTS, 0).answered.tolist() for r in range(600)]
    count = np.bincount(np.array(heard).ravel(), minlength=6)
    # Binomial(600, 1/3): a deviation is 11.5; six clients stay within four of them.
    assert np.abs(count - 200).max() < 46
    assert heard == [FirstReplies(2).choose(r, CLIENTS, 0).answered.tolist() for r in range(600)]
    assert chosen(Deadline(1e-9), times=None)[1] == list(range(6))


def test_equally_fast_clients_draw_lots_by_name() -> None:
    same = torch.ones(6, dtype=torch.float64)
    first = {int(FirstReplies(1).choose(r, CLIENTS, 0, same).answered) for r in range(60)}
    assert first == set(range(6))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for r in range(20):
        heard = FirstReplies(2).choose(r, CLIENTS, 0, same).answered
        other = order[FirstReplies(2).choose(r, CLIENTS[order], 0, same).answered]
        assert set(heard.tolist()) == set(other.tolist())


@pytest.mark.parametrize(
    "make",
    [
        Sampled,
        lambda: Sampled(0.5, number=3),
        lambda: Sampled(number=0),
        lambda: FastestFirst(0),
        lambda: FirstReplies(0),
        lambda: Deadline(0.0),
        lambda: Deadline(float("inf")),
    ],
)
def test_what_is_no_policy_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# -- in an engine -----------------------------------------------------------------------------------------------------
def count_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return {"n": data.n[None]}, {}


def heard(policy: Participation, *, clock: VirtualClock | None, **ask: Any) -> Replies:
    """What one question brings."""
    seen: list[Replies] = []

    def program(state: None) -> Generator[Ask, Replies | None, None]:
        got = yield Ask(count_rows, {"word": "x"}, {"n": Stack()}, **ask)
        assert got is not None
        seen.append(got)

    InProcess(federation().rows, participation=policy, clock=clock, seed=1).run([program])
    return seen[0]


CLOCK = VirtualClock(communication=0.5)
SPEED = Exponential().times(0, federation().rows.keys, 1)
ORDER = SPEED.argsort().tolist()


def test_enough_goes_on_with_the_fastest_whatever_the_policy() -> None:
    for policy in (Everyone(), FastestFirst(), FirstReplies(7), FastestFirst(8), Deadline(100.0)):
        got = heard(policy, clock=CLOCK, enough=3)
        assert got.ids.tolist() == sorted(ORDER[:3])
        assert got.elapsed == pytest.approx(float(SPEED[ORDER[2]]) + 0.5)
    assert heard(FastestFirst(), clock=CLOCK, enough=3).missing.tolist() == []
    assert heard(Everyone(), clock=CLOCK, enough=3).missing.tolist() == sorted(ORDER[3:])
    assert heard(FirstReplies(2), clock=CLOCK, enough=3).ids.tolist() == sorted(ORDER[:2])
    assert heard(Everyone(), clock=CLOCK, enough=99).n == 10


def test_enough_is_taken_of_those_who_answer_at_all() -> None:
    there = [i for i in ORDER if i % 3]  # every third is late in round 0
    got = heard(Late(), clock=CLOCK, enough=2)
    assert got.ids.tolist() == sorted(there[:2])
    assert got.missing.tolist() == sorted(set(range(10)) - set(there[:2]))


def test_enough_ends_the_wait_for_a_deadline_and_too_few_do_not() -> None:
    limit = float(SPEED[ORDER[4]]) + 0.5 + 1e-9  # five are in time
    assert heard(Deadline(limit), clock=CLOCK).elapsed == limit
    assert heard(Deadline(limit), clock=CLOCK).n == 5
    assert heard(Deadline(limit), clock=CLOCK, enough=3).elapsed == pytest.approx(float(SPEED[ORDER[2]]) + 0.5)
    assert heard(Deadline(limit), clock=CLOCK, enough=8).elapsed == limit
    nobody = heard(Deadline(0.4), clock=CLOCK)
    assert (nobody.n, nobody.elapsed) == (0, 0.4)


def test_those_who_are_named_are_all_waited_for() -> None:
    named = torch.tensor(sorted(ORDER[-2:]))
    got = heard(FirstReplies(1), clock=CLOCK, enough=1, to=named)
    assert got.ids.tolist() == named.tolist()
    assert got.elapsed == pytest.approx(float(SPEED.max()) + 0.5)


def test_work_decides_who_meets_a_deadline() -> None:
    limit = float(SPEED.median())
    one = heard(Deadline(limit), clock=VirtualClock(), work=1.0)
    two = heard(Deadline(limit), clock=VirtualClock(), work=2.0)
    assert one.ids.tolist() == SPEED.le(limit).nonzero()[:, 0].tolist()
    assert two.ids.tolist() == (2 * SPEED).le(limit).nonzero()[:, 0].tolist()


def test_an_algorithm_is_made_resilient_by_a_policy_alone() -> None:
    rows = federation().rows

    def program(state: Any) -> Any:
        return fedavg(state, model=LINE, rounds=4, step_size=0.05, seed=0, training=STEPS)

    _, everyone, _ = run_one(program, rows, clock=CLOCK, seed=1)
    _, first, _ = run_one(program, rows, clock=CLOCK, seed=1, participation=FirstReplies(4))
    assert first.rounds[-1].participants == 4
    # 4 rounds of 3 steps each: what the fourth fastest takes, and what the slowest takes.
    assert first.rounds[-1].time == pytest.approx(4 * (3 * float(SPEED[ORDER[3]]) + 0.5))
    assert everyone.rounds[-1].time == pytest.approx(4 * (3 * float(SPEED.max()) + 0.5))
    _, known, _ = run_one(program, rows, clock=CLOCK, seed=1, participation=FastestFirst(4))
    assert known.rounds[-1].bytes_down < first.rounds[-1].bytes_down  # who is not needed is not asked
    assert known.states[0].theta.tolist() == first.states[0].theta.tolist()
