# SPDX-License-Identifier: Apache-2.0
"""A federation on loopback: processes are known again and stopped, clients are dealt, and nothing is left behind.

Processes are real; in place of Flower's commands, here stands a program that listens on a port.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from coterie.data.readers import read
from coterie.engines.flower import federation, processes
from coterie.engines.flower.processes import Process, alive, free_port, kill, run_table, start, stop
from coterie.engines.flower.shares import deal
from coterie.engines.flower.superlink import Connection, environment
from coterie.errors import ConfigError, DataError, RunError

LISTENER = """\
import signal, socket, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with socket.create_server(("127.0.0.1", port)):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"running on http://127.0.0.1:{port}", flush=True)
    print("SuperNode ID: 7", flush=True)
    time.sleep(600)
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
]


def begin(command: list[str], folder: Path, name: str = "one") -> Process:
    return start(name, command, log=folder / f"{name}.log", environment=os.environ, folder=folder)


def eventually(condition: object, seconds: float = 300.0) -> bool:
    """Wait for what should happen; so long only where it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


# -- processes --------------------------------------------------------------------------------------------------------
def test_a_process_is_known_again_until_it_ends(tmp_path: Path) -> None:
    process = begin(SLEEP, tmp_path)
    assert alive(process)
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(process))


def test_stop_never_touches_a_process_that_was_given_the_same_number(tmp_path: Path) -> None:
    process = begin(SLEEP, tmp_path)
    former = replace(process, born="before the last start of the machine")
    assert not alive(former)
    assert stop([former]) == []
    assert alive(process)
    assert stop([process]) == ["one"]
    assert not alive(process)


def test_stop_ends_what_a_process_has_started(tmp_path: Path) -> None:
    inner = f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(600)"
    process = begin([sys.executable, "-c", inner], tmp_path)
    assert eventually(lambda: len(processes._family(process.pid, run_table())) == 2)
    family = processes._family(process.pid, run_table())
    stop([process])
    assert not set(family) & set(run_table())


def test_stop_uses_force_after_its_patience(tmp_path: Path) -> None:
    process = begin(STUBBORN, tmp_path)
    assert eventually(lambda: "deaf" in process.said())
    assert stop([process], patience=0.3) == ["one"]
    assert not alive(process)


def test_what_ps_says_is_understood() -> None:
    text = "    1     0 Ss   Mon Nov 16 05:00:00 2026\n   77     1 Z+   Mon Nov 16 05:00:01 2026\n"
    assert processes._from_ps(text) == {1: processes.Running(0, "Mon Nov 16 05:00:00 2026")}


def test_free_ports_differ_and_are_free() -> None:
    one = free_port()
    two = free_port([one])
    assert one != two
    with socket.create_server(("127.0.0.1", two)):
        assert free_port() != two


# -- shares -----------------------------------------------------------------------------------------------------------
def table(n: int = 60, clients: int = 7) -> pa.Table:
    draw = np.random.default_rng(0)
    sites = [f"s{i % clients}" for i in range(n)]
    return pa.table(
        {"site": sites, "x": draw.normal(size=n), "level": [["a", "b"][i % 2] for i in range(n)], "y": range(n)}
    )


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz"])
def test_every_client_is_dealt_whole_to_one_node(kind: str, tmp_path: Path) -> None:
    data = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table(), data)
    else:
        with pa.output_stream(data) as out:  # compressed by its ending
            pa.csv.write_csv(table(), out)
    shares = deal(data, "site", [tmp_path / str(i) for i in range(3)])
    assert [share.clients for share in shares] == [("s0", "s3", "s6"), ("s1", "s4"), ("s2", "s5")]
    whole = read(data, client="site", target="y", test_size=0)
    for share in shares:
        part = read(share.folder, client=share.client, target="y", test_size=0)
        assert part.schema == whole.schema
        assert tuple(part.names) == share.clients
        for place, name in enumerate(part.names):
            there = int(np.flatnonzero(whole.names == name)[0])
            (here,) = part.train.blocks(torch.tensor([place]))
            (all_,) = whole.train.blocks(torch.tensor([there]))
            assert here.x.equal(all_.x)  # its rows, in their order
            assert here.target.equal(all_.target)


def test_a_folder_with_a_file_for_every_client_is_dealt_by_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(5):
        pq.write_table(table(4).drop_columns(["site"]), tmp_path / "data" / f"hospital-{i}.parquet")
    shares = deal(tmp_path / "data", None, [tmp_path / "0", tmp_path / "1"])
    files = [sorted(path.name for path in share.folder.iterdir()) for share in shares]
    assert files == [
        ["hospital-0.parquet", "hospital-2.parquet", "hospital-4.parquet"],
        ["hospital-1.parquet", "hospital-3.parquet"],
    ]
    assert tuple(read(shares[1].folder, target="y").names) == shares[1].clients == ("hospital-1", "hospital-3")


def test_more_nodes_than_clients_are_refused(tmp_path: Path) -> None:
    pq.write_table(table(clients=2), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="has 2 clients, and 3 nodes need one each"):
        deal(tmp_path / "rows.parquet", "site", [tmp_path / str(i) for i in range(3)])
    with pytest.raises(DataError, match="no column 'hospital'"):
        deal(tmp_path / "rows.parquet", "hospital", [tmp_path / "0"])


# -- federations ------------------------------------------------------------------------------------------------------
@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for Flower's commands: programs that listen; every node is online at once."""
    for name in ("flower-superlink", "flower-supernode"):
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\n{LISTENER}")
        script.chmod(0o755)
    monkeypatch.setattr(federation, "tool", lambda name: str(tmp_path / name))
    monkeypatch.setattr(federation, "quick_supernode", lambda: [str(tmp_path / "flower-supernode"), "--quick"])
    monkeypatch.setattr(Connection, "nodes_online", lambda self: 2)
    pq.write_table(table(), tmp_path / "rows.parquet")
    return tmp_path


