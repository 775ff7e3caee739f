# SPDX-License-Identifier: Apache-2.0
"""The server's part of secure sums: keys are exchanged with all nodes that are asked, and a sum takes one message more."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.engines.flower.link import Called, Link
from coterie.engines.flower.messages import Batch, Reply, Sealed, Secure
from coterie.engines.flower.secure_node import as_bytes, as_keys, as_tensor, public_keys, question_of
from coterie.errors import RunError
from coterie.secure.cost import Cost
from coterie.secure.fixed_point import Layout, Words, decode
from coterie.secure.in_memory import SUMS
from coterie.secure.server import Epoch

__all__ = ["FlowerSums"]


@dataclass
class FlowerSums:
    """Secure sums over the nodes of a federation, with the keys that were exchanged last.

    Attributes
    ----------
    link : Link
        The way to the nodes.
    cost : Cost
        What it took.
    failed : dict
        Node -> why it did not take part in the last sum, or told no shares.
    """

    link: Link
    cost: Cost = field(default_factory=Cost)
    failed: dict[str, str] = field(default_factory=dict)
    _epoch: Epoch | None = None
    _letters: dict[str, dict[int, bytes]] = field(default_factory=dict)  # not yet handed over

    def total(
        self, batches: Mapping[str, Batch], layout: Layout, check: Callable[[Reply], None], patience: float
    ) -> tuple[dict[str, NDArray[Any]], Called]:
        """Put questions to nodes and add up what they say.  -> the sums, and whose parts are in them

        Raises
        ------
        RunError
            Where fewer nodes are left than it takes.
        """
        self.failed = {}
        epoch = self._ready(list(batches), patience)
        number, begin = epoch.begin(), time.perf_counter()
        members = {epoch.keys[place].name for place in epoch.members}
        asked = {
            name: replace(batch, secure=self._mask(epoch, number, name))
            for name, batch in batches.items()
            if name in members
        }
        question = question_of(next(iter(asked.values())).questions)
        self._letters = {}

        def fits(reply: Reply) -> None:
            check(reply)
            if reply.sealed is None or Layout.read(reply.sealed.layout) != layout:
                raise RunError("its part of a secure sum is of other arrays than were asked for")
            _words(reply.sealed, layout)

        called = self._call(asked, fits, patience)
        masked = {
            name: _words(reply.sealed, layout) for name, reply in called.answers.items() if reply.sealed is not None
        }
        present = epoch.present(masked, layout)
        self.cost.dropped.update(name for name in batches if name not in masked)
        unmask = {
            name: Batch(
                (), Secure("unmask", self.link.run, epoch.epoch.hex(), number=number, places=tuple(sorted(who)))
            )
            for name, who in present.items()
        }
        told = self._call(unmask, _has_letters, patience)
        shares = {name: _by_place(reply.sealed) for name, reply in told.answers.items() if reply.sealed is not None}
        found = decode(layout, epoch.total(number, question, layout, {name: masked[name] for name in present}, shares))
        self.cost.sums += 1
        self.cost.messages += 1
        self.cost.seconds += time.perf_counter() - begin
        self.cost.bytes_up += sum(words.nbytes for words in masked.values()) + sum(
            40 * len(own) for own in shares.values()
        )
        self.cost.bytes_down += sum(8 * len(who) for who in present.values())
        return found, Called(called.answers, dict(self.failed))

    def _mask(self, epoch: Epoch, number: int, name: str) -> Secure:
        letters = self._letters.get(name)
        if letters is None:
            return Secure("mask", self.link.run, epoch.epoch.hex(), number=number)
        rows = torch.stack([as_tensor(letter) for letter in letters.values()])
        return Secure("mask", self.link.run, epoch.epoch.hex(), number=number, places=tuple(letters), letters=rows)

    def _ready(self, names: list[str], patience: float) -> Epoch:
        """An exchange of keys with these nodes that has a sum left."""
        known = self._epoch
        if (
            known is not None
            and known.left
            and not self._letters
            and sorted(known.names) == sorted(names)
            and len(known.members) == len(names)
        ):
            return known
        run, epoch = self.link.run, Epoch(sorted(names), SUMS)
        word = epoch.epoch.hex()
        called = self._call({n: Batch((), Secure("keys", run, word, sums=SUMS)) for n in names}, _has_keys, patience)
        keys = {
            n: as_keys(reply.sealed.keys) for n, reply in called.answers.items() if reply.sealed and reply.sealed.keys
        }
        said = epoch.neighbours(keys)
        asked = {}
        for name, near in said.items():
            others = tuple(public_keys(one, place) for place, one in near.keys.items())
            asked[name] = Batch((), Secure(
                "letters", run, word, sums=SUMS, place=near.place, n_nodes=near.n_nodes, threshold=near.threshold,
                neighbours=others,
            ))  # fmt: skip
        called = self._call(asked, _has_letters, patience)
        letters = {n: _by_place(reply.sealed) for n, reply in called.answers.items() if reply.sealed is not None}
        self._letters = epoch.letters(letters)
        self._epoch, cost = epoch, self.cost
        cost.exchanges += 1
        cost.messages += 2
        cost.nodes, cost.threshold = max(cost.nodes, len(names)), max(cost.threshold, epoch.threshold)
        cost.bytes_up += sum(one.size for one in keys.values())
        cost.bytes_up += sum(4 + len(letter) for own in letters.values() for letter in own.values())
        cost.bytes_down += sum(one.size for one in said.values())
        cost.bytes_down += sum(4 + len(letter) for own in self._letters.values() for letter in own.values())
        return epoch

    def _call(self, batches: Mapping[str, Batch], check: Callable[[Reply], None], patience: float) -> Called:
        sizes = dict.fromkeys(batches, 1)
        called = self.link.call(batches, sizes, len(batches), check, patience)
        self.failed |= called.failed
        return called


def _has_keys(reply: Reply) -> None:
    if reply.sealed is None or reply.sealed.keys is None:
        raise RunError("it gives no keys for a secure sum")
    as_keys(reply.sealed.keys)


def _has_letters(reply: Reply) -> None:
    if reply.sealed is None:
        raise RunError("it does not answer for a secure sum")
    _by_place(reply.sealed)


def _by_place(sealed: Sealed) -> dict[int, bytes]:
    if sealed.letters is None or sealed.letters.dim() != 2 or len(sealed.letters) != len(sealed.places):
        raise RunError("it tells no letters or shares of a secure sum")
    return {place: as_bytes(one) for place, one in zip(sealed.places, sealed.letters, strict=True)}


def _words(sealed: Sealed, layout: Layout) -> Words:
    if sealed.words is None or sealed.words.dtype != torch.int64 or sealed.words.shape != (layout.n_words,):
        raise RunError("its part of a secure sum has another length than was agreed")
    return sealed.words.numpy().view(np.uint64)
