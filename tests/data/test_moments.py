# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from coterie.data.moments import Moments, moments_of, rows_with
from coterie.data.ragged import Ragged

UNITS = torch.tensor([1.0, 1e6, 1e-3, 50.0], dtype=torch.float64)
MEANS = torch.tensor([0.0, 1e8, 5.0, -300.0], dtype=torch.float64)


def drawn_rows(counts: list[int], seed: int = 0) -> Ragged:
    """Three features and a target, in units of their own and far from zero."""
    z = torch.randn(sum(counts), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * UNITS + MEANS
    owner = np.repeat([f"c{i}" for i in range(len(counts))], counts)
    return Ragged.from_groups(z[:, :3], z[:, 3], owner)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of products, in the units of their columns."""
    return float(((one - other).abs() / (UNITS[:, None] * UNITS)).max())


def test_moments_are_those_of_each_clients_rows() -> None:
    rows = drawn_rows([5, 9, 2])
    found = moments_of(rows)
    assert found.n[:, 0].tolist() == [5, 9, 2]
    for number in range(3):
        block = rows.client(number)
        z = torch.cat([block.x[0], block.target[0][:, None]], 1)
        torch.testing.assert_close(found.mean[number, 0], z.mean(0), rtol=1e-14, atol=0)
        assert relative(found.products[number, 0], (len(z) - 1) * torch.cov(z.T)) < 1e-9


@pytest.mark.parametrize("counts", [[40, 40, 7], [1, 2, 3, 4, 5], [0, 6]])
def test_rows_are_made_that_have_the_moments(counts: list[int]) -> None:
    """Also for clients with fewer rows than numbers, and with none in a part."""
    first, second = (moments_of(drawn_rows([max(n, 1) for n in counts], seed)) for seed in (0, 1))
    asked = Moments.side_by_side([first, second])
    empty = (torch.tensor(counts) == 0)[:, None] & torch.tensor([True, False])
    asked = Moments(
        asked.n.masked_fill(empty, 0), asked.mean.masked_fill(empty[..., None], 0.0),
        asked.products.masked_fill(empty[..., None, None], 0.0),
    )  # fmt: skip
    names = np.array([f"c{i}" for i in range(len(counts))])
    layout, x, y, part = rows_with(names, asked)
    for number in range(2):
        keep = part == number
        owner = np.repeat(layout.names[layout.order], layout.counts[layout.order])[keep.numpy()]
        found = moments_of(Ragged.from_groups(x[keep], y[keep], owner))
        there = asked.n[:, number] > 0
        assert torch.equal(found.n[:, 0], asked.n[there, number])
        torch.testing.assert_close(found.mean[:, 0], asked.mean[there, number], rtol=1e-12, atol=1e-12)
        assert relative(found.products[:, 0], asked.products[there, number]) < 1e-6  # of rows 1e8 from zero


def test_parts_together_are_all_rows() -> None:
    rows = drawn_rows([8, 11])
    folds = Moments.side_by_side([moments_of(own) for _, own in rows.fold_by_fold(3, seed=0)])
    whole, found = moments_of(rows), folds.together()
    assert torch.equal(found.n, whole.n)
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-13, atol=1e-13)
    assert relative(found.products, whole.products) < 1e-6


def test_a_column_that_is_constant_at_a_client_stays_so() -> None:
    """Rounding of its mean does not make it vary."""
    x = torch.full((7, 2), 0.1, dtype=torch.float64)
    x[:, 1] = torch.arange(7)
    found = moments_of(Ragged.from_groups(x, x[:, 1] * 2, np.repeat("c", 7)))
    assert found.products[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    made = rows_with(np.array(["c"]), found)[1]
    assert made[:, 0].tolist() == [found.mean[0, 0, 0].item()] * 7
