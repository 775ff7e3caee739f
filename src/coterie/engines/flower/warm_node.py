# SPDX-License-Identifier: Apache-2.0
"""The process that a node keeps from one message to the next, as seen by those who look for it.

It listens on a Unix socket in a folder that nobody else may enter. Who holds the lock beside the socket is the node's
process, or about to start it; so there are never two. Lock and socket are opened by who starts it and are inherited: nobody
waits for a file to appear, and what has come before it listens is not lost.
"""

import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from coterie.engines.flower import frames
from coterie.errors import RunError

__all__ = ["NotWarmError", "WarmNode", "await_end"]

_TRIES = 2  # a request that a process ended over is put to another one once: answers are safe to repeat
_STARTS = 3  # processes that are started for a request at most
_PATIENCE = 60.0  # seconds in which an old process ends
_PAUSE = 0.02
_WAITING = 16  # connections
_PACKAGE = Path(__file__).parents[2]


class NotWarmError(Exception):
    """The node cannot keep a process here, and says why."""


@dataclass(frozen=True)
class WarmNode:
    """The process of one node.

    Attributes
    ----------
    folder : Path
        With its socket and lock.
    identity : str
        What it must have been started with to be the right one.
    idle : float
        Seconds that it waits for a request before it ends.
    """

    folder: Path
    identity: str
    idle: float

    @classmethod
    def of(cls, config: Mapping[str, object], state: Path, idle: float) -> "WarmNode":
        """The process of this version, this SuperNode, these settings and these files."""
        parts = {
            "versions": [version("coterie"), version("flwr"), sys.version, sys.executable],
            "code": [_stamp(file) for file in sorted(_PACKAGE.rglob("*.py"))],  # a version that is being worked on
            "supernode": os.getppid(),  # the part of it that starts processes, and ends with it
            "config": dict(config),
            "files": _stamps(config.get("data")),
        }
        identity = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
        return cls(_folder(state), identity, idle)

    @property
    def socket(self) -> str:
        """Where it listens."""
        return str(self.folder / "socket")

    def ask(self, *request: bytes) -> bytes:
        """Let it answer, started if need be.

        Raises
        ------
        NotWarmError
            If there is none, and none can be started.
        RuntimeError
            What went wrong there, in its words.
        """
        for _ in range(_TRIES):
            with suppress(ConnectionError), _connected(self) as connection:
                frames.send(connection, *request)
                came, said = frames.receive(connection, frames.SMALL), frames.receive(connection, frames.LARGEST)
                if came == frames.FAILED:
                    raise RuntimeError(said.decode())
                return said
        raise RunError("the node's process ended twice while it was answering", "see the log of the SuperNode")


def await_end(state: Path, patience: float = 10.0) -> None:
    """Wait until a node keeps no process any more, and remove what it has left."""
    folder = _folder(state)
    deadline = time.monotonic() + patience
    while folder.is_dir() and time.monotonic() < deadline:
        lock = _locked(folder)
        if lock is not None:
            for name in ("socket", "lock"):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()
            os.close(lock)
            return
        time.sleep(_PAUSE)


# -- reaching it ------------------------------------------------------------------------------------------------------
@contextmanager
def _connected(node: WarmNode) -> Iterator[socket.socket]:
    """A connection to the node's process, which is ready for a request."""
    _make_private(node.folder)
    deadline, starts = time.monotonic() + _PATIENCE, 0
    while time.monotonic() < deadline and starts <= _STARTS:
        with socket.socket(socket.AF_UNIX) as connection:
            if _reached(connection, node):
                yield connection
                return
        if _start(node):
            starts += 1
        else:  # another one is about to end, or about to listen
            time.sleep(_PAUSE)
    raise NotWarmError(f"the process that listens at {node.socket} does not answer, or ends at once")


def _reached(connection: socket.socket, node: WarmNode) -> bool:
    """Connect, and say who is meant. One that works waits with its answer; one that is not meant ends."""
    try:
        connection.connect(node.socket)
        if not frames.own(connection):
            raise NotWarmError(f"somebody else listens at {node.socket}")
        frames.send(connection, frames.GREETING + node.identity.encode())
        return frames.receive(connection, frames.SMALL) == frames.READY
    except OSError:  # nobody is there, or has just gone
        return False


def _start(node: WarmNode) -> bool:
    """Start the process, unless somebody else has the lock.  -> whether it was started"""
    lock = None
    try:
        lock = _locked(node.folder)
        if lock is None:
            return False
        Path(node.socket).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(node.socket)
            os.chmod(node.socket, 0o600)
            listener.listen(_WAITING)
            handed = (listener.fileno(), lock)
            command = [sys.executable, "-m", "coterie.engines.flower.warm", *map(str, handed), str(os.getppid())]
            made = subprocess.Popen(
                [*command, str(node.idle), node.identity], pass_fds=handed, stdin=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, "PYTHONSAFEPATH": "1"},
            )  # fmt: skip
            made.returncode = 0  # not to be waited for: it is meant to outlive this process
    except OSError as error:
        raise NotWarmError(f"no process can be kept at {node.socket}: {error}") from None
    finally:
        if lock is not None:
            os.close(lock)  # the process has it
    return True


def _locked(folder: Path) -> int | None:
    """Take the lock.  -> the file, whose lock whoever inherits it keeps; None where somebody has it"""
    import fcntl  # not on Windows, where nodes keep no process

    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _make_private(folder: Path) -> None:
    """Make a folder that nobody else may enter, in one that nobody else may enter; what others have made is refused."""
    for each in (folder.parent, folder):
        try:
            each.mkdir(mode=0o700, exist_ok=True)
            found = each.lstat()
        except OSError as error:
            raise NotWarmError(f"{each} cannot be made: {error}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise NotWarmError(f"others may enter {each}")


# -- which one is meant -----------------------------------------------------------------------------------------------
def _folder(state: Path) -> Path:
    """Where the process of a node listens: a short name, since sockets have no long ones."""
    name = hashlib.blake2b(str(state.resolve()).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"coterie-{os.geteuid()}" / name


def _stamps(data: object) -> list[list[object]]:
    """What tells the node's files from others: a file that has changed is read by another process."""
    if data is None:
        return []
    path = Path(str(data))
    inside: list[Path] = []
    with suppress(OSError):  # a file, or nothing that can be read: the process will say so
        inside = sorted(path.iterdir())
    return [[str(file), *_stamp(file)] for file in (path, *inside)]


def _stamp(file: Path) -> list[int]:
    try:
        found = file.stat()
    except OSError:
        return []
    return [found.st_mtime_ns, found.st_size, found.st_ino]
