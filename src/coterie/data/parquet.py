# SPDX-License-Identifier: Apache-2.0
"""Parquet files that anybody may have written: read within bounds, before anything that they promise is allocated.

A text that occurs a million times stands in a file once. It is read so, and looked at before it is spelled out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coterie.data.parquet_footer import values_inside
from coterie.data.values import is_text
from coterie.errors import DataError
from coterie.limits import MOST_CELLS, MOST_COLUMNS, MOST_FOOTER_BYTES, MOST_NAME, MOST_TABLE_FOOTER_BYTES

__all__ = ["check_header", "check_texts", "columns_of", "rows_of", "whole_table"]

_MAGIC = b"PAR1"
_BATCH = 1 << 16  # rows
_SHORT = 40  # characters of a text that is too long, in a message
_LIMITS = {"thrift_string_size_limit": MOST_FOOTER_BYTES, "thrift_container_size_limit": MOST_FOOTER_BYTES}


def columns_of(path: Path) -> list[str]:
    """The names of the columns."""
    with _opened(path) as (reader, _):
        names: list[str] = reader.schema_arrow.names
        return names


def rows_of(path: Path, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Stream some columns, at most so many rows at a time."""
    with _opened(path) as (reader, texts):
        for batch in reader.iter_batches(batch_size=rows, columns=list(columns)):
            yield _spelled_out(batch, texts, path)


def whole_table(path: Path) -> pa.Table:
    """A table that is small enough to be held as a whole."""
    footer = _footer(path, MOST_TABLE_FOOTER_BYTES)
    with _opened(path) as (reader, texts):
        cells = max(values_inside(footer), reader.metadata.num_rows * max(1, reader.metadata.num_columns))
        if cells > MOST_CELLS:
            raise DataError(f"file '{path}' has {cells:,} cells; the limit is {MOST_CELLS:,}", "use fewer clients")
        made = [_spelled_out(batch, texts, path) for batch in reader.iter_batches(batch_size=_BATCH)]
        schema = pa.schema([texts.get(field.name, field) for field in reader.schema_arrow])
        return pa.Table.from_batches(made, made[0].schema if made else schema)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[pq.ParquetFile, dict[str, pa.Field]]]:
    """Open a file, if what it says of itself is within bounds.  -> its reader, and its columns of text

    Raises
    ------
    DataError
        It is not.
    pa.ArrowException, OSError
        This is no Parquet file, or cannot be read.
    """
    _footer(path, MOST_FOOTER_BYTES, whole=False)
    # Without a buffer size a whole row group is read at once, and a file may be a single row group.
    how = {"buffer_size": 1 << 18, "pre_buffer": False, **_LIMITS}
    with pq.ParquetFile(path, **how) as first:
        check_header(path, first.schema_arrow.names)
        texts = {field.name: field for field in first.schema_arrow if is_text(field.type)}
        texts |= {f.name: f.with_type(pa.string()) for f in first.schema_arrow if str(f.type) == "string_view"}
        if not texts:
            yield first, texts
            return
        with pq.ParquetFile(path, metadata=first.metadata, read_dictionary=list(texts), **how) as reader:
            yield reader, texts


def _footer(path: Path, most: int, *, whole: bool = True) -> bytes:
    """What a file says of itself, if it is not longer than that; without `whole` it is only measured."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 8))
        last = file.read(8)
        size = int.from_bytes(last[:4], "little")
        if len(last) < 8 or last[4:] != _MAGIC:
            raise pa.ArrowInvalid("this is no Parquet file")
        if size > most:
            raise DataError(
                f"file '{path}' describes itself in {size >> 20} MB; the limit is {most >> 20} MB",
                "write it with fewer columns, or with larger row groups",
            )
        if size > end - 8:
            raise pa.ArrowInvalid("this Parquet file is cut short")
        file.seek(end - 8 - size)
        return file.read(size) if whole else b""


def _spelled_out(batch: pa.RecordBatch, texts: dict[str, pa.Field], path: Path) -> pa.RecordBatch:
    check_texts(batch, path)
    if not texts.keys() & set(batch.schema.names):
        return batch  # also one of no columns, which only counts rows
    columns = [
        column.cast(texts[name].type) if name in texts else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def check_header(path: Path, names: Sequence[str]) -> None:
    """Refuse too many columns, and names that are too long."""
    if len(names) > MOST_COLUMNS:
        raise DataError(f"file '{path}' has {len(names):,} columns; the limit is {MOST_COLUMNS:,}", "leave columns out")
    longest = max(names, key=len, default="")
    if len(longest) > MOST_NAME:
        raise DataError(
            f"file '{path}' has a column whose name has {len(longest):,} characters, '{longest[:_SHORT]}...'; "
            f"the limit is {MOST_NAME:,}",
            "give it a shorter name",
        )


def check_texts(batch: pa.RecordBatch, path: Path) -> None:
    """Refuse a text that is too long to be a client, a category or a class."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        texts = column.dictionary if pa.types.is_dictionary(column.type) else column
        if not is_text(texts.type) or not len(texts):
            continue
        texts.validate(full=True)  # whether it is UTF-8
        longest = pc.max(pc.utf8_length(texts)).as_py()
        if longest is not None and longest > MOST_NAME:
            found = texts[pc.index(pc.utf8_length(texts), longest).as_py()].as_py()
            raise DataError(
                f"file '{path}' has a text of {longest:,} characters in column '{name}', '{found[:_SHORT]}...'; the "
                f"limit is {MOST_NAME:,}",
                f"shorten it, or leave the column out with --exclude {name}",
            )
