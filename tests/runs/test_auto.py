# SPDX-License-Identifier: Apache-2.0
"""`coterie fit --method auto`: the comparison's winner is fitted, says why, serves new clients, and resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest

import coterie as package
from command import coterie, refused
from coterie.config import options
from coterie.runs import auto
from coterie.runs.folder import begin_run, read_options
from helpers import KilledError
from planted import planted
from report_page import section, words

ASKED = ("--client", "site", "--target", "y", "--method", "auto")
DATA = planted(20, 40, classes=True, noise=1.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DATA.write(tmp_path_factory.mktemp("data") / "sites.csv")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = coterie("fit", data, *ASKED, "--out", folder)
    assert done.code == 0, done.err
    assert done.out.startswith("Clients fall into 2 groups")
    return folder


def test_winner_is_fitted_to_the_whole_training_data(run: Path) -> None:
    chosen = read_options(run)
    assert (chosen.method, chosen.clusters.n_clusters) == ("ifca", 2)
    model = package.load(run)
    assert isinstance(model, package.IFCA)
    assert DATA.agrees(model.client_names_.tolist(), model.labels_.tolist())


def test_run_says_why(run: Path) -> None:
    why = json.loads((run / "run.json").read_text())["results"]["why"]
    assert why["chosen"] == "clusters"
    page = (run / "report.html").read_text()
    assert why["headline"] in words(section(page, "why"))
    assert (run / why["report"]).is_file()
    assert 'href="comparison/report.html"' in page


def test_predict_and_assign_work(run: Path, tmp_path: Path) -> None:
    new = planted(4, 10, classes=True, seed=5, prefix="new-").write(tmp_path / "new.csv")
    assert len(coterie("predict", run, new).out.splitlines()) == 1 + 40
    assert len(coterie("assign", run, new).out.splitlines()) == 1 + 4


def test_resumed_run_is_the_same(run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("coterie.runs.fit.fit_run", killed)
        with pytest.raises(KilledError):
            coterie("fit", data, *ASKED, "--out", tmp_path / "a")
    assert read_options(tmp_path / "a").method == "ifca"  # settled before it was killed
    assert coterie("resume", tmp_path / "a").code == 0
    models = (folder / "models" / "models.safetensors" for folder in (run, tmp_path / "a"))
    assert len({path.read_bytes() for path in models}) == 1
    assert "why" in json.loads((tmp_path / "a" / "run.json").read_text())["results"]


def test_a_comparison_that_is_resumed_names_the_command_that_began_it(data: Path, tmp_path: Path) -> None:
    asked = options({"method": "auto", "data": {"path": str(data), "client": "site", "target": "y"}})
    clients = DATA.clients(test_size=0.2)
    begin_run(tmp_path / "a", asked, "coterie fit", clients)
    auto.settled_run(tmp_path / "a", asked, clients, "coterie resume a")
    assert json.loads((tmp_path / "a" / "comparison" / "compare.json").read_text())["command"] == "coterie fit"


def test_comparison_that_was_finished_is_not_repeated(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options({"method": "auto", "data": {"path": str(data), "client": "site", "target": "y"}})
    begin_run(tmp_path / "a", asked, "coterie fit", DATA.clients(test_size=0.2))
    (run / "comparison").rename(tmp_path / "a" / "comparison")
    try:
        found = auto.settled_run(tmp_path / "a", asked, DATA.clients(test_size=0.2), "coterie fit")
    finally:
        (tmp_path / "a" / "comparison").rename(run / "comparison")
    assert (found.method, found.clusters.n_clusters, found.clusters.n_init) == ("ifca", 2, 5)


@pytest.mark.parametrize(
    "words", [("--clusters", "2"), ("--rounds", "3"), ("--set", "model.degree=2"), ("--rank", "1")]
)
def test_options_of_single_methods_are_refused(data: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    said, hint = refused("fit", data, *ASKED, *words, "--out", tmp_path / "a")
    assert "comparison" in said
    assert "name a method" in hint
    assert not (tmp_path / "a").exists()


def test_one_model_is_fitted_where_it_is_enough(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 2))
    y = x @ [1.0, -1.0] + draw.normal(size=400)
    names = [f"s{i:02d}" for i in np.repeat(np.arange(20), 20)]
    pc.write_csv(pa.table({"site": names, "a": x[:, 0], "b": x[:, 1], "y": y}), tmp_path / "same.csv")
    done = coterie("fit", tmp_path / "same.csv", *ASKED, "--out", tmp_path / "run")
    assert done.out.startswith("One model for all is enough")
    assert read_options(tmp_path / "run").method == "fedavg"


def test_where_no_method_fits_what_was_chosen_the_next_best_is_taken(tmp_path: Path) -> None:
    def row(name: str, method: str | None, score: float) -> dict[str, Any]:
        fit = {"method": method, "options": {}}
        return {"structure": name, "label": name, "chosen": name == "local", "score": score, "fit": fit}

    rows = [row("global", "fedavg", -2.0), row("local", None, -1.0), row("shrunk", "maml", -1.5)]
    (tmp_path / "comparison").mkdir()
    document = {"chosen": "local", "rows": rows, "answer": {"headline": "", "evidence": [], "doubts": ["few clients"]}}
    (tmp_path / "comparison" / "compare.json").write_text(json.dumps(document))
    said = auto.why(tmp_path)["why"]["doubts"]
    assert said == ["No method can fit this structure yet, so the next best was chosen: shrunk.", "few clients"]


def test_a_damaged_table_of_the_comparison_is_named_and_never_carried_along(
    run: Path, data: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "comparison" / "clients.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    sentence, _ = refused("fit", data, *ASKED, "--out", copy)
    assert sentence.endswith(
        "comparison/clients.parquet is not as the run has written it: it is damaged, or was changed"
    )
