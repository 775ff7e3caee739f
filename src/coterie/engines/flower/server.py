# SPDX-License-Identifier: Apache-2.0
"""The engine whose clients are on other machines: one message to each node with the asks of all runs, and folds back.

Sums are merged in the order of the nodes' names and stacks in the order of the clients, so that what comes of a round does
not depend on who answers first.
"""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.remote import RemoteRows
from coterie.engines.drive import Finished, Group, Job, Program, Request, Response, drive_all, finish
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.link import Link
from coterie.engines.flower.messages import Answers, Batch, Question, Reply, State
from coterie.engines.flower.pieces import Expected, Piece, bytes_of, joined, lengths_in, spoiled
from coterie.engines.flower.secure_server import FlowerSums
from coterie.engines.flower.wire import fingerprint
from coterie.engines.private import RemoteState, reveal_ask
from coterie.engines.screening import Bounds, ClientWarning, bounds_after, left_out_text
from coterie.engines.secure import answers_of, arrays_of, check_sums_only
from coterie.engines.worker import Answer, completed
from coterie.errors import RunError
from coterie.participation import Clock, Deadline, Everyone, Participants, Participation, WallClock
from coterie.protocol import Ask, Replies, Tensors, run_of
from coterie.secure.cost import Cost
from coterie.secure.fixed_point import Layout

__all__ = ["OnFlower"]

_SHORTEST, _LONGEST = -2200, 2046  # half powers of two that a length may be between: all that double precision holds
_ATTEMPTS = 2  # to reach everybody, for a question outside any round


