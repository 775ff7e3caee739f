# SPDX-License-Identifier: Apache-2.0
"""Trimmed means and medians: by hand, with weights, by cluster."""

import torch

from coterie.protocol import RowProduct
from coterie.robust_folds import MEDIAN, Trimmed, TrimmedByCluster

VALUES = torch.tensor([[[1.0, 10], [2, 20], [3, 30], [100, -5]]], dtype=torch.float64)  # [1, 4, 2]
ONES = torch.ones(1, 4, dtype=torch.float64)


def folded(fold: Trimmed | TrimmedByCluster, value: torch.Tensor, weight: torch.Tensor, cut: int = 2):
    """Fold two blocks, and finish the first run."""
    parts = [fold.part(value[:, at], {fold.by: weight[:, at]}) for at in (slice(0, cut), slice(cut, None))]
    return fold.finish({name: v[0] for name, v in fold.merge(*parts).items()})


def test_a_median_is_the_middle_or_the_mean_of_the_two_in_the_middle():
    torch.testing.assert_close(folded(Trimmed(), VALUES, ONES), torch.tensor([2.5, 15.0], dtype=torch.float64))
    three = folded(Trimmed(), VALUES[:, 1:], ONES[:, 1:])
    torch.testing.assert_close(three, torch.tensor([3.0, 20.0], dtype=torch.float64))


def test_a_trimmed_mean_leaves_out_a_share_of_the_weight_at_either_end():
    """Of weights 1, 1, 1 and 1, a quarter at either end; of 3, 1, 1 and 1, a third: 1 counts half as much as 2 and 3."""
    torch.testing.assert_close(
        folded(Trimmed(share=0.25), VALUES, ONES), torch.tensor([2.5, 15.0], dtype=torch.float64)
    )
    heavy = torch.tensor([[3.0, 1, 1, 1]], dtype=torch.float64)
    got = folded(Trimmed(share=1 / 3), VALUES, heavy)
    torch.testing.assert_close(got[0], torch.tensor((1 * 1 + 2 * 1) / 2, dtype=torch.float64))


def test_nobody_with_weight_moves_nothing():
    assert folded(Trimmed(), VALUES, 0 * ONES).tolist() == [0, 0]


def test_every_cluster_has_its_own_median():
    share = torch.tensor([[[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 2, 0]]], dtype=torch.float64)
    got = folded(TrimmedByCluster(), VALUES, share)
    mean = got.mean_or(torch.full((3, 2), 7.0, dtype=torch.float64))
    torch.testing.assert_close(mean, torch.tensor([[2.0, 20], [100, -5], [7, 7]], dtype=torch.float64))
    assert got.weight.tolist() == [3, 2, 0]


def test_products_over_rows_are_formed():
    x, g = torch.ones(3, 2, 1, dtype=torch.float64), torch.tensor([[[1.0, 1], [2, 2], [50, 50]]], dtype=torch.float64)
    part = Trimmed(share=MEDIAN).part(RowProduct(x, g), {"weight": ONES[:, :3]})
    assert part["stack"][0, :, 0].tolist() == [2, 4, 100]


def test_means_of_who_is_near_are_plain_means_where_nobody_is_far():
    draw = torch.Generator().manual_seed(0)
    value = 3 + torch.randn(1, 50, 4, generator=draw, dtype=torch.float64)
    weight = torch.rand(1, 50, generator=draw, dtype=torch.float64)
    mean = (weight[0, :, None] * value[0]).sum(0) / weight.sum()
    torch.testing.assert_close(folded(Trimmed(near=True), value, weight), mean)


def test_who_is_far_or_points_the_other_way_does_not_count():
    """30 of 100 are far on one side, or opposed: the mean is that of the 70 others."""
    draw = torch.Generator().manual_seed(0)
    honest = 1 + 0.3 * torch.randn(1, 70, 25, generator=draw, dtype=torch.float64)
    weight = torch.ones(1, 100, dtype=torch.float64)
    for bad in (torch.full_like(honest[:, :30], 50.0), -honest[:, :30]):
        got = folded(Trimmed(near=True), torch.cat([bad, honest], 1), weight)
        torch.testing.assert_close(got, honest[0].mean(0))
        assert float((folded(Trimmed(), torch.cat([bad, honest], 1), weight) - honest[0].mean(0)).abs().max()) > 0.1


def test_how_much_a_client_counts_falls_steadily_with_its_distance():
    """Others are 1 from the middle: at 7.5 times that a client counts half, at 10 not at all."""
    axes = torch.eye(16, dtype=torch.float64)
    others = torch.cat([axes, -axes])[None].repeat(1, 4, 1)  # [1, 128, 16]
    for distance, counts in ((5.0, 1.0), (7.5, 0.5), (10.0, 0.0)):
        value = torch.cat([others, distance * axes[None, :1]], 1)
        got = folded(Trimmed(near=True), value, torch.ones(1, 129, dtype=torch.float64))
        by_hand = (4 * bool(counts) + counts * distance) / (124 + counts) if counts else 0.0  # 4 point the other way
        torch.testing.assert_close(float(got[0]), by_hand, atol=0.01, rtol=0)


def test_clusters_have_means_of_who_is_near_of_their_own():
    share = torch.tensor([[[1.0, 0], [1, 0], [1, 0], [0, 2]]], dtype=torch.float64)
    got = folded(TrimmedByCluster(near=True), VALUES, share)
    mean = got.mean_or(torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(mean, torch.tensor([[2.0, 20], [100, -5]], dtype=torch.float64))
