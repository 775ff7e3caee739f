# SPDX-License-Identifier: Apache-2.0
"""Very many small clients (10 rows, 20 features, K = 4, linear): seconds per round and peak memory, in own processes."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from coterie.algorithms.ifca import ifca
from coterie.algorithms.starts import Start
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.models import linear_regression

ROWS, FEATURES, CLUSTERS, ROUNDS = 10, 20, 4, 10


def run() -> list[dict]:
    found = [_in_own_process(n) for n in (20_000, 200_000)]
    for averaging in ("gradient", "model"):
        few, many = (f[averaging] for f in found)
        for f in found:
            f[f"{averaging} growth"] = many / few / 10
    return [
        {
            "bench": f"{f['clients']:,} clients x 10 rows x 20 features, K = 4, {averaging} averaging",
            "seconds per round": f[averaging],
            "growth over linear": f[f"{averaging} growth"],
            "peak memory GB": f["peak"],
            "data GB": f["data"],
            "limit": 3.0,
        }
        for averaging in ("gradient", "model")
        for f in found
    ]


def _in_own_process(clients: int) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.many_clients", str(clients)], capture_output=True, check=True
    )
    return json.loads(done.stdout)


def _measure(clients: int) -> dict:
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(CLUSTERS, FEATURES, generator=draw, dtype=torch.float64)
    x = torch.randn(clients, ROWS, FEATURES, generator=draw, dtype=torch.float64)
    y = torch.einsum("cnd,cd->cn", x, truth[torch.arange(clients) % CLUSTERS])
    rows = Ragged.from_blocks(x, y)
    model = linear_regression(FEATURES)
    out: dict = {"clients": clients, "data": (x.nbytes + y.nbytes) / 1e9}
    for averaging in ("gradient", "model"):
        program = partial(
            ifca, model=model, n_clusters=CLUSTERS, rounds=ROUNDS, step_size=0.05, seed=0, averaging=averaging,
            start=Start("random"),
        )  # fmt: skip
        begin = time.perf_counter()
        InProcess(rows).run([program])
        out[averaging] = (time.perf_counter() - begin) / ROUNDS
    out["peak"] = peak_bytes() / 1e9
    return out


def peak_bytes() -> int:
    """Peak resident memory of this process alone (getrusage would count what the parent held when it forked)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
