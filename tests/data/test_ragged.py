# SPDX-License-Identifier: Apache-2.0
"""Ragged rows: every client's rows come back once, in order, from memory or disk, in blocks of any size."""

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.data.ragged import DiskRows, Layout, Ragged
from coterie.errors import DataError
from helpers import ragged

counts_lists = st.lists(st.integers(0, 12), min_size=1, max_size=12)


def numbered(counts: Sequence[int], *, d: int = 2, dtype: torch.dtype = torch.float64) -> Ragged:
    """Clients whose rows say who they are: features 100 client + row + 1 (never 0), targets their negative."""
    xs = [100.0 * i + torch.arange(n, dtype=dtype)[:, None].expand(-1, d) + 1 for i, n in enumerate(counts)]
    return ragged([x.clone() for x in xs], [-x[:, 0].clone() for x in xs])


def rows_by_name(rows: Ragged, **options: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Each client's real rows, from blocks; every client must come once."""
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for block in rows.blocks(**options):
        for c, number in enumerate(block.ids.tolist()):
            name = str(rows.names[number])
            assert name not in found
            real = slice(0, int(block.n[c]))
            found[name] = (block.x[c, real].clone(), None if block.y is None else block.y[c, real].clone())
    assert found.keys() == set(rows.names.tolist())
    return found


def assert_same_rows(a: Ragged, b: Ragged) -> None:
    left, right = rows_by_name(a), rows_by_name(b)
    assert left.keys() == right.keys()
    for name, (x, y) in left.items():
        torch.testing.assert_close(x, right[name][0], rtol=0, atol=0)
        torch.testing.assert_close(y, right[name][1], rtol=0, atol=0)


def on_disk(rows: Ragged, folder: Path) -> Ragged:
    """The same rows in files."""
    parts = []
    for name, value in (("x", rows.x), ("y", rows.y)):
        assert isinstance(value, Tensor)
        made = DiskRows(folder / name, tuple(value.shape), value.numpy().dtype)
        made.writable()[:] = value.numpy()
        parts.append(made)
    return Ragged(rows.layout, *parts)


# -- gathering --------------------------------------------------------------------------------------------------------
@given(st.lists(st.sampled_from(["b", "a", "10", "2", "long name", "é"]), min_size=1, max_size=40))
def test_gathering_keeps_every_clients_rows_in_their_order(groups: list[str]) -> None:
    x = torch.arange(len(groups), dtype=torch.float64)[:, None]
    rows = Ragged.from_groups(x, -x[:, 0], np.array(groups))
    assert rows.names.tolist() == sorted(set(groups))
    assert rows.layout.n_rows == len(groups)
    for name, (got, target) in rows_by_name(rows).items():
        want = [i for i, group in enumerate(groups) if group == name]
        assert got[:, 0].tolist() == want
        assert target is not None
        assert target.tolist() == [-i for i in want]


def test_clients_are_numbered_by_name_and_stored_by_length() -> None:
    rows = Ragged.from_groups(torch.arange(6.0)[:, None], None, np.array(["b", "c", "b", "a", "b", "c"]))
    assert rows.names.tolist() == ["a", "b", "c"]
    assert rows.counts.tolist() == [1, 3, 2]
    assert rows.layout.order.tolist() == [0, 2, 1]
    assert rows.layout.starts.tolist() == [0, 3, 1]
    assert rows.client(1).x[0, :, 0].tolist() == [0, 2, 4]
    assert rows.client(1).y is None


def test_numeric_groups_become_names() -> None:
    rows = Ragged.from_groups(torch.zeros(3, 1), None, np.array([10, 2, 10]))
    assert rows.names.tolist() == ["10", "2"]


def test_equal_clients_are_taken_without_copying() -> None:
    x, y = torch.randn(4, 5, 3), torch.randn(4, 5)
    rows = Ragged.from_blocks(x, y)
    (block,) = rows.blocks()
    assert block.x.data_ptr() == x.data_ptr()
    assert block.target.data_ptr() == y.data_ptr()
    assert torch.equal(block.x, x)
    assert block.mask is None
    assert rows.names.tolist() == ["0", "1", "2", "3"]


def test_equal_clients_must_come_sorted_by_name() -> None:
    for names in (["b", "a"], ["a", "a"]):
        with pytest.raises(DataError, match="ascending"):
            Ragged.from_blocks(torch.zeros(2, 1, 1), None, np.array(names))


# -- blocks -----------------------------------------------------------------------------------------------------------
@given(counts_lists, st.integers(1, 600), st.integers(0, 60), st.integers(0, 20), st.data())
def test_blocks_hold_every_chosen_client_once_with_its_rows_in_order(
    counts: list[int], budget: int, room: int, row_room: int, data: st.DataObject
) -> None:
    rows = numbered(counts)
    everyone = list(range(len(counts)))
    ids = data.draw(st.none() | st.lists(st.sampled_from(everyone), unique=True, min_size=1).map(sorted))
    seen = []
    for block in rows.blocks(None if ids is None else torch.tensor(ids), budget=budget, room=room, row_room=row_room):
        c, longest = block.x.shape[:2]
        seen += block.ids.tolist()
        assert torch.equal(block.n, rows.counts[block.ids])
        assert torch.equal(block.keys, rows.keys[block.ids])
        assert longest == int(block.n.max())
        assert torch.equal(block.real, torch.arange(longest) < block.n[:, None])
        assert (block.mask is None) == bool((block.n == longest).all())
        for i, number in enumerate(block.ids.tolist()):
            n = counts[number]
            assert block.x[i, :n, 0].tolist() == [100 * number + row + 1 for row in range(n)]
            assert torch.equal(block.target[i, :n], -block.x[i, :n, 0])
            assert not block.x[i, n:].any()
            assert not block.target[i, n:].any()
        # 2 features and 1 target of 8 bytes; one client may be larger than the budget, and is then alone.
        assert c == 1 or c * longest * (3 * 8 + row_room) + c * room <= budget
    assert sorted(seen) == (everyone if ids is None else ids)


def test_a_client_larger_than_the_budget_is_a_block_alone_and_does_not_drag_others_along() -> None:
    sizes = [block.n.tolist() for block in numbered([3, 3, 50, 60]).blocks(budget=24 * 7)]
    assert sizes == [[3, 3], [50], [60]]


def test_blocks_are_as_large_as_the_budget_allows() -> None:
    sizes = [len(block.ids) for block in numbered([4] * 10).blocks(budget=24 * 4 * 3)]
    assert sizes == [3, 3, 3, 1]
    with_room = [len(block.ids) for block in numbered([4] * 10).blocks(budget=24 * 4 * 3, room=48)]
    assert with_room == [2] * 5
    with_row_room = [len(block.ids) for block in numbered([4] * 10).blocks(budget=24 * 4 * 3, row_room=24)]
    assert with_row_room == [1] * 10


def test_a_small_client_is_not_padded_to_a_large_one_where_that_wastes_much() -> None:
    rows = ragged([torch.ones(n, 1) for n in [1] * 8 + [2000] * 8], None)
    for block in rows.blocks():
        padded = block.x.shape[0] * block.x.shape[1]
        assert padded <= 4096 or padded <= 1.25 * int(block.n.sum())


@given(counts_lists, st.integers(24, 400))
def test_equal_length_blocks_are_views_of_the_store(counts: list[int], budget: int) -> None:
    rows = numbered(counts)
    assert isinstance(rows.x, Tensor)
    begin, end = rows.x.data_ptr(), rows.x.data_ptr() + rows.x.nbytes
    for block in rows.blocks(budget=budget):
        if block.mask is None and int(block.n[0]):
            assert begin <= block.x.data_ptr() < end
        elif block.mask is not None:
            assert not begin <= block.x.data_ptr() < end  # zeros were written into the padding of a copy


def test_padding_never_touches_the_store() -> None:
    rows = numbered([1, 5, 3])
    assert isinstance(rows.x, Tensor)
    before = rows.x.clone()
    for _ in range(2):
        list(rows.blocks())
    assert torch.equal(rows.x, before)


def test_equal_clients_that_lie_apart_come_together_in_a_block() -> None:
    rows = numbered([4, 4, 4, 4])
    (block,) = rows.blocks(torch.tensor([0, 3]))
    assert block.ids.tolist() == [0, 3]
    assert block.mask is None
    assert block.x[:, 0, 0].tolist() == [1, 301]


def test_weights_average_real_rows() -> None:
    (block,) = numbered([0, 1, 4]).blocks()
    assert block.weights.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0.25] * 4]
    (equal,) = numbered([2, 2]).blocks()
    assert equal.weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_part_of_a_block_is_a_view_of_those_clients() -> None:
    (block,) = numbered([2, 3, 3]).blocks()
    part = block.clients(slice(1, 3))
    assert part.ids.tolist() == [1, 2]
    assert part.x.data_ptr() == block.x[1:].data_ptr()
    assert torch.equal(part.weights, block.weights[1:])
    assert torch.equal(part.keys, block.keys[1:])


