# SPDX-License-Identifier: Apache-2.0
"""On a real SuperLink with four SuperNodes, over TLS and with nodes that prove who they are: the same as in process."""

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from coterie.engines.flower import warm_node
from coterie.engines.flower.certificates import make_node_key
from coterie.engines.flower.federation import Federation, down, find, process_of, restart, up
from coterie.engines.flower.processes import free_port, kill
from coterie.engines.flower.submission import write_app
from coterie.engines.flower.submitters import make_key
from coterie.engines.flower.superlink import Connection
from coterie.engines.flower.warm_node import await_end
from coterie.errors import RunError

NODES = 4
COMMON = (  # every message costs seconds: a node starts a process for it
    "--rounds", 2, "--no-baselines", "--test-size", 0, "--set", "data.standardise=false", "--seed", 3,
)  # fmt: skip
METHODS = {
    "ifca": ("--clusters", 2, "--set", "clusters.init=random", "--set", "training.step_size=0.05"),
    "fedrep": ("--hidden", 4, "--set", "training.step_size=0.05", "--set", "training.batch_size=8"),
}
TOLERANCE = {"ifca": 1e-10, "fedrep": 1e-6}  # float64, and a network in float32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows of eight clients in two planted groups."""
    folder = tmp_path_factory.mktemp("deployed")
    draw = np.random.default_rng(0)
    site = np.repeat([f"s{i}" for i in range(8)], 20)
    a, b = draw.normal(size=(2, len(site)))
    sign = np.repeat([1.0 if i % 2 else -1.0 for i in range(8)], 20)
    y = a + sign * b + 0.1 * draw.normal(size=len(site))
    pq.write_table(pa.table({"site": site, "a": a, "b": b, "y": y}), folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def made(place: Path) -> Iterator[Federation]:
    """Four nodes with two clients each."""
    try:
        free_port()
    except OSError as error:
        pytest.skip(f"no port can be opened here: {error}")
    rows = place / "rows.parquet"
    try:
        yield up(nodes=NODES, data=rows, client="site", target="y", folder=place / "fed", tls=True, patience=600)
    finally:
        down(place / "fed")


def fitted(place: Path, method: str, *words: object) -> Path:
    """Fit with a command of its own process."""
    out = place / f"{words[0]}-{method}"
    command = [*words, "--method", method, *METHODS[method], *COMMON, "--out", out, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *map(str, command)], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == method
    return out


def state_of(place: Path, name: str) -> Path:
    return place / "fed" / "nodes" / name.removeprefix("node-") / "state" / name


def keeps_a_process(place: Path, name: str) -> bool:
    """Whether a process listens for the node's messages."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(warm_node._folder(state_of(place, name)) / "socket")) == 0


@pytest.mark.parametrize("method", ["ifca", pytest.param("fedrep", marks=pytest.mark.study)])
def test_real_nodes_agree_with_one_process(method: str, made: Federation, place: Path) -> None:
    there = fitted(place, method, "flower", "run", "--folder", "fed")
    assert [name for name in made.nodes if keeps_a_process(place, name)] == list(made.nodes)
    here = fitted(place, method, "fit", "rows.parquet", "--client", "site", "--target", "y")
    remote, local = (load_file(run / "models" / "models.safetensors") for run in (there, here))
    assert remote.keys() == local.keys()
    for name, value in local.items():
        torch.testing.assert_close(remote[name], value, atol=TOLERANCE[method], rtol=TOLERANCE[method])
    remote_clients, local_clients = (pq.read_table(run / "clients.parquet").to_pydict() for run in (there, here))
    assert "train_loss" in local_clients  # of FedRep, with heads that never left their nodes
    for name, values in local_clients.items():
        close = pytest.approx(values, rel=1e-5, abs=1e-6) if isinstance(values[0], float) else values
        assert remote_clients[name] == close, name
    assert (there / "report.html").is_file()


def test_somebody_with_the_ca_file_alone_runs_no_app_and_registers_no_node(made: Federation, tmp_path: Path) -> None:
    stranger = Connection("coterie", tmp_path, made.address, made.root_certificates)
    stranger.write()
    app = write_app(tmp_path / "app", {"task": "fit"})
    _, public = make_node_key(tmp_path, "mine")
    for words in (("run", str(app)), ("supernode", "register", str(public)), ("list",)):
        with pytest.raises(RunError, match="uthenticat"):
            stranger.flwr(*words, "coterie")
    make_key(tmp_path / "key")
    with pytest.raises(RunError, match="uthenticat"):
        replace(stranger, key=str(tmp_path / "key")).start(app)  # a key that nobody trusts


def test_the_owner_of_a_trusted_key_runs_no_app_that_is_not_signed(made: Federation, tmp_path: Path) -> None:
    app = write_app(tmp_path / "app", {"task": "fit"})
    runs = len(made.connection.document("list", "coterie")["runs"])
    with pytest.raises(RunError):
        made.connection.flwr("run", str(app), "coterie")
    assert len(made.connection.document("list", "coterie")["runs"]) == runs


def test_nobody_else_may_read_the_shares_keys_and_messages(made: Federation) -> None:
    private = [made.folder / name for name in ("home", "logs", "nodes", "tls", "link.db")]
    assert [path.name for path in private if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_a_node_that_was_killed_is_there_again(made: Federation, place: Path) -> None:
    kill(process_of(made, "node-2"))
    assert not find(place / "fed").running()["node-2"]
    await_end(state_of(place, "node-2"), patience=60)
    assert not keeps_a_process(place, "node-2")  # it ends with its SuperNode, even if that is killed
    again = restart(made, "node-2")
    again.await_nodes(600)  # ends as soon as all are there, or one has died
    present = process_of(again, "node-2")
    assert present.log_begins > 0  # what follows is not the word of the node that was killed
    assert "SuperNode ID: " in present.said()
    assert all(find(place / "fed").running().values())
