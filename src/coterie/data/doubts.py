# SPDX-License-Identifier: Apache-2.0
"""What looks wrong in a table that can be read.

Ids among the features, rows that stand there twice, classes that differ in case only, dates and numbers that are taken for
categories, rare classes, counts, skewed targets, and rows in the order of time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from coterie.data.faults import spelling
from coterie.data.roles import Roles
from coterie.data.scan import ColumnFacts, guess_task
from coterie.data.sources import listed
from coterie.data.values import instants, is_date, is_text, named, numbers, plain

__all__ = ["Doubt", "Doubts", "codes"]

_ROWS = 200_000  # that are looked at, from the beginning of the table
_NUMBERS = 40_000_000  # of all columns together, at most
_FEW = 20  # rows or pairs of rows: fewer say nothing
_UNIQUE = 0.95  # share of different values from which a column tells rows apart
_TWICE = 0.01  # share of repeated rows
_RARE = 0.05  # share of the rows that the smallest class has
_SKEWED = 2.0
_MOST = 0.9  # of the levels
_COUNTS = "counts: --outcome poisson or negative-binomial may fit better"
_TEXTS = 200  # levels that are looked at
_DATES = re.compile(
    r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}( .*)?|\d{4}[./-]\d{1,2}([./-]\d{1,2})?( .*)?"
    r"|\d{1,2}[- ][A-Za-z]{3,9}[- ,]+\d{2,4}|[A-Za-z]{3,9}[- ]\d{1,2},? \d{4}"
)


@dataclass(frozen=True)
class Doubt:
    """Something that looks wrong, and what to do about it."""

    severity: Literal["warning", "note"]
    sentence: str
    hint: str


@dataclass
class _Sample:
    """The first rows of a column."""

    codes: list[np.ndarray] = field(default_factory=list)
    order: list[np.ndarray] | None = field(default_factory=list)  # values that may grow with time; None of text
    texts: set[str] = field(default_factory=set)
    dates: bool = True

    def add(self, values: pa.Array, *, spelled: bool) -> None:
        values = plain(values)
        self.codes.append(codes(values))
        found = numbers(values) if spelled or not is_text(values.type) else None
        if found is not None:
            self.dates = False
        elif is_date(values):
            found = instants(values)
        elif is_text(values.type) and len(self.texts) < _TEXTS:
            self.texts.update(named(values)[0][:_TEXTS])
        self.order = None if found is None or self.order is None else [*self.order, found]


class Doubts:
    """One pass over the beginning of a table."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.samples = {name: _Sample() for name in (*roles.features, *([roles.target] if roles.target else []))}
        self.owners: list[np.ndarray] = []
        self.left = min(_ROWS, _NUMBERS // max(len(self.samples), 1))

    def add(self, batch: pa.RecordBatch, owner: np.ndarray, *, spelled: bool) -> None:
        """Take in rows, whose clients are known by number."""
        batch, owner = batch.slice(0, self.left), owner[: self.left]
        self.left -= len(owner)
        if not len(owner):
            return
        self.owners.append(owner)
        for name, sample in self.samples.items():
            sample.add(batch.column(name), spelled=spelled)

    def found(self, features: Mapping[str, ColumnFacts], target: ColumnFacts | None) -> Iterator[Doubt]:
        """Say all that looks wrong."""
        if not self.owners:
            return
        owner = np.concatenate(self.owners)
        columns = {name: np.concatenate(sample.codes) for name, sample in self.samples.items()}
        ids = [name for name, facts in features.items() if self._is_id(name, facts, columns[name])]
        for name in ids:
            yield Doubt(
                "warning", f"column '{name}' is different in (almost) every row: it looks like an id",
                f"nothing can be learnt from that; --exclude {name}",
            )  # fmt: skip
        yield from self._twice(columns, owner)
        known = dict(features) | ({} if target is None or self.roles.target is None else {self.roles.target: target})
        for name, facts in known.items():
            yield from _alike(name, facts, is_target=name == self.roles.target)
            yield from self._texts(name, facts)
        if target is not None and self.roles.target is not None:
            yield from self._target(self.roles.target, target)
        yield from self._in_time([name for name in features if name not in ids], owner)

    # -- features -----------------------------------------------------------------------------------------------------
    def _is_id(self, name: str, facts: ColumnFacts, values: np.ndarray) -> bool:
        if len(values) < _FEW or len(np.unique(values)) < _UNIQUE * len(values):
            return False
        if facts.kind == "text":
            texts = list(self.samples[name].texts)
            return _share(texts, _DATES) < _MOST and not spelling(texts)
        return facts.kind == "number" and facts.whole and self._numbered(name)

    def _numbered(self, name: str) -> bool:
        """Whether whole numbers that hardly repeat are numbers of rows: in order, close together, or equally long."""
        order = self.samples[name].order
        if not order:
            return False
        values = np.concatenate(order)
        values = values[np.isfinite(values)]
        steps = np.diff(values)
        long = np.floor(np.log10(np.maximum(np.abs(values), 1)))
        in_order = bool((steps > 0).all() or (steps < 0).all())
        close = bool(values.max() - values.min() < 3 * len(values))
        return in_order or close or bool(long.min() == long.max() >= 5)

    def _twice(self, columns: Mapping[str, np.ndarray], owner: np.ndarray) -> Iterator[Doubt]:
        """Rows that repeat, where they cannot do so by chance: some column hardly repeats otherwise."""
        row = owner.astype(np.uint64)
        with np.errstate(over="ignore"):
            for values in columns.values():
                row = (row ^ values.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
                row ^= row >> np.uint64(29)
        different = len(np.unique(row))
        share = 1 - different / len(row)
        if len(row) < _FEW or share < _TWICE:
            return
        if any(len(np.unique(values)) > 0.5 * different for values in columns.values()):
            yield Doubt(
                "warning", f"{len(row) - different} of {len(row)} rows ({share:.0%}) repeat an earlier row exactly",
                "held-out rows are then known from training, which makes separate models look good; remove the copies",
            )  # fmt: skip

    def _texts(self, name: str, facts: ColumnFacts) -> Iterator[Doubt]:
        """Dates and numbers that are taken for categories."""
        if facts.kind == "date" and name in self.roles.categorical:
            texts, dates = ["a date"], True
        else:
            texts = [text for text in (facts.levels or self.samples[name].texts) if text]
            dates = facts.kind == "text" and _share(texts, _DATES) >= _MOST
        if facts.kind not in ("text", "date") or not texts:
            return
        if dates:
            yield Doubt(
                "warning", f"column '{name}' holds dates, each of which is taken for a category",
                f"--exclude {name}; written like 2024-12-31 they can order rows: --split time:{name}",
            )  # fmt: skip
        elif options := spelling(texts):
            such = max(texts, key=len)
            yield Doubt("warning", f"column '{name}' holds numbers like '{such}' as text", f"read them with {options}")

    def _in_time(self, features: Sequence[str], owner: np.ndarray) -> Iterator[Doubt]:
        """Columns that say when, or that grow within clients."""
        place = np.argsort(owner, kind="stable")
        same = np.diff(owner[place]) == 0
        if same.sum() < _FEW:
            return
        for name in features:
            sample = self.samples[name]
            if sample.order is None or not sample.order:
                continue
            steps = np.diff(np.concatenate(sample.order)[place])[same]
            grows = bool((steps >= 0).all()) and (steps > 0).mean() > 0.5
            if sample.dates:
                yield Doubt(
                    "note", f"column '{name}' says when: later rows may depend on earlier ones",
                    f"--split time:{name} holds out the last rows of every client",
                )  # fmt: skip
            elif grows:
                yield Doubt(
                    "note", f"column '{name}' grows from row to row within clients: rows seem to be in the order of time",
                    f"--split time holds out the last rows of every client, --split time:{name} in this column's order",
                )  # fmt: skip

    # -- the target ---------------------------------------------------------------------------------------------------
    def _target(self, name: str, facts: ColumnFacts) -> Iterator[Doubt]:
        values = np.concatenate(self.samples[name].order or [np.zeros(0)])
        values = values[np.isfinite(values)]
        if guess_task(self.roles, facts) == "classification":
            rows = facts.levels or {}
            rare = min(rows, key=lambda level: rows[level], default="")
            share = rows[rare] / max(sum(rows.values()), 1) if rows else 1.0
            if share < _RARE and 1 < len(rows) <= _FEW:
                yield Doubt(
                    "warning", f"classes are unequal: '{rare}' has {share:.1%} of the rows",
                    "accuracy says little then; look at log loss and at probabilities",
                )  # fmt: skip
            if facts.kind == "number" and len(rows) > 2 and facts.low >= 0 and self.roles.task == "auto":
                yield Doubt(
                    "note", f"target '{name}' has {len(rows)} different whole numbers, which are taken for classes",
                    f"--task regression takes them for numbers; {_COUNTS}",
                )  # fmt: skip
        elif len(values) >= _FEW and values.std() > 0:
            skew = float(((values - values.mean()) ** 3).mean() / values.std() ** 3)
            if facts.whole and 0 <= facts.low <= 2:
                yield Doubt(
                    "note",
                    f"target '{name}' holds whole numbers from {facts.low:g} on",
                    _COUNTS,
                )
            elif facts.low > 0 and skew > _SKEWED:
                yield Doubt(
                    "note", f"target '{name}' is above 0 and skewed ({skew:.1f}): a few large values decide what is fitted",
                    "positive and skewed: --outcome log-normal or gamma; or take its logarithm",
                )  # fmt: skip


def _alike(name: str, facts: ColumnFacts, *, is_target: bool) -> Iterator[Doubt]:
    """Levels that differ in case and blanks only."""
    if facts.kind != "text" or not facts.levels:
        return
    spelled: dict[str, list[str]] = {}
    for level in facts.levels:
        spelled.setdefault(" ".join(level.casefold().split()), []).append(level)
    several = [sorted(levels) for levels in spelled.values() if len(levels) > 1]
    if several:
        quoted = listed([f"'{level}'" for level in several[0]], 4)
        what = "classes of the target" if is_target else f"categories of column '{name}'"
        yield Doubt("warning", f"{what} differ in case or blanks only: {quoted}", "write them alike in the file")


def _share(texts: list[str], pattern: re.Pattern[str]) -> float:
    return sum(bool(pattern.fullmatch(text.strip())) for text in texts) / max(len(texts), 1)


def codes(values: pa.Array) -> np.ndarray:
    """[n] a whole number for every value, equal for equal values."""
    values = plain(values)
    found = None if is_text(values.type) else numbers(values)
    if found is not None:
        return (found + 0.0).view(np.int64)  # adding turns -0.0 into 0.0
    names, which = named(values)
    return np.asarray(np.array([*map(hash, names), hash("")], dtype=np.int64)[which])
