# SPDX-License-Identifier: Apache-2.0
"""Randomness from keys: what is drawn depends on (seed, round, client, purpose), never on position in a batch.

A key is a 64-bit integer, or a tensor of them. Draws are counter-based (SplitMix64), so a thousand clients draw at once
exactly what each would draw alone, on any machine.

Whoever knows the parts of a key knows what is drawn, and nodes know the seed. What they must not know is drawn from a secret
(`hidden_uniform`), by a hash that cannot be turned round.
"""

import hashlib
import secrets
from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = ["generator", "hidden_uniform", "key", "name_keys", "new_secret", "permuted", "uniform", "uniform_at"]

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_SIGNED = 1 << 63
_ALL = (1 << 64) - 1


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(z: Tensor) -> Tensor:
    """SplitMix64's output function, wrapping in int64."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def key(*parts: int | str | Tensor) -> Tensor:
    """Combine numbers, words and tensors of keys into one key (or a tensor of keys, by broadcasting)."""
    out: int | Tensor = 0
    for part in parts:
        number = part if isinstance(part, Tensor) else _word(part) if isinstance(part, str) else part
        if isinstance(out, int) and isinstance(number, int):
            out = _scramble_int(out + _GOLDEN + _scramble_int(number + _GOLDEN))
        else:
            out = _scramble(_tensor(out) + _GOLDEN + _scramble(_tensor(number) + _GOLDEN))
    return _tensor(out)


@cache
def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _tensor(value: int | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor((value + _SIGNED) % (1 << 64) - _SIGNED, dtype=torch.int64)


def _scramble_int(z: int) -> int:
    """The same as `_scramble`, for one number: a tensor operation would cost a hundred times more."""
    z &= _ALL
    z = ((z ^ (z >> 30)) * _MIX_1) & _ALL
    z = ((z ^ (z >> 27)) * _MIX_2) & _ALL
    return z ^ (z >> 31)


def name_keys(names: np.ndarray) -> Tensor:
    """Give every client name its key: the same name has the same key in every data set."""
    encoded = np.char.encode(np.asarray(names, dtype=str), "utf-8")
    width = max(encoded.dtype.itemsize, 1)
    letters = encoded.reshape(-1, 1).view(np.uint8).reshape(len(encoded), width) if len(encoded) else None
    h = torch.zeros(len(encoded), dtype=torch.int64)
    if letters is not None:
        for column in torch.from_numpy(letters.astype(np.int64)).T:
            h = torch.where(column > 0, _scramble(h + _GOLDEN * column), h)  # trailing zero bytes are padding
    return h


def uniform(keys: Tensor, n: int) -> Tensor:
    """Draw n numbers in [0, 1) for every key: the j-th depends on the key and j only.  [..., n]"""
    return uniform_at(keys[..., None], torch.arange(n))


def uniform_at(keys: Tensor, counter: Tensor) -> Tensor:
    """Draw the number that stands at `counter` in each key's sequence, by broadcasting."""
    bits = _scramble(keys + _GOLDEN * (counter + 1))
    return _shift_right(bits, 11).to(torch.float64) / (1 << 53)


def new_secret() -> str:
    """Draw a secret: 256 bits from the system, which follow from no seed."""
    return secrets.token_hex(32)


def hidden_uniform(secret: str, *parts: int | str, lots: Tensor, n: int) -> Tensor:
    """Draw n numbers in [0, 1) for every lot [C], from a secret: who does not have it can tell none from others.  [C, n]

    SplitMix64 can be turned round: a few of its numbers tell the key, and so all others. SHAKE-256 cannot.
    """
    if not secret:
        raise ValueError("a secret is needed")
    about = hashlib.shake_256(repr((secret, parts)).encode())
    drawn = np.empty((len(lots), n), dtype="<u8")
    for place, lot in enumerate(lots.tolist()):
        own = about.copy()
        own.update(lot.to_bytes(8, "little", signed=True))
        drawn[place] = np.frombuffer(own.digest(8 * n), dtype="<u8")
    return torch.from_numpy((drawn >> np.uint64(11)).astype(np.float64) / (1 << 53))


def permuted(keys: Tensor, mask: Tensor) -> Tensor:
    """Shuffle the real rows of every client, padding last.  keys [..., C], mask [C, N] -> row numbers [..., C, N]"""
    u = uniform(keys, mask.shape[-1])
    return u.masked_fill(~mask, 2.0).argsort(dim=-1, stable=True)


def generator(*parts: int | str) -> torch.Generator:
    """Seed a torch generator from parts, for draws that the server makes."""
    made = torch.Generator()
    made.manual_seed(int(key(*parts)) & ((1 << 63) - 1))
    return made
