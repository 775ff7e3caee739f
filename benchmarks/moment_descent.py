# SPDX-License-Identifier: Apache-2.0
"""Moment descent: an iteration of Phase 1 and a round of Phase 2 against their bare products, and a million tiny clients."""

import json
import subprocess
import sys
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.many_clients import peak_bytes
from benchmarks.timing import best
from coterie.algorithms.moment_descent import Descent, State, mixed_regression, moment_descent
from coterie.data.ragged import Layout, Ragged
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import linear_regression

CLUSTERS, ANCHORS, COLUMNS, EXCHANGES, ITERATIONS, ROUNDS = 3, 30, 11, 3, 4, 50


def run() -> list[dict]:
    small = _clients(np.array([10] * 900 + [50] * 20), 100)
    return [*_phase_one(small), *_phase_two(small), *_million()]


def _clients(counts: np.ndarray, features: int) -> Ragged:
    """Planted clients of three clusters, drawn at once."""
    draw = torch.Generator().manual_seed(0)
    layout = Layout.plan(np.char.zfill(np.arange(len(counts)).astype(str), 7), counts)
    theta = 2 / features**0.5 * torch.randn(CLUSTERS, features, generator=draw, dtype=torch.float64)
    x = torch.randn(int(counts.sum()), features, generator=draw, dtype=torch.float64)
    cluster = torch.arange(len(counts))[torch.from_numpy(layout.order)] % CLUSTERS
    owner = cluster.repeat_interleave(torch.from_numpy(counts[layout.order]))
    y = (x * theta[owner]).sum(1) + 0.2 * torch.randn(len(x), generator=draw, dtype=torch.float64)
    return Ragged(layout, x, y)


def _phase_one(rows: Ragged) -> list[dict]:
    x, model = rows.x, linear_regression(rows.shape[0], intercept=False)
    assert isinstance(x, Tensor)
    theta, q, g = (torch.randn(n, ANCHORS * m, dtype=x.dtype) for n, m in ((100, 1), (100, COLUMNS), (len(x), COLUMNS)))

    def products() -> None:
        for _ in range(EXCHANGES * (ITERATIONS - 1)):  # all anchors share the first iteration's subspace
            x @ theta
            x @ q
            x.T @ g

    program = partial(moment_descent, model=model, n_clusters=CLUSTERS, seed=0, descent=Descent(ITERATIONS))
    seconds = best(3, products=products, ours=lambda: InProcess(rows).run([program]))
    return [_row("moment descent, Phase 1 at C.2, one iteration", seconds, ITERATIONS - 1)]


def _phase_two(rows: Ragged) -> list[dict]:
    x, model = rows.x, linear_regression(rows.shape[0], intercept=False)
    assert isinstance(x, Tensor)
    start = InProcess(rows).run([partial(moment_descent, model=model, n_clusters=CLUSTERS, seed=0)]).states[0]
    theta, g = torch.randn(100, CLUSTERS, dtype=x.dtype), torch.randn(len(x), CLUSTERS, dtype=x.dtype)
    few, many = x[:9000].view(900, 10, 100), x[9000:].view(20, 50, 100)

    def products() -> None:
        for _ in range(ROUNDS):
            x @ theta
            for part in (few, many):
                torch.bmm(part, part.transpose(1, 2))
            x.T @ g

    def rounds(training: Training) -> None:
        InProcess(rows).run([lambda _: _second(start, model, training)])

    fedavg, fedprox = Training(steps=5), Training(exact=True, proximal=10.0)
    seconds = best(3, products=products, ours=lambda: rounds(fedavg), exact=lambda: rounds(fedprox))
    return [
        _row("moment descent, Phase 2 at C.2, one round of FedAvg with s = 5", seconds, ROUNDS),
        _row(
            "moment descent, Phase 2 at C.2, one round of FedProx, exact", {**seconds, "ours": seconds["exact"]}, ROUNDS
        ),
    ]


def _second(start: State, model: object, training: Training) -> object:
    return mixed_regression(
        start, model=model, n_clusters=CLUSTERS, rounds=ROUNDS, step_size=0.03, seed=0, training=training
    )


def _row(name: str, seconds: dict[str, float], count: int) -> dict:
    ours, bare = seconds["ours"] / count, seconds["products"] / count
    return {"bench": name, "seconds": ours, "bare": bare, "ratio": ours / bare}


# -- a million clients ------------------------------------------------------------------------------------------------
def _million() -> list[dict]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.moment_descent"], capture_output=True, check=True)
    return [json.loads(done.stdout)]


def _measure() -> dict:
    rows = _clients(np.array([60] * 100 + [2] * 1_000_000 + [1] * 1000 + [0] * 1000), 50)
    model = linear_regression(50, intercept=False)
    begin = time.perf_counter()
    program = partial(
        mixed_regression, model=model, n_clusters=CLUSTERS, rounds=10, step_size=0.01, seed=0, descent=Descent(3)
    )
    rounds = InProcess(rows).run([program]).rounds
    return {
        "bench": "1,000,000 clients x 2 rows, 100 x 60, 1,000 with one row, 1,000 with none; D = 50, K = 3",
        "seconds per iteration of Phase 1": max(r.seconds for r in rounds if "movement" in r.info),
        "seconds per round of Phase 2": sum(r.seconds for r in rounds if "loss" in r.info) / 10,
        "seconds in all": time.perf_counter() - begin,
        "peak memory GB": peak_bytes() / 1e9,
        "data GB": rows.x.nbytes / 1e9,
    }


if __name__ == "__main__":
    print(json.dumps(_measure()))
