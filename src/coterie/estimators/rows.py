# SPDX-License-Identifier: Apache-2.0
"""What users hand to estimators, as clients' rows: a `Clients`, or arrays or a data frame with the client of every row."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from coterie.algorithms.preparation import Scaling
from coterie.data.arrays import times_and_events
from coterie.data.clients import Clients
from coterie.data.frames import as_table, free_name, is_frame
from coterie.data.ragged import Ragged
from coterie.data.readers import from_arrays, read
from coterie.data.schema import Schema
from coterie.data.sources import similar
from coterie.data.stand_ins import StandIns, needs_rows
from coterie.data.values import name_of
from coterie.errors import ConfigError, DataError
from coterie.outcome_names import TIMES, OutcomeName

__all__ = ["as_clients", "as_rows", "check_shape", "classes_of", "in_given_order", "labelled", "target_values"]


def as_clients(
    data: Any,
    y: Any,
    groups: Any,
    task: Literal["auto", "regression"] = "auto",
    outcome: OutcomeName | None = None,
    sample_weight: Any = None,
) -> Clients:
    """Take what `fit` is given."""
    if isinstance(data, Clients):
        if y is not None or groups is not None or sample_weight is not None:
            raise DataError(
                "clients have their own targets and names",
                "give y, groups and sample_weight with arrays or frames only",
            )
        return data if outcome in (None, data.schema.outcome) else data.with_outcome(outcome)
    made = _as_clients(data, y, groups, task, outcome)
    if sample_weight is None:
        return made
    if outcome in TIMES:
        raise ConfigError("rows with times to an event cannot be weighed", "leave sample_weight out")
    return replace(made, train=replace(made.train, weight=_row_weights(sample_weight, made.train)))


def _row_weights(given: Any, rows: Ragged) -> Tensor:
    """[N] as rows are stored."""
    weight = np.asarray(given, dtype=np.float64).reshape(-1)
    if len(weight) != rows.layout.n_rows:
        raise DataError(
            f"sample_weight has {len(weight)} values and there are {rows.layout.n_rows} rows", "give every row a weight"
        )
    if not np.isfinite(weight).all() or (weight < 0).any() or not weight.any():
        raise DataError("sample_weight must be finite, not negative, and above 0 somewhere", "correct the weights")
    assert rows.origin is not None
    return torch.from_numpy(weight)[rows.origin]


def _as_clients(
    data: Any, y: Any, groups: Any, task: Literal["auto", "regression"], outcome: OutcomeName | None
) -> Clients:
    if groups is None:
        raise DataError("fit needs to know the client of each row", "pass groups=, or read a file with coterie.read")
    if is_frame(data):
        return _read_frame(data, y, groups, task, outcome)
    return from_arrays(data, y, groups, test_size=0.0, task="auto" if y is None else task, outcome=outcome)


def target_values(data: Any, y: Any) -> Any:
    """Targets in arrays that were given to `fit`, if any: what predictions are made of; y may name a frame's column."""
    return np.asarray(as_table(data).column(y)) if isinstance(y, str) and is_frame(data) else y


def _read_frame(
    data: Any, y: Any, groups: Any, task: Literal["auto", "regression"], outcome: OutcomeName | None
) -> Clients:
    """Read a data frame as a file is read: levels of categories, classes and names of columns are kept."""
    table = as_table(data)
    table, client = _with_column(table, groups, "client", "groups")
    target = event = None
    if y is not None and outcome in TIMES:
        y, happened = _times(y)
        table, event = _with_column(table, happened, "event", "y")
    if y is not None:
        table, target = _with_column(table, y, "target", "y")
    task = "auto" if y is None else task
    return read(table, client=client, target=target, test_size=0.0, task=task, outcome=outcome, event=event)


def _times(y: Any) -> tuple[Any, Any]:
    """Times and events: the names of two columns, or two columns of numbers."""
    if isinstance(y, tuple | list) and len(y) == 2 and all(isinstance(name, str) for name in y):
        return y[0], y[1]
    given = np.asarray(y)
    if isinstance(y, str) or given.ndim != 2 or given.shape[1] != 2:
        raise DataError(
            "times to an event need two columns", "pass y with shape (n, 2), or the names of both: y=[TIME, EVENT]"
        )
    return given[:, 0], given[:, 1]


