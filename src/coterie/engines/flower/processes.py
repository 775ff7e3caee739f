# SPDX-License-Identifier: Apache-2.0
"""Background processes that outlive the command that started them, and are known again by number and time of birth."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "alive", "free_port", "kill", "run_table", "start", "stop"]


@dataclass(frozen=True)
class Process:
    """A process: numbers are used again by the system, a number with its time of birth is not."""

    name: str
    pid: int
    born: str
    log: str
    log_begins: int = 0  # what stands before was said by others of its name

    def said(self) -> str:
        """What it has written to its log."""
        with Path(self.log).open("rb") as file:
            file.seek(self.log_begins)
            return file.read().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Running:
    """What the system says of a process."""

    parent: int
    born: str


def start(name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str], folder: Path) -> Process:
    """Start a process in the background: its own session, so that Ctrl-C in the terminal does not reach it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        begins = file.tell()
        made = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env=dict(environment), cwd=folder, start_new_session=True,
        )  # fmt: skip
    found = run_table().get(made.pid)
    made.returncode = 0  # not to be waited for: it is meant to outlive this process
    return Process(name, made.pid, "" if found is None else found.born, str(log), begins)


def alive(process: Process, table: Mapping[int, Running] | None = None) -> bool:
    """Whether this very process runs, and not another one that was given its number."""
    found = (run_table() if table is None else table).get(process.pid)
    return found is not None and found.born == process.born


def stop(processes: Iterable[Process], *, patience: float = 10.0) -> list[str]:
    """Stop processes and what they have started: politely, then by force.  -> names of those that were running"""
    table = run_table()
    roots = [process for process in processes if alive(process, table)]
    ours = {pid: table[pid].born for process in roots for pid in _family(process.pid, table)}
    for pid in ours:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + patience
    while (left := _left(ours)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        _signal(pid, signal.SIGKILL)
    while _left(ours):
        time.sleep(0.05)
    return [process.name for process in roots]


def kill(process: Process) -> None:
    """End a process and all that it has started at once, as a crash would."""
    table = run_table()
    for pid in _family(process.pid, table) if alive(process, table) else ():
        _signal(pid, signal.SIGKILL)
    while alive(process):
        time.sleep(0.05)


def free_port(taken: Iterable[int] = ()) -> int:
    """Find a port of the loopback interface that nobody listens on."""
    avoid = set(taken)
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in avoid:
            return port


def run_table() -> dict[int, Running]:
    """All processes that run; those that have ended and only wait to be collected are not among them."""
    if Path("/proc/self/stat").exists():
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        found = ((pid, _from_proc(pid, boot)) for pid in pids)
        return {pid: running for pid, running in found if running is not None}
    listed = ["ps", "-axo", "pid=,ppid=,stat=,lstart="]
    return _from_ps(subprocess.run(listed, capture_output=True, text=True, check=True).stdout)


def _from_proc(pid: int, boot: str) -> Running | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return None
    words = text.rpartition(")")[2].split()  # the name before may hold anything; state, parent, ... follow
    if words[0] in "ZX":
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # ours: collect it
        return None
    return Running(int(words[1]), f"{boot}/{words[19]}")


def _from_ps(text: str) -> dict[int, Running]:
    rows = (line.split(maxsplit=3) for line in text.splitlines())
    return {int(pid): Running(int(parent), born) for pid, parent, state, born in rows if not state.startswith("Z")}


def _family(pid: int, table: Mapping[int, Running]) -> list[int]:
    """A process and all that descend from it."""
    family = [pid]
    for member in family:  # grows while it is walked over
        family += [child for child, running in table.items() if running.parent == member]
    return family


def _left(ours: Mapping[int, str]) -> list[int]:
    table = run_table()
    return [pid for pid, born in ours.items() if pid in table and table[pid].born == born]


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
