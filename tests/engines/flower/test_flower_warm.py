# SPDX-License-Identifier: Apache-2.0
"""The process that a node keeps: the same answers as a new one, for its owner only, and never longer than the SuperNode."""

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity

import coterie.engines.flower.catalogue  # noqa: F401
from coterie.algorithms.ifca import ifca
from coterie.algorithms.starts import Start
from coterie.data.remote import Part
from coterie.engines.flower import frames, warm_node
from coterie.engines.flower.client_app import ask
from coterie.engines.flower.messages import Batch, Hello, Introduction, Question, Refusal, Reply, State
from coterie.engines.flower.node_config import idle_seconds, state_folder
from coterie.engines.flower.warm import serve
from coterie.engines.flower.warm_node import NotWarmError, WarmNode, await_end
from coterie.engines.flower.wire import fingerprint, from_records, to_records
from coterie.errors import ConfigError, RunError
from coterie.models import linear_regression
from coterie.protocol import Ask

HEAVY = ("torch", "pyarrow", "scipy", "sklearn", "safetensors", "coterie.protocol", "coterie.config", "coterie.data")
LINE = linear_regression(2)
needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are looked for in /proc")


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, whose names must be shorter than `tmp_path`; what was started is ended."""
    with tempfile.TemporaryDirectory(prefix="warm-") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)
        for folder in Path(place).glob("coterie-*/*"):
            end(WarmNode(folder, "", 1.0))


def end(node: WarmNode) -> None:
    """Greet a process as another one, so that it ends, and wait for that."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(node.socket)
            frames.send(connection, frames.GREETING + b"somebody else")
            assert frames.receive(connection, frames.SMALL) == frames.ANOTHER
            assert connection.recv(1) == b""
        except OSError:
            return


def rows_of(path: Path, sign: float = 1.0) -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(2, 40))
    site = np.repeat(["s0", "s1", "s2", "s3"], 10)
    pq.write_table(pa.table({"site": site, "a": a, "b": b, "y": a + sign * b}), path)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A node with the rows of four clients."""
    rows_of(tmp_path / "rows.parquet")
    config: dict[str, Any] = {"name": "here", "data": str(tmp_path / "rows.parquet"), "client": "site", "target": "y"}
    return Context(1, 5, {**config, "state": str(tmp_path / "state")}, RecordDict(), {})


def node_of(context: Context, idle: float = 60.0) -> WarmNode:
    return WarmNode.of(context.node_config, state_folder(context), idle)


def said(value: Any) -> Message:
    """A message as it comes from the server."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    message = Message(to_records(value), 5, "train.coterie")
    message.metadata.__dict__["_message_id"] = "1"
    return message


def question(number: int, accepted: int) -> Question:
    """What IFCA asks in its first round; clients keep their labels."""
    start = Start("warm", theta=LINE.initial(2, torch.Generator().manual_seed(3)))
    program = ifca(None, model=LINE, n_clusters=2, rounds=3, step_size=0.05, seed=0, start=start)
    asked = next(step for step in program if isinstance(step, Ask))
    state = State("fit", accepted, "fit", number, 0)
    return Question("run", Part("train"), (), None, torch.arange(4), {0: asked}, state)


def in_bytes(message: Message) -> bytes:
    return bytes(recorddict_to_proto(message.content).SerializeToString(deterministic=True))


