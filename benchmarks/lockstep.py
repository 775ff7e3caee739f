# SPDX-License-Identifier: Apache-2.0
"""30 runs of IFCA (10 starts x 3 steps, D = 1000) in lockstep, against the matrix products that they need."""

from functools import partial

import torch

from benchmarks.timing import best
from coterie.algorithms.ifca import ifca
from coterie.algorithms.starts import Start
from coterie.engines.in_process import InProcess
from coterie.models import Dense
from coterie.studies.data.synthetic import bernoulli_starts, mixed_regression

CLIENTS, ROWS, FEATURES, CLUSTERS, ROUNDS = 100, 100, 1000, 2, 300
STEPS = (0.01, 0.1, 1.0)


def run(dtype: torch.dtype = torch.float32) -> list[dict]:
    made = mixed_regression(
        n_clients=CLIENTS, rows=ROWS, n_features=FEATURES, n_clusters=CLUSTERS, noise=0.1, separation=0.1,
        preset="official", seed=0, dtype=dtype,
    )  # fmt: skip
    model = Dense((FEATURES, 1), "squared", intercept=False, dtype=dtype)
    starts = bernoulli_starts(10, CLUSTERS, FEATURES, seed=0, dtype=dtype)
    programs = [
        partial(
            ifca, model=model, n_clusters=CLUSTERS, rounds=ROUNDS, step_size=step, seed=0, averaging="gradient",
            start=Start("warm", theta), patience=0,
        )
        for theta in starts for step in STEPS
    ]  # fmt: skip
    x = made.rows.x.view(CLIENTS, ROWS, FEATURES)
    flat, runs = x.view(-1, FEATURES), len(programs)
    theta = torch.randn(FEATURES, runs * CLUSTERS, dtype=dtype)
    delta = torch.randn(CLIENTS, runs, ROWS, dtype=dtype)

    def products() -> None:
        scores = torch.empty(len(flat), runs * CLUSTERS, dtype=dtype)
        gradients = torch.empty(CLIENTS, runs, FEATURES, dtype=dtype)
        for _ in range(ROUNDS):
            torch.mm(flat, theta, out=scores)  # every model on every row
            torch.bmm(delta, x, out=gradients)  # every client's gradient in every run

    seconds = best(
        2,
        products=products,
        lockstep=lambda: InProcess(made.rows).run(programs),
        alone=lambda: InProcess(made.rows).run(programs[:1]),
    )
    return [
        {
            "bench": f"lockstep, 30 runs x 300 rounds, {str(dtype).removeprefix('torch.')}",
            "seconds": seconds["lockstep"],
            "bare": seconds["products"],
            "ratio": seconds["lockstep"] / seconds["products"],
            "limit": 2.5,
            "one after another": seconds["alone"] * runs,
        }
    ]
