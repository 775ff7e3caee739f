# SPDX-License-Identifier: Apache-2.0
"""One node of four tries to stop the server, or to count for more than it has: the others must be able to go on.

Messages go through Flower's encoding and the code of real nodes, within this process.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from tests.flower_grid import MemoryGrid, Spoil, dealt

from benchmarks.attacks import AttackSucceededError
from coterie.algorithms.fedavg import fedavg
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.engines.drive import Finished
from coterie.engines.engine_for import engine_for
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.client import NodeData
from coterie.engines.flower.connect import connect
from coterie.engines.flower.messages import Answers, Introduction, Refusal, Reply
from coterie.engines.flower.wire import from_records, to_records
from coterie.local import Training
from coterie.models import linear_regression

__all__ = ["ATTACKS"]

_NODES, _CLIENTS, _BAD = 4, 12, "node-1"


def _rows() -> Ragged:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(_CLIENTS, 8, 3, generator=draw, dtype=torch.float64)
    return Ragged.from_blocks(x, x.sum(-1))


@contextmanager
def _grid() -> Iterator[tuple[MemoryGrid, int]]:
    """Four nodes, and the address of the one that is bad."""
    with tempfile.TemporaryDirectory() as folder:
        grid = MemoryGrid(dealt(_rows(), Path(folder), nodes=_NODES))
        yield grid, next(address for address, node in grid.nodes.items() if node.name == _BAD)


def _met(grid: MemoryGrid, nodes: int = _NODES) -> Clients:
    return connect(grid, run="attack", nodes=nodes, test_size=0.0, timeout=2.0, wait=0.5, poll=0.01)


def _trained(clients: Clients) -> Finished:
    def program(state: Any) -> Any:
        return fedavg(
            state, model=linear_regression(3), rounds=2, step_size=0.1, seed=0, training=Training(1), weighting="rows"
        )

    return engine_for(clients.train).run([program])


def _goes_on(spoil: Spoil) -> str:
    """Let one node say something else, and train with whoever is left.  -> why it was left out"""
    with _grid() as (grid, bad), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        grid.spoil[bad] = spoil
        clients = _met(grid)
        counted = {done.participants for done in _trained(clients).rounds}
        said = [str(one.message) for one in told if issubclass(one.category, NodeWarning)]
        if counted - {0} != {_CLIENTS * (_NODES - 1) // _NODES}:
            raise AttackSucceededError(f"{counted} clients count")
        if not said:
            raise AttackSucceededError("nobody was told")
        return f"{said[0]} ({max(counted)} of {_CLIENTS} clients go on)"


# -- the first question -----------------------------------------------------------------------------------------------
def _introduced(change: Callable[[Introduction], Introduction]) -> Callable[[], str]:
    """A node that introduces itself as something else."""

    def spoil(message: Message, reply: Message) -> Message:
        said = from_records(reply.content)
        return Message(to_records(change(said) if isinstance(said, Introduction) else said), reply_to=message)

    return lambda: _goes_on(spoil)


def _saying(document: str, data: bytes | None = None) -> Callable[[], str]:
    """A node that answers everything with this document and these bytes of tensors."""

    def spoil(message: Message, reply: Message) -> Message:
        good = to_records(None)["coterie-document"]["tensors"]
        record = ConfigRecord({"json": document, "tensors": good if data is None else data})
        return Message(RecordDict({"coterie-document": record}), reply_to=message)

    return lambda: _goes_on(spoil)


def _header(shape: list[int], end: int) -> bytes:
    said = json.dumps({"0": {"dtype": "F64", "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(said).to_bytes(8, "little") + said


def _with_levels(said: Introduction, n: int) -> Introduction:
    schema = Schema.model_validate_json(said.schema)
    column = schema.columns[0].model_copy(update={"kind": "categorical", "levels": tuple(f"{i:05d}" for i in range(n))})
    other = schema.model_copy(update={"columns": (column, *schema.columns[1:])})
    row = {**said.row, "x": torch.zeros(0, other.n_features, dtype=torch.float64)}
    return replace(said, schema=other.model_dump_json(), row=row)


def _levels_within_the_bound() -> str:
    """Invent levels in a column that is a category everywhere: a thousand, of twenty columns, none above the bound."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        nodes = {}
        for i in range(_NODES):
            n = 95 if i == 1 else 2
            columns = [
                {"name": f"c{j}", "kind": "categorical", "levels": [f"{k:03d}" for k in range(n)]} for j in range(20)
            ]
            schema = Schema.model_validate(
                {"client": "client", "target": "y", "columns": columns, "task": "regression"}
            )
            x = torch.zeros(1, 4, schema.n_features, dtype=torch.float64)
            own = Clients(schema, Ragged.from_blocks(x, x.sum(-1), np.array([f"client {i}"])))
            nodes[i] = NodeData(f"node-{i}", lambda _, own=own: own, Path(folder) / str(i))
        clients = _met(MemoryGrid(nodes))
        if clients.schema.n_features != 40:
            raise AttackSucceededError(f"rows have {clients.schema.n_features} features")
        return str(told[0].message)


