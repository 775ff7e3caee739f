# SPDX-License-Identifier: Apache-2.0
"""Bad input through the command line: exit code 2, one sentence, one hint, and nothing written."""

import datetime
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import coterie, refused
from planted import planted
from test_config import METHODS

N = 24
GOOD: dict[str, Any] = {
    "site": [f"s{i % 4}" for i in range(N)],
    "x": [float(i % 7) for i in range(N)],
    "z": [i * 0.37 % 1 for i in range(N)],
    "y": [i * 1.7 % 5 for i in range(N)],
}
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert list((tmp_path / "here").iterdir()) == [], "nothing may be left behind"


@pytest.fixture
def parquet(tmp_path: Path) -> Write:
    def write(**columns: Any) -> Path:
        pq.write_table(pa.table({**GOOD, **columns}), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    return write


@pytest.fixture
def text(tmp_path: Path) -> Write:
    def write(content: str) -> Path:
        (tmp_path / "t.csv").write_text(content)
        return tmp_path / "t.csv"

    return write


def one_changed(name: str, value: Any) -> dict[str, Any]:
    return {name: [value if i == 5 else v for i, v in enumerate(GOOD[name])]}


def fit(path: Path, *words: object, client: str = "site", target: str = "y") -> tuple[str, str]:
    return refused("fit", path, "--client", client, "--target", target, "--rounds", 2, *words)


def test_the_good_table_is_good(parquet: Write, tmp_path: Path) -> None:
    said = coterie("fit", parquet(), "--client", "site", "--target", "y", "--rounds", 2, "--out", tmp_path / "run")
    assert said.code == 0


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", [None, float("nan")])
def test_a_missing_feature(parquet: Write, gap: float | None) -> None:
    sentence, hint = fit(parquet(**one_changed("x", gap)))
    assert sentence == "t.parquet: column 'x' has 1 missing value"
    assert hint == "--missing mean (fill with the federated mean) or --missing drop (leave those rows out)"


def test_a_missing_feature_in_csv(text: Write) -> None:
    assert fit(text("site,x,y\na,,1.5\nb,2,2.5\n"))[0] == "t.csv: column 'x' has 1 missing value"


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_a_missing_target(parquet: Write, gap: float | None) -> None:
    sentence, hint = fit(parquet(**one_changed("y", gap)))
    assert sentence == "t.parquet: target 'y' has 1 missing value"
    assert hint == "leave those rows out with --missing drop"


def test_an_infinite_value(parquet: Write) -> None:
    assert fit(parquet(**one_changed("x", float("-inf"))))[0] == "t.parquet: column 'x' has 1 infinite value"
    assert fit(parquet(**one_changed("y", float("inf"))))[0] == "t.parquet: target 'y' has 1 infinite value"


@pytest.mark.parametrize("value", [1e308, -1e308, 1e200, -1e200])
def test_a_number_of_which_no_sums_can_be_taken(parquet: Write, value: float) -> None:
    for method in ("ifca", "shrunk", "mixture", "auto"):
        sentence, hint = fit(parquet(**one_changed("x", value)), "--method", method)
        size = f"{abs(value):.3g}"
        assert (
            sentence
            == f"t.parquet: column 'x' has a number of client 's1' that is too large: {size}; the limit is 1e+50"
        )
        assert hint == "correct the cells, or leave it out with --exclude x"


@pytest.mark.parametrize(
    "words",
    [["--clusters", 10**9], ["--starts", 10**9], ["--rounds", 10**9], ["--hidden", "1000000000"], ["--seed", 2**64],
     ["--set", "training.batch_size=1000000000"]],
)  # fmt: skip
def test_counts_have_a_bound(parquet: Write, words: list[object]) -> None:
    assert "should be less than or equal to" in fit(parquet(), *words)[0]


def test_networks_have_a_bound(parquet: Write) -> None:
    sentence, hint = fit(parquet(), "--hidden", "100000,100000")
    assert sentence == (
        "2 models of 10,000,500,001 numbers are more than can be trained side by side; the limit is 268,435,456 numbers"
    )
    assert hint == "ask for smaller layers, fewer clusters or fewer starts"


def test_a_missing_client(parquet: Write) -> None:
    sentence, _ = fit(parquet(**one_changed("site", None)))
    assert sentence == "t.parquet: client column 'site' has 1 missing value"


def test_only_missing_values_left(parquet: Write) -> None:
    sentence, hint = fit(
        parquet(x=[None if i % 2 else 1.0 for i in range(N)], z=GOOD["z"][:1] + [None] * 23), "--missing", "drop"
    )
    assert sentence.startswith("t.parquet: ")
    assert hint


# -- clients ----------------------------------------------------------------------------------------------------------
def test_an_empty_client_after_dropping_counts_as_gone(parquet: Write) -> None:
    x = [None if site == "s3" else v for site, v in zip(GOOD["site"], GOOD["x"], strict=True)]
    sentence, hint = fit(parquet(x=x), "--missing", "drop", "--clusters", 4)
    assert sentence == "4 clusters are more than the 3 clients"
    assert hint == "ask for at most 3 clusters"


def test_everybody_gone_after_dropping(parquet: Write) -> None:
    sentence, hint = fit(parquet(x=[None] * 12 + GOOD["x"][12:], z=GOOD["z"][:12] + [None] * 12), "--missing", "drop")
    assert sentence == "t.parquet: every one of the 24 rows has a missing value"
    assert "--missing mean" in hint


def test_a_client_with_one_row_where_two_are_needed(parquet: Write) -> None:
    site = ["lonely" if i == 5 else v for i, v in enumerate(GOOD["site"])]
    sentence, hint = fit(parquet(site=site), "--starts", 2)
    assert sentence == ("client 'lonely' has 1 training row; several starts are compared on held-out rows and need 2")
    assert hint == "drop small clients with --min-rows 2, or use one start"


def test_only_one_client(parquet: Write) -> None:
    sentence, hint = fit(parquet(site=["s0"] * N))
    assert sentence == "there is only one client, so there are no groups to find"
    assert hint == "check the client column"


def test_only_small_clients(parquet: Write) -> None:
    sentence, hint = fit(parquet(), "--min-rows", 7)
    assert sentence == "none of the 4 clients has 7 rows or more; the largest has 6"
    assert hint == "lower it with --min-rows 6"


def test_all_clients_held_out(parquet: Write) -> None:
    assert "leaves no clients to train on" in fit(parquet(), "--new-clients", 0.99)[0]


def test_more_clusters_than_clients(parquet: Write) -> None:
    assert fit(parquet(), "--clusters", 5)[0] == "5 clusters are more than the 4 clients"


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["--hidden", "4"], "model.hidden is set, and moment-descent has no use for it", "needs a linear model"),
        (["--starts", "3"], "clusters.n_init is set, and moment-descent has no use for it", "leave it out"),
        (["--task", "classification"], "moment-descent is for regression, and target 'k' has classes", "--task regr"),
        (["--clusters", "5"], "5 clusters are more than the 4 clients", "at most 4"),
        (["--clusters", "3", "--set", "moments.anchors=2"], "2 anchors are too few for 3 clusters", "moments.anchors"),
        (["--set", "moments.anchor=2"], "there is no option 'moments.anchor'", "did you mean moments.anchors?"),
        (["--set", "moments.exchanges=1"], "moments.exchanges is 1: input should be greater than or equal to 2", "--h"),
        (["--set", "model.degree=200"], "2 features have 20,300 products up to degree 200", "lower model.degree"),
        (["--set", "training.exact=true"], "training: an exact step needs a proximal term", "--help"),
        (["--test-size", "0.9", "--min-rows", "6"], "no client has two training rows, and anchors need two", "ifca"),
    ],
)
def test_what_moment_descent_cannot_do(parquet: Write, words: list[str], said: str, hint: str) -> None:
    path = parquet(k=[i % 5 for i in range(N)])
    target = ("k", "--exclude", "y") if "classification" in words else ("y", "--exclude", "k")
    sentence, way_out = fit(path, *target[1:], "--method", "moment-descent", *words, target=target[0])
    assert sentence.startswith(said)
    assert hint in way_out


