# SPDX-License-Identifier: Apache-2.0
"""Predictions and assignments of files: every row in the file's order, new clients placed by their labelled rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest

from coterie import IFCA, FedAvg, Local
from coterie.cli.tables import check_ending, write_rows
from coterie.cli.tables.clusters import assignments
from coterie.cli.tables.predicted import Asked, predictions
from coterie.data.readers import read
from coterie.errors import ConfigError, DataError
from planted import Planted, planted

OLD, NEW = planted(8, 20), planted(4, 15, seed=5, prefix="new")
WORDS = planted(8, 30, classes=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> IFCA:
    path = OLD.write(tmp_path_factory.mktemp("data") / "old.csv")
    return IFCA(rounds=15).fit(read(path, client="site", target="y", test_size=0.0))


def together(*parts: Planted) -> dict[str, np.ndarray]:
    columns = {"site": np.concatenate([p.groups for p in parts]), "y": np.concatenate([p.y for p in parts])}
    return columns | {f"x{i}": np.concatenate([p.x[:, i] for p in parts]) for i in range(3)}


def write(path: Path, columns: dict[str, Any]) -> Path:
    table = pa.table(columns)
    pq.write_table(table, path) if path.suffix == ".parquet" else pc.write_csv(table, path)
    return path


def label_of(model: IFCA) -> dict[str, int]:
    """What group 0 and group 1 are called by the model: the planted group of s00 and s01."""
    known = dict(zip(model.client_names_.tolist(), model.labels_.tolist(), strict=True))
    return known | {name: known[f"s0{group}"] for name, group in NEW.truth.items()}


# -- predictions ------------------------------------------------------------------------------------------------------
def test_predictions_stand_in_the_order_of_the_file(tmp_path: Path, model: IFCA) -> None:
    table, said = predictions(model, OLD.write(tmp_path / "t.csv"))
    assert table.column_names == ["client", "label", "prediction"]
    assert table["client"].to_pylist() == OLD.groups.tolist()
    np.testing.assert_allclose(table["prediction"].to_numpy(), model.predict(OLD.x, groups=OLD.groups), rtol=1e-12)
    assert table["label"].to_pylist() == [label_of(model)[name] for name in OLD.groups]
    assert said == []


@pytest.mark.parametrize("ending", ["t.parquet", "t.csv"])
def test_the_target_is_not_needed_for_known_clients(tmp_path: Path, model: IFCA, ending: str) -> None:
    columns = together(OLD)
    want = predictions(model, write(tmp_path / f"with-{ending}", columns))[0]
    del columns["y"]
    assert predictions(model, write(tmp_path / ending, columns))[0] == want


def test_rows_without_a_target_are_predicted_too(tmp_path: Path, model: IFCA) -> None:
    columns = together(OLD)
    want = predictions(model, write(tmp_path / "all.csv", columns))[0]
    columns["y"] = pa.array(columns["y"], mask=np.arange(len(OLD.y)) % 3 > 0)
    assert predictions(model, write(tmp_path / "some.csv", columns))[0] == want


def test_new_clients_are_placed_by_their_labelled_rows_and_predicted_in_all(tmp_path: Path, model: IFCA) -> None:
    columns = together(OLD, NEW)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(columns["y"]))
    columns = {name: values[order] for name, values in columns.items()}
    y, unlabelled = columns["y"], rng.random(len(order)) < 0.5
    columns["y"] = pa.array(y, mask=unlabelled)
    table, _ = predictions(model, write(tmp_path / "t.csv", columns))
    assert table["client"].to_pylist() == columns["site"].tolist()
    assert table["label"].to_pylist() == [label_of(model)[name] for name in columns["site"].tolist()]
    error = table["prediction"].to_numpy() - y
    assert np.sqrt((error[unlabelled] ** 2).mean()) < 4  # the noise is 2, the targets' spread 25


def test_known_clients_keep_their_model_whatever_their_rows_say(tmp_path: Path, model: IFCA) -> None:
    columns = together(OLD, NEW)
    swapped = [f"s{int(name[1:]) ^ 1:02d}" if name in OLD.truth else name for name in columns["site"].tolist()]
    columns["site"] = np.array(swapped)  # s00 has rows of the other group now
    table, _ = predictions(model, write(tmp_path / "t.csv", columns))
    assert table["label"].to_pylist() == [label_of(model)[name] for name in swapped]


def test_a_new_client_without_a_labelled_row_is_served_by_all_models_by_their_clients(
    tmp_path: Path, model: IFCA
) -> None:
    columns = together(OLD, NEW)
    lost = columns["site"] == "new02"
    columns["y"] = pa.array(columns["y"], mask=lost)
    table, said = predictions(model, write(tmp_path / "t.csv", columns))
    assert [label for label, mine in zip(table["label"].to_pylist(), lost, strict=True) if mine] == [None] * 15
    assert said == ["1 new client has no labelled rows, and the model for all is used"]
    x = (NEW.x[NEW.groups == "new02"] - model.scaling_.mean.numpy()) / model.scaling_.scale.numpy()
    theta = model.theta_.numpy()
    each = x @ theta[:, :3].T + theta[:, 3]  # [N, K]
    share = np.bincount(model.labels_, minlength=2) / len(model.labels_)
    want = each @ share * float(model.scaling_.y_scale) + float(model.scaling_.y_mean)
    np.testing.assert_allclose(table["prediction"].to_numpy()[lost], want, rtol=1e-9)
    del columns["y"]
    again, said = predictions(model, write(tmp_path / "t.parquet", columns))
    assert again["prediction"].to_numpy()[lost] == pytest.approx(want)
    assert said == ["4 new clients have no labelled rows, and the model for all is used"]


def test_labelled_rows_of_a_new_client_are_not_predicted_by_a_model_that_has_seen_their_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 8)), rng.normal(size=400)  # nothing to learn, and much room to learn it by heart
    data = {"site": np.repeat([f"c{i:02d}" for i in range(20)], 20), "y": y} | {f"x{i}": x[:, i] for i in range(8)}
    made = Local(penalty=1e-3).fit(read(write(tmp_path / "t.csv", data), client="site", target="y", test_size=0.0))
    new = data | {"site": np.char.replace(data["site"], "c", "n")}
    table, said = predictions(made, write(tmp_path / "n.csv", new))
    assert said == []
    assert np.corrcoef(table["prediction"].to_numpy(), y)[0, 1] < 0.2
    known, _ = predictions(made, tmp_path / "t.csv")
    assert np.corrcoef(known["prediction"].to_numpy(), y)[0, 1] > 0.4


def test_probabilities_of_all_classes_and_a_threshold(tmp_path: Path) -> None:
    made = FedAvg(rounds=20).fit(read(WORDS.write(tmp_path / "t.csv"), client="site", target="y"))
    table, _ = predictions(made, tmp_path / "t.csv")
    names = [f"probability_{name}" for name in made.schema_.classes]
    assert table.column_names == ["client", "label", "prediction", *names]
    p = np.stack([table[name].to_numpy() for name in names], 1)
    np.testing.assert_allclose(p, made.predict_proba(WORDS.x, WORDS.groups), rtol=1e-12)
    np.testing.assert_allclose(p.sum(1), 1)
    assert table["prediction"].to_pylist() == [made.schema_.classes[k] for k in p.argmax(1)]
    bold, _ = predictions(made, tmp_path / "t.csv", Asked(threshold=0.2))
    assert bold["prediction"].to_pylist() == [made.schema_.classes[int(value >= 0.2)] for value in p[:, 1]]
    with pytest.raises(ConfigError, match="intervals are of"):
        predictions(made, tmp_path / "t.csv", Asked(interval=0.9))


def test_intervals_have_two_columns(tmp_path: Path, model: IFCA) -> None:
    table, _ = predictions(model, write(tmp_path / "t.csv", together(OLD, NEW)), Asked(interval=0.9))
    assert table.column_names == ["client", "label", "prediction", "lower", "upper"]
    low, middle, high = (table[name].to_numpy() for name in ("lower", "prediction", "upper"))
    np.testing.assert_allclose(middle - low, high - middle, rtol=1e-9)
    new = np.char.startswith(np.asarray(table["client"].to_pylist()), "new")
    assert (high - low)[new].min() > 2 * (high - low)[~new].max()  # two groups far apart: who is new may be of either
    with pytest.raises(ConfigError, match="no calibration rows were held out"):
        predictions(model, tmp_path / "t.csv", Asked(interval=0.9, how="conformal"))
    with pytest.raises(ConfigError, match="a threshold is for classes"):
        predictions(model, tmp_path / "t.csv", Asked(threshold=0.3))


def test_missing_features_are_filled(tmp_path: Path, model: IFCA) -> None:
    columns = together(OLD)
    columns["x1"] = pa.array(columns["x1"], mask=np.arange(len(OLD.y)) == 3)
    table, _ = predictions(model, write(tmp_path / "t.csv", columns))
    x = OLD.x.copy()
    x[3, 1] = np.nan
    np.testing.assert_allclose(table["prediction"].to_numpy(), model.predict(x, groups=OLD.groups), rtol=1e-12)


def test_rows_without_a_client_are_refused(tmp_path: Path, model: IFCA) -> None:
    columns = together(OLD)
    columns["site"] = pa.array(columns["site"], mask=np.arange(len(OLD.y)) < 2)
    with pytest.raises(DataError, match=r"2 rows of .*t\.parquet have no client"):
        predictions(model, write(tmp_path / "t.parquet", columns))


def test_columns_may_stand_in_another_order_among_others(tmp_path: Path, model: IFCA) -> None:
    columns = together(OLD)
    want = predictions(model, write(tmp_path / "a.csv", columns))[0]
    mixed = {"note": np.full(len(OLD.y), "hello")} | {name: columns[name] for name in ("x2", "y", "x0", "site", "x1")}
    assert predictions(model, write(tmp_path / "b.csv", mixed))[0] == want


def test_a_folder_with_one_file_per_client(tmp_path: Path) -> None:
    columns = together(OLD)
    for name in OLD.names:
        own = columns["site"] == name
        write(tmp_path / f"{name}.csv", {k: v[own] for k, v in columns.items() if k != "site"})
    model = IFCA(rounds=15).fit(read(tmp_path, target="y", test_size=0.0))
    table, _ = predictions(model, tmp_path)
    order = np.argsort(OLD.groups, kind="stable")  # files by name
    assert table["client"].to_pylist() == OLD.groups[order].tolist()
    np.testing.assert_allclose(
        table["prediction"].to_numpy(), model.predict(OLD.x, groups=OLD.groups)[order], rtol=1e-12
    )


def test_classes_are_predicted_by_name_and_unknown_levels_are_told(tmp_path: Path) -> None:
    rows = [f"c{i % 4},{i % 7},{'ab'[i % 2]},{('no', 'yes', 'perhaps')[i % 3]}" for i in range(80)]
    (tmp_path / "t.csv").write_text("who,x,ward,y\n" + "\n".join(rows))
    made = IFCA(rounds=2).fit(read(tmp_path / "t.csv", client="who", target="y"))
    (tmp_path / "n.csv").write_text("who,x,ward\nc0,1,a\nc1,2,z\nc0,2,q\n")
    table, said = predictions(made, tmp_path / "n.csv")
    assert set(table["prediction"].to_pylist()) <= {"no", "yes", "perhaps"}
    assert said == ["2 cells have a category that was not in the training data, and count as none"]


def test_one_model_predicts_anybody(tmp_path: Path) -> None:
    made = FedAvg(rounds=3).fit(read(OLD.write(tmp_path / "t.csv"), client="site", target="y"))
    columns = together(NEW)
    del columns["y"]
    table, _ = predictions(made, write(tmp_path / "n.csv", columns))
    assert set(table["label"].to_pylist()) == {0}


# -- assignments ------------------------------------------------------------------------------------------------------
def test_clients_are_placed_with_margins(tmp_path: Path, model: IFCA) -> None:
    table, said = assignments(model, write(tmp_path / "t.csv", together(OLD, NEW)))
    assert table.column_names == ["client", "label", "margin", "margin_error", "certain", "rows"]
    assert table["client"].to_pylist() == [*NEW.names, *OLD.names]
    assert table["label"].to_pylist() == [label_of(model)[name] for name in [*NEW.names, *OLD.names]]
    assert table["rows"].to_pylist() == [15] * 4 + [20] * 8
    found = model.assign(OLD.x, OLD.y, groups=OLD.groups)
    np.testing.assert_allclose(table["margin"].to_numpy()[4:], found.margin, rtol=1e-9)
    np.testing.assert_allclose(table["margin_error"].to_numpy()[4:], found.margin_error, rtol=1e-9)
    assert said == []


def test_what_is_left_out_and_who_is_unsure_is_told(tmp_path: Path, model: IFCA) -> None:
    columns = together(NEW)
    first = np.flatnonzero(columns["site"] == "new01")[0]
    without = (columns["site"] == "new01") & (np.arange(len(columns["y"])) != first)
    columns["y"] = pa.array(columns["y"], mask=without)
    table, said = assignments(model, write(tmp_path / "t.csv", columns))
    assert table["rows"].to_pylist() == [15, 1, 15, 15]
    assert table["margin_error"].to_pylist()[1] == float("inf")
    assert said == [
        "14 rows without a client or a target are left out",
        "uncertain cluster for 1 of 4 clients: margin within two standard errors",
    ]


def test_nobody_can_be_placed_without_targets(tmp_path: Path, model: IFCA) -> None:
    columns = together(NEW)
    columns["y"] = pa.nulls(len(columns["y"]), pa.float64())
    for name in ("empty", "absent"):
        with pytest.raises(DataError, match="has no target 'y', and clients are assigned by their labelled rows"):
            assignments(model, write(tmp_path / f"{name}.parquet", columns))
        columns.pop("y", None)


# -- writing ----------------------------------------------------------------------------------------------------------
def test_tables_go_to_stdout_or_to_a_file_by_its_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pa.table({"client": ['a "b"', "c,d"], "label": [0, 1], "prediction": [0.1, 1e-300]})
    write_rows(table, None)
    printed = capsys.readouterr().out
    assert printed == '"client","label","prediction"\n"a ""b""",0,0.1\n"c,d",1,1e-300\n'
    write_rows(table, tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == printed
    write_rows(table, tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet") == table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.parquet"]


def test_files_that_could_not_be_written_are_refused_at_once(tmp_path: Path) -> None:
    check_ending(None)
    check_ending(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=r"ends neither in \.csv nor in \.parquet"):
        check_ending(tmp_path / "t.xlsx")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_ending(tmp_path / "none" / "t.csv")