def _does_not_answer() -> str:
    return _goes_on(lambda message, reply: None)


def _refuses() -> str:
    return _goes_on(lambda message, _: Message(to_records(Refusal(_BAD, "I will not", "")), reply_to=message))


MALFORMED: dict[str, Callable[[Introduction], Introduction]] = {
    "no columns": lambda said: replace(said, schema="{}"),
    "columns that are no JSON": lambda said: replace(said, schema="["),
    "no names": lambda said: replace(said, names=None),  # type: ignore[arg-type]
    "numbers for names": lambda said: replace(said, names=(1, 2, 3)),  # type: ignore[arg-type]
    "no counts": lambda said: replace(said, counts={}),
    "counts below zero": lambda said: replace(said, counts={"train": torch.tensor([-5, 8, 8])}),
    "counts of others": lambda said: replace(said, counts={"train": torch.ones(9, dtype=torch.int64)}),
    "versions of nothing": lambda said: replace(said, versions={"no such package": "1"}),
    "no versions": lambda said: replace(said, versions=None),  # type: ignore[arg-type]
    "no row": lambda said: replace(said, row={}),
    "no client functions": lambda said: replace(said, steps=None),  # type: ignore[arg-type]
}


def _malformed() -> str:
    """All of them, one after the other."""
    said = [f"{name}: {_introduced(change)()}" for name, change in MALFORMED.items()]
    return f"{len(said)} of {len(MALFORMED)}, the last: {said[-1]}"


# -- answers ----------------------------------------------------------------------------------------------------------
def _answering(change: Callable[[str, str, torch.Tensor], torch.Tensor]) -> Callable[[], str]:
    """A node that changes numbers in its answers: given the field, the part of its fold, and the value."""

    def changed(said: Answers) -> Answers:
        parts = {
            run: {
                field: {key: change(field, key, value) for key, value in part.items()} for field, part in fields.items()
            }
            for run, fields in said.parts.items()
        }
        return replace(said, parts=parts)

    def spoil(message: Message, reply: Message) -> Message:
        said = from_records(reply.content)
        if isinstance(said, Reply):
            said = replace(said, answers=tuple(map(changed, said.answers)))
        return Message(to_records(said), reply_to=message)

    return lambda: _goes_on(spoil)


def _weights(value: float) -> Callable[[], str]:
    return _answering(lambda field, key, was: torch.full_like(was, value) if key == "weight" else was)


def _rows_claimed(field: str, key: str, was: torch.Tensor) -> torch.Tensor:
    return torch.full_like(was, 10**12) if field == "n" else was


def _lengths(how_long: int, how_many: int) -> Callable[[], str]:
    """A node that says how long its clients' updates are: everybody's bounds follow from that."""

    def spoil(message: Message, reply: Message) -> Message:
        said = from_records(reply.content)
        if isinstance(said, Reply):
            lie = torch.tensor([[how_long, how_many]])
            told = [replace(one, lengths={run: {"update": lie} for run in one.parts}) for one in said.answers]
            said = replace(said, answers=tuple(told))
        return Message(to_records(said), reply_to=message)

    return lambda: _goes_on(spoil)


