# SPDX-License-Identifier: Apache-2.0
"""Images as clients: readers, rotations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.data.ragged import Ragged
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.studies.data import images as module
from coterie.studies.data.images import (
    Images,
    Rotated,
    cifar10,
    data_folder,
    digits,
    fashion_mnist,
    mnist,
    only_classes,
    rotated,
)


def numbered(n_train: int = 40, n_test: int = 20, colour: bool = False) -> Images:
    """Random pictures whose class is their own number, so that a row tells which picture it is."""
    draws = np.random.default_rng(0)
    tail = (6, 6, 3) if colour else (6, 6)
    x_train, x_test = (draws.integers(0, 256, (n, *tail), dtype=np.uint8) for n in (n_train, n_test))
    return Images(x_train, np.arange(n_train), x_test, np.arange(n_test))


def deal(images: Images | None = None, **changes: Any) -> Rotated:
    settings = {"n_clients": 16, "rows": 10, "test_rows": 5, "seed": 1}
    return rotated(images or numbered(), **(settings | changes))


def rows_of(clients: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """[M, N, ...] features and [M, N] classes."""
    block = next(clients.blocks())
    return block.x.numpy(), block.target.numpy()


# -- reading ----------------------------------------------------------------------------------------------------------
def test_mnist_is_the_published_set(shared_data: Path) -> None:
    images = mnist(shared_data)
    assert images.x_train.shape == (60000, 28, 28)
    assert images.x_test.shape == (10000, 28, 28)
    assert images.x_train.dtype == np.uint8
    assert images.y_train.dtype == np.int64
    assert images.y_train[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert images.y_test[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert images.x_train.mean() / 255 == pytest.approx(0.13066, abs=1e-5)


def test_fashion_mnist_is_the_published_set(shared_data: Path) -> None:
    images = fashion_mnist(shared_data)
    assert images.y_train[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert np.bincount(images.y_test).tolist() == [1000] * 10
    assert images.x_train.mean() / 255 == pytest.approx(0.28604, abs=1e-5)


def test_cifar10_is_the_published_set(shared_data: Path) -> None:
    images = cifar10(shared_data)
    assert images.x_train.shape == (50000, 32, 32, 3)
    assert images.x_test.shape == (10000, 32, 32, 3)
    assert images.y_train[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert images.y_test[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    # Published means of red, green and blue.
    assert (images.x_train.mean((0, 1, 2)) / 255).tolist() == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)


def test_mnist_can_tell_who_wrote_each_image(shared_data: Path) -> None:
    images = mnist(shared_data, writers=True)
    assert images.writer_train is not None
    assert images.writer_test is not None
    assert mnist(shared_data).writer_train is None
    assert len(np.unique(images.writer_train)) == 539
    assert len(np.unique(images.writer_test)) == 297
    assert not np.isin(images.writer_test, images.writer_train).any()


def test_kept_classes_are_numbered_anew_and_keep_their_pictures_and_writers() -> None:
    x = np.arange(12, dtype=np.uint8).reshape(12, 1, 1)
    y = np.array([3, 1, 2, 0, 3, 1])
    images = Images(x[:6], y, x[6:], y[::-1], writer_train=np.arange(6), writer_test=np.arange(6, 12))
    kept = only_classes(images, [3, 1])
    assert kept.y_train.tolist() == [0, 1, 0, 1]
    assert kept.x_train.ravel().tolist() == [0, 1, 4, 5]
    assert kept.y_test.tolist() == [1, 0, 1, 0]
    assert kept.writer_train is not None
    assert kept.writer_train.tolist() == [0, 1, 4, 5]
    assert kept.writer_test is not None
    assert kept.writer_test.tolist() == kept.x_test.ravel().tolist() == [6, 7, 10, 11]


@pytest.mark.parametrize("classes", [[], [1, 1], [4], [-1]])
def test_classes_that_are_not_there_cannot_be_kept(classes: list[int]) -> None:
    y = np.array([0, 1, 2, 3])
    images = Images(np.zeros((4, 1, 1), np.uint8), y, np.zeros((4, 1, 1), np.uint8), y)
    with pytest.raises(DataError, match=r"among \[0, 1, 2, 3\]"):
        only_classes(images, classes)


def test_digits_are_split_without_loss() -> None:
    images = digits(0)
    assert images.x_train.shape == (1438, 8, 8)
    assert images.x_test.shape == (359, 8, 8)
    assert images.white == images.x_train.max() == 16
    classes = np.bincount(images.y_train) + np.bincount(images.y_test)
    assert classes.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as scikit-learn documents
    everything = np.concatenate([images.x_train, images.x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    assert np.array_equal(np.unique(everything, axis=0), np.unique(load_digits().data, axis=0))


def test_digits_are_split_by_seed() -> None:
    assert np.array_equal(digits(3).x_test, digits(3).x_test)
    assert not np.array_equal(digits(3).x_test, digits(4).x_test)


def test_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    with pytest.raises(DataError, match=r"mnist\.npz"):
        mnist()
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="hint: correct or unset COTERIE_DATA"):
        data_folder()


def test_folder_is_found_beside_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert data_folder() == tmp_path / "shared" / "data"


def test_missing_folder_is_an_error_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "images.py"))
    with pytest.raises(DataError, match="hint: set COTERIE_DATA"):
        data_folder()


# -- rotations --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", ["train", "test"])
def test_every_row_is_the_turned_picture_in_unit_range(part: str) -> None:
    images, made = numbered(), deal()
    pictures = images.x_train if part == "train" else images.x_test
    clients, truth = (made.train, made.truth) if part == "train" else (made.test, made.test_truth)
    x, y = rows_of(clients)
    for i, j in enumerate(truth.tolist()):
        turned = np.stack([np.rot90(pictures[number], j) for number in y[i]])
        assert np.array_equal(x[i], (turned.reshape(len(turned), 36) / 255).astype(np.float32))


def test_real_digits_are_turned() -> None:
    images = digits(0)
    x, _ = rows_of(rotated(images, n_clients=8, rows=20, angles=(0, 180), seed=0).train)
    assert x.min() == 0.0
    assert x.max() == 1.0
    known = {picture.tobytes() for picture in images.x_train}
    for row in (x.reshape(-1, 8, 8) * 16).astype(np.uint8):
        assert row.tobytes() in known or np.ascontiguousarray(np.rot90(row, 2)).tobytes() in known


def test_every_picture_is_used_once_for_every_angle_when_all_are_dealt() -> None:
    made = deal()  # 16 clients x 10 rows = 40 pictures x 4 angles
    _, y = rows_of(made.train)
    for j in range(4):
        assert sorted(y[made.truth.numpy() == j].ravel()) == list(range(40))


def test_test_clients_use_all_test_pictures_by_default() -> None:
    made = deal()
    assert made.test.n_clients == 16  # 20 pictures x 4 angles / 5
    _, y = rows_of(made.test)
    for j in range(4):
        assert sorted(y[made.test_truth.numpy() == j].ravel()) == list(range(20))


def test_fewer_clients_hold_a_random_part_without_repetition() -> None:
    made = deal(n_clients=8, rows=7)
    _, y = rows_of(made.train)
    parts = [y[made.truth.numpy() == j].ravel() for j in range(4)]
    assert all(len(set(part)) == 14 for part in parts)
    assert len({tuple(sorted(part)) for part in parts}) == 4  # each angle has its own part
    assert set(parts[0]) != set(range(14))


def test_angles_are_balanced_and_dealt_in_random_order() -> None:
    images = numbered(400)
    truth = deal(images, n_clients=80, rows=20).truth
    assert truth.dtype == torch.int64
    assert truth.bincount().tolist() == [20] * 4
    assert not torch.equal(truth, torch.arange(80) % 4)
    assert not torch.equal(truth, truth.sort().values)
    assert sorted(deal(images, n_clients=10, rows=5).truth.bincount().tolist()) == [2, 2, 3, 3]


def test_train_and_test_clients_have_different_ascending_names() -> None:
    made = deal()
    train, test = made.train.names.tolist(), made.test.names.tolist()
    assert train[0] == "train-0000"
    assert test[-1] == "test-0015"
    assert train == sorted(train)
    assert not set(train) & set(test)


def test_same_seed_same_clients_and_another_seed_others() -> None:
    a, b, c = deal(seed=3), deal(seed=3), deal(seed=4)
    for one, two in ((a.train, b.train), (a.test, b.test)):
        assert all(np.array_equal(u, v) for u, v in zip(rows_of(one), rows_of(two), strict=True))
    assert torch.equal(a.truth, b.truth)
    assert not np.array_equal(rows_of(a.train)[1], rows_of(c.train)[1])
    assert not torch.equal(a.truth, c.truth)


def test_unflattened_rows_have_channels_first_and_flatten_to_the_flat_ones() -> None:
    images = numbered(colour=True)
    made, flat = deal(images, flat=False, dtype=torch.float64), deal(images, dtype=torch.float64)
    x, y = rows_of(made.train)
    assert x.shape == (16, 10, 3, 6, 6)
    assert np.array_equal(x.reshape(16, 10, 108), rows_of(flat.train)[0])
    turned = np.rot90(images.x_train[y[2, 3]], int(made.truth[2]))  # [H, W, 3]
    assert np.array_equal(x[2, 3], turned.transpose(2, 0, 1) / 255)


def test_grey_rows_have_one_channel() -> None:
    assert deal(flat=False).train.shape == (1, 6, 6)
    assert deal().train.shape == (36,)


def test_targets_fit_cross_entropy() -> None:
    images = numbered()
    small = Images(images.x_train, images.y_train.astype(np.uint8), images.x_test, images.y_test)
    assert rows_of(deal(small).train)[1].dtype == np.int64


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"n_clients": 20}, DataError, "at most 16 train clients"),
        ({"n_clients": 17}, DataError, "need 50 train images; there are 40"),
        ({"n_test_clients": 20}, DataError, "at most 16 test clients"),
        ({"test_rows": 21}, DataError, "need 21 test images; there are 20"),
        ({"angles": (0, 45)}, ConfigError, "multiples of 90"),
        ({"angles": (0, 360)}, ConfigError, "different"),
        ({"angles": ()}, ConfigError, "multiples of 90"),
        ({"n_clients": 0}, ConfigError, "positive"),
        ({"rows": 0}, ConfigError, "positive"),
        ({"n_test_clients": 0}, ConfigError, "positive"),
    ],
)
def test_impossible_deals_are_refused(wrong: dict[str, Any], kind: type[CoterieError], says: str) -> None:
    with pytest.raises(kind, match=says):
        deal(**wrong)


def test_oblong_pictures_cannot_be_turned_by_a_quarter() -> None:
    x = np.zeros((40, 4, 6), dtype=np.uint8)
    images = Images(x, np.arange(40), x, np.arange(40))
    with pytest.raises(DataError, match="use angles 0 and 180"):
        deal(images)
    assert deal(images, n_clients=4, angles=(0, 180)).train.shape == (24,)
