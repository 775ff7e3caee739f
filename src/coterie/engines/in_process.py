# SPDX-License-Identifier: Apache-2.0
"""The embedded engine: one process, one worker with everybody, several runs in lockstep."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.data.ragged import BLOCK_BYTES, Ragged
from coterie.engines.checkpoint import from_record, load_tensors, save_tensors, to_record
from coterie.engines.worker import Answer, Worker
from coterie.errors import RunError
from coterie.participation import Clock, Everyone, Participation, Turnout, turn_out
from coterie.protocol import Algorithm, Ask, Replies, Save

__all__ = ["Finished", "InProcess", "Program", "Round"]

Program = Callable[[Any], Algorithm]  # an algorithm with all its options; given the saved state, or None at the start


@dataclass(frozen=True)
class Round:
    """What happened between two saves of a run; `time` is what the engine's clock says since the run began."""

    run: int
    round: int
    seconds: float
    participants: int
    bytes_up: int
    bytes_down: int
    info: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0


@dataclass(frozen=True)
class Finished:
    """The last state of every run, and all rounds of all runs in order."""

    states: list[Any]
    rounds: list[Round]


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
    """

    def __init__(
        self,
        rows: Ragged,
        *,
        participation: Participation | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.worker = Worker(rows, block_bytes=block_bytes)
        self.participation = participation or Everyone()
        self.clock = clock
        self.seed = seed

    def ask(self, ask: Ask, *, run: int = 0) -> Replies:
        """Put one question to everyone (or to whom it names), outside any round."""
        ids = torch.arange(self.worker.rows.n_clients) if ask.to is None else ask.to
        return _finish(ask, self.worker.answer({run: ask}, ids)[run], ids, 0.0)

    def run(
        self,
        programs: Sequence[Program],
        *,
        checkpoint: Path | None = None,
        every: float = 0.0,
        state_type: type | None = None,
        watch: Callable[[Round], None] | None = None,
    ) -> Finished:
        """Run programs side by side, a round of all at a time.

        Parameters
        ----------
        programs : sequence of callable
            Each is given a saved state, or None, and returns its generator.
        checkpoint : Path, optional
            Where the state is kept. A file that is there already is continued from.
        every : float
            Seconds that pass at least between two checkpoints; the last round is always kept.
        state_type : type, optional
            The state's dataclass, needed to continue.
        watch : callable, optional
            Told of every round.
        """
        self.worker.private = {}  # not that of an earlier run: these programs start, or are restored
        drive = _Drive(self, programs, watch)
        if checkpoint is not None and checkpoint.exists():
            if state_type is None:
                raise RunError(f"there is a checkpoint at {checkpoint}", "give state_type to continue, or remove it")
            drive.restore(checkpoint, state_type)
        kept = time.monotonic()
        while drive.advance():
            if checkpoint is not None and time.monotonic() - kept >= every:
                drive.keep(checkpoint)
                kept = time.monotonic()
        if checkpoint is not None:
            drive.keep(checkpoint)
        return Finished(drive.results(), drive.rounds)


class _Drive:
    """One call of `InProcess.run`: the generators, where each is, and what has happened."""

    def __init__(self, engine: InProcess, programs: Sequence[Program], watch: Callable[[Round], None] | None) -> None:
        self.engine, self.programs, self.watch = engine, programs, watch
        self.states: list[Any] = [None] * len(programs)
        self.rounds: list[Round] = []
        self.times = [0.0] * len(programs)
        self.barrier = 0  # rounds that all unfinished runs have completed
        self.generators: dict[int, Algorithm] | None = None
        self.returned: dict[int, Any] = {}

    def restore(self, path: Path, state_type: type) -> None:
        tensors, document = load_tensors(path)
        if len(document["states"]) != len(self.programs):
            raise RunError(
                f"the checkpoint {path} has {len(document['states'])} runs and {len(self.programs)} are asked for",
                "continue with the options that it was begun with",
            )
        self.barrier = document["barrier"]
        self.rounds = [Round(**record) for record in document["rounds"]]
        for done in self.rounds:
            self.times[done.run] = done.time
        for run, rest in enumerate(document["states"]):
            if rest is not None:
                own = {k.split("/", 2)[2]: v for k, v in tensors.items() if k.startswith(f"state/{run}/")}
                self.states[run] = from_record(state_type, own, rest)
        for name, value in tensors.items():
            if name.startswith("private/"):
                _, number, field_name = name.split("/", 2)
                self.engine.worker.private.setdefault(int(number), {})[field_name] = value

    def keep(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        states: list[Any] = []
        for run, state in enumerate(self.states):
            own, rest = ({}, None) if state is None else to_record(state)
            states.append(rest)
            tensors |= {f"state/{run}/{name}": value for name, value in own.items()}
        for run, kept in self.engine.worker.private.items():
            tensors |= {f"private/{run}/{name}": value for name, value in kept.items()}
        rounds = [dict(vars(r), info=dict(r.info)) for r in self.rounds]
        save_tensors(path, tensors, {"barrier": self.barrier, "states": states, "rounds": rounds})

    def results(self) -> list[Any]:
        return [self.returned.get(run, state) for run, state in enumerate(self.states)]

    def advance(self) -> bool:
        """Take every unfinished run to its next save (or its end); false when all have ended.

        Runs that need fewer questions wait for the others, so that a checkpoint is one moment of all of them.
        """
        if self.generators is None:
            self.generators = {run: program(self.states[run]) for run, program in enumerate(self.programs)}
        begin = time.perf_counter()
        tallies = {run: _Tally() for run in self.generators}
        waiting: dict[int, Ask] = {}
        saved: dict[int, Save] = {}
        for run in list(self.generators):
            self._step(run, None, waiting, saved)
        while waiting:
            answers = self._answer(waiting, tallies)
            waiting = {}
            for run, replies in answers.items():
                self._step(run, replies, waiting, saved)
        self.barrier += bool(saved)  # not when the last runs only end, so that they can be continued with more rounds
        for run, save in saved.items():
            self._record(run, save, tallies[run], time.perf_counter() - begin)
        return bool(self.generators)

    def _step(self, run: int, replies: Replies | None, waiting: dict[int, Ask], saved: dict[int, Save]) -> None:
        assert self.generators is not None
        try:
            wanted = self.generators[run].send(replies)
        except StopIteration as end:
            del self.generators[run]
            self.returned[run] = end.value
            return
        if isinstance(wanted, Save):
            saved[run] = wanted
        else:
            waiting[run] = wanted

    def _answer(self, waiting: Mapping[int, Ask], tallies: "Mapping[int, _Tally]") -> dict[int, Replies]:
        worker, clock = self.engine.worker, self.engine.clock
        replies: dict[int, Replies] = {}
        for runs, who in self._turnouts(waiting):
            fresh = {run: run not in worker.private for run in runs}
            begin = time.perf_counter()
            answers = worker.answer({run: waiting[run] for run in runs}, who.answered)
            elapsed = 0.0 if clock is None else clock.elapsed(who.seconds, time.perf_counter() - begin)
            for run, answer in answers.items():
                replies[run] = _finish(waiting[run], answer, who.asked, elapsed)
                tallies[run].count(waiting[run], answer, who, fresh[run], elapsed)
        return replies

    def _turnouts(self, waiting: Mapping[int, Ask]) -> list[tuple[list[int], Turnout]]:
        """Group runs that hear the same clients at the same time: they share a pass over the rows."""
        engine, clients = self.engine, self.engine.worker.rows.keys
        groups: list[tuple[list[int], Turnout]] = []
        for alike in _same_addressees(waiting):
            ask = waiting[alike[0]]
            who = turn_out(
                engine.participation, engine.clock, ask, round_=self.barrier, clients=clients, seed=engine.seed
            )
            for runs, other in groups:
                if who.same_as(other):
                    runs.extend(alike)
                    break
            else:
                groups.append((alike, who))
        return groups

    def _record(self, run: int, save: Save, tally: "_Tally", seconds: float) -> None:
        self.states[run] = save.state
        self.times[run] += tally.elapsed
        info, now = dict(save.info), self.times[run]
        done = Round(run, self.barrier - 1, seconds, tally.participants, tally.up, tally.down, info, now)
        self.rounds.append(done)
        if self.watch is not None:
            self.watch(done)


@dataclass
class _Tally:
    """Bytes, participants and time between two saves."""

    up: int = 0
    down: int = 0
    participants: int = 0
    elapsed: float = 0.0

    def count(self, ask: Ask, answer: Answer, who: Turnout, fresh: bool, elapsed: float) -> None:
        values = [*ask.shared.values(), *(ask.fresh.values() if fresh else ())]  # private state begins only once
        sent = sum(v.nbytes if isinstance(v, Tensor) else 8 for v in values)
        self.down += len(who.asked) * sent + sum(v.nbytes for v in ask.each.values())
        self.up += answer.bytes_up
        self.participants = max(self.participants, len(who.answered))
        self.elapsed += elapsed


def _same_addressees(asks: Mapping[int, Ask]) -> list[list[int]]:
    """Group runs whose asks go to the same clients, for the same work, and want as many answers."""
    groups: list[tuple[Ask, list[int]]] = []
    for run, ask in asks.items():
        for first, runs in groups:
            if (first.work, first.enough) == (ask.work, ask.enough) and _same_names(first.to, ask.to):
                runs.append(run)
                break
        else:
            groups.append((ask, [run]))
    return [runs for _, runs in groups]


def _same_names(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _finish(ask: Ask, answer: Answer, asked: Tensor, elapsed: float) -> Replies:
    """Make of the merged parts what the algorithm sees."""
    values = {name: ask.fold[name].finish({k: v[0] for k, v in part.items()}) for name, part in answer.parts.items()}
    everybody = len(answer.ids) == len(asked)
    return Replies(values, answer.ids, asked[:0] if everybody else asked[~torch.isin(asked, answer.ids)], elapsed)
