# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: what is in it, what can be read back, and what is refused."""

import json
import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from coterie import __version__
from coterie.config import FitOptions, options
from coterie.data.clients import Clients
from coterie.data.readers import from_arrays
from coterie.engines.in_process import Round
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.report import write_report
from coterie.runs.folder import begin_run, finish_run, is_finished, load_run, read_options, summary
from helpers import KilledError, assert_same_state
from planted import planted

ASKED = options({"training": {"rounds": 4}, "clusters": {"n_clusters": 2, "n_init": 2}, "seed": 3})


@dataclass(frozen=True)
class Finished:
    folder: Path
    clients: Clients
    fitted: Fitted

    @property
    def document(self) -> dict[str, Any]:
        return strict(self.folder / "run.json")


def strict(path: Path) -> dict[str, Any]:
    """Read JSON as the standard has it: without NaN and Infinity."""

    def no(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document: dict[str, Any] = json.loads(path.read_text(), parse_constant=no)
    return document


def done(folder: Path, clients: Clients, asked: FitOptions = ASKED, **more: Any) -> Finished:
    begin_run(folder, asked, "coterie fit it", clients)
    fitted = fit(clients, asked, folder=folder, every=0.0, **more)
    finish_run(folder, fitted)
    return Finished(folder, clients, fitted)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    made = planted(12, 10)
    keep = np.r_[np.flatnonzero(made.groups != "s00"), np.flatnonzero(made.groups == "s00")[:2]]
    clients = from_arrays(made.x[keep], made.y[keep], made.groups[keep], new_clients=0.2, seed=1)
    return done(tmp_path_factory.mktemp("runs") / "one", clients)


# -- what is in it ----------------------------------------------------------------------------------------------------
def test_the_folder_holds_what_the_documentation_says(run: Finished) -> None:
    write_report(run.folder)
    found = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert found == {
        "run.json", "rounds.parquet", "clients.parquet", "state.safetensors", "report.html",
        "models/models.safetensors", "models/cluster-0.safetensors", "models/cluster-1.safetensors",
        "models/intervals.safetensors",
    }  # fmt: skip


def test_nothing_in_it_is_pickled(run: Finished) -> None:
    for path in run.folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            kinds = {".json": b"{", ".parquet": b"PAR1", ".html": b"<!"}
            if path.suffix in kinds:
                assert content.startswith(kinds[path.suffix])
            else:
                assert path.suffix == ".safetensors"
                assert content[8:9] == b"{"  # after the length of its JSON header, which may look like anything
                load_file(path)


def test_run_json_says_what_was_done(run: Finished) -> None:
    said = run.document
    assert said["status"] == "finished"
    assert (said["coterie"], said["method"], said["seed"], said["command"]) == (
        __version__,
        "ifca",
        3,
        "coterie fit it",
    )
    assert FitOptions.model_validate(said["config"]) == ASKED
    assert set(said["versions"]) == {"python", "torch", "numpy", "scikit-learn", "pyarrow"}
    assert said["versions"]["torch"] == torch.__version__
    assert datetime.fromisoformat(said["started"]).tzinfo is not None
    assert said["seconds"] > 0
    train, test = run.clients.train, run.clients.test
    assert test is not None
    assert said["data"]["n_clients"] == train.n_clients == 10
    assert said["data"]["n_rows"] == train.layout.n_rows + test.layout.n_rows
    assert (said["data"]["metric"], said["data"]["metric_better"]) == ("rmse", "lower")
    assert said["data"]["target_scale"] == float(run.fitted.models.scaling.y_scale)


def test_run_json_says_what_was_found(run: Finished) -> None:
    found = run.document["results"]
    assert [m["method"] for m in found["methods"]] == ["ifca", "global", "local"]
    assert found["methods"][0]["test"] == run.fitted.scores[0].test
    assert found["cluster_sizes"] == torch.bincount(run.fitted.models.placed.label, minlength=2).tolist()
    assert (found["n_clusters"], found["chosen_run"]) == (2, 2)  # two starts come before the fit that counts
    assert found["profiles"]["features"] == ["x0", "x1", "x2"]
    assert found["profiles"]["coefficients"] == run.fitted.models.theta[:, :3].tolist()


def test_what_was_begun_is_kept_when_it_is_finished(tmp_path: Path) -> None:
    clients = planted(4, 6).clients()
    begin_run(tmp_path / "r", ASKED, "coterie fit it", clients)
    first = strict(tmp_path / "r" / "run.json")
    assert first["status"] == "running"
    assert not is_finished(tmp_path / "r")
    begin_run(tmp_path / "r", ASKED, "coterie resume r", clients)
    finish_run(tmp_path / "r", fit(clients, ASKED))
    last = strict(tmp_path / "r" / "run.json")
    assert is_finished(tmp_path / "r")
    kept = first.keys() - {"status", "sha256"}
    assert {name: last[name] for name in kept} == {name: first[name] for name in kept}


def test_rounds_are_a_table(run: Finished) -> None:
    table = pq.read_table(run.folder / "rounds.parquet")
    assert table.column_names == [
        "run", "round", "loss", "participants", "messages", "bytes_up", "bytes_down", "seconds", "moved", "sizes",
        "movement", "spectrum",
    ]  # fmt: skip
    rows = table.to_pylist()
    assert [(r["run"], r["round"]) for r in rows if r["run"] == 2] == [(2, 1), (2, 2), (2, 3), (2, 4)]
    assert len(rows) == 3 * 4
    for row in rows:
        assert row["participants"] == 10
        assert sum(row["sizes"]) == 10
        assert 10 * 64 < row["bytes_down"] < 10 * (64 + 100)  # two models of four doubles for everyone, and settings
        assert math.isfinite(row["loss"])
        assert row["bytes_up"] > 10 * 4 * 8


def test_clients_are_a_table(run: Finished) -> None:
    table = pq.read_table(run.folder / "clients.parquet")
    assert table.column_names == [
        "client", "label", "margin", "margin_error", "certain", "train_loss", "rows_train", "test_loss", "rows_test",
        "metric", "metric_global", "metric_local", "coverage", "map_x", "map_y",
    ]  # fmt: skip
    found = run.fitted
    assert table["client"].to_pylist() == run.clients.names.tolist()
    assert table["label"].to_pylist() == found.models.placed.label.tolist()
    assert table["margin"].to_pylist() == found.models.placed.margin.tolist()
    assert table["certain"].to_pylist() == found.models.placed.certain.tolist()
    assert table["rows_train"].to_pylist() == run.clients.train.counts.tolist()
    assert np.isfinite(table["map_x"].to_numpy()).all()


def test_a_client_without_held_out_rows_has_no_metric(run: Finished) -> None:
    table = pq.read_table(run.folder / "clients.parquet").to_pylist()
    without = [row for row in table if row["rows_test"] == 0]
    assert [row["client"] for row in without] == ["s00"]
    for name in ("metric", "metric_global", "metric_local", "test_loss"):
        assert without[0][name] is None
        assert sum(row[name] is not None for row in table) == 9


def test_the_map_separates_planted_groups(run: Finished) -> None:
    table = pq.read_table(run.folder / "clients.parquet")
    x, label = table["map_x"].to_numpy(), table["label"].to_numpy()
    assert max(x[label == 0]) < min(x[label == 1]) or max(x[label == 1]) < min(x[label == 0])


def test_each_clusters_model_has_named_parameters_in_their_shapes(tmp_path: Path) -> None:
    clients = planted(4, 6).clients()
    asked = options({"training": {"rounds": 2}, "model": {"hidden": [5]}})
    theta = done(tmp_path / "dense", clients, asked).fitted.models.theta
    tensors = load_file(tmp_path / "dense" / "models" / "cluster-1.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "0.weight": (5, 3), "0.bias": (5,), "1.weight": (1, 5), "1.bias": (1,),
    }  # fmt: skip
    flat = torch.cat([tensors[name].flatten() for name in ("0.weight", "0.bias", "1.weight", "1.bias")])
    assert torch.equal(flat, theta[1])
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    done(tmp_path / "net", clients, asked, module=net)
    net.load_state_dict(load_file(tmp_path / "net" / "models" / "cluster-0.safetensors"))  # fits as it is


def test_one_model_leaves_a_map_and_no_profiles(tmp_path: Path) -> None:
    asked = options({"method": "fedavg", "training": {"rounds": 2}})
    made = done(tmp_path / "r", planted(4, 6).clients(), asked)
    assert made.document["results"]["profiles"] is None
    assert made.document["results"]["cluster_sizes"] == [4]
    assert load_run(made.folder).models.labels == {"s00": 0, "s01": 0, "s02": 0, "s03": 0}


def test_a_diverged_run_is_written_as_strict_json_and_reported(tmp_path: Path) -> None:
    asked = options({"training": {"rounds": 60, "step_size": 1e9}})
    made = done(tmp_path / "r", planted(4, 6).clients(), asked)
    assert any("diverged" in said for said in made.document["results"]["warnings"])
    assert np.isfinite(pq.read_table(made.folder / "clients.parquet")["map_x"].to_numpy()).all()
    assert write_report(made.folder).stat().st_size > 1000
    json.dumps(summary(made.folder), allow_nan=False)


def test_the_summary_is_what_the_fit_found(run: Finished) -> None:
    said = summary(run.folder)
    assert list(said) == [
        "method", "seed", "metric", "methods", "n_clusters", "cluster_sizes", "uncertain_clients", "warnings",
        "target_scale", "seconds",
    ]  # fmt: skip
    assert said["methods"] == [vars(score) for score in run.fitted.scores]


# -- reading back -----------------------------------------------------------------------------------------------------
def test_a_loaded_run_is_what_was_fitted(run: Finished) -> None:
    loaded = load_run(run.folder)
    assert torch.equal(loaded.models.theta, run.fitted.models.theta)
    assert loaded.models.model == run.fitted.models.model
    assert loaded.schema == run.clients.schema
    assert loaded.options == ASKED
    assert_same_state(loaded.models.scaling, run.fitted.models.scaling)
    assert loaded.models.labels == dict(
        zip(run.clients.names.tolist(), run.fitted.models.placed.label.tolist(), strict=True)
    )
    assert loaded.scores == run.fitted.scores


def killed(phase: str, round_: Round, total: int) -> None:
    if phase == "fit" and round_.round == 2:
        raise KilledError


def test_an_unfinished_run_cannot_be_loaded_but_continued(tmp_path: Path, run: Finished) -> None:
    folder = tmp_path / "r"
    assert begin_run(folder, ASKED, "x", run.clients)
    with pytest.raises(KilledError):
        fit(run.clients, ASKED, folder=folder, every=0.0, watch=killed)
    with pytest.raises(RunError, match=f"the run in {folder} has not finished") as caught:
        load_run(folder)
    assert caught.value.hint == f"continue it with `coterie resume {folder}`"
    assert read_options(folder) == ASKED
    assert not begin_run(folder, ASKED, "x", run.clients)
    finish_run(folder, fit(run.clients, ASKED, folder=folder))
    assert torch.equal(load_run(folder).models.theta, run.fitted.models.theta)


def test_left_overs_of_killed_writers_go_away(tmp_path: Path) -> None:
    clients = planted(4, 6).clients()
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / ".run.json.123.tmp").write_text("{")  # killed before it was even begun
    assert begin_run(folder, ASKED, "x", clients)
    (folder / "models").mkdir()
    (folder / "models" / ".models.safetensors.9.tmp").write_bytes(b"x")
    finish_run(folder, fit(clients, ASKED, folder=folder))
    assert [path for path in folder.rglob("*") if path.suffix == ".tmp"] == []
    assert not (folder / "checkpoints").exists()


