# SPDX-License-Identifier: Apache-2.0
"""A node's side of secure sums: keys and shares once for several; then, for each, a masked answer and what unmasks the sum.

Everything is fresh for every sum: the key of the masks with others and the seed of the node's own mask. So what is revealed
to take the masks off one sum says nothing about another, be it that a node has dropped out or that it has not; and a node
that has dropped out of one sum takes part in the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coterie.errors import RunError
from coterie.secure import graph, shamir
from coterie.secure.fixed_point import Layout, Words, add, subtract
from coterie.secure.masks import (
    KEY,
    agreed,
    committed,
    derived,
    is_signed,
    mask,
    opened,
    private_key,
    public_of,
    seal,
    sign,
)
from coterie.secure.messages import EPOCH, MOST_SUMS, Keys, Neighbours, check_neighbours, letter_size

__all__ = ["LEAST", "Node", "purpose"]

LEAST = 2  # nodes in a sum: a sum over one is its own value
_HINT = "this node does not trust what the server says; see docs/secure-sums.md"


@dataclass
class Node:
    """What a node keeps of an epoch: a set of keys, and shares of its neighbours' secrets.

    Attributes
    ----------
    name : str
        Of the node.
    signer : bytes
        Its private key to sign with.
    known : mapping
        Name -> public signing key, of nodes that it knows: others' keys are not taken for theirs. With `strict`, no others
        than these are taken at all.
    least : int
        Nodes that a sum must be over.
    """

    name: str
    signer: bytes = field(repr=False)
    known: Mapping[str, bytes] = field(default_factory=dict)
    strict: bool = False
    least: int = LEAST
    epoch: bytes = b""
    sums: int = 0
    letters: bytes = field(default=b"", repr=False)  # private key
    masks: dict[int, bytes] = field(default_factory=dict, repr=False)  # sum -> private key
    seeds: dict[int, bytes] = field(default_factory=dict, repr=False)  # sum -> seed
    neighbours: Neighbours | None = None
    shares: dict[int, bytes] = field(default_factory=dict, repr=False)  # place -> shares of its secrets, of all sums
    masked: set[int] = field(default_factory=set)  # sums that it has answered
    unmasked: set[int] = field(default_factory=set)  # and told shares of

    # -- once for several sums ----------------------------------------------------------------------------------------
    def advertise(self, epoch: bytes, sums: int) -> Keys:
        """Make keys for so many sums; those of earlier epochs are forgotten."""
        if len(epoch) != EPOCH or not 1 <= sums <= MOST_SUMS:
            raise RunError(f"keys are wanted for {sums} sums; at most {MOST_SUMS}", _HINT)
        if epoch == self.epoch:
            raise RunError("keys were made for this epoch already", _HINT)
        self.epoch, self.sums, self.neighbours, self.shares = epoch, sums, None, {}
        self.letters = shamir.draw_secret()
        self.masks = {number: shamir.draw_secret() for number in range(sums)}
        self.seeds = {number: shamir.draw_secret() for number in range(sums)}
        self.masked, self.unmasked = set(), set()
        publics = b"".join(public_of(self.masks[number]) for number in range(sums))
        bound = b"".join(committed(self.seeds[number]) for number in range(sums))
        keys = Keys(self.name, public_of(self.letters), publics, bound, b"", b"")
        public, signature = sign(self.signer, keys.signed(epoch))
        return replace(keys, signer=public, signature=signature)

    def share(self, said: Neighbours) -> dict[int, bytes]:
        """Share this node's secrets among its neighbours.  -> a letter to each, by its place"""
        check_neighbours(said, self.sums)
        if self.neighbours is not None:
            raise RunError("secrets of this epoch were shared already", _HINT)
        holders = len(said.keys) + 1
        if holders < self.least:
            raise RunError(
                f"this node would be in a sum of {holders}; it wants at least {self.least}", "start more nodes"
            )
        if said.threshold != graph.threshold(holders) or len(said.keys) < graph.degree(said.n_nodes):
            raise RunError("the server names too few neighbours, or too low a threshold", _HINT)
        names = [one.name for one in said.keys.values()]
        if len({*names, self.name}) <= len(names):
            raise RunError("the server names a neighbour twice", _HINT)
        for one in said.keys.values():
            self._check_signer(one)
        self.neighbours = said
        places = {place: place + 1 for place in (said.place, *said.keys)}
        texts = dict.fromkeys(places, b"")
        for number in range(self.sums):
            for secret in (self.masks[number], self.seeds[number]):
                parts = shamir.split(secret, said.threshold, list(places.values()))
                for place, at in places.items():
                    texts[place] += parts[at]
        self.shares = {said.place: texts.pop(said.place)}
        return {place: self._sealed(place, text) for place, text in texts.items()}

    def _check_signer(self, keys: Keys) -> None:
        if not is_signed(keys.signer, keys.signature, keys.signed(self.epoch)):
            raise RunError(f"the keys of node '{keys.name}' are not signed by it", _HINT)
        self._check_known(keys)

    def _check_known(self, keys: Keys) -> None:
        known = self.known.get(keys.name)
        if (known is None and self.strict) or (known is not None and known != keys.signer):
            why = (
                "is not among those that this node knows"
                if known is None
                else "has another signing key than this node knows"
            )
            raise RunError(f"node '{keys.name}' {why}", _HINT)

    def _sealed(self, place: int, text: bytes) -> bytes:
        said = self._said
        about = self._about(said.place, place)
        return seal(agreed(private_key(self.letters), said.keys[place].letters, b"letter", about), text, about)

    def _about(self, sender: int, to: int) -> bytes:
        return self.epoch + sender.to_bytes(4, "big") + to.to_bytes(4, "big")

    def receive(self, letters: Mapping[int, bytes]) -> None:
        """Read the letters of neighbours, once: who has sent one is in the sums of this epoch."""
        said = self._said
        if len(self.shares) > 1:
            raise RunError("letters of this epoch were read already", _HINT)
        if not letters.keys() <= said.keys.keys() or len(letters) + 1 < max(said.threshold, self.least):
            raise RunError(
                f"{len(letters) + 1} nodes take part in a sum; it takes {max(said.threshold, self.least)}",
                "start more nodes",
            )
        read, own = {}, private_key(self.letters)
        for place, letter in letters.items():
            if not isinstance(letter, bytes) or len(letter) != letter_size(self.sums):
                raise RunError("a letter of another node is too short or too long", _HINT)
            about = self._about(place, said.place)
            read[place] = opened(agreed(own, said.keys[place].letters, b"letter", about), letter, about)
        self.shares |= read

    # -- for every sum ------------------------------------------------------------------------------------------------
    def check_mask(self, number: int) -> None:
        """Refuse a sum that there are no keys for, that was answered, or with nodes that are not known any more."""
        for one in self._said.keys.values():
            self._check_known(one)
        if not 0 <= number < self.sums or number not in self.masks or number in self.masked:
            raise RunError(f"sum {number} is none of this epoch, or was answered already", _HINT)

    def mask(self, number: int, question: bytes, layout: Layout, words: Words) -> Words:
        """Mask this node's part of a sum.

        Parameters
        ----------
        number : int
            Of the sum.
        question : bytes
            What tells the question from others. Masks depend on it, so that those of nodes that were asked different
            things do not cancel.
        """
        said = self._said
        self.check_mask(number)
        if len(self.shares) < max(said.threshold, self.least):
            raise RunError(
                f"this node would be in a sum of {len(self.shares)}; it takes {max(said.threshold, self.least)}",
                "start more nodes",
            )
        self.masked.add(number)
        about = purpose(self.epoch, number, question, layout)
        total = words.copy()
        add(layout, total, mask(derived(self.seeds[number], b"own", about), len(words)))
        own = private_key(self.masks[number])
        for place in self.shares:
            if place != said.place:
                seed = agreed(own, said.keys[place].at(number)[0], b"pair", about)
                (add if said.place < place else subtract)(layout, total, mask(seed, len(words)))
        del self.masks[number], self.seeds[number]  # what others need of them, others have
        return total

    def unmask(self, number: int, present: frozenset[int] | set[int]) -> dict[int, bytes]:
        """Tell shares that take the masks off a sum, once: of the own mask of who is present, of the others' keys.

        Parameters
        ----------
        present : set of int
            Places of those whose masked parts are in the sum, of this node and its neighbours.
        """
        said = self._said
        for one in said.keys.values():
            self._check_known(one)
        if number not in self.masked or number in self.unmasked:
            raise RunError(f"sum {number} was not answered, or its masks were told already", _HINT)
        if said.place not in present or not present <= self.shares.keys():
            raise RunError("a sum is without this node, or with others than take part in it", _HINT)
        if len(present) < max(said.threshold, self.least):
            raise RunError(
                f"{len(present)} nodes are left in a sum; it takes {max(said.threshold, self.least)}",
                "ask again when more nodes are there",
            )
        self.unmasked.add(number)
        at = 2 * KEY * number
        return {
            place: shares[at + KEY : at + 2 * KEY] if place in present else shares[at : at + KEY]
            for place, shares in self.shares.items()
        }

    @property
    def _said(self) -> Neighbours:
        if self.neighbours is None:
            raise RunError("this node has no neighbours in this epoch", "the server must exchange keys first")
        return self.neighbours


def purpose(epoch: bytes, number: int, question: bytes, layout: Layout) -> bytes:
    """What a mask is for: it is of no use for another sum, question or arrays."""
    return b"".join((epoch, number.to_bytes(4, "big"), layout.digest, question))
