# SPDX-License-Identifier: Apache-2.0
"""The server's side of secure sums: pass keys and letters on, add masked parts, and take off what is left of the masks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.errors import RunError
from coterie.secure import graph, shamir
from coterie.secure.fixed_point import Layout, Words, add, subtract
from coterie.secure.masks import KEY, agreed, committed, derived, is_signed, mask, private_key, public_of
from coterie.secure.messages import EPOCH, MOST_SUMS, Keys, Neighbours, check_keys, letter_size
from coterie.secure.node import purpose

__all__ = ["Epoch", "new_epoch"]

_AGAIN = "start more nodes, or ask again when those that are away are back"


def new_epoch() -> bytes:
    """Name an epoch."""
    return os.urandom(EPOCH)


@dataclass
class Epoch:
    """Sums over some nodes, with keys that were exchanged once.

    Attributes
    ----------
    names : sequence of str
        The nodes that are asked for keys.
    sums : int
        That the keys are for.
    """

    names: Sequence[str]
    sums: int
    epoch: bytes = field(default_factory=new_epoch)
    keys: list[Keys] = field(default_factory=list)  # by place
    hood: list[list[int]] = field(default_factory=list)  # place -> neighbours
    members: set[int] = field(default_factory=set)  # places of those who have shared their secrets
    used: int = 0  # sums that were begun

    def __post_init__(self) -> None:
        if not 1 <= self.sums <= MOST_SUMS or len(set(self.names)) < len(self.names):
            raise RunError(f"keys cannot be made for {self.sums} sums", f"ask for at most {MOST_SUMS}")

    @property
    def left(self) -> int:
        """Sums that the keys are still good for."""
        return self.sums - self.used

    def neighbours(self, said: Mapping[str, object]) -> dict[str, Neighbours]:
        """Take nodes' keys, and say to each who its neighbours are.

        Keys that are none, or not signed, are as good as none.
        """
        good: list[Keys] = []
        for name in self.names:
            one = said.get(name)
            try:
                check_keys(one, self.sums)
            except RunError:
                continue
            assert isinstance(one, Keys)
            if one.name == name and is_signed(one.signer, one.signature, one.signed(self.epoch)):
                good.append(one)
        least = max(2, graph.threshold(len(self.names)))
        if len(good) < least:
            raise RunError(f"{len(good)} of {len(self.names)} nodes have given keys; a sum takes {least}", _AGAIN)
        self.keys, self.hood = good, graph.draw_graph(len(good))
        return {
            one.name: Neighbours(
                place, {j: good[j] for j in self.hood[place]}, len(good), self._threshold(place)
            )
            for place, one in enumerate(good)
        }  # fmt: skip

    def letters(self, said: Mapping[str, Mapping[int, bytes]]) -> dict[str, dict[int, bytes]]:
        """Take nodes' letters to their neighbours, and deliver them.  -> node: letters by the sender's place"""
        size = letter_size(self.sums)
        sent = {}
        for place, one in enumerate(self.keys):
            own = said.get(one.name)
            if own is not None and own.keys() == set(self.hood[place]) and all(
                isinstance(letter, bytes) and len(letter) == size for letter in own.values()
            ):  # fmt: skip
                sent[place] = own
        self.members = set(sent)
        self._check_anybody(self.members, "have shared their keys")
        for place in sent:
            self._check_enough(place, self.members, "have shared their keys")
        return {
            self.keys[place].name: {j: sent[j][place] for j in self.hood[place] if j in sent} for place in sorted(sent)
        }

    def begin(self) -> int:
        """Begin another sum.  -> its number"""
        if not self.left:
            raise RunError("the keys of this epoch are used up", "exchange keys again")
        self.used += 1
        return self.used - 1

    def present(self, masked: Mapping[str, Words], layout: Layout) -> dict[str, set[int]]:
        """Say to each node whose parts have come who else's have, of its neighbours; stop where too few have."""
        there = {
            place
            for place in self.members
            if (part := masked.get(self.keys[place].name)) is not None
            and part.dtype == np.uint64
            and part.shape == (layout.n_words,)
        }
        self._check_anybody(there, "have answered")
        for place in self.members & ({j for i in there for j in self.hood[i]} | there):
            self._check_enough(place, there, "have answered")
        return {self.keys[i].name: {j for j in (i, *self.hood[i]) if j in there} for i in sorted(there)}

    def total(
        self, number: int, question: bytes, layout: Layout, masked: Mapping[str, Words],
        told: Mapping[str, Mapping[int, bytes]],
    ) -> Words:  # fmt: skip
        """Add masked parts and take the masks off.

        Parameters
        ----------
        masked : mapping
            Of those to whom `present` has spoken.
        told : mapping
            Shares by the place of whom they are of, from each node that still answers.
        """
        place_of = {one.name: place for place, one in enumerate(self.keys)}
        there = {place_of[name] for name in masked}
        about = purpose(self.epoch, number, question, layout)
        total = np.zeros(layout.n_words, dtype=np.uint64)
        for name in sorted(masked):
            add(layout, total, masked[name])
        holders = {place_of[name]: shares for name, shares in told.items() if place_of.get(name) in there}
        for place in sorted(there):
            seed = self._secret(place, holders)
            if committed(seed) != self.keys[place].at(number)[1]:
                raise RunError(
                    f"shares of the mask of node '{self.keys[place].name}' are wrong: there is no sum", _AGAIN
                )
            subtract(layout, total, mask(derived(seed, b"own", about), layout.n_words))
        for place in sorted(self.members - there):
            near = [j for j in self.hood[place] if j in there]
            if not near:
                continue
            private = self._secret(place, holders)
            if public_of(private) != self.keys[place].at(number)[0]:
                raise RunError(
                    f"shares of the key of node '{self.keys[place].name}' are wrong: there is no sum", _AGAIN
                )
            own = private_key(private)
            for j in near:  # who is there has added its half of the mask
                seed = agreed(own, self.keys[j].at(number)[0], b"pair", about)
                (subtract if j < place else add)(layout, total, mask(seed, layout.n_words))
        return total

    def _secret(self, place: int, holders: Mapping[int, Mapping[int, bytes]]) -> bytes:
        shares = {
            holder + 1: holders[holder][place]
            for holder in (place, *self.hood[place])
            if holder in holders
            and isinstance(holders[holder].get(place), bytes)
            and len(holders[holder][place]) == KEY
        }
        if len(shares) < self._threshold(place):
            raise RunError(
                f"{len(shares)} nodes tell shares of node '{self.keys[place].name}'; it takes {self._threshold(place)}",
                _AGAIN,
            )
        return shamir.recovered(shares, self._threshold(place))

    def _threshold(self, place: int) -> int:
        return graph.threshold(len(self.hood[place]) + 1)

    @property
    def threshold(self) -> int:
        """Nodes of a neighbourhood that must be left at the end of a sum."""
        return max((self._threshold(place) for place in range(len(self.keys))), default=0)

    def _check_anybody(self, there: set[int], have: str) -> None:
        if not there:
            raise RunError(f"0 of {len(self.keys)} nodes {have}; a secure sum takes {self.threshold}", _AGAIN)

    def _check_enough(self, place: int, there: set[int], have: str) -> None:
        n = sum(j in there for j in (place, *self.hood[place]))
        if n < self._threshold(place):
            raise RunError(
                f"{n} of {len(self.hood[place]) + 1} nodes {have}; a secure sum takes {self._threshold(place)}", _AGAIN
            )
