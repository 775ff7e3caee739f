# SPDX-License-Identifier: Apache-2.0
"""Rows of many clients, stored once, client after client, and cut into blocks.

Clients are stored in the order of their row counts, so that clients of equal length lie side by side and a block of
them is a view; others are padded. Rows live in memory or in a file on disk; a block is all that is ever read of the latter.
"""

import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from coterie import keys as _keys
from coterie.data.draws import First, Fold, Rule, Share, fold_of
from coterie.data.frames import pandas_frame, table_of
from coterie.data.schema import Schema
from coterie.errors import DataError
from coterie.protocol import Block, Step

__all__ = ["BLOCK_BYTES", "Change", "DiskRows", "Layout", "Ragged", "lots", "newcomers_below"]

BLOCK_BYTES = 64 << 20  # what one block may take, rows and messages together
_WASTE = 1.25  # padded rows per real row that a block may have ...
_WASTE_ROWS = 4096  # ... once it is larger than this
_IN_TIME = (
    "test",
    "folds",
    "validation",
    "few shots",
    "support",
)  # purposes for which rows in time order are not shuffled


class Change(Protocol):
    """What is done to features and targets, as one value."""

    def features(self, x: Tensor, /) -> Tensor:
        """Change features [..., D]."""

    def target(self, y: Tensor, /) -> Tensor:
        """Change targets [...]."""


@dataclass(frozen=True)
class Layout:
    """Where each client's rows lie.

    Attributes
    ----------
    names : ndarray of str
        [M] client names, ascending: the number of a client is its place here.
    counts : ndarray
        [M] rows of each client.
    order : ndarray
        [M] client numbers in the order of storage: by row count.
    starts : ndarray
        [M] first row of each client.
    """

    names: np.ndarray
    counts: np.ndarray
    order: np.ndarray
    starts: np.ndarray

    @classmethod
    def plan(cls, names: np.ndarray, counts: np.ndarray, tie: np.ndarray | None = None) -> "Layout":
        """Lay out clients with these names (distinct, ascending) and row counts; equal counts stand as `tie` says."""
        counts = np.asarray(counts, dtype=np.int64)
        order = np.argsort(counts, kind="stable") if tie is None else np.lexsort((tie, counts))
        starts = np.empty(len(counts), dtype=np.int64)
        starts[order] = np.concatenate([[0], np.cumsum(counts[order])[:-1]]) if len(counts) else 0
        return cls(np.asarray(names, dtype=str), counts, order, starts)

    @property
    def n_rows(self) -> int:
        """Rows of all clients together."""
        return int(self.counts.sum())


