# SPDX-License-Identifier: Apache-2.0
"""What a round costs: `python -m benchmarks.flower_rounds`, on a quiet machine; `--only linear` for a part.

On 4 SuperNodes of this machine: an app that does nothing but return a number, and FedAvg with a linear model by coterie,
with nodes that keep a process and without (`linear`); FedAvg with an MLP 784-200-10 by coterie beside Flower's own on the
same rows (`mlp`). Then 100 nodes of Flower's simulation engine beside coterie's engine in process, on the same work: 100
clients x 50 rows, 10 full-batch steps of both models (`simulation`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import flower_plain
from coterie.algorithms.fedavg import fedavg
from coterie.config import options
from coterie.data.ragged import Ragged
from coterie.engines.flower.federation import Federation, down, up
from coterie.engines.flower.submission import submit, write_app
from coterie.engines.flower.superlink import QUIET
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import linear_regression, mlp

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results") / "flower_rounds.json"
NODES, ROUNDS, CLIENTS, ROWS = 4, 6, 100, 50
NOTHING, PLAIN = (f"nothing but a number, {NODES} {kind}SuperNodes" for kind in ("", "plain "))
WARM, COLD = (f"coterie, FedAvg, linear, {NODES} {kind} SuperNodes" for kind in ("warm", "cold"))


def main() -> None:
    os.environ |= {**QUIET, **os.environ}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be given several times")
    table = Table("", "seconds", "CPU s a message", "bytes up", "bytes down", title="one round, median")
    rows = [row for part in parser.parse_args().only or PARTS for row in PARTS[part]()]
    for row in rows:
        sizes = (f"{row.get(k, 0):,}" for k in ("bytes_up", "bytes_down"))
        table.add_row(row["name"], f"{row['seconds']:.3g}", f"{row['cpu']:.2f}" if "cpu" in row else "", *sizes)
    Console().print(table)
    _compare(rows)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")


def _compare(rows: list[dict[str, Any]]) -> None:
    found = {row["name"]: row for row in rows}
    if {NOTHING, PLAIN, WARM} <= found.keys():
        for name, how in (
            (NOTHING, "on the same SuperNodes (bar: 1.5)"),
            (PLAIN, "on SuperNodes as Flower starts them"),
        ):
            ratio = found[WARM]["seconds"] / found[name]["seconds"]
            print(f"a warm round takes {ratio:.2f} times one in which nothing is done {how}")
        print(f"a node takes {found[WARM]['cpu']:.2f} CPU seconds a message (bar: 1.2)")


# -- SuperNodes -------------------------------------------------------------------------------------------------------
def linear() -> list[dict[str, Any]]:
    found = []
    for warm, nothing, ours in ((True, NOTHING, WARM), (False, PLAIN, COLD)):
        with _federation("linear", warm=warm) as (made, folder):
            app = write_app(folder / "nothing", {"rounds": ROUNDS, "nodes": NODES}, **_halves("flower_nothing"))
            found += [_row(nothing, _watched(app, made)), _row(ours, _watched(_app("linear", folder), made))]
    return found


def networks() -> list[dict[str, Any]]:
    with _federation("mlp", warm=True) as (made, folder):
        ours = _row(f"coterie, FedAvg, MLP, {NODES} SuperNodes", _watched(_app("mlp", folder), made))
        config = {"kind": "mlp", "rounds": ROUNDS, "nodes": NODES}
        found = submit(write_app(folder / "plain", config, **_halves("flower_plain")), made.connection, lambda _: None)
        sizes = {key: found[key] for key in ("bytes_up", "bytes_down")}
        seconds = statistics.median(found["seconds"])
        return [ours, {"name": f"Flower, FedAvg, MLP, {NODES} SuperNodes", "seconds": seconds, **sizes}]


@contextmanager
def _federation(kind: str, *, warm: bool) -> Iterator[tuple[Federation, Path]]:
    with tempfile.TemporaryDirectory(prefix="coterie-rounds-") as place:
        folder = Path(place)
        rows = folder / "rows.parquet"
        pq.write_table(pa.concat_tables([_table(kind, number) for number in range(NODES)]), rows)
        try:
            there = folder / "federation"
            yield up(nodes=NODES, data=rows, client="site", target="y", folder=there, warm=warm), folder
        finally:
            down(folder / "federation")


def _table(kind: str, number: int) -> pa.Table:
    x, y = flower_plain.rows(kind, number, ROWS)
    columns = {f"x{i}": x[:, i].numpy() for i in range(x.shape[1])}
    return pa.table({"site": [f"s{number}"] * len(x), **columns, "y": y.numpy()})


def _app(kind: str, folder: Path) -> Path:
    chosen = options(
        {
            "method": "fedavg", "baselines": False, "model": {"hidden": [200] if kind == "mlp" else []},
            "data": {"client": "site", "target": "y", "test_size": 0, "standardise": False},
            "training": {"rounds": ROUNDS, "local_steps": flower_plain.STEPS, "step_size": flower_plain.STEP_SIZE},
        }
    )  # fmt: skip
    config = {"options": chosen.model_dump_json(), "out": str(folder / "run"), "nodes": NODES, "timeout": 600.0}
    return write_app(folder / "app", {**config, "every": 0.0, "command": "benchmark"})


def _halves(module: str) -> dict[str, str]:
    return {half: f"benchmarks.{module}:{half}" for half in ("server", "client")}


def _watched(app: Path, made: Federation) -> list[dict[str, Any]]:
    """Run an app.  -> its rounds, each with the CPU seconds that the nodes had taken by then"""
    told: list[dict[str, Any]] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["phase"] == "fit" and event["done"]["participants"]:
            told.append({**event["done"], "cpu": _node_seconds(made)})

    submit(app, made.connection, listen)
    return told


def _row(name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; CPU seconds from the end of the first round to the end of the last, a node and round."""
    cpu = (rounds[-1]["cpu"] - rounds[0]["cpu"]) / (len(rounds) - 1) / NODES
    sizes = {key: rounds[-1][key] for key in ("bytes_up", "bytes_down") if key in rounds[-1]}
    return {"name": name, "seconds": statistics.median(done["seconds"] for done in rounds), "cpu": cpu, **sizes}


