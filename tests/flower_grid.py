# SPDX-License-Identifier: Apache-2.0
"""A Flower grid within the process, for quick tests: real messages through the real encoding, and faults at will."""

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

import coterie.engines.flower.catalogue  # noqa: F401
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.engines.flower.client import NodeData, answer
from coterie.engines.flower.connect import connect
from coterie.engines.flower.policy_file import Individual, Policy
from coterie.engines.flower.server import OnFlower
from coterie.engines.private import kept_on_node

EVERYTHING = Policy(individual=Individual(updates=True))  # so that all methods run

Spoil = Callable[[Message, Message], Message | None]


class MemoryGrid(Grid):
    """Nodes by id; each message is answered when it is pulled for.

    `spoil[id]` changes a reply, or loses it (None); `delay[id]` is how many pulls a reply takes; `sent` and `replied` are
    all messages.
    """

    def __init__(self, nodes: Mapping[int, NodeData]) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.nodes = dict(nodes)
        self.spoil: dict[int, Spoil] = {}
        self.delay: dict[int, int] = {}
        self.sent: list[Message] = []
        self.replied: list[Message] = []
        self._numbers = count(1)
        self._waiting: dict[str, tuple[int, Message]] = {}  # pulls that are left

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.nodes)

    def drop(self, node: int) -> None:
        del self.nodes[node]

    def join(self, node: int, holding: NodeData) -> None:
        self.nodes[node] = holding

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = name = str(next(self._numbers))
            self.sent.append(message)
            self._waiting[name] = (self.delay.get(message.metadata.dst_node_id, 0), _travelled(message))
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for name in list(message_ids):
            left, message = self._waiting.get(name, (1, None))
            if message is None:
                continue
            self._waiting[name] = (left - 1, message)
            node = message.metadata.dst_node_id
            if left > 0 or node not in self.nodes:
                continue
            del self._waiting[name]
            reply: Message | None = answer(message, self.nodes[node])
            if node in self.spoil:
                reply = self.spoil[node](message, reply)
            if reply is not None:
                reply = _travelled(reply)
                self.replied.append(reply)
                found.append(reply)
        return found


def _travelled(message: Message) -> Message:
    """What is left of a message after Flower's encoding."""
    if message.has_error():
        return message
    content = recorddict_from_proto(recorddict_to_proto(message.content))
    return Message(content=content, metadata=message.metadata)


def plain_schema(rows: Ragged, classes: int = 0) -> Schema:
    """A schema for rows of numbers."""
    columns = [{"name": f"x{i}"} for i in range(int(np.prod(rows.shape)))]
    task = "none" if rows.y is None else "classification" if classes else "regression"
    return Schema.model_validate(
        {"client": "client", "target": None if rows.y is None else "y", "columns": columns, "task": task,
         "classes": [str(i) for i in range(classes)]}
    )  # fmt: skip


def dealt(rows: Ragged, folder: Path, *, nodes: int, classes: int = 0) -> dict[int, NodeData]:
    """Deal clients to nodes, one after the other in turn; node ids are not in the order of their names."""
    schema, holdings = plain_schema(rows, classes), {}
    for i in range(nodes):
        own = rows.only(np.arange(i, rows.n_clients, nodes))

        def load(_: Schema | None, own: Ragged = own) -> Clients:
            return Clients(schema, own)

        holdings[100 + (7 * i) % nodes] = NodeData(f"node-{i}", load, folder / f"node-{i}", policy=EVERYTHING)
    return holdings


def kept(engine: OnFlower, folder: Path, name: str) -> Tensor:
    """What clients keep on the nodes of `dealt`, by their names, as their nodes' owners would read it.  [M, ...]"""
    names, value = kept_on_node(folder, engine.private.record(name))
    return value[torch.from_numpy(np.argsort(names))]


def connected(
    rows: Ragged, folder: Path, *, nodes: int = 4, classes: int = 0, **options: Any
) -> tuple[Clients, MemoryGrid]:
    """Clients on the nodes of a grid in memory."""
    grid = MemoryGrid(dealt(rows, folder, nodes=nodes, classes=classes))
    how = {"run": "test", "nodes": nodes, "test_size": 0.0, "timeout": 30.0, "wait": 30.0, "poll": 0.001, **options}
    return connect(grid, **how), grid
