# SPDX-License-Identifier: Apache-2.0
"""Augmentation of pictures in local training: mirror, and cut at a random place.

Vectorised over clients and driven by keys: what happens to a picture depends on its key only, not on who else is in the
block. Give one of these to `Network.augment`, which hands it new keys for every step; measuring never augments.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import keys as _keys

__all__ = ["Flat", "crop", "flip", "flip_and_crop"]


def flip(x: Tensor, keys: Tensor) -> Tensor:
    """Mirror each picture, left to right, with probability one half.

    Parameters
    ----------
    x : Tensor
        [C, B, Ch, H, W] pictures (any leading axes).
    keys : Tensor
        [C, B] a key for each picture, such as ``key(seed, round, "augment", client_keys[:, None], row_numbers)``.

    Returns
    -------
    Tensor
        [C, B, Ch, H, W] new pictures.
    """
    mirror = _keys.uniform_at(keys, torch.tensor(0)) < 0.5  # [C, B]
    return torch.where(mirror[..., None, None, None], x.flip(-1), x)


def crop(x: Tensor, keys: Tensor, *, padding: int = 4) -> Tensor:
    """Pad each picture with zeros, and cut it to its size at a random place.

    Parameters
    ----------
    x, keys : Tensor
        [C, B, Ch, H, W] pictures and [C, B] their keys, as in `flip`.
    padding : int
        Pixels added on each side.

    Returns
    -------
    Tensor
        [C, B, Ch, H, W] new pictures.
    """
    height, width = x.shape[-2:]
    places = _keys.uniform_at(keys[..., None], torch.arange(1, 3)) * (2 * padding + 1)  # flip has drawn number 0
    down, right = (places.long() - padding)[..., None].unbind(-2)  # [C, B, 1] each
    row, col = torch.arange(height) + down, torch.arange(width) + right  # [C, B, H], [C, B, W]
    inside = _within(row, height)[..., :, None] & _within(col, width)[..., None, :]  # [C, B, H, W]
    picked = x.gather(-2, row.clamp(0, height - 1)[..., None, :, None].expand(x.shape))
    picked = picked.gather(-1, col.clamp(0, width - 1)[..., None, None, :].expand(x.shape))
    return picked * inside[..., None, :, :]


def flip_and_crop(x: Tensor, keys: Tensor, *, padding: int = 4) -> Tensor:
    """Mirror each picture with probability one half, then pad it and cut it: `flip`, then `crop`."""
    return crop(flip(x, keys), keys, padding=padding)


@dataclass(frozen=True)
class Flat:
    """Augment rows that are flattened pictures.

    Parameters
    ----------
    change : callable
        What is done to pictures: (x [C, B, Ch, H, W], keys [C, B]) -> x.
    shape : tuple of int
        Of a picture, channels first: (Ch, H, W).
    """

    change: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, int, int]

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Augment rows.  x [C, B, Ch H W], keys [C, B] -> [C, B, Ch H W]"""
        return self.change(x.reshape(*x.shape[:-1], *self.shape), keys).flatten(-3)


def _within(place: Tensor, size: int) -> Tensor:
    return (place >= 0) & (place < size)
