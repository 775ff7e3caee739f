# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, words to stderr, exit codes, and runs that can be resumed."""

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch

import coterie as package
from command import Said, coterie, process, refused
from coterie.engines.in_process import Round
from coterie.runs import fit as fit_runs
from coterie.runs import screen, show
from coterie.runs.folder import load_run
from helpers import KilledError
from planted import planted

DATA = planted(10, 20)
FIT = ("--client", "site", "--target", "y", "--rounds", "6")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DATA.write(tmp_path_factory.mktemp("data") / "sites.csv")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert coterie("fit", data, *FIT, "--out", folder).code == 0
    return folder


def document(text: str) -> dict[str, Any]:
    """One JSON document, in the standard's sense, and nothing else."""

    def no(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    found: dict[str, Any] = json.loads(text, parse_constant=no)
    return found


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = document((folder / "run.json").read_text())["config"]
    return found


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# -- the frame --------------------------------------------------------------------------------------------------------
def test_version_and_help() -> None:
    assert coterie("--version") == Said(0, f"coterie {package.__version__}\n", "")
    said = coterie("--help")
    assert said.code == 0
    for command in ("demo", "fit", "predict", "assign", "report", "resume", "study", "data"):
        assert re.search(rf"^\W*{command} ", said.out, re.MULTILINE)
    assert "--clusters" in coterie("fit", "--help").out


def test_without_a_command_there_is_help_and_exit_code_2() -> None:
    said = coterie()
    assert said.code == 2
    assert re.search(r"^\W*Commands\b", said.out + said.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["fit", "x.csv", "--cluster", "3"], "there is no option --cluster", "did you mean --clusters"),
        (["fit", "x.csv", "--frobnicate"], "there is no option --frobnicate", "`coterie fit --help`"),
        (["fit"], "missing argument 'DATA'", "`coterie fit --help`"),
        (["fits"], "no such command 'fits'", "`coterie --help`"),
        (
            ["fit", "x.csv", "--clusters", "many"],
            "invalid value for '--clusters': 'many' is not a valid int",
            "--help`",
        ),
        (["fit", "x.csv", "--client"], "option '--client' requires an argument", "--help`"),
        (["data", "chek"], "no such command 'chek'", "`coterie data --help`"),
    ],
)
def test_wrong_words_are_named(words: list[str], said: str, hint: str) -> None:
    sentence, way_out = refused(*words)
    assert sentence.startswith(said)
    assert hint in way_out


def test_an_error_of_the_system_is_one_sentence(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "run.json")

    monkeypatch.setattr(fit_runs, "begin_run", full)
    sentence, _ = refused("fit", data, *FIT, "--out", tmp_path / "r")
    assert sentence == "cannot read or write 'run.json': No space left on device"


# -- fit --------------------------------------------------------------------------------------------------------------
def test_fit_prints_a_table_and_the_path_of_the_report(data: Path, tmp_path: Path) -> None:
    said = coterie("fit", data, *FIT, "--out", tmp_path / "r")
    assert said.code == 0
    assert said.err == ""  # nothing to warn of, and no progress since this is no terminal
    lines = said.out.splitlines()
    assert lines[0] == "root mean squared error, seed 0"
    assert lines[-1] == f"report: {tmp_path / 'r' / 'report.html'}"
    assert "clients per cluster: 5, 5" in lines
    found = document((tmp_path / "r" / "run.json").read_text())["results"]["methods"]
    shown = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if "│" in line
    }
    scale = load_run(tmp_path / "r").models.scaling.y_scale
    for method in found:
        want = [method["train"], method["test"], method["test"] / float(scale)]
        assert [float(cell) for cell in shown[method["label"]][:3]] == pytest.approx(want, rel=1e-3)


