# SPDX-License-Identifier: Apache-2.0
"""Predictions and assignments of a file, as tables in the file's order, written whole or not at all."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from coterie.data.readers import read_with
from coterie.data.schema import Schema
from coterie.data.sources import open_source
from coterie.data.values import named
from coterie.engines.checkpoint import replace_file
from coterie.errors import ConfigError, DataError
from coterie.estimators import Federated

__all__ = ["assignments", "predictions", "write_rows"]


def predictions(model: Federated, path: Path) -> pa.Table:
    """Predict every row of a file.  -> client, label, prediction, in the order of the file"""
    filling = model.schema_.model_copy(update={"missing": "mean"})  # every row gets a prediction
    rows = read_with(filling, path).train
    names = _client_column(filling, path)
    if len(names) != rows.layout.n_rows:
        raise DataError(f"{len(names) - rows.layout.n_rows} rows of {path} name no client", "fill in the client column")
    labels = model.labels_of(rows)
    order = rows.order_of(names)
    made = np.empty(len(names), dtype=object)
    made[order] = model.predict_stored(rows, labels)
    label = np.empty(len(names), dtype=np.int64)
    label[order] = labels.numpy()[rows.owners]
    return pa.table({"client": names, "label": label, "prediction": made.tolist()})


def assignments(model: Federated, path: Path) -> pa.Table:
    """Place every client of a file.  -> client, label, margin, margin_error, certain, rows"""
    rows = read_with(model.schema_, path).train
    if rows.y is None:
        raise DataError(
            f"{path} has no column '{model.schema_.target}', and clients are placed by their labelled rows",
            "add the target column",
        )
    found = model.assign(rows)
    return pa.table(
        {
            "client": rows.names.tolist(),
            "label": found.label.numpy(),
            "margin": found.margin.double().numpy(),
            "margin_error": found.margin_error.double().numpy(),
            "certain": found.certain.numpy(),
            "rows": found.rows.numpy(),
        }
    )


def write_rows(table: pa.Table, out: Path | None) -> None:
    """Write a table as CSV to stdout, or to a file by the ending of its name."""
    buffer = io.BytesIO()
    if out is None or out.suffix == ".csv":
        pc.write_csv(table, buffer)
    elif out.suffix == ".parquet":
        pq.write_table(table, buffer)
    else:
        raise ConfigError(f"{out} ends neither in .csv nor in .parquet", "name the file, say, predictions.csv")
    if out is None:
        sys.stdout.write(buffer.getvalue().decode())
    else:
        replace_file(out, buffer.getvalue())


def _client_column(schema: Schema, path: Path) -> np.ndarray:
    """[N] the client of every row, in the order of the file."""
    source = open_source(path, schema.client)
    parts = []
    columns = [schema.client, next(name for name in source.columns if name != schema.client)]
    for batch, _ in source.batches(columns, rows=1 << 16):
        names, which = named(batch.column(schema.client))
        spelled = np.asarray([*names, ""], dtype=str)[which]
        parts.append(spelled[spelled != ""])
    return np.concatenate(parts) if parts else np.zeros(0, dtype=str)
