# SPDX-License-Identifier: Apache-2.0
"""Noise from the operating system's randomness, never from a run's seed: who knows the noise can take it off.

With a secret, the same question to the same rows gets the same noise: a run that goes on after it was killed asks its last
question again, and learns nothing new.
"""

import hashlib
import math
from secrets import token_bytes

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import Tensor

__all__ = ["Noises"]

_BITS = 53  # of a uniform number
_FINE = 2.0**-20  # of the standard deviation: sums with noise are rounded to such a grid


class Noises:
    """Where noise comes from.

    Parameters
    ----------
    secret : bytes, optional
        32 bytes, from which and from what is asked of whom noise follows; without, it is drawn anew every time.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret

    @property
    def repeats(self) -> bool:
        """Whether a question that is put again gets the same noise."""
        return self._secret is not None

    def normal(self, shape: tuple[int, ...], about: bytes) -> Tensor:
        """Standard normal numbers in double precision: Box and Muller's, of AES-256 in counter mode."""
        key = token_bytes(32) if self._secret is None else hashlib.sha256(self._secret + about).digest()
        n = math.prod(shape)
        half = -(-n // 2)
        stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
        drawn = np.frombuffer(stream.update(bytes(16 * half)), dtype="<u8") >> np.uint64(64 - _BITS)
        u = (drawn.astype(np.float64) + 0.5) / 2.0**_BITS  # above 0 and below 1
        length, angle = np.sqrt(-2 * np.log(u[:half])), 2 * math.pi * u[half:]
        made = np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:n]
        return torch.from_numpy(made).reshape(shape)

    def added(self, total: Tensor, deviation: float, about: bytes) -> Tensor:
        """A sum with noise, on a grid that is much finer than the noise: last digits of a double say nothing."""
        wide = total.to(torch.float64)
        grid = 2.0 ** math.floor(math.log2(deviation * _FINE))
        noised = wide + deviation * self.normal(tuple(wide.shape), about)
        return ((noised / grid).round() * grid).to(total.dtype)
