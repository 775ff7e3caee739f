# SPDX-License-Identifier: Apache-2.0
"""`coterie node`: for the owner of a node: what it was asked, and which runs may ask."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.arguments import AsJson
from coterie.errors import ConfigError
from coterie.runs.screen import out, warn

if TYPE_CHECKING:
    from rich.table import Table

    from coterie.engines.flower.approvals import Decision
    from coterie.engines.flower.question_log import Entry

__all__ = ["app"]

app = typer.Typer(help="What a node of a federation was asked, and which runs may ask.", no_args_is_help=True)

State = Annotated[
    Path | None,
    typer.Option(help="State folder, as `state` in the node's configuration names it; by default Flower's own."),
]
Name = Annotated[
    str | None, typer.Option("--node", help="Name of the node, where the folder holds the state of several.")
]
Run = Annotated[str, typer.Argument(help="A run, by the name that `coterie node pending` shows.")]

_MARKS = ("identity", "log.jsonl", "runs.json")  # one of them is in every node's folder


@app.command("log")
def log_command(
    state: State = None,
    node: Name = None,
    run: Annotated[str | None, typer.Option(help="Only this run: coterie's name, or Flower's number.")] = None,
    last: Annotated[int, typer.Option(min=0, help="Number of lines, the newest; 0 for all.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what the node was asked, what left it, and what it refused."""
    from coterie.engines.flower.question_log import entries

    found, broken = entries(_folder(state, node), run=run, last=last)
    if broken:
        lines, are = ("lines", "are") if broken > 1 else ("line", "is")
        warn([f"{broken} {lines} of the log cannot be read, and {are} left out"])
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    table = _table("time (UTC)", "run", "function", "clients", "bytes", "what left, or why nothing did")
    for one in found:
        table.add_row(
            one.time[:19].replace("T", " "), _shown(one.run[:8]), _shown(one.function), str(one.clients), str(one.bytes),
            _shown(_left(one)),
        )  # fmt: skip
    out.print(table, soft_wrap=False)


@app.command("pending")
def pending_command(state: State = None, node: Name = None, as_json: AsJson = False) -> None:
    """List the runs that wait for approval."""
    from coterie.engines.flower.approvals import pending

    found = pending(_folder(state, node))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    if not found:
        out.print("no run waits for approval")
        return
    table = _table("run", "method", "since (UTC)", "Flower's number", "submitter")
    for one in found:
        table.add_row(
            _shown(one.run), _shown(one.method or "not said"), one.since[:19].replace("T", " "), str(one.flower),
            _shown(one.submitter or "not said"),
        )  # fmt: skip
    out.print(table, soft_wrap=False)


@app.command("approve")
def approve_command(run: Run, state: State = None, node: Name = None) -> None:
    """Let a run ask, as far as the policy allows."""
    _decide(run, "approved", state, node)


@app.command("refuse")
def refuse_command(run: Run, state: State = None, node: Name = None) -> None:
    """Answer a run no more, whether it waits or was approved."""
    _decide(run, "refused", state, node)


# -- small helpers ----------------------------------------------------------------------------------------------------
def _decide(run: str, decision: "Decision", state: Path | None, node: str | None) -> None:
    from coterie.engines.flower.approvals import decide

    folder = _folder(state, node)
    said = decide(folder, run, decision)
    out.print(f"run {_shown(said.run)} is {said.decision} at {folder.name}")


def _folder(state: Path | None, node: str | None) -> Path:
    """The folder of one node: a state folder has one for each name."""
    if state is None:  # where a node keeps it whose configuration does not say: see engines/flower/node_config.py
        state = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "coterie"
    if node is None and _is_node(state):
        return state
    inside = sorted(path for path in state.iterdir() if _is_node(path)) if state.is_dir() else []
    found = [path for path in inside if node in (None, path.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in inside)
    if not inside:
        raise ConfigError(
            f"no node keeps its state in {state}",
            "name the folder that `state` has in the node's configuration: --state",
        )
    if node is not None:
        raise ConfigError(f"no node '{node}' keeps its state in {state}", f"there are {names}")
    raise ConfigError(f"{state} holds the state of {len(inside)} nodes", f"name one with --node: {names}")


def _table(*columns: str) -> "Table":
    from rich.table import Column, Table

    return Table(*(Column(name, no_wrap=name == "run", overflow="fold") for name in columns))


def _is_node(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def _left(one: "Entry") -> str:
    if one.refused:
        return f"refused: {one.refused}"
    by_kind: dict[str, list[str]] = {}
    for name, how in one.fields.items():
        by_kind.setdefault(how, []).append(name)
    said = "; ".join(f"{how}: {', '.join(names)}" for how, names in by_kind.items()) or "nothing"
    return f"{said}; epsilon {one.epsilon:g}" if one.epsilon else said


def _shown(text: object) -> str:
    """What a server has said, for a screen."""
    return "".join(c if c.isprintable() else " " for c in str(text))
