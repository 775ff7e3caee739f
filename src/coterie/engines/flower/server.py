# SPDX-License-Identifier: Apache-2.0
"""The engine whose clients are on other machines: one message to each node with the asks of all runs, and folds back.

Sums are merged in the order of the nodes' names and stacks in the order of the clients, so that what comes of a round does
not depend on who answers first.
"""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.remote import RemoteRows
from coterie.engines.drive import Finished, Program, Response, drive, finish
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.link import Link
from coterie.engines.flower.messages import Answers, Question, State
from coterie.engines.flower.pieces import Expected, Piece, bytes_of, filled, joined, spoiled
from coterie.engines.flower.wire import fingerprint
from coterie.engines.private import RemoteState, reveal_ask
from coterie.errors import RunError
from coterie.participation import Clock, Deadline, Everyone, Participants, Participation, WallClock
from coterie.protocol import Ask, Replies, Tensors, run_of

__all__ = ["OnFlower"]

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
        self.private = RemoteState()
        self.heard: Tensor = torch.zeros(rows.n_clients, dtype=torch.int64)  # answers of each client that counted
        self._number = 0  # of the last question
        self._needed: dict[str, int] | None = None  # answers that a checkpoint goes back to; None: there is none
        assert isinstance(rows.x, Tensor)
        assert rows.y is None or isinstance(rows.y, Tensor)
        self._expected = Expected(rows.x, rows.y)

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
        """Put several runs' questions to the same clients, in one message to each node.

        Clients who cannot be reached count as clients without rows; that is said.
        """
        to = next(iter(asks.values())).to
        ids = torch.arange(self.rows.n_clients) if to is None else to
        pieces: dict[int, list[Piece]] = {run: [] for run in asks}
        down, missing = dict.fromkeys(asks, 0), ids
        events: list[str] = []
        for _ in range(_ATTEMPTS):
            found, sent, events = self._round(asks, ids, missing, len(missing), stacks=False)
            for run, some in found.items():
                pieces[run] += some
                down[run] += sent[run]
            missing = _without(missing, next(iter(found.values())))
            if not len(missing):
                break
        if len(missing) == len(ids) and len(ids):
            raise RunError("no node answers", "; ".join(events) or "start the nodes, and continue the run")
        out = {}
        for run, ask in asks.items():
            answer = filled(ask, joined(ask, pieces[run], down[run]), ids, self._expected.of(ask))
            out[run] = finish(ask, answer, ids, 0.0)
        return out

    def revealed(self, runs: Sequence[int], names: Collection[str] | None = None) -> list[Tensors]:
        """Ask all clients for (some of) their private state, in one message: only where a method says so.  [M, ...] each"""
        asks = {}
        for run in runs:
            fields = self.private.fields.get(run, {})
            asks[run] = reveal_ask({name: v for name, v in fields.items() if names is None or name in names})
        got = self.asks(asks)
        return [dict(got[run].values) for run in runs]

    # -- rounds -------------------------------------------------------------------------------------------------------
    def run(self, programs: Sequence[Program], **how: Any) -> Finished:
        """Run programs side by side, a round of all at a time: see `drive` for what can be said."""
        self._needed = {} if how.get("checkpoint") is not None else None
        return drive(self, programs, **how)

    @property
    def keys(self) -> Tensor:
        """[M] identity of each client for randomness."""
        return self.rows.keys

    def dispatch(self, groups: Sequence[tuple[Mapping[int, Ask], Participants]]) -> list[Response]:
        """Ask those whom the clock foretells to be in time, or all, and go on with the first answers."""
        return [self._dispatched(asks, who) for asks, who in groups]

    def _dispatched(self, asks: Mapping[int, Ask], who: Participants) -> Response:
        foretold = self.clock is not None and not isinstance(self.clock, WallClock)
        begin = time.perf_counter()
        asked = who.answered if foretold else who.asked
        pieces, sent, events = self._round(asks, asked, asked, len(who.answered), stacks=True)
        taken = time.perf_counter() - begin
        answers = {run: joined(ask, pieces[run], sent[run]) for run, ask in asks.items()}
        self.heard[next(iter(answers.values())).ids] += 1  # the runs of a message are answered together
        return Response(answers, 0.0 if self.clock is None else self.clock.elapsed(who.seconds, taken), events)

    def _round(
        self, asks: Mapping[int, Ask], to: Tensor, ids: Tensor, enough: int, *, stacks: bool
    ) -> tuple[dict[int, list[Piece]], dict[int, int], list[str]]:
        """Ask some (ids) of those whom the asks are for (to).  -> pieces by run, bytes sent by run, what went wrong"""
        groups = self._by_node(ids)
        self._note_fields(asks)
        self._number += 1
        questions = {name: self._question(name, asks, to, own) for name, own in groups.items()}
        sent = {run: sum(_sent(question.asks[run]) for question in questions.values()) for run in asks}
        sizes = {name: len(own) for name, own in groups.items()}

        def check(answers: Answers) -> None:
            self._check(answers, asks, groups[answers.node])

        patience = self.link.timeout
        if isinstance(self.participation, Deadline):
            patience = min(patience, self.participation.seconds)
        called = self.link.call(questions, sizes, enough, check, patience)
        order = sorted(called.answers)
        pieces = {
            run: [Piece(n, torch.from_numpy(groups[n]), called.answers[n].parts[run]) for n in order] for run in asks
        }
        for run, ask in asks.items():
            called.failed |= {n: f"is refused: {why}" for n, why in spoiled(ask, pieces[run], stacks=stacks).items()}
        pieces = {run: [piece for piece in some if piece.node not in called.failed] for run, some in pieces.items()}
        events = [f"node '{name}' {why}" for name, why in sorted(called.failed.items())]
        for name in order:
            if name not in called.failed:
                events += self._accept(called.answers[name])
        for event in events:
            warnings.warn(event, NodeWarning, stacklevel=2)
        return pieces, sent, events

    # -- messages -----------------------------------------------------------------------------------------------------
    def _by_node(self, ids: Tensor) -> dict[str, np.ndarray]:
        """Clients of every node, in the order of its own numbers."""
        names, chosen = list(self.link.nodes), ids.numpy()
        out = {}
        for place in np.unique(self.rows.place[chosen]):
            own = chosen[self.rows.place[chosen] == place]
            out[names[place]] = own[np.argsort(self.rows.number[own])]
        return out

    def _question(self, name: str, asks: Mapping[int, Ask], to: Tensor, own: np.ndarray) -> Question:
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
        return Question(self.link.run, rows.part, rows.views, node.schema, number, mine, state)

    def _check(self, answers: Answers, asks: Mapping[int, Ask], own: np.ndarray) -> None:
        if answers.number != self._number or not torch.equal(answers.ids, torch.from_numpy(self.rows.number[own])):
            raise RunError("it answers another request, or for other clients")
        if answers.parts.keys() != asks.keys():
            raise RunError(f"it answers for the runs {sorted(answers.parts)} where {sorted(asks)} were asked")
        for run, ask in asks.items():
            self._expected.check(ask, answers.parts[run], len(own))

    def _accept(self, answers: Answers) -> list[str]:
        """Let an answer count: from now on the node goes on from what it kept."""
        if answers.kept:
            own = {answers.node: (self.store, answers.number)}
            self.private = replace(self.private, accepted={**self.private.accepted, **own})
        return [f"node '{answers.node}' has lost its private state: its clients started again"] * answers.lost

    def _note_fields(self, asks: Mapping[int, Ask]) -> None:
        fields = self.private.fields
        for at, ask in asks.items():
            if ask.fresh:
                fields = {**fields, run_of(at): {**fields.get(run_of(at), {}), **ask.fresh}}
        self.private = replace(self.private, fields=fields)

    # -- private state ------------------------------------------------------------------------------------------------
    def knows(self, run: int) -> bool:
        """Whether clients keep private state of a run already."""
        return run in self.private.fields

    def forget(self) -> None:
        """Begin without private state."""
        self.private, self._number = RemoteState(), 0
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
        self.private = RemoteState(
            {name: (store, number) for name, (store, number) in rest["accepted"].items()}, fields
        )
        self._number, self._needed = rest["number"], self._own_numbers()


def _sent(ask: Ask) -> int:
    return bytes_of(ask.shared) + bytes_of(ask.fresh) + bytes_of(ask.each)


def _without(ids: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Those who have not answered."""
    return ids[~torch.isin(ids, torch.cat([piece.ids for piece in pieces] or [ids[:0]]))]