# -- impostors --------------------------------------------------------------------------------------------------------
def _takes_the_name_of_an_absent_node() -> str:
    with _grid() as (grid, bad), tempfile.TemporaryDirectory() as elsewhere:
        clients = _met(grid)
        engine = engine_for(clients.train)
        true = grid.nodes.pop(bad)
        grid.join(999, replace(true, folder=Path(elsewhere)))  # all that the node has but its key
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            engine.link.greet()
            engine.link.greet()
        if engine.link.nodes[_BAD].address is not None:
            raise AttackSucceededError("the impostor is asked in place of the node")
        grid.drop(999)
        grid.join(1000, true)
        engine.link.greet()
        if engine.link.nodes[_BAD].address != 1000:
            raise AttackSucceededError("the node itself is not let in again")
        return f"{told[0].message}; the node itself is let in under its new address"


def _repeats_a_proof() -> str:
    """Show the introduction of an absent node, proof and all, from another address."""
    with _grid() as (grid, bad):
        clients = _met(grid)
        engine = engine_for(clients.train)
        heard = next(r for r in grid.replied if getattr(from_records(r.content), "node", "") == _BAD)
        true = grid.nodes.pop(bad)
        grid.join(999, true)
        grid.spoil[999] = lambda message, _: Message(heard.content, reply_to=message)
        engine.link.greet()
        engine.link.greet()
        if engine.link.nodes[_BAD].address is not None:
            raise AttackSucceededError("an old proof is as good as a new one")
        return engine.link.refusals[999]


def _takes_a_name_between_two_runs() -> str:
    """Be there under the name of a node when a run is continued."""
    with (
        _grid() as (grid, bad),
        tempfile.TemporaryDirectory() as elsewhere,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        known = [node.said for node in _met(grid).train.federation.link.nodes.values()]
        grid.nodes[bad] = replace(grid.nodes[bad], folder=Path(elsewhere))
        again = connect(grid, run="attack", nodes=_NODES, test_size=0.0, timeout=2.0, wait=0.5, poll=0.01, known=known)
        if again.train.federation.link.nodes[_BAD].address is not None:
            raise AttackSucceededError("the impostor takes part")
        return str(told[0].message)


def _claims_everybodys_clients() -> str:
    everybody = tuple(sorted(_rows().names.tolist()))
    counts = {"train": torch.full((_CLIENTS,), 8)}
    return _introduced(lambda said: replace(said, names=everybody, counts=counts))()


ATTACKS: dict[str, Callable[[], str]] = {
    "a document that is nested 200,000 deep": _saying("[" * 200_000 + "]" * 200_000),
    "a header that claims 2^45 numbers": _saying("[]", _header([1 << 45], 8 << 45)),
    "a header that claims 2^45 numbers of no bytes": _saying("[]", _header([1 << 45, 0], 0)),
    "a header that claims to be 2^45 bytes long": _saying("[]", (1 << 45).to_bytes(8, "little")),
    "eleven malformed introductions": _malformed,
    "a row of 186 GiB": _introduced(
        lambda said: replace(said, row={**said.row, "x": torch.zeros(0, 25_000_000_000, dtype=torch.float64)})
    ),
    "names of 186 GiB": _introduced(lambda said: replace(said, names=("a" * 4_000_000, "b", "c"))),
    "3,000 invented levels": _introduced(lambda said: _with_levels(said, 3_000)),
    "1,860 invented levels of many columns": _levels_within_the_bound,
    "weights of 1e12": _weights(1e12),
    "weights below zero": _weights(-1.0),
    "weights that are no numbers": _weights(float("nan")),
    "10^12 rows": _answering(_rows_claimed),
    "an update of length 2^(2^61)": _lengths(1 << 62, 1),
    "10^12 clients whose updates are long": _lengths(40, 10**12),
    "a node that refuses the first question": _refuses,
    "a node that never answers": _does_not_answer,
    "a node that claims everybody's clients": _claims_everybodys_clients,
    "an impostor of an absent node": _takes_the_name_of_an_absent_node,
    "an impostor with an old proof": _repeats_a_proof,
    "an impostor when a run is continued": _takes_a_name_between_two_runs,
}
