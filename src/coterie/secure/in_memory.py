# SPDX-License-Identifier: Apache-2.0
"""Nodes in memory that add up securely: for tests, and to know what it costs. Whoever has this process knows everything."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from coterie.secure.cost import Cost
from coterie.secure.fixed_point import Layout, Words, decode, encode
from coterie.secure.masks import signing_key
from coterie.secure.node import Node
from coterie.secure.server import Epoch

__all__ = ["SUMS", "Arrays", "NodesInMemory", "Step"]

Arrays = Mapping[str, NDArray[Any]]
Step = Literal["keys", "letters", "masked", "unmasked"]

SUMS = 16  # that an exchange of keys is for


@dataclass
class _Group:
    """Nodes that have exchanged keys."""

    nodes: dict[str, Node]
    epoch: Epoch


@dataclass
class NodesInMemory:
    """Nodes, and the server between them.

    Attributes
    ----------
    sums : int
        That an exchange of keys is for.
    away : callable
        Whether a node, by its name, has dropped out before a step.
    seen : callable, optional
        Told what the server gets: a word for what it is, the node, and the value.
    cost : Cost
        What it took.
    """

    sums: int = SUMS
    away: Callable[[str, Step], bool] = lambda name, step: False
    seen: Callable[[str, str, Any], None] = lambda what, name, value: None
    cost: Cost = field(default_factory=Cost)
    _signers: dict[str, bytes] = field(default_factory=dict, repr=False)
    _groups: dict[tuple[str, ...], _Group] = field(default_factory=dict, repr=False)

    def total(self, question: bytes, parts: Mapping[str, Arrays]) -> tuple[dict[str, NDArray[Any]], list[str]]:
        """Add arrays of nodes.  -> the sums, and the nodes that are in them"""
        begin = time.perf_counter()
        try:
            return self._total(question, parts)
        finally:
            self.cost.seconds += time.perf_counter() - begin

    def threshold(self, names: tuple[str, ...]) -> int:
        """How many of some nodes are in their next sum at least: it is with as many that keys are exchanged."""
        return self._group(names).epoch.threshold

    def _total(self, question: bytes, parts: Mapping[str, Arrays]) -> tuple[dict[str, NDArray[Any]], list[str]]:
        cost, group = self.cost, self._group(tuple(parts))
        epoch, number, layout = group.epoch, group.epoch.begin(), Layout(())
        masked: dict[str, Words] = {}
        members = [epoch.keys[place].name for place in sorted(epoch.members)]
        for name in members:
            if not self.away(name, "masked"):
                layout, words = encode(parts[name], len(group.nodes))
                masked[name] = group.nodes[name].mask(number, question, layout, words)
                self.seen("masked", name, masked[name])
        present = epoch.present(masked, layout)
        told = {
            name: group.nodes[name].unmask(number, who)
            for name, who in present.items()
            if not self.away(name, "unmasked")
        }
        for name, shares in told.items():
            self.seen("shares", name, shares)
        found = decode(layout, epoch.total(number, question, layout, masked, told))
        cost.sums += 1
        cost.messages += 1
        cost.bytes_up += sum(words.nbytes for words in masked.values())
        cost.bytes_up += sum(40 * len(shares) for shares in told.values())
        cost.bytes_down += sum(8 * len(who) for who in present.values())
        cost.dropped.update(name for name in parts if name not in masked)
        return found, sorted(masked)

    def _group(self, names: tuple[str, ...]) -> _Group:
        """Nodes with keys for another sum; keys are exchanged where there are none left."""
        known = self._groups.get(names)
        if known is not None and known.epoch.left and len(known.epoch.members) == len(names):
            return known
        nodes = {name: Node(name, self._signers.setdefault(name, signing_key())) for name in names}
        epoch, cost = Epoch(names, self.sums), self.cost
        keys = {
            name: node.advertise(epoch.epoch, self.sums) for name, node in nodes.items() if not self.away(name, "keys")
        }
        said = epoch.neighbours(keys)
        letters = {name: nodes[name].share(one) for name, one in said.items() if not self.away(name, "letters")}
        delivered = epoch.letters(letters)
        for name, own in delivered.items():
            nodes[name].receive(own)
        for name, sent in (*keys.items(), *letters.items()):
            self.seen("keys" if name in keys and sent is keys[name] else "letters", name, sent)
        cost.exchanges += 1
        cost.messages += 2
        cost.nodes, cost.threshold = max(cost.nodes, len(names)), max(cost.threshold, epoch.threshold)
        cost.bytes_up += sum(one.size for one in keys.values())
        cost.bytes_up += sum(4 + len(letter) for own in letters.values() for letter in own.values())
        cost.bytes_down += sum(one.size for one in said.values())
        cost.bytes_down += sum(4 + len(letter) for own in delivered.values() for letter in own.values())
        self._groups[names] = _Group(nodes, epoch)
        return self._groups[names]
