# SPDX-License-Identifier: Apache-2.0
"""A SuperNode that is quicker than Flower's: apps are forked, and messages are looked for while they come."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("flwr")

from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.superlink.grid import http_grid
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

from coterie.engines.flower import supernode, waits
from coterie.engines.flower.processes import run_table

linux = pytest.mark.skipif(sys.platform != "linux", reason="apps are forked on Linux only")

SUPERNODE = """\
import os, sys
from coterie.engines.flower import supernode, waits

def app():
    name, *words = sys.argv
    print("forked", name, *words, "torch" in sys.modules, flush=True)
    if "fail" in words:
        raise SystemExit(3)

supernode.flwr_clientapp = app
supernode.starting_apps()
print(os.environ["PATH"].split(os.pathsep)[0], flush=True)
sys.stdin.read()
"""


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that could become a SuperNode, and where its command is; Flower's own is a script that says so."""
    real = folder / "flwr-clientapp"
    real.write_text('#!/bin/sh\necho "Flower\'s own $*"\n')
    real.chmod(0o700)
    around = {**os.environ, "PATH": os.pathsep.join([str(folder), os.environ["PATH"]]), "TMPDIR": "/tmp"}
    code = f"import sys; sys.executable = {str(folder / 'python')!r}\n" + SUPERNODE  # so that Flower's is not beside it
    (folder / "python").symlink_to(sys.executable)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=around, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip()) / "flwr-clientapp"
        process.kill()


def said_by(command: Path, *words: str) -> str:
    return subprocess.run([command, *words], capture_output=True, text=True, check=True).stdout


@linux
def test_apps_are_forked_with_what_they_import_and_without_torch(tmp_path: Path) -> None:
    with running(tmp_path) as (process, command):
        assert command.parent.stat().st_mode & 0o077 == 0
        assert process.stdout is not None
        for words in (["--token", "a b"], ["fail"], ["--token", "c"]):  # one that fails does no harm to the next
            assert said_by(command, *words) == ""  # the app writes where the SuperNode does
            assert process.stdout.readline().split() == ["forked", "flwr-clientapp", *" ".join(words).split(), "False"]


@linux
def test_flowers_own_command_is_run_when_nobody_forks(tmp_path: Path) -> None:
    with running(tmp_path) as (_, command):
        (command.parent / "socket").unlink()
        assert said_by(command, "--token", "x") == "Flower's own --token x\n"


@linux
def test_nothing_is_left_when_the_supernode_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as (process, command):
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == ""  # ends when the last process has gone that could write to it
        assert not command.parent.exists()


@linux
def test_nothing_is_left_when_it_is_stopped_with_all_that_it_has_started(tmp_path: Path) -> None:
    with running(tmp_path) as (process, command):
        for child in [pid for pid, found in run_table().items() if found.parent == process.pid]:
            os.kill(child, signal.SIGTERM)
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert not command.parent.exists()


def test_waits_are_short_while_messages_come_and_flowers_own_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [1000.0], list[float]()
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(waits.time, "sleep", waited.append)
    soon = waits.Soon()
    soon.sleep(3)  # nothing has come yet
    soon.sleep(0.5)  # an app is at work
    soon.sleep(3)
    now[0] += 60
    soon.sleep(3)
    assert waited == [3, 0.1, 0.3, 3]


def test_parts_of_a_message_that_have_not_come_are_fetched_again_soon() -> None:
    asked = list[str]()

    def fetch(name: str) -> bytes:
        asked.append(name)
        if len(asked) < 4:
            raise ObjectUnavailableError(name)
        return b"part"

    module = ModuleType("of Flower")
    module.pull_objects = inflatable_utils.pull_objects  # type: ignore[attr-defined]
    for _ in range(2):  # the second time there is nothing to do
        waits.retry_soon(module, None)
    assert module.pull_objects(["a"], fetch) == {"a": b"part"}  # Flower's own would have waited 1, 2 and 4 seconds
    assert module.pull_objects.keywords["initial_backoff"] < 0.1


def test_flower_still_has_what_is_replaced() -> None:
    for module in (start_client_internal, http_grid, run_clientapp):
        kept = {name: getattr(module, name, None) for name in ("pull_objects", "pull_and_inflate_object_from_tree")}
        assert any(kept.values())
    assert TASK_TYPE_TO_COMMAND[TaskType.CLIENT_APP] == supernode._COMMAND
    assert start_client_internal.time.sleep  # type: ignore[attr-defined]
