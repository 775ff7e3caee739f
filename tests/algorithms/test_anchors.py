# SPDX-License-Identifier: Apache-2.0
"""Who becomes an anchor, how anchors become clusters, and who is badly served."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.anchors import (
    Anchors,
    Grouping,
    badly_served,
    first_anchors,
    group_anchors,
    introduce,
    nearest_anchor,
)
from coterie.models import linear_regression
from helpers import Federation, Late, Only, one_block, run_one

MODEL = linear_regression(3, intercept=False)
TRUTHS = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)  # sqrt(18) apart


def planted(counts: Sequence[int], clusters: Sequence[int], noise: float = 0.1) -> Federation:
    """Clients with these row counts, each of one of the three models."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in counts]
    ys = [
        x @ TRUTHS[k] + noise * torch.randn(len(x), generator=draw, dtype=torch.float64)
        for x, k in zip(xs, clusters, strict=True)
    ]
    return Federation(xs, ys, [f"site-{i:03d}" for i in range(len(counts))])


def outcome(part: Any, data: Federation, **engine: Any) -> Any:
    """Run a part of an algorithm by itself: what it returns."""
    return run_one(lambda _: part, data.rows, **engine)[0]


# -- the first anchors ------------------------------------------------------------------------------------------------
COUNTS = [0, 1, 2, 3, 4, 5, 6, 7] + [30] * 6 + [31, 60, 90, 30, 33, 45]  # twelve have 30 rows or more
LARGE = set(range(8, 20))
EVERYBODY = planted(COUNTS, [0] * 20)


def drawn(how: Anchors, seed: int, data: Federation = EVERYBODY, n_clusters: int = 3, **engine: Any) -> list[int]:
    got: list[int] = outcome(first_anchors(how, n_clusters, seed), data, **engine).tolist()
    return got


def test_anchors_are_drawn_among_clients_with_enough_rows() -> None:
    how = Anchors(number=8, min_rows=30)
    times: Counter[int] = Counter()
    for seed in range(200):
        got = drawn(how, seed)
        assert len(set(got)) == 8
        assert set(got) <= LARGE  # 90 rows are no better than 30
        times.update(got)
    # Each in 2/3 of 200 draws: 133, with a standard deviation of 6.7; four of them either way.
    assert all(106 < times[i] < 160 for i in LARGE)


def test_the_largest_others_help_out_and_one_row_never_does() -> None:
    assert set(drawn(Anchors(number=15, min_rows=30), 0)) == LARGE | {5, 6, 7}
    assert drawn(Anchors(number=100, min_rows=30), 0)[12:] == [7, 6, 5, 4, 3, 2]  # after those who have enough
    assert drawn(Anchors(number=3, min_rows=60), 0)[2] == 19  # 60 and 90 have enough; 45 comes next
    assert drawn(Anchors(number=5), 0, planted([0, 1, 1], [0, 1, 2])) == []


def test_without_numbers_there_are_ten_anchors_a_cluster_with_ten_rows_a_cluster() -> None:
    data = planted([9] * 20 + [10] * 20 + [20] * 20, [0] * 60)
    assert set(drawn(Anchors(), 0, data, n_clusters=1)) < set(range(20, 60))
    assert len(drawn(Anchors(), 0, data, n_clusters=1)) == 10
    assert set(drawn(Anchors(), 0, data, n_clusters=2)) == set(range(40, 60))


def test_the_draw_follows_names_and_seeds_and_not_numbers() -> None:
    how = Anchors(number=8, min_rows=30)
    none = torch.zeros(0, 3, dtype=torch.float64)
    more = EVERYBODY.plus("a newcomer", none, none[:, 0])  # by its name the first: every number is one higher
    shuffled = np.random.default_rng(0).permutation(20).tolist()
    part = [getattr(EVERYBODY, field) for field in ("xs", "ys", "names")]
    other = Federation(*([values[i] for i in shuffled] for values in part))
    for seed in range(5):
        got = drawn(how, seed)
        assert [i - 1 for i in drawn(how, seed, more)] == got
        assert drawn(how, seed, other) == got
    assert len({tuple(sorted(drawn(how, seed))) for seed in range(5)}) > 1


