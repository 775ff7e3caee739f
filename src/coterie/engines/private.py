# SPDX-License-Identifier: Apache-2.0
"""Private state that is kept elsewhere: a handle to it, and the question that lets clients tell it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.protocol import Ask, Block, Stack, Tensors

__all__ = ["RemoteState", "reveal", "reveal_ask"]


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
    """

    accepted: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    fields: Mapping[int, Tensors] = field(default_factory=dict)


def reveal_ask(fresh: Mapping[str, Any]) -> Ask:
    """Ask every client for its private state; only for methods that say what reaches the server."""
    return Ask(reveal, {}, {name: Stack() for name in fresh}, fresh=fresh, work=0.0)


# -- on the client ----------------------------------------------------------------------------------------------------
def reveal(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Tell."""
    return dict(private), {}
