# SPDX-License-Identifier: Apache-2.0
"""Rows that are elsewhere: the server knows whose they are and how many, and says in words what is to be done to them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.data.clients import Clients
from coterie.data.draws import Rule
from coterie.data.ragged import Change, Layout, Ragged, lots
from coterie.errors import RunError
from coterie.protocol import Block

__all__ = ["AtLeast", "Cast", "Divided", "Folded", "Newcomers", "Part", "RemoteRows", "Scaled", "View", "seen_by"]


class View(Protocol):
    """What is done to rows, said so that it can be sent: the node does to its rows what would have been done here."""

    def __call__(self, rows: Ragged, /) -> Ragged:
        """Do it."""


@dataclass(frozen=True)
class Part:
    """Which of the data sets that a node has: `train`, or `test` and `newcomers` where it holds them out itself."""

    name: str

    def of(self, clients: Clients) -> Ragged:
        """Take it."""
        found = {"train": clients.train, "test": clients.test, "newcomers": clients.newcomers}.get(self.name)
        if found is None:
            raise RunError(f"there are no '{self.name}' rows", "ask for rows that the node has")
        return found


@dataclass(frozen=True)
class Scaled:
    """Features and targets are changed by what was learnt of the columns."""

    by: Change

    def __call__(self, rows: Ragged, /) -> Ragged:
        """Scale."""
        return rows.scaled(self.by)


@dataclass(frozen=True)
class Cast:
    """Numbers have another precision."""

    dtype: torch.dtype

    def __call__(self, rows: Ragged, /) -> Ragged:
        """Cast."""
        return rows.to(self.dtype)


@dataclass(frozen=True)
class Divided:
    """Some of every client's rows are taken, by a rule: these, or the others."""

    rule: Rule
    seed: int
    purpose: str
    taken: bool

    def __call__(self, rows: Ragged, /) -> Ragged:
        """Divide."""
        return rows.divide(self.rule, seed=self.seed, purpose=self.purpose)[int(self.taken)]


@dataclass(frozen=True)
class Newcomers:
    """Clients are held out whose lot is below a bound: these, or the others."""

    below: float
    seed: int
    held: bool

    def __call__(self, rows: Ragged, /) -> Ragged:
        """Divide."""
        return rows.divided(self.below, seed=self.seed)[int(self.held)]


@dataclass(frozen=True)
class AtLeast:
    """Clients with fewer rows are left out."""

    n: int

    def __call__(self, rows: Ragged, /) -> Ragged:
        """Leave them out."""
        return rows.at_least(self.n)


@dataclass(frozen=True)
class Folded:
    """Training rows with the numbers of their folds, and test rows beside them."""

    n_folds: int
    seed: int
    train: Part
    views: tuple[View, ...]
    test: Part | None
    test_views: tuple[View, ...]

    def of(self, clients: Clients) -> Ragged:
        """Make both as a node would, and put them together."""
        test = None if self.test is None else seen_by(clients, self.test, self.test_views)
        return seen_by(clients, self.train, self.views).with_folds(self.n_folds, seed=self.seed, test=test)


def seen_by(clients: Clients, part: Part | Folded, views: tuple[View, ...]) -> Ragged:
    """What a node makes of its rows."""
    rows = part.of(clients)
    for view in views:
        rows = view(rows)
    return rows


