# SPDX-License-Identifier: Apache-2.0
"""Flower's own FedAvg, as its users write it: the measure for `benchmarks.flower_rounds`."""

import time
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from coterie.engines.flower.events import tell

server = ServerApp()
client = ClientApp()

STEPS, STEP_SIZE = 10, 0.1
WORK = {"mlp": (784, 10), "linear": (20, 1)}  # features and outputs


def net(kind: str) -> nn.Module:
    if kind == "linear":
        return nn.Linear(20, 1).double()
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def rows(kind: str, number: int, n: int) -> tuple[Tensor, Tensor]:
    """Rows of one client.  [n, D], [n]"""
    draw = torch.Generator().manual_seed(number)
    features, outputs = WORK[kind]
    dtype = torch.float32 if outputs > 1 else torch.float64
    x = torch.randn(n, features, generator=draw, dtype=dtype)
    return x, torch.randint(outputs, (n,), generator=draw) if outputs > 1 else x[:, 0]


@server.main()
def serve(grid: Grid, context: Context) -> None:
    config = context.run_config
    tell("result", **fedavg(grid, str(config["kind"]), int(config["rounds"]), int(config["nodes"])))


def fedavg(grid: Grid, kind: str, rounds_: int, nodes: int) -> dict[str, Any]:
    """Train, and note when every round ended.  -> seconds of each, bytes of one"""
    stamps: list[float] = []

    def stamp(server_round: int, arrays: ArrayRecord) -> None:
        stamps.append(time.perf_counter())

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    arrays = ArrayRecord(net(kind).state_dict())
    strategy.start(grid, arrays, num_rounds=rounds_, train_config=ConfigRecord({"kind": kind}), evaluate_fn=stamp)
    size = sum(len(array.data) for array in arrays.values())
    return {"seconds": np.diff(stamps).tolist(), "bytes_up": nodes * size, "bytes_down": nodes * size}


@client.train()
def train(message: Message, context: Context) -> Message:
    kind = str(message.content["config"]["kind"])
    model = net(kind)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = _rows(kind, context)
    loss = nn.functional.mse_loss if kind == "linear" else nn.functional.cross_entropy
    optimiser = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        out = model(x)
        loss(out[:, 0] if kind == "linear" else out, y).backward()
        optimiser.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(reply), reply_to=message)


def _rows(kind: str, context: Context) -> tuple[Tensor, Tensor]:
    """The share that a SuperNode was dealt; in simulation, rows of its own."""
    if "data" not in context.node_config:
        return rows(kind, int(context.node_config["partition-id"]), 50)
    table = pq.read_table(str(context.node_config["data"]))
    features = [name for name in table.column_names if name not in ("site", "y")]
    x = np.stack([table[name].to_numpy() for name in features], 1)
    return torch.from_numpy(x), torch.from_numpy(table["y"].to_numpy())