def up(fake: Path, **how: Any) -> federation.Federation:
    return federation.up(nodes=2, data=fake / "rows.parquet", client="site", target="y", folder=fake / "fed", **how)


def test_nodes_keep_a_process_unless_told_otherwise(fake: Path) -> None:
    for warm in (True, False):
        try:
            told = up(fake, warm=warm).commands["node-1"]
        finally:
            federation.down(fake / "fed")
        assert f"warm={str(warm).lower()} " in told[told.index("--node-config") + 1]
        assert ("--quick" in told) is warm


def test_up_starts_and_down_stops_everything(fake: Path) -> None:
    made = up(fake)
    try:
        assert made.running() == {"superlink": True, "node-0": True, "node-1": True}
        assert federation.find(fake / "fed") == made
        for name in made.nodes:
            told = made.commands[name][made.commands[name].index("--node-config") + 1]
            assert f'name="{name}"' in told
            assert 'client="site" ' in told
        pids = {pid for process in made.processes for pid in processes._family(process.pid, run_table())}
        assert len(pids) == 6  # each with a child
        with pytest.raises(ConfigError, match=r"a federation is running from .*: 3 of 3 processes"):
            up(fake)
        assert made.running() == {"superlink": True, "node-0": True, "node-1": True}  # it was not touched
    finally:
        assert federation.down(fake / "fed") == ["superlink", "node-0", "node-1"]
    assert not pids & set(run_table())
    assert federation.down(fake / "fed") == []
    assert not list((fake / "fed").glob("nodes/*/data"))  # no copies of rows are left
    with pytest.raises(RunError, match="no federation was started"):
        federation.find(fake / "fed")


def test_folders_of_somebody_else_are_left_alone(fake: Path) -> None:
    mine = [fake / "fed" / name for name in ("home/thesis.txt", "tls/key.pem", "nodes/1/data/rows.csv", "link.db")]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    with pytest.raises(ConfigError, match="holds something else than a federation"):
        up(fake)
    assert federation.down(fake / "fed") == []
    assert all(path.read_text() == "mine" for path in mine)


