# SPDX-License-Identifier: Apache-2.0
"""EMNIST and FEMNIST from a local copy, in the files that their authors publish.

Nothing is downloaded: `data_folder` tells where the copies are looked for, and a missing one is an error that says which
files are wanted. MNIST by writer (`images.mnist` with `writers`) stands in where there is no copy.
"""

import gzip
import json
import math
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from coterie.errors import ConfigError, DataError
from coterie.studies.data.images import Images, data_folder

__all__ = ["EmnistSplit", "emnist", "femnist"]

EmnistSplit = Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"]

_SIDE = 28  # pixels


def emnist(split: EmnistSplit = "balanced", folder: Path | None = None) -> Images:
    """Read EMNIST: grey images of letters and digits, 28 x 28, from the published idx files in ``emnist/``.

    Parameters
    ----------
    split : {"balanced", "byclass", "bymerge", "digits", "letters", "mnist"}
        Which of the published splits; `balanced` has 47 classes, of which the first ten are the digits.
    folder : Path, optional
        Where the folder ``emnist`` is; `data_folder` by default.

    Returns
    -------
    Images
        Upright images (the files hold them transposed), classes from 0 (the files of `letters` count from 1).

    Raises
    ------
    ConfigError
        If there is no such split.
    DataError
        If a file is not there or not what it should be.
    """
    if split not in get_args(EmnistSplit):
        raise ConfigError(f"EMNIST has no split {split!r}", f"choose among {', '.join(get_args(EmnistSplit))}")
    place = (data_folder() if folder is None else folder) / "emnist"
    (x_train, y_train), (x_test, y_test) = (_read_emnist(place, split, part) for part in ("train", "test"))
    return Images(x_train, y_train, x_test, y_test)


def _read_emnist(place: Path, split: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    x = _read_idx(place / f"emnist-{split}-{part}-images-idx3-ubyte", 3)
    y = _read_idx(place / f"emnist-{split}-{part}-labels-idx1-ubyte", 1)
    if len(x) != len(y):
        raise DataError(f"{place} has {len(x)} {part} images and {len(y)} labels", "copy the files again")
    return x.transpose(0, 2, 1).copy(), y.astype(np.int64) - (split == "letters")


def _read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an idx file of bytes, packed by gzip or not: a magic number, the sizes, the bytes."""
    packed = path.with_name(path.name + ".gz")
    if not path.is_file() and not packed.is_file():
        raise DataError(
            f"there is no file {path}, with or without .gz",
            "copy the files of EMNIST's gzip.zip there, or set COTERIE_DATA to the folder that holds emnist/",
        )
    try:
        content = path.read_bytes() if path.is_file() else gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"cannot unpack {packed}: {error}", "copy the file again") from error
    sizes = np.frombuffer(content[4 : 4 + 4 * axes], dtype=">u4").astype(np.int64)
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) != 4 + 4 * axes + math.prod(sizes.tolist()):
        raise DataError(f"{path} is not an idx file of bytes with {axes} axes, or not all of it", "copy the file again")
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(sizes)


def femnist(folder: Path | None = None) -> Images:
    """Read FEMNIST: grey images of letters and digits by writer, 28 x 28, from LEAF's files in ``femnist/``.

    Parameters
    ----------
    folder : Path, optional
        Where the folder ``femnist`` is, with LEAF's ``train/*.json`` and ``test/*.json``; `data_folder` by default.

    Returns
    -------
    Images
        Images, classes (62: digits, capitals, small letters) and writers; as LEAF made its split, a writer is in both parts
        (by sample) or in one (by user).

    Raises
    ------
    DataError
        If the files are not there or not what they should be.
    """
    place = (data_folder() if folder is None else folder) / "femnist"
    (x_train, y_train, who_train), (x_test, y_test, who_test) = (_read_leaf(place / p) for p in ("train", "test"))
    return Images(x_train, y_train, x_test, y_test, 255, who_train, who_test)


def _read_leaf(place: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read one part, file after file: pixels [N, 28, 28], classes [N], writers [N]."""
    files = sorted(place.glob("*.json"))
    if not files:
        raise DataError(
            f"there are no files {place / '*.json'}",
            "make FEMNIST with LEAF and copy its data/train and data/test, or set COTERIE_DATA to what holds femnist/",
        )
    found = [rows for path in files for rows in _read_leaf_file(path)]
    x, y, who = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return x, y, who


def _read_leaf_file(path: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    try:
        users: dict[str, Any] = json.loads(path.read_bytes())["user_data"]
        return [_user_rows(name, rows) for name, rows in users.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a file of LEAF's FEMNIST: {error!r}", "copy the file again") from error


def _user_rows(name: str, rows: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Turn LEAF's numbers from 0 to 1 into the bytes that they were."""
    x = np.rint(np.array(rows["x"], dtype=np.float64) * 255).astype(np.uint8).reshape(-1, _SIDE, _SIDE)
    y = np.array(rows["y"], dtype=np.int64)
    if x.shape[0] != len(y):
        raise ValueError(f"writer {name!r} has {x.shape[0]} images and {len(y)} classes")
    return x, y, np.full(len(y), name)