def test_zero_clusters(parquet: Write) -> None:
    sentence, _ = fit(parquet(), "--clusters", 0)
    assert sentence == "clusters.n_clusters is 0: input should be greater than or equal to 1"


# -- columns ----------------------------------------------------------------------------------------------------------
def test_a_client_column_that_is_not_there(parquet: Write) -> None:
    sentence, hint = fit(parquet(), client="sites")
    assert sentence.endswith("t.parquet' has no client column 'sites'")
    assert hint == "did you mean 'site'? columns are: site, x, z, y"


def test_a_client_column_that_is_not_named(parquet: Write) -> None:
    sentence, hint = refused("fit", parquet(), "--target", "y")
    assert sentence.startswith("the client column of ")
    assert hint == "name it with --client COLUMN"


def test_a_target_that_is_not_there(parquet: Write) -> None:
    sentence, hint = fit(parquet(), target="yy")
    assert sentence.endswith("t.parquet' has no target column 'yy'")
    assert "did you mean 'y'?" in hint


def test_a_target_that_is_not_named(parquet: Write) -> None:
    sentence, hint = refused("fit", parquet(), "--client", "site")
    assert sentence == "ifca needs a target to learn"
    assert hint == "name its column with --target, or pass y"


def test_the_target_is_the_client(parquet: Write) -> None:
    assert fit(parquet(), target="site")[0] == "column 'site' cannot be both client and target"