def test_who_does_not_answer_is_not_drawn() -> None:
    here = set(range(20)) - {0, 3, 6, 9, 12, 15, 18}  # every third is late
    assert set(drawn(Anchors(number=100, min_rows=30), 0, participation=Late())) == here - {1}
    assert drawn(Anchors(), 0, participation=Late(silent=(0,))) == []
    assert drawn(Anchors(), 0, participation=Only((0, 1))) == []  # none and one row


def test_clients_introduce_themselves_with_their_rows_and_a_lot_of_their_own() -> None:
    block = one_block(EVERYBODY.rows)
    reply, private = introduce({"key": torch.tensor([7, 8])}, {}, {}, block)
    assert private == {}
    assert reply["n"][0].tolist() == block.n.tolist()
    assert reply["draw"].shape == (2, 20)
    assert len(reply["draw"].unique()) == 40
    alone, _ = introduce({"key": torch.tensor([8])}, {}, {}, block.clients(slice(4, 5)))
    assert alone["draw"].item() == reply["draw"][1, 4].item()


# -- groups -----------------------------------------------------------------------------------------------------------
THIRDS = planted([20] * 30, [i % 3 for i in range(30)])


def around(models: Tensor, each: int = 10, spread: float = 0.1, seed: int = 1) -> Tensor:
    """Anchors that have arrived nearly.  [A, 3], in turn of each model"""
    draw = torch.Generator().manual_seed(seed)
    return models.repeat(each, 1) + spread * torch.randn(len(models) * each, 3, generator=draw, dtype=torch.float64)


def grouped(
    local: Tensor, n_clusters: int | None, delta: float = 0.0, data: Federation = THIRDS, **engine: Any
) -> tuple[Tensor, str]:
    theta, events = outcome(group_anchors(MODEL, local, n_clusters, Grouping(delta)), data, **engine)
    assert len(events) == 1
    return theta, events[0]


def in_order(theta: Tensor) -> Tensor:
    """Sort models by which coordinate is the largest, so that they stand as the planted ones."""
    return theta[theta.argmax(1).argsort()]


def means(local: Tensor) -> Tensor:
    return torch.stack([local[k::3].mean(0) for k in range(3)])


@pytest.mark.parametrize("n_clusters", [3, None])
def test_anchors_within_half_of_delta_are_one_cluster(n_clusters: int | None) -> None:
    local = around(TRUTHS)
    theta, said = grouped(local, n_clusters, delta=18**0.5)
    assert said == "30 anchors make 3 clusters: those within half of the given distance are one"
    torch.testing.assert_close(in_order(theta), means(local))


def test_where_delta_does_not_give_k_groups_their_tree_is_cut() -> None:
    local = around(TRUTHS)
    for delta in (1e-6, 100.0):  # thirty groups, or one
        theta, said = grouped(local, 3, delta)
        assert said == "30 anchors make 3 clusters: their tree is cut at the number asked for"
        if delta > 1:  # otherwise every representative stands alone
            torch.testing.assert_close(in_order(theta), means(local))


@pytest.mark.parametrize(
    ("n_clusters", "said"),
    [(3, "their tree is cut at the number asked for"), (None, "their tree is cut at its largest gap")],
)
@pytest.mark.parametrize("spread", [0.0, 1e-12, 0.1, 0.3])
def test_without_delta_their_tree_is_cut(spread: float, n_clusters: int | None, said: str) -> None:
    local = around(TRUTHS, spread=spread)
    theta, event = grouped(local, n_clusters)
    assert event == f"30 anchors make 3 clusters: {said}"
    torch.testing.assert_close(in_order(theta), means(local))


