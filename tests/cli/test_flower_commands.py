# SPDX-License-Identifier: Apache-2.0
"""`coterie flower`: what is said, what is refused, and how a run on a SuperLink is followed.

In place of Flower's command line, here stands a program that says what a real one was seen to say; the real one is in
test_flower_deployment.py.
"""

import importlib.util
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from command import coterie, refused
from coterie.config import FitOptions
from coterie.data.readers import read
from coterie.engines.flower import federation, submission
from coterie.engines.flower import superlink as connection
from coterie.engines.flower.events import heard, tell
from coterie.engines.flower.processes import Process
from coterie.engines.flower.superlink import Connection
from coterie.methods.fit import fit
from coterie.runs.auto import advised
from coterie.runs.comparison import Compared
from coterie.studies import stays_demo

needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")

FLWR = """\
import json, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "asked").open("a") as file:
    file.write(json.dumps(words) + chr(10))
if words[0] == "run":
    text = (pathlib.Path(words[1]) / "pyproject.toml").read_text()
    (here / "app.toml").write_text(text)
    print("Using SuperLink: coterie")
    print(json.dumps({"success": True, "run-id": "77"}))
elif words[0] == "log":
    print((here / "log").read_text(), end="")
elif words[0] == "list":
    print(json.dumps({"success": True, "runs": [{"run-id": "77", "status": "finished:failed"}]}))
"""


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A federation that seems to be up, and the folder of the program that stands for `flwr`."""
    script = tmp_path / "flwr"
    script.write_text(f"#!{sys.executable}\n{FLWR}")
    script.chmod(0o755)
    monkeypatch.setattr(connection, "tool", lambda name: str(script))
    monkeypatch.setattr(submission, "tool", lambda name: str(script))
    record = {
        "folder": str(tmp_path), "address": "127.0.0.1:1", "root_certificates": None, "threads": 1, "processes": [],
        "data": {"path": "rows.parquet", "client": "site", "target": "y"}, "commands": {"superlink": [], "node-0": []},
    }  # fmt: skip
    (tmp_path / "federation.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def events(folder: Path, capsys: pytest.CaptureFixture[str], *told: dict[str, Any]) -> None:
    """Let the program's log hold these events, among other lines."""
    capsys.readouterr()
    for event in told:
        tell(**event)
    (folder / "log").write_text("INFO : starting\n" + capsys.readouterr().out + "INFO : bye\n")