def _with_column(table: pa.Table, given: Any, usual: str, what: str) -> tuple[pa.Table, str]:
    """A table with a further column, unless `given` names one of its own.  -> table, name"""
    if isinstance(given, str):
        if given not in table.column_names:
            raise DataError(f"the data frame has no column '{given}'", similar(given, table.column_names))
        return table, given
    values = np.asarray(given).reshape(-1)
    if len(values) != table.num_rows:
        raise DataError(
            f"{what} has {len(values)} values and the data frame has {table.num_rows} rows",
            f"give {what} one value for each row",
        )
    own = getattr(given, "name", None)
    name = free_name(own if isinstance(own, str) and own else usual, table.column_names)
    return table.append_column(name, pa.array(values.tolist() if values.dtype == object else values)), name


def as_rows(data: Any, y: Any, groups: Any, schema: Schema, *, alone: bool) -> Ragged:
    """Take rows of known columns: as they are, the held-out part of a `Clients`, or arrays.

    Parameters
    ----------
    schema : Schema
        Of the training data.
    alone : bool
        Whether all clients are served alike, so that the rows' clients need not be named.
    """
    if isinstance(data, Ragged):
        return data
    if isinstance(data, Clients):
        _check_same(schema, data.schema)
        return data.train if data.test is None else data.test
    if is_frame(data):
        return _frame_rows(as_table(data), y, groups, schema, alone=alone)
    if groups is None and not alone:
        raise DataError("the client of each row is not given", "pass groups=")
    rows = from_arrays(data, None, groups, task="none", test_size=0.0, missing="mean").train
    names = _names(groups, len(data))
    if rows.layout.n_rows != len(names):
        raise DataError("groups has missing values", "name the client of every row")
    if y is None:
        return rows
    assert rows.origin is not None
    return replace(rows, y=_targets(y, len(names), schema)[rows.origin])


def _frame_rows(table: pa.Table, y: Any, groups: Any, schema: Schema, *, alone: bool) -> Ragged:
    """Rows of a data frame by the names of its columns, in whatever order they stand."""
    own = schema.client in table.column_names
    if groups is None and not own and not alone:
        raise DataError(
            f"the client of each row is not given, and the data frame has no column '{schema.client}'", "pass groups="
        )
    if isinstance(groups, str) or (groups is None and own):
        _, client = _with_column(table, schema.client if groups is None else groups, "client", "groups")
        groups = np.array([name_of(value) for value in table.column(client).to_pylist()])
    table = _known_columns(table, schema)
    names = _names(groups, table.num_rows)
    if (names == "").any():
        raise DataError("groups has missing values", "name the client of every row")
    if len(names) != table.num_rows:
        raise DataError(
            f"groups has {len(names)} values and there are {table.num_rows} rows", "name every row's client"
        )
    if schema.event is not None and y is not None:
        both = [_with_column(table, part, "target", "y") for part in _times(y)]
        y = np.stack([np.asarray(own.column(name)) for own, name in both], 1)
    elif isinstance(y, str):
        table, _ = _with_column(table, y, "target", "y")
        y = np.asarray(table.column(y))
    if y is not None and schema.target in table.column_names:
        table = table.drop_columns([schema.target])
    x, found = schema.encode(table)
    target = None if found is None else torch.tensor(found)
    target = target if y is None else _targets(y, len(names), schema)
    return Ragged.from_groups(torch.from_numpy(x), target, names)


