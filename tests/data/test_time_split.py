# SPDX-License-Identifier: Apache-2.0
"""Rows that are held out by time: the last ones of every client, and folds that are blocks."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.data.draws import First, Fold, Share, fold_of
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError, DataError


def _rows(in_time: bool = True) -> Ragged:
    """Three clients with 5, 7 and 11 rows, whose only feature is the row's place in its client."""
    place = np.concatenate([np.arange(5), np.arange(7), np.arange(11)])
    owner = np.repeat(["b", "c", "a"], [5, 7, 11])
    rows = Ragged.from_groups(torch.from_numpy(place[:, None].astype(float)), None, owner)
    return rows.in_order_of(rows.x[:, 0].numpy()) if in_time else rows


def _places(rows: Ragged) -> dict[str, list[int]]:
    return {str(name): rows.client(i).x[0, :, 0].int().tolist() for i, name in enumerate(rows.names)}


def test_the_last_rows_are_held_out() -> None:
    rest, held = _rows().split(0.4, seed=3)
    assert _places(rest) == {"a": list(range(7)), "b": [0, 1, 2], "c": [0, 1, 2, 3]}
    assert _places(held) == {"a": [7, 8, 9, 10], "b": [3, 4], "c": [4, 5, 6]}
    assert _places(rest.split(0.5, seed=3, purpose="validation")[1]) == {"a": [3, 4, 5, 6], "b": [1, 2], "c": [2, 3]}


def test_new_clients_show_their_first_rows() -> None:
    judged, shown = _rows().divide(First(2), seed=0, purpose="few shots")
    assert _places(shown) == {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    assert _places(judged)["b"] == [2, 3, 4]


def test_folds_are_blocks_of_the_sizes_that_random_folds_have() -> None:
    rows = _rows()
    by_fold = [_places(own) for _, own in rows.fold_by_fold(3, seed=0)]
    assert [one["a"] for one in by_fold] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [one["b"] for one in by_fold] == [[0, 1], [2, 3], [4]]
    numbered = rows.with_folds(3, seed=0)
    assert [numbered.client(i).folds[0].tolist() for i in (0, 1)] == [[0] * 4 + [1] * 4 + [2] * 3, [0, 0, 1, 1, 2]]
    counts = np.array([1, 2, 5, 11])
    for number in range(3):
        sizes = [int((fold_of(np.arange(n), np.full(n, n), 3, in_time=True) == number).sum()) for n in counts]
        assert sizes == Fold(number, 3).taken(counts).tolist()
        assert Share(0.4).takes_in_time(np.arange(11), np.full(11, 11)).sum() == Share(0.4).taken(np.array([11]))[0]


def test_rows_are_thinned_at_random_all_the_same() -> None:
    assert _places(_rows().thinned(3, seed=0))["a"] != [0, 1, 2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Rows of a diary that stand in no order."""
    day = np.random.default_rng(0).permutation(30)
    frame = pd.DataFrame({"who": np.tile(["x", "y", "z"], 10), "age": np.arange(30.0), "mood": day * 1.0 + 0.5})
    frame["on"] = (pd.Timestamp("2024-01-01") + pd.to_timedelta(day, "D")).strftime("%Y-%m-%d")
    frame["step"] = day
    frame.to_csv(tmp_path / "diary.csv", index=False)
    return tmp_path / "diary.csv"


@pytest.mark.parametrize("column", ["on", "step"])
def test_a_column_of_dates_or_numbers_puts_rows_in_order(file: Path, column: str) -> None:
    exclude = ["step"] if column == "on" else ["on"]
    how = {"client": "who", "target": "mood", "exclude": exclude, "test_size": 0.3}
    clients = coterie.read(file, **how, split=f"time:{column}")
    assert clients.test is not None
    for name, rows in clients.train.frame().groupby("who"):
        later = clients.test.frame()
        later = later[later.who == name]
        assert rows.mood.is_monotonic_increasing
        assert later.mood.min() > rows.mood.max()
    assert list(clients.schema.feature_names) == (["age"] if column == "on" else ["age", "step"])  # a date only orders
    on_disk = coterie.read(file, **how, split=f"time:{column}", memory=0)
    assert on_disk.test is not None
    assert on_disk.test.frame().equals(clients.test.frame())


def test_without_a_column_the_order_of_the_file_counts(file: Path) -> None:
    clients = coterie.read(file, client="who", target="mood", exclude=["on", "step"], split="time")
    assert clients.test is not None
    assert clients.test.frame().row.tolist() == [24, 27, 25, 28, 26, 29]
    x, groups = np.arange(30.0)[:, None], np.tile(["x", "y", "z"], 10)
    arrays = coterie.from_arrays(x, x[:, 0], groups, split="time")
    assert arrays.test is not None
    assert arrays.test.table()["row"].to_pylist() == [24, 27, 25, 28, 26, 29]


def test_what_cannot_be_ordered_is_refused(file: Path) -> None:
    with pytest.raises(DataError, match="column 'who' holds neither times nor numbers"):
        coterie.read(file, client="step", target="mood", exclude=["on"], split="time:who")
    with pytest.raises(DataError, match="no column 'when'"):
        coterie.read(file, client="who", target="mood", split="time:when")
    with pytest.raises(ConfigError, match="split is 'later'"):
        coterie.read(file, client="who", target="mood", split="later")
