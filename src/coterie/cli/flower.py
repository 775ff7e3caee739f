# SPDX-License-Identifier: Apache-2.0
"""`coterie flower`: the same fits on a Flower federation, and a federation on this machine for trying out."""

import importlib.util
import json
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.arguments import (
    AsJson,
    Categorical,
    Client,
    Decimal,
    Encoding,
    Event,
    Exclude,
    Hidden,
    MinRows,
    Missing,
    NewClients,
    OutcomeWord,
    Secure,
    Sep,
    Split,
    Target,
    TaskName,
    TestSize,
    Thousands,
    data_tree,
    free_folder,
    given,
    layer_sizes,
)
from coterie.cli.fit_options import Every, takes_fit_options
from coterie.errors import ConfigError
from coterie.runs.screen import err, following, out, warn

if TYPE_CHECKING:
    from coterie.config import FitOptions
    from coterie.engines.flower.federation import Federation
    from coterie.engines.flower.superlink import Connection

__all__ = ["app"]

app = typer.Typer(help="The same comparisons and fits on a Flower federation.", no_args_is_help=True)

FOLDER = Path(".coterie-flower")

Folder = Annotated[Path, typer.Option(help="Folder of the federation on this machine.")]
Superlink = Annotated[
    str | None,
    typer.Option(help="HOST:PORT, or a name in Flower's configuration; by default the one that `up` started."),
]
Certificates = Annotated[
    Path | None, typer.Option("--root-certificates", help="PEM file to check the SuperLink's certificate with.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Connect to --superlink without TLS.")]
Key = Annotated[
    Path | None,
    typer.Option(help="Your key, for a SuperLink that asks for one; `coterie flower key` makes it."),
]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes to wait for; by default 1, or all that `up` started.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for answers in a round.")]


@app.callback()
def _main() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("Flower is not installed", "pip install 'coterie[flower]'")


@app.command("up")
def up_command(
    data: Annotated[Path, typer.Option(help="Parquet, CSV(.gz), or a folder of such files.")],
    client: Client = None,
    target: Target = None,
    nodes: Annotated[int, typer.Option(help="Number of SuperNodes.")] = 4,
    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS, authenticated nodes, and signed apps of one submitter only.")
    ] = False,
    policy: Annotated[Path | None, typer.Option(help="Policy file of all nodes: what a server may ask.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Start a new process for every message at every node.")] = False,
    folder: Folder = FOLDER,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, and distribute the clients of DATA over the nodes."""
    from coterie.engines.flower.federation import up

    made = up(
        nodes=nodes, data=data, client=client, target=target, folder=folder, tls=tls, warm=not cold, policy=policy
    )
    out.print(f"SuperLink at {made.address}{' (TLS)' if tls else ''}, {nodes} nodes, each with its share of {data}")
    where = "" if folder == FOLDER else f" --folder {folder}"
    err.print(f"next: coterie flower run --method ifca --clusters 2{where}, then coterie flower down{where}")


@app.command("run")
@takes_fit_options
def run_command(
    chosen: "FitOptions",
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder, on the SuperLink's machine.")] = None,
    superlink: Superlink = None,
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    key: Key = None,
    nodes: Nodes = None,
    timeout: Timeout = 600.0,
    folder: Folder = FOLDER,
    every: Every = 0.0,
    as_json: AsJson = False,
) -> None:
    """Fit the clients of a federation; repeat the command to continue an interrupted run."""
    with tempfile.TemporaryDirectory() as home:
        connection, made = _reach(superlink, root_certificates, insecure, key, folder, Path(home))
        if made is not None:
            own = {key: made.data[key] for key in ("client", "target") if getattr(chosen.data, key) is None}
            chosen = chosen.model_copy(update={"data": chosen.data.model_copy(update=own)})
        run = out_ or free_folder(f"flower-{chosen.method}")
        _run(run, chosen, connection, nodes or _expected(made), timeout, every, as_json)


@app.command("compare")
def compare_command(
    out_: Annotated[Path | None, typer.Option("--out", help="Results folder, on the SuperLink's machine.")] = None,
    hidden: Hidden = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try fewer starts and settings.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    secure: Secure = False,
    missing: Missing = None,
    task: TaskName = None,
    outcome: OutcomeWord = None,
    event: Event = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    min_rows: MinRows = None,
    test_size: TestSize = None,
    new_clients: NewClients = None,
    split: Split = None,
    sep: Sep = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
    superlink: Superlink = None,
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    key: Key = None,
    nodes: Nodes = None,
    timeout: Timeout = 600.0,
    folder: Folder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Find how the clients of a federation differ; repeat the command to continue an interrupted comparison."""
    from coterie.config import options

    said = {"hidden": layer_sizes(hidden) or (), "quick": quick, "seed": seed, "new_clients": new_clients}
    said |= {"secure": True} if secure else {}
    said |= {} if test_size is None else {"test_size": test_size}
    read = given(data_tree(
        None, exclude, categorical, missing=missing, task=task, outcome=outcome, event=event, min_rows=min_rows,
        split=split, sep=sep, decimal=decimal, thousands=thousands, encoding=encoding,
    ))  # fmt: skip
    more = {"options": options({"data": read}).model_dump_json()} if read else {}  # nodes read their rows so
    with tempfile.TemporaryDirectory() as home:
        connection, made = _reach(superlink, root_certificates, insecure, key, folder, Path(home))
        place = (out_ or free_folder("flower-compare")).absolute()
        _compare(place, said, connection, nodes or _expected(made), timeout, as_json, **more)


