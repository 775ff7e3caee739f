# SPDX-License-Identifier: Apache-2.0
"""Leading subspaces against numpy's singular value decomposition."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor

from coterie.algorithms.subspace import Subspaces, leading_range, orthogonal_iteration, range_finder

D, K = 12, 3


class Held:
    """Matrices [A, D, D] that answer exchanges, and what they were asked; silent from exchange `until` on."""

    def __init__(self, matrices: Tensor, until: int | None = None) -> None:
        self.matrices, self.until = matrices, until
        self.asked: list[tuple[bool, tuple[int, ...]]] = []

    def __call__(self, q: Tensor, transposed: bool) -> Generator[Any, Any, Tensor | None]:
        yield from ()
        if self.until is not None and len(self.asked) >= self.until:
            return None
        self.asked.append((transposed, tuple(q.shape)))
        return (self.matrices.transpose(1, 2) if transposed else self.matrices) @ q


def result(run: Generator[Any, Any, Any]) -> Any:
    with pytest.raises(StopIteration) as end:
        next(run)
    return end.value.value


def matrices(tail: float, seed: int = 0) -> Tensor:
    """Two matrices that are not symmetric, with singular values 5, 4, 3, tail, tail / 2, tail / 3, ...  [2, D, D]"""
    draw = np.random.default_rng(seed)
    values = np.array([5.0, 4.0, 3.0, *(tail / np.arange(1, D - K + 1))])
    u, v = (np.linalg.qr(draw.normal(size=(2, D, D))).Q for _ in range(2))
    return torch.from_numpy(u * values @ v.transpose(0, 2, 1))


def start(columns: int, seed: int = 1) -> Tensor:
    return torch.randn(2, D, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def angle(a: Tensor, b: Tensor | np.ndarray) -> float:
    """Largest principal angle between two column spaces."""
    return float(subspace_angles(a.numpy(), np.asarray(b)).max())


def left(matrix: Tensor, rank: int = K) -> np.ndarray:
    return np.linalg.svd(matrix.numpy())[0][:, :rank]


# -- accuracy ---------------------------------------------------------------------------------------------------------
def test_orthogonal_iteration_finds_the_leading_left_singular_vectors() -> None:
    held = Held(matrices(tail=0.9))
    found: Subspaces = result(orthogonal_iteration(held, start(K), K, 10))
    for a in range(2):
        # Every exchange shrinks the rest by 0.9 / 3: twenty of them, and a random start's constant.
        assert angle(found.basis[a], left(held.matrices[a])) < 50 * 0.3**20
        np.testing.assert_allclose(found.values[a], np.linalg.svd(held.matrices[a])[1][:K], rtol=1e-12)
    # One iteration does not: the bound above says something.
    one: Subspaces = result(orthogonal_iteration(held, start(K), K, 1))
    assert angle(one.basis[0], left(held.matrices[0])) > 0.01


def test_the_range_finder_needs_few_exchanges_where_there_is_a_gap() -> None:
    held = Held(matrices(tail=0.03))
    for exchanges, bound in ((2, 1e-1), (3, 1e-3)):  # a hundredth less each: 0.03 / 3
        found: Subspaces = result(range_finder(held, start(K + 5), K, exchanges))
        for a in range(2):
            assert angle(found.basis[a], left(held.matrices[a])) < bound
            np.testing.assert_allclose(found.values[a, :K], np.linalg.svd(held.matrices[a])[1][:K], rtol=bound)


@pytest.mark.parametrize("seed", range(5))
def test_both_agree_where_there_is_a_gap(seed: int) -> None:
    held = Held(matrices(tail=0.3, seed=seed))
    slow: Subspaces = result(orthogonal_iteration(held, start(K, seed), K, 12))
    fast: Subspaces = result(range_finder(held, start(K + 5, seed + 100), K, 8))
    for a in range(2):
        # The gap is a tenth: seven exchanges before the last Q leave 1e-7 of the start's constant.
        assert angle(slow.basis[a], fast.basis[a].numpy()) < 1e-5
        # Vector by vector the slow one turns within the space, by a factor of 4 / 5 in each of 24 exchanges: 0.005.
        assert float((slow.basis[a] * fast.basis[a]).sum(0).abs().min()) > 1 - 0.02
        torch.testing.assert_close(slow.values[a], fast.values[a, :K])


@pytest.mark.parametrize("columns", [K, K + 5])
def test_a_matrix_of_low_rank_is_found_in_two_exchanges(columns: int) -> None:
    held = Held(matrices(tail=0.0))
    found: Subspaces = result(range_finder(held, start(columns), K, 2))
    for a in range(2):
        assert angle(found.basis[a], left(held.matrices[a])) < 1e-12
        np.testing.assert_allclose(found.values[a, :K], [5, 4, 3], rtol=1e-12)
        np.testing.assert_allclose(found.values[a, K:], 0, atol=1e-12)


def test_one_exchange_is_a_power_step_from_where_it_starts() -> None:
    some = matrices(tail=0.9)
    held = Held(some @ some.transpose(1, 2))  # symmetric, with a gap of a tenth
    truth = [left(held.matrices[a]) for a in range(2)]
    near = torch.stack([torch.from_numpy(u) for u in truth]) + 0.01 * start(K)
    for begin, exchanges, bound in ((near, 1, 0.01), (start(K + 5), 2, 0.2), (start(K + 5), 4, 0.01)):
        found: Subspaces = result(leading_range(held, begin, K, exchanges))
        for a in range(2):
            before = angle(torch.linalg.qr(begin).Q[a][:, :K], truth[a])
            assert angle(found.basis[a], truth[a]) < min(bound, 0.5 * before)
    low = Held(matrices(tail=0.0))
    for a in range(2):  # of low rank, everything is in one product
        assert angle(result(leading_range(low, start(K), K, 1)).basis[a], left(low.matrices[a])) < 1e-12


@pytest.mark.parametrize("exchanges", [2, 3, 4])
def test_as_many_columns_as_rows_give_the_whole_decomposition(exchanges: int) -> None:
    held = Held(matrices(tail=2.9))  # hardly a gap
    found: Subspaces = result(range_finder(held, start(D), D, exchanges))
    for a in range(2):
        u, s, _ = np.linalg.svd(held.matrices[a].numpy())
        np.testing.assert_allclose(found.values[a], s, rtol=1e-10)
        np.testing.assert_allclose(abs((found.basis[a].numpy() * u).sum(0)), 1, rtol=1e-10)


def test_one_iteration_ends_with_y_and_the_range_finder_with_its_transpose_by_hand() -> None:
    # Y = diag(4, 2, 1), start along (1, 1, 1): Y^T and then Y make (16, 4, 1) / sqrt(3) of it; Q is its direction. R is the
    # length sqrt(273 / 3) = sqrt(91), which stands for a squared singular value.
    held = Held(torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))[None])
    ones = torch.ones(1, 3, 1, dtype=torch.float64)
    found: Subspaces = result(orthogonal_iteration(held, ones, 1, 1))
    got = found.basis[0, :, 0] * found.basis[0, 0, 0].sign()
    assert got.tolist() == pytest.approx([16 / 273**0.5, 4 / 273**0.5, 1 / 273**0.5])
    assert found.values.item() == pytest.approx(91**0.25)
    # The range finder: Y q is along (4, 2, 1); Y^T of that is (16, 4, 1) / sqrt(21), of length sqrt(13).
    found = result(range_finder(held, ones, 1, 2))
    got = found.basis[0, :, 0] * found.basis[0, 0, 0].sign()
    assert got.tolist() == pytest.approx([4 / 21**0.5, 2 / 21**0.5, 1 / 21**0.5])
    assert found.values.item() == pytest.approx(13**0.5)


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_algorithm_3_is_that_of_a_plain_loop(iterations: int) -> None:
    held = Held(matrices(tail=2.0))
    found: Subspaces = result(orthogonal_iteration(held, start(K), K, iterations))
    for a, y in enumerate(held.matrices.numpy()):
        q = np.linalg.qr(start(K)[a].numpy()).Q
        for t in range(2 * iterations):  # the paper's T is even
            q = y.T @ q if t % 2 == 0 else np.linalg.qr(y @ q).Q
        # The last one is a product with Y: columns up to their signs, which QR leaves open.
        np.testing.assert_allclose(abs((found.basis[a].numpy() * q).sum(0)), 1, rtol=1e-10)


# -- form -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tail", [0.0, 0.5])
def test_the_basis_is_orthonormal_and_values_are_lengths(tail: float) -> None:
    held = Held(matrices(tail))
    eye = torch.eye(K, dtype=torch.float64).expand(2, -1, -1)
    for name, found in (
        ("orthogonal", result(orthogonal_iteration(held, start(K), K, 6))),
        ("range", result(range_finder(held, start(K + 4), K, 3))),
    ):
        assert found.basis.shape == (2, D, K)
        torch.testing.assert_close(found.basis.transpose(1, 2) @ found.basis, eye, rtol=0, atol=1e-12)
        assert (found.values.diff(dim=1) <= 0).all()
        lengths = (held.matrices.transpose(1, 2) @ found.basis).norm(dim=1)  # [2, K] of Y^T u
        if name == "range":  # the leading direction first
            torch.testing.assert_close(lengths, found.values[:, :K], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(lengths.norm(dim=1), found.values[:, :K].norm(dim=1), rtol=1e-3, atol=0)


def test_exchanges_alternate_and_end_with_y_or_with_the_transpose() -> None:
    held = Held(matrices(0.5))
    result(orthogonal_iteration(held, start(K + 2), K, 2))  # columns beyond the rank are not sent
    assert held.asked == [(True, (2, D, K)), (False, (2, D, K))] * 2
    for exchanges, transposed in ((2, [False, True]), (3, [True, False, True])):
        held.asked.clear()
        result(range_finder(held, start(K + 2), K, exchanges))
        assert [t for t, _ in held.asked] == transposed
        assert {shape for _, shape in held.asked} == {(2, D, K + 2)}


@pytest.mark.parametrize("until", [0, 1, 2])
def test_when_nobody_answers_there_is_no_subspace(until: int) -> None:
    assert result(range_finder(Held(matrices(0.5), until), start(K), K, 3)) is None
    assert result(orthogonal_iteration(Held(matrices(0.5), until), start(K), K, 2)) is None


def test_a_matrix_of_zeros_gives_some_orthonormal_basis() -> None:
    found: Subspaces = result(range_finder(Held(torch.zeros(2, D, D, dtype=torch.float64)), start(K + 2), K, 3))
    torch.testing.assert_close(found.basis[0].T @ found.basis[0], torch.eye(K, dtype=torch.float64))
    assert not found.values.any()
