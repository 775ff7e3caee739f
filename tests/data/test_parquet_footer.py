# SPDX-License-Identifier: Apache-2.0
"""What a Parquet file's footer says of itself, and footers that say nonsense."""

import contextlib
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coterie.data.parquet import whole_table
from coterie.data.parquet_footer import values_inside
from coterie.errors import CoterieError


def table(rows: int) -> pa.Table:
    lists = [list(range(i % 4)) for i in range(rows)]
    columns = {"number": [i / 2 for i in range(rows)], "name": [str(i) for i in range(rows)], "flag": [True] * rows}
    return pa.table({**columns, "sizes": pa.array(lists, pa.list_(pa.int64())), "nothing": pa.nulls(rows, pa.int64())})


def footer(path: Path) -> bytes:
    content = path.read_bytes()
    return content[-8 - int.from_bytes(content[-8:-4], "little") : -8]


@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
@pytest.mark.parametrize("how", [{}, {"row_group_size": 100}, {"write_statistics": False}, {"version": "1.0"}])
def test_values_are_counted_as_pyarrow_counts_them(tmp_path: Path, rows: int, how: dict[str, object]) -> None:
    pq.write_table(table(rows), tmp_path / "t.parquet", **how)
    about = pq.read_metadata(tmp_path / "t.parquet")
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    known = sum(group.column(j).num_values for group in groups for j in range(group.num_columns))
    assert values_inside(footer(tmp_path / "t.parquet")) == known


def test_entries_of_lists_count_one_by_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"lists": [list(range(5000)), [1]]}), tmp_path / "t.parquet")
    assert values_inside(footer(tmp_path / "t.parquet")) == 5001


def test_damaged_footers_are_refused_and_nothing_worse(tmp_path: Path) -> None:
    pq.write_table(table(9), tmp_path / "t.parquet")
    whole, draw = footer(tmp_path / "t.parquet"), random.Random(0)
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        with contextlib.suppress(pa.ArrowInvalid):
            assert values_inside(bytes(damaged[: draw.randint(0, len(damaged))])) >= 0


def test_a_table_whose_statistics_do_not_fit_is_read_or_refused(tmp_path: Path) -> None:
    """pyarrow's own count ended the process where the sizes that a column tells are not those of its levels."""
    pq.write_table(table(9), tmp_path / "t.parquet")
    content, draw = (tmp_path / "t.parquet").read_bytes(), random.Random(1)
    start = len(content) - 8 - len(footer(tmp_path / "t.parquet"))
    read = refused = 0
    for _ in range(2000):
        damaged = bytearray(content)
        damaged[draw.randrange(start, len(content) - 8)] ^= 1 << draw.randrange(8)
        (tmp_path / "d.parquet").write_bytes(damaged)
        try:
            whole_table(tmp_path / "d.parquet")
            read += 1
        except (CoterieError, pa.ArrowException, OSError, ValueError, NotImplementedError):
            refused += 1
    assert read + refused == 2000
    assert min(read, refused) > 100  # both happen: names and statistics do no harm, types and places do
