# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: one process, one worker with everybody, several runs in lockstep."""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.ragged import BLOCK_BYTES, Ragged
from coterie.engines.drive import Finished, Group, Job, Program, Request, Response, Round, drive_all, finish
from coterie.engines.screening import ClientWarning, left_out_text
from coterie.engines.worker import Answer, Worker, completed
from coterie.errors import RunError
from coterie.participation import Clock, Everyone, Participants, Participation
from coterie.protocol import Ask, Replies, Tensors
from coterie.threads import for_work, side_by_side

__all__ = ["Finished", "InProcess", "Program", "Round"]


class InProcess:
    """Drive algorithms over clients that are all here.

    Parameters
    ----------
    rows : Ragged
        The clients' rows.
    participation : Participation
        Who takes part in a round.
    clock : Clock, optional
        What time it takes them, and who is fast.
    seed : int
        What participation and virtual time are drawn from.
    block_bytes : int
        Memory that a block of clients may take.
    worker : Worker, optional
        Who answers, in place of one of its own: such as a `SecureWorker`.
    """

    def __init__(
        self,
        rows: Ragged,
        *,
        participation: Participation | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        block_bytes: int = BLOCK_BYTES,
        worker: Worker | None = None,
    ) -> None:
        self.worker = worker or Worker(rows, block_bytes=block_bytes)
        self.set_up(participation=participation, clock=clock, seed=seed)

    def set_up(
        self, *, participation: Participation | None = None, clock: Clock | None = None, seed: int = 0,
        store: str | None = None,
    ) -> None:  # fmt: skip
        """Say who takes part and by which clock; private state is here."""
        self.participation, self.clock, self.seed = participation or Everyone(), clock, seed

    def ask(self, ask: Ask, *, run: int = 0) -> Replies:
        """Put one question to everyone (or to whom it names), outside any round."""
        return self.asks({run: ask})[run]

    def asks(self, asks: Mapping[int, Ask]) -> dict[int, Replies]:
        """Put several runs' questions to the same clients, in one pass over their rows."""
        to = next(iter(asks.values())).to
        ids = torch.arange(self.worker.rows.n_clients) if to is None else to
        new = {run: not self.knows(run) for run in asks}
        answers = {run: completed(asks[run], found, ids) for run, found in self.worker.screened(asks, ids).items()}
        for text in sorted({text for found in answers.values() for text in left_out_text(self.names, found.left_out)}):
            warnings.warn(text, ClientWarning, stacklevel=2)
        return {run: finish(asks[run], answer, ids, 0.0, fresh=new[run]) for run, answer in answers.items()}

    @staticmethod
    def exchange(requests: Sequence[Request]) -> list[dict[int, Replies]]:
        """Put questions on several sets of rows; there are no messages here, but this would be one."""
        out = []
        for request in requests:
            if request.after is not None:
                left = requests[request.after].engine.private
                own = request.engine.private
                request.engine.private = {run: {**own.get(run, {}), **left.get(run, {})} for run in {**own, **left}}
            out.append(request.engine.asks(request.asks))
        return out

    def revealed(self, runs: Sequence[int], names: Collection[str] | None = None) -> list[Tensors]:
        """Private state of all clients, which is here.  [M, ...] each"""
        return [self.worker.private[run] for run in runs]

    @staticmethod
    def revealed_all(
        wanted: Sequence[tuple[Any, Sequence[int]]], names: Collection[str] | None = None
    ) -> list[list[Tensors]]:
        """The same of several engines."""
        return [engine.revealed(runs, names) for engine, runs in wanted]

    @property
    def private(self) -> dict[int, Tensors]:
        """Run -> name -> [M, ...] what clients keep."""
        return self.worker.private

    @private.setter
    def private(self, private: dict[int, Tensors]) -> None:
        self.worker.private = private

    def run(self, programs: Sequence[Program], **how: Any) -> Finished:
        """Run programs side by side, a round of all at a time: see `Job` for what can be said."""
        return self.run_all([Job(self, programs, **how)])[0]

    @staticmethod
    def run_all(jobs: Sequence[Job]) -> list[Finished]:
        """Run jobs on several sets of rows side by side."""
        most = max(job.engine.worker.rows.numbers(torch.arange(len(job.engine.keys))) for job in jobs)
        with for_work(most):  # the server's part as well
            return drive_all(jobs)

    @property
    def heard(self) -> None:
        """Not counted: who takes part is drawn by key, and drawing again tells."""

    # -- what the drive asks ------------------------------------------------------------------------------------------
    @property
    def keys(self) -> Tensor:
        """[M] identity of each client for randomness."""
        return self.worker.rows.keys

    @property
    def names(self) -> np.ndarray:
        """[M] of the clients."""
        return self.worker.rows.names

    @property
    def word(self) -> bytes:
        """What tells the rows from others, where noise may repeat."""
        return self.worker.word if self.worker.noises.repeats else b""

    def dispatch(self, groups: Sequence[Group]) -> list[Response]:
        """Let those answer who are in time."""
        return [self._answered(asks, who) for asks, who in groups]

    @staticmethod
    def dispatch_all(waiting: Sequence[tuple[Any, Sequence[Group]]]) -> list[list[Response]]:
        """Let clients answer on several sets of rows; there are no messages here, but this would be one.

        At the same time, unless seconds count or a model is asked about, which may be a network that is no thread's own.
        """
        asks = (ask for _, groups in waiting for asks, _ in groups for ask in asks.values())
        if any(engine.clock for engine, _ in waiting) or any("model" in ask.shared for ask in asks):
            return [engine.dispatch(groups) for engine, groups in waiting]
        return side_by_side([partial(engine.dispatch, groups) for engine, groups in waiting])

    def _answered(self, asks: Mapping[int, Ask], who: Participants) -> Response:
        begin = time.perf_counter()
        answers = self.worker.screened(asks, who.answered)
        taken = time.perf_counter() - begin
        elapsed = 0.0 if self.clock is None else self.clock.elapsed(who.seconds, taken)
        return Response(answers, elapsed, _unnamed(answers))

    def knows(self, run: int) -> bool:
        """Whether clients keep private state of a run already."""
        return run in self.worker.private

    def forget(self) -> None:
        """Begin without private state."""
        self.worker.private = {}

    def keep(self) -> tuple[Tensors, None]:
        """All private state."""
        private = self.worker.private
        return {f"private/{run}/{name}": v for run, kept in private.items() for name, v in kept.items()}, None

    def checkpoint_written(self) -> None:
        """Nothing depends on it here."""

    def restore(self, tensors: Tensors, rest: Any) -> None:
        """Take up private state."""
        for name, value in tensors.items():
            _, number, field_name = (*name.split("/", 2), "", "")[:3]
            if not number.isdecimal():
                raise RunError(f"the checkpoint has private state '{name}', which no run has", "start the run again")
            self.worker.private.setdefault(int(number), {})[field_name] = value


def _unnamed(answers: Mapping[int, Answer]) -> list[str]:
    """Say how many clients' answers did not count whose names are not known here."""
    most = max((answer.unnamed for answer in answers.values()), default=0)
    return [f"answers of {most} client{'s' * (most > 1)} did not count; their nodes know whose"] if most else []
