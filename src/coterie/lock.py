# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a folder: a lock file with the process's number, whose lock ends with the process in any case."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coterie.errors import RunError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "held"]

LOCK = ".coterie.lock"  # in the folder that it locks

_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_held: dict[tuple[int, Path], int] = {}  # by thread and path, open files: who has a lock may ask for it again


@contextmanager
def held(path: Path, what: Path) -> Iterator[bool]:
    """Hold a lock, or say who does.  -> whether it was taken here, and not already before by this thread

    Parameters
    ----------
    path : Path
        The lock file. Its folder is made; afterwards both are removed, the folder unless something is in it.
    what : Path
        What it locks, to be said.
    """
    key = (threading.get_ident(), path.parent.resolve() / path.name)
    if fcntl is None or key in _held:
        yield False
        return
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    try:
        _held[key] = _locked(path, what)
        try:
            yield True
        finally:
            if key in _held:  # not in a copy of the process
                path.unlink(missing_ok=True)
                os.close(_held.pop(key))
    finally:
        with suppress(OSError):  # something is in it
            for folder in missing:
                folder.rmdir()


def _let_go() -> None:
    """Leave locks to the process that this one is a copy of: they must end with that one."""
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _locked(path: Path, what: Path) -> int:
    """Take the lock and write down who has it.  -> the open file"""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, _FLAGS, 0o644) if not path.is_symlink() else None
        except FileNotFoundError:  # whoever had it has removed the folder in the meantime
            continue
        if file is None or not _is_lock(file):
            raise RunError(f"{path} is not a lock of coterie's", "remove it, if you know what it is")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 20, 0).decode(errors="replace").strip()
            os.close(file)
            raise RunError(
                f"{what} is in use by {f'process {owner}' if owner.isdecimal() else 'another process'}",
                "wait until that has ended, or use another folder",
            ) from None
        except OSError:  # a file system without locks
            return file
        if _same(file, path):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
            return file
        os.close(file)  # whoever had it has removed it in the meantime


def _is_lock(file: int) -> bool:
    """Whether this file may be written to: in a stranger's folder the name may lead to anything."""
    found = os.fstat(file)
    small = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and found.st_size <= 20
    return small and all(part.isdigit() for part in os.pread(file, 20, 0).split())


def _same(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.lstat())
    return False
