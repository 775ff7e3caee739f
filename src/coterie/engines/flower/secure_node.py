# SPDX-License-Identifier: Apache-2.0
"""A node's part of secure sums: what it keeps of an exchange of keys is in a file of its own, for its owner only.

The file is written before an answer leaves, so that a node that is restarted neither masks nor unmasks a sum twice.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.engines.flower.identity import Identity
from coterie.engines.flower.messages import PublicKeys, Question, Sealed, Secure
from coterie.engines.flower.policy_file import SecureSums
from coterie.engines.flower.wire import fingerprint
from coterie.errors import ConfigError, RunError
from coterie.files import owner_only, replace_file
from coterie.secure.fixed_point import encode
from coterie.secure.messages import Keys, Neighbours
from coterie.secure.node import Node

__all__ = ["as_bytes", "as_keys", "as_tensor", "check_keys", "exchanged", "masked", "public_keys", "question_of"]

_FILE = "secure.json"


def exchanged(asked: Secure, name: str, folder: Path, identity: Identity, policy: SecureSums) -> Sealed:
    """Make keys, letters, or tell shares; `folder` is the run's."""
    node = _read(folder, name, identity, policy)
    epoch = bytes.fromhex(asked.epoch)
    if asked.step == "keys":
        said = Sealed(keys=public_keys(node.advertise(epoch, asked.sums)))
    elif epoch != node.epoch:
        raise RunError("this node has no keys of this exchange", "the server must exchange keys again")
    elif asked.step == "letters":
        keys = {one.place: as_keys(one) for one in asked.neighbours}
        if len(keys) < len(asked.neighbours):
            raise RunError("two neighbours have one place", "use the same version of coterie everywhere")
        letters = node.share(Neighbours(asked.place, keys, asked.n_nodes, asked.threshold))
        said = Sealed(places=tuple(letters), letters=_rows(list(letters.values())))
    else:
        shares = node.unmask(asked.number, set(asked.places))
        said = Sealed(places=tuple(shares), letters=_rows(list(shares.values())))
    _write(folder, node)
    return said


def masked(
    asked: Secure, question: bytes, arrays: Mapping[str, NDArray[Any]], name: str, folder: Path, identity: Identity,
    policy: SecureSums,
) -> Sealed:  # fmt: skip
    """Mask what this node adds to a sum."""
    node = _with_keys(asked, name, folder, identity, policy)
    assert node.neighbours is not None
    if asked.letters is not None:
        node.receive({place: as_bytes(one) for place, one in zip(asked.places, asked.letters, strict=True)})
    layout, words = encode(arrays, node.neighbours.n_nodes)
    hidden = node.mask(asked.number, question, layout, words)
    _write(folder, node)
    return Sealed(layout=layout.said(), words=torch.from_numpy(hidden.view(np.int64)))


def check_keys(asked: Secure, name: str, folder: Path, identity: Identity, policy: SecureSums) -> None:
    """Refuse a sum that this node has no keys for, or has answered, before anything is done for it."""
    _with_keys(asked, name, folder, identity, policy).check_mask(asked.number)


def threshold_of(asked: Secure, name: str, folder: Path, identity: Identity, policy: SecureSums) -> int:
    """How many nodes are in a sum at least, as this node has agreed: so many share the noise."""
    node = _with_keys(asked, name, folder, identity, policy)
    assert node.neighbours is not None
    return node.neighbours.threshold


def _with_keys(asked: Secure, name: str, folder: Path, identity: Identity, policy: SecureSums) -> Node:
    node = _read(folder, name, identity, policy)
    if bytes.fromhex(asked.epoch) != node.epoch or node.neighbours is None:
        raise RunError("this node has no keys of this exchange", "the server must exchange keys again")
    return node


def question_of(questions: Sequence[Question]) -> bytes:
    """What tells questions from others, the same at all nodes: masks of others do not go with it."""
    asked = [
        (
            one.part, one.views, one.bounds,
            {
                at: [ask.step, ask.epsilon, ask.noise]
                + [dict(part) for part in (ask.shared, ask.fold, ask.fresh, ask.limits)]
                for at, ask in one.asks.items()
            },
        )
        for one in questions
    ]  # fmt: skip
    return bytes.fromhex(fingerprint(asked, size=32))


# -- what travels -----------------------------------------------------------------------------------------------------
def public_keys(keys: Keys, place: int = -1) -> PublicKeys:
    """A node's keys, as they travel."""
    letters, masks, seeds, signer, signature = map(
        as_tensor, (keys.letters, keys.masks, keys.seeds, keys.signer, keys.signature)
    )
    return PublicKeys(keys.name, letters, masks, seeds, signer, signature, place)


def as_keys(said: PublicKeys) -> Keys:
    """Keys that have travelled."""
    parts = (said.letters, said.masks, said.seeds, said.signer, said.signature)
    return Keys(said.name, *(as_bytes(part) for part in parts))


def as_tensor(value: bytes) -> Tensor:
    """Bytes, as they travel."""
    return torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())


def as_bytes(value: Tensor) -> bytes:
    """Bytes that have travelled."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        raise RunError("a message of a secure sum has no bytes", "use the same version of coterie everywhere")
    return value.numpy().tobytes()


def _rows(values: Sequence[bytes]) -> Tensor:
    """[n, bytes] values of one length."""
    return torch.stack([as_tensor(value) for value in values])


# -- what a node keeps ------------------------------------------------------------------------------------------------
def _read(folder: Path, name: str, identity: Identity, policy: SecureSums) -> Node:
    try:
        known = {peer: bytes.fromhex(key) for peer, key in policy.peers.items()}
    except ValueError:
        raise ConfigError("a key in secure.peers of the policy has other digits", "give hexadecimal digits") from None
    node = Node(name, identity.key("signing"), known, bool(known), policy.nodes)
    path = folder / _FILE
    if not path.exists():
        return node
    said = json.loads(path.read_text(encoding="utf-8"))
    node.epoch, node.letters = (bytes.fromhex(said[part]) for part in ("epoch", "letters"))
    node.sums = said["sums"]
    node.masks, node.seeds, node.shares = (
        {int(key): bytes.fromhex(value) for key, value in said[part].items()} for part in ("masks", "seeds", "shares")
    )
    node.masked, node.unmasked = set(said["masked"]), set(said["unmasked"])
    if said["neighbours"] is not None:
        place, n_nodes, threshold, keys = said["neighbours"]
        every = {int(at): Keys(one[0], *(bytes.fromhex(part) for part in one[1:])) for at, one in keys.items()}
        node.neighbours = Neighbours(place, every, n_nodes, threshold)
    return node


def _write(folder: Path, node: Node) -> None:
    near = None
    if (said := node.neighbours) is not None:
        keys = {
            place: [one.name, *(p.hex() for p in (one.letters, one.masks, one.seeds, one.signer, one.signature))]
            for place, one in said.keys.items()
        }
        near = [said.place, said.n_nodes, said.threshold, keys]
    document = {
        "epoch": node.epoch.hex(), "letters": node.letters.hex(), "sums": node.sums,
        **{part: {key: value.hex() for key, value in getattr(node, part).items()} for part in ("masks", "seeds", "shares")},
        "masked": sorted(node.masked), "unmasked": sorted(node.unmasked), "neighbours": near,
    }  # fmt: skip
    with owner_only():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _FILE, json.dumps(document).encode())
