# SPDX-License-Identifier: Apache-2.0
"""What a node has for itself alone: a secret in its state folder, from which its key and the names that it gives follow.

A node signs what the server has drawn for it. The server remembers the public key of every node's name for as long as the
run lasts, so that nobody else can take over the name of a node that is away.

Names are hidden by a keyed hash. Without the key a hash hides nothing: names are few, and whoever has it tries them all.
"""

import hashlib
import json
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from coterie.data.clients import Clients
from coterie.engines.flower.messages import Hello, Introduction
from coterie.errors import ConfigError

__all__ = ["Identity", "hide_names", "is_proven", "new_challenge", "read_secret"]

_BYTES = 32  # of a secret, and of a challenge
_LEAST = 16  # bytes of a secret that somebody else has made
_FILE = "identity"


@dataclass(frozen=True, repr=False)
class Identity:
    """A node's secret; kept in a file that its owner alone may read, made when it is first needed."""

    secret: bytes

    @classmethod
    def of(cls, folder: Path) -> "Identity":
        """The one in a node's state folder."""
        path = folder / _FILE
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = folder / f".{_FILE}.{secrets.token_hex(8)}.tmp"
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
            try:
                with open(file, "wb") as opened:
                    opened.write(secrets.token_bytes(_BYTES))
                    opened.flush()
                    os.fsync(opened.fileno())
                os.link(new, path)  # whole or not at all, and never in place of another
            except FileExistsError:
                pass  # another process of this node was faster
            finally:
                new.unlink()
        found = path.read_bytes()
        if len(found) != _BYTES:
            raise ConfigError(
                f"{path} is not a node's secret", "remove it; the node is then another one to running runs"
            )
        return cls(found)

    def key(self, purpose: str) -> bytes:
        """A key that follows from the secret, and from which neither the secret nor another key follows."""
        return hashlib.blake2b(purpose.encode(), key=self.secret, digest_size=_BYTES).digest()

    def introduced(self, said: Introduction, asked: Hello, address: int) -> Introduction:
        """Add the public key and the proof, and let nobody find out by trying what the fingerprint was made of."""
        private = Ed25519PrivateKey.from_private_bytes(self.key("signing"))
        proof = private.sign(_signed(said.node, asked, address)).hex()
        seen = hashlib.blake2b(said.fingerprint.encode(), key=self.key("fingerprint"), digest_size=16).hexdigest()
        return replace(said, fingerprint=seen, public=private.public_key().public_bytes_raw().hex(), proof=proof)


def new_challenge() -> str:
    """Draw what a node is to sign."""
    return secrets.token_hex(_BYTES)


def is_proven(said: Introduction, asked: Hello, address: int) -> bool:
    """Whether the node has the private key of the public one that it names, and has signed this very greeting."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(said.public))
        public.verify(bytes.fromhex(said.proof), _signed(said.node, asked, address))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(node: str, asked: Hello, address: int) -> bytes:
    """What is signed: with the address, a signature that was asked for elsewhere is of no use here."""
    return json.dumps(["coterie introduction", asked.protocol, asked.run, asked.challenge, address, node]).encode()


# -- names ------------------------------------------------------------------------------------------------------------
def read_secret(path: Path) -> bytes:
    """Read a secret that the nodes of a federation share, and its server does not have."""
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the secret {path} cannot be read: {error.strerror}", "see `secret` in the node's configuration"
        ) from None
    if len(found) < _LEAST:
        raise ConfigError(f"the secret {path} has {len(found)} bytes", f"write at least {_LEAST}: openssl rand -hex 32")
    return found


def hide_names(clients: Clients, secret: bytes) -> Clients:
    """Give all clients other names, which follow from theirs and a secret."""
    key = hashlib.blake2b(secret, person=b"coterie names", digest_size=_BYTES).digest()

    def hidden(name: str) -> str:
        return hashlib.blake2b(name.encode(), key=key, digest_size=16).hexdigest()

    parts = {"train": clients.train, "test": clients.test, "newcomers": clients.newcomers}
    renamed = {
        part: None
        if rows is None
        else rows.renamed(np.array([hidden(name) for name in rows.names.tolist()], dtype=str))
        for part, rows in parts.items()
    }
    return replace(clients, **renamed)  # type: ignore[arg-type]