def test_events_survive_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    tell("warning", text='node "a": ünsure\nof it')
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert heard(f"INFO : {line}") == {"event": "warning", "text": 'node "a": ünsure\nof it'}
    assert heard("INFO : nothing of ours") is None
    assert heard(line[: len(line) // 2]) is None


@needs_flower
def test_run_prints_what_the_server_found(superlink: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = {"run": 0, "round": 1, "seconds": 1.0, "participants": 3, "bytes_up": 1, "bytes_down": 1, "info": {}}
    found = {"run": "r", "report": "r/report.html", "method": "ifca"}
    events(
        superlink, capsys,
        {"event": "message", "asked": "assign and train"},
        {"event": "round", "phase": "fit", "total": 2, "done": done},
        {"event": "warning", "text": "node-0 was late"},
        {"event": "result", "text": "a table\n", "warnings": ["a cluster is empty"], "found": found},
    )  # fmt: skip
    words = ("flower", "run", "--clusters", 3, "--rounds", 2, "--folder", superlink, "--out", superlink / "r")
    said = coterie(*words)
    assert said.code == 0, said
    assert said.out == "a table\nreport: r/report.html\n"
    assert said.err == "warning: node-0 was late\nwarning: a cluster is empty\n"
    assert json.loads(coterie(*words, "--json").out) == found
    app = tomllib.loads((superlink / "app.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "coterie.engines.flower.server_app:server",
        "clientapp": "coterie.engines.flower.client_app:client",
    }
    chosen = FitOptions.model_validate_json(app["config"]["options"])
    assert (chosen.n_clusters, chosen.training.rounds) == (3, 2)
    assert (chosen.data.client, chosen.data.target) == ("site", "y")  # as the nodes were dealt
    assert app["config"]["out"] == str(superlink / "r")
    assert app["config"]["nodes"] == 1


@needs_flower
def test_an_error_of_the_server_is_the_commands_own(superlink: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"kind": "DataError", "message": "node-0 has no column 'x'", "hint": "check it"}
    events(superlink, capsys, {"event": "error", **wrong})
    assert refused("flower", "run", "--folder", superlink) == ("node-0 has no column 'x'", "check it")


@needs_flower
def test_a_run_without_a_result_is_told_with_its_last_words(
    superlink: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events(superlink, capsys)
    sentence, hint = refused("flower", "run", "--folder", superlink)
    assert sentence == "the run on the SuperLink ended without a result (finished:failed): INFO : bye"
    assert hint == "see the SuperLink's log"


@needs_flower
def test_any_superlink_can_be_named(superlink: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events(superlink, capsys, {"event": "result", "text": "", "warnings": [], "found": {"report": "x"}})
    assert coterie("flower", "run", "--superlink", "link.example:9093", "--insecure", "--nodes", 12).code == 0
    assert coterie("flower", "run", "--superlink", "supergrid").code == 0
    asked = [json.loads(line) for line in (superlink / "asked").read_text().splitlines()]
    assert [words[2] for words in asked if words[0] == "run"] == ["coterie", "supergrid"]


def test_configurations_are_written_for_flower(tmp_path: Path) -> None:
    def written(**how: Any) -> dict[str, Any]:
        Connection("coterie", tmp_path, "a:1", **how).write()
        return tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]["coterie"]

    assert written(insecure=True) == {"address": "a:1", "insecure": True}
    assert written(root_certificates="/x/ca.pem") == {"address": "a:1", "root-certificates": "/x/ca.pem"}
    assert written() == {"address": "a:1"}  # TLS, with the authorities that the system trusts


@needs_flower
def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("status", "run"):
        sentence, hint = refused("flower", command)
        assert sentence == "no federation was started from .coterie-flower"
        assert "coterie flower up" in hint
    assert coterie("flower", "down").out == "nothing was running\n"
    assert refused("flower", "up", "--data", "no.csv", "--client", "c")[0] == "there is no file 'no.csv'"
    assert refused("flower", "resume", tmp_path)[0] == f"{tmp_path} is not a run: it has no run.json"


@needs_flower
def test_status_of_a_federation_that_has_died(superlink: Path) -> None:
    made = federation.find(superlink)
    document = json.loads((superlink / "federation.json").read_text())
    stale = vars(Process("superlink", 1, "long ago", "x.log"))
    document["processes"] = [stale, {**stale, "name": "node-0"}]
    (superlink / "federation.json").write_text(json.dumps(document))
    said = coterie("flower", "status", "--folder", superlink, "--json")
    assert json.loads(said.out)["running"] == {"superlink": False, "node-0": False}
    assert coterie("flower", "down", "--folder", superlink).out == "nothing was running\n"  # number 1 is not ours
    assert made.nodes == ("node-0",)


def test_without_flower_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "flwr" else real(name, *more))
    for words in (("up", "--data", "x.csv"), ("run",), ("status",), ("down",), ("demo",)):
        assert refused("flower", *words) == ("Flower is not installed", "pip install 'coterie[flower]'")


@needs_flower
def test_nodes_read_the_outcome_that_a_comparison_asks_for(
    superlink: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flwr.app import Context, RecordDict

    from coterie.engines.flower.node_data import node_data

    events(superlink, capsys, {"event": "result", "text": "", "warnings": [], "found": {"report": "x"}})
    words = ("--outcome", "cox", "--event", "operation", "--exclude", "severity", "--folder", superlink)
    assert coterie("flower", "compare", *words).code == 0
    config = tomllib.loads((superlink / "app.toml").read_text())["tool"]["flwr"]["app"]["config"]
    stays_demo.write_stays(tmp_path / "rows.parquet", 0)
    table = pq.read_table(tmp_path / "rows.parquet")
    times = pa.array(np.abs(table["days"].to_numpy()) + 0.1)
    pq.write_table(table.set_column(table.column_names.index("days"), "days", times), tmp_path / "rows.parquet")
    about = {"name": "a", "data": str(tmp_path / "rows.parquet"), "client": "hospital", "target": "days"}
    schema = node_data(Context(1, 1, about, RecordDict(), config)).load(None).schema
    assert (schema.outcome, schema.event, schema.feature_names) == ("cox", "operation", ("age",))


@needs_flower
def test_nodes_read_their_rows_for_a_comparison(
    superlink: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration that `compare` sends says nothing that a node would take for options of a fit."""
    from flwr.app import Context, RecordDict

    from coterie.engines.flower.node_data import node_data

    events(superlink, capsys, {"event": "result", "text": "", "warnings": [], "found": {"report": "x"}})
    assert coterie("flower", "compare", "--quick", "--seed", 3, "--folder", superlink).code == 0
    config = tomllib.loads((superlink / "app.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert json.loads(config["compare"]) == {"hidden": [], "quick": True, "seed": 3, "new_clients": None}
    stays_demo.write_stays(tmp_path / "rows.parquet", 0)
    about = {"name": "a", "data": str(tmp_path / "rows.parquet"), "client": "hospital", "target": "days"}
    held = node_data(Context(1, 1, about, RecordDict(), config))
    assert held.load(None).schema.feature_names == ("age", "severity", "operation")


@needs_flower
def test_the_demo_finds_the_groups_on_nodes_and_its_baselines_are_those_of_one_process(tmp_path: Path) -> None:
    from coterie.engines.flower.strategies import CoterieStrategy, compare
    from flower_grid import MemoryGrid, dealt

    stays_demo.write_stays(tmp_path / "rows.parquet", 0)
    clients = read(tmp_path / "rows.parquet", client="hospital", target="days", test_size=0)
    grid = MemoryGrid(dealt(clients.train, tmp_path / "nodes", nodes=2))
    done = compare(grid, nodes=2, folder=tmp_path / "found", new_clients=0.0, effort=stays_demo.EFFORT)
    assert isinstance(done, Compared)
    chosen = advised(done.document).into(stays_demo.demo_options(0))
    strategy = CoterieStrategy(**chosen.model_dump(exclude_unset=True))
    strategy.start(grid, nodes=2, folder=tmp_path / "run")
    there, here = strategy.fitted_, fit(read(tmp_path / "rows.parquet", client="hospital", target="days"), chosen)
    assert there is not None
    assert (there.options.method, there.options.n_clusters) == ("ifca", 3)
    assert strategy.more_["adjusted_rand"] == 1.0
    for one, same in zip(there.scores, here.scores, strict=True):
        assert one.label == same.label
        assert one.test == pytest.approx(same.test, rel=1e-6)
    ours, ridge = there.scores[:2]
    assert ours.test < 0.5 * ridge.test
    assert len(grid.sent) / 2 <= 55  # messages to a node: each costs seconds in the demo
