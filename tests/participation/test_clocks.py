# SPDX-License-Identifier: Apache-2.0
"""Clocks: the laws of virtual time, what a round costs, and that everything follows from the seed."""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from coterie import keys
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError, DataError
from coterie.participation import (
    DynamicExponential,
    Exponential,
    LogNormal,
    Sampled,
    Speeds,
    Trace,
    VirtualClock,
    WallClock,
)
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors
from helpers import KilledError, federation, interrupt_after, run_one

NAMES = np.array([f"client-{i:05d}" for i in range(20_000)])
CLIENTS = keys.name_keys(NAMES)
LAWS: list[Speeds] = [Exponential(), DynamicExponential(), LogNormal(1.0)]


# -- laws -------------------------------------------------------------------------------------------------------------
def test_fixed_times_are_exponential_and_the_same_every_round() -> None:
    times = Exponential(2.0).times(0, CLIENTS, 0)
    # Exp(2): mean 1/2, deviation 1/2, so that the mean of 20,000 is within 4 x 0.5 / sqrt(20,000) = 0.014.
    assert float(times.mean()) == pytest.approx(0.5, abs=0.014)
    assert float((times > 1.0).double().mean()) == pytest.approx(math.exp(-2), abs=0.01)
    assert torch.equal(times, Exponential(2.0).times(7, CLIENTS, 0))


def test_the_slowest_of_n_takes_the_harmonic_number() -> None:
    slowest = Exponential().times(0, CLIENTS, 1).view(400, 50).max(1).values
    # E max of 50 is H_50 = 4.499, its deviation below pi / sqrt(6) = 1.28: 400 of them are within 4 x 1.28 / 20 = 0.26.
    assert float(slowest.mean()) == pytest.approx(sum(1 / i for i in range(1, 51)), abs=0.26)


def test_changing_times_are_drawn_every_round_with_each_clients_own_rate() -> None:
    some = CLIENTS[:200]
    times = torch.stack([DynamicExponential().times(r, some, 0) for r in range(2000)])  # [2000, 200]
    rate = 1 / times.mean(0)
    # lambda_i ~ U[1/200, 1]: a mean of 2,000 draws has relative deviation 0.022.
    assert float(rate.min()) > 1 / 200 / 1.1
    assert float(rate.max()) < 1.1
    assert float(rate.mean()) == pytest.approx((1 + 1 / 200) / 2, abs=0.09)
    # Times of one client are exponential: their deviation is their mean.
    assert float((times.std(0) / times.mean(0)).mean()) == pytest.approx(1.0, abs=0.02)


def test_the_lowest_rate_can_be_given() -> None:
    times = torch.stack([DynamicExponential(1.0).times(r, CLIENTS[:100], 0) for r in range(500)])
    assert float(times.mean()) == pytest.approx(1.0, abs=0.02)  # Exp(1), 50,000 draws


def test_lognormal_times_have_median_one_and_the_given_spread() -> None:
    times = LogNormal(0.5).times(0, CLIENTS, 0)
    assert float(times.log().mean()) == pytest.approx(0.0, abs=0.015)
    assert float(times.log().std()) == pytest.approx(0.5, abs=0.01)
    assert torch.equal(LogNormal(0.0).times(0, CLIENTS, 0), torch.ones(20_000, dtype=torch.float64))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_times_follow_from_seed_and_name_and_not_from_number(law: Speeds) -> None:
    some = CLIENTS[:100]
    times = law.times(3, some, 5)
    assert torch.equal(times, law.times(3, some, 5))
    assert not torch.equal(times, law.times(3, some, 6))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(law.times(3, some[order], 5), times[order])
    assert bool((times > 0).all() & times.isfinite().all())


# -- traces -----------------------------------------------------------------------------------------------------------
def test_a_trace_gives_each_client_its_own_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,seconds\n007,2.5\n003,1\n010,0.25\n")  # leading zeros belong to the name
    times = Trace(path).times(9, keys.name_keys(np.array(["003", "007", "010"])), 0)
    assert times.tolist() == [1.0, 2.5, 0.25]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_trace_by_round_begins_again_after_its_last(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"trace.{kind}"
    table = pa.table({"round": [1, 0, 0, 1, 2], "client": ["a", "a", "b", "b", "b"], "seconds": [2, 1, 10, 20, 30]})
    if kind == "csv":
        pa.csv.write_csv(table, path)
    else:
        pa.parquet.write_table(table, path)
    trace, clients = Trace(path), keys.name_keys(np.array(["a", "b"]))
    assert [trace.times(r, clients, 0).tolist() for r in range(4)] == [[1, 10], [2, 20], [1, 30], [2, 10]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client,seconds\na,1\n", "1 of 2 clients are not in the trace"),
        ("client,seconds\na,1\nb,-1\n", "or invalid ones"),
        ("client,seconds\n", "has no times"),
        ("client,seconds\na,soon\nb,1\n", "cannot be read"),
        ("client,minutes\na,1\nb,1\n", "cannot be read"),
        (None, "there is no trace"),
    ],
)
def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "trace.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=said):
        Trace(path).times(0, keys.name_keys(np.array(["a", "b"])), 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exponential(0.0),
        lambda: DynamicExponential(0.0),
        lambda: DynamicExponential(1.5),
        lambda: LogNormal(-1.0),
        lambda: VirtualClock(communication=-1.0),
        lambda: VirtualClock(communication=math.nan),
        lambda: VirtualClock(unit=0.0),
    ],
)
def test_what_is_no_clock_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# -- what a round costs -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counted:
    """Rounds, and what they took as the algorithm saw it."""

    told: float = 0.0
    round: int = 0