def process_of(node: WarmNode) -> int:
    """The number of the process that listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.socket)
        frames.send(connection, frames.GREETING + node.identity.encode())
        assert frames.receive(connection, frames.SMALL) == frames.READY
    held = (int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if node.identity in _words(p))
    return next(held)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split("\0")
    except OSError:
        return []


# -- what is answered -------------------------------------------------------------------------------------------------
@needs_proc
def test_answers_are_those_of_a_new_process(context: Context, tmp_path: Path) -> None:
    cold = Context(1, 5, {**context.node_config, "state": str(tmp_path / "cold"), "warm": False}, RecordDict(), {})
    asked = [
        said(Hello("run")),
        said(Batch((question(1, 0),))),
        said(Batch((question(2, 1),))),
        said(Batch((question(3, 9),))),
        said(Refusal("node", "is no request")),
    ]
    got, expected = ([ask(message, where) for message in asked] for where in (context, cold))
    own = {
        "steps": (),
        "fingerprint": "",
        "public": "",
        "proof": "",
    }  # tests register steps here, and keys are two folders'
    met = [replace(from_records(one[0].content), **own) for one in (got, expected)]
    assert fingerprint(met[0]) == fingerprint(met[1])
    assert [in_bytes(one) for one in got[1:]] == [in_bytes(one) for one in expected[1:]]
    kinds = [type(from_records(one.content)) for one in got]
    assert kinds == [Introduction, Reply, Reply, Reply, Refusal]
    assert from_records(got[3].content).answers[0].lost  # there is no ninth answer to go on from
    kept = {path.name: path.read_bytes() for path in (tmp_path / "state" / "here" / "run" / "fit").iterdir()}
    assert kept == {path.name: path.read_bytes() for path in (tmp_path / "cold" / "here" / "run" / "fit").iterdir()}

    first = process_of(node_of(context))
    os.kill(first, signal.SIGKILL)
    again = ask(said(Batch((question(4, 3),))), context)  # by another process, from the file
    assert in_bytes(again) == in_bytes(ask(said(Batch((question(4, 3),))), cold))
    assert process_of(node_of(context)) != first


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_files_that_have_changed_are_read_by_another_process(kind: str, context: Context, tmp_path: Path) -> None:
    if kind == "a folder":
        context.node_config["data"] = str(tmp_path)
    before = node_of(context)
    assert node_of(context) == before
    rows_of(tmp_path / "rows.parquet", sign=-1.0)
    assert node_of(context).identity != before.identity
    assert node_of(context).folder == before.folder  # so that the old one is found, and ends


def test_what_flower_starts_imports_nothing_heavy(context: Context, tmp_path: Path) -> None:
    code = f"""
import sys
from flwr.app import Context, RecordDict
import coterie.engines.flower.client_app
from coterie.engines.flower import handover, warm_node
from coterie.engines.flower.node_config import state_folder
context = Context(1, 5, {context.node_config!r}, RecordDict(), {{}})
node = warm_node.WarmNode.of(context.node_config, state_folder(context), 60.0)
try:
    node.ask(b"no context", b"no message")
except RuntimeError as error:
    print(error)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    found = tmp_path / "found"  # not a pipe, which the process that is kept would hold open
    with found.open("w") as out:
        here = {**os.environ, "TMPDIR": tempfile.gettempdir()}
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.DEVNULL, check=True, env=here)
    failed, heavy = found.read_text().splitlines()
    assert failed.startswith("JSONDecodeError: ")  # what went wrong in the process is told
    assert heavy == "[]"


@pytest.mark.parametrize("how", ["configuration", "environment"])
def test_it_can_be_switched_off(how: str, context: Context, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("COTERIE_WARM", "0")
    else:
        context.node_config["warm"] = False
    assert isinstance(from_records(ask(said(Hello("run")), context).content), Introduction)
    assert not list(short.iterdir())


def test_a_node_that_cannot_keep_a_process_answers_all_the_same(context: Context, short: Path) -> None:
    (short / f"coterie-{os.geteuid()}").mkdir(mode=0o755)  # others may enter
    with pytest.raises(NotWarmError, match="others may enter"):
        node_of(context).ask(b"", b"")
    assert isinstance(from_records(ask(said(Hello("run")), context).content), Introduction)


@pytest.mark.parametrize("seconds", [0, -1.0, True, "ten", float("inf"), float("nan")])
def test_a_time_to_wait_that_makes_no_sense_is_refused(seconds: Any, context: Context) -> None:
    assert idle_seconds(context) == 600.0
    context.node_config["warm-seconds"] = seconds
    with pytest.raises(ConfigError, match="warm-seconds is"):
        ask(said(Hello("run")), context)


# -- one process, for its owner, no longer than the SuperNode ---------------------------------------------------------
def broken(node: WarmNode) -> None:
    """Send what no process can make sense of: it is started for that, and says so, without reading any rows."""
    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        node.ask(b"no context", b"no message")


def test_only_the_owner_may_enter(context: Context) -> None:
    node = node_of(context)
    broken(node)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (node.folder.parent, node.folder, Path(node.socket))]
    assert modes == [0o700, 0o700, 0o600]
    assert stat.S_IMODE((node.folder / "lock").stat().st_mode) == 0o600