@app.command("resume")
def resume_command(
    run: Annotated[Path, typer.Argument(help="A run folder of `coterie flower run`.")],
    superlink: Superlink = None,
    root_certificates: Certificates = None,
    insecure: Insecure = False,
    key: Key = None,
    nodes: Nodes = None,
    timeout: Timeout = 600.0,
    folder: Folder = FOLDER,
    every: Every = 0.0,
    as_json: AsJson = False,
) -> None:
    """Continue an interrupted run from its last checkpoint, with its own options."""
    from coterie.runs.fit import report_run, show_report
    from coterie.runs.folder import is_finished, read_options

    chosen = read_options(run)
    if is_finished(run):
        err.print("the run has finished; only its report is written again")
        show_report(report_run(run), as_json)
        return
    with tempfile.TemporaryDirectory() as home:
        connection, made = _reach(superlink, root_certificates, insecure, key, folder, Path(home))
        _run(run, chosen, connection, nodes or _expected(made), timeout, every, as_json)


@app.command("status")
def status_command(folder: Folder = FOLDER, as_json: AsJson = False) -> None:
    """List the processes, nodes and runs of the federation on this machine."""
    from coterie.engines.flower.federation import find

    made = find(folder)
    running = made.running()
    found: dict[str, Any] = {"superlink": made.address, "tls": made.root_certificates is not None, "running": running}
    if running["superlink"]:
        found["nodes_online"] = made.connection.nodes_online()
        runs = made.connection.document("list", made.connection.name)["runs"]
        found["runs"] = {run["run-id"]: run["status"] for run in runs}
    if as_json:
        print(json.dumps(found, indent=2))
        return
    out.print(f"SuperLink at {made.address}{' (TLS)' if found['tls'] else ''}; data {made.data['path']}")
    for name, runs_now in running.items():
        out.print(f"{name}: {'running' if runs_now else 'ended'}, log {made.folder / 'logs' / name}.log")
    if "runs" in found:
        out.print(f"{found['nodes_online']} of {len(made.nodes)} nodes online")
    for number, status in found.get("runs", {}).items():
        out.print(f"run {number}: {status}")


@app.command("down")
def down_command(folder: Folder = FOLDER) -> None:
    """Stop the processes that `up` started."""
    from coterie.engines.flower.federation import down

    stopped = down(folder)
    out.print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


@app.command("supernode", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def supernode_command(
    words: Annotated[list[str] | None, typer.Argument(metavar="OPTIONS", help="Those of flower-supernode.")] = None,
) -> None:
    """Start a SuperNode that answers sooner than flower-supernode, with the same options."""
    from coterie.engines.flower.superlink import environment, quick_supernode

    command = [*quick_supernode(), *(words or [])]
    os.execve(command[0], command, environment(None))


@app.command("superlink", context_settings={"ignore_unknown_options": True, "help_option_names": []})
def superlink_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="OPTIONS", help="--trusted-entities FILE, and those of flower-superlink."),
    ] = None,
) -> None:
    """Start a SuperLink that only lets in whose keys are in a file, and runs only apps that they have signed."""
    from coterie.engines.flower.superlink import environment, guarded_superlink

    command = [*guarded_superlink(), *(words or [])]
    os.execve(command[0], command, environment(None))


@app.command("key")
def key_command(file: Annotated[Path, typer.Argument(help="Where to write the key; it is not shown.")]) -> None:
    """Make your key, and print the line for the file of trusted keys on the SuperLink's machine and on every node."""
    from coterie.engines.flower.superlink import new_submitter

    print(new_submitter(file))


@app.command("submit")
def submit_command(
    app_folder: Annotated[Path, typer.Argument(metavar="APP", help="The folder of a Flower app of your own.")],
    superlink: Superlink = None,
    root_certificates: Certificates = None,
    key: Key = None,
    folder: Folder = FOLDER,
) -> None:
    """Sign an app of your own and let the SuperLink run it, as `flwr run` does without a signature."""
    with tempfile.TemporaryDirectory() as home:
        connection, _ = _reach(superlink, root_certificates, False, key, folder, Path(home))
        out.print(f"run {connection.start(app_folder.absolute())}")