def test_fit_as_json_prints_one_document(data: Path, tmp_path: Path) -> None:
    said = coterie("fit", data, *FIT, "--out", tmp_path / "r", "--json", "--seed", 5)
    assert (said.code, said.err) == (0, "")
    found = document(said.out)
    assert (found["run"], found["report"]) == (str(tmp_path / "r"), str(tmp_path / "r" / "report.html"))
    assert (found["method"], found["seed"], found["metric"]) == ("ifca", 5, "rmse")
    assert [m["method"] for m in found["methods"]] == ["ifca", "global", "local"]
    assert sum(found["cluster_sizes"]) == 10
    assert found["methods"] == document((tmp_path / "r" / "run.json").read_text())["results"]["methods"]


def test_options_reach_the_run(data: Path, tmp_path: Path) -> None:
    said = coterie(
        "fit", data, "--client", "site", "--target", "y", "--method", "ifca", "--clusters", 3, "--starts", 2,
        "--hidden", "4,3", "--rounds", 2, "--seed", 9, "--missing", "drop", "--task", "regression", "--exclude", "x1",
        "--exclude", "x2", "--min-rows", 5, "--test-size", 0.3, "--new-clients", 0.2, "--no-baselines",
        "--out", tmp_path / "r", "--set", "training.momentum=0.5", "--set", "training.step_size=0.01",
    )  # fmt: skip
    assert said.code == 0
    found = config(tmp_path / "r")
    assert (found["method"], found["seed"], found["baselines"]) == ("ifca", 9, False)
    assert found["clusters"] | {"n_clusters": 3, "n_init": 2} == found["clusters"]
    assert found["model"]["hidden"] == [4, 3]
    assert found["training"] | {"rounds": 2, "momentum": 0.5, "step_size": 0.01} == found["training"]
    want = {
        "path": str(data), "client": "site", "target": "y", "missing": "drop", "task": "regression",
        "exclude": ["x1", "x2"], "min_rows": 5, "test_size": 0.3, "new_clients": 0.2,
    }  # fmt: skip
    assert found["data"] | want == found["data"]
    assert load_run(tmp_path / "r").schema.feature_names == ("x0",)


def test_flags_win_over_the_file_and_set_over_both(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'seed = 1\nmethod = "fedavg"\n[training]\nrounds = 1\nlocal_steps = 2\n[data]\nclient = "site"\ntarget = "y"\n'
    )
    said = coterie(
        "fit", data, "--config", tmp_path / "run.toml", "--rounds", 2, "--seed", 3, "--set", "seed=4",
        "--out", tmp_path / "r",
    )  # fmt: skip
    assert said.code == 0
    found = config(tmp_path / "r")
    assert (found["method"], found["seed"]) == ("fedavg", 4)
    assert (found["training"]["rounds"], found["training"]["local_steps"]) == (2, 2)


def test_without_out_a_new_folder_is_made_each_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sites-fedavg", "sites-fedavg-2"):
        said = coterie("fit", data, *FIT, "--method", "fedavg", "--no-baselines")
        assert said.out.splitlines()[-1] == f"report: runs/{name}/report.html"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["sites-fedavg", "sites-fedavg-2"]


def test_the_same_command_twice_gives_the_same_and_other_options_are_refused(data: Path, tmp_path: Path) -> None:
    first = coterie("fit", data, *FIT, "--out", tmp_path / "r", "--json")
    models = (tmp_path / "r" / "models" / "models.safetensors").read_bytes()
    again = coterie("fit", data, *FIT, "--out", tmp_path / "r", "--json")
    assert (tmp_path / "r" / "models" / "models.safetensors").read_bytes() == models
    assert document(again.out)["methods"] == document(first.out)["methods"]
    sentence, hint = refused("fit", data, *FIT, "--out", tmp_path / "r", "--seed", 1)
    assert sentence == f"{tmp_path / 'r'} holds a run with other options"
    assert f"coterie resume {tmp_path / 'r'}" in hint
    assert (tmp_path / "r" / "models" / "models.safetensors").read_bytes() == models


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    lines = [f"{'abc'[i % 3]},{i % 5},{i * 1.7 % 4:.2f}" for i in range(60)] + ["d,1,2.0", "a,,1.0", "b,,1.5"]
    (tmp_path / "t.csv").write_text("site,x,y\n" + "\n".join(lines))
    said = coterie(
        "fit", tmp_path / "t.csv", *FIT, "--method", "fedavg", "--missing", "drop", "--min-rows", 2,
        "--out", tmp_path / "r",
    )  # fmt: skip
    assert said.code == 0
    assert said.err == (
        "warning: 2 rows with missing values are left out\nwarning: 1 clients with too few rows are left out\n"
    )


