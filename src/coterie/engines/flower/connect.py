# SPDX-License-Identifier: Apache-2.0
"""From a Flower grid to clients that can be fitted: wait for nodes, ask who they are, and see that they go together."""

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from coterie.data.clients import Clients, held_out
from coterie.data.remote import RemoteRows
from coterie.data.schema import Schema
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.journal import Journal
from coterie.engines.flower.link import Link, Node, same_rows
from coterie.engines.flower.messages import Introduction
from coterie.engines.flower.preflight import left_out, rows_of, schema_of
from coterie.engines.flower.registry import register_named
from coterie.engines.flower.server import OnFlower
from coterie.engines.flower.waits import retry_soon
from coterie.errors import RunError

__all__ = ["Nodes", "connect"]

_LEAST = 0.5  # of the nodes that were asked for: a run on fewer is not what was asked for


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
    known: Sequence[Introduction] = (),
    told: Callable[[str], None] = lambda asked: None,
    waits: Callable[[], str] = lambda: "run it again",
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
    known : sequence of Introduction
        The nodes with which a run that is continued was begun: nobody else takes part, and who of them is away is waited for
        no longer than the others.
    told : callable
        Given what is asked, whenever something is asked.
    waits : callable
        Called when a node's owner must approve the run first; says how it is repeated under the same identity.

    Returns
    -------
    Clients
        Whose rows are remote: they go where clients go.

    Raises
    ------
    RunError
        If nodes are missing, or nobody can tell which of them are right; it names the node. Single nodes that refuse, do not
        answer, or say what cannot be, are left out with a `NodeWarning`.
    """
    for name, module in (modules or {}).items():
        register_named(name, module)
    retry_soon(sys.modules.get(type(grid).__module__))
    link = Link(grid, run, timeout=timeout, poll=poll, told=told)
    met = _met(link, nodes, wait, {one.node for one in known}, waits)
    there = _together(_recognised(known, met) if known else met, nodes, _unapproved(link, waits))
    said = sorted(known or there.values(), key=lambda one: one.node)
    schema = schema_of(said)
    link.settle({one.node: Node(one, _address(there, one), _unless_own(schema, one)) for one in said})
    way = Nodes(link)
    train = rows_of(said, schema, way, "train")
    if "test" not in said[0].counts:
        new_clients = new_clients if train.n_clients >= few else 0.0
        return held_out(train, schema, test_size=test_size, new_clients=new_clients, seed=seed)
    test = rows_of(said, schema, way, "test")
    return Clients(schema, train, test if test.layout.n_rows else None)


def _met(link: Link, nodes: int, wait: float, expected: set[str], waits: Callable[[], str]) -> dict[int, Introduction]:
    """Wait until enough nodes are there and everybody has been heard; who refuses or is silent is left out, and named.

    Who waits for its owner's approval is asked again until the time is over.
    """
    deadline = time.monotonic() + wait
    while True:
        met = link.greet()
        if link.waiting:
            waits()
        there = set(link.grid.get_node_ids())
        refused = {address: why for address, why in link.refusals.items() if address in there}
        silent = there - met.keys() - refused.keys()
        lacking = expected - {said.node for said in met.values()}
        if len(there) >= nodes and not silent and not lacking:
            break
        if time.monotonic() >= deadline:
            if len(there) < nodes and not expected:
                raise RunError(
                    f"{len(there)} of {nodes} nodes are online after {wait:g} seconds",
                    "start the nodes, or wait longer",
                )
            break
        time.sleep(link.poll)
    refused |= dict.fromkeys(silent - link.waiting.keys(), f"it has not said who it is in {wait:g} seconds")
    said = [why for address, why in sorted(link.waiting.items()) if address in silent]
    said += [f"node {address} cannot take part: {why}" for address, why in sorted(refused.items())]
    if not met:
        hint = _unapproved(link, waits) or "see its log, and start it again"
        raise RunError(said[0] if said else "no node is online", hint)
    _leave_out(said)
    return met


def _unapproved(link: Link, waits: Callable[[], str]) -> str:
    """What to do where nodes' owners have not approved the run; nothing where they have."""
    if not link.waiting:
        return ""
    return f"the owner of a node approves it with `coterie node approve {link.run}`; then {waits()}"


def _together(met: Mapping[int, Introduction], nodes: int, unapproved: str) -> dict[int, Introduction]:
    """Those who go together; half of the nodes that were asked for must be left."""
    order = sorted(met, key=lambda address: (met[address].node, address))
    out = left_out([met[address] for address in order])
    if len(order) - len(out) < max(1, math.ceil(_LEAST * nodes)):
        left = f"{len(order) - len(out)} of {nodes} nodes can take part"
        others = (
            "others wait for the approval of their owners" if unapproved else "the others have not said who they are"
        )
        raise RunError(f"{left}: {next(iter(out.values()), others)}", unapproved or "make nodes agree")
    _leave_out(out.values())
    return {address: met[address] for place, address in enumerate(order) if place not in out}


def _recognised(known: Sequence[Introduction], met: Mapping[int, Introduction]) -> dict[int, Introduction]:
    """Those with whom a run was begun: of their names, with their keys, and with the rows that they had."""
    before, there = {one.node: one for one in known}, dict[int, Introduction]()
    for address, said in met.items():
        one = before.get(said.node)
        if one is None:
            _leave_out([f"node '{said.node}' cannot take part: it was not there when the run began"])
        elif said.public != one.public:
            _leave_out(
                [f"node '{said.node}' cannot take part: it does not have the key that it had when the run began"]
            )
        elif not same_rows(one, said):
            _leave_out([f"node '{said.node}' cannot take part: it has other clients or rows than when the run began"])
        elif said.node not in {other.node for other in there.values()}:
            there[address] = said
    if not there:
        raise RunError(
            "no node is there with which the run was begun, or its data has changed", "start them, or a new run"
        )
    _leave_out(f"node '{name}' is away" for name in sorted(before.keys() - {said.node for said in there.values()}))
    return there


def _address(there: Mapping[int, Introduction], one: Introduction) -> int | None:
    return next((address for address, said in there.items() if said.node == one.node), None)


def _leave_out(why: Iterable[str]) -> None:
    for said in why:
        warnings.warn(f"{said}: the run goes on without it", NodeWarning, stacklevel=3)


def _unless_own(schema: Schema, node: Introduction) -> str | None:
    return None if Schema.model_validate_json(node.schema) == schema else schema.model_dump_json()
