# SPDX-License-Identifier: Apache-2.0
"""Private state on a node: it survives restarts, goes back to where the server says, and no message can spoil it."""

import os
import stat
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from coterie.engines.flower.journal import Journal
from coterie.engines.flower.messages import State
from coterie.engines.flower.state import PrivateFiles, same
from coterie.errors import RunError


def at(value: float) -> dict[int, dict[str, torch.Tensor]]:
    return {0: {"head": torch.full((2, 3), value)}, 2: {"visits": torch.tensor([1, int(value)])}}


def answered(folder: Path, accepted: int, number: int, *, needed: int = 0, source: str = "fit") -> float | None:
    """Answer a question as a new process would: what it started from, or None; it keeps its number."""
    files = PrivateFiles(folder, "run-1")
    state = State(source, accepted, "fit", number, needed)
    files.tidy(state)
    private, lost = files.load(state)
    files.keep(state, at(float(number)))
    assert lost == (accepted > 0 and not private)
    return None if not private else float(private[0]["head"][0, 0])


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "run-1" / "fit").iterdir())


def test_a_node_goes_on_from_the_answer_that_counted(tmp_path: Path) -> None:
    assert answered(tmp_path, 0, 1) is None
    assert answered(tmp_path, 1, 2) == 1.0
    assert answered(tmp_path, 2, 3) == 2.0


def test_an_answer_that_did_not_count_is_undone(tmp_path: Path) -> None:
    answered(tmp_path, 0, 1)
    answered(tmp_path, 1, 2)  # comes too late: the server goes on without it
    assert answered(tmp_path, 1, 3) == 1.0
    assert numbers(tmp_path) == [1, 3]


def test_the_same_question_twice_is_as_once(tmp_path: Path) -> None:
    answered(tmp_path, 0, 1)
    assert answered(tmp_path, 1, 2) == 1.0
    assert answered(tmp_path, 1, 2) == 1.0
    assert numbers(tmp_path) == [1, 2]


def test_a_server_that_was_killed_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    for number in range(1, 6):
        answered(tmp_path, number - 1, number, needed=2)
    assert numbers(tmp_path) == [2, 3, 4, 5]  # the checkpoint was written after answer 2
    assert answered(tmp_path, 2, 3, needed=2) == 2.0
    assert numbers(tmp_path) == [2, 3]


def test_without_checkpoints_only_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        answered(tmp_path, number - 1, number, needed=number - 1)
    assert numbers(tmp_path) == [4, 5]


def test_lost_files_are_said_to_be_lost(tmp_path: Path) -> None:
    answered(tmp_path, 0, 1)
    (tmp_path / "run-1" / "fit" / "1.safetensors").unlink()
    assert PrivateFiles(tmp_path, "run-1").load(State("fit", 1, "fit", 2, 0)) == ({}, True)


def test_a_copy_leaves_what_it_came_from_as_it_is(tmp_path: Path) -> None:
    answered(tmp_path, 0, 1)
    files = PrivateFiles(tmp_path, "run-1")
    state = State("fit", 1, "measured", 1, 0)
    files.tidy(state)
    private, _ = files.load(state)
    files.keep(state, at(9.0))
    assert same(private, at(1.0))
    assert same(files.load(State("fit", 1, "fit", 2, 0))[0], at(1.0))
    files.tidy(state)  # measured again: the copy begins anew
    assert not list((tmp_path / "run-1" / "measured").iterdir())


def keep_some_of(folder: Path, run: str, **how: float) -> None:
    PrivateFiles(folder, run, **how).keep(State("fit", 0, "fit", 1, 0), at(1.0))  # type: ignore[arg-type]


def test_a_run_that_was_used_of_late_makes_no_room_for_another(tmp_path: Path) -> None:
    for i in range(6):
        keep_some_of(tmp_path, f"run-{i}", runs=6)
    with pytest.raises(RunError, match="keeps the state of 6 runs, all used within 7 days"):
        keep_some_of(tmp_path, "run-6", runs=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run-{i}" for i in range(6)]
    assert PrivateFiles(tmp_path, "run-7").load(State("fit", 0, "fit", 1, 0)) == ({}, False)


def test_the_run_that_nobody_has_used_for_longest_makes_room(tmp_path: Path) -> None:
    for i in range(3):
        keep_some_of(tmp_path, f"run-{i}")
    for path in ((tmp_path / "run-1"), *(tmp_path / "run-1").rglob("*")):
        os.utime(path, (0, 0))
    keep_some_of(tmp_path, "run-3", runs=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-2", "run-3"]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        keep_some_of(tmp_path / "node", "run-1")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "node").rglob("*")}
    assert modes == {"run-1": 0o700, "fit": 0o700, "1.safetensors": 0o600}
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700


def test_answers_that_a_server_keeps_are_its_owners_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "answers", {"what": "a comparison"})
    journal.recalled()
    journal.note({}, {})
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "answers").iterdir()}
    assert modes == {"about.json": 0o600, "000001.safetensors": 0o600}
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "", "..", "a\\b"])
def test_names_from_messages_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="cannot be the name"):
        PrivateFiles(tmp_path, name)
    with pytest.raises(RunError, match="cannot be the name"):
        PrivateFiles(tmp_path, "run").load(State(name, 1, "fit", 2, 0))


def test_same_sees_every_difference() -> None:
    assert same(at(1.0), at(1.0))
    assert not same(at(1.0), at(2.0))
    assert not same(at(1.0), {0: at(1.0)[0]})
    assert not same({}, at(1.0))
