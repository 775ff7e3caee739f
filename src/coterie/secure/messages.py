# SPDX-License-Identifier: Apache-2.0
"""What nodes and the server say to each other about a sum: names, bytes and numbers, bounded when they are read."""

from dataclasses import dataclass

from coterie.errors import RunError
from coterie.secure.fixed_point import MOST_NODES
from coterie.secure.masks import KEY, SIGNATURE

__all__ = ["EPOCH", "MOST_SUMS", "Keys", "Neighbours", "check_keys", "check_neighbours", "letter_size"]

EPOCH = 16  # bytes that name a set of keys
MOST_SUMS = 256  # that one set of keys is for
_MOST_NAME = 1000
_TAG = 28  # bytes that sealing adds


@dataclass(frozen=True)
class Keys:
    """A node's public keys, signed.

    Attributes
    ----------
    name : str
        Of the node.
    letters : bytes
        For letters to it.
    masks : bytes
        For masks with it: a key for every sum.
    seeds : bytes
        What binds it to the seed of its own mask: a hash for every sum.
    signer, signature : bytes
        The node's Ed25519 key, and what it has signed of all that, for this epoch.
    """

    name: str
    letters: bytes
    masks: bytes
    seeds: bytes
    signer: bytes
    signature: bytes

    def signed(self, epoch: bytes) -> bytes:
        """The text that is signed."""
        parts = (b"coterie secure sums 1: keys", epoch, self.name.encode(), self.letters, self.masks, self.seeds)
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def at(self, number: int) -> tuple[bytes, bytes]:
        """Of one sum: the key for masks, and what binds to the seed."""
        part = slice(KEY * number, KEY * (number + 1))
        return self.masks[part], self.seeds[part]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, (self.name, self.letters, self.masks, self.seeds, self.signer, self.signature)))


@dataclass(frozen=True)
class Neighbours:
    """Whom a node masks with, as the server says.

    Attributes
    ----------
    place : int
        The node's own place among all, from 0.
    keys : dict
        Place -> keys of a neighbour.
    n_nodes : int
        In all.
    threshold : int
        Shares that a secret takes.
    """

    place: int
    keys: dict[int, Keys]
    n_nodes: int
    threshold: int

    @property
    def size(self) -> int:
        """Bytes."""
        return 24 + sum(8 + one.size for one in self.keys.values())


def check_keys(said: object, sums: int) -> None:
    """Refuse keys that are none."""
    fits = isinstance(said, Keys) and isinstance(said.name, str) and 0 < len(said.name) <= _MOST_NAME
    if fits:
        assert isinstance(said, Keys)
        parts = (said.letters, said.masks, said.seeds, said.signer, said.signature)
        sizes = (KEY, KEY * sums, KEY * sums, KEY, SIGNATURE)
        fits = all(isinstance(part, bytes) and len(part) == n for part, n in zip(parts, sizes, strict=True))
    if not fits:
        raise RunError("a node's keys are not keys for these sums", "use the same version of coterie everywhere")


def check_neighbours(said: object, sums: int) -> None:
    """Refuse neighbours that cannot be."""
    fits = isinstance(said, Neighbours) and isinstance(said.keys, dict)
    if fits:
        assert isinstance(said, Neighbours)
        places = (said.place, *said.keys)
        fits = all(type(n) is int for n in (*places, said.n_nodes, said.threshold)) and said.n_nodes <= MOST_NODES
        fits = fits and all(0 <= place < said.n_nodes for place in places) and len(set(places)) == len(places)
    if not fits:
        raise RunError(
            "the server does not say who a node's neighbours are", "use the same version of coterie everywhere"
        )
    assert isinstance(said, Neighbours)
    for one in said.keys.values():
        check_keys(one, sums)


def letter_size(sums: int) -> int:
    """Bytes of a sealed letter with two shares for every sum."""
    return 2 * KEY * sums + _TAG