def test_an_excluded_column_that_is_not_there(parquet: Write) -> None:
    assert fit(parquet(), "--exclude", "w")[0].endswith("has no column 'w'")


def test_no_features_left(parquet: Write) -> None:
    assert "has no feature columns left" in fit(parquet(), "--exclude", "x", "--exclude", "z")[0]


def test_duplicate_column_names(text: Write, tmp_path: Path) -> None:
    sentence, hint = fit(text("site,x,x,y\na,1,2,0.5\nb,2,3,1.5\n"))
    assert sentence.endswith("t.csv' has 2 columns with the name 'x'")
    assert hint == "give every column its own name"
    table = pa.Table.from_arrays([pa.array(["a", "b"]), *[pa.array([1.0, 2.5])] * 3], names=["site", "x", "x", "y"])
    pq.write_table(table, tmp_path / "d.parquet")
    assert fit(tmp_path / "d.parquet")[0].endswith("d.parquet' has 2 columns with the name 'x'")


# -- types ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [3.0, 3.5, "yes", True])
def test_a_target_that_is_the_same_everywhere(parquet: Write, value: Any) -> None:
    sentence, hint = fit(parquet(y=[value] * N))
    assert sentence in (
        "t.parquet: target 'y' has only one class, '3'",
        "t.parquet: target 'y' is 3.5 in every row, so there is nothing to predict",
        "t.parquet: target 'y' has only one class, 'yes'",
        "t.parquet: target 'y' has only one class, 'true'",
    )
    assert hint == "choose another --target"


def test_a_text_target_for_regression(parquet: Write) -> None:
    sentence, hint = fit(parquet(y=["low", "high"] * 12), "--task", "regression")
    assert sentence == "t.parquet: target 'y' holds text such as 'low' and regression needs numbers"
    assert hint == "--task classification"


def test_dates(parquet: Write) -> None:
    days = [datetime.date(2020, 1, 1 + i) for i in range(N)]
    sentence, hint = fit(parquet(x=days))
    assert sentence == "t.parquet: column 'x' holds dates or times"
    assert hint == "leave it out with --exclude x, or turn it into numbers first"
    assert fit(parquet(y=days))[0] == "t.parquet: target 'y' holds dates or times"


def test_lists(parquet: Write) -> None:
    assert "neither numbers nor text" in fit(parquet(x=[[1, 2]] * N))[0]


def test_text_with_too_many_levels(parquet: Write) -> None:
    site = [f"s{i % 4}" for i in range(200)]
    path = parquet(site=site, x=[f"note {i}" for i in range(200)], z=np.arange(200) / 7, y=np.arange(200) / 3)
    sentence, hint = fit(path)
    assert sentence == "t.parquet: column 'x' has more than 100 different levels, such as 'note 0'"
    assert "--exclude x" in hint


# -- files ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.csv.gz"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    assert fit(tmp_path / name)[0] == f"file '{tmp_path / name}' is empty"


def test_a_header_without_rows(text: Write) -> None:
    assert fit(text("site,x,y\n"))[0] == "t.csv: there are no rows"


def test_a_truncated_parquet(parquet: Write) -> None:
    path = parquet()
    path.write_bytes(path.read_bytes()[:-100])
    sentence, hint = fit(path)
    assert sentence == f"file '{path}' cannot be read as Parquet"
    assert hint == "it may be cut short or damaged; write it again"


