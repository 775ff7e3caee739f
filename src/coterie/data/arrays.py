# SPDX-License-Identifier: Apache-2.0
"""Clients from arrays: features, targets and the client of every row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from coterie.data.clients import Clients, check_options, check_outcome, held_out
from coterie.data.ragged import Ragged
from coterie.data.roles import read_as
from coterie.data.scan import AUTO_CLASSES
from coterie.data.schema import Column, Missing, Schema, Task, signed_times
from coterie.data.values import in_order, name_of
from coterie.errors import ConfigError, DataError
from coterie.limits import LARGEST_NUMBER, MOST_CLASSES, MOST_NAME
from coterie.outcome_names import TIMES, OutcomeName

__all__ = ["from_arrays", "times_and_events"]

_CHUNK = 1 << 22  # numbers looked at together


def from_arrays(
    X: Any,
    y: Any = None,
    groups: Any = None,
    *,
    feature_names: Sequence[str] | None = None,
    task: Task | Literal["auto"] = "auto",
    outcome: OutcomeName | None = None,
    test_size: float = 0.2,
    new_clients: float = 0.0,
    split: Literal["random", "time"] = "random",
    seed: int = 0,
    missing: Missing = "error",
) -> Clients:
    """Take clients from numpy arrays or torch tensors.

    Parameters
    ----------
    X : array
        [N, ...] features: rows of numbers, or images. Their precision is kept; integers become float32.
    y : array, optional
        [N] targets: numbers, or class names; [N, 2] times and events with outcome "cox".
    groups : array, optional
        [N] the client of every row; without it, all rows are one client's.
    feature_names : sequence of str, optional
        [D] names of the features; ``x0``, ``x1``, ... by default.
    task, outcome, test_size, new_clients, split, seed, missing
        As for `read`; rows that are held out by time are the last ones of every client in the arrays.

    Raises
    ------
    DataError
        If the arrays do not fit together, or hold what cannot be used.
    """
    check_options(missing=missing, task=task, test_size=test_size, new_clients=new_clients)
    check_outcome(outcome)
    task = read_as(task, outcome)
    if split not in ("random", "time"):
        raise ConfigError(f"split is '{split}'", "choose random, or time: the order of the arrays")
    x = _features(X)
    if y is not None and outcome in TIMES:
        y = times_and_events(y, len(x))
    target = None if y is None or task == "none" else _column(y, "y", len(x))
    if target is None and task not in ("auto", "none"):
        raise DataError(f"{task} needs targets", "pass y")
    owner = _names(groups, len(x))
    keep = _complete(x, target, owner, missing)
    if not keep.all():
        x, owner, target = x[keep], owner[keep], None if target is None else target[keep]
    labels, task, classes = _targets(target, task, x.dtype, owner)
    names = _feature_names(feature_names, int(np.prod(x.shape[1:])))
    schema = Schema(
        client="client",
        target=None if labels is None else "target",
        columns=tuple(Column(name=name) for name in names),
        task=task,
        classes=classes,
        missing=missing,
        outcome=outcome,
        event="event" if outcome in TIMES else None,
    )
    rows = Ragged.from_groups(torch.from_numpy(x), None if labels is None else torch.from_numpy(labels), owner)
    assert rows.origin is not None
    rows = replace(rows, origin=torch.from_numpy(np.flatnonzero(keep))[rows.origin], in_time=split == "time")
    dropped = int((~keep).sum())
    return held_out(rows, schema, test_size=test_size, new_clients=new_clients, seed=seed, dropped_rows=dropped)


def times_and_events(y: Any, n: int) -> np.ndarray:
    """[n] times, below zero where there was no event, of two columns."""
    given = _array(y, "y")
    if given.shape != (n, 2) or given.dtype.kind not in "biuf":
        raise DataError(
            f"y has shape {given.shape}, and times to an event need two columns of numbers",
            "pass y with shape (n, 2): times, and 1 where the event happened or 0 where it did not",
        )
    times, events = given.astype(np.float64).T
    return signed_times(times, events, "y[:, 0]", "y[:, 1]")


def _array(values: Any, what: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # numpy has no such type
        return np.asarray(values.numpy())
    try:
        return np.asarray(values)
    except ValueError as error:
        raise DataError(f"{what} has rows of different lengths", "give every row the same length") from error


def _features(X: Any) -> np.ndarray:
    """[N, ...] floats that torch can take over."""
    if hasattr(X, "tocsr"):
        raise DataError("X is sparse, and sparse arrays are not supported", "pass X.toarray()")
    x = _array(X, "X")
    if x.dtype.kind == "c":
        raise DataError("Complex data not supported: X has complex numbers", "take their real parts: X.real")
    if x.dtype == object:
        try:
            x = x.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"X has a value that is not numeric: {error}", "convert it: X.astype('float64')") from None
    if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
        raise DataError(f"X has dtype {x.dtype}, which is not numeric", "convert it: X.astype('float64')")
    if x.ndim < 2:
        raise DataError(f"X has shape {x.shape}, and needs rows and features", "for a single feature, X.reshape(-1, 1)")
    if not x.size:
        raise DataError(
            f"X has shape {x.shape}, so there is nothing in it", "at least one row and one feature are needed"
        )
    kind = x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.dtype(np.float32)
    x = np.ascontiguousarray(x, dtype=kind)
    return x if x.flags.writeable else x.copy()


def _column(values: Any, what: str, n: int) -> np.ndarray:
    """[n] one value for every row of X."""
    column = _array(values, what)
    if column.ndim == 2 and column.shape[1] == 1:
        column = column[:, 0]
    if column.ndim != 1:
        raise DataError(
            f"{what} has shape {column.shape}, and needs one value for each row", f"pass {what} with shape ({n},)"
        )
    if len(column) != n:
        raise DataError(f"{what} has {len(column)} values and X has {n} rows", f"give {what} one value for each row")
    return column


def _names(groups: Any, n: int) -> np.ndarray:
    """[n] the client of every row, as text; empty where it is missing."""
    if groups is None:
        return np.full(n, "client")
    column = _column(groups, "groups", n)
    if column.dtype == object:
        return np.array(_short([name_of(value) for value in column]))
    different, which = np.unique(column, return_inverse=True)
    return np.array(_short([name_of(value) for value in different.tolist()]))[which]


def _short(names: list[str], what: str = "groups has a client whose name has") -> list[str]:
    """Refuse a name that is too long: in an array all names take as much room as the longest."""
    longest = max(names, key=len, default="")
    if len(longest) > MOST_NAME:
        raise DataError(
            f"{what} {len(longest):,} characters; the limit is {MOST_NAME:,}",
            "give it a shorter name",
        )
    return names


def _complete(x: np.ndarray, y: np.ndarray | None, owner: np.ndarray, missing: Missing) -> np.ndarray:
    """[N] which rows to keep, by the choice about missing values."""
    gaps = {
        "X": _rows_with_nan(x, owner),
        "y": np.zeros(len(x), bool) if y is None else _without_value(y),
        "groups": owner == "",
    }
    for what, where in gaps.items():
        if missing == "error" and where.any():
            way_out = "missing='mean' (fill NaN with the federated mean) or missing='drop' (leave those rows out)"
            raise DataError(f"{what} has missing values in {int(where.sum())} rows", way_out)
    without = gaps["y"] | gaps["groups"]
    keep: np.ndarray = ~(without if missing == "mean" else without | gaps["X"])
    if not keep.any():
        raise DataError(f"every one of the {len(x)} rows has a missing value", "fill them in, or missing='mean'")
    return keep


def _rows_with_nan(x: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """[N] which rows have missing values; infinite ones, and those beyond the limit, are refused."""
    flat = x.reshape(len(x), -1)
    gaps, limit = np.zeros(len(x), dtype=bool), _limit(x.dtype)
    step = max(1, _CHUNK // flat.shape[1])
    for start in range(0, len(x), step):
        part = flat[start : start + step]
        if np.abs(part).max() <= limit:
            continue
        if np.isinf(part).any():
            raise DataError("X has infinite values", "correct them, or leave those rows out")
        if (far := np.argwhere(np.abs(part) > limit)).size:
            row, column = far[0]
            raise _too_large(f"column {column} of X", part[row, column], owner[start + row])
        gaps[start : start + step] = np.isnan(part).any(1)
    return gaps


def _limit(kind: np.dtype) -> float:
    """The largest number that is taken, in a precision that may not reach so far."""
    return min(LARGEST_NUMBER, float(np.finfo(kind).max))


def _too_large(what: str, value: float, client: str) -> DataError:
    said = (
        f"{what} has a number of client '{client}' that is too large: {abs(value):.3g}; the limit is {LARGEST_NUMBER:g}"
    )
    return DataError(said, "correct it, or choose a larger unit")


def _without_value(y: np.ndarray) -> np.ndarray:
    if y.dtype.kind == "f":
        return np.asarray(np.isnan(y))
    if y.dtype == object:
        return np.array([name_of(value) == "" for value in y])
    return np.asarray(y == "") if y.dtype.kind == "U" else np.zeros(len(y), dtype=bool)


def _targets(
    y: np.ndarray | None, task: Task | Literal["auto"], kind: np.dtype, owner: np.ndarray
) -> tuple[np.ndarray | None, Task, tuple[str, ...]]:
    """Turn targets into class numbers or real numbers: (values, task, class names)."""
    if y is None:
        return None, "none", ()
    y = _usable(y, owner)
    different = np.unique(y)
    if task == "auto":
        few = y.dtype.kind in "bU" or (
            len(different) <= AUTO_CLASSES and bool((different == np.floor(different)).all())
        )
        task = "classification" if few else "regression"
    if len(different) == 1:
        what = "has only one class," if task == "classification" else "is the same in every row,"
        raise DataError(f"y {what} {different[0]}", "there must be something to predict")
    if task == "regression":
        return _reals(y, kind), "regression", ()
    names = [name_of(value) for value in different.tolist()]
    if len(names) > MOST_CLASSES:
        raise DataError(f"y has {len(names):,} classes; the limit is {MOST_CLASSES:,}", "task='regression'")
    classes = in_order(set(names))
    places = np.array([classes.index(name) for name in names], dtype=np.int64)
    return places[np.searchsorted(different, y)], "classification", classes


def _usable(y: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """[N] targets as numbers or text."""
    if y.dtype == object and all(isinstance(value, str) for value in y):
        y = y.astype(str)
    if y.dtype.kind not in "biufU":
        raise DataError(f"y has dtype {y.dtype}, neither numbers nor text", "turn it into numbers or text first")
    if y.dtype.kind == "f" and np.isinf(y).any():
        raise DataError("y has infinite values", "correct them, or leave those rows out")
    if y.dtype.kind == "f" and np.abs(y).max() > _limit(y.dtype):
        far = int(np.abs(y).argmax())
        raise _too_large("y", y[far], owner[far])
    return y


def _reals(y: np.ndarray, kind: np.dtype) -> np.ndarray:
    """[N] targets in the precision of the features."""
    if y.dtype.kind == "U":
        raise DataError(f"y holds text such as '{y[0]}' and regression needs numbers", "task='classification'")
    if np.abs(y.astype(np.float64)).max() > np.finfo(kind).max:
        raise DataError(f"y has values too large for {kind}", "pass X in double precision")
    return y.astype(kind)


def _feature_names(names: Sequence[str] | None, d: int) -> Sequence[str]:
    if names is None:
        return [f"x{i}" for i in range(d)]
    if len(names) != d or len(set(names)) != d:
        raise DataError(
            f"there are {len(set(names))} different feature names and {d} features", "give each feature its own name"
        )
    return _short([str(name) for name in names], "feature_names has a name of")
