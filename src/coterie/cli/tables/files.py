# SPDX-License-Identifier: Apache-2.0
"""Files that are predicted or assigned: read with the columns of the training, and tables written whole or not at all."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from coterie.data.clients import Clients
from coterie.data.readers import read_with
from coterie.data.schema import Schema
from coterie.data.sources import open_source
from coterie.data.values import is_missing, named
from coterie.errors import ConfigError, DataError
from coterie.files import replace_file

__all__ = [
    "check_ending", "left_out", "read_features", "read_filled", "read_labelled", "unknown_levels", "with_target",
    "write_rows",
]  # fmt: skip


def read_features(schema: Schema, path: Path) -> tuple[Clients, np.ndarray]:
    """Read all rows, labelled or not.  -> clients without targets, and [N] the client of every row of the file"""
    features = schema.model_copy(update={"missing": "mean", "target": None, "task": "none"})
    clients = read_with(features, path)
    if clients.dropped_rows:
        raise DataError(f"{clients.dropped_rows} rows of {path} have no client", "fill in the client column")
    return clients, client_column(features, path)


def read_filled(schema: Schema, path: Path) -> Clients:
    """Read rows that have a target; missing features are filled."""
    return read_with(schema.model_copy(update={"missing": "mean"}), path)


def read_labelled(schema: Schema, path: Path, why: str) -> Clients:
    """Read rows that have a target, and say why it is needed where there is none."""
    clients = read_filled(schema, path)
    if schema.target is not None and clients.train.y is None:
        raise DataError(f"{path} has no target '{schema.target}', and {why}", "add the target column")
    return clients


def left_out(clients: Clients) -> list[str]:
    """Say what was not used, or not understood."""
    said = unknown_levels(clients)
    if clients.dropped_rows:
        said.append(f"{clients.dropped_rows} rows without a client or a target are left out")
    return said


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


def unknown_levels(clients: Clients) -> list[str]:
    """Say how many categories mean nothing to the model."""
    n = clients.unknown_levels
    return [f"{n} cells have a category that was not in the training data, and count as none"] if n else []


def client_column(schema: Schema, path: Path) -> np.ndarray:
    """[N] the client of every row, in the order of the file."""
    source = open_source(path, schema.client)
    parts = []
    columns = [schema.client, next(name for name in source.columns if name != schema.client)]
    for batch, _ in source.batches(columns, rows=1 << 16):
        names, which = named(batch.column(schema.client))
        parts.append(np.asarray([*names, ""], dtype=str)[which])
    return np.concatenate(parts)


def with_target(schema: Schema, path: Path, n: int) -> np.ndarray:
    """[n] which rows of a file have a target, in its order."""
    source = open_source(path, schema.client)
    if schema.target is None or schema.target not in source.columns:
        return np.zeros(n, dtype=bool)
    batches = source.batches([schema.client, schema.target], rows=1 << 16)
    return np.concatenate([~is_missing(batch.column(schema.target)) for batch, _ in batches])
