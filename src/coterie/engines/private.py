# SPDX-License-Identifier: Apache-2.0
"""Private state that is kept elsewhere: a handle to it, and the question that lets clients tell it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.engines.checkpoint import load_tensors
from coterie.errors import RunError
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
    for node, kept in said["nodes"].items():
        path = state / node / said["run"] / kept["store"].replace(" ", "-") / f"{kept['number']}.safetensors"
        if path.exists():
            tensors, _ = load_tensors(path)
            names += kept["clients"]
            parts.append(tensors[f"0/{said['field']}"])
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