def test_clients_without_any_rows_make_a_block_of_no_rows() -> None:
    (block,) = numbered([0, 0]).blocks()
    assert block.x.shape == (2, 0, 2)
    assert block.weights.shape == (2, 0)


# -- holding out ------------------------------------------------------------------------------------------------------
@given(counts_lists, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 0.99]), st.integers(0, 5))
def test_a_split_is_a_partition_and_leaves_every_client_a_row(counts: list[int], share: float, seed: int) -> None:
    rows = numbered(counts)
    rest, held = rows.split(share, seed=seed)
    assert rest.names.tolist() == held.names.tolist() == rows.names.tolist()
    left, right = rows_by_name(rest), rows_by_name(held)
    for i, n in enumerate(counts):
        name = str(rows.names[i])
        kept, out = left[name][0][:, 0].tolist(), right[name][0][:, 0].tolist()
        assert kept == sorted(kept)
        assert out == sorted(out)
        assert sorted(kept + out) == [100 * i + row + 1 for row in range(n)]
        assert len(out) == min(round(n * share), max(n - 1, 0))  # ties of rounding go to even, as Python's round does
        assert torch.equal(left[name][1], -left[name][0][:, 0])  # type: ignore[arg-type]


@given(counts_lists, st.integers(0, 3), st.data())
def test_a_clients_split_does_not_depend_on_the_other_clients(
    counts: list[int], seed: int, data: st.DataObject
) -> None:
    rows = numbered(counts)
    some = data.draw(st.lists(st.sampled_from(range(len(counts))), unique=True, min_size=1))
    kept, held = rows.only(np.array(some)).split(0.4, seed=seed)
    everyone = rows.split(0.4, seed=seed)
    for part, whole in zip((kept, held), everyone, strict=True):
        mine, all_ = rows_by_name(part), rows_by_name(whole)
        for name in mine:
            assert torch.equal(mine[name][0], all_[name][0])


