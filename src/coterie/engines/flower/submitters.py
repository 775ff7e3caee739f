# SPDX-License-Identifier: Apache-2.0
"""Who may run apps on a federation: holders of an Ed25519 key whose public half the SuperLink and every node have in a file.

The file is what Flower's SuperNode takes as ``--trusted-entities``: the id of a key -> the key. A submitter's key signs two
things: the app, which nodes check before they load it, and a word that lets it in at the SuperLink for some minutes.
"""

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

from coterie.errors import ConfigError

__all__ = ["Trusted", "is_signed", "make_key", "public_line", "read_trusted", "signatures", "token", "whose"]

Trusted = Mapping[str, Ed25519PublicKey]

_LINE = re.compile(r"""([\w-]+)["']?\s*:\s*["']?(ssh-\w+ [A-Za-z0-9+/=]+)""")  # of the YAML that Flower reads
_MINUTES = 10.0  # that a word for the SuperLink lasts: each command has a fresh one
_LICENSE = {"valid_license": "signed by a submitter"}  # Flower's SuperNode looks for it before it looks at signatures


def make_key(file: Path) -> Path:
    """Make a submitter's key, which only its owner may read.  -> the file with the public half"""
    file.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    form, plain = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(key.private_bytes(serialization.Encoding.PEM, form, plain))
    except FileExistsError:
        raise ConfigError(f"there is a file {file}", "name another one: a key is never replaced") from None
    public = file.with_name(f"{file.name}.pub")
    public.write_text(_spelled(key.public_key()) + "\n", encoding="utf-8")
    return public


def public_line(file: Path) -> str:
    """The line that lets a submitter's key in, for the file of trusted keys."""
    public = _private(file).public_key()
    return f"{_id(public)}: '{_spelled(public)}'"


def read_trusted(file: Path) -> Trusted:
    """Read the file of trusted keys."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        said = dict(_LINE.findall("\n".join(lines)))
        found = {name: serialization.load_ssh_public_key(key.encode()) for name, key in said.items()}
    except OSError as error:
        raise ConfigError(f"the trusted keys {file} cannot be read: {error.strerror}", "check the path") from None
    except (ValueError, UnsupportedAlgorithm):
        found = {}
    keys = {name: key for name, key in found.items() if isinstance(key, Ed25519PublicKey)}
    if not keys or len(keys) < len(found):
        raise ConfigError(f"{file} does not hold Ed25519 keys", "a line of it is what `coterie flower key FILE` prints")
    return keys


# -- by the submitter -------------------------------------------------------------------------------------------------
def signatures(app: bytes, file: Path) -> dict[str, str]:
    """Sign an app, as Flower's SuperNode expects it."""
    key, now = _private(file), int(time.time())
    signed = key.sign(create_message_to_sign(hashlib.sha256(app).digest(), now))
    return {**_LICENSE, _id(key.public_key()): json.dumps({"signed_at": now, "signature": _text(signed)})}


def token(file: Path) -> str:
    """A word that lets the holder of a key in, for some minutes."""
    key, until = _private(file), int(time.time() + 60 * _MINUTES)
    name = _id(key.public_key())
    return f"{name}.{until}.{_text(key.sign(_promise(name, until)))}"


# -- by the SuperLink -------------------------------------------------------------------------------------------------
def whose(word: str, trusted: Trusted) -> str | None:
    """Whose word it is; None if it is nobody's who is trusted, or is over."""
    name, _, rest = word.partition(".")
    until, _, signed = rest.partition(".")
    if name not in trusted or not until.isdecimal() or not 0 <= int(until) - time.time() <= 60 * _MINUTES:
        return None
    return name if _verified(trusted[name], signed, _promise(name, int(until))) else None


def is_signed(app: bytes, said: Mapping[str, str], trusted: Trusted) -> bool:
    """Whether a trusted key has signed an app."""
    for name, key in trusted.items():
        try:
            own = json.loads(said[name])
            message = create_message_to_sign(hashlib.sha256(app).digest(), int(own["signed_at"]))
            if _verified(key, str(own["signature"]), message):
                return True
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return False


def _verified(key: Ed25519PublicKey, signed: str, message: bytes) -> bool:
    try:
        key.verify(base64.urlsafe_b64decode(signed + "=" * (-len(signed) % 4)), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _promise(name: str, until: int) -> bytes:
    """What is signed; no app is signed by such words."""
    return f"coterie: {name} may use the SuperLink until {until}".encode()


def _private(file: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"the key {file} cannot be read: {error.strerror}", "check the path after --key") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{file} is not an Ed25519 key without a password", "make one with `coterie flower key FILE`")
    return key


def _id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return f"fpk_{hashlib.sha256(raw).hexdigest()[:32]}"


def _spelled(key: Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def _text(signed: bytes) -> str:
    return base64.urlsafe_b64encode(signed).decode().rstrip("=")