class OnFlower:
    """Drive algorithms over clients on the nodes of a Flower federation.

    Parameters
    ----------
    link : Link
        The way to the nodes.
    rows : RemoteRows
        The clients, and what their nodes do to get the rows that are meant.
    participation : Participation
        Who takes part in a round.
    clock : Clock, optional
        The wall's by default: nobody knows before who is fast. With a virtual one those are asked who would be in time.
    seed : int
        What participation and virtual time are drawn from.
    store : str, optional
        The name under which nodes keep private state; by default one that goes with the rows.
    """

    def __init__(
        self,
        link: Link,
        rows: RemoteRows,
        *,
        participation: Participation | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        store: str | None = None,
    ) -> None:
        self.link, self.rows = link, rows
        self.set_up(participation=participation, clock=clock, seed=seed, store=store)
        self.private = self._nothing
        self.heard: Tensor = torch.zeros(rows.n_clients, dtype=torch.int64)  # answers of each client to the first run
        self._number = 0  # of the last question
        self._needed: dict[str, int] | None = None  # answers that a checkpoint goes back to; None: there is none
        assert isinstance(rows.x, Tensor)
        assert rows.y is None or isinstance(rows.y, Tensor)
        self._expected = Expected(rows.x, rows.y)
        self.secure: FlowerSums | None = None  # how nodes add up, where they do so securely

    def add_securely(self, cost: Cost) -> None:
        """Let nodes add up securely from now on; what it costs is counted there."""
        if self.link.sums is None or self.link.sums.cost is not cost:
            self.link.sums = FlowerSums(self.link, cost)
        self.secure = self.link.sums

    def set_up(
        self, *, participation: Participation | None = None, clock: Clock | None = None, seed: int = 0,
        store: str | None = None,
    ) -> None:  # fmt: skip
        """Say who takes part and by which clock, and under what name nodes keep private state."""
        self.participation, self.seed = participation or Everyone(), seed
        self.clock: Clock | None = clock or WallClock()
        self.store = store or fingerprint((self.rows.part, self.rows.views))

    # -- questions outside any round ----------------------------------------------------------------------------------
    def ask(self, ask: Ask, *, run: int = 0) -> Replies:
        """Put one question to everyone (or to whom it names), outside any round."""
        return self.asks({run: ask})[run]

    def asks(self, asks: Mapping[int, Ask]) -> dict[int, Replies]:
        """Put several runs' questions to the same clients, in one message to each node: see `exchange`."""
        return self.exchange([Request(self, asks)])[0]

    @staticmethod
    def exchange(requests: Sequence[Request]) -> list[dict[int, Replies]]:
        """Put questions on several sets of rows, each of its own engine, in one message to each node.

        Clients who cannot be reached count as clients without rows; that is said.
        """
        to = [_addressees(request) for request in requests]
        pieces: list[dict[int, list[Piece]]] = [{run: [] for run in request.asks} for request in requests]
        down, missing = [dict.fromkeys(request.asks, 0) for request in requests], to
        events: list[str] = []
        noised = any(ask.noise is not None for request in requests for ask in request.asks.values())
        for _ in range(1 if noised else _ATTEMPTS):  # another answer would cost as much again
            parts = [
                _Part(r.engine, r.asks, everyone, ids, r.after)
                for r, everyone, ids in zip(requests, to, missing, strict=True)
            ]
            found, events = _send(parts, None, stacks=False)
            for part, got in enumerate(found):
                for run in got.pieces:
                    pieces[part][run] += got.pieces[run]
                    down[part][run] += got.sent[run]
            missing = [_without(ids, next(iter(got.pieces.values()))) for ids, got in zip(missing, found, strict=True)]
            if not any(len(ids) for ids in missing):
                break
        if any(len(left) == len(ids) and len(ids) for left, ids in zip(missing, to, strict=True)):
            raise RunError("no node answers", "; ".join(events) or "start the nodes, and continue the run")
        out = []
        for request, ids, some, sent in zip(requests, to, pieces, down, strict=True):
            expected, asks = request.engine._expected, request.asks
            answers = {
                run: completed(ask, joined(ask, some[run], sent[run]), ids, expected.of(ask))
                for run, ask in asks.items()
            }
            names = request.engine.names
            for text in sorted({text for got in answers.values() for text in left_out_text(names, got.left_out)}):
                warnings.warn(text, ClientWarning, stacklevel=2)
            out.append({run: finish(ask, answers[run], ids, 0.0) for run, ask in asks.items()})
        return out

    def revealed(self, runs: Sequence[int], names: Collection[str] | None = None) -> list[Tensors]:
        """Ask all clients for (some of) their private state, in one message: only where a method says so.  [M, ...] each"""
        return self.revealed_all([(self, runs)], names)[0]

    @staticmethod
    def revealed_all(
        wanted: Sequence[tuple[Any, Sequence[int]]], names: Collection[str] | None = None
    ) -> list[list[Tensors]]:
        """The same of runs on several sets of rows, in one message."""
        found = OnFlower.exchange([Request(engine, engine._reveals(runs, names)) for engine, runs in wanted])
        return [[dict(got[run].values) for run in runs] for got, (_, runs) in zip(found, wanted, strict=True)]

    def _reveals(self, runs: Sequence[int], names: Collection[str] | None) -> dict[int, Ask]:
        fields = {run: self.private.fields.get(run, {}) for run in runs}
        return {
            run: reveal_ask({name: v for name, v in own.items() if names is None or name in names})
            for run, own in fields.items()
        }

    # -- rounds -------------------------------------------------------------------------------------------------------
    def run(self, programs: Sequence[Program], **how: Any) -> Finished:
        """Run programs side by side, a round of all at a time: see `Job` for what can be said."""
        return self.run_all([Job(self, programs, **how)])[0]

    @staticmethod
    def run_all(jobs: Sequence[Job]) -> list[Finished]:
        """Run jobs on several sets of rows side by side."""
        for job in jobs:
            job.engine._needed = {} if job.checkpoint is not None else None
        return drive_all(jobs)

    @property
    def keys(self) -> Tensor:
        """[M] identity of each client for randomness."""
        return self.rows.keys

    @property
    def names(self) -> np.ndarray:
        """[M] of the clients."""
        return self.rows.names

    @property
    def word(self) -> bytes:
        """Nodes draw noise anew whenever they are asked."""
        return b""

    def dispatch(self, groups: Sequence[Group]) -> list[Response]:
        """Ask those whom the clock foretells to be in time, or all, and go on with the first answers.

        Where all who are asked are waited for, all groups are in one message to each node.
        """
        return self.dispatch_all([(self, groups)])[0]

    @staticmethod
    def dispatch_all(waiting: Sequence[tuple[Any, Sequence[Group]]]) -> list[list[Response]]:
        """The same for the runs of several engines, in one message to each node if all who are asked are waited for."""
        asked = [_Asked(engine, group, engine._asked(group[1])) for engine, groups in waiting for group in groups]
        if all(len(one.ids) == len(one.group[1].answered) for one in asked):
            responses = iter(_dispatched(asked, None))
        else:
            responses = iter([got for one in asked for got in _dispatched([one], len(one.group[1].answered))])
        return [[next(responses) for _ in groups] for _, groups in waiting]

    def _asked(self, who: Participants) -> Tensor:
        """Those whom the clock foretells to be in time, or all."""
        foretold = self.clock is not None and not isinstance(self.clock, WallClock)
        return who.answered if foretold else who.asked

    # -- messages -----------------------------------------------------------------------------------------------------
    def _by_node(self, ids: Tensor) -> dict[str, np.ndarray]:
        """Clients of every node, in the order of its own numbers."""
        names, chosen = list(self.link.nodes), ids.numpy()
        out = {}
        for place in np.unique(self.rows.place[chosen]):
            own = chosen[self.rows.place[chosen] == place]
            out[names[place]] = own[np.argsort(self.rows.number[own])]
        return out

    def _question(
        self, name: str, asks: Mapping[int, Ask], to: Tensor, own: np.ndarray, after: int | None,
        bounds: Mapping[int, Bounds],
    ) -> Question:  # fmt: skip
        """What a node is asked: what is each client's goes to its own node only."""
        at = torch.searchsorted(to, torch.from_numpy(own))
        mine = {
            run: replace(ask, to=None, enough=None, each={k: v[at] for k, v in ask.each.items()})
            for run, ask in asks.items()
        }
        rows, node, kept = self.rows, self.link.nodes[name], self.private
        source, accepted = kept.accepted.get(name, (self.store, 0))
        needed = accepted if self._needed is None else self._needed.get(name, 0)
        state = State(source, accepted, self.store, self._number, needed)
        number = torch.from_numpy(rows.number[own])
        return Question(self.link.run, rows.part, rows.views, node.schema, number, mine, state, after, dict(bounds))

    def _check(self, answers: Answers, number: int, asks: Mapping[int, Ask], own: np.ndarray) -> None:
        if answers.number != number or not torch.equal(answers.ids, torch.from_numpy(self.rows.number[own])):
            raise RunError("it answers another request, or for other clients")
        if self.secure is not None and any(answers.parts.values()):
            raise RunError("it tells its own part of what was to be a secure sum")
        if answers.parts.keys() != asks.keys():
            raise RunError(f"it answers for the runs {sorted(answers.parts)} where {sorted(asks)} were asked")
        for run, ask in asks.items() if self.secure is None else ():
            without = answers.left_out.get(run, {})
            if not without.keys() <= set(answers.ids.tolist()):
                raise RunError("it leaves out other clients than it was asked for")
            _check_lengths(ask, answers.lengths.get(run, {}), len(own))
            there = own[~np.isin(answers.ids.numpy(), list(without))]
            self._expected.check(ask, answers.parts[run], self.rows.counts[torch.from_numpy(there)])

    def _accept(self, node: str, answers: Answers, before: tuple[str, int] | None) -> list[str]:
        """Let an answer count: from now on the node goes on from what it kept, or else from what was there before."""
        own = (self.store, answers.number) if answers.kept else before
        if own is not None:
            self.private = replace(self.private, accepted={**self.private.accepted, node: own})
        return [f"node '{node}' has lost its private state: its clients started again"] * answers.lost

    def _go_on_from(self, before: RemoteState) -> None:
        """Take over what clients keep of other rows, beside what they keep here."""
        fields = {
            run: {**before.fields.get(run, {}), **own} for run, own in {**before.fields, **self.private.fields}.items()
        }
        accepted = {**before.accepted, **self.private.accepted}
        self.private = replace(before, accepted=accepted, fields=fields)

    def _note_fields(self, asks: Mapping[int, Ask]) -> None:
        fields = self.private.fields
        for at, ask in asks.items():
            if ask.fresh:
                fields = {**fields, run_of(at): {**fields.get(run_of(at), {}), **ask.fresh}}
        self.private = replace(self.private, fields=fields)

    # -- private state ------------------------------------------------------------------------------------------------
    @property
    def _nothing(self) -> RemoteState:
        own = self._by_node(torch.arange(self.rows.n_clients))
        names = {node: tuple(self.rows.names[ids].tolist()) for node, ids in own.items()}
        return RemoteState(run=self.link.run, clients=names)

    def knows(self, run: int) -> bool:
        """Whether clients keep private state of a run already."""
        return run in self.private.fields

    def forget(self) -> None:
        """Begin without private state."""
        self.private, self._number = self._nothing, 0
        self.heard = torch.zeros_like(self.heard)

    def keep(self) -> tuple[Tensors, Any]:
        """Which answers counted; private state itself stays where it is."""
        fields = self.private.fields
        tensors = {f"private/{run}/{name}": v for run, own in fields.items() for name, v in own.items()}
        rest = {"accepted": dict(self.private.accepted), "number": self._number}
        return {**tensors, "private/heard": self.heard}, rest

    def checkpoint_written(self) -> None:
        """Let nodes remove what came before."""
        self._needed = self._own_numbers()

    def _own_numbers(self) -> dict[str, int]:
        return {name: number for name, (store, number) in self.private.accepted.items() if store == self.store}

    def restore(self, tensors: Tensors, rest: Any) -> None:
        """Go back to the answers that had counted."""
        fields: dict[int, Tensors] = {}
        for name, value in tensors.items():
            _, number, own = (*name.split("/", 2), "")[:3]
            if own:
                fields.setdefault(int(number), {})[own] = value
        self.heard = tensors["private/heard"]
        accepted = {name: (store, number) for name, (store, number) in rest["accepted"].items()}
        self.private = replace(self._nothing, accepted=accepted, fields=fields)
        self._number, self._needed = rest["number"], self._own_numbers()


