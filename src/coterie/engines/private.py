# SPDX-License-Identifier: Apache-2.0
"""Private state that is kept elsewhere: a handle to it, and the question that lets clients tell it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.documents import Said, checked
from coterie.engines.checkpoint import load_tensors
from coterie.errors import RunError
from coterie.limits import MOST_NAME
from coterie.protocol import Ask, Block, Stack, Tensors

__all__ = ["RemoteState", "kept_on_node", "reveal", "reveal_ask"]


@dataclass(frozen=True)
class RemoteState:
    """What clients keep on their nodes of the runs of an engine.

    Attributes
    ----------
    accepted : dict
        Node -> the name that it is kept under, and the number of the last answer that counted: what the node kept then is
        the state, and nothing later.
    fields : dict
        Run -> private fields, with what a client begins with.
    run : str
        Under which nodes keep it.
    clients : dict
        Node -> its clients, in the order in which it keeps what is theirs.
    """

    accepted: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    fields: Mapping[int, Tensors] = field(default_factory=dict)
    run: str = ""
    clients: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def record(self, name: str) -> dict[str, Any]:
        """Where each node keeps a field of the first run, for a run folder: see `kept_on_node`."""
        nodes = {
            node: {"store": store, "number": number, "clients": list(self.clients.get(node, ()))}
            for node, (store, number) in self.accepted.items()
        }
        return {"run": self.run, "field": name, "nodes": nodes}


_Part = Annotated[str, Field(max_length=MOST_NAME, pattern=r"^[^/\\\x00]+$")]  # of a path: no way out of the folder


class _Kept(Said):
    store: _Part
    number: Annotated[int, Field(ge=0)]
    clients: list[Annotated[str, Field(max_length=MOST_NAME)]]


class _Record(Said):
    run: _Part
    field: Annotated[str, Field(max_length=MOST_NAME)]
    nodes: dict[_Part, _Kept]

    @model_validator(mode="after")
    def _stays_inside(self) -> Self:
        if {".", ".."} & {self.run, *self.nodes, *(kept.store for kept in self.nodes.values())}:
            raise ValueError("a name leads out of the state folder")
        return self


def kept_on_node(state: Path, said: Mapping[str, Any]) -> tuple[list[str], Tensor]:
    """Read, at a node, what its clients keep of a run.  -> names, [m, ...]

    Parameters
    ----------
    state : Path
        The node's state folder, as its configuration names it.
    said : mapping
        What `RemoteState.record` says in the run folder.
    """
    names, parts = list[str](), list[Tensor]()
    record = checked(_Record, said, "what the run says of its nodes", "copy the whole folder of the run again")
    for node, kept in record.nodes.items():
        path = state / node / record.run / kept.store.replace(" ", "-") / f"{kept.number}.safetensors"
        if path.exists():
            tensors, _ = load_tensors(path)
            own = tensors.get(f"0/{record.field}")
            if own is None or own.ndim == 0 or len(own) != len(kept.clients):
                raise RunError(f"{path} does not hold what the clients of this run keep", "check the state folder")
            names += kept.clients
            parts.append(own)
    if len({part.shape[1:] for part in parts}) > 1 or len(set(names)) < len(names):
        raise RunError(f"{state} keeps parts that do not go together", "check the state folder")
    if not parts:
        raise RunError(
            f"{state} keeps nothing of this run", "name the folder that `state` names in this node's configuration"
        )
    return names, torch.cat(parts)


def reveal_ask(fresh: Mapping[str, Any]) -> Ask:
    """Ask every client for its private state; only for methods that say what reaches the server."""
    return Ask(reveal, {}, {name: Stack() for name in fresh}, fresh=fresh, work=0.0)


# -- on the client ----------------------------------------------------------------------------------------------------
def reveal(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Tell."""
    return dict(private), {}
