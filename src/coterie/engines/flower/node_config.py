# SPDX-License-Identifier: Apache-2.0
"""What a node's configuration says of the node itself; read in every process that Flower starts, so it imports little."""

import os
import re
from pathlib import Path

from flwr.app import Context
from flwr.supercore.utils import get_flwr_home

from coterie.errors import ConfigError

__all__ = ["idle_seconds", "is_warm", "node_name", "policy_file", "state_folder"]

_IDLE = 600.0  # seconds


def node_name(context: Context) -> str:
    """What the node is called, or its place among nodes, or its number, which changes with every start."""
    config = context.node_config
    if "name" in config:
        return re.sub(r"[^\w.-]", "-", str(config["name"]))
    return f"node-{config.get('partition-id', context.node_id)}"


def state_folder(context: Context) -> Path:
    """Where the node's clients keep what is theirs."""
    state = context.node_config.get("state")
    folder = Path(str(state)) if state else get_flwr_home() / "coterie"
    return folder / node_name(context)


def policy_file(context: Context) -> Path | None:
    """Where the node's owner says what a server may ask; None for what is allowed by default."""
    said = context.node_config.get("policy")
    return None if said is None else Path(str(said))


def is_warm(context: Context) -> bool:
    """Whether the node keeps a process from one message to the next: `warm=false` and COTERIE_WARM=0 say no."""
    if os.name != "posix" or os.environ.get("COTERIE_WARM", "1").lower() in ("0", "false", "no"):
        return False
    return str(context.node_config.get("warm", True)).lower() not in ("0", "false", "no")


def idle_seconds(context: Context) -> float:
    """How long such a process waits for a message before it ends."""
    said = context.node_config.get("warm-seconds", _IDLE)
    if isinstance(said, bool | str) or not 0 < said < float("inf"):
        raise ConfigError(f"warm-seconds is {said!r}", "give a number above 0, or switch off with warm=false")
    return float(said)
