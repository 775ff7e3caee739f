# SPDX-License-Identifier: Apache-2.0
"""Images as clients: readers, and the rotated benchmark of IFCA.

Ghosh et al., NeurIPS 2020, Section 6.2: every image is turned by every angle, and for each angle the images are dealt,
without replacement, to clients that hold only that angle. MNIST, Fashion-MNIST and CIFAR-10 are read from a folder
(nothing is downloaded); the small digits come with scikit-learn.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie import keys as _keys
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError, DataError

__all__ = [
    "Images",
    "Rotated",
    "cifar10",
    "data_folder",
    "digits",
    "fashion_mnist",
    "mnist",
    "only_classes",
    "rotated",
]


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their classes, as stored.

    Attributes
    ----------
    x_train, x_test : ndarray
        [N, H, W] or [N, H, W, 3] pixels, uint8.
    y_train, y_test : ndarray
        [N] classes, int64.
    white : int
        The largest value that a pixel can take.
    writer_train, writer_test : ndarray, optional
        [N] who wrote each image, where that is known.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    white: int = 255
    writer_train: np.ndarray | None = None
    writer_test: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Rotated:
    """Clients that each hold images turned by one angle.

    Attributes
    ----------
    train, test : Ragged
        Training clients and test clients; their names differ.
    truth, test_truth : Tensor
        [M] number of each client's angle, int64.
    """

    train: Ragged
    test: Ragged
    truth: Tensor
    test_truth: Tensor


# -- reading ----------------------------------------------------------------------------------------------------------
def data_folder() -> Path:
    """Find the folder with the image files.

    The environment variable COTERIE_DATA names it; else it is ``../shared/data``, seen from the current folder or from
    the repository.

    Raises
    ------
    DataError
        If there is no such folder.
    """
    named = os.environ.get("COTERIE_DATA")
    if named is not None:
        if Path(named).is_dir():
            return Path(named)
        raise DataError(f"COTERIE_DATA names {named!r}, which is not a folder", "correct or unset COTERIE_DATA")
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        folder = root.parent / "shared" / "data"
        if folder.is_dir():
            return folder
    raise DataError("there is no folder ../shared/data", "set COTERIE_DATA to the folder that holds mnist.npz")


def mnist(folder: Path | None = None, *, writers: bool = False) -> Images:
    """Read MNIST: 60,000 and 10,000 grey images, 28 x 28, from ``mnist.npz``.

    With `writers` also who wrote them, from ``mnist_writer_ids.npz``: 539 people the training images, and 297 others the
    test images.
    """
    images = _grey("mnist.npz", folder)
    if not writers:
        return images
    who = _load("mnist_writer_ids.npz", folder)
    return replace(images, writer_train=who["writer_train"], writer_test=who["writer_test"])


def fashion_mnist(folder: Path | None = None) -> Images:
    """Read Fashion-MNIST: 60,000 and 10,000 grey images, 28 x 28, from ``fashion_mnist.npz``."""
    return _grey("fashion_mnist.npz", folder)


def cifar10(folder: Path | None = None) -> Images:
    """Read CIFAR-10: 50,000 and 10,000 colour images, 32 x 32, from the six files in ``cifar10/``."""
    parts = [_cifar_part(f"cifar10/train_{i}.npz", folder) for i in range(1, 6)]
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    x_test, y_test = _cifar_part("cifar10/test.npz", folder)
    return Images(x_train, y_train, x_test, y_test)


def digits(seed: int, *, test_share: float = 0.2) -> Images:
    """Take scikit-learn's 1,797 handwritten digits, 8 x 8, and set a random share aside as test images.

    Parameters
    ----------
    seed : int
        Decides which images are test images.
    test_share : float
        Share of the images that become test images.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = found.images.astype(np.uint8), found.target.astype(np.int64)
    order = _permutation(len(x), seed, "digits")
    n_test = round(test_share * len(x))
    test, train = order[:n_test], order[n_test:]
    return Images(x[train], y[train], x[test], y[test], white=16)


def only_classes(images: Images, classes: Sequence[int]) -> Images:
    """Keep the images of these classes, which are numbered anew, 0, 1, ..., in the given order.

    Raises
    ------
    DataError
        If there are no training or test images of a class.
    """
    wanted = np.array(classes, dtype=np.int64)
    held = [np.isin(wanted, y) for y in (images.y_train, images.y_test)]
    if not len(wanted) or len(np.unique(wanted)) < len(wanted) or not np.all(held):
        there = sorted(set(images.y_train.tolist()) & set(images.y_test.tolist()))
        raise DataError(f"cannot keep the classes {list(classes)}", f"choose different ones among {there}")
    number = np.full(1 + max(images.y_train.max(), images.y_test.max()), -1)
    number[wanted] = np.arange(len(wanted))
    train, test = number[images.y_train] >= 0, number[images.y_test] >= 0
    return Images(
        images.x_train[train],
        number[images.y_train[train]],
        images.x_test[test],
        number[images.y_test[test]],
        images.white,
        None if images.writer_train is None else images.writer_train[train],
        None if images.writer_test is None else images.writer_test[test],
    )


def _grey(name: str, folder: Path | None) -> Images:
    z = _load(name, folder)
    y_train, y_test = z["y_train"].astype(np.int64), z["y_test"].astype(np.int64)
    return Images(z["X_train"], y_train, z["X_test"], y_test)