def test_uncertain_clients_are_warned_of_on_stderr_or_in_the_document(tmp_path: Path) -> None:
    path = planted(6, 8, noise=30.0).write(tmp_path / "t.csv")
    said = coterie("fit", path, *FIT, "--out", tmp_path / "a")
    assert re.search(r"^warning: uncertain cluster for \d of 6 clients", said.err, re.MULTILINE)
    as_json = coterie("fit", path, *FIT, "--out", tmp_path / "b", "--json")
    assert as_json.err == ""
    assert [f"warning: {one}" for one in document(as_json.out)["warnings"]] == said.err.splitlines()


def test_odd_but_legal_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = []
    for i in range(240):
        site, x, ward = i % 6, draw.normal(), ("icu", "er", "[bold]:smile:")[i % 3]
        y = (x > 0) == (site % 2 == 0)
        number = "" if i % 20 == 7 else f"{x:.3f}"
        lines.append(f'"Clinic [{site}], {":x:"}",{number},{ward},{y},{("low", "mid", "high")[int(abs(x) + y) % 3]}')
    (tmp_path / "t.csv").write_text("the clinic,x,ward,ill,grade\n" + "\n".join(lines))
    words = ("fit", tmp_path / "t.csv", "--client", "the clinic", "--missing", "mean", "--rounds", 40)
    truth = coterie(*words, "--target", "ill", "--exclude", "grade", "--out", tmp_path / "a")
    assert truth.code == 0
    assert "accuracy, seed 0" in truth.out
    methods = {m["method"]: m for m in document((tmp_path / "a" / "run.json").read_text())["results"]["methods"]}
    assert methods["ifca"]["test"] > 0.85
    assert methods["global"]["test"] < 0.7
    schema = load_run(tmp_path / "a").schema
    assert schema.classes == ("false", "true")
    assert schema.feature_names == ("x", "ward=[bold]:smile:", "ward=er", "ward=icu")
    three = coterie(*words, "--target", "grade", "--exclude", "ill", "--out", tmp_path / "b", "--json")
    assert document(three.out)["metric"] == "accuracy"
    assert load_run(tmp_path / "b").schema.classes == ("high", "low", "mid")
    predicted = rows(coterie("predict", tmp_path / "b", tmp_path / "t.csv").out)
    assert {row["client"] for row in predicted} == {f"Clinic [{i}], :x:" for i in range(6)}
    looked = coterie("data", "check", tmp_path / "t.csv", "--client", "the clinic", "--missing", "mean")
    assert "ward" in looked.out


# -- predict, assign, report ------------------------------------------------------------------------------------------
def test_predict_prints_csv_in_the_order_of_the_file(data: Path, run: Path) -> None:
    said = coterie("predict", run, data)
    assert (said.code, said.err) == (0, "")
    found = rows(said.out)
    assert list(found[0]) == ["client", "label", "prediction"]
    assert [row["client"] for row in found] == DATA.groups.tolist()
    want = package.load(run).predict(DATA.x, groups=DATA.groups)
    np.testing.assert_allclose([float(row["prediction"]) for row in found], want, rtol=1e-12)


def test_predict_writes_files(data: Path, run: Path, tmp_path: Path) -> None:
    printed = coterie("predict", run, data).out
    for name in ("p.csv", "p.parquet"):
        assert coterie("predict", run, data, "--out", tmp_path / name) == Said(0, "", "")
    assert (tmp_path / "p.csv").read_text() == printed
    assert pq.read_table(tmp_path / "p.parquet").to_pydict() == pc.read_csv(tmp_path / "p.csv").to_pydict()


