# SPDX-License-Identifier: Apache-2.0
"""Data frames: clients' rows from a table in memory (pandas, polars, Arrow), and rows back as such a table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from coterie.data.schema import Schema
from coterie.data.sources import Csv, Source, listed, open_source, similar
from coterie.data.values import name_of
from coterie.errors import ConfigError, DataError

if TYPE_CHECKING:
    from coterie.data.ragged import Ragged

__all__ = ["TableSource", "as_table", "free_name", "is_frame", "opened", "pandas_frame", "table_of", "table_source"]

_UNNAMED = "the table"


# -- in ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TableSource(Source):
    """Rows of a table that is in memory."""

    table: pa.Table = field(default_factory=lambda: pa.table({}))

    def batches(self, columns: Sequence[str], *, rows: int) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """Cut it into batches; text is text, since numbers have a type here."""
        for batch in self.table.select(list(columns)).to_batches(max_chunksize=rows):
            yield batch, False


def is_frame(data: Any) -> bool:
    """Whether this is a data frame: of pandas, of polars, of Arrow, or of anything else that speaks Arrow's protocol."""
    return hasattr(data, "columns") and (hasattr(data, "__arrow_c_stream__") or _is_pandas(data))


def as_table(data: Any) -> pa.Table:
    """A data frame as an Arrow table; a frame's index is no column."""
    if isinstance(data, pa.Table):
        table = data
    elif isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data])
    else:
        try:
            made = data.rename(columns=str) if _is_pandas(data) else data
            table = pa.Table.from_pandas(made, preserve_index=False) if _is_pandas(made) else pa.table(made)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(
                "the data frame has a column whose values are of different types", "make them all numbers or all text"
            ) from error
    twice = next((name for name in table.column_names if table.column_names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"the data frame has several columns '{twice}'", "give every column its own name")
    return table


def table_source(data: Any, client: str | None) -> TableSource:
    """Take a data frame as what `read` reads."""
    table = as_table(data)
    columns = tuple(table.column_names)
    if client is None:
        raise DataError(
            "the client column of the data frame is not given", f"client=...; columns are: {listed(columns)}"
        )
    if client not in columns:
        raise DataError(f"the data frame has no client column '{client}'", similar(client, columns))
    return TableSource(Path(_UNNAMED), (), columns, client, False, table=table)


def opened(path: Any, client: str | None, csv: Csv) -> Source:
    """What is to be read: files, or a table in memory."""
    if is_frame(path):
        return table_source(path, client)
    return open_source(path if isinstance(path, str | Path) else path[0], client, csv)


def free_name(wanted: str | None, taken: Sequence[str]) -> str:
    """A name that no column has."""
    name = wanted or "column"
    while name in taken:
        name += "_"
    return name


def _is_pandas(data: Any) -> bool:
    return type(data).__module__.split(".")[0] == "pandas"


# -- out --------------------------------------------------------------------------------------------------------------
def table_of(rows: "Ragged", predictions: Any = None) -> pa.Table:
    """Rows as an Arrow table, in the order in which they are stored: client, number of the row, columns, predictions."""
    x, y = rows.in_memory()
    n, schema = rows.layout.n_rows, rows.schema
    origin = np.arange(n) if rows.origin is None else rows.origin.numpy()
    taken: dict[str, Any] = {
        "client" if schema is None else schema.client: pa.array(rows.names[rows.owners], pa.string()),
    }
    taken[free_name("row", [*taken, *_columns(schema)])] = pa.array(origin)
    flat = x.reshape(n, -1).numpy()
    if schema is None or schema.n_features != flat.shape[1]:
        taken |= {f"x{i}": flat[:, i] for i in range(flat.shape[1])}
    else:
        taken |= _features(schema, flat)
    target = None if y is None else y.numpy()
    if target is not None:
        name = (
            free_name(None if schema is None else schema.target, list(taken)) if schema and schema.target else "target"
        )
        classes = schema is not None and schema.task == "classification"
        taken[name] = np.asarray(schema.classes, dtype=object)[target] if classes and schema is not None else target
        if schema is not None and schema.event is not None:  # times are below zero where there was no event
            taken |= {name: np.abs(target), free_name(schema.event, list(taken)): (target > 0).astype(np.int64)}
    if predictions is not None:
        taken |= _predicted(predictions, n, schema, list(taken))
    return pa.table(taken)


def pandas_frame(table: pa.Table) -> Any:
    """The table as a frame of pandas, which is not a dependency."""
    try:
        return table.to_pandas()
    except ImportError:
        raise ConfigError("frame() needs pandas", "pip install pandas, or take table(), which is Arrow's") from None


def _columns(schema: Schema | None) -> list[str]:
    return [] if schema is None else [column.name for column in schema.columns]


def _features(schema: Schema, x: np.ndarray) -> dict[str, Any]:
    """Columns as they were read: a category by its level, which is null where it is missing or was not known."""
    made: dict[str, Any] = {}
    at = 0
    for column in schema.columns:
        if column.kind == "numeric":
            made[column.name] = x[:, at]
            at += 1
            continue
        part = x[:, at : at + len(column.levels)]
        level = np.asarray([*column.levels, None], dtype=object)
        known = part.any(1) if part.size else np.zeros(len(x), dtype=bool)
        made[column.name] = pa.array(level[np.where(known, part.argmax(1), len(column.levels))], pa.string())
        at += len(column.levels)
    return made


def _predicted(given: Any, n: int, schema: Schema | None, taken: Sequence[str]) -> dict[str, Any]:
    """Predictions beside the rows: a column, or one for every class or bound; classes are spelled as the target is."""
    values = np.asarray(given)
    if len(values) != n:
        raise DataError(
            f"there are {len(values)} predictions and {n} rows", "predict these rows: model.predict(clients.test)"
        )
    if values.ndim == 1:
        spelled = schema is not None and schema.task == "classification"
        column = [name_of(value) for value in values.tolist()] if spelled else values
        return {free_name("prediction", taken): column}
    flat = values.reshape(n, -1)
    names: Sequence[Any] = range(flat.shape[1])
    if schema is not None and len(schema.classes) == flat.shape[1]:
        names = schema.classes
    return {free_name(f"prediction {name}", taken): flat[:, i] for i, name in enumerate(names)}
