# SPDX-License-Identifier: Apache-2.0
"""Private state on a node: one file for every answer that may still be gone back to, written whole or not at all.

The server says which of a node's answers it has used. An answer that was lost, came too late, or was used by a server that
was killed before its checkpoint, is undone in this way: the node goes back to what it had kept before.
"""

import shutil
from pathlib import Path

import torch

from coterie.engines.checkpoint import load_tensors, save_tensors
from coterie.engines.flower.messages import State
from coterie.errors import RunError
from coterie.protocol import Tensors

__all__ = ["Private", "PrivateFiles", "same"]

_RUNS = 3  # whose state a node keeps: another run may be under way
_FORBIDDEN = set("/\\. \0")

Private = dict[int, Tensors]  # run -> name -> [m, ...]


class PrivateFiles:
    """The private state of one run.

    Parameters
    ----------
    folder : Path
        Of the node; every run has a folder in it.
    run : str
        The run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder / _word(run)

    def begin(self) -> None:
        """Make the run's folder, and remove those of runs long past."""
        self.folder.mkdir(parents=True, exist_ok=True)
        others = [path for path in self.folder.parent.iterdir() if path.is_dir() and path != self.folder]
        for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[_RUNS - 1 :]:
            shutil.rmtree(old, ignore_errors=True)

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
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{run}/{name}": value for run, kept in private.items() for name, value in kept.items()}
        save_tensors(path, tensors, {"number": state.number})

    def tidy(self, state: State) -> None:
        """Undo answers that did not count, and remove those that will not be gone back to."""
        base = state.accepted if state.source == state.store else 0
        for path in (self.folder / _word(state.store)).glob("*.safetensors"):
            number = int(path.stem)
            if number > base or number < min(state.needed, base):
                path.unlink(missing_ok=True)

    def _file(self, store: str, number: int) -> Path:
        return self.folder / _word(store) / f"{number}.safetensors"


def same(a: Private, b: Private) -> bool:
    """Whether nothing has changed."""
    return a.keys() == b.keys() and all(
        a[run].keys() == b[run].keys() and all(torch.equal(a[run][name], b[run][name]) for name in a[run]) for run in a
    )


def _word(name: str) -> str:
    """A name from a message as that of a file; one that leads elsewhere is refused."""
    word = name.replace(" ", "-")
    if not word or _FORBIDDEN & set(word):
        raise RunError(f"'{name}' cannot be the name of stored state", "use letters, digits and dashes")
    return word
