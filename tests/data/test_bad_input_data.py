# SPDX-License-Identifier: Apache-2.0
"""Bad tables and arrays stop at the boundary, with one sentence and a way out."""

import datetime
import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from coterie.data import gather
from coterie.data.check import check
from coterie.data.readers import from_arrays, read, read_with
from coterie.errors import ConfigError, DataError

GOOD = {"who": ["a", "a", "b", "b"], "x": [1.0, 2.0, 3.0, 4.0], "y": [0.5, 1.5, 2.5, 3.5]}


@pytest.fixture
def parquet(tmp_path):
    def write(name: str = "t.parquet", **columns: object) -> Path:
        pq.write_table(pa.table({**GOOD, **columns}), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def text(tmp_path):
    def write(content: str, name: str = "t.csv") -> Path:
        (tmp_path / name).write_text(content, encoding="utf-8")
        return tmp_path / name

    return write


def refused(path: object, *said: str, hint: str = "", **options: object) -> None:
    """Check that reading is refused, with these words, a hint and nothing that looks like a traceback."""
    options = {"client": "who", "target": "y", **options}
    with pytest.raises(DataError) as caught:
        read(path, **options)
    _well_said(caught.value, *said, hint=hint)
    found = check(path, **{k: v for k, v in options.items() if k != "dtype"})
    assert not found.ok, "check must find what read refuses"


def _well_said(error: DataError, *said: str, hint: str = "") -> None:
    for words in said:
        assert words in error.message
    assert error.hint
    assert hint in error.hint
    assert "\n" not in error.message
    for noise in ("Traceback", "Arrow", "arrow", "Errno", "0x"):
        assert noise not in str(error)


# -- files ------------------------------------------------------------------------------------------------------------
def test_file_not_found(parquet):
    path = parquet("patients.parquet")
    refused(path.with_name("patient.parquet"), "there is no file", hint="did you mean")
    refused(path.parent / "nowhere" / "t.csv", "there is no file", hint="nowhere")


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.csv.gz"])
def test_empty_file(text, name):
    refused(text("", name), "is empty")


def test_empty_compressed_file(tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b""))
    refused(tmp_path / "t.csv.gz", "is empty")


def test_header_without_rows(text, parquet):
    refused(text("who,x,y\n"), "no rows")
    refused(parquet(who=pa.array([], pa.string()), x=pa.array([], "f8"), y=pa.array([], "f8")), "no rows")


def test_truncated_parquet(parquet):
    path = parquet()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(path, "cannot be read as Parquet", hint="cut short")


def test_damaged_pages_of_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {"who": ["a", "b"] * 500, "x": np.random.default_rng(0).random(1000), "y": np.arange(1000.0)}
    pq.write_table(pa.table(columns), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[4:3000] = bytes(2996)
    path.write_bytes(content)
    refused(path, "cannot be read as Parquet")


def test_truncated_gzip(tmp_path):
    lines = "who,x,y\n" + "".join(f"a,{i * 0.7},{i}\n" for i in range(5000))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(lines.encode())[:-2000])
    refused(tmp_path / "t.csv.gz", "cannot be read as CSV")


def test_unknown_ending(text):
    refused(text("who,x,y\na,1,2\n", "t.xlsx"), "no known ending", hint=".parquet")


def test_ragged_lines(text):
    refused(text("who,x,y\na,1,2\nb,3\n"), "a line with 2 cells where the header has 3", "'b,3'")


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"who,x,y\n\xff\xfe,1,2\nb,2,3\n")
    refused(tmp_path / "t.csv", "not UTF-8")


def test_folder_without_files(tmp_path, text):
    text("nothing", "notes.md")
    refused(tmp_path, "no file that can be read", hint=".csv")


def test_folder_with_different_columns(tmp_path, text):
    text("x,y\n1,2\n", "a.csv")
    text("x,z\n1,2\n", "b.csv")
    refused(tmp_path, "different columns", "'y' is in 'a.csv' and not in 'b.csv'", client=None)


def test_folder_with_two_files_for_a_client(tmp_path, text, parquet):
    text("x,y\n1,2\n", "a.csv")
    text("x\ty\n1\t2\n", "a.tsv")
    refused(tmp_path, "2 files for client 'a'", client=None)