class DiskRows:
    """An array on disk that is read in slices and written once.

    Parameters
    ----------
    path : Path
        A file of raw numbers; it is removed with the object.
    shape, dtype
        Of the array.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path, self.shape, self.dtype = path, shape, np.dtype(dtype)
        self._width = int(np.prod(shape[1:], dtype=np.int64))
        path.touch()
        os.truncate(path, int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize)
        self._remove = weakref.finalize(self, _unlink, path)

    def writable(self) -> np.memmap:
        """Map the file for filling it in."""
        return np.memmap(self.path, dtype=self.dtype, mode="r+", shape=self.shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Read rows start to stop into memory."""
        out = np.empty((max(stop - start, 0), *self.shape[1:]), dtype=self.dtype)
        if out.size:
            with open(self.path, "rb") as file:
                file.seek(start * self._width * self.dtype.itemsize)
                file.readinto(out.reshape(-1).view(np.uint8).data)
        return torch.from_numpy(out)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Ragged rows: what engines consume.

    Attributes
    ----------
    layout : Layout
        Where each client's rows lie.
    x, y : Tensor or DiskRows
        [N, ...] features and targets, in the order of the layout; y is None when there is no target.
    rows : Tensor, optional
        Row numbers in x and y, in the order of the layout, when only some of the stored rows are meant.
    change, change_y : callable, optional
        Applied to the features and targets of every block that comes from disk.
    fold : Tensor, optional
        [N] number of every row's fold, in the order of the layout.
    in_time : bool
        Whether a client's rows stand in the order of time: then the last ones are held out, and folds are blocks.
    origin : Tensor, optional
        [N] number of every row in the file or arrays that it comes from, in the order of the layout.
    schema : Schema, optional
        What the features and targets are, as long as they are what was read.
    weight : Tensor, optional
        [N] how many rows each counts as, in the order of the layout.
    """

    layout: Layout
    x: "Tensor | DiskRows"
    y: "Tensor | DiskRows | None"
    rows: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None
    change_y: Callable[[Tensor], Tensor] | None = None
    fold: Tensor | None = None
    in_time: bool = False
    origin: Tensor | None = None
    schema: Schema | None = None
    weight: Tensor | None = None

    # -- making -------------------------------------------------------------------------------------------------------
    @classmethod
    def from_groups(cls, x: Tensor, y: Tensor | None, groups: np.ndarray) -> "Ragged":
        """Gather rows by client.  x [N, ...], y [N, ...], groups [N] client of each row."""
        names, number, counts = np.unique(np.asarray(groups, dtype=str), return_inverse=True, return_counts=True)
        layout = Layout.plan(names, counts)
        place = np.empty(len(names), dtype=np.int64)
        place[layout.order] = np.arange(len(names))
        order = torch.from_numpy(np.argsort(place[number], kind="stable"))
        return cls(layout, x[order], None if y is None else y[order], origin=order)

    @classmethod
    def from_blocks(cls, x: Tensor, y: Tensor | None, names: np.ndarray | None = None) -> "Ragged":
        """Take clients of equal length without copying.  x [M, N, ...], y [M, N, ...]"""
        if names is None:
            width = len(str(max(len(x) - 1, 0)))
            names = np.char.zfill(np.arange(len(x)).astype(str), width)
        if np.any(np.asarray(names)[1:] <= np.asarray(names)[:-1]):
            raise DataError("client names must be distinct and ascending", "sort the clients by name")
        layout = Layout.plan(names, np.full(len(x), x.shape[1]))
        return cls(layout, x.reshape(-1, *x.shape[2:]), None if y is None else y.reshape(-1, *y.shape[2:]))

    def in_order_of(self, when: np.ndarray) -> "Ragged":
        """Put every client's rows into the order of these numbers [N], and equal ones as they stand: they are in time order.

        What is held out of them is then what comes last, and folds are blocks.
        """
        order = np.lexsort((when, self._place()[self.owners]))
        index = torch.from_numpy(order)
        origin, weight = (None if value is None else value[index] for value in (self.origin, self.weight))
        made = replace(self, origin=origin, weight=weight, in_time=True)
        if isinstance(self.x, DiskRows):
            return replace(made, rows=index if self.rows is None else self.rows[index])
        assert not isinstance(self.y, DiskRows)
        return replace(made, x=self.x[index], y=None if self.y is None else self.y[index])

    def renamed(self, names: np.ndarray) -> "Ragged":
        """Give every client another name [M], distinct; rows stay where they are, and numbers follow the new names."""
        new = np.argsort(names)
        number = np.empty(len(new), dtype=np.int64)
        number[new] = np.arange(len(new))
        layout = Layout(names[new], self.layout.counts[new], number[self.layout.order], self.layout.starts[new])
        return replace(self, layout=layout)

    # -- looking ------------------------------------------------------------------------------------------------------
    @property
    def n_clients(self) -> int:
        """How many clients there are."""
        return len(self.layout.names)

    @property
    def names(self) -> np.ndarray:
        """[M] client names, ascending."""
        return self.layout.names

    @property
    def counts(self) -> Tensor:
        """[M] rows of each client."""
        return torch.from_numpy(self.layout.counts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row's features."""
        return tuple(_row(self.x, self.change).shape[2:])

    def numbers(self, ids: Tensor) -> int:
        """Count the features of some clients' rows: what one pass over them reads."""
        return int(self.counts[ids].sum()) * math.prod(self.x.shape[1:])

    @property
    def keys(self) -> Tensor:
        """[M] identity of each client for randomness."""
        if "_key_cache" not in self.__dict__:
            object.__setattr__(self, "_key_cache", _keys.name_keys(self.names))
        return self.__dict__["_key_cache"]  # type: ignore[no-any-return]

    def client(self, number: int) -> Block:
        """One client's rows."""
        return next(self.blocks(torch.tensor([number])))

    def values(self) -> Iterator[bytes]:
        """All features and targets, for a fingerprint."""
        for block in self.blocks():
            for part in (block.x, block.y, block.weight):
                yield b"" if part is None else part.contiguous().numpy().tobytes()

    def table(self, predictions: Any = None) -> pa.Table:
        """All rows as an Arrow table, in the order of `x`, `y` and of what models predict of them.

        The first columns are the client and the number of the row in the file or arrays that it comes from, then come the
        features and the target as they were read, and `predictions` [N] or [N, O], such as `model.predict(clients.test)`.
        """
        return table_of(self, predictions)

    def frame(self, predictions: Any = None) -> Any:
        """The same as a data frame of pandas, if that is installed."""
        return pandas_frame(self.table(predictions))

    @property
    def owners(self) -> np.ndarray:
        """[N] the client of every row, in the order of storage."""
        return np.repeat(self.layout.order, self.layout.counts[self.layout.order])

    def order_of(self, groups: np.ndarray) -> np.ndarray:
        """Tell where each stored row stands among rows that were given with these groups [N]."""
        number = np.searchsorted(self.names, np.asarray(groups, dtype=str))
        return np.argsort(self._place()[number], kind="stable")

    def admit(self, step: Step) -> None:
        """Refuse a client function that these rows cannot answer; rows themselves answer all."""

    # -- blocks -------------------------------------------------------------------------------------------------------
    def blocks(
        self, ids: Tensor | None = None, *, budget: int = BLOCK_BYTES, room: int = 0, row_room: int = 0
    ) -> Iterator[Block]:
        """Cut the clients (or those in `ids`) into blocks.

        Parameters
        ----------
        ids : Tensor, optional
            Client numbers; all by default.
        budget : int
            Bytes that a block may take. A client larger than that is a block of its own.
        room : int
            Bytes that a client needs besides its rows (what it is sent and answers).
        row_room : int
            Bytes that each of its rows needs besides the row itself.
        """
        order = self.layout.order
        if ids is not None:
            chosen = np.zeros(self.n_clients, dtype=bool)
            chosen[ids.numpy()] = True
            order = order[chosen[order]]
        counts = self.layout.counts[order]
        row_bytes = row_room + _row(self.x, self.change).nbytes
        row_bytes += 0 if self.y is None else _row(self.y, self.change_y).nbytes
        for i, j in _cuts(counts, row_bytes, room, budget):
            yield self._block(order[i:j])

    def _block(self, ids: np.ndarray) -> Block:
        counts, starts = self.layout.counts[ids], self.layout.starts[ids]
        longest = int(counts.max())
        equal = bool((counts == longest).all())
        together = equal and bool((np.diff(starts) == longest).all())
        x = self._take(self.x, counts, starts, longest, together)
        x = x if self.change is None else self.change(x)
        y = None if self.y is None else self._take(self.y, counts, starts, longest, together)
        y = y if y is None or self.change_y is None else self.change_y(y)
        fold, weight = (
            None if value is None else self._take(value, counts, starts, longest, together)
            for value in (self.fold, self.weight)
        )
        n = torch.from_numpy(counts)
        mask = None
        if not equal:
            mask = torch.arange(longest) < n[:, None]
            x = _zero_padding(x, mask)
            y = None if y is None else _zero_padding(y, mask)
        numbers = torch.from_numpy(ids)
        return Block(numbers, self.keys[numbers], x, y, n, mask, fold, weight)

    def _take(
        self, source: "Tensor | DiskRows", counts: np.ndarray, starts: np.ndarray, longest: int, together: bool
    ) -> Tensor:
        """[C, longest, ...]: a view where it can be, else a gather whose padding holds other rows."""
        shape = (len(counts), longest, *source.shape[1:])
        if longest == 0:
            return torch.zeros(shape, dtype=_dtype(source))
        if isinstance(source, DiskRows):
            source = self._read(source, counts, starts)
            starts = np.cumsum(counts) - counts
            together = bool((counts == longest).all())
        if together:
            return source[starts[0] : starts[0] + len(counts) * longest].view(shape)
        index = torch.from_numpy(starts)[:, None] + torch.arange(longest)
        return source[index.clamp_(max=len(source) - 1)]

    def _read(self, source: DiskRows, counts: np.ndarray, starts: np.ndarray) -> Tensor:
        """Read these clients' rows from disk, one after the other: one read for clients that lie side by side."""
        breaks = np.flatnonzero(starts[1:] != starts[:-1] + counts[:-1]) + 1
        parts = []
        for i, j in zip([0, *breaks], [*breaks, len(counts)], strict=True):
            first, last = int(starts[i]), int(starts[j - 1] + counts[j - 1])
            if self.rows is None:
                parts.append(source.read(first, last))
            elif _dense(self.rows[first:last]):
                parts.append(_span(source, self.rows[first:last]))
            else:
                ends = np.cumsum(counts[i:j]) + first
                parts += [_span(source, self.rows[e - n : e]) for e, n in zip(ends, counts[i:j], strict=True)]
        return torch.cat(parts)

    # -- deriving -----------------------------------------------------------------------------------------------------
    def changed(
        self, change: Callable[[Tensor], Tensor], change_y: Callable[[Tensor], Tensor] | None = None
    ) -> "Ragged":
        """Apply functions to features and targets: at once in memory, block by block from disk."""
        if isinstance(self.x, Tensor):
            assert not isinstance(self.y, DiskRows)
            y = change_y(self.y) if change_y is not None and self.y is not None else self.y
            return replace(self, x=change(self.x), y=y, schema=None)
        return replace(
            self,
            schema=None,
            change=_after(self.change, change),
            change_y=_after(self.change_y, change_y) if change_y else self.change_y,
        )

    def to(self, dtype: torch.dtype) -> "Ragged":
        """Turn features and real-valued targets into another precision."""
        return self.changed(lambda x: x.to(dtype), lambda y: y.to(dtype) if y.is_floating_point() else y)

    def scaled(self, by: Change) -> "Ragged":
        """Apply what was learnt of the columns to features and targets."""
        return self.changed(by.features, by.target)

    def at_least(self, n: int) -> "Ragged":
        """Keep clients with so many rows; they are numbered anew."""
        return self.only(np.flatnonzero(self.layout.counts >= n))

    def only(self, ids: np.ndarray) -> "Ragged":
        """Keep some clients (numbers); they are numbered anew."""
        return self._select(np.isin(self.owners, ids), np.sort(ids))

    def split(self, fraction: float, *, seed: int, purpose: str = "test") -> "tuple[Ragged, Ragged]":
        """Hold out a share of every client's rows: (rest, held out).

        Which rows depends on the seed, the purpose and the client's name only. A client keeps at least one row.
        """
        return self.divide(Share(fraction), seed=seed, purpose=purpose)

    def divide(self, rule: Rule, *, seed: int, purpose: str) -> "tuple[Ragged, Ragged]":
        """Take some of every client's rows, in a random order of its own, or in that of time: (rest, taken).

        A random order depends on the seed, the purpose and the client's name only, so that every client can draw it itself.
        """
        counts = self.layout.counts[self.owners]
        if self.in_time and purpose in _IN_TIME:
            taken = rule.takes_in_time(self._places, counts)
        else:
            taken = rule.takes(self._ranks(seed, purpose), counts)
        everyone = np.arange(self.n_clients)
        return self._select(~taken, everyone), self._select(taken, everyone)

    def thinned(self, most: int, *, seed: int) -> "Ragged":
        """Keep at most so many rows of every client."""
        few = int(self.layout.counts.max()) <= most
        return self if few else self.divide(First(most), seed=seed, purpose="thin")[1]

    def fold_by_fold(self, n_folds: int, *, seed: int) -> "list[tuple[Ragged, Ragged]]":
        """For every fold the rows of all the others, and its own."""
        return [self.divide(Fold(v, n_folds), seed=seed, purpose="folds") for v in range(n_folds)]

    def with_folds(self, n_folds: int, *, seed: int, test: "Ragged | None" = None) -> "Ragged":
        """Number every row by its fold, and put the same clients' test rows beside them, which have number `n_folds`.

        Folds are those of `fold_by_fold`. Rows are held in memory, and a client keeps its number, whatever rows it has.
        """
        parts = [self] if test is None else [self, test]
        ranks = self._places if self.in_time else self._ranks(seed, "folds")
        folds = [torch.from_numpy(fold_of(ranks, self.layout.counts[self.owners], n_folds, in_time=self.in_time))]
        folds += [torch.full((part.layout.n_rows,), n_folds) for part in parts[1:]]
        layout = Layout.plan(self.names, np.sum([part.layout.counts for part in parts], 0))
        place = np.empty(self.n_clients, dtype=np.int64)
        place[layout.order] = np.arange(self.n_clients)
        owners = np.concatenate([part.owners for part in parts])
        order = torch.from_numpy(np.argsort(place[owners], kind="stable"))
        x, y = zip(*(part.in_memory() for part in parts), strict=True)
        target = None if y[0] is None else torch.cat([one for one in y if one is not None])[order]
        weights = [part.weight for part in parts if part.weight is not None]
        weight = torch.cat(weights)[order] if len(weights) == len(parts) else None
        return Ragged(layout, torch.cat(x)[order], target, fold=torch.cat(folds)[order], weight=weight)

    def in_memory(self) -> tuple[Tensor, Tensor | None]:
        """All features and targets, in the order of storage."""
        if isinstance(self.x, Tensor) and not isinstance(self.y, DiskRows):
            return self.x, self.y
        blocks = [self.client(int(i)) for i in self.layout.order]
        return torch.cat([b.x[0] for b in blocks]), None if self.y is None else torch.cat([b.target[0] for b in blocks])

    @property
    def _places(self) -> np.ndarray:
        """[N] the place of every stored row among its client's, as they are stored."""
        owner = self.owners
        places: np.ndarray = np.arange(len(owner)) - self.layout.starts[owner]
        return places

    def _ranks(self, seed: int, purpose: str) -> np.ndarray:
        """[N] the place of every stored row in a random order of its client's."""
        owner, row = self.owners, self._places
        u = _keys.uniform_at(_keys.key(seed, purpose, self.keys)[owner], torch.from_numpy(row)).numpy()
        rank = np.empty(len(owner), dtype=np.int64)
        rank[np.lexsort((u, self._place()[owner]))] = row
        return rank

    def split_clients(self, fraction: float, *, seed: int) -> "tuple[Ragged, Ragged]":
        """Hold out a share of the clients: (rest, held out). Who depends on the seed and the client's name only."""
        return self.divided(newcomers_below(self.keys, fraction, seed), seed=seed)

    def divided(self, below: float, *, seed: int) -> "tuple[Ragged, Ragged]":
        """Hold out the clients whose lot is below a bound: (rest, held out)."""
        new = (lots(self.keys, seed) < below).numpy()
        return self.only(np.flatnonzero(~new)), self.only(np.flatnonzero(new))

    def _place(self) -> np.ndarray:
        """[M] where each client stands in the order of storage."""
        place = np.empty(self.n_clients, dtype=np.int64)
        place[self.layout.order] = np.arange(self.n_clients)
        return place

    def _select(self, keep: np.ndarray, ids: np.ndarray) -> "Ragged":
        """Keep some rows (a mask, in the order of storage) of some clients (ascending)."""
        owner = self.owners[keep]
        counts = np.bincount(owner, minlength=self.n_clients)[ids]
        layout = Layout.plan(self.layout.names[ids], counts, self._place()[ids])
        place = np.empty(self.n_clients, dtype=np.int64)
        place[ids[layout.order]] = np.arange(len(ids))
        index = torch.from_numpy(np.flatnonzero(keep)[np.argsort(place[owner], kind="stable")])
        fold, origin, weight = (
            None if value is None else value[index] for value in (self.fold, self.origin, self.weight)
        )
        if isinstance(self.x, DiskRows):
            rows = index if self.rows is None else self.rows[index]
            return replace(self, layout=layout, rows=rows, fold=fold, origin=origin, weight=weight)
        assert not isinstance(self.y, DiskRows)
        y = None if self.y is None else self.y[index]
        made = Ragged(layout, self.x[index], y, fold=fold, origin=origin, weight=weight)
        return replace(made, in_time=self.in_time, schema=self.schema)


