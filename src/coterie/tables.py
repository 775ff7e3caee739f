# SPDX-License-Identifier: Apache-2.0
"""Predictions and assignments of a file, as tables in the file's order, written whole or not at all."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.readers import read_with
from coterie.data.schema import Schema
from coterie.data.sources import open_source
from coterie.data.values import named
from coterie.engines.checkpoint import replace_file
from coterie.errors import ConfigError, DataError
from coterie.estimators import Federated

__all__ = ["assignments", "check_ending", "predictions", "write_rows"]


def predictions(model: Federated, path: Path) -> tuple[pa.Table, list[str]]:
    """Predict every row of a file, labelled or not.  -> (client, label, prediction) in the file's order, warnings"""
    features = model.schema_.model_copy(update={"missing": "mean", "target": None, "task": "none"})
    clients = read_with(features, path)
    if clients.dropped_rows:
        raise DataError(f"{clients.dropped_rows} rows of {path} name no client", "fill in the client column")
    rows, names = clients.train, client_column(features, path)
    labels = _labels(model, path, rows)
    order = rows.order_of(names)
    made = np.empty(len(names), dtype=object)
    made[order] = model.predict_stored(rows, labels)
    label = np.empty(len(names), dtype=np.int64)
    label[order] = labels.numpy()[rows.owners]
    return pa.table({"client": names, "label": label, "prediction": made.tolist()}), unknown_levels(clients)


def assignments(model: Federated, path: Path) -> tuple[pa.Table, list[str]]:
    """Place every client of a file.  -> (client, label, margin, margin_error, certain, rows), warnings"""
    clients = _read_labelled(model, path)
    rows = clients.train
    if rows.y is None:
        raise DataError(
            f"{path} has no target '{model.schema_.target}', and clients are placed by their labelled rows",
            "add the target column",
        )
    found = model.assign(rows)
    table = pa.table(
        {
            "client": rows.names.tolist(),
            "label": found.label.numpy(),
            "margin": found.margin.double().numpy(),
            "margin_error": found.margin_error.double().numpy(),
            "certain": found.certain.numpy(),
            "rows": found.rows.numpy(),
        }
    )
    said = unknown_levels(clients)
    if clients.dropped_rows:
        said.append(f"{clients.dropped_rows} rows without a client or a target are left out")
    if unsure := int((~found.certain).sum()):
        said.append(f"{unsure} of {table.num_rows} clients could as well belong elsewhere: margin within noise")
    return table, said


def check_ending(out: Path | None) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    if out is None:
        return
    if out.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"{out} ends neither in .csv nor in .parquet", "name the file, say, predictions.csv")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}", "make it first, or name another --out")


def write_rows(table: pa.Table, out: Path | None) -> None:
    """Write a table as CSV to stdout, or to a file by the ending of its name."""
    buffer = io.BytesIO()
    if out is not None and out.suffix == ".parquet":
        pq.write_table(table, buffer)
    else:
        pc.write_csv(table, buffer)
    if out is None:
        sys.stdout.write(buffer.getvalue().decode())
    else:
        replace_file(out, buffer.getvalue())


def _read_labelled(model: Federated, path: Path) -> Clients:
    """Read rows that have a target; missing features are filled."""
    return read_with(model.schema_.model_copy(update={"missing": "mean"}), path)


def _labels(model: Federated, path: Path, rows: Ragged) -> Tensor:
    """[M] each client's cluster: known from training, or found from its labelled rows in the same file."""
    known = model.known_labels(rows.names)
    strangers = rows.names[(known < 0).numpy()]
    if not len(strangers):
        return known
    labelled = _read_labelled(model, path).train
    found = {}
    if labelled.y is not None:
        found = dict(zip(labelled.names.tolist(), model.assign(labelled).label.tolist(), strict=True))
    lost = [name for name in strangers.tolist() if name not in found]
    if lost:
        raise DataError(
            f"client '{lost[0]}' was not there in training and has no row with a '{model.schema_.target}' to place it by",
            f"fill in '{model.schema_.target}' in some of its rows",
        )
    new = torch.tensor([found.get(name, -1) for name in rows.names.tolist()])
    return torch.where(known < 0, new, known)


def unknown_levels(clients: Clients) -> list[str]:
    """Say how many categories mean nothing to the model."""
    n = clients.unknown_levels
    return [f"{n} cells have a category that was not there in training, and count as none"] if n else []


def client_column(schema: Schema, path: Path) -> np.ndarray:
    """[N] the client of every row, in the order of the file."""
    source = open_source(path, schema.client)
    parts = []
    columns = [schema.client, next(name for name in source.columns if name != schema.client)]
    for batch, _ in source.batches(columns, rows=1 << 16):
        names, which = named(batch.column(schema.client))
        parts.append(np.asarray([*names, ""], dtype=str)[which])
    return np.concatenate(parts)
