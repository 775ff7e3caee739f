# SPDX-License-Identifier: Apache-2.0
"""`coterie node`: what the owner of a node sees and decides, and what is refused."""

import json
from pathlib import Path

import pytest

from command import coterie, refused
from coterie.engines.flower.approvals import Asking, WaitsError, check_approved
from coterie.engines.flower.question_log import FILE, Entry, write
from coterie.runs import screen


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The state folder of a node that was asked three times, and where a run waits."""
    folder = tmp_path / "state" / "ward-7"
    about = {"flower": 17, "submitter": "fpk_1", "method": "ifca"}
    lines = [
        Entry(run="first", function="introduction", clients=4, bytes=900, fields={"names": "individual"}),
        Entry(run="first", function="column_sums", clients=4, bytes=16, fields={"sum": "sum"}, epsilon=0.5),
        Entry(run="second", **about, function="fit_once", clients=4, refused="it waits\x1b[31m"),  # type: ignore[arg-type]
    ]
    write(folder, lines, 1.0)
    with pytest.raises(WaitsError):
        check_approved(folder, Asking("second", **about))  # type: ignore[arg-type]
    return tmp_path / "state"


def test_the_log_is_shown_as_a_table(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.out, "width", 200)
    said = coterie("node", "log", "--state", state)
    assert said.code == 0
    assert "sum: sum; epsilon 0.5" in said.out
    assert "refused: it waits" in said.out
    assert "\x1b" not in said.out
    assert said.err == ""


def test_the_log_is_given_as_one_document(state: Path) -> None:
    said = json.loads(coterie("node", "log", "--state", state, "--json").out)
    assert [one["function"] for one in said] == ["introduction", "column_sums", "fit_once"]
    assert said[2]["refused"].startswith("it waits")
    for words, expected in (
        (("--run", "first"), 2), (("--run", "17"), 1), (("--last", "1"), 1), (("--last", "0"), 3), (("--run", "no"), 0),
    ):  # fmt: skip
        assert len(json.loads(coterie("node", "log", "--state", state, "--json", *words).out)) == expected, words


def test_lines_that_cannot_be_read_are_counted(state: Path) -> None:
    with (state / "ward-7" / FILE).open("ab") as file:
        file.write(b'{"cut')
    said = coterie("node", "log", "--state", state, "--json")
    assert len(json.loads(said.out)) == 3
    assert said.err == "warning: 1 line of the log cannot be read, and is left out\n"


def test_a_run_is_listed_approved_and_refused(state: Path) -> None:
    shown = coterie("node", "pending", "--state", state)
    assert "second" in shown.out
    assert "fpk_1" in shown.out
    (one,) = json.loads(coterie("node", "pending", "--state", state, "--json").out)
    assert (one["run"], one["method"], one["flower"], one["decision"]) == ("second", "ifca", 17, "pending")
    assert coterie("node", "approve", "second", "--state", state).out == "run second is approved at ward-7\n"
    assert coterie("node", "pending", "--state", state).out == "no run waits for approval\n"
    check_approved(state / "ward-7", Asking("second"))
    assert coterie("node", "refuse", "second", "--state", state).out == "run second is refused at ward-7\n"


def test_what_is_not_there_is_said(state: Path, tmp_path: Path) -> None:
    assert refused("node", "approve", "third", "--state", state) == (
        "no run 'third' has asked this node", "`coterie node pending` lists the runs that have"
    )  # fmt: skip
    said, hint = refused("node", "log", "--state", tmp_path / "nowhere")
    assert said == f"no node keeps its state in {tmp_path / 'nowhere'}"
    assert "--state" in hint
    assert refused("node", "log", "--state", state, "--node", "ward-8") == (
        f"no node 'ward-8' keeps its state in {state}", "there are ward-7"
    )  # fmt: skip
    assert refused("node", "log", "--state", state, "--last", "-1")[0].startswith("invalid value for '--last'")


def test_one_of_several_nodes_is_named(state: Path) -> None:
    write(state / "ward-8", [Entry(run="x")], 1.0)
    assert refused("node", "log", "--state", state) == (
        f"{state} holds the state of 2 nodes", "name one with --node: ward-7, ward-8"
    )  # fmt: skip
    assert len(json.loads(coterie("node", "log", "--state", state, "--node", "ward-8", "--json").out)) == 1
    assert len(json.loads(coterie("node", "log", "--state", state / "ward-8", "--json").out)) == 1


def test_without_a_folder_it_is_the_one_that_nodes_take_by_themselves(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state.parent / "home").mkdir()
    state.rename(state.parent / "home" / "coterie")
    monkeypatch.setenv("FLWR_HOME", str(state.parent / "home"))
    assert len(json.loads(coterie("node", "log", "--json").out)) == 3


def test_flower_has_its_home_where_we_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    utils = pytest.importorskip("flwr.supercore.utils")
    monkeypatch.delenv("FLWR_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert utils.get_flwr_home() == tmp_path / ".flwr"
    assert refused("node", "log")[0] == f"no node keeps its state in {tmp_path / '.flwr' / 'coterie'}"
