# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all or nothing on disk, nothing pickled, and a resumed run is bit-equal to one that was never stopped."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms import fedavg, ifca
from coterie.algorithms.starts import Start
from coterie.engines.checkpoint import from_record, load_tensors, save_tensors, to_record
from coterie.engines.in_process import Finished, InProcess
from coterie.errors import RunError
from coterie.files import replace_file
from coterie.local import Training
from coterie.participation import Sampled
from helpers import LINE, NET, STEPS, KilledError, assert_same_state, federation, interrupt_after

Program = Callable[[Any], Any]


@dataclass(frozen=True)
class Odd:
    """A state with everything that a state may hold."""

    theta: Tensor
    nothing: Tensor | None
    name: str | None
    share: float
    done: bool
    round: int = 0


def odd() -> Odd:
    return Odd(torch.randn(2, 3, dtype=torch.float64), None, None, 0.1 + 0.2, True, 7)


# -- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(3, 4).T,
        torch.tensor(2.5),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.randn(1, 3).expand(5, 3),
    ],
    ids=["double", "transposed", "scalar", "whole", "truth", "empty", "expanded"],
)
def test_tensors_come_back_bit_by_bit(tmp_path: Path, value: Tensor) -> None:
    save_tensors(tmp_path / "a", {"x": value, "same memory": value}, {"n": 1, "none": None, "nan": float("nan")})
    tensors, document = load_tensors(tmp_path / "a")
    for got in tensors.values():
        assert got.dtype == value.dtype
        assert torch.equal(got, value)
    assert document["n"] == 1
    assert document["none"] is None
    assert document["nan"] != document["nan"]


def test_a_state_is_taken_apart_and_put_together_again(tmp_path: Path) -> None:
    state = odd()
    tensors, rest = to_record(state)
    assert tensors.keys() == {"theta"}
    save_tensors(tmp_path / "a", tensors, rest)
    again = from_record(Odd, *load_tensors(tmp_path / "a"))
    assert_same_state(state, again)


def test_a_record_of_another_state_is_refused() -> None:
    tensors, rest = to_record(odd())
    with pytest.raises(RunError, match="another kind of state"):
        from_record(fedavg.State, tensors, rest)


def test_a_crash_before_the_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save_tensors(path, {"x": torch.zeros(3)}, {"round": 1})

    def crash(*_: Any) -> None:
        raise KilledError

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KilledError):
        save_tensors(path, {"x": torch.ones(3)}, {"round": 2})
    monkeypatch.undo()
    tensors, document = load_tensors(path)
    assert document == {"round": 1}
    assert not tensors["x"].any()
    save_tensors(path, {"x": torch.ones(3)}, {"round": 2})  # what the crash left behind is in nobody's way
    assert load_tensors(path)[1] == {"round": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")

    def crash(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, b"new and longer")
    assert path.read_bytes() == b"old"


def test_content_is_on_the_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    replace_file(tmp_path / "a", b"content")
    assert order == ["fsync", "replace"]


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_a_truncated_file_is_a_run_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "state"
    save_tensors(path, {"x": torch.zeros(100)}, {"round": 1})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RunError, match="cannot be read") as caught:
        load_tensors(path)
    assert caught.value.hint


def test_a_missing_or_foreign_file_is_a_run_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no checkpoint"):
        load_tensors(tmp_path / "absent")
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("hello, this is not a checkpoint at all, though it is long enough to be one")
    for name in ("foreign", "text"):
        with pytest.raises(RunError, match="cannot be read"):
            load_tensors(tmp_path / name)


def test_pickle_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    path = tmp_path / "state"
    run(PROGRAMS["ifca in lockstep"], path)
    assert run(PROGRAMS["ifca in lockstep"], path).states
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    assert "coterie" in json.loads(header)["__metadata__"]  # a safetensors file: a JSON header, then raw numbers


# -- runs -------------------------------------------------------------------------------------------------------------
def clustered(seed: int, **changes: Any) -> Program:
    options: dict[str, Any] = {"n_clusters": 2, "rounds": 4, "step_size": 0.05, "training": STEPS} | changes
    return lambda state: ifca.ifca(state, model=LINE, seed=seed, **options)


PROGRAMS: dict[str, tuple[list[Program], type]] = {
    "ifca in lockstep": (
        [
            clustered(1),
            clustered(2, rounds=2),
            clustered(3, n_clusters=4, patience=1, start=Start("random"), rounds=6),
            clustered(4, training=Training(epochs=2, batch_size=3, momentum=0.5)),
            clustered(5, soft=True),
            clustered(6, tol=0.05, rounds=6),
        ],
        ifca.State,
    ),
    "local models": (
        [
            lambda s: fedavg.local_models(s, model=NET, rounds=4, step_size=0.05, seed=1, training=STEPS),
            lambda s: fedavg.local_models(s, model=NET, rounds=3, step_size=0.02, seed=2, training=STEPS),
        ],
        fedavg.LocalState,
    ),
    "fedavg of who is near": (
        [lambda s: fedavg.fedavg(s, model=LINE, rounds=8, step_size=0.1, seed=1, training=STEPS, robust="near")],
        fedavg.State,
    ),
    "fedavg that settles": (
        [lambda s: fedavg.fedavg(s, model=LINE, rounds=30, step_size=0.1, seed=1, training=STEPS, tol=0.1)],
        fedavg.State,
    ),
}


def run(programs: tuple[list[Program], type], path: Path | None, **options: Any) -> Finished:
    finished, _ = run_keeping(programs, path, **options)
    return finished


