# SPDX-License-Identifier: Apache-2.0
"""Which columns a table has, and how its rows become numbers: all that a later file needs to be read the same way."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from coterie.data.values import MISSING, UNKNOWN, coded, in_order, name_of, numbers, plain
from coterie.errors import DataError
from coterie.limits import MOST_FEATURES, MOST_NAME
from coterie.outcome_names import OutcomeName

__all__ = ["Column", "Missing", "Schema", "Task", "disagreement", "joined", "signed_times"]

Task = Literal["regression", "classification", "none"]
Missing = Literal["error", "mean", "drop"]
_Name = Annotated[str, Field(max_length=MOST_NAME)]


class Column(BaseModel):
    """A feature column.

    Attributes
    ----------
    name : str
        Its name in the file.
    kind : {"numeric", "categorical"}
        One number, or one indicator for each level.
    levels : tuple of str
        The levels of a categorical column, sorted; none for a numeric one.
    """

    model_config = ConfigDict(frozen=True)

    name: _Name
    kind: Literal["numeric", "categorical"] = "numeric"
    levels: Annotated[tuple[_Name, ...], Field(max_length=MOST_FEATURES)] = ()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What the column is called once it is numbers."""
        return (self.name,) if self.kind == "numeric" else tuple(f"{self.name}={level}" for level in self.levels)