def test_assign_places_new_clients(run: Path, tmp_path: Path) -> None:
    new = planted(4, 30, seed=8, prefix="new")
    said = coterie("assign", run, new.write(tmp_path / "new.csv"))
    found = rows(said.out)
    assert [row["client"] for row in found] == new.names
    known = dict(zip(package.load(run).client_names_.tolist(), package.load(run).labels_.tolist(), strict=True))
    assert [int(row["label"]) for row in found] == [known[f"s0{new.truth[name]}"] for name in new.names]
    assert {row["certain"] for row in found} == {"true"}
    assert coterie("assign", run, tmp_path / "new.csv", "--out", tmp_path / "a.parquet").out == ""
    assert pq.read_table(tmp_path / "a.parquet")["rows"].to_pylist() == [30] * 4


def test_report_is_written_again(run: Path) -> None:
    (run / "report.html").unlink()
    said = coterie("report", run)
    assert said == Said(0, f"{run / 'report.html'}\n", "")
    page = (run / "report.html").read_text()
    assert "IFCA" in page
    assert "s03" in page


def test_report_of_an_unfinished_run_says_so(data: Path, tmp_path: Path) -> None:
    interrupted(tmp_path / "r", data)
    said = coterie("report", tmp_path / "r")
    assert (said.code, said.out) == (0, f"{tmp_path / 'r' / 'report.html'}\n")
    assert said.err == f"warning: the run has not finished; continue it with: coterie resume {tmp_path / 'r'}\n"
    assert coterie("resume", tmp_path / "r").code == 0  # the report in the folder is not in the way


# -- resume -----------------------------------------------------------------------------------------------------------
def interrupted(folder: Path, data: Path, *words: object, error: type[BaseException] = KilledError) -> Said:
    """Stop a fit in its fourth round."""
    real = fit_runs.train

    def stopping(clients: Any, session: Any, given: Any) -> Any:
        def watch(phase: str, done: Round, total: int) -> None:
            if phase == "fit" and done.round == 4:
                raise error

        return real(clients, replace(session, watch=watch), given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_runs, "train", stopping)
        if error is KeyboardInterrupt:
            return coterie("fit", data, *FIT, *words, "--out", folder, "--checkpoint-seconds", 0)
        with pytest.raises(error):
            coterie("fit", data, *FIT, *words, "--out", folder, "--checkpoint-seconds", 0)
        return Said(0, "", "")


def test_an_interrupted_run_is_resumed_to_the_same_models(data: Path, run: Path, tmp_path: Path) -> None:
    interrupted(tmp_path / "r", data)
    before = document((tmp_path / "r" / "run.json").read_text())
    assert before["status"] == "running"
    sentence, hint = refused("predict", tmp_path / "r", data)
    assert sentence == f"the run in {tmp_path / 'r'} has not finished"
    assert hint == f"continue it with `coterie resume {tmp_path / 'r'}`"
    said = coterie("resume", tmp_path / "r")
    assert said.code == 0
    assert said.out.splitlines()[-1] == f"report: {tmp_path / 'r' / 'report.html'}"
    assert torch.equal(load_run(tmp_path / "r").models.theta, load_run(run).models.theta)
    after = document((tmp_path / "r" / "run.json").read_text())
    assert after["status"] == "finished"
    assert (after["command"], after["started"]) == (before["command"], before["started"])
    assert "coterie fit" in after["command"]
    rounds = pq.read_table(tmp_path / "r" / "rounds.parquet")
    assert rounds["round"].to_pylist() == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_leaves_a_run_that_can_be_resumed(data: Path, run: Path, tmp_path: Path) -> None:
    said = interrupted(tmp_path / "r", data, error=KeyboardInterrupt)
    assert said.code == 130
    assert said.err.strip() == f"interrupted; continue with: coterie resume {tmp_path / 'r'}"
    assert document(coterie("resume", tmp_path / "r", "--json").out)["method"] == "ifca"
    assert torch.equal(load_run(tmp_path / "r").models.theta, load_run(run).models.theta)


