# SPDX-License-Identifier: Apache-2.0
"""What users hand to estimators, as clients' rows: a `Clients`, or arrays with the client of every row."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.preparation import Scaling
from coterie.data.arrays import times_and_events
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.readers import from_arrays
from coterie.data.schema import Schema
from coterie.data.stand_ins import StandIns, needs_rows
from coterie.data.values import name_of
from coterie.errors import DataError
from coterie.outcome_names import OutcomeName

__all__ = ["as_clients", "as_rows", "check_shape", "classes_of", "in_given_order", "labelled"]


def as_clients(
    data: Any, y: Any, groups: Any, task: Literal["auto", "regression"] = "auto", outcome: OutcomeName | None = None
) -> Clients:
    """Take what `fit` is given."""
    if isinstance(data, Clients):
        if y is not None or groups is not None:
            raise DataError("clients have their own targets and names", "give y and groups with arrays only")
        return data if outcome in (None, data.schema.outcome) else data.with_outcome(outcome)
    if groups is None:
        raise DataError("fit needs to know the client of each row", "pass groups=, or read a file with coterie.read")
    return from_arrays(data, y, groups, test_size=0.0, task="auto" if y is None else task, outcome=outcome)


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
    if groups is None and not alone:
        raise DataError("the client of each row is not given", "pass groups=")
    rows = from_arrays(data, None, groups, task="none", test_size=0.0, missing="mean").train
    names = _names(groups, len(data))
    if rows.layout.n_rows != len(names):
        raise DataError("groups has missing values", "name the client of every row")
    if y is None:
        return rows
    return replace(rows, y=_targets(y, len(names), schema)[rows.order_of(names)])


def in_given_order(made: np.ndarray, rows: Ragged, data: Any, groups: Any) -> np.ndarray:
    """Bring values of stored rows into the order of arrays, or, of a `Clients`, client after client.  [N, ...]"""
    if isinstance(rows, StandIns):
        raise needs_rows("a value for every row")
    if isinstance(data, Clients | Ragged):
        return np.asarray(made[np.argsort(rows.owners, kind="stable")])
    out = np.empty_like(made)
    out[rows.order_of(_names(groups, len(made)))] = made
    return out


def check_shape(rows: Ragged, scaling: Scaling) -> None:
    """Refuse rows of other features than in training."""
    if rows.shape != tuple(scaling.mean.shape):
        raise DataError(
            f"rows have shape {rows.shape}, training rows had {tuple(scaling.mean.shape)}",
            "give the same features as in training",
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
