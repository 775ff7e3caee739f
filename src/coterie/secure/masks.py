# SPDX-License-Identifier: Apache-2.0
"""Keys, masks and sealed letters, all of it from `cryptography`.

X25519 for what two have in common, HKDF for keys, AES-256 in counter mode for masks, ChaCha20-Poly1305 for letters, Ed25519
for signatures.
"""

import hashlib
import os

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.errors import RunError
from coterie.secure.fixed_point import Words

__all__ = [
    "KEY", "SIGNATURE", "agreed", "committed", "derived", "is_signed", "mask", "opened", "private_key", "public_of", "seal",
    "sign", "signing_key",
]  # fmt: skip

KEY = 32  # bytes of a key, a seed, and a hash
SIGNATURE = 64  # bytes
_NONCE = 12


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def private_key(private: bytes) -> X25519PrivateKey:
    """A private key that is used several times."""
    return X25519PrivateKey.from_private_bytes(private)


def agreed(private: X25519PrivateKey, public: bytes, *purpose: bytes) -> bytes:
    """What two have in common, each with its private key and the other's public one, for one purpose."""
    try:
        common = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise RunError("a public key is none", "use the same version of coterie everywhere") from None
    return derived(common, *purpose)


def derived(secret: bytes, *purpose: bytes) -> bytes:
    """A key for one purpose, from which neither the secret nor a key for another purpose follows."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in (b"coterie secure sums 1", *purpose))
    return HKDF(algorithm=SHA256(), length=KEY, salt=None, info=info).derive(secret)


def mask(seed: bytes, n_words: int) -> Words:
    """Words that nobody can tell from random ones without the seed, which is used once."""
    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * n_words)), dtype="<u8").astype(np.uint64, copy=False)


def committed(secret: bytes) -> bytes:
    """What binds to a secret and does not tell it."""
    return hashlib.sha256(b"coterie secure sums 1: committed" + secret).digest()


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate a letter; `about` is authenticated too, and not in it."""
    nonce = os.urandom(_NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about)


def opened(key: bytes, letter: bytes, about: bytes) -> bytes:
    """Read a letter."""
    try:
        return ChaCha20Poly1305(key).decrypt(letter[:_NONCE], letter[_NONCE:], about)
    except (InvalidTag, ValueError):
        raise RunError("a letter of another node was changed on its way", "do not trust this server") from None


def signing_key() -> bytes:
    """Make a private key to sign with."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def sign(private: bytes, text: bytes) -> tuple[bytes, bytes]:
    """Sign a text.  -> public key, signature"""
    key = Ed25519PrivateKey.from_private_bytes(private)
    return key.public_key().public_bytes_raw(), key.sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether who has the private key has signed this text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