def lots(keys: Tensor, seed: int) -> Tensor:
    """What decides which clients are held out.  [M]"""
    return _keys.uniform(_keys.key(seed, "new clients", keys), 1)[:, 0]


def newcomers_below(keys: Tensor, fraction: float, seed: int) -> float:
    """The bound below which lots lie of a share of the clients: what a part of a federation cannot know alone."""
    ranked = lots(keys, seed).sort().values
    held = round(fraction * len(ranked))
    return 0.0 if held == 0 else math.nextafter(float(ranked[held - 1]), math.inf)


def _after(first: Callable[[Tensor], Tensor] | None, then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return then if first is None else lambda value: then(first(value))


def _cuts(counts: np.ndarray, row_bytes: int, room: int, budget: int) -> Iterator[tuple[int, int]]:
    """Cut ascending counts greedily into ranges within the budget and without much padding."""
    before = np.concatenate([[0], np.cumsum(counts)])
    i, m = 0, len(counts)

    def fits(j: int) -> bool:
        padded = (j - i) * int(counts[j - 1])
        wasteful = padded > _WASTE_ROWS and padded > _WASTE * (before[j] - before[i])
        return not wasteful and padded * row_bytes + (j - i) * room <= budget

    while i < m:
        low, high = i + 1, m  # bisect: `low` always fits
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        yield i, low
        i = low


def _row(source: "Tensor | DiskRows", change: Callable[[Tensor], Tensor] | None) -> Tensor:
    """One row of zeros as blocks hand it out.  [1, 1, ...]"""
    row = torch.zeros(1, 1, *source.shape[1:], dtype=_dtype(source))
    return row if change is None else change(row)


def _dtype(source: "Tensor | DiskRows") -> torch.dtype:
    return source.dtype if isinstance(source, Tensor) else torch.from_numpy(np.empty(0, source.dtype)).dtype


def _zero_padding(value: Tensor, mask: Tensor) -> Tensor:
    value[~mask] = 0
    return value


def _dense(rows: Tensor) -> bool:
    """Tell whether reading the span that holds these rows reads little else."""
    return len(rows) == 0 or int(rows.max() - rows.min()) < 4 * len(rows)


def _span(source: DiskRows, rows: Tensor) -> Tensor:
    """Read the span that holds these rows, and pick them."""
    if not len(rows):
        return source.read(0, 0)
    low, high = int(rows.min()), int(rows.max()) + 1
    return source.read(low, high)[rows - low]