@needs_proc
def test_messages_at_once_are_answered_by_one_process(context: Context) -> None:
    node = node_of(context)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(broken, [node] * 4))
    assert sum(node.identity in _words(path) for path in Path("/proc").glob("[0-9]*/cmdline")) == 1


@needs_proc
def test_another_version_is_answered_by_another_process(context: Context) -> None:
    old, new = node_of(context), WarmNode(node_of(context).folder, "of another version", 60.0)
    broken(old)
    broken(new)
    assert process_of(new)
    assert not any(old.identity in _words(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def test_it_ends_with_the_process_that_starts_messages(context: Context, short: Path) -> None:
    child = f"""
from pathlib import Path
from coterie.engines.flower.warm_node import WarmNode
node = WarmNode.of({{}}, Path({str(state_folder(context))!r}), 600.0)
try:
    node.ask(b"no context", b"no message")
except RuntimeError:
    print(node.folder, flush=True)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True); sys.stdin.read()"
    here = {**os.environ, "TMPDIR": str(short)}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=here,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        folder = Path(started.stdout.readline().strip())
        assert warm_node._locked(folder) is None  # it lives
        started.kill()
    await_end(state_folder(context), patience=60.0)
    assert not folder.exists()


# -- the loop, without a process --------------------------------------------------------------------------------------
@pytest.fixture
def listening(short: Path) -> Iterator[Callable[..., tuple[WarmNode, Thread]]]:
    """Serve in a thread, by a function in place of torch and rows."""
    threads = []

    def begin(answer: Callable[[bytes, bytes], bytes], idle: float = 60.0) -> tuple[WarmNode, Thread]:
        folder = short / f"coterie-{os.geteuid()}" / "loop"
        folder.mkdir(mode=0o700, parents=True)
        folder.parent.chmod(0o700)
        node = WarmNode(folder, "me", idle)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(node.socket)
        listener.listen()

        def run() -> None:
            with listener, suppress(SystemExit):
                serve(listener, "me", idle, answer)

        threads.append(Thread(target=run))
        threads[-1].start()
        return node, threads[-1]

    yield begin
    for folder in short.glob("coterie-*/*"):
        end(WarmNode(folder, "", 1.0))
    for thread in threads:
        thread.join()


def test_it_ends_when_nothing_comes(listening: Any) -> None:
    _, thread = listening(lambda context, message: message, idle=0.01)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "stranger",
    [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!Q", 1 << 62), struct.pack("!Q", 5) + b"hello", os.urandom(64)],
    ids=["nothing", "another protocol", "a frame without end", "no greeting", "noise"],
)
def test_strangers_bytes_are_refused_and_it_goes_on(stranger: bytes, listening: Any) -> None:
    node, _ = listening(lambda context, message: context + message)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.socket)
        connection.sendall(stranger)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # it has not read all
            assert connection.recv(1) == b""
    assert node.ask(b"still ", b"there") == b"still there"


def test_another_users_connection_is_refused(listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node, _ = listening(lambda context, message: message)
    monkeypatch.setattr(frames.os, "geteuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.socket)
        assert not frames.own(connection)
        assert connection.recv(1) == b""
    monkeypatch.undo()


def crashes(context: bytes, message: bytes) -> bytes:
    """End the loop in the middle of a request, as the end of its process would."""
    sys.exit()


@needs_proc
def test_a_request_that_a_process_ends_over_is_put_to_another(listening: Any) -> None:
    node, thread = listening(crashes)
    broken(node)  # which a real process says
    thread.join(60)
    assert process_of(node) > 0


def test_a_request_is_not_put_to_a_third_process(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = []

    @contextmanager
    def gone(node: WarmNode) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        theirs.close()
        handed.append(node)
        with ours:
            yield ours

    monkeypatch.setattr(warm_node, "_connected", gone)
    with pytest.raises(RunError, match="ended twice"):
        node_of(context).ask(b"context", b"message")
    assert len(handed) == 2


def test_frames_arrive_whole() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [b"", b"x", os.urandom(3 << 20)]
        sender = Thread(target=frames.send, args=(ours, *sent))
        sender.start()
        assert [frames.receive(theirs, 4 << 20) for _ in sent] == sent
        sender.join()
        frames.send(ours, b"four")
        with pytest.raises(frames.FrameError, match="4 bytes where at most 3"):
            frames.receive(theirs, 3)