def test_something_else_called_parquet(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("site,x,y\na,1,2\n")
    assert fit(tmp_path / "t.parquet")[0].endswith("cannot be read as Parquet")


def test_a_csv_with_a_ragged_line(text: Write) -> None:
    assert "has a line with 2 cells where the header has 3" in fit(text("site,x,y\na,1,2\nb,1\n"))[0]


def test_a_file_that_is_not_there(parquet: Write) -> None:
    path = parquet().with_name("tt.parquet")
    sentence, hint = fit(path)
    assert sentence == f"there is no file '{path}'"
    assert hint == f"did you mean '{path.with_name('t.parquet')}'?"


def test_a_folder_without_files(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert fit(tmp_path / "none")[0] == f"folder '{tmp_path / 'none'}' has no file that can be read"


def test_an_unknown_ending(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    assert fit(tmp_path / "t.xlsx")[0] == f"'{tmp_path / 't.xlsx'}' has no known ending"


# -- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "magic"], f"method is 'magic': input should be {METHODS}"),
        (["--method", "local", "--rounds", "3"], "training.rounds is set, and local has no use for it"),
        (["--missing", "ignore"], "data.missing is 'ignore': input should be 'error', 'mean' or 'drop'"),
        (["--task", "guess"], "data.task is 'guess': input should be 'auto', 'regression' or 'classification'"),
        (["--test-size", "1.5"], "data.test_size is 1.5: input should be less than 1"),
        (["--rounds", "0"], "training.rounds is 0: input should be greater than or equal to 1"),
        (["--seed", "-1"], "seed is -1: input should be greater than or equal to 0"),
        (["--hidden", "64;32"], "'64;32' is not a list of layer sizes"),
        (["--hidden", "0"], "model.hidden.0 is 0: input should be greater than 0"),
        (["--set", "training.rounds"], "'training.rounds' is not a setting"),
        (["--set", "training.round=3"], "there is no option 'training.round'"),
        (["--set", "training=3"], "training is 3 and should be a group of options"),
        (["--set", "training.rounds.x=3"], "training.rounds: input should be a valid integer"),
        (["--set", "clusters.init=warm"], "init is 'warm' and start models are not given"),
        (["--set", "clusters.shared_layers=['9']"], "shared_layers: the model has no layer '9'"),
        (["--config", "nowhere.toml"], "there is no configuration file nowhere.toml"),
    ],
)
def test_options_that_make_no_sense(parquet: Write, words: list[str], said: str) -> None:
    assert fit(parquet(), *words)[0] == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("rounds 5", "is not valid TOML"),
        ("[training]\nrounds = 'many'", "training.rounds is 'many': input should be a valid integer"),
        ("[train]\nrounds = 5", "there is no option 'train'"),
    ],
)
def test_a_malformed_configuration(parquet: Write, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "run.toml").write_text(content)
    assert said in refused("fit", parquet(), "--client", "site", "--target", "y", "--config", tmp_path / "run.toml")[0]


def test_out_that_is_a_file_or_belongs_to_somebody_else(parquet: Write, tmp_path: Path) -> None:
    path = parquet()
    sentence, hint = fit(path, "--out", path)
    assert sentence == f"{path} is a file, and a run is a folder"
    assert hint == "name a new folder with --out"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert fit(path, "--out", tmp_path / "mine")[0] == f"{tmp_path / 'mine'} is not empty and not a run"
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert pq.read_table(path).num_rows == N
    sentence, _ = fit(path, "--out", path / "run")
    assert "Not a directory" in sentence


# -- runs -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = planted(6, 10).write(folder / "t.csv")
    assert coterie("fit", data, "--client", "site", "--target", "y", "--rounds", 3, "--out", folder / "r").code == 0
    return folder / "r"


@pytest.mark.parametrize("command", ["predict", "assign"])
def test_columns_that_the_model_needs(run: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "n.csv").write_text("site,x0,x_1,x2,y\ns00,1,2,3,4\n")
    sentence, hint = refused(command, run, tmp_path / "n.csv")
    assert sentence == f"'{tmp_path / 'n.csv'}' has no column 'x1', which the model needs"
    assert hint.startswith("did you mean 'x_1'?")


@pytest.mark.parametrize("command", ["predict", "assign"])
def test_a_file_without_the_client_column(run: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "n.csv").write_text("x0,x1,x2,y\n1,2,3,4\n")
    assert "has no column 'site'" in refused(command, run, tmp_path / "n.csv")[0]


def test_unknown_clients_without_a_target(run: Path, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("site,x0,x1,x2\ns00,1,2,3\nstranger,1,2,3\n")
    told = coterie("predict", run, tmp_path / "n.csv")
    assert told.err == "warning: 1 new client has no labelled rows, and the model for all is used\n"
    sentence, _ = refused("assign", run, tmp_path / "n.csv")
    assert sentence == f"{tmp_path / 'n.csv'} has no target 'y', and clients are assigned by their labelled rows"


def test_text_where_the_model_has_numbers(run: Path, tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("site,x0,x1,x2\ns00,1,two,3\n")
    assert refused("predict", run, tmp_path / "n.csv")[0].endswith(
        "column 'x1' holds text such as 'two' where numbers are expected"
    )


def test_an_output_file_that_cannot_be(run: Path) -> None:
    data = run.parent / "t.csv"
    assert refused("predict", run, data, "--out", "p.xlsx")[0] == "p.xlsx ends neither in .csv nor in .parquet"
    assert refused("assign", run, data, "--out", "no/p.csv")[0] == "there is no folder no"


@pytest.mark.parametrize("command", ["predict", "assign", "resume", "report"])
@pytest.mark.parametrize("kind", ["nowhere", "folder", "file", "foreign"])
def test_what_is_no_run(run: Path, tmp_path: Path, command: str, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("x")
    elif kind != "nowhere":
        path.mkdir()
    if kind == "foreign":
        (path / "run.json").write_text("[]")
    words = (command, path) if command in ("resume", "report") else (command, path, run.parent / "t.csv")
    sentence, hint = refused(*words)
    assert str(path) in sentence
    assert "`coterie fit --out`" in hint
    assert not (path / "report.html").exists()
