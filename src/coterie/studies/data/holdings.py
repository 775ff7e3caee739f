# SPDX-License-Identifier: Apache-2.0
"""Who holds which rows, to train on and to be tested on, and clients made of that.

No row is dealt twice, and no test row is anybody's training row: `PartitionIndices` refuses to be made so.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from coterie.data.ragged import Layout, Ragged
from coterie.errors import ConfigError, DataError
from coterie.studies.data.images import Images

__all__ = ["Partition", "PartitionIndices", "Rows", "image_clients"]

Rows = tuple[np.ndarray, ...]  # row numbers by client


@dataclass(frozen=True, eq=False)
class PartitionIndices:
    """Who holds which rows.

    Attributes
    ----------
    train, test : tuple of ndarray
        [M] each client's row numbers.
    names : ndarray of str
        [M] client names, ascending.
    apart : bool
        Whether test rows are those of a test set, with numbers of its own; else both are rows of one set.
    """

    train: Rows
    test: Rows
    names: np.ndarray
    apart: bool

    def __post_init__(self) -> None:
        for side in (self.train, self.test) if self.apart else (self.train + self.test,):
            rows = np.concatenate(side)
            if len(np.unique(rows)) < len(rows):
                raise DataError("a row is dealt twice", "deal every row once, to train one client or to test it")

    def rows(self, x: Tensor, y: Tensor, x_test: Tensor | None = None, y_test: Tensor | None = None) -> "Partition":
        """Make clients of rows x [N, ...], y [N], and of the test set's when it is apart."""
        if self.apart != (x_test is not None) or self.apart != (y_test is not None):
            raise ConfigError("these are not the sets that were dealt", "give a test set just when one was dealt")
        test = (x, y) if x_test is None or y_test is None else (x_test, y_test)
        return Partition(_gathered(self.train, self.names, x, y), _gathered(self.test, self.names, *test))


@dataclass(frozen=True, eq=False)
class Partition:
    """Training rows and test rows of the same clients, numbered alike."""

    train: Ragged
    test: Ragged


def image_clients(
    images: Images,
    holdings: PartitionIndices,
    *,
    of: Literal["train", "test"] = "train",
    dtype: torch.dtype = torch.float32,
    flat: bool = True,
) -> Partition:
    """Make clients of the pictures that were dealt to them.

    Parameters
    ----------
    images : Images
        The pictures.
    holdings : PartitionIndices
        Who holds which.
    of : {"train", "test"}
        Which part of the pictures was dealt; when test rows are apart, both were.
    dtype : torch.dtype
        Of the pixels, which are scaled to [0, 1].
    flat : bool
        Rows are [Ch * H * W] vectors, channel after channel; otherwise [Ch, H, W].
    """

    def pixels(x: Tensor) -> Tensor:
        pictures = x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2)  # [N, Ch, H, W]
        scaled = pictures.to(dtype, memory_format=torch.contiguous_format).div_(images.white)
        return scaled.flatten(1) if flat else scaled

    x_train, y_train, x_test, y_test = map(
        torch.from_numpy, (images.x_train, images.y_train, images.x_test, images.y_test)
    )
    if holdings.apart:
        dealt = holdings.rows(x_train, y_train, x_test, y_test)
    else:
        dealt = holdings.rows(x_train, y_train) if of == "train" else holdings.rows(x_test, y_test)
    return Partition(dealt.train.changed(pixels), dealt.test.changed(pixels))


def _gathered(held: Rows, names: np.ndarray, x: Tensor, y: Tensor) -> Ragged:
    layout = Layout.plan(names, np.array([len(rows) for rows in held]))
    index = torch.from_numpy(np.concatenate([held[i] for i in layout.order]))
    return Ragged(layout, x[index], y[index])
