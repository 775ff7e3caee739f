# SPDX-License-Identifier: Apache-2.0
"""What models of a target say of the rows of a file, labelled or not, as a table in the file's order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from coterie.cli.tables.files import read_features, read_filled, unknown_levels, with_target
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError
from coterie.estimators import Federated, Personalised
from coterie.estimators.supervised import Served
from coterie.methods.intervals import How

__all__ = ["Asked", "predictions"]

Said = tuple[pa.Table, list[str]]  # a table, and what a user should know


@dataclass(frozen=True)
class Asked:
    """What a prediction is to hold.

    Attributes
    ----------
    threshold : float, optional
        Of two classes, the probability of the second from which on it is predicted; that of the fit by default.
    interval : float, optional
        Coverage of intervals.
    how : str, optional
        What these come from; calibration rows by default, where there were any.
    """

    threshold: float | None = None
    interval: float | None = None
    how: How | None = None


def predictions(model: Federated | Personalised, path: Path, asked: Asked = Asked()) -> Said:  # noqa: B008
    """Predict every row of a file, in its order.  -> table, warnings

    Columns: client, label (of clusters) or known, prediction; of classes a probability of each; with an interval, lower and
    upper. A client that is not known gets a model by those of its rows that have a target, and each of these rows is
    predicted without its own; without any, it is served by the population model.
    """
    _check(model, asked)
    clients, names = read_features(model.schema_, path)
    rows = clients.train
    labelled = None if bool(model.knows(rows.names).all()) else _labelled(model, path, len(names))
    prepared = model.prepared(rows)
    found = model.served(prepared, None if labelled is None else model.prepared(labelled[0]))
    out = _in_file(rows, names, _columns(model, prepared, found, asked))
    if labelled is not None:
        _without_own_target(model, labelled, names, out, asked, found, rows)
    columns: dict[str, Any] = {"client": names}
    if isinstance(model, Federated):
        label = torch.where(found.known | found.fitted, found.own, -1).numpy()[_in_file_owner(rows, names)]
        columns["label"] = pa.array(label, mask=label < 0)
    else:
        columns["known"] = found.known.numpy()[_in_file_owner(rows, names)]
    alone = int((~found.known & ~found.fitted).sum())
    said = unknown_levels(clients)
    if alone:
        who = "1 new client has" if alone == 1 else f"{alone} new clients have"
        said.append(f"{who} no labelled rows, and the model for all is used")
    return pa.table(columns | {name: values.tolist() for name, values in out.items()}), said


def _check(model: Federated | Personalised, asked: Asked) -> None:
    if asked.interval is not None and model.schema_.task != "regression":
        raise ConfigError("intervals are of numbers, and the target has classes", "their probabilities are written")
    if asked.interval is not None and model.schema_.outcome:
        raise ConfigError(
            f"intervals are of plain numbers, and the target is {model.schema_.outcome}", "leave them out"
        )
    if asked.threshold is not None and model.schema_.task != "classification":
        raise ConfigError("a threshold is for classes, and the target has none", "leave it out")


def _columns(model: Federated | Personalised, prepared: Ragged, found: Served, asked: Asked) -> dict[str, np.ndarray]:
    """What is written of every row, in the order of storage."""
    columns = {"prediction": model.decided(found.outputs, asked.threshold)}
    if model.schema_.task == "classification":
        p = model.probabilities(found.outputs)
        return columns | {f"probability_{name}": p[:, k] for k, name in enumerate(model.schema_.classes)}
    if asked.interval is None:
        return columns
    ends = model.interval(prepared, found, asked.interval, asked.how)
    return columns | {"lower": ends[:, 0], "upper": ends[:, 1]}


def _labelled(model: Federated | Personalised, path: Path, n: int) -> tuple[Ragged, np.ndarray] | None:
    """The rows that have a target, and where they stand in the file."""
    there = with_target(model.schema_, path, n)
    if not there.any():
        return None
    return read_filled(model.schema_, path).train, np.flatnonzero(there)


def _without_own_target(
    model: Federated | Personalised, labelled: tuple[Ragged, np.ndarray], names: np.ndarray, out: dict[str, np.ndarray],
    asked: Asked, found: Served, rows: Ragged,
) -> None:  # fmt: skip
    """Predict the labelled rows of new clients anew, each by a model of other rows of its client."""
    new = rows.names[~found.known.numpy()]
    seen, at = labelled
    mine = np.isin(names[at], new)
    if not mine.any():
        return
    prepared = model.prepared(seen.only(np.flatnonzero(np.isin(seen.names, new))))
    again = _in_file(prepared, names[at][mine], _columns(model, prepared, model.served(prepared), asked))
    for name, values in again.items():
        out[name][at[mine]] = values


def _in_file(rows: Ragged, names: np.ndarray, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Values of stored rows in the order of the file."""
    order, out = rows.order_of(names), {}
    for name, values in columns.items():
        out[name] = np.empty(len(names), dtype=object if values.dtype.kind in "US" else values.dtype)
        out[name][order] = values
    return out


def _in_file_owner(rows: Ragged, names: np.ndarray) -> np.ndarray:
    """[N] the number of every row's client, in the order of the file."""
    return np.searchsorted(rows.names, np.asarray(names, dtype=str))
