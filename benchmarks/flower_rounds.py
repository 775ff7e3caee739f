# SPDX-License-Identifier: Apache-2.0
"""What a round costs: `python -m benchmarks.flower_rounds`, on a quiet machine.

On 4 SuperNodes of this machine, FedAvg by coterie beside Flower's own on the same model and rows. Then 100 nodes of Flower's
simulation engine beside coterie's engine in process, on the same work: 100 clients x 50 rows, 10 full-batch steps of an MLP
784-200-10, and of a linear model with 20 features.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
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
from coterie.engines.flower.federation import down, up
from coterie.engines.flower.submission import submit, write_app
from coterie.engines.flower.superlink import QUIET
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import linear_regression, mlp

ROOT = Path(__file__).resolve().parents[1]
NODES, ROUNDS, CLIENTS, ROWS = 4, 6, 100, 50


def main() -> None:
    os.environ |= {**QUIET, **os.environ}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    table = Table("", "seconds per round", "bytes up", "bytes down", title="one round, median")
    for row in [*deployed(), *simulated("mlp"), *simulated("linear")]:
        table.add_row(row["name"], f"{row['seconds']:.3g}", *(f"{row.get(k, 0):,}" for k in ("bytes_up", "bytes_down")))
    Console().print(table)


# -- SuperNodes -------------------------------------------------------------------------------------------------------
def deployed() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="coterie-rounds-") as place:
        folder = Path(place)
        parts = [_table(number) for number in range(NODES)]
        pq.write_table(pa.concat_tables(parts), folder / "rows.parquet")
        try:
            made = up(
                nodes=NODES, data=folder / "rows.parquet", client="site", target="y", folder=folder / "federation"
            )
            return [_coterie(made.connection, folder), _flower(made.connection, folder)]
        finally:
            down(folder / "federation")


def _table(number: int) -> pa.Table:
    x, y = flower_plain.rows("mlp", number, ROWS)
    columns = {f"x{i}": x[:, i].numpy() for i in range(x.shape[1])}
    return pa.table({"site": [f"s{number}"] * len(x), **columns, "y": y.numpy()})


def _coterie(connection: Any, folder: Path) -> dict[str, Any]:
    chosen = options(
        {
            "method": "fedavg", "baselines": False, "model": {"hidden": [200]},
            "data": {"client": "site", "target": "y", "test_size": 0, "standardise": False},
            "training": {"rounds": ROUNDS, "local_steps": flower_plain.STEPS, "step_size": flower_plain.STEP_SIZE},
        }
    )  # fmt: skip
    config = {"options": chosen.model_dump_json(), "out": str(folder / "run"), "nodes": NODES, "timeout": 600.0}
    told: list[dict[str, Any]] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["phase"] == "fit" and event["done"]["participants"]:
            told.append(event["done"])

    submit(write_app(folder / "app", {**config, "every": 0.0, "command": "benchmark"}), connection, listen)
    return {"name": f"coterie, FedAvg, {NODES} SuperNodes", **_median(told)}


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    last = rounds[-1]
    seconds = statistics.median(done["seconds"] for done in rounds)
    return {"seconds": seconds, "bytes_up": last["bytes_up"], "bytes_down": last["bytes_down"]}


def _flower(connection: Any, folder: Path) -> dict[str, Any]:
    names = {half: f"benchmarks.flower_plain:{half}" for half in ("server", "client")}
    app = write_app(folder / "plain", {"kind": "mlp", "rounds": ROUNDS, "nodes": NODES}, **names)
    found = submit(app, connection, lambda event: None)
    seconds = statistics.median(found["seconds"])
    sizes = {key: found[key] for key in ("bytes_up", "bytes_down")}
    return {"name": f"Flower, FedAvg, {NODES} SuperNodes", "seconds": seconds, **sizes}


# -- simulation -------------------------------------------------------------------------------------------------------
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


if __name__ == "__main__":
    main()