# -- columns ----------------------------------------------------------------------------------------------------------
def test_client_column_is_missing(parquet):
    refused(
        parquet(hospital=["a"] * 4), "no client column 'hopsital'", hint="did you mean 'hospital'?", client="hopsital"
    )
    refused(parquet(), "no client column", hint="columns are: who, x, y", client="zzz")
    refused(parquet(), "client column of", hint="--client", client=None)


def test_semicolons(text):
    refused(text("who;x;y\na;1;2\n"), "no client column", hint="--sep ';'")


def test_target_column_is_missing(parquet):
    refused(parquet(score=[1, 2, 3, 4]), "no target column 'scor'", hint="'score'", target="scor")


@pytest.mark.parametrize("option", ["features", "exclude", "categorical"])
def test_other_columns_are_missing(parquet, option):
    refused(parquet(), "no column 'zzz'", **{option: ["zzz"]})


def test_duplicate_columns(text, tmp_path):
    refused(text("who,x,x,y\na,1,2,3\n"), "2 columns with the name 'x'")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["who", "y", "y"])
    pq.write_table(twice, tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", "2 columns with the name 'y'")


def test_client_is_target(parquet):
    refused(parquet(), "both client and target", target="who")


def test_target_among_the_features(parquet):
    refused(parquet(), "cannot be a feature too", features=["x", "y"])


def test_no_feature_columns(parquet):
    refused(parquet(), "no feature columns", exclude=["x"])


def test_a_column_without_a_name(text):
    refused(text(",who,x,y\n0,a,1,2\n1,b,2,3\n"), "column 1", "has no name", hint="--exclude ''")


def test_dates(parquet, text):
    day = [datetime.date(2020, 1, i) for i in range(1, 5)]
    refused(parquet(day=day), "'day' holds dates", hint="--exclude day")
    refused(parquet(day=[datetime.datetime(2020, 1, i) for i in range(1, 5)]), "dates", hint="--exclude day")
    refused(text("who,day,y\na,2020-01-01,1\nb,2020-01-02,2.5\n"), "dates", hint="--exclude day")
    refused(text("who,day,y\na,2020-01-01T10:00:00Z,1\nb,2020-01-02T10:00:00Z,2.5\n"), "dates")
    refused(parquet(y=day), "target 'y' holds dates")


def test_columns_of_other_types(parquet):
    refused(parquet(x=[[1], [2], [3], [4]]), "'x' holds list", "neither numbers nor text", hint="--exclude x")
    refused(parquet(y=[[1], [2], [3], [4]]), "target 'y' holds list")


def test_too_many_levels(parquet, text):
    n = 101
    columns = {"who": ["a"] * n, "x": [f"v{i}" for i in range(n)], "y": np.arange(n)}
    refused(parquet(**columns), "more than 100 different levels", "'v0'", hint="--exclude x")
    lines = [f"a,{i},{i}" for i in range(200)]
    lines[150] = "a,?,150"
    refused(text("who,x,y\n" + "\n".join(lines)), "more than 100", "such as '?'", hint="correct the cells")


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", [None, float("nan")])
def test_missing_values(parquet, gap):
    path = parquet(x=pa.array([1.0, gap, gap, 4.0], from_pandas=False), z=[1.0, 2.0, gap, 3.0])
    refused(path, "'x' has 2 missing values", "1 other column", hint="--missing mean (fill with the federated mean)")
    assert read(path, client="who", target="y", missing="drop").dropped_rows == 2


def test_missing_text_and_cells(parquet, text):
    refused(parquet(w=["p", "", "q", None]), "'w' has 2 missing values")
    refused(text("who,x,y\na,1,2\nb,,3\n"), "'x' has 1 missing value")
    refused(text("who,x,y\na,1,2\nb,NA,3\n"), "'x' has 1 missing value")


def test_missing_targets_and_clients(parquet):
    refused(parquet(y=[1.5, None, 2.0, 3.0]), "target 'y' has 1 missing value", hint="--missing drop")
    refused(parquet(who=["a", None, "b", "b"]), "client column 'who' has 1 missing value", hint="--missing drop")


def test_columns_without_any_value(parquet):
    nothing = pa.array([None] * 4, pa.float64())
    refused(parquet(x=nothing), "'x' has no values", missing="mean")
    path = parquet(x=nothing)
    with pytest.raises(DataError, match="every one of the 4 rows"):
        read(path, client="who", target="y", missing="drop")


@pytest.mark.parametrize("missing", ["error", "mean", "drop"])
def test_infinite_values(parquet, text, missing):
    refused(parquet(x=[1.0, np.inf, -np.inf, 2.0]), "'x' has 2 infinite values", missing=missing)
    refused(parquet(y=[1.0, np.inf, 3.0, 2.5]), "target 'y' has 1 infinite value", missing=missing)
    refused(text("who,x,y\na,inf,1\nb,2,2.5\n"), "'x' has 1 infinite value", missing=missing)


def test_values_beyond_the_precision(parquet):
    path = parquet(x=[1.0, 1e45, 3.0, 4.0])
    with pytest.raises(DataError, match="too large"):
        read(path, client="who", target="y", dtype=torch.float32)
    read(path, client="who", target="y")


def test_one_class(parquet):
    refused(parquet(y=["u"] * 4), "only one class, 'u'")
    refused(parquet(y=[3] * 4), "only one class, '3'")


def test_constant_target(parquet):
    refused(parquet(y=[2.5] * 4), "2.5 in every row", task="regression")


def test_regression_of_text(parquet):
    refused(parquet(y=["low", "high", "low", "high"]), "'low'", "regression needs numbers", task="regression")


def test_too_many_classes(parquet):
    n = 1001
    path = parquet(who=["a"] * n, x=np.arange(n), y=[f"c{i}" for i in range(n)])
    refused(path, "more than 1000 classes")


def test_a_task_without_target(parquet):
    refused(parquet(), "classification needs a target", target=None, task="classification")


def test_no_clients_left(parquet):
    refused(parquet(), "none of the 2 clients has 3 rows or more", hint="--min-rows 2", min_rows=3)


def test_wrong_precision(parquet):
    with pytest.raises(DataError, match=r"torch\.int64"):
        read(parquet(), client="who", dtype=torch.int64)


def test_no_room_on_disk(parquet, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(DataError, match="left") as caught:
        read(parquet(), client="who", memory=0, spill=tmp_path)
    assert "--spill" in caught.value.hint


@pytest.mark.parametrize(
    "option", [{"missing": "zero"}, {"task": "ranking"}, {"test_size": 1.0}, {"new_clients": -0.1}, {"min_rows": 0}]
)
def test_options_that_make_no_sense(parquet, option):
    with pytest.raises(ConfigError) as caught:
        read(parquet(), client="who", **option)
    assert caught.value.hint


@pytest.mark.parametrize("rows", [1, 3])
def test_a_file_that_changes_while_it_is_read(parquet, monkeypatch, rows):
    path = parquet()
    counted = gather.laid_out

    def meanwhile(scan, min_rows):
        parquet(who=["a"] * rows, x=[1.0] * rows, y=[2.0] * rows)
        return counted(scan, min_rows)

    monkeypatch.setattr("coterie.data.readers.laid_out", meanwhile)
    with pytest.raises(DataError, match="changed while it was read"):
        read(path, client="who", target="y")


def test_holding_out_everybody(parquet):
    with pytest.raises(DataError, match="no clients to train on"):
        read(parquet(), client="who", new_clients=0.9)


# -- with a schema ----------------------------------------------------------------------------------------------------
def test_files_that_do_not_fit_the_schema(parquet, text):
    schema = read(parquet(y=["u", "v", "u", "v"]), client="who", target="y").schema
    cases = {
        "who,z\na,1\n": "no column 'x'",
        "z,x\na,1\n": "no column 'who'",
        "who,x\na,1\nb,old\n": "'x' holds text such as 'old' where numbers are expected",
        "who,x\na,1\nb,\n": "'x' has 1 missing value",
        "who,x\na,1\nb,inf\n": "'x' has 1 infinite value",
        "who,x,y\na,1,u\nb,2,w\n": "a class 'w' that is not known",
        "who,x,y\na,1,u\nb,2,\n": "target 'y' has 1 missing value",
    }
    for content, said in cases.items():
        with pytest.raises(DataError) as caught:
            read_with(schema, text(content))
        _well_said(caught.value, said)


# -- arrays -----------------------------------------------------------------------------------------------------------
X, Y, G = np.arange(8.0).reshape(4, 2), np.array([0.5, 1, 2, 3]), np.array(["a", "a", "b", "b"])
BAD_ARRAYS = {
    "X has shape (4,)": (X[:, 0], Y, G),
    "X has shape (0, 2)": (X[:0], Y[:0], G[:0]),
    "X has a value that is not numeric": (np.where(X == 3, "three", X.astype(object)), Y, G),
    "X has dtype <U3": (X.astype("U3"), Y, G),
    "X has complex numbers": (X.astype(complex), Y, G),
    "X has rows of different lengths": ([[1, 2], [3]], None, None),
    "X has infinite values": (np.where(X == 3, np.inf, X), Y, G),
    "X has missing values in 1 rows": (np.where(X == 3, np.nan, X), Y, G),
    "y has 3 values and X has 4 rows": (X, Y[:3], G),
    "y has shape (4, 2)": (X, X, G),
    "y has infinite values": (X, Y / 0.5 * np.array([1, 1, 1, np.inf]), G),
    "y has missing values in 1 rows": (X, np.array([1, 2, np.nan, 3]), G),
    "y has dtype object": (X, np.array([1, "a", 2.0, 3], dtype=object), G),
    "y has dtype datetime64": (X, np.arange(4).astype("datetime64[D]"), G),
    "y has only one class": (X, np.ones(4), G),
    "groups has 3 values and X has 4 rows": (X, Y, G[:3]),
    "groups has shape": (X, Y, np.array([G, G]).T),
    "groups has missing values in 1 rows": (X, Y, np.array(["a", None, "b", "b"], dtype=object)),
}


@pytest.mark.parametrize("said", BAD_ARRAYS)
def test_bad_arrays(said):
    with pytest.raises(DataError) as caught:
        from_arrays(*BAD_ARRAYS[said])
    _well_said(caught.value, said)


def test_bad_uses_of_arrays():
    with pytest.raises(DataError, match="regression needs numbers"):
        from_arrays(X, G, G, task="regression")
    with pytest.raises(DataError, match="is the same in every row"):
        from_arrays(X, np.ones(4), G, task="regression")
    with pytest.raises(DataError, match="y has values too large for float32"):
        from_arrays(X.astype(np.float32), Y * 1e45, G, task="regression")
    with pytest.raises(DataError, match="classification needs targets"):
        from_arrays(X, None, G, task="classification")
    with pytest.raises(DataError, match="1 different feature names and 2 features"):
        from_arrays(X, Y, G, feature_names=["p", "p"])
    with pytest.raises(ConfigError, match="missing is 'zero'"):
        from_arrays(X, Y, G, missing="zero")


# -- check ------------------------------------------------------------------------------------------------------------
def test_check_reports_all_problems_at_once(parquet):
    path = parquet(
        who=["a", "a", "a", "b"],
        x=[1.0, np.inf, 2.0, np.nan],
        same=[7, 7, 7, 7],
        site=["n", "n", "n", "s"],
        y=["u", "u", "u", "v"],
    )
    found = check(path, client="who", target="y")
    said = " / ".join(f"{problem.severity}: {problem.sentence}" for problem in found.problems)
    for words in (
        "error: column 'x' has 1 infinite value",
        "error: column 'x' has 1 missing value",
        "warning: 1 column with the same value in every row: same",
        "warning: 1 column with the same value in all rows of a client: site",
        "warning: 2 of 2 clients have fewer than 5 rows",
        "warning: 2 of 2 clients have rows of one class only",
    ):
        assert words in said
    assert [problem.severity for problem in found.problems] == ["error"] * 2 + ["warning"] * 4
    assert found.complete_rows == 3


def test_check_notes_gaps_that_will_be_filled(parquet):
    found = check(parquet(x=[1.0, None, 2.0, 3.0]), client="who", target="y", missing="mean")
    assert found.ok
    assert any("x (1)" in problem.sentence and problem.severity == "note" for problem in found.problems)
