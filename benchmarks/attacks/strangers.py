# SPDX-License-Identifier: Apache-2.0
"""Somebody with nothing but the CA file tries to get into a federation of `coterie flower up --tls`: real processes.

The federation is started by the first attack and stopped at the end.
"""

import atexit
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from benchmarks.attacks import AttackSucceededError
from coterie.engines.flower.certificates import make_node_key
from coterie.engines.flower.federation import _TAKEN, Federation, down, up
from coterie.engines.flower.processes import Process, alive, free_port, kill, start, stop
from coterie.engines.flower.superlink import Connection, environment, tool
from coterie.errors import RunError

__all__ = ["ATTACKS"]

_WAIT = 90.0  # seconds in which a foreign app would have read the rows

_FOREIGN = """\
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

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
        status = connection.document("list", connection.name, "--run-id", run)["runs"][0]["status"]
        if status.startswith("finished"):
            return connection.flwr("log", run, connection.name, "--show")
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
    command += ["--port", str(free_port()), "--auth-supernode-private-key", str(private)]
    node = start("node", command, log=home / "log", environment=environment(home), folder=home)
    try:
        deadline = time.monotonic() + _WAIT
        while time.monotonic() < deadline and alive(node):
            if _TAKEN in node.said():
                raise AttackSucceededError("a node without a registered key is in")
            time.sleep(0.5)
    finally:
        kill(node)
    return next(line.strip() for line in node.said().splitlines() if line.startswith("[code"))


def others_runs() -> str:
    """List what others run."""
    _, connection = stranger()
    try:
        found = connection.document("list", connection.name)
    except RunError as error:
        return error.message
    raise AttackSucceededError(f"{len(found['runs'])} runs are listed")


def task_of_a_server() -> str:
    """Fetch the task of a ServerApp, as the process beside the SuperLink does that runs them: then speak to nodes as it."""
    home, connection = stranger()
    client = RuntimeHttpClient.from_server_address(
        server_address=str(connection.address), insecure=False, root_certificates=(home / "ca.pem").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
    )  # fmt: skip
    try:
        client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
    except Exception as error:  # Flower's own kinds of refusals
        return str(error)
    finally:
        client.close()
    raise AttackSucceededError("tasks are handed out to whoever asks")


def unsigned_app() -> str:
    """Overhear a submitter's word, and run an app with it that the submitter has not signed."""
    _, made = federation()
    home, connection = stranger()
    made.connection.sign_in()
    if (made.connection.home / "credentials.yaml").exists():  # type: ignore[operator]
        shutil.copy(made.connection.home / "credentials.yaml", home)  # type: ignore[operator]
    try:
        run = str(connection.document("run", str(write_app(home / "app")), connection.name)["run-id"])
    except RunError as error:
        return error.message
    return stolen(said_by(connection, run))


def careless_superlink() -> str:
    """Be the SuperLink, with its certificate, and let everything pass: the node has to refuse by itself."""
    place, made = federation()
    home, keys, port = Path(tempfile.mkdtemp(dir=place)), made.folder / "tls", free_port()
    command = [tool("flower-superlink"), "--ssl-ca-certfile", str(keys / "ca.pem"), "--enable-supernode-auth"]
    command += ["--ssl-certfile", str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key")]
    command += ["--port", str(port), "--disable-runtime-dependency-installation"]
    connection = Connection("victim", home, f"127.0.0.1:{port}", str(keys / "ca.pem"))
    connection.write()
    around = environment(home)
    running = [start("link", command, log=home / "link.log", environment=around, folder=home)]
    try:
        await_said(running[0], "Uvicorn running")
        private, public = make_node_key(home, "node")
        connection.flwr("supernode", "register", str(public), connection.name)
        command = made.commands["node-0"]
        for option, value in (("--superlink", f"127.0.0.1:{port}"), ("--auth-supernode-private-key", str(private)),
                              ("--port", str(free_port()))):  # fmt: skip
            at = command.index(option) + 1
            command = [*command[:at], value, *command[at + 1 :]]
        running.append(start("node", command, log=home / "node.log", environment=around, folder=home))
        await_said(running[1], _TAKEN)
        run = str(connection.document("run", str(write_app(home / "app")), connection.name)["run-id"])
        return stolen(said_by(connection, run))
    finally:
        stop(running)


def await_said(process: Process, words: str) -> None:
    """Wait until a process says so."""
    deadline = time.monotonic() + _WAIT
    while words not in process.said():
        if time.monotonic() > deadline or not alive(process):
            raise RuntimeError(process.said()[-500:])
        time.sleep(0.2)


ATTACKS: dict[str, Callable[[], str]] = {
    "foreign-app": foreign_app,
    "foreign-node": foreign_node,
    "unregistered-node": unregistered_node,
    "others-runs": others_runs,
    "task-of-a-server": task_of_a_server,
    "unsigned-app": unsigned_app,
    "careless-superlink": careless_superlink,
}
