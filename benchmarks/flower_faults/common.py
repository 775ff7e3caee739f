# SPDX-License-Identifier: Apache-2.0
"""What the scripts share: a federation that goes away with the script, runs on it, and rounds as they come."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.config import FitOptions, options
from coterie.engines.flower.federation import Federation, down, up
from coterie.engines.flower.submission import submit, write_app
from coterie.methods.linear.structures import Effort

EFFORT = Effort(rounds=1, mixture_rounds=4, steps=2, starts=2, max_clusters=2, max_rank=1, max_components=2)
ROOT = Path(__file__).resolve().parents[2]


def write_rows(path: Path, *, clients: int = 8, rows: int = 30, seed: int = 0) -> None:
    """Two groups of linear clients."""
    draw = np.random.default_rng(seed)
    site = np.repeat([f"s{i:02d}" for i in range(clients)], rows)
    x = draw.normal(size=(len(site), 3))
    sign = np.repeat([1.0 if i % 2 else -1.0 for i in range(clients)], rows)
    y = x[:, 0] + sign * x[:, 1] + 0.1 * draw.normal(size=len(site))
    pq.write_table(pa.table({"site": site, **{f"x{i}": x[:, i] for i in range(3)}, "y": y}), path)


@contextmanager
def federation(*, nodes: int, clients: int = 8) -> Iterator[tuple[Federation, Path]]:
    """Start nodes, and stop them whatever happens.  -> the federation, and a folder for what is made"""
    own = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # nodes import benchmarks.flower_faults.app
    os.environ["PYTHONPATH"] = own.rstrip(os.pathsep)
    with tempfile.TemporaryDirectory(prefix="coterie-faults-") as place:
        folder = Path(place)
        write_rows(folder / "rows.parquet", clients=clients)
        try:
            how: dict[str, Any] = {"client": "site", "target": "y", "folder": folder / "federation", "patience": 300.0}
            yield up(nodes=nodes, data=folder / "rows.parquet", **how), folder
        finally:
            down(folder / "federation")


def chosen(**tree: Any) -> FitOptions:
    return options({"baselines": False, "data": {"client": "site", "target": "y", "test_size": 0}, **tree})


Listen = Callable[[dict[str, Any]], None]


def fit(made: Federation, out: Path, how: FitOptions, listen: Listen, **config: str | float) -> dict[str, Any]:
    """Run a fit on the federation; its app may be told to misbehave."""
    return _run(made, out, listen, {"task": "fit", "options": how.model_dump_json(), "every": 0.0, **config})


def compare(made: Federation, out: Path, listen: Listen, **config: str | float) -> dict[str, Any]:
    """Run a small comparison on the federation, likewise."""
    about = {"task": "compare", "compare": json.dumps({"new_clients": 0.0}), "effort": json.dumps(vars(EFFORT))}
    return _run(made, out, listen, {**about, **config})


def _run(made: Federation, out: Path, listen: Listen, config: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        about = {"out": str(out), "nodes": len(made.nodes), "timeout": 120.0}
        about |= {"command": "benchmarks.flower_faults", "fault": "none", **config}
        names = {half: f"benchmarks.flower_faults.app:{half}" for half in ("server", "client")}
        return submit(write_app(Path(place), about, **names), made.connection, listen)


class Rounds:
    """Print rounds of training and what is said of nodes, and let something be done after a round."""

    def __init__(self, then: Callable[[int], None] = lambda number: None) -> None:
        self.then, self.warnings, self.rounds = then, [], []  # type: ignore[var-annotated]

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            self.warnings.append(event["text"])
            print(f"  {event['text']}", flush=True)
        elif (
            event["event"] == "round" and event["phase"] == "fit" and event["done"]["round"]
        ):  # 0 is how the run begins
            done = event["done"]
            self.rounds.append(done)
            print(f"round {done['round']}: {done['participants']} clients, {done['seconds']:.1f} s", flush=True)
            self.then(done["round"])


class Messages:
    """Keep what is said of nodes, and let something be done when the n-th message has been sent."""

    def __init__(self, n: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.n, self.then, self.sent, self.warnings = n, then, 0, []  # type: ignore[var-annotated]

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            self.warnings.append(event["text"])
        elif event["event"] == "message":
            self.sent += 1
            if self.sent == self.n:
                self.then()
