# SPDX-License-Identifier: Apache-2.0
"""Shamir's secret sharing over the prime field of 2^255 - 19.

A. Shamir, "How to Share a Secret", CACM 1979: a secret is the value at 0 of a random polynomial of degree t - 1, and shares
are its values elsewhere. t of them give the secret, fewer say nothing about it.
"""

import secrets
from collections.abc import Mapping, Sequence

from coterie.errors import RunError

__all__ = ["PRIME", "SIZE", "draw_secret", "recovered", "split"]

PRIME = (1 << 255) - 19
SIZE = 32  # bytes of a secret and of a share


def draw_secret() -> bytes:
    """Draw a secret."""
    return secrets.randbelow(PRIME).to_bytes(SIZE, "little")


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """Make a share for each place, any `threshold` of which give the secret.

    Parameters
    ----------
    places : sequence of int
        Different numbers above 0.
    """
    value = int.from_bytes(secret, "little")
    if len(secret) != SIZE or value >= PRIME:
        raise RunError("a secret is not a number of the field", "draw it with draw_secret")
    if not 1 <= threshold <= len(places) or len(set(places)) < len(places) or not all(0 < x < PRIME for x in places):
        raise RunError(f"{len(places)} shares cannot have a threshold of {threshold}", "lower the threshold")
    coefficients = [value, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    out = {}
    for x in places:
        y = 0
        for c in reversed(coefficients):
            y = (y * x + c) % PRIME
        out[x] = y.to_bytes(SIZE, "little")
    return out


def recovered(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Find the secret from shares by their places."""
    if len(shares) < threshold:
        raise RunError(f"{len(shares)} shares are fewer than the {threshold} that a secret takes")
    some = sorted(shares)[:threshold]
    total = 0
    for x in some:
        above = below = 1
        for other in some:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        y = int.from_bytes(shares[x], "little")
        if len(shares[x]) != SIZE or y >= PRIME:
            raise RunError("a share is not a number of the field")
        total += y * above * pow(below, -1, PRIME)
    return (total % PRIME).to_bytes(SIZE, "little")
