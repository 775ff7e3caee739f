# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.secure.fixed_point import MOST_NODES, Layout, add, decode, encode, subtract


def added(*parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    layout, total = encode(parts[0], len(parts))
    for part in parts[1:]:
        add(layout, total, encode(part, len(parts))[1])
    return decode(layout, total)


def test_doubles_come_back_as_they_were() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=1000) * 10.0 ** draw.integers(-12, 40, size=1000)
    values[:4] = 0.0, -0.0, 2.0**-43, -(2.0**-43)
    found = added({"a": values})["a"]
    large = np.abs(values) >= 2.0**-43
    assert np.array_equal(found[large], values[large])
    np.testing.assert_allclose(found[~large], values[~large], rtol=0, atol=2.0**-97)


def test_single_precision_comes_back_to_its_last_digits() -> None:
    values = np.random.default_rng(1).normal(size=500).astype(np.float32)
    found = added({"a": values})["a"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=0, atol=2.0**-48)


def test_sums_of_products_over_a_million_rows_are_exact_to_nine_digits() -> None:
    # 1,000,000 rows on 8 nodes, of columns of very different size: sums of products between 1e-6 and 1e22
    draw = np.random.default_rng(2)
    rows = draw.normal(size=(1_000_000, 3)) * [1e-6, 1.0, 1e8] + [0.0, 3.0, 1e7]
    parts = [{"gram": block.T @ block} for block in np.array_split(rows, 8)]
    found = added(*parts)["gram"]
    exact = np.array([[math.fsum(part["gram"][i, j] for part in parts) for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(found, exact, rtol=1e-15, atol=0)
    direct = np.array([[math.fsum(rows[:, i] * rows[:, j]) for j in range(3)] for i in range(3)])
    np.testing.assert_allclose(found, direct, rtol=1e-9, atol=1e-9)


def test_cancelling_values_leave_nothing() -> None:
    big = np.array([1e30, -1e-12, 12345.678])
    assert np.array_equal(added({"a": big}, {"a": -big}, {"a": big}, {"a": -big})["a"], np.zeros(3))


def test_subtracting_undoes_adding() -> None:
    draw = np.random.default_rng(3)
    arrays = {"a": draw.normal(size=(3, 4)), "b": draw.normal(size=5).astype(np.float32), "n": draw.integers(0, 9, 6)}
    layout, words = encode(arrays, 2)
    noise = draw.integers(0, 1 << 64, size=len(words), dtype=np.uint64)
    total = words.copy()
    add(layout, total, noise)
    assert not np.array_equal(total, words)
    subtract(layout, total, noise)
    assert np.array_equal(total, words)


def test_carries_go_through_all_words() -> None:
    layout, total = encode({"a": np.array([-(2.0**-96)])}, 2)
    assert total.tolist() == [(1 << 64) - 1] * 4
    add(layout, total, encode({"a": np.array([2.0**-96])}, 2)[1])
    assert total.tolist() == [0] * 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e44, -1e44])
def test_a_number_too_large_makes_its_own_sum_not_finite_and_no_other(bad: float) -> None:
    fine = np.array([1.5, -2.5])
    found = added({"a": np.array([bad, 2.0])}, {"a": fine}, {"a": -fine})["a"]
    assert np.isnan(found[0])
    assert found[1] == 2.0


def test_many_numbers_too_large_do_not_wrap_around() -> None:
    layout, total = encode({"a": np.array([np.inf])}, MOST_NODES)
    one = total.copy()
    for _ in range(13):  # doubled 13 times: as many as there may be nodes
        add(layout, total, total.copy())
    assert np.isnan(decode(layout, total)["a"][0])
    assert one.any()


def test_counts_that_are_too_large_are_refused() -> None:
    assert added({"n": np.array([7])}, {"n": np.array([-9])})["n"].tolist() == [-2]
    with pytest.raises(RunError, match="a count"):
        encode({"n": np.array([1 << 50])}, 2)
    layout, total = encode({"n": np.array([1 << 46])}, 2)
    for _ in range(3):
        add(layout, total, total.copy())
    with pytest.raises(RunError, match="larger than it can be"):
        decode(layout, total)


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(RunError, match="at most 8192"):
        encode({"a": np.zeros(1)}, MOST_NODES + 1)


def test_empty_arrays_and_scalars_keep_their_shapes() -> None:
    found = added({"a": np.zeros((0, 3)), "b": np.array(2.0), "c": np.ones((2, 0), dtype=np.int64)})
    assert {name: value.shape for name, value in found.items()} == {"a": (0, 3), "b": (), "c": (2, 0)}


def test_a_layout_is_read_back_and_others_are_refused() -> None:
    layout = encode({"a": np.zeros((2, 3)), "n": np.zeros(4, dtype=np.int64)}, 1)[0]
    assert Layout.read(layout.said()) == layout
    for said in (
        None, [["a"]], [["a", "float16", [1]]], [["a", "float64", [-1]]], [["a", "float64", [1 << 29]]], [[1, "int64", []]],
        [["a", "float64", [1 << 20, 1 << 20]]], [["a", "int64", [1]], ["a", "int64", [1]]], [["a", "int64", [True]]],
    ):  # fmt: skip
        with pytest.raises(RunError):
            Layout.read(said)


def test_words_of_another_layout_are_refused() -> None:
    layout, words = encode({"a": np.zeros(3)}, 1)
    with pytest.raises(RunError, match="words"):
        decode(layout, words[:-1])
    with pytest.raises(RunError, match="words"):
        decode(layout, words.astype(np.int64))