@app.command("register")
def register_command(
    public: Annotated[Path, typer.Argument(help="The public key of a node (ECDSA).")],
    superlink: Superlink = None,
    root_certificates: Certificates = None,
    key: Key = None,
    folder: Folder = FOLDER,
) -> None:
    """Let a node in at the SuperLink, by its public key."""
    with tempfile.TemporaryDirectory() as home:
        connection, _ = _reach(superlink, root_certificates, False, key, folder, Path(home))
        connection.flwr("supernode", "register", str(public), connection.name)
    out.print(f"the node of {public} may connect")


@app.command("demo")
def demo_command(
    nodes: Annotated[int, typer.Option(help="Number of SuperNodes.")] = 4,
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare and fit 48 invented hospitals on SuperNodes on this machine, then stop these."""
    from coterie.engines.flower.federation import down, up
    from coterie.runs.auto import advised
    from coterie.studies import stays_demo

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    run = (out_ or free_folder("flower-demo")).absolute()
    found = run.with_name(f"{run.name}-comparison")
    with tempfile.TemporaryDirectory(prefix="coterie-flower-") as place:
        folder = Path(place)
        rows = folder / "stays.parquet"
        stays_demo.write_stays(rows, seed)
        err.print(f"starting a SuperLink and {nodes} SuperNodes")
        try:
            made = up(nodes=nodes, data=rows, client="hospital", target="days", folder=folder)
            effort = {"effort": json.dumps(vars(stays_demo.EFFORT))}
            _compare(found, {"seed": seed, "new_clients": 0.0}, made.connection, nodes, 600.0, as_json, **effort)
            document = json.loads((found / "compare.json").read_text(encoding="utf-8"))
            chosen = advised(document).into(stays_demo.demo_options(seed))
            err.print(f"fitting what was found: {chosen.method}")
            _run(run, chosen, made.connection, nodes, 600.0, 0.0, as_json)
        finally:
            down(folder)


# -- small helpers ----------------------------------------------------------------------------------------------------
def _reach(
    superlink: str | None, root_certificates: Path | None, insecure: bool, key: Path | None, folder: Path, home: Path
) -> "tuple[Connection, Federation | None]":
    """Find the SuperLink: what `up` has started, an address, or a name that Flower knows."""
    from coterie.engines.flower.federation import find
    from coterie.engines.flower.superlink import Connection

    if superlink is None:
        made = find(folder)
        return made.connection, made
    if ":" not in superlink:
        if key is not None:
            raise ConfigError("--key needs the SuperLink's address", "--superlink HOST:PORT --root-certificates ca.pem")
        return Connection(superlink, None), None
    authority, own = (None if file is None else str(file.absolute()) for file in (root_certificates, key))
    connection = Connection("coterie", home, superlink, authority, insecure, own)
    connection.write()
    return connection, None


def _expected(made: "Federation | None") -> int:
    return 1 if made is None else len(made.nodes)


def _run(
    folder: Path,
    chosen: "FitOptions",
    connection: "Connection",
    nodes: int,
    timeout: float,
    every: float,
    as_json: bool,
) -> None:
    config = {"task": "fit", "options": chosen.model_dump_json(), "out": str(folder.absolute()), "nodes": nodes}
    _submit({**config, "timeout": timeout, "every": every}, connection, as_json, f"coterie flower resume {folder}")


def _compare(
    folder: Path,
    said: dict[str, Any],
    connection: "Connection",
    nodes: int,
    timeout: float,
    as_json: bool,
    **more: str,
) -> None:
    config = {"task": "compare", "compare": json.dumps(said), "out": str(folder), "nodes": nodes, "timeout": timeout}
    _submit({**config, **more}, connection, as_json, f"the same command with --out {folder}")


def _submit(config: dict[str, Any], connection: "Connection", as_json: bool, again: str) -> None:
    """Let the SuperLink run it, follow it, and show what came of it; `again` is how to go on after an interruption."""
    from coterie.engines.flower.submission import submit, write_app
    from coterie.engines.in_process import Round

    config["command"] = "coterie " + shlex.join(sys.argv[1:])
    config["submitter"] = connection.submitter
    try:
        with tempfile.TemporaryDirectory() as place, following() as follow:

            def listen(event: dict[str, Any]) -> None:
                if event["event"] == "warning":
                    warn([event["text"]])
                elif event["event"] == "message":
                    follow.message(event["asked"])
                else:
                    follow.round(event["phase"], Round(**event["done"]), event["total"])

            result = submit(write_app(Path(place), config), connection, listen)
    except KeyboardInterrupt:
        err.print(f"interrupted; continue with: {again}")
        raise
    if as_json:
        print(json.dumps(result["found"], indent=2, allow_nan=False))
        return
    print(result["text"], end="")
    warn(result["warnings"])
    print(f"report: {result['found']['report']}")
