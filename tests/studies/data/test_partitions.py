# SPDX-License-Identifier: Apache-2.0
"""Rows dealt to clients: shards, Dirichlet shares and writers, and no test row in any training set."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, CoterieError, DataError
from coterie.studies.data.holdings import PartitionIndices, image_clients
from coterie.studies.data.images import Images, mnist
from coterie.studies.data.partitions import by_writer, dirichlet, shards

Y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))  # 60 rows of each of ten classes
Y_TEST = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 30))
WRITERS = np.repeat(np.arange(40), 15)  # 15 rows each

DEALS: dict[str, Callable[[int], PartitionIndices]] = {
    "shards": lambda seed: shards(Y, n_clients=20, classes_per_client=3, rows_per_client=21, seed=seed),
    "shards-apart": lambda seed: shards(
        Y, n_clients=20, classes_per_client=3, rows_per_client=21, y_test=Y_TEST, seed=seed
    ),
    "dirichlet": lambda seed: dirichlet(Y, n_clients=20, concentration=0.5, seed=seed),
    "dirichlet-apart": lambda seed: dirichlet(Y, n_clients=20, concentration=0.5, y_test=Y_TEST, seed=seed),
    "writers": lambda seed: by_writer(WRITERS, n_clients=20, seed=seed),
    "writers-apart": lambda seed: by_writer(WRITERS, writers_test=WRITERS[::2], n_clients=20, seed=seed),
}
every_deal = pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS.keys())


# -- no test row is in any training set -------------------------------------------------------------------------------
@every_deal
def test_no_test_row_is_in_any_training_set(deal: Callable[[int], PartitionIndices]) -> None:
    held = deal(0)
    train, test = np.concatenate(held.train), np.concatenate(held.test)
    assert len(np.unique(train)) == len(train) > 0
    assert len(np.unique(test)) == len(test) > 0
    if not held.apart:
        assert not np.isin(test, train).any()


@pytest.mark.parametrize("name", ["shards", "shards-apart", "writers"])
def test_no_test_picture_is_in_any_training_set(name: str) -> None:
    """The same on the pictures that clients hold in the end, each with its own number as its pixels."""
    x = np.arange(900, dtype=np.float64)[:, None, None]
    images = Images(x[:600], Y, x[600:], Y_TEST, white=1)
    made = image_clients(images, DEALS[name](0), dtype=torch.float64)
    train, test = set(made.train.x[:, 0].tolist()), set(made.test.x[:, 0].tolist())  # type: ignore[index]
    assert len(train) == made.train.layout.n_rows
    assert not train & test


def test_holdings_with_a_test_row_in_a_training_set_cannot_be_made() -> None:
    a, b, names = np.array([0, 1]), np.array([2, 3]), np.array(["a", "b"])
    PartitionIndices((a, b), (np.array([4]), np.array([5])), names, apart=False)
    PartitionIndices((a, b), (np.array([0]), np.array([1])), names, apart=True)  # of a test set: other rows
    with pytest.raises(DataError, match="dealt twice"):
        PartitionIndices((a, b), (np.array([4]), np.array([0])), names, apart=False)  # another client trains on it
    for apart in (False, True):
        with pytest.raises(DataError, match="dealt twice"):
            PartitionIndices((a, a), (np.array([4]), np.array([5])), names, apart)
    with pytest.raises(DataError, match="dealt twice"):
        PartitionIndices((a, b), (np.array([4]), np.array([4])), names, apart=True)


# -- all deals --------------------------------------------------------------------------------------------------------
@every_deal
def test_same_seed_same_holdings_and_another_seed_others(deal: Callable[[int], PartitionIndices]) -> None:
    one, same, other = deal(1), deal(1), deal(2)
    for a, b in zip(one.train + one.test, same.train + same.test, strict=True):
        assert np.array_equal(a, b)
    assert sorted(np.concatenate(one.train)) != sorted(np.concatenate(other.train)) or any(
        not np.array_equal(a, b) for a, b in zip(one.train, other.train, strict=True)
    )


@every_deal
def test_training_and_test_clients_are_numbered_alike_and_hold_their_own_rows(
    deal: Callable[[int], PartitionIndices],
) -> None:
    held = deal(0)
    x, x_test = torch.arange(600.0), torch.arange(600.0) + 1000
    y, y_test = torch.from_numpy(Y), torch.from_numpy(np.resize(Y_TEST, 600))
    made = held.rows(x, y, x_test, y_test) if held.apart else held.rows(x, y)
    assert made.train.names.tolist() == made.test.names.tolist() == held.names.tolist() == sorted(held.names)
    for i in range(len(held.names)):
        own = made.train.client(i)
        assert own.x[0].tolist() == held.train[i].tolist()
        assert own.target[0].tolist() == Y[held.train[i]].tolist()
        assert made.test.client(i).x[0].tolist() == (held.test[i] + 1000 * held.apart).tolist()


def test_rows_of_another_set_are_refused() -> None:
    x, y = torch.arange(600.0), torch.from_numpy(Y)
    with pytest.raises(ConfigError, match="not the sets that were dealt"):
        DEALS["shards"](0).rows(x, y, x, y)
    with pytest.raises(ConfigError, match="not the sets that were dealt"):
        DEALS["shards-apart"](0).rows(x, y)


# -- shards -----------------------------------------------------------------------------------------------------------
@given(
    n_classes=st.integers(1, 8), each=st.integers(1, 8), n_clients=st.integers(1, 30), extra=st.integers(0, 5),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_every_client_has_its_number_of_classes_evenly_and_test_rows_to_match(
    n_classes: int, each: int, n_clients: int, extra: int, seed: int
) -> None:
    each = min(each, n_classes)
    y = np.repeat(np.arange(n_classes) * 3, 30 * 15)  # class numbers need not be consecutive
    rows = each + extra
    held = shards(y, n_clients=n_clients, classes_per_client=each, rows_per_client=rows, test_rows_per_client=each * 2,
                  seed=seed)  # fmt: skip
    holders = np.zeros(3 * n_classes, dtype=int)
    for train, test in zip(held.train, held.test, strict=True):
        classes, counts = np.unique(y[train], return_counts=True)
        assert len(classes) == each
        assert counts.sum() == rows
        assert counts.max() - counts.min() <= 1
        test_classes, test_counts = np.unique(y[test], return_counts=True)
        assert test_classes.tolist() == classes.tolist()
        assert test_counts.tolist() == [2] * each
        holders[classes] += 1
    assert np.ptp(holders[::3]) <= 1  # every class has as many clients as any other, or one more


def test_sets_of_classes_are_random() -> None:
    """Of 45 pairs of ten classes, 200 clients should meet nearly all: a fixed pattern would meet few."""
    y = np.repeat(np.arange(10), 100)
    held = shards(y, n_clients=200, classes_per_client=2, rows_per_client=2, seed=0)
    assert len({tuple(np.unique(y[rows])) for rows in held.train}) >= 40


def test_all_that_is_left_for_everybody_is_tested_by_default() -> None:
    held = DEALS["shards"](0)  # 60 clients' places for ten classes: 6 x 7 = 42 of 60 rows; 18 left, 3 for each
    assert [len(rows) for rows in held.test] == [9] * 20
    assert [len(rows) for rows in DEALS["shards-apart"](0).test] == [15] * 20  # 30 of each class, 5 for each


def test_mnist_shards_of_the_paper(shared_data: Path) -> None:
    images = mnist(shared_data)
    held = shards(
        images.y_train, n_clients=100, classes_per_client=5, rows_per_client=150, y_test=images.y_test, seed=0
    )
    made = image_clients(images, held)
    assert made.train.counts.tolist() == [150] * 100
    assert made.test.counts.tolist() == [85] * 100  # 892 test fives for 50 clients: 17
    assert made.train.shape == (784,)
    assert float(made.train.x.max()) == 1.0  # type: ignore[union-attr]
    block = made.train.client(7)
    assert torch.equal(block.x[0], torch.from_numpy(images.x_train[held.train[7]]).flatten(1) / 255)
    assert torch.equal(block.target[0], torch.from_numpy(images.y_train[held.train[7]]))


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"classes_per_client": 11}, ConfigError, "there are 10 classes"),
        ({"classes_per_client": 0}, ConfigError, "there are 10 classes"),
        ({"rows_per_client": 2}, ConfigError, "a row of each"),
        ({"n_clients": 0}, ConfigError, "0 clients"),
        ({"rows_per_client": 31}, DataError, "ask for at most 30 training rows"),
        ({"rows_per_client": 30}, DataError, "0 test rows cannot match 3 classes"),
        ({"test_rows_per_client": 30}, DataError, "ask for at most 9 test rows"),
        ({"test_rows_per_client": 2}, DataError, "2 test rows cannot match"),
        ({"y_test": Y_TEST[Y_TEST > 0]}, DataError, "0 test rows"),
    ],
)
def test_impossible_shards_are_refused(wrong: dict[str, Any], kind: type[CoterieError], says: str) -> None:
    settings = {"n_clients": 20, "classes_per_client": 3, "rows_per_client": 21, "seed": 0}
    with pytest.raises(kind, match=says):
        shards(Y, **(settings | wrong))


# -- Dirichlet --------------------------------------------------------------------------------------------------------
def class_shares(rows: tuple[np.ndarray, ...], y: np.ndarray) -> np.ndarray:
    counts = np.stack([np.bincount(y[own], minlength=10) for own in rows])
    return counts / counts.sum(1, keepdims=True)


def test_dirichlet_deals_every_row_and_test_rows_by_the_same_shares() -> None:
    y = np.repeat(np.arange(10), 1000)
    held = dirichlet(y, n_clients=10, concentration=1.0, seed=0, test_share=0.5)
    assert len(np.concatenate(held.train)) == len(np.concatenate(held.test)) == 5000
    # Cuts are at the nearest of 500 rows: the two sides agree.
    assert np.array_equal(class_shares(held.train, y), class_shares(held.test, y))


def test_concentration_tells_how_much_clients_differ() -> None:
    y = np.repeat(np.arange(10), 1000)
    most = [
        class_shares(dirichlet(y, n_clients=10, concentration=a, seed=0).train, y).max(1).mean()
        for a in (0.05, 1.0, 1e4)
    ]
    assert most[0] > 0.6 > most[1] > 0.2 > most[2]  # a client's largest class; 0.1 when all are alike
    assert most[2] < 0.11


def test_dirichlet_is_drawn_until_everybody_has_rows_enough() -> None:
    few = [min(map(len, dirichlet(Y, n_clients=20, concentration=0.5, min_rows=1, seed=s).train)) for s in range(10)]
    enough = [min(map(len, dirichlet(Y, n_clients=20, concentration=0.5, min_rows=8, seed=s).train)) for s in range(10)]
    assert min(few) < 8 <= min(enough)
    with pytest.raises(ConfigError, match="always had fewer than 25 rows"):
        dirichlet(Y, n_clients=20, concentration=0.5, min_rows=25, seed=0)  # there are 24 for each


@pytest.mark.parametrize(
    "wrong", [{"n_clients": 0}, {"concentration": 0.0}, {"min_rows": -1}, {"test_share": 0.0}, {"test_share": 1.0}]
)
def test_impossible_dirichlet_shares_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dirichlet(Y, **({"n_clients": 5, "concentration": 1.0, "seed": 0} | wrong))


# -- writers ----------------------------------------------------------------------------------------------------------
def test_every_writer_is_a_client_of_its_own_rows() -> None:
    held = by_writer(WRITERS[::-1], seed=0)
    assert held.names.tolist() == [f"writer-{i:04d}" for i in range(40)]
    for i, (train, test) in enumerate(zip(held.train, held.test, strict=True)):
        assert set(WRITERS[::-1][np.concatenate([train, test])]) == {i}
        assert (len(train), len(test)) == (12, 3)


def test_writers_with_few_rows_are_left_out_and_the_others_keep_a_row_for_each_purpose() -> None:
    writers = np.array(["b", "a", "b", "c", "c", "c", "c"])
    held = by_writer(writers, seed=0)
    assert held.names.tolist() == ["writer-b", "writer-c"]
    assert [len(rows) for rows in held.train] == [1, 3]
    assert [len(rows) for rows in held.test] == [1, 1]


def test_a_test_set_by_the_same_writers_is_used_as_it_is() -> None:
    held = by_writer(np.array([5, 5, 7, 7, 9, 9]), writers_test=np.array([9, 7, 8, 7]), seed=0)
    assert [sorted(rows.tolist()) for rows in held.train] == [[0, 1], [2, 3], [4, 5]]
    assert [sorted(rows.tolist()) for rows in held.test] == [[], [1, 3], [0]]


def test_mnist_by_writer(shared_data: Path) -> None:
    images = mnist(shared_data, writers=True)
    here = image_clients(images, by_writer(images.writer_train, seed=0))
    new = image_clients(images, by_writer(images.writer_test, seed=0), of="test")
    assert (here.train.n_clients, new.train.n_clients) == (539, 297)
    assert here.train.layout.n_rows + here.test.layout.n_rows == 60000
    assert new.train.layout.n_rows + new.test.layout.n_rows == 10000
    assert not set(here.train.names) & set(new.train.names)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"n_clients": 41}, DataError, "40 writers have 2 rows"),
        ({"n_clients": 0}, ConfigError, "at least one writer"),
        ({"min_rows": 1}, ConfigError, "at least 2 rows"),
        ({"min_rows": 16}, DataError, "0 writers have 16 rows"),
        ({"test_share": 1.5}, ConfigError, "between 0 and 1"),
        ({"writers": None}, DataError, "have no writers"),
    ],
)
def test_impossible_writers_are_refused(wrong: dict[str, Any], kind: type[CoterieError], says: str) -> None:
    with pytest.raises(kind, match=says):
        by_writer(**({"writers": WRITERS, "seed": 0} | wrong))


# -- pictures ---------------------------------------------------------------------------------------------------------
def test_colour_pictures_have_channels_first() -> None:
    x = np.random.default_rng(0).integers(0, 256, (600, 4, 5, 3), dtype=np.uint8)
    images = Images(x, Y, x[:300], Y_TEST)
    held = DEALS["shards-apart"](0)
    made = image_clients(images, held, flat=False)
    assert made.train.shape == (3, 4, 5)
    expected = torch.from_numpy(x[held.train[3]]).permute(0, 3, 1, 2) / 255
    assert torch.equal(made.train.client(3).x[0], expected)
    assert torch.equal(image_clients(images, held).train.client(3).x[0], expected.flatten(1))


def test_pictures_themselves_stay_as_they_are() -> None:
    x = np.random.default_rng(0).random((600, 2, 2))
    images = Images(x.copy(), Y, x[:300].copy(), Y_TEST, white=16)
    image_clients(images, DEALS["shards-apart"](0), dtype=torch.float64)
    assert np.array_equal(images.x_train, x)
    assert np.array_equal(replace(images).y_train, Y)