def test_the_fit_command_itself_continues_too(data: Path, run: Path, tmp_path: Path) -> None:
    interrupted(tmp_path / "r", data)
    assert coterie("fit", data, *FIT, "--out", tmp_path / "r").code == 0
    assert torch.equal(load_run(tmp_path / "r").models.theta, load_run(run).models.theta)


def test_a_finished_run_is_not_fitted_again(run: Path) -> None:
    before = (run / "run.json").read_bytes(), (run / "state.safetensors").stat().st_mtime_ns
    (run / "report.html").unlink()
    said = coterie("resume", run)
    assert said == Said(
        0, f"report: {run / 'report.html'}\n", "the run has finished; only its report is written again\n"
    )
    assert (run / "report.html").exists()
    assert ((run / "run.json").read_bytes(), (run / "state.safetensors").stat().st_mtime_ns) == before
    assert document(coterie("resume", run, "--json").out)["cluster_sizes"] == [5, 5]


def test_data_that_changed_stop_a_resume(tmp_path: Path) -> None:
    path = DATA.write(tmp_path / "t.csv")
    interrupted(tmp_path / "r", path)
    kept = {file: file.read_bytes() for file in (tmp_path / "r").rglob("*") if file.is_file()}
    text = path.read_text()
    number = re.search(r"\d\.\d{6}", text)
    assert number is not None
    path.write_text(text.replace(number[0], "9.999999", 1))  # the same rows, one cell changed
    sentence, _ = refused("resume", tmp_path / "r")
    assert sentence == f"the data of the run in {tmp_path / 'r'} has changed since it began"
    path.unlink()
    assert refused("resume", tmp_path / "r")[0] == f"there is no file '{path}'"
    assert {file: file.read_bytes() for file in (tmp_path / "r").rglob("*") if file.is_file()} == kept


# -- data check -------------------------------------------------------------------------------------------------------
def test_data_check_says_what_is_there(data: Path) -> None:
    said = coterie("data", "check", data, "--client", "site", "--target", "y")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("200 rows, 10 clients; rows per client: min 20, median 20, max 20\n")
    assert said.out.endswith("target y: regression\nready to fit\n")
    as_json = coterie("data", "check", data, "--client", "site", "--target", "y", "--json")
    found = document(as_json.out)
    assert (found["rows"], found["clients"], found["problems"]) == (200, 10, [])
    assert [feature["name"] for feature in found["features"]] == ["x0", "x1", "x2"]


def test_data_check_ends_with_2_when_there_are_errors(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "site,x,y\n" + "".join(f"{'ab'[i % 2]},{i if i else ''},{i / 3}\n" for i in range(20))
    )
    said = coterie("data", "check", tmp_path / "t.csv", "--client", "site", "--target", "y")
    assert said.code == 2
    assert "error: column 'x' has 1 missing value\nhint: --missing mean" in said.out
    assert "ready to fit" not in said.out
    as_json = coterie("data", "check", tmp_path / "t.csv", "--client", "site", "--target", "y", "--json")
    assert as_json.code == 2
    assert document(as_json.out)["problems"][0]["severity"] == "error"
    assert coterie("data", "check", tmp_path / "t.csv", "--client", "site", "--missing", "drop").code == 0


def test_data_check_of_what_cannot_be_opened(data: Path) -> None:
    said = coterie("data", "check", data, "--client", "sight")
    assert (said.code, said.err) == (2, "")
    assert (
        said.out
        == f"error: '{data}' has no client column 'sight'\nhint: did you mean 'site'? columns are: site, x0, x1, x2, y\n"
    )


def test_data_check_takes_the_choices_that_fit_takes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("site,kind,y\n" + "".join(f"{'ab'[i % 2]},{i % 4},{i % 3}\n" for i in range(40)))
    words = ("data", "check", tmp_path / "t.csv", "--client", "site", "--target", "y")
    assert "target y: classification of 0, 1, 2" in coterie(*words).out
    assert "target y: regression" in coterie(*words, "--task", "regression").out
    found = document(coterie(*words, "--categorical", "kind", "--json").out)
    assert found["features"][0]["levels"] == ["0", "1", "2", "3"]
    assert refused(*words, "--task", "guess")[0] == "task is 'guess'"


