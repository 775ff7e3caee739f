# SPDX-License-Identifier: Apache-2.0
"""EMNIST and FEMNIST are read from the published files, and their absence is told."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from coterie.errors import ConfigError, DataError
from coterie.studies.data.handwriting import emnist, femnist


def idx(values: np.ndarray) -> bytes:
    """Write an idx file as the format's description says: 0, 0, 8 (bytes), number of axes, big-endian sizes, bytes."""
    sizes = b"".join(int(n).to_bytes(4, "big") for n in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


def write_emnist(folder: Path, split: str = "balanced", first_class: int = 0) -> np.ndarray:
    """Write 3 training images of 2 x 2 pixels and 2 test images; the former as the files hold them."""
    place = folder / "emnist"
    place.mkdir()
    x = np.arange(20).reshape(5, 2, 2)
    for part, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        labels = np.arange(5)[rows] + first_class
        (place / f"emnist-{split}-{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x[rows])))
        (place / f"emnist-{split}-{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return x[:3]


def test_emnist_images_are_turned_upright(tmp_path: Path) -> None:
    stored = write_emnist(tmp_path)
    images = emnist(folder=tmp_path)
    assert images.x_train.tolist() == stored.transpose(0, 2, 1).tolist()
    assert images.y_train.tolist() == [0, 1, 2]
    assert images.y_test.tolist() == [3, 4]
    assert images.x_train.dtype == np.uint8
    assert images.y_train.dtype == np.int64


def test_emnist_letters_count_from_zero(tmp_path: Path) -> None:
    write_emnist(tmp_path, "letters", first_class=1)
    assert emnist("letters", tmp_path).y_train.tolist() == [0, 1, 2]


def test_missing_emnist_says_which_file_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"emnist-balanced-train-images-idx3-ubyte(.|\n)*hint: copy .*gzip\.zip"):
        emnist(folder=tmp_path)
    with pytest.raises(ConfigError, match=r"no split 'all'(.|\n)*balanced"):
        emnist("all", tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", [b"", b"\x00\x00\x08\x03", idx(np.zeros((3, 2, 2)))[:-1], idx(np.zeros(12))])
def test_broken_emnist_is_refused(tmp_path: Path, broken: bytes) -> None:
    write_emnist(tmp_path)
    (tmp_path / "emnist" / "emnist-balanced-train-images-idx3-ubyte").write_bytes(broken)
    with pytest.raises(DataError, match="is not an idx file"):
        emnist(folder=tmp_path)


def test_half_a_gzip_file_is_refused(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    path = tmp_path / "emnist" / "emnist-balanced-train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match="cannot unpack"):
        emnist(folder=tmp_path)


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    write_emnist(tmp_path)
    (tmp_path / "emnist" / "emnist-balanced-test-labels-idx1-ubyte").write_bytes(idx(np.zeros(1)))
    with pytest.raises(DataError, match="2 test images and 1 labels"):
        emnist(folder=tmp_path)


def write_leaf(place: Path, name: str, users: dict[str, tuple[list[list[float]], list[int]]]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    document = {"users": list(users), "user_data": {u: {"x": x, "y": y} for u, (x, y) in users.items()}}
    (place / name).write_text(json.dumps(document))


def test_femnist_keeps_the_writer_of_every_image_across_files(tmp_path: Path) -> None:
    white, grey = [1.0] * 784, [0.2] * 784  # 0.2 x 255 = 51
    write_leaf(tmp_path / "femnist" / "train", "all_data_0.json", {"f1": ([white, grey], [3, 61])})
    write_leaf(tmp_path / "femnist" / "train", "all_data_1.json", {"f22": ([grey], [10])})
    write_leaf(tmp_path / "femnist" / "test", "all_data_0.json", {"f1": ([white], [3])})
    images = femnist(tmp_path)
    assert images.x_train.shape == (3, 28, 28)
    assert images.x_train[:, 0, 0].tolist() == [255, 51, 51]
    assert images.y_train.tolist() == [3, 61, 10]
    assert images.writer_train is not None
    assert images.writer_train.tolist() == ["f1", "f1", "f22"]
    assert images.writer_test is not None
    assert images.writer_test.tolist() == ["f1"]


def test_missing_femnist_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"femnist/train/\*\.json(.|\n)*hint: make FEMNIST with LEAF"):
        femnist(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"user_data": {"a": {"x": [[0.5]], "y": [1]}}}', '{"user_data": {"a": {"x": [], "y": [1]}}}'],
)
def test_broken_femnist_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "femnist" / "train").mkdir(parents=True)
    (tmp_path / "femnist" / "train" / "a.json").write_text(text)
    with pytest.raises(DataError, match="not a file of LEAF's FEMNIST"):
        femnist(tmp_path)
