# SPDX-License-Identifier: Apache-2.0
"""Files of rows: CSV and Parquet, their headers and what is below them, site summaries and configurations."""

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from benchmarks.fuzz.changes import as_json, changed, changed_bytes, edits, flips
from coterie.config import options
from coterie.data.check import check
from coterie.data.readers import read
from coterie.data.site_files import read_site
from coterie.runs.summarise import summarise


@cache
def _place() -> Path:
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def _read(path: Path, named: int) -> None:
    """Read a table: by the names that it should have, and, of every few, look it over as `coterie data check` does."""
    how: dict[str, Any] = {"client": "site", "target": "y", "missing": ("error", "mean", "drop")[named % 3]}
    if named % 5 == 0:
        check(path, **how)
    else:
        read(path, **how)


# -- CSV ----------------------------------------------------------------------------------------------------------------
_HEAD = "site,x,ward,y"
_LINES = [f"s{i % 3},{i * 0.37 % 1:.3f},{('icu', 'er')[i % 2]},{i * 1.7 % 5:.2f}" for i in range(12)]
_CELLS = st.sampled_from(
    [
        "", " ", "x", "-1", "0", "1e308", "-1e200", "1e-320", "inf", "nan", "NA", "true", "2020-01-01", '"', '"a,b"',
        '"a\nb"', "\x00", "\ufeff", "é", "9" * 400, "x" * 1500, "0x10", "1_000", "1,5", ";", "\t", "s0", "icu",
    ]
) | st.text(max_size=6)  # fmt: skip
_csv = st.tuples(
    st.integers(0, 14),
    st.lists(_CELLS, max_size=5),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), _CELLS), max_size=4),
    st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
)


def csv_cells(value: Any) -> None:
    """A CSV file with another header, and other cells."""
    named, head, cells, end = value
    rows = [line.split(",") for line in _LINES]
    for row, column, cell in cells:
        rows[row][column] = cell
    header = ",".join(head) if named % 2 and head else _HEAD + "".join(f",{name}" for name in head)
    width = header.count(",") + 1
    lines = [header, *(",".join((row + ["1"] * width)[:width]) for row in rows)]
    path = _place() / "t.csv"
    path.write_bytes(end.join(lines).encode("utf-8", "surrogatepass"))
    _read(path, named)


def csv_bytes(value: tuple[int, Any]) -> None:
    """A CSV file of which single bytes are others."""
    path = _place() / "t.csv"
    path.write_bytes(changed_bytes("\n".join([_HEAD, *_LINES]).encode(), value[1]))
    _read(path, value[0])


# -- Parquet ------------------------------------------------------------------------------------------------------------
@cache
def _parquet(compression: str) -> bytes:
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "site": [f"s{i % 3}" for i in range(12)], "x": rng.normal(size=12), "ward": ["icu", "er"] * 6,
            "kind": pa.array(["a", "b"] * 6).dictionary_encode(), "y": rng.normal(size=12),
        }
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression=compression)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def parquet_bytes(value: tuple[int, Any]) -> None:
    """A Parquet file of which single bytes are others."""
    path = _place() / "t.parquet"
    path.write_bytes(changed_bytes(_parquet(("none", "zstd")[value[0] % 2]), value[1]))
    _read(path, value[0])


def parquet_footer(value: tuple[int, Any]) -> None:
    """A Parquet file that describes itself otherwise."""
    content = _parquet("none")
    length = int.from_bytes(content[-8:-4], "little")
    begin = len(content) - 8 - length
    footer = changed_bytes(content[begin:-8], value[1])
    path = _place() / "t.parquet"
    path.write_bytes(content[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    _read(path, value[0])


_KINDS = st.sampled_from(
    [
        pa.array([1.5] * 12), pa.array(["a", "b", "c"] * 4), pa.array([None] * 12), pa.array([[1.0]] * 12),
        pa.array([{"a": 1}] * 12), pa.array([True, False] * 6), pa.array(range(12), pa.timestamp("us")),
        pa.array(range(12), pa.date32()), pa.array([b"a"] * 12), pa.array(["x" * 1500] * 12), pa.array([1e308, -1e308] * 6),
        pa.array([1e200] * 12), pa.array([float("nan")] * 12), pa.array([float("inf"), 1.0] * 6),
        pa.array([1e-320, -1e-320] * 6), pa.array(range(12), pa.uint64()), pa.array([2**63 - 1] * 12),
        pa.array(["a", None] * 6).dictionary_encode(), pa.array(range(12), pa.duration("s")), pa.array(["1", "2 ", ""] * 4),
        pa.array(range(12)).cast(pa.decimal128(24, 2)), pa.array(["a", "b"] * 6, pa.large_string()),
        pa.array(["a", "b"] * 6).cast(pa.string_view()), pa.array([0.5] * 12, pa.float16()),
        pa.array(range(12), pa.time64("us")),
    ]
)  # fmt: skip
_NAMES = st.sampled_from(["site", "x", "y", "", " ", "a.b", "x" * 1500, "ward", "é"]) | st.text(max_size=5)
_tables = st.tuples(st.integers(0, 14), st.lists(st.tuples(_NAMES, _KINDS), max_size=4), st.booleans())


def parquet_columns(value: Any) -> None:
    """A Parquet file with columns of all kinds and names."""
    named, columns, keep = value
    names = [name.encode("utf-8", "replace").decode() for name, _ in columns]
    arrays = [array for _, array in columns]
    if keep:
        names += ["site", "y"]
        arrays += [pa.array(["a", "b", "c"] * 4), pa.array([i * 1.7 % 5 for i in range(12)])]
    path = _place() / "t.parquet"
    pq.write_table(pa.Table.from_arrays(arrays, names=names), path)
    _read(path, named)


# -- site summaries and configurations ----------------------------------------------------------------------------------
@cache
def _site() -> str:
    table, out = _place() / "site.csv", _place() / "good.json"
    table.write_text("\n".join(["site,x,ward,y", *_LINES * 2]), encoding="utf-8")
    summarise(table, out, client="site", target="y", few_shot=2)
    return out.read_text(encoding="utf-8")


def site_document(value: Any) -> None:
    """A site summary that says something else."""
    path = _place() / "site.json"
    path.write_bytes(as_json(changed(json.loads(_site()), value)))
    read_site(path)


_CONFIG = b"""method = "ifca"
seed = 3
[data]
client = "site"
exclude = ["a", "b"]
[model]
hidden = [64, 32]
[training]
rounds = 50
step_size = 0.1
[clusters]
n_clusters = 3
"""


def config_bytes(value: Any) -> None:
    """A configuration of which single bytes are others."""
    path = _place() / "config.toml"
    path.write_bytes(changed_bytes(_CONFIG, value))
    options(file=path)


def config_values(value: Any) -> None:
    """Options with other values, as `run.json` and Python have them."""
    tree = changed(options().model_dump(mode="json"), value)
    if isinstance(tree, dict):
        options(tree)


_flips = st.tuples(st.integers(0, 14), flips)
TARGETS = {
    "CSV, header and cells": (_csv, csv_cells),
    "CSV, bytes": (_flips, csv_bytes),
    "Parquet, columns": (_tables, parquet_columns),
    "Parquet, footer": (_flips, parquet_footer),
    "Parquet, bytes": (_flips, parquet_bytes),
    "site summary": (edits, site_document),
    "configuration, bytes": (flips, config_bytes),
    "configuration, values": (edits, config_values),
}
