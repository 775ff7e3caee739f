# SPDX-License-Identifier: Apache-2.0
"""Deal the clients of a data set to nodes: every node gets files with the rows of its own clients, and nothing else."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from coterie.data.sources import Source, open_source, similar
from coterie.data.values import coded, in_order, named
from coterie.errors import ConfigError, DataError

__all__ = ["Share", "deal"]

_ROWS = 1 << 16  # in a batch


@dataclass(frozen=True)
class Share:
    """What one node holds: a folder of files, whose clients the column tells, or the files' names where there is none."""

    folder: Path
    client: str
    clients: tuple[str, ...]


def deal(path: str | Path, client: str | None, folders: Sequence[Path]) -> list[Share]:
    """Write the share of every node: clients in the order of their names are dealt like cards.

    Parameters
    ----------
    path : str or Path
        A Parquet or CSV file, or a folder of such files.
    client : str, optional
        The column that names the client.
    folders : sequence of Path
        One for each node; made here.
    """
    source = open_source(path, client)
    if source.client not in source.columns:
        raise DataError(f"'{path}' has no column '{source.client}'", similar(source.client, source.columns))
    names = _names(source)
    if len(names) < len(folders):
        raise ConfigError(
            f"'{path}' has {len(names)} clients, and {len(folders)} nodes need one each",
            f"start at most {len(names)} nodes",
        )
    for folder in folders:
        folder.mkdir(parents=True)
    node_of = {name: place % len(folders) for place, name in enumerate(names)}
    for number, file in enumerate(source.files):
        _split(replace(source, files=(file,)), node_of, folders, number)
    return [Share(folder, source.client, names[i :: len(folders)]) for i, folder in enumerate(folders)]


def _names(source: Source) -> tuple[str, ...]:
    found: set[str] = set()
    for batch, _ in source.batches([source.client], rows=_ROWS):
        found.update(named(batch.column(source.client))[0])
    return in_order(found - {""})


def _split(source: Source, node_of: dict[str, int], folders: Sequence[Path], number: int) -> None:
    """Write the rows of one file to its nodes; rows without a client go to the first, which says so when it reads them."""
    file = source.files[0]
    with ExitStack() as stack:
        writers: dict[int, Any] = {}
        for node, rows, spelled in _parts(source, node_of):
            if source.by_file:  # the name of the file is the name of the client
                shutil.copyfile(file, folders[node] / file.name)
                return
            if node not in writers:
                target = folders[node] / f"rows-{number}.{'csv' if spelled else 'parquet'}"
                kind = pa.csv.CSVWriter if spelled else pa.parquet.ParquetWriter
                writers[node] = stack.enter_context(kind(target, rows.schema))
            writers[node].write_table(pa.Table.from_batches([rows]))


def _parts(source: Source, node_of: dict[str, int]) -> Iterator[tuple[int, pa.RecordBatch, bool]]:
    for batch, spelled in source.batches(source.columns, rows=_ROWS):
        node = np.maximum(coded(batch.column(source.client), node_of), 0)
        for here in np.unique(node).tolist():
            yield here, batch.filter(pa.array(node == here)), spelled
