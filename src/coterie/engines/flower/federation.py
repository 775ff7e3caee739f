# SPDX-License-Identifier: Apache-2.0
"""A federation on one machine for trying out: a SuperLink and SuperNodes as real processes that talk over loopback.

All that belongs to it is in one folder: `federation.json` (what was started), `home` and `nodes/I/home` (Flower's files),
`nodes/I/data` (the share of a node), `nodes/I/state` (what its clients keep), `link.db` (what the SuperLink knows), `tls`,
`logs`.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.engines.flower.policy_file import read_policy
from coterie.engines.flower.processes import Process, alive, free_port, run_table, start, stop
from coterie.engines.flower.shares import Share, deal
from coterie.engines.flower.superlink import Connection, environment, guarded_superlink, quick_supernode, tool
from coterie.engines.flower.warm_node import await_end
from coterie.errors import ConfigError, RunError
from coterie.files import owner_only, replace_file

__all__ = ["Federation", "down", "find", "process_of", "restart", "up"]

_LINK = "superlink"
_MARK = f"logs/{_LINK}.log"  # what every federation's folder has, and keeps
_TAKEN = "SuperNode ID: "  # what a node says when the SuperLink has taken it
_PATIENCE = 60.0  # seconds in which a process should listen
_TRIES = 3  # a free port may be taken by somebody else before it is used


@dataclass(frozen=True)
class Federation:
    """What `up` has started.

    Attributes
    ----------
    folder : Path
        Where everything is kept.
    address : str
        Of the SuperLink.
    root_certificates : str or None
        The authority that has signed the SuperLink's certificate; None without TLS.
    data : mapping
        What nodes were dealt: the data set, its client and target columns.
    threads : int
        Of the arithmetic in every process.
    warm : bool
        Whether a node keeps a process from one message to the next.
    key : str or None
        Of the only submitter whose apps nodes run; None without TLS.
    policy : str or None
        The nodes' policy file.
    processes : tuple of Process
        The SuperLink, then the nodes.
    commands : mapping
        How each was started.
    """

    folder: Path
    address: str
    root_certificates: str | None
    data: dict[str, Any]
    threads: int = 1
    warm: bool = True
    key: str | None = None
    policy: str | None = None
    processes: tuple[Process, ...] = ()
    commands: dict[str, list[str]] = field(default_factory=dict)

    @property
    def connection(self) -> Connection:
        """How Flower's commands reach the SuperLink."""
        authority = self.root_certificates
        return Connection("coterie", self.folder / "home", self.address, authority, authority is None, self.key)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(name for name in self.commands if name != _LINK)

    def running(self) -> dict[str, bool]:
        """Which of the processes run."""
        table = run_table()
        return {process.name: alive(process, table) for process in self.processes}

    def await_nodes(self, patience: float) -> None:
        """Wait until all nodes are there."""
        deadline = time.monotonic() + patience
        while (online := self._online()) < len(self.nodes):
            for name, runs in self.running().items():
                if not runs:
                    raise _died(self, name)
            if time.monotonic() > deadline:
                raise RunError(
                    f"after {patience:.0f} seconds {online} of {len(self.nodes)} nodes are online",
                    f"see the logs in {self.folder / 'logs'}",
                )
            time.sleep(0.5)

    def _online(self) -> int:
        """Nodes that are there, by their own word first: the SuperLink misses one that was killed only after a minute.

        None while the SuperLink does not listen yet.
        """
        taken = sum(_TAKEN in process.said() for process in self.processes if process.name != _LINK)
        if taken < len(self.nodes):
            return taken
        try:
            return self.connection.nodes_online()
        except RunError:
            return 0


