# SPDX-License-Identifier: Apache-2.0
"""What nodes have answered, message by message, so that a comparison that was interrupted can be continued.

A comparison asks what follows from the answers before, and from nothing else. So it has no checkpoints of its own: when it
is run again it is told the same answers again, in the order in which they came, and goes on asking where they end. Nodes
still keep what their clients had after the last of them.
"""

import json
from pathlib import Path
from typing import Any

from coterie.engines.checkpoint import load_tensors, save_tensors
from coterie.engines.flower.wire import pack, unpack
from coterie.errors import RunError
from coterie.files import make_folder, owner_only, remove_files, replace_file
from coterie.protocol import Tensors

__all__ = ["Journal"]


class Journal:
    """Answers in a folder.

    Parameters
    ----------
    folder : Path
        Where they are; it is made.
    about : mapping
        What is asked, of which data, by which version: answers to something else are refused.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self._number = folder, 0
        said, path = json.dumps(about, sort_keys=True), folder / "about.json"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with owner_only():
            make_folder(folder)
            folder.chmod(0o700)
            if not path.exists():
                replace_file(path, said.encode())
        if path.read_text(encoding="utf-8") != said:
            raise RunError(
                f"{folder} holds answers to another question, on other data or to another version",
                "remove that folder, or name another --out",
            )

    def recalled(self) -> tuple[Any, Any] | None:
        """What came of the next message, if it was sent before: answers, and why others did not answer."""
        self._number += 1
        if not self._path.exists():
            return None
        tensors, document = load_tensors(self._path)
        return unpack(document["answers"], tensors), document["failed"]

    def note(self, answers: Any, failed: dict[str, str]) -> None:
        """Keep what came of it."""
        tensors: Tensors = {}
        document = {"answers": pack(answers, tensors), "failed": failed}
        with owner_only():  # they are what clients answered, some of it individually
            save_tensors(self._path, tensors, document)

    def remove(self) -> None:
        """Forget all answers: what was asked for is written."""
        own = [path.name for path in self.folder.glob("*.safetensors")]
        remove_files(self.folder, [*own, "about.json", "flower-run"])

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._number:06d}.safetensors"
