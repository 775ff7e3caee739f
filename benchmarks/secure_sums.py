# SPDX-License-Identifier: Apache-2.0
"""What a secure sum costs: bytes and seconds of a round of FedAvg with 4 to 256 nodes in memory, with and without.

Run: python -m benchmarks.secure_sums

A node has one client with 20 rows; the model has 50 features. Keys are exchanged once for 16 sums, and counted by the sum.
"""

import math
import time
from dataclasses import dataclass

import torch

from coterie.algorithms.fedavg import fedavg
from coterie.data.ragged import Layout, Ragged
from coterie.engines.in_process import InProcess
from coterie.engines.secure import SecureWorker
from coterie.local import Training
from coterie.models import linear_regression
from coterie.secure.in_memory import SUMS, NodesInMemory

NODES = (4, 16, 64, 256)
FEATURES, ROWS = 50, 20


@dataclass(frozen=True)
class Cost:
    nodes: int
    plain_bytes: int  # of a round, up
    bytes: int  # up and down, without the model itself
    plain_seconds: float
    seconds: float

    @property
    def by_n_log_n(self) -> float:
        return self.bytes / (self.nodes * math.log2(self.nodes))


def federation(nodes: int) -> Ragged:
    import numpy as np

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(nodes * ROWS, FEATURES, generator=draw, dtype=torch.float64)
    names = np.array([f"site-{i:04d}" for i in range(nodes)])
    return Ragged(Layout.plan(names, np.full(nodes, ROWS)), x, x.sum(1))


def measured(nodes: int, rounds: int = SUMS) -> Cost:
    """A mean over as many rounds as an exchange of keys is for."""
    rows, model = federation(nodes), linear_regression(FEATURES)

    def program(state: object) -> object:
        return fedavg(state, model=model, rounds=rounds, step_size=0.01, seed=0, training=Training(steps=1))  # type: ignore[arg-type]

    begin = time.perf_counter()
    plain = InProcess(rows).run([program])  # type: ignore[list-item]
    plain_seconds = (time.perf_counter() - begin) / rounds
    memory = NodesInMemory()
    engine = InProcess(rows, worker=SecureWorker(rows, nodes=memory, n_nodes=nodes))
    begin = time.perf_counter()
    found = engine.run([program])  # type: ignore[list-item]
    seconds = (time.perf_counter() - begin) / rounds
    torch.testing.assert_close(found.states[0].theta, plain.states[0].theta, rtol=1e-9, atol=1e-9)
    cost = memory.cost
    sent = (cost.bytes_up + cost.bytes_down) // rounds
    return Cost(nodes, plain.rounds[-1].bytes_up, sent, plain_seconds, seconds)


def main() -> None:
    print("nodes  bytes up without  bytes with  by node  / n log2 n  seconds without  seconds with")
    for nodes in NODES:
        one = measured(nodes)
        print(
            f"{nodes:5}  {one.plain_bytes:16,}  {one.bytes:10,}  {one.bytes // nodes:7,}  {one.by_n_log_n:10,.0f}"
            f"  {one.plain_seconds:15.4f}  {one.seconds:12.4f}"
        )


if __name__ == "__main__":
    main()
