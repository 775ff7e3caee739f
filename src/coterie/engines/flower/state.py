# SPDX-License-Identifier: Apache-2.0
"""Private state on a node: one file for every answer that may still be gone back to, written whole or not at all.

The server says which of a node's answers it has used. An answer that was lost, came too late, or was used by a server that
was killed before its checkpoint, is undone in this way: the node goes back to what it had kept before.

Nobody but the node's user may read them. A run makes room for another only when it has not been used for long: otherwise
whoever starts runs could remove what clients keep of earlier ones.
"""

import shutil
import time
from pathlib import Path

import torch

from coterie.engines.checkpoint import load_tensors, save_tensors
from coterie.engines.flower.messages import State
from coterie.errors import RunError
from coterie.files import owner_only
from coterie.protocol import Tensors

__all__ = ["Private", "PrivateFiles", "owner_only", "run_word", "same"]

_DAY = 86400.0  # seconds
_FORBIDDEN = set("/\\. \0")
_LONGEST = 200  # characters of a name: file systems take 255

Private = dict[int, Tensors]  # run -> name -> [m, ...]


class PrivateFiles:
    """The private state of one run.

    Parameters
    ----------
    folder : Path
        Of the node; every run has a folder in it.
    run : str
        The run.
    runs : int
        How many runs' state the node keeps.
    days : float
        How long a run's state stays without being used, at least.
    """

    def __init__(self, folder: Path, run: str, *, runs: int = 100, days: float = 7.0) -> None:
        self.folder, self.runs, self.days = folder / run_word(run), runs, days

    def load(self, state: State) -> tuple[Private, bool]:
        """Read what a question starts from.  -> private state, whether it is lost"""
        if not state.accepted:
            return {}, False
        path = self._file(state.source, state.accepted)
        if not path.exists():
            return {}, True
        tensors, _ = load_tensors(path)
        private: Private = {}
        for name, value in tensors.items():
            number, _, field = name.partition("/")
            private.setdefault(int(number), {})[field] = value
        return private, False

    def keep(self, state: State, private: Private) -> None:
        """Write what came of a question."""
        path = self._file(state.store, state.number)
        tensors = {f"{run}/{name}": value for run, kept in private.items() for name, value in kept.items()}
        with owner_only():
            self.begin()
            path.parent.mkdir(exist_ok=True)
            save_tensors(path, tensors, {"number": state.number})

    def begin(self) -> None:
        """Make the run's folder, for the owner only; where there are too many, one that nobody uses makes room."""
        if self.folder.is_dir():
            return
        with owner_only():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.parent.chmod(0o700)  # an earlier version may have made it
            self._make_room()
            self.folder.mkdir(exist_ok=True)

    def _make_room(self) -> None:
        used = sorted((_last_used(path), path) for path in self.folder.parent.iterdir() if path.is_dir())
        for when, path in used[: max(0, len(used) + 1 - self.runs)]:
            if time.time() - when < self.days * _DAY:
                raise RunError(
                    f"this node keeps the state of {len(used)} runs, all used within {self.days:g} days",
                    f"remove folders of runs that are not needed from {self.folder.parent}, or allow more in its policy",
                )
            shutil.rmtree(path, ignore_errors=True)

    def tidy(self, state: State) -> None:
        """Undo answers that did not count, and remove those that will not be gone back to."""
        base = state.accepted if state.source == state.store else 0
        for path in (self.folder / run_word(state.store)).glob("*.safetensors"):
            number = int(path.stem)
            if number > base or number < min(state.needed, base):
                path.unlink(missing_ok=True)

    def _file(self, store: str, number: int) -> Path:
        return self.folder / run_word(store) / f"{number}.safetensors"


def same(a: Private, b: Private) -> bool:
    """Whether nothing has changed."""
    return a.keys() == b.keys() and all(
        a[run].keys() == b[run].keys() and all(torch.equal(a[run][name], b[run][name]) for name in a[run]) for run in a
    )


def _last_used(run: Path) -> float:
    """When something was last written there."""
    return max(path.stat().st_mtime for path in (run, *run.rglob("*")))


def run_word(name: str) -> str:
    """A name from a message as that of a file; one that leads elsewhere is refused."""
    word = name.replace(" ", "-")
    if not word or len(word) > _LONGEST or _FORBIDDEN & set(word) or not word.isprintable():
        raise RunError(f"'{name:.{_LONGEST}}' cannot be the name of stored state", "use letters, digits and dashes")
    return word
