# SPDX-License-Identifier: Apache-2.0
"""From a Flower grid to clients that can be fitted: wait for nodes, ask who they are, and see that they go together."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from coterie.data.clients import Clients, held_out
from coterie.data.remote import RemoteRows
from coterie.data.schema import Schema
from coterie.engines.flower.journal import Journal
from coterie.engines.flower.link import Link, Node
from coterie.engines.flower.messages import Introduction
from coterie.engines.flower.preflight import agreed, rows_of
from coterie.engines.flower.registry import register_named
from coterie.engines.flower.server import OnFlower
from coterie.engines.flower.waits import retry_soon
from coterie.errors import RunError

__all__ = ["Nodes", "connect"]


class Nodes:
    """What remote rows hold on to: the way to their nodes."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @property
    def fingerprint(self) -> str:
        """What tells the nodes' rows from others."""
        return " ".join(node.said.fingerprint for node in self.link.nodes.values())

    def engine(self, rows: RemoteRows, **options: Any) -> OnFlower:
        """Make an engine for these rows."""
        return OnFlower(self.link, rows, **options)

    @contextmanager
    def remembering(self, folder: Path, about: dict[str, Any]) -> Iterator[None]:
        """Keep answers in a folder until all is done, and begin with those that are there: see `Journal`."""
        self.link.journal = Journal(folder, about)
        try:
            yield
            self.link.journal.remove()
        finally:
            self.link.journal = None


def connect(
    grid: Grid,
    *,
    run: str,
    nodes: int = 1,
    test_size: float = 0.2,
    new_clients: float = 0.0,
    few: int = 0,
    seed: int = 0,
    timeout: float = 600.0,
    wait: float = 120.0,
    modules: Mapping[str, nn.Module] | None = None,
    poll: float = 0.2,
    told: Callable[[str], None] = lambda asked: None,
) -> Clients:
    """Meet the nodes of a federation.

    Parameters
    ----------
    grid : Grid
        Of the server app.
    run : str
        The run's identity: the same when a run is continued, and a new one otherwise.
    nodes : int
        How many nodes there must be.
    test_size, new_clients, seed
        What is held out, as for `coterie.read`; every node holds out the rows that would have been held out here.
    few : int
        Of fewer clients none is held out.
    timeout : float
        Seconds that a question may take; who answers later is missing.
    wait : float
        Seconds to wait for the nodes.
    modules : mapping, optional
        Networks of one's own, by the names under which nodes have them.
    poll : float
        Seconds between two looks at what has come.
    told : callable
        Given what is asked, whenever something is asked.

    Returns
    -------
    Clients
        Whose rows are remote: they go where clients go.

    Raises
    ------
    RunError
        If nodes are missing or do not go together; it names the node.
    """
    for name, module in (modules or {}).items():
        register_named(name, module)
    retry_soon(sys.modules.get(type(grid).__module__))
    link = Link(grid, run, timeout=timeout, poll=poll, told=told)
    met = _met(link, nodes, wait)
    said = [met[address] for address in sorted(met, key=lambda a: met[a].node)]
    schema = agreed(said)
    address = {one.node: at for at, one in met.items()}
    link.settle({one.node: Node(one, address[one.node], _unless_own(schema, one)) for one in said})
    way = Nodes(link)
    train = rows_of(said, schema, way, "train")
    if "test" not in said[0].counts:
        new_clients = new_clients if train.n_clients >= few else 0.0
        return held_out(train, schema, test_size=test_size, new_clients=new_clients, seed=seed)
    test = rows_of(said, schema, way, "test")
    return Clients(schema, train, test if test.layout.n_rows else None)


def _met(link: Link, nodes: int, wait: float) -> dict[int, Introduction]:
    """Wait until enough nodes have said who they are, and everybody who is there has been heard."""
    deadline = time.monotonic() + wait
    while True:
        met = link.greet()
        if link.refusals:
            address, why = next(iter(link.refusals.items()))
            raise RunError(f"node {address} cannot take part: {why}", "see its log, and start it again")
        there = len(list(link.grid.get_node_ids()))
        if len(met) >= max(nodes, there):
            return met
        if time.monotonic() >= deadline:
            silent = f", and {there - len(met)} do not say who they are" if there > len(met) else ""
            raise RunError(
                f"{there} of {nodes} nodes are online after {wait:g} seconds{silent}", "start the nodes, or wait longer"
            )
        time.sleep(link.poll)


def _unless_own(schema: Schema, node: Introduction) -> str | None:
    return None if Schema.model_validate_json(node.schema) == schema else schema.model_dump_json()
