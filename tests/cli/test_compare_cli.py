# SPDX-License-Identifier: Apache-2.0
"""`coterie compare`: answer and table to stdout, one JSON document, nothing half-written; its command really works."""

import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest

from command import Said, coterie, refused
from comparisons import comparison
from coterie.runs import screen, show
from planted import planted

ASKED = ("--client", "site", "--target", "y", "--quick")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(20, 30).write(tmp_path_factory.mktemp("my data") / "sites.csv")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Said, Path]:
    folder = tmp_path_factory.mktemp("found") / "sites"
    return coterie("compare", data, *ASKED, "--out", folder), folder


def test_answer_table_and_paths_go_to_stdout(said: tuple[Said, Path]) -> None:
    done, folder = said
    assert done.code == 0
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == "Clients fall into 2 groups, with one model per group."
    assert "│*clusters" in done.out
    assert lines[-2].startswith("next: coterie fit ")
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert sorted(path.name for path in folder.iterdir()) == ["clients.parquet", "compare.json", "report.html"]


def test_the_next_command_really_works(said: tuple[Said, Path], tmp_path: Path) -> None:
    command = next(line for line in said[0].out.splitlines() if line.startswith("next: "))
    name, *words = shlex.split(command.removeprefix("next: "))
    assert name == "coterie"
    done = coterie(*words, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "clients per cluster: 8, 8" in done.out  # of 20, 4 were held out, as in the comparison


def test_json_is_one_document(data: Path, tmp_path: Path) -> None:
    done = coterie("compare", data, *ASKED, "--json", "--out", tmp_path / "a")
    found = json.loads(done.out)
    assert found["chosen"] == "clusters"
    assert found["settings"]["clusters"] == {"n_clusters": 2}
    assert {"structure", "setting", "metric", "mean", "stderr"} <= found["rows"][0].keys()
    assert found["report"] == str(tmp_path / "a" / "report.html")
    assert found["answer"]["headline"].startswith("Clients fall into 2 groups")


def test_report_is_written_again(said: tuple[Said, Path]) -> None:
    done = coterie("report", said[1])
    assert done.out == f"{said[1] / 'report.html'}\n"


def test_gaps_and_words_are_read_as_fit_reads_them(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    site, ward = np.repeat(np.arange(12), 30), draw.choice(["a", "b"], 360)
    x = draw.normal(size=360)
    y = x + 2 * (ward == "b") + 0.5 * draw.normal(size=360)
    gaps = [None if i % 20 == 0 else value for i, value in enumerate(x)]
    names = [f"Ward {i}, north" for i in site]
    path = tmp_path / "wards.csv"
    pc.write_csv(pa.table({"the ward": names, "kind": ward, "x": gaps, "y": y}), path)
    words = ("compare", path, "--client", "the ward", "--target", "y", "--quick", "--out", tmp_path / "a")
    sentence, _ = refused(*words)
    assert sentence.endswith("column 'x' has 18 missing values")
    assert not (tmp_path / "a").exists()
    done = coterie(*words, "--missing", "mean")
    assert done.code == 0, done.err
    assert done.out.startswith("One model for all is enough")
    assert "--client 'the ward' --target y --missing mean --new-clients 0.2 --method fedavg" in done.out


def test_few_clients_are_all_compared(tmp_path: Path) -> None:
    path = planted(6, 30).write(tmp_path / "few.csv")
    done = coterie("compare", path, *ASKED, "--json", "--out", tmp_path / "a")
    found = json.loads(done.out)
    assert found["n_clients"] == 6
    assert found["rows"][0]["new_metric"] is None
    asked = coterie("compare", path, *ASKED, "--json", "--new-clients", "0.34", "--out", tmp_path / "b")
    assert json.loads(asked.out)["n_clients"] == 4


def test_default_folder_is_new(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("coterie.selection.compare", lambda *_, **__: comparison())
    for folder in ("runs/sites-compare", "runs/sites-compare-2"):
        assert coterie("compare", data, *ASKED).out.endswith(f"report: {folder}/report.html\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--client", "nowhere", "--target", "y"), "nowhere"),
        (("--client", "site", "--target", "y", "--task", "ranking"), "ranking"),
        (("--client", "site", "--target", "y", "--test-size", "2"), "2"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    data: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    said, hint = refused("compare", data, *words, "--out", tmp_path / "a")
    assert sentence in said
    assert hint
    assert not (tmp_path / "a").exists()


def test_folder_in_use_is_refused_before_anything_is_computed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    said, hint = refused("compare", data, *ASKED, "--out", tmp_path)
    assert "is not empty" in said
    assert "--out" in hint


def test_one_client_has_no_structure(tmp_path: Path) -> None:
    path = planted(1, 30).write(tmp_path / "one.csv")
    said, _ = refused("compare", path, *ASKED, "--out", tmp_path / "a")
    assert "only one client" in said


def test_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(screen.out, "width", 80)
    show.show_comparison(comparison(), None)
    shown = capsys.readouterr().out
    boxes = [line for line in shown.splitlines() if line.startswith(("│", "┃"))]
    assert len(boxes) == 2 + 6  # no cell is broken
    assert "there is no `coterie fit` for 3 clusters yet" in shown