def test_without_a_gap_there_is_one_cluster_at_their_median() -> None:
    local = around(TRUTHS[:1], each=31, spread=0.3)
    theta, said = grouped(local, None, data=planted([20] * 10, [0] * 10))
    assert said.startswith("31 anchors make 1 cluster: their tree is cut at its largest gap")
    assert theta.tolist() == [np.median(local.numpy(), axis=0).tolist()]


def test_there_are_no_more_groups_than_are_looked_for() -> None:
    local = around(TRUTHS)
    for delta in (0.0, 18**0.5):
        theta, events = outcome(group_anchors(MODEL, local, None, Grouping(delta, most=2)), THIRDS)
        assert events[0].startswith("30 anchors make 2 clusters: their tree is cut at the most that are looked for")
        assert len(theta) == 2


def test_a_single_anchor_far_from_all_does_not_make_a_cluster_when_k_is_unknown() -> None:
    stray = torch.tensor([[-9.0, -9.0, -9.0]], dtype=torch.float64)
    local = around(TRUTHS)
    theta, said = grouped(torch.cat([local, stray]), None)
    assert said == "31 anchors make 3 clusters: their tree is cut at its largest gap"
    torch.testing.assert_close(in_order(theta), means(local))


def test_an_anchor_that_did_not_arrive_does_not_take_a_clusters_place() -> None:
    stray = torch.tensor([[-9.0, -9.0, -9.0]], dtype=torch.float64)
    local = around(TRUTHS)
    theta, said = grouped(torch.cat([local, stray]), 3)  # its tree: the stray, one model, and two models together
    assert said.endswith(" replaced by anchors that serve clients better")
    torch.testing.assert_close(in_order(theta), means(local))
    # Nobody to ask: the tree decides.
    theta, said = grouped(torch.cat([local, stray]), 3, participation=Late(silent=(0,)))
    assert said == "31 anchors make 3 clusters: their tree is cut at the number asked for"
    assert torch.equal(theta[theta.sum(1).argmin()], stray[0])


def test_an_anchor_that_diverged_does_not_take_a_clusters_place() -> None:
    local = around(TRUTHS)
    for bad in (torch.nan, torch.inf, 1e200):
        theta, _ = grouped(torch.cat([local, torch.full((1, 3), bad, dtype=torch.float64)]), 3)
        torch.testing.assert_close(in_order(theta), means(local))


def test_more_clusters_than_models_that_differ_stay_finite() -> None:
    theta, said = grouped(around(TRUTHS, spread=0.0), 5)
    assert said.startswith("30 anchors make 3 clusters")
    assert torch.equal(in_order(theta), TRUTHS)
    for seed in range(20):  # distances of 1e-12 between representatives are less than their own error
        theta, said = grouped(around(TRUTHS, spread=1e-12, seed=seed), 5)
        assert said.startswith("30 anchors make 5 clusters")
        assert torch.cdist(theta, TRUTHS).min(1).values.max() < 1e-10
        assert torch.cdist(TRUTHS, theta).min(1).values.max() < 1e-10


@pytest.mark.parametrize("n_clusters", [3, None])
def test_anchors_that_are_all_alike_make_one_cluster(n_clusters: int | None) -> None:
    theta, said = grouped(TRUTHS[:1].repeat(10, 1), n_clusters)
    assert theta.tolist() == [[3.0, 0.0, 0.0]]
    assert said.startswith("10 anchors make 1 cluster")


def test_fewer_anchors_than_clusters_make_a_cluster_each() -> None:
    theta, _ = grouped(TRUTHS[:2], 3)
    assert sorted(theta.tolist()) == [[0.0, 3.0, 0.0], [3.0, 0.0, 0.0]]
    theta, said = grouped(TRUTHS[:1], 3)
    assert theta.tolist() == [[3.0, 0.0, 0.0]]
    assert said == "1 anchors make 1 cluster: a single one"


