# SPDX-License-Identifier: Apache-2.0
"""One process of a node at a time changes what is kept of the node as a whole: its ledger, approvals, the log's files."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coterie.errors import RunError

if sys.platform != "win32":  # where nothing is locked
    import fcntl

__all__ = ["alone"]

_PATIENCE = 10.0  # seconds
_PAUSE = 0.002


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Have a node's folder alone, for the time of a short write; the lock is on the folder, and ends with the process."""
    if sys.platform == "win32":
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        _lock(opened)
        yield
    finally:
        os.close(opened)


def _lock(opened: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunError(
                    f"another process of this node has held its state for {_PATIENCE:g} seconds", "see whether it hangs"
                ) from None
            time.sleep(_PAUSE)
        except OSError:  # a file system without locks
            return
