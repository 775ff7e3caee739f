# SPDX-License-Identifier: Apache-2.0
"""The first pass over a table: who has how many rows, and what every column holds."""

import math
from typing import Literal

import numpy as np
import pyarrow as pa

from coterie.data.roles import Roles
from coterie.data.schema import Column, Schema, Task
from coterie.data.values import MISSING, in_order, is_date, is_missing, is_text, name_of, named, numbers, plain
from coterie.limits import LARGEST_NUMBER, MOST_CLASSES, MOST_LEVELS

__all__ = ["AUTO_CLASSES", "ColumnFacts", "Scan", "described", "guess_task"]

AUTO_CLASSES = 10  # whole numbers with at most so many different values are taken for classes

Kind = Literal["number", "truth", "text", "date", "other"]


class ColumnFacts:
    """What a stream of values tells about one column.

    Parameters
    ----------
    most_levels : int
        Different values to remember; with more, none are.
    """

    def __init__(self, most_levels: int = MOST_LEVELS) -> None:
        self.missing = self.infinite = self.finite = 0
        self.kinds: set[Kind] = set()
        self.stored = ""  # the Arrow type
        self.levels: dict[str, int] | None = {}  # name -> rows
        self.example = ""  # a text, to show why the column is no column of numbers
        self.low, self.high, self.mean, self.squares = math.inf, -math.inf, 0.0, 0.0
        self.whose = ""  # the client that has a number beyond the limit
        self.whole = True
        self._most = most_levels

    @property
    def kind(self) -> Kind | None:
        """What the column holds as a whole; None when it has no values."""
        if len(self.kinds) < 2:
            return next(iter(self.kinds), None)
        return "other" if "other" in self.kinds else "text"

    @property
    def constant(self) -> bool:
        """Whether all values are the same."""
        return self.low == self.high if self.kind == "number" else self.levels is not None and len(self.levels) == 1

    @property
    def reach(self) -> float:
        """The size of the largest finite number."""
        return max(-self.low, self.high)

    @property
    def std(self) -> float:
        """Standard deviation of the finite values."""
        return math.sqrt(self.squares / self.finite) if self.finite else math.nan

    def add(self, values: pa.Array, *, spelled: bool) -> None:
        """Take in some values; `spelled` when text may stand for numbers."""
        self.stored = str(values.type)
        a_category = pa.types.is_dictionary(values.type)
        gaps = is_missing(values)
        self.missing += int(gaps.sum())
        values = plain(values.filter(pa.array(~gaps)) if gaps.any() else values)
        if not len(values):
            return
        found = None
        if not a_category and (spelled or not is_text(values.type)) and "text" not in self.kinds:
            found = numbers(values)
        kind = _kind(values, found, spelled=spelled, a_category=a_category)
        self.kinds.add(kind)
        if kind == "text" and not self.example:
            self.example = _first_text(values)
        if found is not None:
            self._add_numbers(found)
        if kind != "other":
            self._add_levels(values)

    def _add_numbers(self, found: np.ndarray) -> None:
        finite = found[np.isfinite(found)]
        self.infinite += len(found) - len(finite)
        if len(finite):
            with np.errstate(over="ignore", invalid="ignore"):  # squares of huge values: their range is what matters
                self._add_finite(finite)

    def _add_finite(self, finite: np.ndarray) -> None:
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        self.whole = self.whole and bool((finite == np.floor(finite)).all())
        n, m = self.finite, len(finite)
        mean = finite.mean()
        shift = mean - self.mean
        self.squares += float(((finite - mean) ** 2).sum()) + shift**2 * n * m / (n + m)  # Chan's update
        self.mean += shift * m / (n + m)
        self.finite = n + m

    def _add_levels(self, values: pa.Array) -> None:
        if self.levels is None:
            return
        if len(values.unique()) > self._most:
            self.levels = None
            return
        names, which = named(values)
        for name, rows in zip(names, np.bincount(which, minlength=len(names)).tolist(), strict=True):
            self.levels[name] = self.levels.get(name, 0) + rows
        if len(self.levels) > self._most:
            self.levels = None