def count_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return {"n": data.n[None]}, {}


def asker(rounds: int, *, work: float = 1.0, questions: int = 1, to: Tensor | None = None) -> Any:
    """A program that asks some questions a round."""

    def program(state: Counted | None) -> Generator[Ask | Save, Replies | None, Counted]:
        state = state or Counted()
        while state.round < rounds:
            for _ in range(questions):
                got = yield Ask(count_rows, {}, {"n": Sum()}, work=work, to=to)
                assert got is not None
                state = replace(state, told=state.told + got.elapsed)
            state = replace(state, round=state.round + 1)
            yield Save(state)
        return state

    return program


def test_a_round_costs_the_slowest_times_its_work_plus_communication_every_time() -> None:
    rows = federation().rows
    slowest = float(Exponential().times(0, rows.keys, 4).max())
    state, done, _ = run_one(asker(3, work=5.0), rows, clock=VirtualClock(communication=10.0), seed=4)
    assert [r.time for r in done.rounds] == pytest.approx([(i + 1) * (5 * slowest + 10) for i in range(3)])
    assert state.told == done.rounds[-1].time
    # In units of a round's work, a client takes T_i for the round.
    _, done, _ = run_one(asker(1, work=5.0), rows, clock=VirtualClock(communication=10.0, unit=5.0), seed=4)
    assert done.rounds[-1].time == pytest.approx(slowest + 10)


def test_every_question_is_charged_and_those_to_some_by_their_slowest() -> None:
    rows = federation().rows
    times = Exponential().times(0, rows.keys, 0)
    _, done, _ = run_one(asker(1, questions=3), rows, clock=VirtualClock(communication=1.0))
    assert done.rounds[0].time == pytest.approx(3 * (float(times.max()) + 1))
    few = torch.tensor([2, 5])
    _, done, _ = run_one(asker(1, to=few), rows, clock=VirtualClock())
    assert done.rounds[0].time == float(times[few].max())


def test_only_participants_are_waited_for() -> None:
    rows, clock = federation().rows, VirtualClock(DynamicExponential())
    _, done, _ = run_one(asker(4), rows, clock=clock, participation=Sampled(0.3), seed=2)
    cost = np.diff([0.0, *(r.time for r in done.rounds)])
    for round_, took in enumerate(cost):
        drawn = Sampled(0.3).choose(round_, rows.keys, 2).asked
        assert took == pytest.approx(float(clock.times(round_, rows.keys, 2)[drawn].max()))


def test_without_a_clock_no_time_passes_and_on_the_wall_it_does() -> None:
    rows = federation().rows
    state, done, _ = run_one(asker(2), rows)
    assert (state.told, [r.time for r in done.rounds]) == (0.0, [0.0, 0.0])
    state, done, _ = run_one(asker(2), rows, clock=WallClock())
    assert 0 < done.rounds[0].time < done.rounds[1].time == state.told
    assert done.rounds[1].time <= sum(r.seconds for r in done.rounds)


def test_runs_in_lockstep_have_their_own_time() -> None:
    rows, clock = federation().rows, VirtualClock(DynamicExponential(), communication=0.5)
    programs = [asker(3), asker(3, work=2.0), asker(2), asker(3, questions=2)]
    together = InProcess(rows, clock=clock).run(programs)
    for run, program in enumerate(programs):
        _, alone, _ = run_one(program, rows, clock=clock)
        assert [r.time for r in together.rounds if r.run == run] == [r.time for r in alone.rounds]


def test_time_goes_on_after_an_interruption(tmp_path: Path) -> None:
    rows, clock, path = federation().rows, VirtualClock(DynamicExponential(), 0.1), tmp_path / "state"
    _, whole, _ = run_one(asker(5), rows, clock=clock)
    with pytest.raises(KilledError):
        InProcess(rows, clock=clock).run([asker(5)], checkpoint=path, state_type=Counted, watch=interrupt_after(3))
    resumed = InProcess(rows, clock=clock).run([asker(5)], checkpoint=path, state_type=Counted)
    assert [r.time for r in resumed.rounds] == [r.time for r in whole.rounds]
    assert resumed.states == whole.states