@dataclass(frozen=True)
class _Part:
    """A part of a message: some (ids) of those whom the asks are for (to) are asked, on the rows of an engine."""

    engine: OnFlower
    asks: Mapping[int, Ask]
    to: Tensor
    ids: Tensor
    after: int | None
    bounds: Mapping[int, Bounds] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """What a part of a message brought: pieces by run, and the bytes that were sent."""

    pieces: dict[int, list[Piece]]
    sent: dict[int, int]


@dataclass
class _Message:
    """Parts on their way: whom each asks on which node, its number, and each node's questions by their parts."""

    parts: Sequence[_Part]
    groups: list[dict[str, np.ndarray]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    questions: dict[str, dict[int, Question]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, part in enumerate(self.parts):
            engine = part.engine
            if part.after is not None and self.parts[part.after].engine is not engine:
                engine._go_on_from(self.parts[part.after].engine.private)
            engine._note_fields(part.asks)
            engine._number += 1
            self.numbers.append(engine._number)
            self.groups.append(engine._by_node(part.ids))
            for name, own in self.groups[i].items():
                mine = self.questions.setdefault(name, {})
                after = list(mine).index(part.after) if part.after in mine else None
                mine[i] = engine._question(name, part.asks, part.to, own, after, part.bounds)

    def check(self, reply: Reply) -> None:
        """Refuse a reply that is not to these questions."""
        asked = self.questions[reply.node]
        if len(reply.answers) != len(asked):
            raise RunError("it answers another request")
        for i, answers in zip(asked, reply.answers, strict=True):
            part = self.parts[i]
            part.engine._check(answers, self.numbers[i], part.asks, self.groups[i][reply.node])

    def accept(self, reply: Reply) -> list[str]:
        """Let a reply count."""
        events = []
        for i, answers in zip(self.questions[reply.node], reply.answers, strict=True):
            part = self.parts[i]
            before = None if part.after is None else self.parts[part.after].engine.private.accepted.get(reply.node)
            events += part.engine._accept(reply.node, answers, before)
        return events

    def found(self, part: int, replies: Mapping[str, Reply]) -> _Found:
        """What a part has brought, in the order of the nodes' names."""
        asks, groups = self.parts[part].asks, self.groups[part]
        answers = {n: replies[n].answers[list(self.questions[n]).index(part)] for n in sorted(replies) if n in groups}
        return _Found(
            {run: [_piece(n, groups[n], got, run) for n, got in answers.items()] for run in asks},
            {run: sum(_sent(mine[part].asks[run]) for mine in self.questions.values() if part in mine) for run in asks},
        )


@dataclass(frozen=True)
class _Asked:
    """A group of asks on the rows of an engine, and the clients (ids) who are sent it."""

    engine: OnFlower
    group: Group
    ids: Tensor


def _dispatched(asked: Sequence[_Asked], enough: int | None) -> list[Response]:
    """Put all groups into one message; those of one engine go on from what the group before has left with clients."""
    begin = time.perf_counter()
    parts: list[_Part] = []
    for one in asked:
        after = len(parts) - 1 if parts and parts[-1].engine is one.engine else None
        parts.append(_Part(one.engine, one.group[0], one.ids, one.ids, after))
    found, events = _send(parts, enough, stacks=True)
    taken = time.perf_counter() - begin
    out, heard = list[Response](), {id(one.engine): torch.zeros_like(one.engine.heard) for one in asked}
    for one, got in zip(asked, found, strict=True):
        asks, who = one.group
        answers = {run: joined(ask, got.pieces[run], got.sent[run]) for run, ask in asks.items()}
        for at in asks:
            if run_of(at) == 0:
                heard[id(one.engine)][answers[at].ids] = 1
        clock = one.engine.clock
        elapsed = 0.0 if clock is None else clock.elapsed(who.seconds, taken)
        out.append(Response(answers, elapsed, events if not out else []))
    for engine in {id(one.engine): one.engine for one in asked}.values():
        engine.heard += heard[id(engine)]
    return out


def _piece(node: str, own: np.ndarray, got: Answers, run: int) -> Piece:
    """What a node has answered for a run, by the numbers of the federation."""
    without = {int(own[got.ids.tolist().index(one)]): why for one, why in got.left_out.get(run, {}).items()}
    ids = own[~np.isin(own, list(without))]
    return Piece(node, torch.from_numpy(ids), got.parts[run], without, got.lengths.get(run, {}))


def _check_lengths(ask: Ask, lengths: Mapping[str, Tensor], n_clients: int) -> None:
    """Refuse lengths that no client can have, or of more clients than were asked: everybody's bounds follow from them."""
    for name, counts in lengths.items():
        if name not in ask.limits or counts.dtype != torch.int64 or counts.dim() != 2 or counts.shape[1] != 2:
            raise RunError(f"it counts lengths of '{name}' in a way that was not asked for")
        how_long, how_many = counts.unbind(1)
        if len(counts) > n_clients or bool((how_many < 0).any()) or int(how_many.clamp(max=1 << 32).sum()) > n_clients:
            raise RunError(f"it counts lengths of '{name}' of other clients than the {n_clients} that were asked")
        if bool(((how_long < _SHORTEST) | (how_long > _LONGEST)).any()):
            raise RunError(f"it counts lengths of '{name}' that no number has")


def _send(parts: Sequence[_Part], enough: int | None, *, stacks: bool) -> tuple[list[_Found], list[str]]:
    """Put all parts into one message to each node.  -> what each has brought, what went wrong

    Where some clients' values are absurd beside others', nothing counts, and all is asked once more with bounds. `enough` is
    how many clients will do; None waits for all.
    """
    if parts[0].engine.secure is not None and any(ask.fold for part in parts for ask in part.asks.values()):
        return _send_securely(parts, parts[0].engine.secure)
    engine, message = parts[0].engine, _Message(parts)
    link, patience = engine.link, engine.link.timeout
    if isinstance(engine.participation, Deadline):
        patience = min(patience, engine.participation.seconds)
    batches = {name: Batch(tuple(mine.values())) for name, mine in message.questions.items()}
    sizes = {name: sum(len(group.get(name, ())) for group in message.groups) for name in batches}
    called = link.call(batches, sizes, sum(sizes.values()) if enough is None else enough, message.check, patience)
    found = [message.found(i, called.answers) for i in range(len(parts))]
    bounds = [_bounds(part, got) for part, got in zip(parts, found, strict=True)]
    if any(bounds) and not any(part.bounds for part in parts):
        return _send([replace(p, bounds=b) for p, b in zip(parts, bounds, strict=True)], enough, stacks=stacks)
    for part, got in zip(parts, found, strict=True):
        for run, ask in part.asks.items():
            bad = spoiled(ask, got.pieces[run], stacks=stacks)
            called.failed |= {n: f"is refused: {why}" for n, why in bad.items()}
    used = {name: reply for name, reply in called.answers.items() if name not in called.failed}
    events = [f"node '{name}' {why}" for name, why in sorted(called.failed.items())]
    for name in sorted(used):
        events += message.accept(used[name])
    for event in events:
        warnings.warn(event, NodeWarning, stacklevel=2)
    return [message.found(i, used) for i in range(len(parts))], events


def _send_securely(parts: Sequence[_Part], sums: FlowerSums) -> tuple[list[_Found], list[str]]:
    """The same as a secure sum over all nodes that are asked; all of them are waited for.

    Where parts are put to clients of other nodes, such as new clients, they are another sum: nobody adds to a sum who was
    not asked.
    """
    groups: dict[frozenset[str], list[int]] = {}
    for i, part in enumerate(parts):
        check_sums_only(part.asks)
        groups.setdefault(frozenset(part.engine._by_node(part.ids)), []).append(i)
    found: dict[int, _Found] = {}
    events: list[str] = []
    for some in groups.values():
        if any(parts[i].after not in (None, *some) for i in some):
            raise RunError(
                "a part of a question goes on from one that was put to other nodes, and a secure sum cannot",
                "leave new clients out: --new-clients 0",
            )
        own = [replace(parts[i], after=None if (a := parts[i].after) is None else some.index(a)) for i in some]
        got, said = _one_sum(own, sums)
        found |= dict(zip(some, got, strict=True))
        events += said
    return [found[i] for i in range(len(parts))], events


def _one_sum(parts: Sequence[_Part], sums: FlowerSums) -> tuple[list[_Found], list[str]]:
    """One secure sum of what all parts ask, which are put to the same nodes."""
    message, engine = _Message(parts), parts[0].engine
    told = [{at: ask for at, ask in part.asks.items() if ask.fold} for part in parts]
    arrays: dict[str, Tensor] = {}
    for i, (part, asks) in enumerate(zip(parts, told, strict=True)):
        form = {at: Answer(part.engine._expected.of(ask), part.ids, 0) for at, ask in asks.items()}
        arrays |= {f"{i}:{name}": torch.from_numpy(value) for name, value in arrays_of(asks, form).items()}
    layout = Layout.of({name: value.numpy() for name, value in arrays.items()})
    batches = {name: Batch(tuple(mine.values())) for name, mine in message.questions.items()}
    try:
        total, called = sums.total(batches, layout, message.check, engine.link.timeout)
    except RunError as error:
        why = "".join(f"; node '{name}' {why}" for name, why in sorted(sums.failed.items())[:3])
        raise RunError(error.message + why, error.hint) from error
    there = sorted(called.answers)
    found: list[_Found] = []
    bounds: list[dict[int, Bounds]] = []
    events = [f"node '{name}' {why}" for name, why in sorted(called.failed.items())]
    for i, (part, asks) in enumerate(zip(parts, told, strict=True)):
        own = {name.partition(":")[2]: value for name, value in total.items() if name.startswith(f"{i}:")}
        like = {name.partition(":")[2]: value for name, value in arrays.items() if name.startswith(f"{i}:")}
        ids = torch.from_numpy(np.sort(np.concatenate([message.groups[i][name] for name in there])))
        answers = answers_of(asks, own, ids, 0, like)
        answers |= {at: Answer({}, ids, 0) for at in part.asks if at not in asks}
        pieces = {at: [Piece("all nodes", ids, one.parts, {}, one.lengths)] for at, one in answers.items()}
        sent = {at: sum(_sent(m[i].asks[at]) for m in message.questions.values()) for at in part.asks}
        found.append(_Found(pieces, sent))
        again = {at: bounds_after(ask, answers[at].lengths, answers[at].reasons, len(ids)) for at, ask in asks.items()}
        bounds.append({at: one for at, one in again.items() if one is not None})
        most = max((one.unnamed for one in answers.values()), default=0)
        if most:
            events.append(f"answers of {most} client{'s' * (most > 1)} did not count; their nodes know whose")
    if any(bounds) and not any(part.bounds for part in parts):
        return _one_sum([replace(p, bounds=b) for p, b in zip(parts, bounds, strict=True)], sums)
    for name in there:
        events += message.accept(called.answers[name])
    for event in events:
        warnings.warn(event, NodeWarning, stacklevel=2)
    return found, events


def _bounds(part: _Part, got: _Found) -> dict[int, Bounds]:
    """What the runs of a part are to be asked again with."""
    found = {}
    for run, ask in part.asks.items():
        pieces = got.pieces[run]
        reasons = [why for piece in pieces for why in piece.left_out.values()]
        answered = sum(len(piece.ids) + len(piece.left_out) for piece in pieces)
        bounds = bounds_after(ask, lengths_in(pieces), reasons, answered)
        if bounds is not None:
            found[run] = bounds
    return found


def _addressees(request: Request) -> Tensor:
    """Everyone, or those whom the asks name."""
    to = next(iter(request.asks.values())).to
    return torch.arange(request.engine.rows.n_clients) if to is None else to


def _sent(ask: Ask) -> int:
    return bytes_of(ask.shared) + bytes_of(ask.fresh) + bytes_of(ask.each)


def _without(ids: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Those who have not answered."""
    heard = [piece.ids for piece in pieces] + [torch.tensor(list(p.left_out), dtype=torch.int64) for p in pieces]
    return ids[~torch.isin(ids, torch.cat(heard or [ids[:0]]))]
