# SPDX-License-Identifier: Apache-2.0
"""Tables of strangers: numbers, names and columns beyond the limits are refused, with column, client and a way out."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coterie.data.arrays import from_arrays
from coterie.data.check import check
from coterie.data.readers import read, read_with
from coterie.errors import DataError
from coterie.limits import MOST_COLUMNS, MOST_NAME

N = 12
GOOD: dict[str, Any] = {
    "site": [f"s{i % 3}" for i in range(N)],
    "x": [i * 0.37 % 1 for i in range(N)],
    "y": [i * 1.7 % 5 for i in range(N)],
}


def written(folder: Path, **columns: Any) -> Path:
    pq.write_table(pa.table({**GOOD, **columns}), folder / "t.parquet")
    return folder / "t.parquet"


def refused(path: Path) -> tuple[str, str]:
    """Read and look over: both refuse it, in the same words."""
    with pytest.raises(DataError) as said:
        read(path, client="site", target="y")
    found = check(path, client="site", target="y")
    assert not found.ok
    assert any(said.value.message.endswith(one.sentence) for one in found.problems)
    assert said.value.hint
    return said.value.message, said.value.hint


# -- numbers ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [1e308, -1e308, 1e200, -1e200, 2e50])
def test_a_number_that_is_too_large_is_refused_with_column_and_client(tmp_path: Path, value: float) -> None:
    x = [value if i == 4 else v for i, v in enumerate(GOOD["x"])]
    sentence, hint = refused(written(tmp_path, x=x))
    expected = f"column 'x' has a number of client 's1' that is too large: {abs(value):.3g}; the limit is 1e+50"
    assert sentence == f"t.parquet: {expected}"
    assert hint == "correct the cells, or leave it out with --exclude x"


def test_a_target_that_is_too_large_is_refused(tmp_path: Path) -> None:
    sentence, _ = refused(written(tmp_path, y=[*GOOD["y"][:-1], -1e200]))
    assert sentence == "t.parquet: target 'y' has a number of client 's2' that is too large: 1e+200; the limit is 1e+50"


def test_a_later_table_has_the_same_limit(tmp_path: Path) -> None:
    clients = read(written(tmp_path), client="site", target="y")
    with pytest.raises(DataError, match="column 'x' has a number of client 's0' that is too large"):
        read_with(clients.schema, written(tmp_path, x=[1e200, *GOOD["x"][1:]]))


def test_arrays_have_the_same_limit() -> None:
    x, y, groups = np.array(GOOD["x"])[:, None], np.array(GOOD["y"]), np.array(GOOD["site"])
    far = x.copy()
    far[4] = -1e200
    with pytest.raises(DataError, match="column 0 of X has a number of client 's1' that is too large: 1e\\+200"):
        from_arrays(far, y, groups)
    with pytest.raises(DataError, match="y has a number of client 's0' that is too large"):
        from_arrays(x, np.where(np.arange(N) == 3, 1e200, y), groups)
    assert from_arrays(np.where(far < 0, 1e49, x), y, groups).schema.n_features == 1


# -- names --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("column", ["site", "ward"])
def test_a_name_that_is_too_long_is_refused(tmp_path: Path, column: str) -> None:
    long = "n" * 300_000
    values = [long if i == 5 else v for i, v in enumerate(GOOD["site"])]
    sentence, hint = refused(written(tmp_path, **{column: values}))
    path = tmp_path / "t.parquet"
    where = f"file '{path}' has a text of 300,000 characters in column '{column}', '{'n' * 40}...'"
    assert sentence == f"{where}; the limit is 1,000"
    assert hint == f"shorten it, or leave the column out with --exclude {column}"
    (tmp_path / "t.csv").write_text("site,ward,x,y\n" + f"{long},a,1,2\nb,b,2,3\n")
    assert "has a text of 300,000 characters in column 'site'" in refused(tmp_path / "t.csv")[0]


def test_a_name_that_fills_the_limit_is_read(tmp_path: Path) -> None:
    longest = "n" * MOST_NAME
    clients = read(written(tmp_path, site=[longest if s == "s0" else s for s in GOOD["site"]]), client="site")
    assert longest in clients.names.tolist()


def test_a_long_text_that_occurs_often_is_not_spelled_out(tmp_path: Path) -> None:
    often = 200_000
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(often, np.int32)), pa.array(["n" * 100_000]))
    table = pa.table({"site": names, "x": np.arange(often) * 1.0})
    pq.write_table(table, tmp_path / "t.parquet", store_schema=False)  # 20 GB of text in some kB
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="has a text of 100,000 characters"):
        read(tmp_path / "t.parquet", client="site")
    assert pa.default_memory_pool().max_memory() - before < 1 << 28


def test_arrays_have_short_names() -> None:
    groups = np.array([*GOOD["site"][:-1], "n" * 2000], dtype=object)
    with pytest.raises(DataError, match="groups has a client whose name has 2,000 characters; the limit is 1,000"):
        from_arrays(np.ones((N, 1)), None, groups)
    with pytest.raises(DataError, match="feature_names has a name of 2,000 characters"):
        from_arrays(np.ones((N, 1)), None, GOOD["site"], feature_names=["n" * 2000])


# -- columns ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv"])
def test_too_many_columns_of_csv_are_refused(tmp_path: Path, ending: str, quoted: bool) -> None:
    mark = "\t" if ending == ".tsv" else ","
    names = [f'"x\n{i}"' if quoted else f"x{i}" for i in range(MOST_COLUMNS)]
    content = mark.join(["site", *names]) + "\n" + mark.join("1" * (MOST_COLUMNS + 1)) + "\n"
    path = tmp_path / f"t{ending}"
    path.write_bytes(gzip.compress(content.encode()) if ending.endswith("gz") else content.encode())
    with pytest.raises(DataError, match="has 20,001 columns; the limit is 20,000"):
        read(path, client="site")


def test_too_many_columns_of_parquet_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.data.parquet.MOST_COLUMNS", 2)
    with pytest.raises(DataError, match="has 3 columns; the limit is 2"):
        read(written(tmp_path), client="site")


def test_what_parquet_says_of_itself_has_a_limit(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-8] + (2**32 - 1).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(DataError, match="describes itself in 4095 MB; the limit is 32 MB"):
        read(path, client="site")


def test_a_column_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a column whose name has 2,000 characters, 'nnn"):
        read(written(tmp_path, **{"n" * 2000: GOOD["x"]}), client="site")


def test_categories_that_make_too_many_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.data.faults.MOST_FEATURES", 4)
    sentence, hint = refused(written(tmp_path, ward=["a", "b", "c", "d"] * 3))
    assert sentence == "t.parquet: a row becomes 5 numbers, with one for every category; the limit is 4"
    assert "--exclude" in hint


def test_a_large_table_of_a_run_is_not_read(tmp_path: Path) -> None:
    from coterie.data.parquet import whole_table

    pq.write_table(pa.table({"x": pa.array(np.zeros(40_000_000, np.int8))}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has 40,000,000 cells; the limit is 32,000,000"):
        whole_table(tmp_path / "t.parquet")
