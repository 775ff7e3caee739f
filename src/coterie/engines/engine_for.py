# SPDX-License-Identifier: Apache-2.0
"""The engine that goes with rows: in this process where they are here, and else with those who have them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.engines.drive import Engine, Finished, Job, Program, Request
from coterie.engines.in_process import InProcess
from coterie.engines.secure import SecureWorker
from coterie.engines.worker import Worker
from coterie.participation import Clock, Participation
from coterie.privacy.noise import Noises
from coterie.protocol import Ask, Replies, Tensors
from coterie.secure.in_memory import NodesInMemory

__all__ = ["AnyEngine", "engine_for"]


class AnyEngine(Engine, Protocol):
    """What faces use of an engine."""

    private: Any  # what clients keep: here run -> name -> [M, ...], from afar a handle

    def set_up(
        self, *, participation: Participation | None = None, clock: Clock | None = None, seed: int = 0,
        store: str | None = None,
    ) -> None:  # fmt: skip
        """Say who takes part and by which clock, and under what name private state is kept that is elsewhere."""

    @property
    def heard(self) -> Tensor | None:
        """[M] answers of each client to the first run; None where participation is drawn by key and can be drawn again."""

    def run(self, programs: Sequence[Program], **how: Any) -> Finished:
        """Run programs side by side: see `Job`."""

    def run_all(self, jobs: Sequence[Job]) -> list[Finished]:
        """Run jobs on several sets of rows, each of its own engine of this kind, side by side: see `drive_all`."""

    def ask(self, ask: Ask, *, run: int = 0) -> Replies:
        """Put one question to everyone (or to whom it names), outside any round."""

    def asks(self, asks: Mapping[int, Ask]) -> dict[int, Replies]:
        """Put several runs' questions to the same clients."""

    def exchange(self, requests: Sequence[Request]) -> list[dict[int, Replies]]:
        """Put questions on several sets of rows, each of its own engine of this kind, in one message."""

    def revealed(self, runs: Sequence[int], names: Collection[str] | None = None) -> list[Tensors]:
        """Private state of all clients (these fields of it), where a method says that it may be known.  [M, ...] each"""

    def revealed_all(
        self, wanted: Sequence[tuple[Any, Sequence[int]]], names: Collection[str] | None = None
    ) -> list[list[Tensors]]:
        """The same of runs on several sets of rows, in one message."""


def engine_for(
    rows: Ragged, nodes: NodesInMemory | None = None, noises: Noises | None = None, **options: Any
) -> AnyEngine:
    """Make an engine, and set it up; only a `Session` does. With `nodes`, these add up securely.

    `noises` is where noise comes from that is added here; nodes elsewhere have their own.
    """
    made: AnyEngine
    if isinstance(rows, RemoteRows):
        made = rows.federation.engine(rows)
        if nodes is not None:
            rows_engine: Any = made
            rows_engine.add_securely(nodes.cost)
    else:
        worker = Worker(rows) if nodes is None else SecureWorker(rows, nodes=nodes)
        worker.noises = noises or worker.noises
        made = InProcess(rows, worker=worker)
    made.set_up(**options)
    return made
