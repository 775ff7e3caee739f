# SPDX-License-Identifier: Apache-2.0
"""Somebody with nothing but the CA file tries to get into a federation of `coterie flower up --tls`: real processes.

The federation is started by the first attack and stopped at the end.
"""

import atexit
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.attacks import AttackSucceededError
from coterie.engines.flower.certificates import make_node_key
from coterie.engines.flower.federation import Federation, down, up
from coterie.engines.flower.processes import free_port
from coterie.engines.flower.superlink import Connection, environment, tool
from coterie.errors import RunError

__all__ = ["ATTACKS"]

_WAIT = 90.0  # seconds in which a foreign app would have read the rows

_FOREIGN = """\
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()

@client.query()
def read(message, context):
    folder = Path(context.node_config["data"])
    rows = "".join(file.read_text() for file in folder.iterdir())
    return Message(RecordDict({"rows": ConfigRecord({"text": rows})}), reply_to=message)

@server.main()
def main(grid, context):
    ids = list(grid.get_node_ids())
    messages = [Message(RecordDict(), node, "query") for node in ids]
    for reply in grid.send_and_receive(messages, timeout=60):
        if reply.has_error():
            print("REFUSED " + reply.error.reason, flush=True)
        else:
            print(f"STOLEN {len(reply.content['rows']['text'].splitlines()) - 1} rows", flush=True)
    print("DONE", flush=True)
"""

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "foreign"
version = "1.0.0"
description = "reads rows"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "foreign.app:server"
clientapp = "foreign.app:client"
[tool.flwr.app.config]
"""


@cache
def federation() -> tuple[Path, Federation]:
    """Two nodes with 20 rows each, over TLS; stopped when this process ends."""
    place = Path(tempfile.mkdtemp(prefix="coterie-attack-"))
    draw = np.random.default_rng(0)
    lines = ["site,a,y", *(f"s{i % 4},{a:.6f},{y:.6f}" for i, (a, y) in enumerate(draw.normal(size=(40, 2))))]
    (place / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def leave() -> None:
        down(place / "federation")
        shutil.rmtree(place, ignore_errors=True)

    atexit.register(leave)
    made = up(nodes=2, data=place / "rows.csv", client="site", target="y", folder=place / "federation", tls=True)
    return place, made


def stranger() -> tuple[Path, Connection]:
    """A folder with a copy of the CA file, and a connection that is made with it alone."""
    place, made = federation()
    home = Path(tempfile.mkdtemp(dir=place))
    assert made.root_certificates is not None
    shutil.copy(made.root_certificates, home / "ca.pem")
    connection = Connection("victim", home, made.address, str(home / "ca.pem"))
    connection.write()
    return home, connection


def write_app(folder: Path) -> Path:
    """An app that reads the files of every node."""
    (folder / "foreign").mkdir(parents=True)
    (folder / "foreign" / "__init__.py").write_text("")
    (folder / "foreign" / "app.py").write_text(_FOREIGN, encoding="utf-8")
    (folder / "pyproject.toml").write_text(_PROJECT, encoding="utf-8")
    return folder


def said_by(connection: Connection, run: str) -> str:
    """What an app on the SuperLink has printed, once it is done."""
    deadline = time.monotonic() + _WAIT
    while time.monotonic() < deadline:
        log = connection.flwr("log", run, connection.name, "--show")
        status = connection.document("list", connection.name, "--run-id", run)["runs"][0]["status"]
        if status.startswith("finished"):
            return log
        time.sleep(1.0)
    return "it did not end in time"


def stolen(log: str) -> str:
    """The refusal in what a foreign app has printed; rows in it are a success."""
    found = [line[line.index("STOLEN") :] for line in log.splitlines() if "STOLEN" in line]
    if found:
        raise AttackSucceededError(f"a foreign app on {len(found)} nodes: {', '.join(found)}")
    refused = [line[line.index("REFUSED") + 8 :] for line in log.splitlines() if "REFUSED" in line]
    if not refused:
        raise RuntimeError(f"the app neither read rows nor was refused: {log[-500:]}")
    return refused[0]


# -- attacks ----------------------------------------------------------------------------------------------------------
def foreign_app() -> str:
    """Run an app of one's own on all nodes."""
    home, connection = stranger()
    try:
        run = str(connection.document("run", str(write_app(home / "app")), connection.name)["run-id"])
    except RunError as error:
        return error.message
    return stolen(said_by(connection, run))


def foreign_node() -> str:
    """Register a node of one's own."""
    home, connection = stranger()
    _, public = make_node_key(home, "mine")
    try:
        connection.flwr("supernode", "register", str(public), connection.name)
    except RunError as error:
        return error.message
    raise AttackSucceededError("a foreign node is registered")


def unregistered_node() -> str:
    """Start a node with a key that nobody has registered, or with none."""
    home, connection = stranger()
    assert connection.address is not None
    private, _ = make_node_key(home, "mine")
    command = [tool("flower-supernode"), "--root-certificates", str(home / "ca.pem"), "--superlink", connection.address]
    command += ["--port", str(free_port()), "--max-retries", "1", "--auth-supernode-private-key", str(private)]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=_WAIT, check=False)
    words = done.stdout + done.stderr
    if "SuperNode ID" in words or done.returncode == 0:
        raise AttackSucceededError("a node without a registered key is in")
    return next(line.strip() for line in words.splitlines() if "401" in line or "denied" in line or "ould not" in line)


def others_runs() -> str:
    """List what others run."""
    _, connection = stranger()
    try:
        found = connection.document("list", connection.name)
    except RunError as error:
        return error.message
    raise AttackSucceededError(f"{len(found['runs'])} runs are listed")


ATTACKS: dict[str, Callable[[], str]] = {
    "foreign-app": foreign_app,
    "foreign-node": foreign_node,
    "unregistered-node": unregistered_node,
    "others-runs": others_runs,
}