def _kind(values: pa.Array, found: np.ndarray | None, *, spelled: bool, a_category: bool) -> Kind:
    if a_category:
        return "text"
    if found is not None:
        truth = pa.types.is_boolean(values.type) or (
            is_text(values.type) and name_of(values[0].as_py()) in ("true", "false")
        )
        return "truth" if truth else "number"
    if (spelled or not is_text(values.type)) and is_date(values):
        return "date"
    return "text" if is_text(values.type) else "other"


def _first_text(values: pa.Array) -> str:
    """Find the first value that is no number; spelled-out numbers stand before it."""
    for value in values.to_pylist():
        try:
            float(value)
        except ValueError:
            return str(value)
    return str(values[0])


class Scan:
    """Rows of every client and facts about every column, gathered batch by batch."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.clients: dict[str, int] = {}  # name -> place in counts, in the order of appearance
        self.counts = np.zeros(0, dtype=np.int64)
        self.rows = self.dropped_rows = self.nameless = 0
        self.features = {name: ColumnFacts() for name in roles.features}
        self.target = None if roles.target is None else ColumnFacts(MOST_CLASSES)

    def add(self, batch: pa.RecordBatch, *, spelled: bool) -> np.ndarray:
        """Take in a batch; return the client number of every row, `MISSING` where it has none."""
        kept = self.roles.kept(batch)
        self.dropped_rows += batch.num_rows - kept.num_rows
        self.rows += kept.num_rows
        owner = self._number(kept.column(self.roles.client))
        columns = dict(self.features)
        if self.target is not None and self.roles.target is not None:
            columns[self.roles.target] = self.target
        for name, facts in columns.items():
            facts.add(kept.column(name), spelled=spelled)
            if facts.reach > LARGEST_NUMBER and not facts.whose:
                facts.whose = self._owner_of_largest(kept.column(name), owner)
        return owner

    def _owner_of_largest(self, values: pa.Array, owner: np.ndarray) -> str:
        """Who has the number that is too large; nobody's name if the row has none."""
        found = numbers(values)
        sizes = np.zeros(len(owner)) if found is None else np.nan_to_num(np.abs(found), nan=0.0, posinf=0.0)
        place = int(owner[sizes.argmax()])
        return next((name for name, number in self.clients.items() if number == place), "")

    def _number(self, values: pa.Array) -> np.ndarray:
        names, which = named(values)
        place = [self.clients.setdefault(name, len(self.clients)) if name else MISSING for name in names]
        owner: np.ndarray = np.array([*place, MISSING], dtype=np.int64)[which]
        counts = np.bincount(owner[owner >= 0], minlength=len(self.clients))
        counts[: len(self.counts)] += self.counts
        self.counts = counts
        self.nameless += int((owner < 0).sum())
        return owner


def guess_task(roles: Roles, target: ColumnFacts | None) -> Task:
    """Decide what the target is, where the user did not."""
    if target is None:
        return "none"
    if roles.task != "auto":
        return roles.task
    if target.kind != "number":
        return "classification"
    few = target.levels is not None and len(target.levels) <= AUTO_CLASSES
    return "classification" if few and target.whole else "regression"


def described(scan: Scan) -> Schema:
    """Write down the schema of a table in which no fault was found."""
    roles = scan.roles
    task = guess_task(roles, scan.target)
    classes = in_order(scan.target.levels or ()) if scan.target is not None and task == "classification" else ()
    columns = []
    for name, facts in scan.features.items():
        if name in roles.categorical or facts.kind == "text":
            columns.append(Column(name=name, kind="categorical", levels=in_order(facts.levels or ())))
        else:
            columns.append(Column(name=name))
    return Schema(
        client=roles.client,
        target=None if task == "none" else roles.target,
        columns=tuple(columns),
        task=task,
        classes=classes,
        missing=roles.missing,
        outcome=roles.outcome,
        event=roles.event,
    )