def run_keeping(programs: tuple[list[Program], type], path: Path | None, **options: Any) -> tuple[Finished, InProcess]:
    engine = InProcess(federation().rows, participation=Sampled(0.7), seed=9)
    return engine.run(programs[0], checkpoint=path, state_type=programs[1], **options), engine


def assert_same_run(one: tuple[Finished, InProcess], two: tuple[Finished, InProcess]) -> None:
    for a, b in zip(one[0].states, two[0].states, strict=True):
        assert_same_state(a, b)
    records = [
        [(r.run, r.round, r.participants, r.bytes_up, r.bytes_down, dict(r.info)) for r in finished.rounds]
        for finished, _ in (one, two)
    ]
    assert records[0] == records[1]
    left, right = one[1].worker.private, two[1].worker.private
    assert left.keys() == right.keys()
    for number, kept in left.items():
        for name, value in kept.items():
            assert torch.equal(value, right[number][name])


@pytest.mark.parametrize("which", PROGRAMS)
def test_resumed_after_any_interruption_a_run_is_bit_equal(tmp_path: Path, which: str) -> None:
    programs = PROGRAMS[which]
    whole = run_keeping(programs, None)
    n_rounds = len(whole[0].rounds)
    assert n_rounds > 3
    for stop in {*range(1, n_rounds + 1, max(1, n_rounds // 7)), n_rounds}:  # in every round, though not in all runs
        path = tmp_path / f"stopped after {stop}"
        with pytest.raises(KilledError):
            run(programs, path, watch=interrupt_after(stop))
        assert_same_run(run_keeping(programs, path), whole)


def test_resumed_again_and_again_a_run_is_bit_equal(tmp_path: Path) -> None:
    programs, path = PROGRAMS["ifca in lockstep"], tmp_path / "state"
    whole = run_keeping(programs, None)
    killed = 0
    while True:
        try:
            finished = run_keeping(programs, path, watch=interrupt_after(len(programs[0]) + 1))
            break
        except KilledError:
            killed += 1
    assert killed >= 3
    assert_same_run(finished, whole)


@pytest.mark.parametrize("which", PROGRAMS)
def test_a_finished_run_resumed_is_the_same_and_asks_nothing(tmp_path: Path, which: str) -> None:
    programs, path = PROGRAMS[which], tmp_path / "state"
    first = run_keeping(programs, path)
    told: list[Any] = []
    again = run_keeping(programs, path, watch=told.append)
    assert_same_run(first, again)
    assert told == []
    assert_same_run(run_keeping(programs, path), first)


def test_a_finished_run_continued_with_more_rounds_equals_one_that_had_them_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "state"
    run(([clustered(1, rounds=3)], ifca.State), path)
    run(([clustered(1, rounds=3)], ifca.State), path)
    longer = ([clustered(1, rounds=6)], ifca.State)
    assert_same_run(run_keeping(longer, path), run_keeping(longer, None))


def test_the_last_round_is_kept_however_rarely_checkpoints_are_written(tmp_path: Path) -> None:
    programs, path = PROGRAMS["ifca in lockstep"], tmp_path / "state"
    with pytest.raises(KilledError):
        run(programs, path, every=3600.0, watch=interrupt_after(10))
    assert not path.exists()
    whole = run_keeping(programs, path, every=3600.0)
    assert path.exists()
    assert_same_run(run_keeping(programs, path), whole)


def test_the_same_engine_may_resume_what_was_interrupted(tmp_path: Path) -> None:
    programs, state = PROGRAMS["local models"]
    whole = run_keeping((programs, state), None)
    for stop in (1, 3):  # before and after the first checkpoint
        engine = InProcess(federation().rows, participation=Sampled(0.7), seed=9)
        path = tmp_path / f"{stop}"
        with pytest.raises(KilledError):
            engine.run(programs, checkpoint=path, state_type=state, watch=interrupt_after(stop))
        assert_same_run((engine.run(programs, checkpoint=path, state_type=state), engine), whole)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    run(([clustered(1), clustered(2)], ifca.State), path)
    before = path.read_bytes()
    with pytest.raises(RunError, match="2 runs and 1"):
        run(([clustered(1)], ifca.State), path)
    with pytest.raises(RunError, match="another kind of state"):
        run(([clustered(1), clustered(2)], fedavg.State), path)
    with pytest.raises(RunError, match="state_type"):
        InProcess(federation().rows).run([clustered(1), clustered(2)], checkpoint=path)
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(RunError, match="cannot be read"):
        run(([clustered(1), clustered(2)], ifca.State), path)


@pytest.mark.parametrize("shape", [(2, 7), (3,), (), (2, 0), (1, 2, 3, 4)])
def test_numbers_of_a_made_up_checkpoint_that_do_not_fit_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "state"
    with pytest.raises(KilledError):
        run(([clustered(1)], ifca.State), path, watch=interrupt_after(2))
    tensors, document = load_tensors(path)
    theta = next(name for name in tensors if name.endswith("/theta"))
    save_tensors(path, tensors | {theta: torch.zeros(shape, dtype=tensors[theta].dtype)}, document)
    with pytest.raises(RunError, match="do not fit the run"):
        run(([clustered(1)], ifca.State), path)


def test_parts_of_what_was_expanded_are_kept(tmp_path: Path) -> None:
    one = torch.ones(1, dtype=torch.float64).expand(1, 12)[:, 3:4]  # a number whose strides are 0
    save_tensors(tmp_path / "state", {"one": one}, {})
    assert load_tensors(tmp_path / "state")[0]["one"].tolist() == [[1.0]]