def test_clients_say_what_they_lose_under_every_anchor_and_which_is_best() -> None:
    data = planted([0, 1, 4, 9, 9], [0, 1, 2, 0, 1])
    block = one_block(data.rows)
    theta = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    reply, _ = nearest_anchor({"model": MODEL, "theta": theta}, {}, {}, block)
    for s in range(2):
        for c, number in enumerate(block.ids.tolist()):
            x, y = data.xs[number], data.ys[number]
            total = [float(((x @ t - y) ** 2).sum()) for t in theta[s]]
            assert reply["loss"][s, c].tolist() == pytest.approx(total, abs=1e-12)
            best = [float(len(x) > 0 and a == int(np.argmin(total))) for a in range(5)]
            assert reply["share"][s, c].tolist() == best  # who has no rows has no say


# -- badly served -----------------------------------------------------------------------------------------------------
NOBODY = torch.zeros(0, dtype=torch.int64)
FOUR = Anchors(number=4, min_rows=12)


def more_anchors(
    theta: Tensor,
    data: Federation,
    how: Anchors = FOUR,
    taken: Tensor = NOBODY,
    **engine: Any,
) -> list[int]:
    got: list[int] = outcome(badly_served(MODEL, theta, taken, how, 3, 0), data, **engine).tolist()
    return got


def test_a_cluster_without_a_model_is_found() -> None:
    third = {i for i in range(30) if i % 3 == 2}
    assert more_anchors(TRUTHS, THIRDS) == []
    got = more_anchors(TRUTHS[:2], THIRDS)
    assert len(got) == 4
    assert set(got) <= third
    assert set(more_anchors(TRUTHS[:2], THIRDS, Anchors(number=100))) == third


def test_anchors_are_not_drawn_again() -> None:
    got = more_anchors(TRUTHS[:2], THIRDS, Anchors(number=100), taken=torch.tensor([2, 8, 0]))
    assert set(got) == {5, 11, 14, 17, 20, 23, 26, 29}


def test_those_with_enough_rows_come_first() -> None:
    data = planted([20] * 20 + [20, 11, 20, 11, 20], [i % 2 for i in range(20)] + [2] * 5)
    assert set(more_anchors(TRUTHS[:2], data, Anchors(number=3, min_rows=12))) == {20, 22, 24}
    assert more_anchors(TRUTHS[:2], data, Anchors(number=5, min_rows=12))[3:] in ([21, 23], [23, 21])


def test_a_few_badly_served_clients_are_not_a_cluster() -> None:
    one_of_sixty = planted([20] * 60, [i % 2 for i in range(59)] + [2])
    assert more_anchors(TRUTHS[:2], one_of_sixty) == []  # 1 is less than 2 % of 60
    two_of_sixty = planted([20] * 60, [i % 2 for i in range(58)] + [2, 2])
    assert set(more_anchors(TRUTHS[:2], two_of_sixty)) == {58, 59}


def test_clients_with_few_rows_are_not_counted_as_badly_served() -> None:
    # The loss of two rows is above four times the median once in fifty, whatever serves them.
    data = planted([20] * 20 + [2] * 20 + [1, 0], [i % 2 for i in range(20)] + [2] * 22)
    assert more_anchors(TRUTHS[:2], data) == []
    # Where nobody has more, they are.
    small = planted([2] * 30, [0] * 20 + [2] * 10)
    assert set(more_anchors(TRUTHS[:2], small, Anchors(number=100))) <= set(range(20, 30))
    assert len(more_anchors(TRUTHS[:2], small, Anchors(number=100))) >= 5


def test_nobody_is_badly_served_where_nobody_answers() -> None:
    assert more_anchors(TRUTHS[:2], THIRDS, participation=Late(silent=(0,))) == []
    assert more_anchors(TRUTHS[:2], planted([0, 0], [0, 0])) == []