# -- as a process -----------------------------------------------------------------------------------------------------
def test_a_process_says_its_results_on_stdout_and_no_progress_elsewhere(data: Path, tmp_path: Path) -> None:
    said = process("fit", data, *FIT, "--out", "r", "--json", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert document(said.stdout)["run"] == "r"


def test_a_process_that_is_refused(data: Path, tmp_path: Path) -> None:
    said = process("fit", data, "--client", "sit", "--target", "y", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (2, "")
    assert re.fullmatch(r"error: .*no client column 'sit'\nhint: did you mean 'site'\?.*\n", said.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_sees_progress_and_no_colour_when_asked(data: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "coterie", "fit", str(data), *FIT, "--out", "r"]
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("COTERIE_QUIET", None)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=theirs) as started:
        os.close(theirs)
        shown = _all_of(ours)
        printed = (started.stdout.read() if started.stdout is not None else b"").decode()
    assert started.returncode == 0
    assert "200 rows" not in printed
    assert "Clients(10 clients, 160 rows, 40 test rows, 3 features, regression of 'y'); seed 0; run folder r" in shown
    assert re.search(r"fit .*6/6.*loss [\d.e-]+ +sizes 5 5", shown)
    assert "prepare" in shown  # baselines run beside the fit
    assert not re.search(r"\x1b\[[\d;]*3[0-8][\d;]*m", shown)  # no foreground colour
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([10.0, 10.26, None], ["10.00", "10.26", None]),  # not 10 beside 10.26
        ([0.9755, 3.3664, 0.9144], ["0.9755", "3.3664", "0.9144"]),
        ([1234.56, 98765.4], ["1235", "98765"]),
        ([0.0, 0.000012345], ["0.00000000", "0.00001234"]),
    ],
)
def test_scores_of_a_column_have_the_same_decimals(values: list[float | None], shown: list[str | None]) -> None:
    cells = show._cells(values)
    assert [None if value is None else format(value, how) for value, how in cells] == shown


def test_a_terminal_sees_both_phases_of_moment_descent() -> None:
    said = [
        screen._said(info)
        for info in (
            {"movement": [0.31, 0.02, 0.1], "spectrum": [1.0], "events": []}, {"events": ["3 anchors make 2 clusters"]},
            {"loss": 0.25, "sizes": [5, 5], "moved": 0, "events": []},
        )
    ]  # fmt: skip
    assert said == ["moment descent: 3 anchors, moved by 0.1", "", "loss 0.25  sizes 5 5"]


def test_a_bar_that_takes_longer_than_was_thought_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_QUIET", raising=False)
    monkeypatch.setattr(screen.err, "_force_terminal", True)
    monkeypatch.setattr(screen.err, "_file", shown := io.StringIO())
    with screen.progress() as watch:
        assert watch is not None
        for round_, total in ((1, 6), (6, 6), (8, 8)):  # further anchors were drawn
            watch("fit", Round(0, round_, 0.0, 1, 0, 0, {"movement": [0.5]}), total)
    assert "8/8" in shown.getvalue()


def _all_of(terminal: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # Linux says so when the other side is gone
            break
        if not part:
            break
        parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


def test_a_reader_that_has_had_enough_is_no_error(data: Path, run: Path) -> None:
    command = [sys.executable, "-m", "coterie", "assign", str(run), str(data)]  # ten lines: less than a buffer
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.close()
        said = started.stderr.read() if started.stderr is not None else b""
    assert said == b""


def test_the_demo_finds_the_four_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = coterie("demo", "--json")
    assert (said.code, said.err) == (0, "")
    found = document(said.out)
    accuracy = {m["method"]: m["test"] for m in found["methods"]}
    assert accuracy["ifca"] >= 0.95
    assert accuracy["global"] <= 0.92
    assert accuracy["local"] <= 0.85
    assert found["adjusted_rand"] == 1.0
    assert found["cluster_sizes"] == [36, 36, 36, 36]
    assert (tmp_path / found["report"]).stat().st_size > 10_000
    assert found["seed"] == 0
