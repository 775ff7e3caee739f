# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: lockstep equals one run after the other, messages are counted, late clients are named."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms.fedavg import fedavg, local_models
from coterie.algorithms.ifca import ifca
from coterie.algorithms.starts import Start
from coterie.engines.in_process import InProcess, Round
from coterie.local import Training
from coterie.models import Model
from coterie.participation import Sampled
from coterie.protocol import Ask, Block, Mean, Replies, Save, Stack, Sum, Tensors
from helpers import LINE, NET, STEPS, Late, Only, assert_same_state, federation, run_one

Program = Callable[[Any], Any]
LOCKSTEP = 1e-12  # float64: products over more runs are summed in another order


def clustered(seed: int, *, model: Model = LINE, **changes: Any) -> Program:
    options: dict[str, Any] = {"n_clusters": 2, "rounds": 3, "step_size": 0.05, "training": STEPS} | changes
    return lambda state: ifca(state, model=model, seed=seed, **options)


# -- a small program to look inside -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Told:
    """What a server program saw."""

    value: Tensor
    round: int = 0


def rows_times(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """factor x rows of the client, and its number; remembers how often it was asked."""
    n = data.n.double()
    asked = private["asked"] + 1
    value = shared["factor"][:, None] * n + (each["own"] if each else 0.0)
    return {"value": value, "who": data.ids[None], "asked": asked}, {"asked": asked}


def questioner(
    factors: list[float], seen: list[Replies], *, to: list[int] | None = None, each: list[float] | None = None
) -> Program:
    """A program that asks once a round."""

    def program(state: Told | None) -> Generator[Ask | Save, Replies | None, Told]:
        state = state or Told(torch.zeros((), dtype=torch.float64))
        while state.round < len(factors):
            got = yield Ask(
                rows_times,
                {"factor": torch.tensor(factors[state.round], dtype=torch.float64), "word": "ignored"},
                {"value": Stack(), "who": Stack(), "asked": Mean()},
                each={} if each is None else {"own": torch.tensor(each, dtype=torch.float64)},
                to=None if to is None else torch.tensor(to),
                fresh={"asked": torch.tensor(0.0, dtype=torch.float64)},
            )
            assert got is not None
            seen.append(got)
            value = got["value"].sum() if got.n else state.value
            state = replace(state, value=value, round=state.round + 1)
            yield Save(state, {"answered": got.n})
        return state

    return program


COUNTS = (5, 0, 7, 12, 7, 1, 9, 7, 4, 12)


def test_individual_replies_come_in_the_order_of_client_numbers() -> None:
    for block_bytes in (1, 1 << 26):
        seen: list[Replies] = []
        run_one(questioner([2.0], seen), federation().rows, block_bytes=block_bytes)
        assert seen[0]["value"].tolist() == [2.0 * n for n in COUNTS]
        assert seen[0]["who"].tolist() == seen[0].ids.tolist() == list(range(10))
        assert seen[0].missing.tolist() == []


def test_a_question_to_some_goes_to_them_with_their_own_values() -> None:
    seen: list[Replies] = []
    run_one(questioner([1.0], seen, to=[2, 3, 7], each=[0.1, 0.2, 0.3]), federation().rows)
    assert seen[0].ids.tolist() == [2, 3, 7]
    assert seen[0]["value"].tolist() == pytest.approx([7.1, 12.2, 7.3])


def test_late_clients_are_named_and_the_others_counted() -> None:
    seen: list[Replies] = []
    _, finished, _ = run_one(questioner([1.0, 1.0, 1.0], seen), federation().rows, participation=Late(silent=(1,)))
    assert seen[0].ids.tolist() == [1, 2, 4, 5, 7, 8]
    assert seen[0].missing.tolist() == [0, 3, 6, 9]
    assert seen[1].n == 0
    assert seen[1].missing.tolist() == list(range(10))
    assert dict(seen[1].values) == {}
    assert seen[2].missing.tolist() == [1, 4, 7]
    assert [r.participants for r in finished.rounds] == [6, 0, 7]


def test_bytes_are_those_counted_by_hand() -> None:
    seen: list[Replies] = []
    late = Late(silent=(1,))
    _, finished, _ = run_one(questioner([1.0, 1.0, 1.0], seen), federation().rows, participation=late)
    # Down, to each of 10 asked: a float64 factor, a word counted as 8 bytes, and once the fresh private state, 8 bytes.
    assert [r.bytes_down for r in finished.rounds] == [10 * 24, 10 * 16, 10 * 16]
    # Up, from those who answer: value, who and asked, 8 bytes each.
    assert [r.bytes_up for r in finished.rounds] == [6 * 24, 0, 7 * 24]
    _, finished, _ = run_one(questioner([1.0], [], to=[1, 2], each=[0.0, 0.0]), federation().rows)
    assert finished.rounds[0].bytes_down == 2 * (24 + 8)


def test_bytes_of_ifca_are_those_counted_by_hand() -> None:
    k, p, c = 2, LINE.n_parameters, 10
    start = Start("warm", theta=torch.zeros(k, p, dtype=torch.float64))
    _, finished, _ = run_one(clustered(0, start=start, rounds=2), federation().rows)
    assert finished.rounds[0].bytes_up == 0  # a warm start asks nobody
    for done in finished.rounds[1:]:
        # theta, step size, key, temperature; model, averaging, training, by_rows, soft at 8 each; once the fresh label.
        assert done.bytes_down == c * (8 * k * p + 3 * 8 + 5 * 8 + (8 if done.round == 1 else 0))
        # A model of P, shares of K, counts of K, whether it moved (1 byte), loss and rows: the label itself stays.
        assert done.bytes_up == c * (8 * p + 8 * k + 8 * k + 1 + 8 + 8)


# -- lockstep ---------------------------------------------------------------------------------------------------------
def test_lockstep_equals_one_run_after_the_other() -> None:
    rows = federation().rows
    programs = [
        clustered(1),  # spread: every run asks other clients for a first model
        clustered(2),
        clustered(2, step_size=0.02),
        clustered(3, n_clusters=3),  # not stackable with the others
        clustered(4, rounds=1),  # ends early
        clustered(5, start=Start("random"), rounds=5),
        clustered(6, averaging="gradient"),
        clustered(7, training=Training(epochs=1, batch_size=3)),
        lambda state: fedavg(state, model=LINE, rounds=4, step_size=0.05, seed=3),
        lambda state: local_models(state, model=NET, rounds=2, step_size=0.05, seed=3, training=STEPS),
    ]
    engine = InProcess(rows)
    together = engine.run(programs)
    for run, program in enumerate(programs):
        alone, finished, own = run_one(program, rows)
        assert_same_state(together.states[run], alone, atol=LOCKSTEP)
        mine = [r for r in together.rounds if r.run == run]
        assert [r.round for r in mine] == [r.round for r in finished.rounds]
        for a, b in zip(mine, finished.rounds, strict=True):
            assert (a.participants, a.bytes_up, a.bytes_down) == (b.participants, b.bytes_up, b.bytes_down)
            assert a.info.keys() == b.info.keys()
            assert a.info.get("sizes") == b.info.get("sizes")
            assert a.info.get("loss", 0.0) == pytest.approx(b.info.get("loss", 0.0), rel=1e-10)
        for name, kept in own.worker.private.get(0, {}).items():
            torch.testing.assert_close(engine.worker.private[run][name], kept, rtol=LOCKSTEP, atol=LOCKSTEP)


def test_lockstep_does_one_pass_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.data.ragged import Ragged

    passes = []
    original = Ragged.blocks
    monkeypatch.setattr(Ragged, "blocks", lambda self, *a, **k: passes.append(1) or original(self, *a, **k))
    start = Start("random")
    InProcess(federation().rows).run([clustered(seed, start=start, rounds=3) for seed in range(6)])
    assert len(passes) == 3


def test_lockstep_with_a_sample_asks_all_runs_the_same_clients_each_round() -> None:
    seen: list[list[Replies]] = [[], [], []]
    engine = InProcess(federation().rows, participation=Sampled(0.3), seed=5)
    engine.run([questioner([1.0] * 4, seen[0]), questioner([2.0] * 4, seen[1]), questioner([3.0] * 2, seen[2])])
    drawn = [got.ids.tolist() for got in seen[0]]
    assert [got.ids.tolist() for got in seen[1]] == drawn
    assert [got.ids.tolist() for got in seen[2]] == drawn[:2]
    assert len({tuple(d) for d in drawn}) > 1
    assert all(len(d) == 3 for d in drawn)
    again: list[Replies] = []
    run_one(questioner([1.0] * 4, again), federation().rows, participation=Sampled(0.3), seed=5)
    assert [got.ids.tolist() for got in again] == drawn
    other: list[Replies] = []
    run_one(questioner([1.0] * 4, other), federation().rows, participation=Sampled(0.3), seed=6)
    assert [got.ids.tolist() for got in other] != drawn


def test_private_state_is_each_runs_own() -> None:
    seen: list[list[Replies]] = [[], []]
    engine = InProcess(federation().rows)
    engine.run([questioner([1.0] * 3, seen[0]), questioner([1.0], seen[1], to=[2, 5])])
    assert engine.worker.private[0]["asked"].tolist() == [3.0] * 10
    assert engine.worker.private[1]["asked"].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert [float(got["asked"]) for got in seen[0]] == [1, 2, 3]


def test_a_second_run_on_the_same_engine_starts_afresh() -> None:
    engine = InProcess(federation().rows)
    program = lambda state: local_models(state, model=NET, rounds=2, step_size=0.05, seed=0, training=STEPS)  # noqa: E731
    engine.run([program])
    first = engine.worker.private[0]["theta"].clone()
    engine.run([program])
    assert torch.equal(engine.worker.private[0]["theta"], first)


# -- rounds -----------------------------------------------------------------------------------------------------------
def test_rounds_are_recorded_in_order_and_watched() -> None:
    watched: list[Round] = []
    engine = InProcess(federation().rows)
    finished = engine.run([questioner([1.0, 2.0], []), questioner([1.0] * 3, [])], watch=watched.append)
    assert [(r.run, r.round) for r in finished.rounds] == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2)]
    assert watched == finished.rounds
    assert [r.info["answered"] for r in watched] == [10] * 5
    assert [s.round for s in finished.states] == [2, 3]
    assert all(r.seconds >= 0 for r in watched)


