# SPDX-License-Identifier: Apache-2.0
"""Where sums of scores come from: clients in a running program, clients that have judged several deals, or values here."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.score_sums import hand_on
from coterie.data.ragged import Ragged
from coterie.errors import RunError
from coterie.methods.session import On, Session
from coterie.protocol import Algorithm, Ask, Block, Replies, Tensors

__all__ = ["Here", "InProgram", "OnSession", "Source", "answered", "finished"]


class Source(ABC):
    """Who answers questions about scores.

    Attributes
    ----------
    individual : bool
        Whether clients may tell values of their own, for tables of clients.
    """

    individual: bool

    @abstractmethod
    def asked(self, ask: Ask) -> Algorithm:
        """Put a question to all clients.  -> Replies"""


@dataclass(frozen=True)
class InProgram(Source):
    """Clients of the program that asks."""

    individual: bool = False

    def asked(self, ask: Ask) -> Algorithm:
        """Ask with the program's next message."""
        return (yield from answered(ask))


@dataclass
class OnSession(Source):
    """Clients that have judged on several sets of their rows: with each deal of the folds, and on some of many rows.

    Attributes
    ----------
    session : Session
        That has run it.
    rows : sequence of Ragged
        These rows; questions are put to the last.
    left : sequence
        What clients keep of each. It is handed on from one to the next with the first question.
    """

    session: Session
    rows: Sequence[Ragged]
    left: Sequence[Any]
    individual: bool = True
    _kept: Any = field(default=None, init=False)

    @classmethod
    def after(cls, session: Session, rows: Sequence[Ragged], *, individual: bool) -> "OnSession":
        """Begin with what clients keep now."""
        return cls(session, rows, [session.engine(some).private for some in rows], individual)

    def asked(self, ask: Ask) -> Algorithm:
        """Ask in a message of its own."""
        last = self.rows[-1]
        if self._kept is not None:
            parts = [On(last, {0: ask}, self._kept)]
        else:
            pass_on = Ask(hand_on, {"on": torch.zeros(())}, {}, fresh=_few(ask.fresh))
            asks = [*[pass_on] * (len(self.rows) - 1), ask]
            every = zip(self.rows, asks, self.left, strict=True)
            parts = [On(rows, {0: one}, left, at - 1 if at else None) for at, (rows, one, left) in enumerate(every)]
        found = self.session.exchange(parts)[-1]
        self._kept = found.private
        yield from ()  # it is a program, like those that wait for answers
        return _whole(ask, found[0])


@dataclass(frozen=True)
class Here(Source):
    """What clients would keep is here.

    Attributes
    ----------
    kept : dict
        Name -> [M, F, J, columns].
    keys : Tensor
        [M] identity of each client for randomness.
    """

    kept: Mapping[str, Tensor]
    keys: Tensor
    individual: bool = True

    def asked(self, ask: Ask) -> Algorithm:
        """Let the client function answer for all of them."""
        clients = len(self.keys)
        nothing = torch.zeros(clients, 0, 0, dtype=torch.float64)
        block = Block(torch.arange(clients), self.keys, nothing, None, torch.ones(clients, dtype=torch.int64), None)
        shared = {name: value[None] if isinstance(value, Tensor) else value for name, value in ask.shared.items()}
        private = {
            name: (self.kept[name] if name in self.kept else fresh.expand(clients, *fresh.shape))[None]
            for name, fresh in ask.fresh.items()
        }
        reply, _ = ask.step(shared, {}, private, block)
        values = {}
        for name, how in ask.fold.items():
            values[name] = how.finish({key: value[0] for key, value in how.part(reply[name], reply).items()})
        yield from ()
        return Replies(values, torch.arange(clients), torch.arange(0))


def answered(ask: Ask) -> Algorithm:
    """Ask everybody; who does not answer counts as a client without rows: with zeros in what is individual.  -> Replies"""
    return _whole(ask, (yield ask))


def _whole(ask: Ask, told: Replies | None) -> Replies:
    got = _some(told)
    if not len(got.missing):
        return got
    ids = torch.cat([got.ids, got.missing]).sort().values
    values = {}
    for name, value in got.values.items():
        if not ask.fold[name].individual:
            values[name] = value
            continue
        values[name] = value.new_zeros(len(ids), *value.shape[1:])
        values[name][torch.searchsorted(ids, got.ids)] = value
    return replace(got, values=values, ids=ids, missing=ids[:0])


def _some(got: Replies | None) -> Replies:
    if got is None or not got.n:
        raise RunError("nobody answers how it is served", "see that the nodes are there, and compare again")
    return got


def _few(fresh: Mapping[str, Tensor]) -> Tensors:
    """What tells the shape of what is handed on: its marker."""
    return {name: value for name, value in fresh.items() if not value.dim()}


def finished(program: Algorithm) -> Any:
    """What comes of a program whose source asks by itself."""
    try:
        next(program)
    except StopIteration as end:
        return end.value
    raise AssertionError("it asks clients of a running program")
