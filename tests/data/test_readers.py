# SPDX-License-Identifier: Apache-2.0
"""Reading tables and arrays: what comes out is compared with grouping and encoding by hand."""

import csv
import gzip
import json
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.check import check
from coterie.data.ragged import DiskRows, Ragged
from coterie.data.readers import from_arrays, read, read_with
from coterie.data.schema import Column, Schema

PATIENTS = {
    "hospital": ["b", "a", "b", "c", "a", "b"],
    "age": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
    "ward": ["icu", "er", "er", "icu", "lab", "er"],
    "died": [0, 1, 0, 1, 1, 0],
}


def write_csv(path: Path, columns: dict[str, list], delimiter: str = ",") -> Path:
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wt", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
    return path


def write_parquet(path: Path, columns: dict, **options: object) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def rows_of(rows: Ragged, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    block = rows.client(rows.names.tolist().index(name))
    return block.x[0].numpy(), None if block.y is None else block.y[0].numpy()


def same(a: Ragged | None, b: Ragged | None) -> None:
    """Check that two sets of rows are the same, bit by bit."""
    if a is None or b is None:
        assert a is b
        return
    assert a.names.tolist() == b.names.tolist()
    for name in a.names.tolist():
        (x, y), (u, v) = rows_of(a, name), rows_of(b, name)
        np.testing.assert_array_equal(x, u)
        np.testing.assert_array_equal(y, v)


def table(path: Path) -> dict[str, list[str]]:
    """Read a compressed CSV file by hand."""
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.reader(file))
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(rows[0])}


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", [".parquet", ".csv", ".csv.gz", ".tsv"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, ending):
    path = tmp_path / f"patients{ending}"
    if ending == ".parquet":
        write_parquet(path, PATIENTS)
    else:
        write_csv(path, PATIENTS, delimiter="\t" if ending == ".tsv" else ",")
    clients = read(path, client="hospital", target="died", test_size=0)
    assert clients.schema.feature_names == ("age", "ward=er", "ward=icu", "ward=lab")
    assert clients.names.tolist() == ["a", "b", "c"]
    x, y = rows_of(clients.train, "b")
    np.testing.assert_array_equal(x, [[1.5, 0, 1, 0], [3.0, 1, 0, 0], [6.0, 1, 0, 0]])  # in the order of the file
    np.testing.assert_array_equal(y, [0, 0, 0])
    assert clients.train.y.dtype == torch.int64
    assert clients.schema.classes == ("0", "1")
    assert clients.test is None
    assert clients.newcomers is None


def test_a_folder_has_one_client_per_file(tmp_path):
    for name, rows in {"north": [1, 2, 3], "south": [4, 5]}.items():
        write_csv(tmp_path / f"{name}.csv.gz", {"x": rows, "y": [r / 4 for r in rows]})
    (tmp_path / "README.md").write_text("not data")
    clients = read(tmp_path, target="y", test_size=0, task="regression")
    assert clients.schema.client == "client"
    assert clients.names.tolist() == ["north", "south"]
    np.testing.assert_array_equal(rows_of(clients.train, "south")[0], [[4], [5]])
    np.testing.assert_array_equal(rows_of(clients.train, "south")[1], [1.0, 1.25])


def test_a_folder_of_parts_is_grouped_by_the_client_column(tmp_path):
    for i in range(2):
        write_parquet(tmp_path / f"part-{i}.parquet", {k: v[i::2] for k, v in PATIENTS.items()})
    clients = read(tmp_path, client="hospital", target="died", test_size=0)
    assert clients.names.tolist() == ["a", "b", "c"]
    np.testing.assert_array_equal(rows_of(clients.train, "b")[0][:, 0], [1.5, 3.0, 6.0])


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (pa.array([7, 10, 7]), ["10", "7"]),
        (pa.array([7.0, 10.0, 7.0]), ["10", "7"]),
        (pa.array([7.5, 10.0, 7.5]), ["10", "7.5"]),
        (pa.array([True, False, True]), ["false", "true"]),
        (pa.array(["x", "y", "x"]).dictionary_encode(), ["x", "y"]),
        (pa.array(["x", "y", "x"], pa.large_string()), ["x", "y"]),
        (pa.array([0, 1, 0], pa.date32()), ["1970-01-01", "1970-01-02"]),
    ],
)
def test_client_names_are_text_whatever_their_type(tmp_path, values, names):
    path = write_parquet(tmp_path / "t.parquet", {"who": values, "x": [1.0, 2.0, 3.0]})
    assert read(path, client="who", test_size=0).names.tolist() == names