def test_down_after_a_crash_stops_the_rest_and_up_works_again(fake: Path) -> None:
    made = up(fake)
    kill(made.processes[1])
    assert made.running() == {"superlink": True, "node-0": False, "node-1": True}
    assert federation.down(fake / "fed") == ["superlink", "node-1"]
    try:
        assert all(up(fake).running().values())
    finally:
        federation.down(fake / "fed")


def test_a_killed_node_is_started_again_as_it_was(fake: Path) -> None:
    made = up(fake)
    try:
        kill(made.processes[1])
        again = federation.restart(made, "node-0")
        assert all(again.running().values())
        assert again.commands == made.commands
        assert federation.find(fake / "fed").running() == again.running()
    finally:
        federation.down(fake / "fed")


def test_a_node_that_is_refused_is_not_taken_for_the_one_that_was_killed(fake: Path) -> None:
    made = up(fake)
    try:
        kill(made.processes[1])
        (fake / "flower-supernode").write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
        again = federation.restart(made, "node-0")
        with pytest.raises(RunError, match="node-0 could not be started"):  # though the SuperLink misses nobody yet
            again.await_nodes(300)
    finally:
        federation.down(fake / "fed")


def test_a_port_that_is_taken_is_exchanged_for_another(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        taken = squatter.getsockname()[1]
        ports = iter([taken])
        monkeypatch.setattr(federation, "free_port", lambda avoid=(): next(ports, None) or free_port(avoid))
        made = up(fake)
        try:
            assert all(made.running().values())
            assert made.address != f"127.0.0.1:{taken}"
        finally:
            federation.down(fake / "fed")


def test_nothing_is_left_when_up_fails(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Process] = []

    def spied(*words: object, **more: object) -> Process:
        begun.append(start(*words, **more))  # type: ignore[arg-type]
        return begun[-1]

    monkeypatch.setattr(federation, "start", spied)
    monkeypatch.setattr(Connection, "nodes_online", lambda self: 1)
    with pytest.raises(RunError, match="after 1 seconds 1 of 2 nodes are online"):
        federation.up(nodes=2, data=fake / "rows.parquet", client="site", folder=fake / "fed", patience=1.0)
    assert len(begun) == 3
    assert not any(alive(process) for process in begun)
    assert not (fake / "fed" / "federation.json").exists()
    (fake / "flower-supernode").write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    with pytest.raises(RunError, match="node-0 could not be started"):
        up(fake)
    assert not any(alive(process) for process in begun)


def test_telemetry_is_off_unless_the_user_has_turned_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED", raising=False)
    made = environment(tmp_path)
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert made["FLWR_HOME"] == str(tmp_path)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert environment(tmp_path)["FLWR_TELEMETRY_ENABLED"] == "1"


def test_certificates_are_signed_by_their_authority(tmp_path: Path) -> None:
    certificates = pytest.importorskip("coterie.engines.flower.certificates", exc_type=ImportError)
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    authority, certificate, key = certificates.make_certificates(tmp_path)
    root, server = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (authority, certificate))
    server.verify_directly_issued_by(root)
    private, public = certificates.make_node_key(tmp_path, "node-0")
    assert load_ssh_public_key(public.read_bytes()).curve.name == "secp384r1"
    assert {path.stat().st_mode & 0o777 for path in (key, private)} == {0o600}


def test_a_command_that_fails_is_one_sentence(tmp_path: Path) -> None:
    if subprocess.run([sys.executable, "-c", "import flwr"], check=False, capture_output=True).returncode:
        pytest.skip("Flower is not installed")
    nobody = Connection("coterie", tmp_path, f"127.0.0.1:{free_port()}", insecure=True)
    nobody.write()
    with pytest.raises(RunError, match=r"the SuperLink at 127\.0\.0\.1:\d+ cannot be asked: ") as told:
        nobody.nodes_online()
    assert "\n" not in told.value.message
    boxed = "Using it\n╭─ Error ─────╮\n│ Nothing is  │\n│ there.      │\n╰─────────────╯\n"
    assert nobody._refused(boxed).message.endswith("cannot be asked: Nothing is there.")
