# SPDX-License-Identifier: Apache-2.0
"""What all engines share: generators are driven in lockstep, a round of all at a time, and kept in checkpoints.

An engine says who its clients are, who of them takes part and by which clock, and answers asks. All else is here.
"""

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import AllowInfNan, ConfigDict, Field
from torch import Tensor

from coterie.documents import FirstFault, Said, checked
from coterie.engines.checkpoint import from_record, load_tensors, save_tensors, to_record
from coterie.engines.screening import ClientWarning, left_out_text, longest
from coterie.engines.worker import Answer
from coterie.errors import RunError
from coterie.participation import Clock, Participants, Participation, select_participants
from coterie.protocol import Ask, Lockstep, Replies, Save, Tensors, run_of, slot
from coterie.robust_folds import Trimmed, TrimmedByCluster

__all__ = [
    "FAR", "Engine", "Finished", "Group", "Job", "Program", "Request", "Response", "Round", "Traffic", "drive_all", "finish",
]  # fmt: skip

_OTHERWISE = "continue with the options that it was begun with"
_MISFITS = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError)  # what made-up shapes end in
FAR = 30.0  # times the usual length: an update so long is told of

Program = Callable[[Any], Lockstep]  # an algorithm with all its options; given the saved state, or None at the start
Group = tuple[Mapping[int, Ask], Participants]  # slot -> its ask, and the clients that it is put to


@dataclass
class Traffic:
    """Messages, in each of which every client is asked at most once, and the bytes of all clients together."""

    messages: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, other: "Traffic") -> None:
        """Add what others have counted."""
        self.messages += other.messages
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down

    @classmethod
    def side_by_side(cls, every: "Iterable[Traffic]") -> "Traffic":
        """What all take together that began at the same time and shared their messages."""
        kept = list(every)
        messages = max((one.messages for one in kept), default=0)
        return cls(messages, sum(one.bytes_up for one in kept), sum(one.bytes_down for one in kept))

    def count(self, replies: Iterable[Replies]) -> None:
        """Count a message by what it brought."""
        self.messages += 1
        for one in replies:
            self.bytes_up += one.bytes_up
            self.bytes_down += one.bytes_down


@dataclass(frozen=True)
class Round:
    """What happened between two saves of a run; `time` is what the engine's clock says since the run began.

    Runs in lockstep share their messages: each of them counts those in which it asked something.
    """

    run: int
    round: int
    seconds: float
    participants: int
    bytes_up: int
    bytes_down: int
    info: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    messages: int = 0


@dataclass(frozen=True)
class Finished:
    """The last state of every run, all rounds of all runs in order, and what went to and fro."""

    states: list[Any]
    rounds: list[Round]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def left_out(self) -> dict[int, str]:
        """Clients whose answers did not count, in some round of some run -> why."""
        return {int(one): why for r in self.rounds for one, why in r.info.get("clients_left_out", {}).items()}

    def rounds_of(self, run: int) -> list[Round]:
        """The rounds of one of the runs."""
        return [done for done in self.rounds if done.run == run]


@dataclass(frozen=True)
class Request:
    """What clients are asked on one set of their rows, outside any round: a part of a message.

    Attributes
    ----------
    engine : Engine
        That has the rows.
    asks : mapping
        Run -> its ask; all are put to the same clients.
    after : int, optional
        The number of an earlier request of the message: clients go on from what that has left with them, beside what they
        keep here already.
    """

    engine: Any
    asks: Mapping[int, Ask]
    after: int | None = None


@dataclass(frozen=True)
class Response:
    """What a question to some clients brought.

    Attributes
    ----------
    answers : dict
        Slot -> its answer.
    elapsed : float
        Seconds that it took, by the engine's clock; 0 without one.
    events : list of str
        What went wrong on the way.
    """

    answers: dict[int, Answer]
    elapsed: float = 0.0
    events: list[str] = field(default_factory=list)


class Engine(Protocol):
    """What the drive asks of an engine."""

    @property
    def participation(self) -> Participation:
        """Who takes part in a round."""

    @property
    def clock(self) -> Clock | None:
        """What time it takes clients."""

    @property
    def seed(self) -> int:
        """What participation and virtual time are drawn from."""

    @property
    def keys(self) -> Tensor:
        """[M] identity of each client for randomness."""

    @property
    def names(self) -> np.ndarray:
        """[M] of the clients."""

    def dispatch(self, groups: Sequence[Group]) -> list[Response]:
        """Put asks, by their slots, to the clients of each group: all in one message to each."""

    def dispatch_all(self, waiting: Sequence[tuple[Any, Sequence[Group]]]) -> list[list[Response]]:
        """Put what the runs of several engines of this kind ask, each on its own rows, in one message to each client."""

    def knows(self, run: int) -> bool:
        """Whether clients keep private state of a run already."""

    def forget(self) -> None:
        """Begin without private state."""

    def keep(self) -> tuple[Tensors, Any]:
        """What a checkpoint must hold of private state: tensors named `private/...`, and what JSON can hold."""

    def checkpoint_written(self) -> None:
        """Know that the checkpoint is written: nothing older will be restored."""

    def restore(self, tensors: Tensors, rest: Any) -> None:
        """Take up what `keep` gave."""