def up(
    *,
    nodes: int,
    data: str | Path,
    client: str | None = None,
    target: str | None = None,
    folder: Path,
    tls: bool = False,
    warm: bool = True,
    policy: Path | None = None,
    patience: float = 90.0,
) -> Federation:
    """Start a SuperLink and nodes, each with its own share of the clients, and wait until all are there.

    Parameters
    ----------
    nodes : int
        How many.
    data : str or Path
        A Parquet or CSV file, or a folder of such files, whose clients are dealt to the nodes.
    client, target : str, optional
        The columns that name the client, and what to predict.
    folder : Path
        Where to keep everything.
    tls : bool
        Whether to talk over TLS, with nodes that prove who they are and run signed apps only.
    warm : bool
        Whether nodes keep a process from one message to the next.
    policy : Path, optional
        The policy of all nodes: what a server may ask.
    patience : float
        Seconds to wait for the nodes.
    """
    folder = folder.absolute()
    _refuse_second(folder)
    if not _is_ours(folder) and any((folder / name).exists() for name in ("nodes", "home", "tls", "link.db")):
        raise ConfigError(f"{folder} holds something else than a federation", "name a new folder with --folder")
    if nodes < 1:
        raise ConfigError(f"--nodes is {nodes}, and a federation needs at least 1", "--nodes 4 starts four nodes")
    tool("flower-superlink")
    read_policy(policy)
    (folder / _MARK).parent.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    for stale in (*folder.glob("nodes/*/data"), folder / "home", folder / "tls"):
        shutil.rmtree(stale, ignore_errors=True)
    for stale in folder.glob("link.db*"):
        stale.unlink()
    _make_private(folder)
    try:
        shares = deal(data, client, [folder / "nodes" / str(i) / "data" for i in range(nodes)])
        about = {"path": str(Path(data).absolute()), "client": shares[0].client, "target": target}
        authority, key = _keys(folder) if tls else (None, None)
        rules = None if policy is None else str(policy.absolute())
        made = Federation(folder, "", authority, about, max(1, (os.cpu_count() or 1) // nodes), warm, key, rules)
        made = _start_nodes(_start_link(made), shares)
        made.await_nodes(patience)
    except BaseException:  # also Ctrl-C: nothing half-started is left behind
        down(folder)
        raise
    return made


def find(folder: Path) -> Federation:
    """Read what was started."""
    path = folder.absolute() / "federation.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        processes = tuple(Process(**said) for said in document.pop("processes"))
        return Federation(**{**document, "folder": Path(document["folder"]), "processes": processes})
    except FileNotFoundError:
        raise RunError(
            f"no federation was started from {folder}", "start one with `coterie flower up`, or name its --folder"
        ) from None
    except (ValueError, TypeError, KeyError):
        raise RunError(f"{path} cannot be read", "stop the processes that it names by hand, and remove it") from None


def down(folder: Path) -> list[str]:
    """Stop what `up` has started from this folder, and forget it.  -> names of what was running

    The shares are removed. Logs stay, and so does what clients keep: a run may be continued when nodes are up again.
    """
    folder = folder.absolute()
    stopped: list[str] = []
    if (folder / "federation.json").exists():
        made = find(folder)
        stopped = stop(made.processes)
        for name in made.nodes:
            await_end(_state(folder, name) / name)  # what a node keeps ends with it
        (folder / "federation.json").unlink()
    for share in folder.glob("nodes/*/data") if _is_ours(folder) else ():
        shutil.rmtree(share)
    return stopped


def restart(made: Federation, name: str) -> Federation:
    """Start a process again, that has ended or been killed, as it was.

    A node that proves who it is does so with a new key: until heartbeats have been missing for a minute, the SuperLink
    believes that a node which was killed is there, and refuses a second one with its key.
    """
    if name != _LINK and made.root_certificates is not None:
        _register(made, name)
    return _launch(made, name, made.commands[name])


def process_of(made: Federation, name: str) -> Process:
    """One of the processes by its name."""
    return next(process for process in made.processes if process.name == name)


# -- starting ---------------------------------------------------------------------------------------------------------
def _make_private(folder: Path) -> None:
    """Make the folders that rows, private state, messages and keys lie in, for the owner only."""
    with owner_only():
        for name in ("home", "logs", "nodes", "tls"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name).chmod(0o700)
        (folder / "link.db").touch()


def _is_ours(folder: Path) -> bool:
    """Whether `up` has made this folder: in no other is anything removed."""
    return (folder / _MARK).is_file()


def _refuse_second(folder: Path) -> None:
    if not (folder / "federation.json").exists():
        return
    running = find(folder).running()
    if any(running.values()):
        raise ConfigError(
            f"a federation is running from {folder}: {sum(running.values())} of {len(running)} processes",
            "stop it with `coterie flower down`, or name another --folder",
        )


def _keys(folder: Path) -> tuple[str, str]:
    """Make certificates, and a submitter's key that all nodes trust.  -> authority, submitter's key"""
    from coterie.engines.flower.certificates import make_certificates
    from coterie.engines.flower.submitters import make_key, public_line

    authority = make_certificates(folder / "tls")[0]
    make_key(folder / "tls" / "submitter")
    (folder / "tls" / "trusted.yaml").write_text(public_line(folder / "tls" / "submitter") + "\n", encoding="utf-8")
    return str(authority), str(folder / "tls" / "submitter")


def _start_link(made: Federation) -> Federation:
    keys = made.folder / "tls"
    program, security = [tool("flower-superlink")], ["--insecure"]
    if made.root_certificates is not None:
        program = guarded_superlink()
        security = ["--trusted-entities", str(keys / "trusted.yaml"), "--ssl-ca-certfile", made.root_certificates]
        security += ["--ssl-certfile", str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key")]
        security += ["--enable-supernode-auth"]
    for _ in range(_TRIES):
        port = free_port()
        made = replace(made, address=f"127.0.0.1:{port}", processes=(), commands={})
        command = [*program, *security, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--database", str(made.folder / "link.db"), "--disable-runtime-dependency-installation"]
        made = _launch(made, _LINK, command)
        if _listens(made.processes[0], port):
            made.connection.write()
            return made
    raise _died(made, _LINK)


def _start_nodes(made: Federation, shares: Sequence[Share]) -> Federation:
    """Start all at once, each with a port of its own for what it starts itself."""
    commands = {f"node-{i}": _node_command(made, f"node-{i}", share) for i, share in enumerate(shares)}
    ports: dict[str, int] = {}
    for _ in range(_TRIES):
        for name, command in commands.items():
            ports[name] = free_port(ports.values())
            made = _launch(made, name, [*command, "--port", str(ports[name])])
        started = {process.name: process for process in made.processes}
        commands = {name: c for name, c in commands.items() if not _listens(started[name], ports[name])}
        if not commands:
            return made
    raise _died(made, next(iter(commands)))


def _node_command(made: Federation, name: str, share: Share) -> list[str]:
    settings: dict[str, Any] = {"name": name, "data": str(share.folder), "client": share.client, "warm": made.warm}
    settings["state"] = str(_state(made.folder, name))
    if made.data["target"] is not None:
        settings["target"] = made.data["target"]
    if made.policy is not None:
        settings["policy"] = made.policy
    security = ["--insecure"]
    if made.root_certificates is not None:
        private = _register(made, name)
        security = ["--root-certificates", made.root_certificates, "--auth-supernode-private-key", str(private)]
        security += ["--trusted-entities", str(made.folder / "tls" / "trusted.yaml")]
    told = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    started = quick_supernode() if made.warm else [tool("flower-supernode")]
    return [*started, *security, "--superlink", made.address, "--node-config", told]


def _register(made: Federation, name: str) -> Path:
    """Make a key for a node and tell the SuperLink.  -> the private key"""
    from coterie.engines.flower.certificates import make_node_key

    private, public = make_node_key(made.folder / "tls", name)
    made.connection.flwr("supernode", "register", str(public), made.connection.name)
    return private


def _launch(made: Federation, name: str, command: Sequence[str]) -> Federation:
    """Start a process and write it down at once, so that it is found whatever happens next."""
    home, log = _home(made.folder, name), made.folder / "logs" / f"{name}.log"
    home.mkdir(parents=True, exist_ok=True)
    around = environment(home, threads=made.threads)
    begun = start(name, command, log=log, environment=around, folder=made.folder)
    others = [process for process in made.processes if process.name != name]
    made = replace(made, processes=(*others, begun), commands={**made.commands, name: list(command)})
    document = {**asdict(made), "folder": str(made.folder)}
    replace_file(made.folder / "federation.json", (json.dumps(document, indent=2) + "\n").encode())
    return made


def _listens(process: Process, port: int) -> bool:
    """Wait until a process says that it listens; false when it ends before. Asking the port could reach somebody else."""
    said = re.compile(rf"running on https?://127\.0\.0\.1:{port}\b")
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and alive(process):
        if said.search(process.said()):
            return True
        time.sleep(0.2)
    return False


def _home(folder: Path, name: str) -> Path:
    """Flower's files of a process: each has its own, since apps are unpacked there."""
    return folder / "home" if name == _LINK else folder / "nodes" / name.removeprefix("node-") / "home"


def _state(folder: Path, name: str) -> Path:
    """What the clients of a node keep."""
    return _home(folder, name).parent / "state"


def _died(made: Federation, name: str) -> RunError:
    return RunError(f"{name} could not be started", f"see {made.folder / 'logs' / name}.log")