@dataclass(frozen=True, eq=False)
class RemoteRows(Ragged):
    """Rows of clients on other machines; x and y have no rows here, and say shape and precision only.

    Attributes
    ----------
    place : ndarray
        [M] the node of each client, by its number in the federation.
    number : ndarray
        [M] the number of each client on its node.
    federation : object
        What reaches the nodes: see `coterie.engines.flower`.
    part, views
        What the nodes do to get these rows.
    known : dict
        What has been asked about these rows already.
    """

    place: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    number: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    federation: Any = None
    part: Part | Folded = Part("train")
    views: tuple[View, ...] = ()
    known: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Ask for what follows from the rows alone only once: a message is dear."""
        if name not in self.known:
            self.known[name] = make()
        return self.known[name]

    def values(self) -> Iterator[bytes]:
        """What nodes say of their values."""
        yield self.federation.fingerprint.encode()

    def blocks(self, *_: Any, **__: Any) -> Any:
        """Refuse: rows do not leave their node."""
        raise RunError("rows of clients on other machines cannot be read here", "read a file that is here")

    def table(self, predictions: Any = None) -> Any:
        """Refuse: rows do not leave their node."""
        raise RunError("rows of clients on other machines cannot be read here", "read a file that is here")

    def _block(self, ids: np.ndarray) -> Block:
        raise RunError("rows of clients on other machines cannot be read here", "read a file that is here")

    # -- deriving -----------------------------------------------------------------------------------------------------
    def scaled(self, by: Change) -> "RemoteRows":
        """Let nodes apply what was learnt of the columns."""
        x, y = self._like
        return self._seen(Scaled(by), x=by.features(x.clone()), y=None if y is None else by.target(y))

    def to(self, dtype: torch.dtype) -> "RemoteRows":
        """Let nodes turn features and real-valued targets into another precision."""
        x, y = self._like
        return self._seen(Cast(dtype), x=x.to(dtype), y=y.to(dtype) if y is not None and y.is_floating_point() else y)

    def divide(self, rule: Rule, *, seed: int, purpose: str) -> "tuple[RemoteRows, RemoteRows]":
        """Let nodes take some of every client's rows: (rest, taken); how many is known here."""
        taken = rule.taken(self.layout.counts)
        rest, out = (
            self._seen(Divided(rule, seed, purpose, side), layout=Layout.plan(self.names, counts))
            for side, counts in ((False, self.layout.counts - taken), (True, taken))
        )
        return rest, out

    def with_folds(self, n_folds: int, *, seed: int, test: Ragged | None = None) -> "RemoteRows":
        """Let nodes number rows by their folds, and put the same clients' test rows beside them."""
        assert isinstance(self.part, Part)
        assert test is None or isinstance(test, RemoteRows)
        beside = (None, ()) if test is None else (test.part, test.views)
        counts = self.layout.counts + (0 if test is None else test.layout.counts)
        part = Folded(n_folds, seed, self.part, self.views, *beside)
        return replace(self, part=part, views=(), layout=Layout.plan(self.names, counts), known={})

    def divided(self, below: float, *, seed: int) -> "tuple[RemoteRows, RemoteRows]":
        """Let nodes hold out the clients whose lot is below a bound: (rest, held out)."""
        new = (lots(self.keys, seed) < below).numpy()
        rest, out = (self._fewer(np.flatnonzero(new == side), Newcomers(below, seed, side)) for side in (False, True))
        return rest, out

    def at_least(self, n: int) -> "RemoteRows":
        """Let nodes leave out clients with fewer rows; the others are numbered anew."""
        return self._fewer(np.flatnonzero(self.layout.counts >= n), AtLeast(n))

    def changed(self, *_: Any) -> Ragged:
        """Refuse what cannot be said in words."""
        raise RunError("rows on other machines are changed by values that can be sent", "use scaled(), to() or split()")

    def only(self, ids: np.ndarray) -> Ragged:
        """Refuse: name clients in an ask."""
        raise RunError("clients on other machines are chosen by what they have", "use at_least() or divided()")

    def _seen(self, view: View, **changes: Any) -> "RemoteRows":
        return replace(self, views=(*self.views, view), known={}, **changes)

    def _fewer(self, ids: np.ndarray, view: View) -> "RemoteRows":
        """Keep some clients, as their nodes will: numbers on a node close up."""
        place, number = self.place[ids], self.number[ids]
        order = np.lexsort((number, place))
        first = np.searchsorted(place[order], place[order], side="left")
        close = np.empty(len(ids), dtype=np.int64)
        close[order] = np.arange(len(ids)) - first
        layout = Layout.plan(self.names[ids], self.layout.counts[ids])
        return self._seen(view, layout=layout, place=place, number=close)

    @property
    def _like(self) -> tuple[Tensor, Tensor | None]:
        """Features and targets without rows."""
        assert isinstance(self.x, Tensor)
        assert self.y is None or isinstance(self.y, Tensor)
        return self.x, self.y