def _cifar_part(name: str, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Undo the lossless filter: each plane holds differences along both axes, red and blue also from green."""
    z = _load(name, folder)
    plane = z["Q"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)  # uint8 wraps, as intended
    green = plane[0]
    return np.stack([plane[1] + green, green, plane[2] + green], -1), z["y"].astype(np.int64)


def _load(name: str, folder: Path | None) -> dict[str, np.ndarray]:
    path = (data_folder() if folder is None else folder) / name
    if not path.is_file():
        raise DataError(f"there is no file {path}", "set COTERIE_DATA to the folder that holds it")
    with np.load(path) as z:
        return dict(z)


# -- the rotated benchmark --------------------------------------------------------------------------------------------
def rotated(
    images: Images,
    *,
    n_clients: int,
    rows: int,
    angles: tuple[int, ...] = (0, 90, 180, 270),
    n_test_clients: int | None = None,
    test_rows: int | None = None,
    seed: int,
    dtype: torch.dtype = torch.float32,
    flat: bool = True,
) -> Rotated:
    """Turn all images by every angle and deal them, angle by angle and without replacement, to clients.

    Parameters
    ----------
    images : Images
        Training images for the clients, test images for the test clients.
    n_clients, rows : int
        M clients with N images each, spread evenly over the angles. When that does not take all of the images, it is a
        random part of them.
    angles : tuple of int
        Degrees, counter-clockwise (as `numpy.rot90`): multiples of 90.
    n_test_clients, test_rows : int, optional
        The same for test clients: by default as many as the test images allow, with `rows` images each.
    seed : int
        Decides who holds which images and which angle. Names tell nothing: angles are dealt to them at random.
    dtype : torch.dtype
        Of the pixels, which are scaled to [0, 1].
    flat : bool
        Rows are [Ch * H * W] vectors, channel after channel; otherwise [Ch, H, W].

    Returns
    -------
    Rotated
        Train and test clients and the number of each one's angle.

    Raises
    ------
    ConfigError
        If the angles or sizes make no sense.
    DataError
        If there are too few images.
    """
    _check_angles(angles, images.x_train.shape)
    test_rows = rows if test_rows is None else test_rows
    if min(n_clients, rows, test_rows) < 1 or (n_test_clients is not None and n_test_clients < 1):
        raise ConfigError("numbers of clients and of rows must be positive", "ask for at least one client with one row")
    if n_test_clients is None:
        n_test_clients = len(angles) * max(len(images.x_test) // test_rows, 1)
    turns = np.array(angles) // 90 % 4  # [K]
    made = []
    for part, x, y, m, n in (
        ("train", images.x_train, images.y_train, n_clients, rows),
        ("test", images.x_test, images.y_test, n_test_clients, test_rows),
    ):
        index, truth = _who_holds_what(len(x), part, m, n, turns, seed)  # [M, N], [M]
        pixels = _turned(x, index, turns[truth], images.white, dtype)  # [M, N, Ch, H, W]
        classes = torch.from_numpy(y[index].astype(np.int64, copy=False))
        clients = Ragged.from_blocks(pixels.flatten(2) if flat else pixels, classes, _names(part, m))
        made.append((clients, torch.from_numpy(truth)))
    (train, truth_train), (test, truth_test) = made
    return Rotated(train, test, truth_train, truth_test)


def _check_angles(angles: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if not angles or any(angle % 90 for angle in angles) or len({angle % 360 for angle in angles}) < len(angles):
        raise ConfigError(f"cannot turn images by {angles} degrees", "give different multiples of 90")
    if shape[1] != shape[2] and any(angle % 180 for angle in angles):
        raise DataError(f"images of {shape[1]} x {shape[2]} pixels change shape at 90 degrees", "use angles 0 and 180")


def _who_holds_what(
    n_images: int, part: str, n_clients: int, rows: int, turns: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the image numbers [M, N] and the angle number [M] of each client."""
    most = -(-n_clients // len(turns))  # clients of the angle that has most
    if most * rows > n_images:
        raise DataError(
            f"{n_clients} {part} clients with {rows} images of one angle each need {most * rows} {part} images; "
            f"there are {n_images}",
            f"ask for at most {len(turns) * (n_images // rows)} {part} clients, or fewer images each",
        )
    truth = _permutation(n_clients, seed, part, "clients") % len(turns)
    index = np.empty((n_clients, rows), dtype=np.int64)
    for j, turn in enumerate(turns):
        own = np.flatnonzero(truth == j)
        order = _permutation(n_images, seed, part, "images", int(turn))
        index[own] = order[: len(own) * rows].reshape(len(own), rows)
    return index, truth


def _turned(x: np.ndarray, index: np.ndarray, turns: np.ndarray, white: int, dtype: torch.dtype) -> Tensor:
    """Fill one array client by client, so that the images are never held twice.  [M, N, Ch, H, W]"""
    pictures = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)  # [N, Ch, H, W], a view
    made = torch.empty(*index.shape, *pictures.shape[1:], dtype=dtype)
    for client, held, turn in zip(made.numpy(), index, turns, strict=True):
        np.divide(np.rot90(pictures[held], int(turn), axes=(2, 3)), white, out=client)
    return made


def _names(part: str, n_clients: int) -> np.ndarray:
    width = max(4, len(str(n_clients - 1)))
    return np.array([f"{part}-{i:0{width}d}" for i in range(n_clients)])


def _permutation(n: int, *parts: int | str) -> np.ndarray:
    return torch.randperm(n, generator=_keys.generator(*parts)).numpy()
