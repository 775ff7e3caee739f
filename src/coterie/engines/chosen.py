# SPDX-License-Identifier: Apache-2.0
"""The engine that goes with rows: in this process where they are here, and else with those who have them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.engines.drive import Engine, Finished, Program
from coterie.engines.in_process import InProcess
from coterie.protocol import Ask, Replies, Tensors

__all__ = ["AnyEngine", "engine_on"]


class AnyEngine(Engine, Protocol):
    """What faces use of an engine."""

    private: Any  # what clients keep: here run -> name -> [M, ...], from afar a handle

    @property
    def heard(self) -> Tensor | None:
        """[M] answers of each client that counted; None where participation is drawn by key and can be drawn again."""

    def run(self, programs: Sequence[Program], **how: Any) -> Finished:
        """Run programs side by side: see `drive`."""

    def ask(self, ask: Ask, *, run: int = 0) -> Replies:
        """Put one question to everyone (or to whom it names), outside any round."""

    def asks(self, asks: Mapping[int, Ask]) -> dict[int, Replies]:
        """Put several runs' questions to the same clients."""

    def revealed(self, runs: Sequence[int], names: Collection[str] | None = None) -> list[Tensors]:
        """Private state of all clients (these fields of it), where a method says that it may be known.  [M, ...] each"""


def engine_on(rows: Ragged, **options: Any) -> AnyEngine:
    """Make an engine: `participation`, `clock`, `seed`, and a `store` for private state that is kept elsewhere."""
    if isinstance(rows, RemoteRows):
        far: AnyEngine = rows.federation.engine(rows, **options)
        return far
    options.pop("store", None)
    return InProcess(rows, **options)