@dataclass(frozen=True)
class Job:
    """Programs that run side by side on the rows of an engine, a round of all at a time.

    Attributes
    ----------
    engine : Engine
        What answers.
    programs : sequence of callable
        Each is given a saved state, or None, and returns its generator.
    checkpoint : Path, optional
        Where the state is kept. A file that is there already is continued from.
    of : mapping, optional
        What it is a checkpoint of (run, data, phase), to be written into it; one of something else is refused.
    every : float
        Seconds that pass at least between two checkpoints; the last round is always kept.
    state_type : type or sequence of types, optional
        The state's dataclass, needed to continue; one for each program where they differ.
    watch : callable, optional
        Told of every round.
    goes_on : bool
        Whether clients keep the private state that earlier programs have left with them.
    """

    engine: Any
    programs: Sequence[Program]
    checkpoint: Path | None = None
    every: float = 0.0
    state_type: type | Sequence[type] | None = None
    watch: Callable[[Round], None] | None = None
    goes_on: bool = False
    of: Mapping[str, str] | None = None


def drive_all(jobs: Sequence[Job]) -> list[Finished]:
    """Run the programs of several engines, which have different rows of the same clients, side by side.

    What they ask at the same time goes out in one message. Each job has rounds and checkpoints of its own, so that none
    depends on how long others take.
    """
    drives = [_Drive(job) for job in jobs]
    try:
        _to_the_end(drives)
    except _MISFITS as error:
        odd = next((one for one in drives if one.barrier == one.restored_at), None)
        if odd is None:
            raise
        raise RunError(
            f"the checkpoint {odd.job.checkpoint} holds numbers that do not fit the run: {error}", _OTHERWISE
        ) from error
    return [Finished(one.results(), one.rounds, one.traffic) for one in drives]


def _to_the_end(drives: "Sequence[_Drive]") -> None:
    """Put what jobs ask to their clients until all have ended."""
    steps = [one.steps() for one in drives]
    waiting: dict[int, list[Group]] = {}
    _take_on(steps, dict.fromkeys(range(len(drives))), waiting)
    while waiting:
        asked = [(drives[at].engine, groups) for at, groups in waiting.items()]
        if len(asked) == 1:
            responses = [asked[0][0].dispatch(asked[0][1])]
        else:
            responses = asked[0][0].dispatch_all(asked)
        got, waiting = dict(zip(waiting, responses, strict=True)), {}
        _take_on(steps, got, waiting)


def _take_on(steps: "Sequence[_Steps]", got: Mapping[int, Any], waiting: dict[int, list[Group]]) -> None:
    """Let jobs go on with their responses, and note what those ask next that have not ended."""
    for at, responses in got.items():
        try:
            waiting[at] = steps[at].send(responses)
        except StopIteration:
            continue


_Steps = Generator[list[Group], list[Response], None]


class _Round(Said):
    """As much as anybody can check of a `Round`."""

    run: Annotated[int, Field(ge=0)]
    round: Annotated[int, Field(ge=0)]
    seconds: float
    participants: Annotated[int, Field(ge=0)]
    bytes_up: Annotated[int, Field(ge=0)]
    bytes_down: Annotated[int, Field(ge=0)]
    info: dict[str, Any] = Field(default_factory=dict)
    time: Annotated[float, AllowInfNan(True)] = 0.0
    messages: Annotated[int, Field(ge=0)] = 0

    model_config = ConfigDict(extra="forbid")


class _Sent(Said):
    messages: Annotated[int, Field(ge=0)] = 0
    bytes_up: Annotated[int, Field(ge=0)] = 0
    bytes_down: Annotated[int, Field(ge=0)] = 0

    model_config = ConfigDict(extra="forbid")


class _Document(Said):
    """What a checkpoint says beside its tensors."""

    barrier: Annotated[int, Field(ge=0)]
    states: list[dict[str, Any] | None]
    rounds: Annotated[list[_Round], FirstFault()]
    traffic: _Sent = _Sent()


