# SPDX-License-Identifier: Apache-2.0
"""What each column of a table is used for."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from coterie.data.schema import Missing, Schema, Task
from coterie.data.sources import Source, listed, similar
from coterie.data.values import is_missing
from coterie.errors import ConfigError, DataError
from coterie.outcome_names import OutcomeName, task_of

__all__ = ["Roles", "assign_roles", "read_as", "roles_of"]


@dataclass(frozen=True)
class Roles:
    """What each column is used for, as the user asked."""

    client: str
    target: str | None
    features: tuple[str, ...]
    categorical: frozenset[str] = frozenset()
    missing: Missing = "error"
    task: Task | Literal["auto"] = "auto"
    outcome: OutcomeName | None = None
    event: str | None = None
    when: str | None = None  # the column that says when, if a client's rows are put into the order of time

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that need to be read."""
        last = (self.target, None if self.target is None else self.event, self.when)
        return tuple(dict.fromkeys([*self.features, *(name for name in last if name is not None), self.client]))

    def kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Leave out the rows that the choice about missing values leaves out."""
        if self.missing == "error":
            return batch
        must = set(self.used) if self.missing == "drop" else {*self.used[len(self.features) :], self.when} - {None}
        gaps = np.logical_or.reduce([is_missing(batch.column(name)) for name in must])
        return batch.filter(pa.array(~gaps)) if gaps.any() else batch


def assign_roles(
    source: Source,
    *,
    target: str | None,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    categorical: Collection[str] = (),
    missing: Missing = "error",
    task: Task | Literal["auto"] = "auto",
    outcome: OutcomeName | None = None,
    event: str | None = None,
    when: str | None = None,
) -> Roles:
    """Give every column its role, or say why that cannot be."""
    task = read_as(task, outcome)
    client, columns = source.client, source.columns
    features = None if features is None else _names(features)
    exclude, categorical = _names(exclude), _names(categorical)
    _check_known(source, "client column", [client])
    _check_known(source, "target column", [] if target is None else [target])
    _check_known(source, "event column", [] if event is None else [event])
    _check_known(source, "column", [*(features or ()), *exclude, *categorical, *([] if when is None else [when])])
    _check_apart(client, target, features or (), task)
    taken = {client, target, event, *exclude}
    chosen = tuple(name for name in columns if name not in taken and (features is None or name in features))
    if not chosen:
        raise DataError(f"'{source.path}' has no feature columns left", f"columns are: {listed(columns)}")
    if "" in chosen:
        raise DataError(
            f"column {columns.index('') + 1} of '{source.path}' has no name",
            "it may be a row number: leave it out with --exclude '', or name it",
        )
    target = None if task == "none" else target
    return Roles(client, target, chosen, frozenset(categorical), missing, task, outcome, event, when)


def roles_of(schema: Schema, source: Source) -> Roles:
    """Give the columns of another table the roles that they have in a schema."""
    for name in (schema.client, *(column.name for column in schema.columns)):
        if name not in source.columns:
            raise DataError(
                f"'{source.path}' has no column '{name}', which the model needs", similar(name, source.columns)
            )
    there = schema.task != "none" and schema.target in source.columns
    there = there and (schema.event is None or schema.event in source.columns)
    return Roles(
        client=schema.client,
        target=schema.target if there else None,
        features=tuple(column.name for column in schema.columns),
        categorical=frozenset(column.name for column in schema.columns if column.kind == "categorical"),
        missing=schema.missing,
        task=schema.task,
        outcome=schema.outcome,
        event=schema.event if there else None,
    )


def read_as(task: Task | Literal["auto"], outcome: OutcomeName | None) -> Task | Literal["auto"]:
    """What the target is read as, given its outcome; both may be said, if they agree."""
    if outcome is None:
        return task
    if task not in ("auto", task_of(outcome)):
        raise ConfigError(f"task is {task}, and outcome {outcome} is {task_of(outcome)}", "leave one of them out")
    return task_of(outcome)


def _names(given: Collection[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _check_known(source: Source, what: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in source.columns:
            raise DataError(f"'{source.path}' has no {what} '{name}'", similar(name, source.columns))


def _check_apart(client: str, target: str | None, features: Sequence[str], task: str) -> None:
    if client == target:
        raise DataError(f"column '{client}' cannot be both client and target", "choose another --target")
    for name in features:
        if name in (client, target):
            raise DataError(f"column '{name}' is the client or the target and cannot be a feature too", "leave it out")
    if target is None and task in ("regression", "classification"):
        raise DataError(f"{task} needs a target column", "name it with --target COLUMN")