def test_the_order_in_which_clients_arrive_does_not_change_the_split() -> None:
    groups = np.repeat(["a", "b", "c"], [6, 9, 6])
    x = torch.arange(21.0)[:, None]
    other = np.concatenate([np.flatnonzero(groups == name) for name in "cab"])
    one = Ragged.from_groups(x, x[:, 0], groups).split(0.5, seed=1)
    two = Ragged.from_groups(x[other], x[other, 0], groups[other]).split(0.5, seed=1)
    assert_same_rows(one[0], two[0])
    assert_same_rows(one[1], two[1])


def test_seeds_and_purposes_hold_out_different_rows() -> None:
    rows = numbered([40] * 5)
    splits = [rows.split(0.5, seed=s, purpose=p)[1] for s, p in ((0, "test"), (1, "test"), (0, "validation"))]
    assert isinstance(splits[0].x, Tensor)
    assert not torch.equal(splits[0].x, splits[1].x)  # type: ignore[arg-type]
    assert not torch.equal(splits[0].x, splits[2].x)  # type: ignore[arg-type]
    assert_same_rows(splits[0], rows.split(0.5, seed=0)[1])


def test_every_row_is_as_likely_to_be_held_out() -> None:
    held = numbered([10] * 4000).split(0.3, seed=0)[1]
    assert isinstance(held.x, Tensor)
    share = torch.bincount((held.x[:, 0].long() - 1) % 100, minlength=10) / 4000
    # Binomial(4000, 0.3): a deviation is 0.0072; four of them over ten positions.
    assert (share - 0.3).abs().max() < 0.029


@given(counts_lists, st.data())
def test_only_keeps_the_named_clients_whole_and_numbers_them_anew(counts: list[int], data: st.DataObject) -> None:
    rows = numbered(counts)
    some = data.draw(st.lists(st.sampled_from(range(len(counts))), unique=True, min_size=1))
    part = rows.only(np.array(some))
    assert part.names.tolist() == [str(rows.names[i]) for i in sorted(some)]
    whole = rows_by_name(rows)
    for name, (x, _) in rows_by_name(part).items():
        assert torch.equal(x, whole[name][0])
    assert torch.equal(part.keys, rows.keys[sorted(some)])