# -- refusing ---------------------------------------------------------------------------------------------------------
def refused(call: Any, kind: type[CoterieError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.hint
    return caught.value.message


def test_other_options_in_the_same_folder_are_refused(run: Finished) -> None:
    other = ASKED.model_copy(update={"seed": 4})
    said = refused(lambda: begin_run(run.folder, other, "x", run.clients))
    assert said == f"{run.folder} holds a run with other options"


@pytest.mark.parametrize("what", ["value", "target", "row", "name", "test"])
def test_other_data_in_the_same_folder_are_refused(tmp_path: Path, what: str) -> None:
    made = planted(6, 10)
    x, y, groups, keep = made.x.copy(), made.y.copy(), made.groups.astype("U4"), slice(None)
    if what == "value":
        x[7, 1] += 1e-9
    elif what == "target":
        y[7] += 1e-9
    elif what == "row":
        keep = slice(1, None)
    elif what == "name":
        groups[groups == "s03"] = "s03b"
    folder = tmp_path / "r"
    begin_run(folder, ASKED, "x", made.clients())
    before = (folder / "run.json").read_bytes()
    other = from_arrays(x[keep], y[keep], groups[keep], test_size=0.3 if what == "test" else 0.2)
    said = refused(lambda: begin_run(folder, ASKED, "x", other), RunError)
    assert said == f"the data of the run in {folder} has changed since it began"
    assert (folder / "run.json").read_bytes() == before
    assert not begin_run(folder, ASKED, "x", made.clients())  # the same data read again are the same


def test_changed_data_are_refused_after_the_end_too(run: Finished) -> None:
    assert "has changed since it began" in refused(
        lambda: begin_run(run.folder, ASKED, "x", planted(4, 6).clients()), RunError
    )


def test_folders_of_something_else_are_refused_and_left_alone(tmp_path: Path) -> None:
    clients = planted(4, 6).clients()
    (tmp_path / "notes.txt").write_text("mine")
    assert refused(lambda: begin_run(tmp_path, ASKED, "x", clients)) == f"{tmp_path} is not empty and not a run"
    file = tmp_path / "notes.txt"
    assert refused(lambda: begin_run(file, ASKED, "x", clients)) == f"{file} is a file, and a run is a folder"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    assert begin_run(tmp_path, ASKED, "x", planted(4, 6).clients())
    assert not is_finished(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "{} is not a run: it has no run.json"),
        ("{", "{}/run.json cannot be read: it is not JSON, is cut short, or has a number that is out of range"),
        ("[1]", "{} is not a run: its run.json was not written by a run"),
        ('{"status": "finished"}', "{} is not a run: its run.json was not written by a run"),
    ],
)
def test_what_is_no_run_cannot_be_read(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    for call in (load_run, read_options, is_finished, summary):
        assert refused(lambda call=call: call(tmp_path), RunError) == said.format(tmp_path)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n")
    assert "is not a run" in refused(lambda: load_run(tmp_path / "data.csv"), RunError)


def test_options_of_another_version_are_refused(tmp_path: Path) -> None:
    begin_run(tmp_path, ASKED, "x", planted(4, 6).clients())
    document = strict(tmp_path / "run.json")
    document["config"]["training"]["fancy"] = 1
    del document["sha256"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    assert "unknown options" in refused(lambda: read_options(tmp_path), RunError)


@pytest.mark.parametrize("name", ["clients.parquet", "models/models.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_damaged_files_of_a_finished_run_are_named(tmp_path: Path, name: str, damage: str) -> None:
    made = done(tmp_path / "r", planted(4, 6).clients())
    path = made.folder / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:50])
    assert str(path) in refused(lambda: load_run(made.folder), RunError)
