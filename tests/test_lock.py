# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a folder, and the next one as soon as that has ended, however it ended."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coterie.errors import RunError
from coterie.lock import LOCK, held

HOLD = """\
import sys
from pathlib import Path
from coterie.lock import held
path = Path(sys.argv[1])
with held(path, path.parent):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> "subprocess.Popen[str]":
    """A process that holds the lock."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "run" / LOCK)]
    made = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "held\n"
    yield made
    made.kill()
    made.communicate()


def test_a_second_process_is_refused_with_the_number_of_the_first(
    tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunError) as caught, held(folder / LOCK, folder):
        pass
    assert caught.value.message == f"{folder} is in use by process {other.pid}"
    assert caught.value.hint == "wait until that has ended, or use another folder"
    other.communicate("")
    assert not folder.exists()  # it was made for the lock
    with held(folder / LOCK, folder) as first:
        assert first
        assert (folder / LOCK).read_text() == f"{os.getpid()}\n"


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    folder = tmp_path / "run"
    assert (folder / LOCK).read_text() == f"{other.pid}\n"
    with held(folder / LOCK, folder) as first:
        assert first
    assert list(folder.iterdir()) == []


def test_whoever_has_it_may_ask_again_but_no_other_thread(tmp_path: Path) -> None:
    said: list[str] = []

    def another() -> None:
        try:
            with held(tmp_path / LOCK, tmp_path):
                said.append("held")
        except RunError as error:
            said.append(error.message)

    with held(tmp_path / LOCK, tmp_path) as first:
        (tmp_path / "link").symlink_to(tmp_path)
        with held(tmp_path / "link" / LOCK, tmp_path) as second:
            assert (first, second) == (True, False)
        assert (tmp_path / LOCK).exists()
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
    assert said == [f"{tmp_path} is in use by process {os.getpid()}"]
    another()
    assert said[1:] == ["held"]


def test_folders_are_made_and_removed_if_they_stay_empty(tmp_path: Path) -> None:
    deep = tmp_path / "runs" / "a"
    with held(deep / LOCK, deep):
        pass
    assert list(tmp_path.iterdir()) == []
    with held(deep / LOCK, deep):
        (deep / "kept").touch()
    assert [path.name for path in deep.iterdir()] == ["kept"]


@pytest.mark.parametrize("kind", ["link", "text", "hard link"])
def test_what_is_no_lock_is_not_written_to(kind: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious" if kind == "text" else "12\n")
    if kind == "link":
        (tmp_path / LOCK).symlink_to(mine)
    elif kind == "hard link":
        os.link(mine, tmp_path / LOCK)
    else:
        mine.rename(tmp_path / LOCK)
    before = (tmp_path / LOCK).read_text()
    with pytest.raises(RunError, match="is not a lock"), held(tmp_path / LOCK, tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == before
