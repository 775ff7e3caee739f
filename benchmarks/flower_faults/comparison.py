# SPDX-License-Identifier: Apache-2.0
"""Faults while structures are compared, one line each: `python -m benchmarks.flower_faults.comparison [FAULT ...]`.

A node is killed and comes back; a node stops answering; a node is slow; the server is killed, and the comparison
continued; a node has other columns. The answer must name the clients that did not take part, and a comparison that is
continued must end as one that was not interrupted, to the last bit; a node with other columns is left out by name.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.flower_faults.common import Messages, compare, federation
from coterie.engines.flower.federation import Federation, process_of, restart
from coterie.engines.flower.processes import kill
from coterie.errors import CoterieError

VICTIM = "node-1"
TIMEOUT = 60.0
KILLED = 6  # message at which somebody is killed


def node_killed(made: Federation, folder: Path) -> str:
    def again() -> None:
        kill(process_of(made, VICTIM))
        threading.Timer(5.0, lambda: restart(made, VICTIM)).start()

    told = Messages(KILLED, again)
    found = compare(made, folder / "killed", told, timeout=TIMEOUT)
    return (
        f"{VICTIM} killed in message {KILLED} and started again: {said(found)}; {len(told.warnings)} warnings of nodes"
    )


def silent(made: Federation, folder: Path) -> str:
    told = Messages()
    found = compare(made, folder / "silent", told, timeout=TIMEOUT, fault="silent")
    return f"{VICTIM} never answers after its fourth message: {said(found)}; {len(told.warnings)} warnings of nodes"


def slow(made: Federation, folder: Path) -> str:
    found = compare(made, folder / "slow", Messages(), timeout=TIMEOUT, fault="sleep", sleep="0,10,0")
    return f"{VICTIM} sleeps 10 s before it trains: {said(found)}"


def server_killed(made: Federation, folder: Path) -> str:
    whole = compare(made, folder / "whole", Messages())
    told = Messages(KILLED, lambda: kill(process_of(made, "superlink")))
    try:
        compare(made, folder / "resumed", told)
    except CoterieError:
        made = restart(made, "superlink")
        made.await_nodes(300.0)
    found = compare(made, folder / "resumed", Messages())
    same = "bit-equal" if numbers(found) == numbers(whole) else "DIFFERENT"
    return f"SuperLink killed at message {told.sent}, comparison continued: {said(found)}; {same}"


def other_columns(made: Federation, folder: Path) -> str:
    (path,) = (made.folder / "nodes" / VICTIM.removeprefix("node-")).rglob("*.parquet")
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([{"x1": "pulse"}.get(name, name) for name in table.column_names]), path)
    told = Messages()
    found = compare(made, folder / "columns", told)
    named = [text for text in (*told.warnings, *found["found"]["answer"]["doubts"]) if VICTIM in text]
    return f"{VICTIM} has a column 'pulse' in place of 'x1': {said(found)}; {named[0] if named else 'NOT NAMED'}"


FAULTS = {run.__name__: run for run in (node_killed, silent, slow, server_killed, other_columns)}


def said(result: dict[str, Any]) -> str:
    found = result["found"]
    return f"{found['chosen']} is chosen, absent: {', '.join(found['absent']) or 'nobody'}"


def numbers(result: dict[str, Any]) -> str:
    """All that was found, whenever and by however many messages."""
    found = {key: result["found"][key] for key in ("chosen", "rows", "answer", "absent")}
    return json.dumps(found, sort_keys=True)


def main() -> None:
    for name in sys.argv[1:] or FAULTS:
        with federation(nodes=3, clients=12) as (made, folder):
            print(f"{name}: {FAULTS[name](made, folder)}", flush=True)


if __name__ == "__main__":
    main()
