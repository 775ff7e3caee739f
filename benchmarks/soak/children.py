# SPDX-License-Identifier: Apache-2.0
"""The command line in copies of one process that has everything imported: a start takes milliseconds, not seconds."""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.cli.commands import main

__all__ = ["Child", "Ended", "learn_modules", "start"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (None when it was killed), what it said, how long it took, file operations."""

    code: int | None
    out: str
    err: str
    seconds: float
    operations: int


@dataclass
class Child:
    """A command that runs in a copy of this process."""

    pid: int
    here: Path
    tag: str
    began: float

    def wait(self, kill_after: float | None = None) -> Ended:
        """Wait for its end, or end it after some seconds."""
        deadline = None if kill_after is None else self.began + kill_after
        while True:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                break
            if time.monotonic() >= deadline:
                os.kill(self.pid, signal.SIGKILL)
                deadline = None
            time.sleep(0.0005)
        seconds = time.monotonic() - self.began
        code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        out, err, counted = (self._said(name) for name in ("out", "err", "count"))
        return Ended(code, out, err, seconds, int(counted or 0))

    def _said(self, name: str) -> str:
        path = self.here.parent / f"{self.tag}.{name}"
        text = path.read_text(errors="replace") if path.exists() else ""
        path.unlink(missing_ok=True)
        return text


def start(words: Sequence[str], here: Path, *, tag: str = "said", kill_at: int | None = None) -> Child:
    """Call a command in a folder; `kill_at`: it kills itself when it is about to change so many files."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _run(list(words), here, tag, kill_at)
        finally:
            os._exit(99)
    return Child(pid, here, tag, began)


def _run(words: list[str], here: Path, tag: str, kill_at: int | None) -> None:
    """Be the command."""
    os.chdir(here)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(here.parent / f"{tag}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    count = 0

    def changing(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & _WRITES):
            changing()

    fsync = os.fsync
    os.fsync = lambda file: (changing(), fsync(file), changing())[1]  # type: ignore[assignment]
    sys.addaudithook(audit)
    sys.argv = ["coterie", *words]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    (here.parent / f"{tag}.count").write_text(str(count))
    if os.environ.get("COTERIE_SOAK_MODULES"):
        Path(os.environ["COTERIE_SOAK_MODULES"]).write_text(json.dumps(sorted(sys.modules)))
    os._exit(code)


def learn_modules(commands: Sequence[Sequence[str]], here: Path) -> None:
    """Import here what commands import while they run, so that later copies have it."""
    where = here.parent / "modules.json"
    os.environ["COTERIE_SOAK_MODULES"] = str(where)
    try:
        for words in commands:
            start(words, here).wait()
            for name in json.loads(where.read_text()):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            where.unlink()
    finally:
        del os.environ["COTERIE_SOAK_MODULES"]