def _node_seconds(made: Federation) -> float:
    """CPU seconds of the SuperNodes and of all that they have started, also of what has ended."""
    stats = {int(path.parent.name): _stat(path) for path in Path("/proc").glob("[0-9]*/stat")}
    family = {process.pid for process in made.processes if process.name != "superlink"}
    grown = 0
    while grown < len(family):
        grown = len(family)
        family |= {
            pid for pid, words in stats.items() if words and (int(words[1]) in family or _kept_by(pid) in family)
        }
    ticks = sum(
        sum(map(int, stats[pid][11:15])) for pid in family if stats.get(pid)
    )  # own, and of those that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(path: Path) -> list[str]:
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return []


def _kept_by(pid: int) -> int | None:
    """The part of a SuperNode that a warm process ends with; what it forks itself are its children."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    return int(words[5]) if "coterie.engines.flower.warm" in words else None


# -- simulation -------------------------------------------------------------------------------------------------------
def simulations() -> list[dict[str, Any]]:
    return [*simulated("mlp"), *simulated("linear")]


def simulated(kind: str) -> list[dict[str, Any]]:
    here, flower = _in_process(kind), _simulation(kind)
    return [
        {"name": f"coterie in process, {kind}, {CLIENTS} clients", "seconds": here},
        {
            "name": f"Flower's simulation, {kind}, {CLIENTS} nodes ({flower / here:.0f} times as long)",
            "seconds": flower,
        },
    ]


def _in_process(kind: str) -> float:
    blocks = [flower_plain.rows(kind, number, ROWS) for number in range(CLIENTS)]
    data = Ragged.from_blocks(torch.stack([x for x, _ in blocks]), torch.stack([y for _, y in blocks]))
    model = linear_regression(20) if kind == "linear" else mlp(784, 200, n_outputs=10)
    program = partial(
        fedavg, model=model, rounds=20, step_size=flower_plain.STEP_SIZE, seed=0, training=Training(flower_plain.STEPS)
    )
    done = InProcess(data).run([program]).rounds
    return statistics.median(one.seconds for one in done[2:])


def _simulation(kind: str) -> float:
    """Seconds by round of Flower's simulation, in a process of its own, which leaves nothing behind."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "seconds"
        code = f"from benchmarks.flower_rounds import simulate; simulate({kind!r}, {str(out)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        if not out.exists():
            raise SystemExit(f"Flower's simulation failed:\n{done.stderr[-2000:]}")
        return statistics.median(json.loads(out.read_text())[1:])  # the first round starts processes


def simulate(kind: str, out: str) -> None:
    """Run Flower's simulation, and write down what rounds took."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    app = ServerApp()

    @app.main()
    def serve(grid: Any, context: Any) -> None:
        Path(out).write_text(json.dumps(flower_plain.fedavg(grid, kind, ROUNDS, CLIENTS)["seconds"]))

    run_simulation(server_app=app, client_app=flower_plain.client, num_supernodes=CLIENTS)


PARTS = {"linear": linear, "mlp": networks, "simulation": simulations}

if __name__ == "__main__":
    main()