def test_no_programs_are_finished_at_once() -> None:
    finished = InProcess(federation().rows).run([])
    assert (finished.states, finished.rounds) == ([], [])


def test_a_program_that_saves_nothing_still_returns() -> None:
    def program(state: None) -> Generator[Ask | Save, Replies | None, int]:
        got = yield Ask(count_rows, {}, {"n": Sum()})
        assert got is not None
        return int(got["n"])

    assert InProcess(federation().rows).run([program]).states == [sum(COUNTS)]


def count_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return {"n": data.n[None]}, {}


# -- one question -----------------------------------------------------------------------------------------------------
def test_one_question_outside_any_round_reaches_everyone_whatever_the_policy() -> None:
    engine = InProcess(federation().rows, participation=Only((1,)))
    got = engine.ask(Ask(count_rows, {}, {"n": Stack()}))
    assert got["n"].tolist() == list(COUNTS)
    assert got.missing.tolist() == []
    some = engine.ask(Ask(count_rows, {}, {"n": Stack()}, to=torch.tensor([0, 4])))
    assert some["n"].tolist() == [5, 7]
    assert some.ids.tolist() == [0, 4]


def peek(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return {"asked": private["asked"]}, dict(private)


def test_one_question_sees_the_private_state_of_the_run_it_names() -> None:
    engine = InProcess(federation().rows)
    engine.run([questioner([1.0], []), questioner([1.0, 1.0], [])])
    ask = Ask(peek, {}, {"asked": Stack()}, fresh={"asked": torch.tensor(0.0, dtype=torch.float64)})
    assert engine.ask(ask, run=0)["asked"].tolist() == [1.0] * 10
    assert engine.ask(ask, run=1)["asked"].tolist() == [2.0] * 10
    assert engine.ask(ask, run=2)["asked"].tolist() == [0.0] * 10