def test_client_names_in_csv_keep_their_zeros(tmp_path):
    path = write_csv(tmp_path / "t.csv", {"who": ["007", "7", "56.0"], "x": [1, 2, 3]})
    assert read(path, client="who", test_size=0).names.tolist() == ["007", "56", "7"]


@pytest.mark.parametrize("block", [200, 1 << 20])
def test_csv_types_are_decided_by_the_whole_file(tmp_path, monkeypatch, block):
    monkeypatch.setattr("coterie.data.sources._BLOCK", block)
    last = {"x": "2.5", "w": "red", "t": "0", "d": "7"}
    first = {"x": "1", "w": "1", "t": "true", "d": "2020-01-01"}
    columns = {name: [first[name]] * 299 + [last[name]] for name in last}
    path = write_csv(tmp_path / "t.csv", {"who": ["a", "b"] * 150, **columns, "y": list(range(300))})
    clients = read(path, client="who", target="y", test_size=0)
    names = ("x", "w=1", "w=red", "t=0", "t=true", "d=2020-01-01", "d=7")
    assert clients.schema.feature_names == names
    np.testing.assert_array_equal(rows_of(clients.train, "b")[0][0], [1, 1, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(rows_of(clients.train, "b")[0][-1], [2.5, 0, 1, 1, 0, 0, 1])


def test_kinds_of_columns(tmp_path):
    columns = {
        "who": ["a", "b", "a"],
        "i": [1, 2, 3],
        "f": pa.array([1, 2, 3], pa.float32()),
        "yes": [True, False, True],
        "word": ["10", "9", "10"],
        "cat": pa.array(["q", "p", "q"]).dictionary_encode(),
        "code": [5, 5, 11],
    }
    path = write_parquet(tmp_path / "t.parquet", columns)
    clients = read(path, client="who", categorical=["code"], test_size=0)
    assert clients.schema.feature_names == ("i", "f", "yes", "word=9", "word=10", "cat=p", "cat=q", "code=5", "code=11")
    np.testing.assert_array_equal(rows_of(clients.train, "b")[0], [[2, 2, 0, 1, 0, 1, 0, 1, 0]])


def test_features_and_exclude_choose_columns_in_file_order(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", PATIENTS)
    chosen = read(path, client="hospital", features=["ward", "age"], test_size=0)
    assert [c.name for c in chosen.schema.columns] == ["age", "ward"]
    rest = read(path, client="hospital", target="died", exclude="ward", test_size=0)
    assert rest.schema.feature_names == ("age",)


@pytest.mark.parametrize("name", ["\0row", "site#", "site#####"])
def test_a_column_may_have_any_name(tmp_path, name):
    path = tmp_path / "rows.csv"
    path.write_text(f"site,{name},y\na,1,2\na,3,4\nb,5,6\nb,,8\n")
    clients = read(path, client="site", target="y", test_size=0.0, missing="drop")
    assert sorted(clients.train.origin.tolist()) == [0, 1, 2]
    assert clients.schema.columns[0].name == name


def test_column_names_with_dots_are_not_nested(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", {"who": ["a", "a"], "x": [1, 2], "x.y": [3, 4]})
    clients = read(path, client="who", target="x", task="regression", test_size=0)
    assert clients.schema.feature_names == ("x.y",)
    np.testing.assert_array_equal(rows_of(clients.train, "a")[0], [[3], [4]])


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (list(range(10)), "classification", tuple("0123456789")),
        (list(range(11)), "regression", ()),
        ([float(v % 3) for v in range(9)], "classification", ("0", "1", "2")),
        ([0.5, 1.0, 2.0], "regression", ()),
        ([True, False], "classification", ("false", "true")),
        (["no", "yes"], "classification", ("no", "yes")),
        (["10", "9"], "classification", ("9", "10")),
    ],
)
def test_task_follows_from_the_target(tmp_path, values, task, classes):
    n = len(values)
    path = write_parquet(tmp_path / "t.parquet", {"who": ["a"] * n, "x": np.arange(n), "y": values})
    schema = read(path, client="who", target="y", test_size=0).schema
    assert (schema.task, schema.classes) == (task, classes)
    x = np.arange(2.0 * n).reshape(n, 2)
    by_array = from_arrays(x, np.array(values), np.array(["a"] * n), test_size=0).schema
    assert (by_array.task, by_array.classes) == (task, classes)


def test_class_numbers_are_places_in_the_sorted_names(tmp_path):
    path = write_csv(tmp_path / "t.csv", {"who": ["a"] * 4, "x": [1, 2, 3, 4], "y": ["10", "9", "-1", "9"]})
    clients = read(path, client="who", target="y", test_size=0)
    assert clients.schema.classes == ("-1", "9", "10")
    assert rows_of(clients.train, "a")[1].tolist() == [2, 1, 0, 1]


def test_no_target_means_no_y(tmp_path):
    clients = read(write_parquet(tmp_path / "t.parquet", PATIENTS), client="hospital", test_size=0)
    assert clients.train.y is None
    assert clients.schema.task == "none"


def test_precision_is_as_asked(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", PATIENTS)
    clients = read(path, client="hospital", target="age", dtype=torch.float32, test_size=0)
    assert clients.train.x.dtype == clients.train.y.dtype == torch.float32


# -- missing ----------------------------------------------------------------------------------------------------------
GAPS = {
    "who": ["a", "b", "a", None, "b", "a"],
    "x": [1.0, None, 3.0, 4.0, 5.0, float("nan")],
    "w": ["p", "q", None, "p", "q", "p"],
    "y": [1.5, 2.5, 3.5, 4.5, None, 6.5],
}


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_mean_keeps_gaps_and_drops_rows_without_target_or_client(tmp_path, ending):
    path = _write_gaps(tmp_path, ending)
    clients = read(path, client="who", target="y", missing="mean", test_size=0)
    assert clients.dropped_rows == 2
    np.testing.assert_array_equal(rows_of(clients.train, "a")[0], [[1, 1, 0], [3, 0, 0], [np.nan, 1, 0]])
    np.testing.assert_array_equal(rows_of(clients.train, "b")[0], [[np.nan, 0, 1]])


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_drop_leaves_out_rows_with_any_gap(tmp_path, ending):
    path = _write_gaps(tmp_path, ending)
    clients = read(path, client="who", target="w", exclude=["y"], missing="drop", test_size=0)
    assert clients.dropped_rows == 4
    assert clients.names.tolist() == ["a", "b"]
    np.testing.assert_array_equal(rows_of(clients.train, "b")[0], [[5]])


def _write_gaps(folder: Path, ending: str) -> Path:
    if ending == ".parquet":
        return write_parquet(folder / "t.parquet", GAPS)
    blank = {name: ["" if v is None else v for v in values] for name, values in GAPS.items()}
    blank["x"][1] = "  "  # blanks are nothing, too
    return write_csv(folder / "t.csv", blank)


def test_gaps_in_columns_that_are_not_used_do_not_matter(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", {"who": ["a", "a"], "x": [1, 2], "z": [None, 1]})
    assert read(path, client="who", exclude=["z"], test_size=0).train.layout.n_rows == 2


# -- holding out ------------------------------------------------------------------------------------------------------
def test_small_clients_are_left_out_and_counted(tmp_path):
    clients = read(write_parquet(tmp_path / "t.parquet", PATIENTS), client="hospital", min_rows=2, test_size=0)
    assert clients.names.tolist() == ["a", "b"]
    assert clients.dropped_clients == 1


def test_splits_share_out_all_rows(tmp_path):
    n = 400
    path = write_parquet(tmp_path / "t.parquet", {"who": np.arange(n) % 20, "x": np.arange(n), "y": np.arange(n) / 2})
    clients = read(path, client="who", target="y", test_size=0.25, new_clients=0.2, seed=3)
    assert (clients.n_clients, clients.newcomers.n_clients) == (16, 4)
    assert set(clients.names) | set(clients.newcomers.names) == {str(i) for i in range(20)}
    parts = [clients.train, clients.test, clients.newcomers]
    assert [part.layout.n_rows for part in parts] == [16 * 15, 16 * 5, 4 * 20]
    found = np.concatenate([part.x.numpy()[:, 0] for part in parts])
    np.testing.assert_array_equal(np.sort(found), np.arange(n))
    for part in parts:
        torch.testing.assert_close(part.y * 2, part.x[:, 0])
    again = read(path, client="who", target="y", test_size=0.25, new_clients=0.2, seed=3)
    same(clients.test, again.test)
    assert "16 clients, 240 rows, 80 test rows, 4 new clients, 1 features, regression of 'y'" in repr(clients)


def test_clients_with_one_row_have_nothing_to_hold_out(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", {"who": ["a", "b"], "x": [1.0, 2.0]})
    clients = read(path, client="who", test_size=0.5)
    assert clients.test is None
    assert clients.train.layout.n_rows == 2


# -- on disk ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["y", "label", None])
def test_rows_on_disk_equal_rows_in_memory_also_after_splits(tmp_path, target):
    rng = np.random.default_rng(0)
    n = 5000
    columns = {"who": rng.integers(0, 40, n) ** 2 // 40, "label": rng.choice(["u", "v", "w"], n), "y": rng.random(n)}
    columns |= {f"x{i}": rng.normal(size=n) for i in range(5)}
    path = write_parquet(tmp_path / "t.parquet", columns, row_group_size=700)
    spill = tmp_path / "spill"
    options = {"client": "who", "target": target, "test_size": 0.3, "new_clients": 0.25}
    inside = read(path, **options)
    outside = read(path, **options, memory=1000, spill=spill)
    assert isinstance(outside.train.x, DiskRows)
    for part in ("train", "test", "newcomers"):
        same(getattr(inside, part), getattr(outside, part))
        for a, b in zip(getattr(inside, part).blocks(), getattr(outside, part).blocks(), strict=True):
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.ids, b.ids)
    assert len(list(spill.iterdir())) == (1 if target is None else 2)
    del outside
    assert not list(spill.iterdir())


def test_a_large_file_streams(tmp_path):
    """Read 80 MB, a single row group, while Arrow and numpy together never hold half of that."""
    rng = np.random.default_rng(0)
    n, d = 400_000, 24
    columns = {f"x{i}": rng.random(n) for i in range(d)} | {"y": rng.random(n), "who": rng.integers(0, 300, n)}
    path = write_parquet(tmp_path / "t.parquet", columns, row_group_size=n, compression="none", use_dictionary=False)
    del columns
    ordinary, counting = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counting)
    tracemalloc.start()
    try:
        clients = read(path, client="who", target="y", memory=1, spill=tmp_path, test_size=0)
        held = counting.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(ordinary)
    assert clients.train.layout.n_rows == n
    assert path.stat().st_size > 80e6
    assert held < 40e6


# -- by hand ----------------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "ü", "10", "9"]),
            st.floats(-1e6, 1e6, width=32),
            st.sampled_from(["red", "green", "blue"]),
            st.integers(0, 30),
        ),
        min_size=2,
        max_size=60,
    ),
    ending=st.sampled_from([".parquet", ".csv"]),
    memory=st.sampled_from([0, 1 << 30]),
)
def test_reading_equals_grouping_by_hand(rows, ending, memory):
    if len({row[3] for row in rows}) < 2:
        return
    who, x, colour, y = map(list, zip(*rows, strict=True))
    columns = {"x": x, "colour": colour, "who": who, "y": y}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"t{ending}"
        (write_parquet if ending == ".parquet" else write_csv)(path, columns)
        clients = read(path, client="who", target="y", task="regression", test_size=0, memory=memory, spill=folder)
        levels = sorted(set(colour))
        assert clients.names.tolist() == sorted(set(who))
        for name in set(who):
            mine = [row for row in rows if row[0] == name]
            found_x, found_y = rows_of(clients.train, name)
            by_hand = [[row[1], *(float(row[2] == level) for level in levels)] for row in mine]
            np.testing.assert_array_equal(found_x, by_hand)
            np.testing.assert_array_equal(found_y, [row[3] for row in mine])
        del clients


# -- a schema, again --------------------------------------------------------------------------------------------------
def test_schema_survives_json():
    schema = Schema(
        client="wer",
        target="y",
        columns=(Column(name="Größe"), Column(name="w", kind="categorical", levels=('"', "1", "é\n"))),
        task="classification",
        classes=("0", "1"),
        missing="mean",
    )
    assert Schema.model_validate_json(schema.model_dump_json()) == schema
    assert Schema.model_validate(json.loads(json.dumps(schema.model_dump()))) == schema
    assert schema.n_features == len(schema.feature_names) == 4


def test_encode_takes_tables_with_chunks():
    schema = Schema(client="who", columns=(Column(name="w", kind="categorical", levels=("p", "q")),))
    chunks = pa.chunked_array([["p"], ["q", None, "z"]])
    x, y = schema.encode(pa.table({"w": chunks}))
    np.testing.assert_array_equal(x, [[1, 0], [0, 1], [0, 0], [0, 0]])
    assert y is None


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_another_file_is_read_with_the_same_columns_and_levels(tmp_path, ending):
    schema = read(write_parquet(tmp_path / "t.parquet", PATIENTS), client="hospital", target="died").schema
    write = write_parquet if ending == ".parquet" else write_csv
    path = write(tmp_path / f"new{ending}", {"ward": ["lab", "spa"], "age": [7, 8], "hospital": ["n", "n"]})
    clients = read_with(schema, path)
    np.testing.assert_array_equal(rows_of(clients.train, "n")[0], [[7, 0, 0, 1], [8, 0, 0, 0]])
    assert clients.unknown_levels == 1
    assert clients.train.y is None
    assert clients.schema == schema


def test_reading_again_with_the_schema_gives_the_same_rows(tmp_path):
    path = write_csv(tmp_path / "t.csv", PATIENTS | {"ok": ["True", "False"] * 3})
    clients = read(path, client="hospital", target="died", test_size=0)
    same(clients.train, read_with(clients.schema, path).train)
    same(clients.train, read_with(clients.schema, path, memory=1).train)


def test_an_empty_target_column_counts_as_none(tmp_path):
    schema = read(write_csv(tmp_path / "t.csv", PATIENTS), client="hospital", target="died").schema
    path = write_csv(tmp_path / "new.csv", PATIENTS | {"died": [""] * 6})
    assert read_with(schema, path).train.y is None


# -- real data --------------------------------------------------------------------------------------------------------
def test_school_exams_equal_the_file(shared_data):
    path = shared_data / "school_exam_139schools.csv.gz"
    by_hand = table(path)
    clients = read(path, client="school", target="score", test_size=0)
    assert clients.n_clients == 139
    assert clients.schema.task == "regression"
    mine = [i for i, school in enumerate(by_hand["school"]) if school == "17"]
    x, y = rows_of(clients.train, "17")
    np.testing.assert_array_equal(x, [[float(by_hand[f"x{j}"][i]) for j in range(28)] for i in mine])
    np.testing.assert_array_equal(y, [float(by_hand["score"][i]) for i in mine])


def test_heart_disease_without_gaps_has_the_published_rows(shared_data):
    path = shared_data / "heart_disease_4hospitals.csv.gz"
    options = {"client": "hospital", "target": "num", "missing": "drop", "exclude": ["slope", "ca", "thal"]}
    clients = read(path, **options, test_size=0)
    sizes = dict(zip(clients.names.tolist(), clients.train.counts.tolist(), strict=True))
    assert sorted(sizes.values()) == [46, 130, 261, 303]  # as FLamby publishes them
    assert clients.dropped_rows == 920 - 740
    assert clients.schema.classes == ("0", "1", "2", "3", "4")


def test_eicu_gaps_are_where_the_file_has_them(shared_data):
    path = shared_data / "eicu_demo_by_hospital.csv.gz"
    by_hand = table(path)
    clients = read(path, client="hospitalid", target="hospital_death", exclude=["patient"], missing="mean", test_size=0)
    assert clients.n_clients == 186
    assert clients.dropped_rows == by_hand["hospital_death"].count("")
    at = clients.schema.feature_names.index("albumin")
    left = [a for a, d in zip(by_hand["albumin"], by_hand["hospital_death"], strict=True) if d]
    assert int(clients.train.x[:, at].isnan().sum()) == left.count("")
    wards = [i for i, name in enumerate(clients.schema.feature_names) if name.startswith("unittype=")]
    assert clients.schema.feature_names[wards[0]] == f"unittype={sorted(set(by_hand['unittype']))[0]}"
    assert clients.train.x[:, wards].sum(1).eq(1).all()
    assert set(clients.train.y.tolist()) == {0, 1}


# -- arrays -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("given", "kept"), [("float64", "float64"), ("float32", "float32"), ("uint8", "float32")])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_arrays_keep_their_precision(given, kept, as_tensor):
    x = np.arange(24).reshape(6, 2, 2).astype(given)
    y = np.array([0.5, 1, 2, 3, 4, 5])
    groups = np.array([2, 1, 2, 1, 2, 1])
    passed = (torch.from_numpy(x), torch.from_numpy(y)) if as_tensor else (x, y)
    clients = from_arrays(*passed, groups, test_size=0)
    assert str(clients.train.x.dtype) == str(clients.train.y.dtype) == f"torch.{kept}"
    assert clients.train.shape == (2, 2)
    np.testing.assert_array_equal(rows_of(clients.train, "2")[0], x[groups == 2])
    np.testing.assert_array_equal(rows_of(clients.train, "2")[1], y[groups == 2])
    assert clients.schema.n_features == 4


def test_arrays_that_cannot_be_written_to_are_copied():
    x = np.ones((4, 2))
    x.flags.writeable = False
    assert from_arrays(x, groups=["a", "b", "a", "b"]).n_clients == 2


def test_arrays_and_a_file_give_the_same_rows(tmp_path):
    path = write_parquet(tmp_path / "t.parquet", PATIENTS)
    by_file = read(path, client="hospital", target="died", exclude="ward", new_clients=0.4)
    x = np.array(PATIENTS["age"])[:, None]
    y, groups = np.array(PATIENTS["died"]), np.array(PATIENTS["hospital"], dtype=object)
    by_array = from_arrays(x, y, groups, feature_names=["age"], new_clients=0.4)
    for part in ("train", "test", "newcomers"):
        same(getattr(by_file, part), getattr(by_array, part))
    assert by_file.schema.columns == by_array.schema.columns


def test_arrays_without_groups_are_one_client():
    clients = from_arrays(np.ones((3, 2)), test_size=0)
    assert clients.n_clients == 1


def test_gaps_in_arrays(tmp_path):
    x = np.array([[1.0], [np.nan], [3.0], [4.0]])
    y = np.array([1.5, 2.5, np.nan, 4.5])
    groups = np.array([1.0, 1.0, 1.0, np.nan])
    mean = from_arrays(x, y, groups, missing="mean", test_size=0)
    np.testing.assert_array_equal(rows_of(mean.train, "1")[0], [[1], [np.nan]])
    assert mean.dropped_rows == 2
    dropped = from_arrays(
        np.vstack([x, x]), np.append(y, y + 1), np.append(groups, groups), missing="drop", test_size=0
    )
    np.testing.assert_array_equal(rows_of(dropped.train, "1")[1], [1.5, 2.5])


# -- check ------------------------------------------------------------------------------------------------------------
def test_check_sums_up_what_is_there(tmp_path):
    found = check(write_csv(tmp_path / "t.csv", PATIENTS), client="hospital", target="died")
    assert (found.rows, found.complete_rows, found.clients) == (6, 6, 3)
    assert found.rows_per_client == {"min": 1.0, "median": 2.0, "max": 3.0}
    age, ward = found.features
    assert (age.kind, age.low, age.high) == ("numeric", 1.5, 6.0)
    assert ward.levels == ("er", "icu", "lab")
    assert found.target.classes == {"0": 3, "1": 3}
    assert found.memory == 6 * 8 * (4 + 1)
    assert found.ok
    assert json.loads(found.model_dump_json())["n_features"] == 4


def test_check_of_real_data_agrees_with_numpy(shared_data):
    path = shared_data / "radon_85counties.csv.gz"
    by_hand = table(path)
    found = check(path, client="county", target="log.radon")
    y = np.array(by_hand["log.radon"], dtype=float)
    _, counts = np.unique(by_hand["county"], return_counts=True)
    assert found.clients == 85
    assert found.rows_per_client == {"min": counts.min(), "median": np.median(counts), "max": counts.max()}
    assert found.target.mean == pytest.approx(y.mean(), rel=1e-12)
    assert found.target.std == pytest.approx(y.std(), rel=1e-12)
    within = {feature.name for feature in found.features if feature.constant_within_clients}
    assert within == {"uranium", "county.name"}
    sentences = " / ".join(problem.sentence for problem in found.problems)
    assert f"{(counts < 5).sum()} of 85 clients have fewer than 5 rows" in sentences
    assert "clients are very unequal" in sentences


def test_shuffling_a_file_changes_the_order_within_clients_and_nothing_else(tmp_path):
    order = np.random.default_rng(1).permutation(6)
    a = read(write_parquet(tmp_path / "a.parquet", PATIENTS), client="hospital", target="died", test_size=0)
    shuffled = {name: [values[i] for i in order] for name, values in PATIENTS.items()}
    b = read(write_parquet(tmp_path / "b.parquet", shuffled), client="hospital", target="died", test_size=0)
    assert a.schema == b.schema
    for name in a.names.tolist():
        x, u = rows_of(a.train, name)[0], rows_of(b.train, name)[0]
        np.testing.assert_array_equal(x[np.lexsort(x.T)], u[np.lexsort(u.T)])