class _Drive:
    """A job on its way: the generators, where each is, and what has happened."""

    def __init__(self, job: Job) -> None:
        self.job, self.engine, self.programs, self.watch = job, job.engine, job.programs, job.watch
        self.states: list[Any] = [None] * len(job.programs)
        self.rounds: list[Round] = []
        self.times = [0.0] * len(job.programs)
        self.traffic = Traffic()
        self.barrier = 0  # rounds that all unfinished runs have completed
        self.restored_at: int | None = None  # the barrier of the checkpoint that was continued from
        self.past: dict[str, Tensor] = {}  # slot/field -> [M, 2] how clients agreed with others, and in how many rounds
        self.generators: dict[int, Lockstep] | None = None
        self.returned: dict[int, Any] = {}

    def steps(self) -> _Steps:
        """Begin, or go on from the checkpoint, and go to the end: asks are yielded and responses sent."""
        path, kept = self.job.checkpoint, time.monotonic()
        if not self.job.goes_on:
            self.engine.forget()  # these programs start, or are restored
        if path is not None and path.exists():
            if self.job.state_type is None:
                raise RunError(f"there is a checkpoint at {path}", "give state_type to continue, or remove it")
            self.restore(path, self.job.state_type)
        while (yield from self.advance()):
            if path is not None and time.monotonic() - kept >= self.job.every:
                self.keep(path)
                kept = time.monotonic()
        if path is not None:
            self.keep(path)

    def restore(self, path: Path, state_type: type | Sequence[type]) -> None:
        tensors, document = load_tensors(path, self.job.of, "remove that file and resume: only its phase is done again")
        checked(_Document, document, f"the checkpoint {path}", _OTHERWISE)
        kinds = isinstance(state_type, Sequence)  # of programs that differ, later ones may not have been begun
        types: list[Any] = list(state_type) if isinstance(state_type, Sequence) else [state_type] * len(self.programs)
        begun = len(document["states"])
        if begun > len(types) or (begun < len(types) and not kinds):
            raise RunError(
                f"the checkpoint {path} has {len(document['states'])} runs and {len(self.programs)} are asked for",
                _OTHERWISE,
            )
        self.barrier = self.restored_at = document["barrier"]
        self.traffic = Traffic(**document.get("traffic", {}))
        self.rounds = [Round(**record) for record in document["rounds"]]
        for done in self.rounds:
            if done.run >= len(self.times):
                raise RunError(f"the checkpoint {path} has a round of run {done.run}, which there is not", _OTHERWISE)
            self.times[done.run] = done.time
        for run, rest in enumerate(document["states"]):
            if rest is not None:
                own = {k.split("/", 2)[2]: v for k, v in tensors.items() if k.startswith(f"state/{run}/")}
                self.states[run] = from_record(types[run], own, rest)
        self.past = {name.removeprefix("past/"): one for name, one in tensors.items() if name.startswith("past/")}
        private = {name: value for name, value in tensors.items() if name.startswith("private/")}
        self.engine.restore(private, document.get("private"))

    def keep(self, path: Path) -> None:
        tensors: dict[str, Tensor] = {}
        states: list[Any] = []
        for run, state in enumerate(self.states):
            own, rest = ({}, None) if state is None else to_record(state)
            states.append(rest)
            tensors |= {f"state/{run}/{name}": value for name, value in own.items()}
        tensors |= {f"past/{name}": value for name, value in self.past.items()}
        private, rest = self.engine.keep()
        rounds = [dict(vars(r), info=dict(r.info)) for r in self.rounds]
        document = {"barrier": self.barrier, "states": states, "rounds": rounds, "private": rest}
        document["traffic"] = vars(self.traffic)
        save_tensors(path, tensors | private, document, self.job.of)
        self.engine.checkpoint_written()

    def results(self) -> list[Any]:
        return [self.returned.get(run, state) for run, state in enumerate(self.states)]

    def advance(self) -> Generator[list[Group], list[Response], bool]:
        """Take every unfinished run to its next save (or its end); false when all have ended.

        Runs that need fewer questions wait for the others, so that a checkpoint is one moment of all of them.
        """
        if self.generators is None:
            self.generators = {run: program(self.states[run]) for run, program in enumerate(self.programs)}
        begin = time.perf_counter()
        tallies = {run: _Tally() for run in self.generators}
        waiting: dict[int, Ask | tuple[Ask, ...]] = {}
        saved: dict[int, Save] = {}
        for run in list(self.generators):
            self._step(run, None, waiting, saved)
        while waiting:
            answers = yield from self._answer(waiting, tallies)
            waiting = {}
            for run, replies in answers.items():
                self._step(run, replies, waiting, saved)
        self.barrier += bool(saved)  # not when the last runs only end, so that they can be continued with more rounds
        for run, save in saved.items():
            self._record(run, save, tallies[run], time.perf_counter() - begin)
        return bool(self.generators)

    def _step(self, run: int, replies: Any, waiting: dict[int, Ask | tuple[Ask, ...]], saved: dict[int, Save]) -> None:
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

    def _answer(
        self, waiting: Mapping[int, Ask | tuple[Ask, ...]], tallies: "Mapping[int, _Tally]"
    ) -> Generator[list[Group], list[Response], dict[int, Any]]:
        """Put what all runs ask in one message.  -> run: replies, or a tuple of them where it asked several things"""
        asks = {
            slot(run, part): ask
            for run, wanted in waiting.items()
            for part, ask in enumerate(wanted if isinstance(wanted, tuple) else (wanted,))
        }
        groups = self._participants(asks)
        knows = {run: self.engine.knows(run) for run in waiting}
        responses = yield [({at: asks[at] for at in slots}, who) for slots, who in groups]
        replies: dict[int, Replies] = {}
        for (_, who), response in zip(groups, responses, strict=True):
            for at, answer in response.answers.items():
                fresh = not knows[run_of(at)]
                values = self._values(at, asks[at], answer)
                replies[at] = finish(asks[at], answer, who.asked, response.elapsed, fresh=fresh, values=values)
                tallies[run_of(at)].count(replies[at], longest(answer.lengths.get("update")))
            for run in {run_of(at) for at in response.answers}:
                tallies[run].elapsed += response.elapsed
                tallies[run].events += response.events
        self.traffic.count(replies.values())
        left_out = {one: why for got in replies.values() for one, why in got.left_out.items()}
        for text in left_out_text(self.engine.names, left_out):
            warnings.warn(text, ClientWarning, stacklevel=2)
        for run in waiting:
            tallies[run].messages += 1
        return {
            run: tuple(replies[slot(run, part)] for part in range(len(wanted)))
            if isinstance(wanted, tuple) else replies[run]
            for run, wanted in waiting.items()
        }  # fmt: skip

    def _values(self, at: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        """Finish the folds that depend on earlier rounds too."""
        out: dict[str, Any] = {}
        for name, part in answer.parts.items():
            how = ask.fold[name]
            if isinstance(how, Trimmed | TrimmedByCluster) and how.near:
                key = f"{at}/{name}"
                past = self.past.setdefault(key, torch.zeros(len(self.engine.keys), 2, dtype=torch.float64))
                out[name], now = how.finish_knowing({k: v[0] for k, v in part.items()}, past[answer.ids])
                self.past[key] = past.index_copy(0, answer.ids, now)
        return out

    def _participants(self, waiting: Mapping[int, Ask]) -> list[tuple[list[int], Participants]]:
        """Group runs that ask the same clients at the same time: they share a pass over the rows."""
        engine, clients = self.engine, self.engine.keys
        groups: list[tuple[list[int], Participants]] = []
        for alike in _same_addressees(waiting):
            ask = waiting[alike[0]]
            who = select_participants(
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
        self.traffic.add(Traffic(**info.pop("traffic", {})))
        events = [*tally.events, *left_out_text(self.engine.names, tally.left_out)] if tally.left_out else tally.events
        if events:
            info["events"] = [*info.get("events", ()), *events]
        if tally.left_out:
            info["clients_left_out"] = {str(one): why for one, why in sorted(tally.left_out.items())}
        if tally.longest > FAR:
            info["longest"] = tally.longest
        counted = (tally.participants, tally.up, tally.down)
        done = Round(run, self.barrier - 1, seconds, *counted, info, now, tally.messages)
        self.rounds.append(done)
        if self.watch is not None:
            self.watch(done)


@dataclass
class _Tally:
    """Bytes, participants, messages, time and mishaps between two saves."""

    up: int = 0
    down: int = 0
    participants: int = 0
    messages: int = 0
    elapsed: float = 0.0
    events: list[str] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    longest: float = 0.0

    def count(self, replies: Replies, longest: float) -> None:
        self.left_out |= replies.left_out
        self.longest = max(self.longest, longest)
        self.down += replies.bytes_down
        self.up += replies.bytes_up
        self.participants = max(self.participants, replies.n)


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


def finish(
    ask: Ask,
    answer: Answer,
    asked: Tensor,
    elapsed: float,
    *,
    fresh: bool = True,
    values: Mapping[str, Any] | None = None,
) -> Replies:
    """Make of the merged parts what the algorithm sees, where it is not made yet; `fresh`: private state begins here."""
    values = dict(values or {})
    for name, part in answer.parts.items():
        if name not in values:
            values[name] = ask.fold[name].finish({k: v[0] for k, v in part.items()})
    missing = asked[:0] if len(answer.ids) == len(asked) else asked[~torch.isin(asked, answer.ids)]
    sent = [*ask.shared.values(), *(ask.fresh.values() if fresh else ())]
    planned = len(asked) * sum(v.nbytes if isinstance(v, Tensor) else 8 for v in sent)
    planned += sum(v.nbytes for v in ask.each.values())
    down = planned if answer.bytes_down is None else answer.bytes_down
    return Replies(values, answer.ids, missing, elapsed, answer.bytes_up, down, answer.left_out)