class Schema(BaseModel):
    """The columns of a data set and what they are used for.

    Attributes
    ----------
    client : str
        The column that names the client of a row.
    target : str or None
        The column to predict.
    columns : tuple of Column
        The feature columns, in the order of the file.
    task : {"regression", "classification", "none"}
        What the target is.
    classes : tuple of str
        Class names, sorted: by value when they all are numbers.
    missing : {"error", "mean", "drop"}
        What is done about missing values.
    outcome : str or None
        What the target is, where it is neither a plain number nor one of several classes.
    event : str or None
        Where the target is a time to an event: the column that says whether it happened, or the row was censored then.
    """

    model_config = ConfigDict(frozen=True)

    client: _Name
    target: _Name | None = None
    columns: Annotated[tuple[Column, ...], Field(max_length=MOST_FEATURES)]
    task: Task = "none"
    classes: Annotated[tuple[_Name, ...], Field(max_length=MOST_FEATURES)] = ()
    missing: Missing = "error"
    outcome: OutcomeName | None = None
    event: _Name | None = None

    @property
    def n_features(self) -> int:
        """How many numbers a row becomes."""
        return sum(1 if column.kind == "numeric" else len(column.levels) for column in self.columns)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """[D] the name of each number, such as ``age`` or ``ward=icu``."""
        return tuple(name for column in self.columns for name in column.feature_names)

    def encode(self, table: pa.Table | pa.RecordBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Turn rows into numbers.

        A missing number is NaN; a missing or unknown level is a zero in every indicator.

        Parameters
        ----------
        table : pyarrow Table or RecordBatch
            Must have the feature columns; text is parsed where numbers are expected.

        Returns
        -------
        x : ndarray
            [n, D] float64.
        y : ndarray or None
            [n] class numbers (int64) or values (float64); None when the table has no target column. A time that is
            censored is below zero.
        """
        x, y, _ = self.encode_counting(table)
        return x, y

    def encode_counting(self, table: pa.Table | pa.RecordBatch) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Turn rows into numbers as `encode` does, and count the cells whose level is unknown."""
        x = np.zeros((table.num_rows, self.n_features))
        at = unknown = 0
        for column in self.columns:
            values = _column(table, column.name)
            if column.kind == "numeric":
                x[:, at] = _as_numbers(values, column.name)
                at += 1
            else:
                level = coded(values, _places(column.levels))
                known = np.flatnonzero(level >= 0)
                x[known, at + level[known]] = 1.0
                at += len(column.levels)
                unknown += int((level == UNKNOWN).sum())
        return x, self._target(table), unknown

    def _target(self, table: pa.Table | pa.RecordBatch) -> np.ndarray | None:
        needed = [name for name in (self.target, self.event) if name is not None]
        if self.target is None or self.task == "none" or not set(needed) <= set(table.schema.names):
            return None
        values = _column(table, self.target)
        if self.event is not None:
            events = _as_numbers(_column(table, self.event), self.event)
            return signed_times(_as_numbers(values, self.target), events, self.target, self.event)
        if self.task == "regression":
            return _as_numbers(values, self.target)
        label = coded(values, _places(self.classes))
        if (label == MISSING).any():
            raise DataError(f"target '{self.target}' has missing values", "leave those rows out with --missing drop")
        if (label == UNKNOWN).any():
            stranger = name_of(values[int((label == UNKNOWN).argmax())].as_py())
            known = ", ".join(self.classes[:10])
            raise DataError(f"target '{self.target}' has a class '{stranger}' that is not known", f"known are: {known}")
        return label


def signed_times(times: np.ndarray, events: np.ndarray, target: str, event: str) -> np.ndarray:
    """[n] times, below zero where there was no event; refused where they cannot be that."""
    if np.isnan(times).any() or np.isnan(events).any():
        missing = target if np.isnan(times).any() else event
        raise DataError(f"'{missing}' has missing values", "leave those rows out with --missing drop")
    if not (times > 0).all():
        raise DataError(f"'{target}' is {times.min():g} in a row, and times must be above 0", "correct the cells")
    if not np.isin(events, (0, 1)).all():
        wrong = events[~np.isin(events, (0, 1))][0]
        raise DataError(f"'{event}' is {wrong:g} in a row, and must be 1 (it happened) or 0 (censored)", "recode it")
    return np.where(events == 1, times, -times)


def disagreement(one: tuple[str, Schema], other: tuple[str, Schema]) -> tuple[str, str] | None:
    """Say why rows of two owners (called so) do not go together, and the way out; levels and classes may differ."""
    (first, a), (second, b) = one, other
    for what in ("target", "task", "outcome", "event", "missing"):
        if getattr(a, what) != getattr(b, what):
            return (
                f"{second} has {what} '{getattr(b, what)}' and {first} has '{getattr(a, what)}'",
                "give both the same options, and --task where it cannot be guessed from few rows",
            )
    for left, right in zip(a.columns, b.columns, strict=False):
        if (left.name, left.kind) != (right.name, right.kind):
            return (
                f"{second} has column '{right.name}' ({right.kind}) where {first} has '{left.name}' ({left.kind})",
                "give both the same columns",
            )
    if len(a.columns) != len(b.columns):
        counts = f"{second} has {len(b.columns)} columns and {first} has {len(a.columns)}"
        return counts, "give both the same columns"
    return None


def joined(schemas: Sequence[Schema]) -> Schema:
    """The schema with the levels and classes of all, which have the same columns."""
    first = schemas[0]
    columns = tuple(
        column.model_copy(update={"levels": in_order({level for s in schemas for level in s.columns[i].levels})})
        for i, column in enumerate(first.columns)
    )
    classes = in_order({name for schema in schemas for name in schema.classes})
    return first.model_copy(update={"columns": columns, "classes": classes})


def _column(table: pa.Table | pa.RecordBatch, name: str) -> pa.Array:
    if name not in table.schema.names:
        raise DataError(f"there is no column '{name}'", f"columns are: {', '.join(table.schema.names[:20])}")
    return plain(table.column(name))


def _as_numbers(values: pa.Array, name: str) -> np.ndarray:
    found = numbers(values)
    if found is None:
        text = next((str(v) for v in values if numbers(pa.array([v.as_py()], values.type)) is None), str(values.type))
        raise DataError(
            f"column '{name}' holds '{text}' where a number is expected", "correct the cell, or leave it empty"
        )
    return found


def _places(names: tuple[str, ...]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}