def _known_columns(table: pa.Table, schema: Schema) -> pa.Table:
    """Refuse a frame that lacks columns of the training; one without names then is taken by the places of its columns."""
    wanted = [column.name for column in schema.columns]
    lacking = [name for name in wanted if name not in table.column_names]
    if not lacking:
        return table
    features = [name for name in table.column_names if name not in (schema.client, schema.target, schema.event)]
    if wanted == [f"x{i}" for i in range(len(wanted))] and len(features) == len(wanted):
        return table.rename_columns([dict(zip(features, wanted, strict=True)).get(n, n) for n in table.column_names])
    raise DataError(
        f"the data frame has no column '{lacking[0]}', which the model was fitted with", similar(lacking[0], features)
    )


def in_given_order(made: np.ndarray, rows: Ragged, data: Any) -> np.ndarray:
    """Values of stored rows in the order of arrays or frames; of a `Clients`, in the order of its own rows.  [N, ...]"""
    if isinstance(rows, StandIns):
        raise needs_rows("a value for every row")
    if isinstance(data, Clients | Ragged):
        return made
    assert rows.origin is not None
    out = np.empty_like(made)
    out[rows.origin.numpy()] = made
    return out


def check_shape(rows: Ragged, scaling: Scaling, model: str = "it") -> None:
    """Refuse rows of other features than in training."""
    given, known = rows.shape, tuple(scaling.mean.shape)
    if given != known:
        flat = len(given) == len(known) == 1
        said = (f"{given[0]} features", f"{known[0]} features") if flat else (f"shape {given}", f"shape {known}")
        raise DataError(
            f"X has {said[0]}, but {model} is expecting {said[1]} as input", "give the same features as in training"
        )


def classes_of(schema: Schema, y: Any) -> np.ndarray:
    """What predictions are made of: values of the array that was given in training, or names."""
    if y is None or schema.task != "classification":
        return np.asarray(schema.classes)
    values = np.unique(np.asarray(y))
    names = [name_of(value) for value in values.tolist()]
    return np.asarray(values[[names.index(name) for name in schema.classes]])


def labelled(rows: Ragged) -> Ragged:
    """Refuse rows without targets."""
    if rows.y is None:
        raise DataError("there are no targets, and clients are assigned by labelled rows", "pass y")
    return rows


def _names(groups: Any, n: int) -> np.ndarray:
    """[N] the client of each row, spelled as in training; without groups, all rows are one client's."""
    if groups is None:
        return np.full(n, "client")
    given = np.asarray(groups).reshape(-1)
    if given.dtype == object:
        return np.array([name_of(value) for value in given])
    different, which = np.unique(given, return_inverse=True)
    return np.array([name_of(value) for value in different.tolist()])[which]


def _check_same(known: Schema, other: Schema) -> None:
    """Refuse clients whose numbers mean something else than in training."""
    same_target = other.task == "none" or (other.task, other.classes) == (known.task, known.classes)
    same_events = other.task == "none" or other.event == known.event
    if other.columns != known.columns or not same_target or not same_events:
        what = (
            "features or category levels" if other.columns != known.columns else "classes" if same_events else "events"
        )
        raise DataError(
            f"these clients have other {what} than the training data",
            "read them in the same way: coterie.read_with(model.schema_, path)",
        )


def _targets(y: Any, n: int, schema: Schema) -> Tensor:
    """[N] targets as in training: class numbers, or real numbers."""
    y = times_and_events(y, n) if schema.event is not None else np.asarray(y)
    if y.shape not in ((n,), (n, 1)):
        raise DataError(f"y has shape {y.shape} and there are {n} rows", "give one target for each row")
    if schema.task == "classification":
        return _class_numbers(y.reshape(-1), schema.classes)
    if y.dtype.kind not in "biuf" or not np.isfinite(y).all():
        raise DataError("y has values that are not finite numbers", "leave those rows out")
    return torch.from_numpy(y.reshape(-1).astype(np.float64))


def _class_numbers(y: np.ndarray, classes: tuple[str, ...]) -> Tensor:
    number = {name: i for i, name in enumerate(classes)}
    names = [name_of(value) for value in y.tolist()]
    strange = sorted(set(names) - set(number))
    if strange:
        raise DataError(f"class '{strange[0]}' was not in the training data", f"training had {', '.join(classes)}")
    return torch.tensor([number[name] for name in names])
