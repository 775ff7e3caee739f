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
    """Others are 1 from the middle: at 4.5 times that a client counts half, at 6 not at all."""
    axes = torch.eye(16, dtype=torch.float64)
    others = torch.cat([axes, -axes])[None].repeat(1, 4, 1)  # [1, 128, 16]
    for distance, counts in ((3.0, 1.0), (4.5, 0.5), (6.0, 0.0)):
        value = torch.cat([others, distance * axes[None, :1]], 1)
        got = folded(Trimmed(near=True), value, torch.ones(1, 129, dtype=torch.float64))
        by_hand = (4 * bool(counts) + counts * distance) / (124 + counts) if counts else 0.0  # 4 point the other way
        torch.testing.assert_close(float(got[0]), by_hand, atol=0.01, rtol=0)


def rounds_of(fold: Trimmed | TrimmedByCluster, every: list[torch.Tensor], by: torch.Tensor) -> list[torch.Tensor]:
    """Finish one round after the other, with what is known of clients from earlier ones.  by [C] or [C, K]"""
    past, out = torch.zeros(len(by), 2, dtype=torch.float64), []
    for value in every:
        got, past = fold.finish_knowing({"stack": value, "weight": by}, past)
        out.append(got if isinstance(fold, Trimmed) else got.mean_or(torch.zeros(by.shape[1], value.shape[1])))
    return out


def noisy(rounds: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """100 clients whose noise is three times their signal of 1, 30 of them with the sign turned.  -> [100, 25] a round"""
    draw = torch.Generator().manual_seed(0)
    sign = torch.where(torch.arange(100) < 30, -1.0, 1.0).double()
    every = [sign[:, None] * (0.2 + 0.6 * torch.randn(100, 25, generator=draw).double()) for _ in range(rounds)]
    return every, sign


def test_who_opposes_others_round_after_round_ends_up_not_counting():
    """In one round most turned signs are taken for noise, which shortens the mean; in the end there are none."""
    every, _ = noisy(20)
    found = rounds_of(Trimmed(near=True), every, torch.ones(100, dtype=torch.float64))
    assert float(found[0].mean()) < 0.16
    torch.testing.assert_close(found[-1], every[-1][30:].mean(0), atol=0.03, rtol=0)
    assert float(found[-1].mean()) > 0.19


def test_what_is_remembered_is_the_sum_of_standardised_cosines_and_the_number_of_rounds():
    value = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1], [0, 0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 1, 1, 1, 0], dtype=torch.float64)
    past = torch.tensor([[1.0, 2]] * 5, dtype=torch.float64)
    _, now = Trimmed(near=True).finish_knowing({"stack": value, "weight": weight}, past)
    assert now[4].tolist() == [1, 2]  # who has no weight did not take part
    cosine = torch.tensor(
        [1.0, 1, 1, 0], dtype=torch.float64
    )  # with (1, 0), the median, and the mean of the three there
    torch.testing.assert_close(now[:4, 0], 1 + 2**0.5 * cosine)
    assert now[:4, 1].tolist() == [3, 3, 3, 3]


def test_what_clients_do_in_one_cluster_counts_in_all():
    """Of two clusters with opposite signals: who turns its sign opposes its own cluster, whichever that is."""
    every, sign = noisy(60)
    group = torch.arange(100) % 2
    side = (1.0 - 2 * group).double()
    share = torch.nn.functional.one_hot(group).double()
    found = rounds_of(TrimmedByCluster(near=True), [value * side[:, None] for value in every], share)
    for k in range(2):
        honest = (sign > 0) & (group == k)
        wanted, first, last = (float(one.mean()) for one in (every[-1][honest], found[0][k], found[-1][k]))
        assert abs(float(side[honest][0]) * last - wanted) < 0.05 < abs(float(side[honest][0]) * first - wanted)


def test_clusters_have_means_of_who_is_near_of_their_own():
    share = torch.tensor([[[1.0, 0], [1, 0], [1, 0], [0, 2]]], dtype=torch.float64)
    got = folded(TrimmedByCluster(near=True), VALUES, share)
    mean = got.mean_or(torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(mean, torch.tensor([[2.0, 20], [100, -5]], dtype=torch.float64))
