# SPDX-License-Identifier: Apache-2.0
"""A node's log: a line of JSON for every client function that a message asked for, and whether it was answered.

It lies in the node's state folder, for the owner only. A line is written at once, at the end, and before the answer leaves:
what is not in the log has not left. Two processes can write at the same time. When the newest file is full it is set aside
under a number, and the oldest one goes.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.engines.flower.node_lock import alone
from coterie.errors import RunError
from coterie.files import owner_only

__all__ = ["FILE", "Entry", "entries", "write"]

FILE = "log.jsonl"

_FILES = 8  # that the log is kept in, the newest included
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True)
class Entry:
    """A line: what a message asked of one client function.

    Attributes
    ----------
    run, flower, submitter, method : str, int, str, str
        Who asked: coterie's name of the run, Flower's number of it, and what the run says of itself.
    function : str
        The client function, or "introduction" for the greeting; "secure-keys", "secure-letters" and "secure-unmask" are
        what a secure sum needs beside answers; empty where a message could not be read.
    asks : int
        Asks of the message for this function: several runs in lockstep are several.
    clients : int
        Of the node, that it was asked for.
    fields : dict
        Field -> how it left, or was to leave: "sum", "masked" or "individual".
    bytes : int
        That left.
    epsilon : float
        That it cost.
    refused : str
        Why nothing left; empty where it was answered.
    time : str
        When, in UTC.
    """

    run: str = ""
    flower: int = 0
    submitter: str = ""
    method: str = ""
    function: str = ""
    asks: int = 0
    clients: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    epsilon: float = 0.0
    refused: str = ""
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))


def write(folder: Path, lines: Sequence[Entry], megabytes: float) -> None:
    """Add lines to the log of the node with this folder; all of it takes at most so much."""
    text = "".join(json.dumps(asdict(line)) + "\n" for line in lines).encode()
    with owner_only():
        folder.mkdir(parents=True, exist_ok=True)
        size = _append(folder / FILE, text)
        if size > megabytes * 1e6 / _FILES:
            _set_aside(folder, size)


def _append(file: Path, text: bytes) -> int:
    """Write at the end, in one piece; a line that was cut before is ended first.  -> the file's size"""
    opened = os.open(file, _APPEND, 0o600)
    try:
        size = os.fstat(opened).st_size
        if size and os.pread(opened, 1, size - 1) != b"\n":
            text = b"\n" + text
        written = os.write(opened, text)
        if written < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return size + written
    finally:
        os.close(opened)


def _set_aside(folder: Path, size: int) -> None:
    """Begin another file, unless another process has, or is about to; who has this one open still writes to it."""
    with suppress(RunError), alone(folder):
        with suppress(FileNotFoundError):
            if (folder / FILE).stat().st_size < size:
                return
        for number in range(_FILES - 2, -1, -1):
            with suppress(FileNotFoundError):
                os.replace(_named(folder, number), _named(folder, number + 1))


def entries(folder: Path, *, run: str | None = None, last: int = 0) -> tuple[list[Entry], int]:
    """Read the log, the newest lines last.  -> lines, how many could not be read

    Parameters
    ----------
    folder : Path
        Of the node.
    run : str, optional
        Lines of this run only, by coterie's name or Flower's number.
    last : int
        How many at most; 0 for all.
    """
    found: list[Entry] = []
    broken = 0
    for number in range(_FILES):
        there: list[Entry] = []
        for line in _lines(_named(folder, number)):
            one = _entry(line)
            broken += one is None
            if one is not None and run in (None, one.run, str(one.flower)):
                there.append(one)
        found = there + found
        if last and len(found) >= last:
            return found[-last:], broken
    return found, broken


def _named(folder: Path, number: int) -> Path:
    """The files, from the newest."""
    return folder / (FILE if number == 0 else f"log.{number}.jsonl")


def _lines(file: Path) -> Iterator[str]:
    with suppress(FileNotFoundError), file.open(encoding="utf-8", errors="replace") as opened:
        yield from (line for line in opened if line.strip())


def _entry(line: str) -> Entry | None:
    """A line that was written whole; None for one that was cut, or is another's."""
    try:
        said = json.loads(line)
        known: Mapping[str, Any] = {one.name: said[one.name] for one in fields(Entry)}
        return Entry(**known) if isinstance(known["fields"], dict) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