def test_held_out_clients_are_a_partition_drawn_by_name() -> None:
    rows = numbered([3] * 20)
    rest, held = rows.split_clients(0.25, seed=4)
    assert len(held.names) == 5
    assert sorted([*rest.names, *held.names]) == rows.names.tolist()
    again = numbered([3] * 20).split_clients(0.25, seed=4)[1]
    assert again.names.tolist() == held.names.tolist()
    assert rows.split_clients(0.25, seed=5)[1].names.tolist() != held.names.tolist()
    # Who is drawn first does not depend on who else is there: of the held out, without the others, all are drawn again.
    both = rows.only(np.array([int(n[1:]) for n in [*held.names, *rest.names[:5]]]))
    assert both.split_clients(0.5, seed=4)[1].names.tolist() == held.names.tolist()


# -- disk -------------------------------------------------------------------------------------------------------------
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts_lists, st.integers(1, 600), st.data())
def test_disk_gives_what_memory_gives(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], budget: int, data: st.DataObject
) -> None:
    rows = numbered(counts, dtype=torch.float32)
    disk = on_disk(rows, tmp_path_factory.mktemp("rows"))
    some = np.array(data.draw(st.lists(st.sampled_from(range(len(counts))), unique=True, min_size=1)))
    pairs = [
        (rows, disk),
        (rows.only(some), disk.only(some)),
        *zip(rows.split(0.4, seed=1), disk.split(0.4, seed=1), strict=True),
        (rows.only(some).split(0.3, seed=2)[0], disk.only(some).split(0.3, seed=2)[0]),
        (rows.split(0.5, seed=2)[1].to(torch.float64), disk.split(0.5, seed=2)[1].to(torch.float64)),
    ]
    for memory, file in pairs:
        assert memory.shape == file.shape
        for a, b in zip(memory.blocks(budget=budget), file.blocks(budget=budget), strict=True):
            assert torch.equal(a.ids, b.ids)
            assert (a.mask is None) == (b.mask is None)
            torch.testing.assert_close((a.x, a.y), (b.x, b.y), rtol=0, atol=0)


def test_changes_on_disk_are_applied_one_after_the_other_to_features_and_targets(tmp_path: Path) -> None:
    rows = numbered([3, 1, 2], dtype=torch.float32)
    disk = on_disk(rows, tmp_path)
    changed, want = (
        r.changed(lambda x: x + 1).to(torch.float64).changed(lambda x: x * 2, lambda y: y - 1) for r in (disk, rows)
    )
    assert_same_rows(changed, want)
    (block,) = changed.blocks()
    assert block.x.dtype == block.target.dtype == torch.float64
    assert not block.x[~block.real].any()  # padding is zero after the change, too


def test_blocks_from_disk_are_sized_by_what_the_rows_become(tmp_path: Path) -> None:
    disk = on_disk(numbered([4] * 6, dtype=torch.float32), tmp_path).changed(lambda x: x.double().repeat(1, 1, 5))
    assert disk.shape == (10,)
    # A row becomes 10 numbers of 8 bytes, with a target of 4.
    assert [len(block.ids) for block in disk.blocks(budget=2 * 4 * 84)] == [2, 2, 2]


def test_class_numbers_stay_whole_numbers(tmp_path: Path) -> None:
    rows = ragged([torch.ones(2, 1), torch.ones(3, 1)], [torch.tensor([0, 1]), torch.tensor([1, 0, 2])])
    for made in (rows.to(torch.float64), on_disk(rows, tmp_path).to(torch.float64)):
        (block,) = made.blocks()
        assert block.target.dtype == torch.int64
        assert block.x.dtype == torch.float64


def test_the_file_goes_with_the_last_object_that_needs_it(tmp_path: Path) -> None:
    disk = on_disk(numbered([3, 2]), tmp_path)
    part = disk.split(0.5, seed=0)[0]
    del disk
    gc.collect()
    assert sum(int(b.n.sum()) for b in part.blocks()) == 2  # 1.5 rows held out of 3 round to 2
    del part
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_layout_of_nobody_is_empty() -> None:
    layout = Layout.plan(np.array([], dtype=str), np.array([]))
    assert layout.n_rows == 0
    assert list(Ragged(layout, torch.zeros(0, 2), None).blocks()) == []
