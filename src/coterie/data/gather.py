# SPDX-License-Identifier: Apache-2.0
"""The second pass over a table: every row becomes numbers and goes to its place, in memory or on disk."""

import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from coterie.data.ragged import DiskRows, Layout, Ragged
from coterie.data.roles import Roles
from coterie.data.scan import Scan
from coterie.data.schema import Schema
from coterie.data.sources import Source, known_types
from coterie.data.values import coded, instants, is_date, is_text, numbers, plain
from coterie.errors import DataError

__all__ = ["batch_rows", "gather", "laid_out", "scanned", "times"]

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 1 << 16
_MAPPED_ROWS = 1 << 11  # rows written through one mapping: scattered, each may keep a page of the file in memory


def scanned(source: Source, roles: Roles) -> Scan:
    """Go over all rows once."""
    scan = Scan(roles)
    with known_types(source):
        for batch, spelled in source.batches(roles.used, rows=batch_rows(len(roles.used))):
            scan.add(batch, spelled=spelled)
    return scan


def laid_out(scan: Scan, min_rows: int) -> tuple[Layout, int]:
    """Plan where the clients' rows go: (layout, how many clients are too small)."""
    sizes = dict(zip(scan.clients, scan.counts.tolist(), strict=True))
    names = sorted(name for name, rows in sizes.items() if rows >= min_rows)
    if not names:
        most = max(sizes.values(), default=0)
        raise DataError(
            f"none of the {len(sizes)} clients has {min_rows} rows or more; the largest has {most}",
            f"lower it with --min-rows {max(most, 1)}",
        )
    counts = np.array([sizes[name] for name in names], dtype=np.int64)
    return Layout.plan(np.array(names), counts), len(sizes) - len(names)


def gather(
    source: Source,
    roles: Roles,
    schema: Schema,
    layout: Layout,
    *,
    dtype: torch.dtype,
    memory: int,
    spill: str | Path | None,
) -> tuple[Ragged, int]:
    """Encode all rows and store them by client, in the order of the file: (rows, cells with unknown levels)."""
    x, y = _storage(schema, layout.n_rows, roles.target is not None, dtype, memory, spill)
    places = {str(name): i for i, name in enumerate(layout.names)}
    free, ends = layout.starts.copy(), layout.starts + layout.counts  # [M] where each client's next row goes
    unknown = seen = 0
    origin = np.empty(layout.n_rows, dtype=np.int32)  # half of what it takes otherwise
    when = None if roles.when is None else np.empty(layout.n_rows)
    row = max(roles.used, key=len) + "#"  # longer than every column's name, so that none is called so
    for batch, spelled in source.batches(roles.used, rows=batch_rows(max(schema.n_features, len(roles.used)))):
        columns = [*batch.columns, pa.array(np.arange(seen, seen + batch.num_rows))]
        kept = roles.kept(pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, row]))
        seen += batch.num_rows
        if seen > np.iinfo(origin.dtype).max:
            origin = origin.astype(np.int64)
        owner = coded(kept.column(roles.client), places)
        wanted = owner >= 0  # the others belong to clients that are too small
        if not wanted.all():
            kept, owner = kept.filter(pa.array(wanted)), owner[wanted]
        rows, targets, strange = schema.encode_counting(kept)
        place = _take_places(owner, free)
        if (free > ends).any():
            raise _changed(source)
        _write(x, place, rows)
        origin[place] = kept.column(row).to_numpy()
        if when is not None and roles.when is not None:
            when[place] = times(kept.column(roles.when), roles.when, spelled=spelled)
        if y is not None and targets is not None:
            _write(y, place, targets)
        unknown += strange
    if (free < ends).any():
        raise _changed(source)
    made = Ragged(layout, _ready(x), None if y is None else _ready(y), origin=torch.from_numpy(origin), schema=schema)
    return made if when is None else made.in_order_of(when), unknown


def times(values: pa.Array, name: str, *, spelled: bool) -> np.ndarray:
    """[n] a column as numbers by which rows stand in the order of time: points in time, or numbers."""
    values = plain(values)
    found = numbers(values) if spelled or not is_text(values.type) else None
    if found is None and is_date(values):
        found = instants(values)
    if found is None:
        raise DataError(
            f"column '{name}' holds neither times nor numbers to order rows by", "name another: --split time:COLUMN"
        )
    if np.isnan(found).any():
        raise DataError(f"column '{name}' has missing values, so rows have no order", "--missing drop leaves them out")
    return found


def batch_rows(width: int) -> int:
    """Rows of `width` numbers that make a batch."""
    return max(256, min(_BATCH_ROWS, _BATCH_BYTES // (8 * width)))


def _changed(source: Source) -> DataError:
    return DataError(f"'{source.path}' changed while it was read", "read it again when nothing writes to it")


def _storage(
    schema: Schema, n: int, with_target: bool, dtype: torch.dtype, memory: int, spill: str | Path | None
) -> "tuple[np.ndarray | DiskRows, np.ndarray | DiskRows | None]":
    """Make room for n rows: features and targets."""
    number = torch.empty(0, dtype=dtype).numpy().dtype
    label = np.dtype(np.int64) if schema.task == "classification" else number
    size = n * (schema.n_features * number.itemsize + with_target * label.itemsize)
    folder = None if size <= memory else _room(spill, size)
    x = _allocate((n, schema.n_features), number, folder)
    return x, _allocate((n,), label, folder) if with_target else None


def _room(spill: str | Path | None, size: int) -> Path:
    """Find a folder for so many bytes: writing to a mapped file on a full disk would kill the process."""
    folder = Path(tempfile.gettempdir()) if spill is None else Path(spill)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size:
        raise DataError(
            f"the rows take {size / 1e9:.1f} GB and '{folder}' has {free / 1e9:.1f} GB left",
            "name a folder with more room with --spill FOLDER, or read fewer columns",
        )
    return folder


def _allocate(shape: tuple[int, ...], dtype: np.dtype, folder: Path | None) -> "np.ndarray | DiskRows":
    if folder is None:
        return np.empty(shape, dtype)
    own = Path(tempfile.mkdtemp(prefix="coterie-", dir=folder))
    rows = DiskRows(own / "rows", shape, dtype)
    weakref.finalize(rows, shutil.rmtree, own, ignore_errors=True)
    return rows


def _take_places(owner: np.ndarray, free: np.ndarray) -> np.ndarray:
    """[n] the next free places of the rows' clients, in the order of the rows; `free` moves on."""
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(free))
    before = np.cumsum(counts) - counts
    place = np.empty(len(owner), dtype=np.int64)
    place[order] = (free - before)[owner[order]] + np.arange(len(owner))
    free += counts
    return place


def _write(rows: "np.ndarray | DiskRows", place: np.ndarray, values: np.ndarray) -> None:
    if isinstance(rows, np.ndarray):
        rows[place] = values
        return
    order = np.argsort(place)
    for start in range(0, len(order), _MAPPED_ROWS):
        part = order[start : start + _MAPPED_ROWS]
        mapped = rows.writable()  # anew each time, since pages stay in memory as long as their mapping does
        mapped[place[part]] = values[part]
        del mapped


def _ready(rows: "np.ndarray | DiskRows") -> "Tensor | DiskRows":
    return torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
