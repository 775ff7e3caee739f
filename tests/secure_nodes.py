# SPDX-License-Identifier: Apache-2.0
"""Nodes in memory that add arrays securely, drop out when they are told to, and remember what the server has seen."""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.secure.fixed_point import Layout, Words, decode, encode
from coterie.secure.masks import signing_key
from coterie.secure.node import Node
from coterie.secure.server import Epoch

STEPS = ("keys", "letters", "masked", "unmasked")
QUESTION = b"what is asked"


@dataclass
class Seen:
    """All that the server gets to see of a sum."""

    parts: dict[str, Words] = field(default_factory=dict)  # before they are masked: not seen, but compared with
    masked: dict[str, Words] = field(default_factory=dict)
    letters: list[bytes] = field(default_factory=list)
    shares: list[bytes] = field(default_factory=list)


def made(n: int, **how: Any) -> dict[str, Node]:
    return {f"node-{i}": Node(f"node-{i}", signing_key(), **how) for i in range(n)}


def ready(nodes: Mapping[str, Node], sums: int = 1, gone: Mapping[str, str] | None = None) -> Epoch:
    """Exchange keys and shares; `gone` says at which step a node has dropped out."""
    gone = gone or {}
    epoch = Epoch(list(nodes), sums)
    keys = {name: node.advertise(epoch.epoch, sums) for name, node in nodes.items() if gone.get(name) != "keys"}
    said = epoch.neighbours(keys)
    letters = {name: nodes[name].share(one) for name, one in said.items() if gone.get(name) != "letters"}
    for name, own in epoch.letters(letters).items():
        if gone.get(name) not in ("masked",):
            nodes[name].receive(own)
    return epoch


def add_up(
    nodes: Mapping[str, Node], epoch: Epoch, arrays: Mapping[str, Mapping[str, np.ndarray]],
    gone: Mapping[str, str] | None = None, seen: Seen | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """One sum."""
    gone, seen = gone or {}, seen or Seen()
    number, layout = epoch.begin(), Layout(())
    members = [epoch.keys[place].name for place in sorted(epoch.members)]
    for name in members:
        layout, words = encode(arrays[name], len(nodes))
        seen.parts[name] = words
        if gone.get(name) != "masked":
            seen.masked[name] = nodes[name].mask(number, QUESTION, layout, words)
    present = epoch.present(seen.masked, layout)
    told = {name: nodes[name].unmask(number, who) for name, who in present.items() if gone.get(name) != "unmasked"}
    seen.shares += [share for own in told.values() for share in own.values()]
    return decode(layout, epoch.total(number, QUESTION, layout, seen.masked, told))


def drop(names: Collection[str], share: float, draw: random.Random) -> dict[str, str]:
    """Let some drop out, each before one of the steps."""
    some = draw.sample(sorted(names), int(share * len(names)))
    return {name: draw.choice(STEPS) for name in some}
