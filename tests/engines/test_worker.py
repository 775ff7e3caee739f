# SPDX-License-Identifier: Apache-2.0
"""A worker: several runs in one pass, private state by run, and nothing leaves but what is folded."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.engines.worker import Answer, Worker
from coterie.protocol import Ask, Block, ByCluster, Fold, Mean, RowProduct, Stack, Sum, Tensors, WeightedMean
from helpers import ragged

CALLS: list[tuple[int, list[int]]] = []  # runs and clients of every call of `score`


@pytest.fixture(autouse=True)
def _forget_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def score(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """theta . (sum of the client's rows) + plain + own; the visits stay private."""
    theta = shared["theta"]  # [S, D]
    CALLS.append((len(theta), data.ids.tolist()))
    value = theta @ (data.x * data.real[..., None]).sum(1).T + shared.get("plain", 0.0)  # [S, C]
    if each:
        value = value + each["own"]
    visits = private.get("visits", torch.zeros(value.shape, dtype=torch.int64)) + 1
    reply = {"value": value, "secret": value * 0 + 99.0, "n": data.n.expand(value.shape), "row": data.n[None].double()}
    return reply, {"visits": visits} if private else {}


FOLD: dict[str, Fold] = {"value": Stack(), "row": Stack()}


def clients(counts: tuple[int, ...] = (3, 1, 0, 2, 3)) -> Worker:
    """Client i's rows sum to (i + 1, 10 (i + 1)), unless it has none."""
    xs = []
    for i, n in enumerate(counts):
        x = torch.zeros(n, 2, dtype=torch.float64)
        x[:1] = torch.tensor([i + 1.0, 10.0 * (i + 1)])
        xs.append(x)
    return Worker(ragged(xs, None))


def ask(a: float, b: float, **changes: Any) -> Ask:
    options: dict[str, Any] = {"shared": {"theta": torch.tensor([a, b], dtype=torch.float64)}, "fold": FOLD}
    return Ask(score, **(options | changes))


def by_client(answer: Answer, field: str = "value") -> dict[int, float]:
    ids = answer.ids
    return dict(zip(ids.tolist(), answer.parts[field]["stack"][0].tolist(), strict=True))


EVERYONE = torch.arange(5)


def test_runs_that_differ_in_values_only_are_answered_by_one_call() -> None:
    answers = clients().answer({0: ask(1, 0), 7: ask(0, 1), 3: ask(1, 1)}, EVERYONE)
    assert [runs for runs, _ in CALLS] == [3]
    assert by_client(answers[0]) == {0: 1, 1: 2, 2: 0, 3: 4, 4: 5}
    assert by_client(answers[7]) == {0: 10, 1: 20, 2: 0, 3: 40, 4: 50}
    assert by_client(answers[3]) == {0: 11, 1: 22, 2: 0, 3: 44, 4: 55}


@pytest.mark.parametrize(
    "other",
    [
        ask(2, 0, shared={"theta": torch.tensor([2.0, 0.0], dtype=torch.float64), "plain": 5.0}),
        ask(2, 0, fold={"value": Stack()}),
        ask(2, 0, fresh={"visits": torch.tensor(0)}),
        ask(2, 0, each={"own": torch.ones(5, dtype=torch.float64)}),
    ],
    ids=["plain value", "fold", "private state", "own values"],
)
def test_runs_that_differ_in_form_are_answered_apart_in_the_same_pass(other: Ask) -> None:
    answers = clients().answer({0: ask(1, 0), 1: other, 2: ask(3, 0)}, EVERYONE)
    assert sorted(runs for runs, _ in CALLS) == [1, 2]
    assert by_client(answers[2]) == {0: 3, 1: 6, 2: 0, 3: 12, 4: 15}
    extra = 5.0 if "plain" in other.shared else 1.0 if other.each else 0.0
    assert by_client(answers[1]) == {0: 2 + extra, 1: 4 + extra, 2: extra, 3: 8 + extra, 4: 10 + extra}


def double(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say how the field arrived: with its run axis, or as it is."""
    value = shared["what"]
    total = value.sum() if isinstance(value, Tensor) else value
    return {"value": torch.full((1, len(data.n)), float(total))}, {}


def test_a_field_that_is_a_tensor_in_one_run_and_a_number_in_another_is_not_stacked() -> None:
    asks = {
        0: Ask(double, {"what": 1.0}, {"value": Mean()}),
        1: Ask(double, {"what": torch.tensor([1.0, 2.0])}, {"value": Mean()}),
        2: Ask(double, {"what": torch.tensor([1.0])}, {"value": Mean()}),
        3: Ask(double, {"what": torch.tensor([4], dtype=torch.int64)}, {"value": Mean()}),
    }
    answers = clients().answer(asks, EVERYONE)
    means = {run: (a.parts["value"]["sum"] / a.parts["value"]["count"]).item() for run, a in answers.items()}
    assert means == {0: 1.0, 1: 3.0, 2: 1.0, 3: 4.0}


@pytest.mark.parametrize(
    ("block_bytes", "blocks"), [(1, {(1,), (3,), (4,)}), (250, {(1, 3), (4,)}), (1 << 20, {(1, 3, 4)})]
)
def test_own_values_reach_their_client_whatever_the_blocks_and_whoever_is_asked(
    block_bytes: int, blocks: set[tuple[int, ...]]
) -> None:
    worker = clients()
    worker.block_bytes = block_bytes
    to = torch.tensor([1, 3, 4])
    own = torch.tensor([0.1, 0.3, 0.4], dtype=torch.float64)
    answers = worker.answer({0: ask(1, 0, each={"own": own}), 1: ask(0, 0, each={"own": 2 * own})}, to)
    assert by_client(answers[0]) == pytest.approx({1: 2.1, 3: 4.3, 4: 5.4})
    assert by_client(answers[1]) == pytest.approx({1: 0.2, 3: 0.6, 4: 0.8})
    assert {tuple(c) for _, c in CALLS} == blocks


def test_only_folded_fields_leave() -> None:
    folds: dict[str, Fold] = {"value": Sum(), "n": WeightedMean("row")}
    answer = clients().answer({0: ask(1, 0, fold=folds)}, EVERYONE)[0]
    assert answer.parts.keys() == {"value", "n"}
    assert {name: set(part) for name, part in answer.parts.items()} == {"value": {"sum"}, "n": {"sum", "weight"}}
    assert answer.parts["value"]["sum"].tolist() == [12.0]


def test_a_field_that_is_the_same_for_all_runs_may_have_a_run_axis_of_one() -> None:
    answers = clients().answer({0: ask(1, 0), 1: ask(2, 0)}, EVERYONE)
    for answer in answers.values():
        assert by_client(answer, "row") == {0: 3, 1: 1, 2: 0, 3: 2, 4: 3}
        assert answer.parts["value"]["stack"].shape[0] == 1


def test_private_state_is_each_runs_own_and_only_those_asked_change() -> None:
    worker = clients()
    fresh = {"visits": torch.tensor(10)}
    worker.answer({0: ask(1, 0, fresh=fresh), 4: ask(2, 0, fresh=fresh)}, torch.tensor([0, 3]))
    worker.answer({0: ask(1, 0, fresh=fresh)}, torch.tensor([3, 4]))
    worker.answer({0: ask(1, 0)}, EVERYONE)  # a question that does not concern it
    assert worker.private[0]["visits"].tolist() == [11, 10, 10, 12, 11]
    assert worker.private[4]["visits"].tolist() == [11, 10, 10, 11, 10]
    assert worker.private.keys() == {0, 4}


def test_runs_in_lockstep_start_from_their_own_fresh_state() -> None:
    worker = clients()
    asks = {run: ask(1, 0, fresh={"visits": torch.tensor(10 * run)}) for run in range(3)}
    worker.answer(asks, torch.tensor([0, 3]))
    assert [runs for runs, _ in CALLS] == [3]
    assert [worker.private[run]["visits"].tolist() for run in range(3)] == [
        [1, 0, 0, 1, 0],
        [11, 10, 10, 11, 10],
        [21, 20, 20, 21, 20],
    ]


def test_bytes_up_are_those_of_the_replies_that_are_folded_or_weigh() -> None:
    worker = clients()
    # value: 5 float64; row: 5 float64. Folding changes nothing: this is what clients send.
    assert worker.answer({0: ask(1, 0)}, EVERYONE)[0].bytes_up == 5 * 8 + 5 * 8
    assert worker.answer({0: ask(1, 0, fold={"value": Sum()})}, EVERYONE)[0].bytes_up == 40
    weighted: dict[str, Fold] = {"value": WeightedMean("n"), "row": WeightedMean("n")}
    two = worker.answer({0: ask(1, 0, fold=weighted), 1: ask(2, 0, fold=weighted)}, torch.tensor([0, 1]))
    assert [two[run].bytes_up for run in (0, 1)] == [2 * 3 * 8] * 2  # n once, though two folds need it
    worker.block_bytes = 1
    assert worker.answer({0: ask(1, 0)}, EVERYONE)[0].bytes_up == 80


def moments(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[dict[str, Any], Tensors]:
    """x^T g with g = theta for every row, unformed, or formed if asked; `common` is the same for all runs."""
    g = shared["theta"][:, None, None].expand(-1, *data.x.shape[:2], -1)  # [S, C, N, 3]
    made, common = RowProduct(data.x, g), RowProduct(data.x, torch.ones(1, *data.x.shape[:2], dtype=data.x.dtype))
    reply: dict[str, Any] = {"made": made, "common": common}
    if shared["formed"]:
        reply = {name: value.formed() for name, value in reply.items()}
    return {**reply, "n": data.n.double().expand(len(g), -1)}, {}


@pytest.mark.parametrize("block_bytes", [1, 1 << 20], ids=["a client a block", "one block"])
@pytest.mark.parametrize("fold", [Sum(), WeightedMean("n")], ids=["sum", "mean"])
def test_unformed_products_are_folded_and_their_bytes_counted_as_if_they_were_formed(
    fold: Fold, block_bytes: int
) -> None:
    worker = clients()
    worker.block_bytes = block_bytes
    theta = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]], dtype=torch.float64)
    got, want = (
        worker.answer(
            {
                run: Ask(moments, {"theta": theta[run], "formed": formed}, {"made": fold, "common": fold})
                for run in (0, 1)
            },
            EVERYONE,
        )
        for formed in (False, True)
    )
    weights = 0 if isinstance(fold, Sum) else 5 * 8
    for run in (0, 1):
        # A client's own values: two features times three columns, and two features; clients without rows answer too.
        assert got[run].bytes_up == want[run].bytes_up == 5 * (2 * 3 + 2) * 8 + weights
        for name in ("made", "common"):
            assert got[run].parts[name]["sum"].shape[0] == 1
            torch.testing.assert_close(got[run].parts[name], want[run].parts[name])
    if isinstance(fold, Sum):  # rows sum to (1, 10) + (2, 20) + (4, 40) + (5, 50)
        assert got[0].parts["made"]["sum"].tolist() == [[[12.0, 24.0, 36.0], [120.0, 240.0, 360.0]]]
        assert got[1].parts["common"]["sum"].tolist() == [[12.0, 120.0]]


def test_nobody_answers_nothing() -> None:
    answer = clients().answer({0: ask(1, 0)}, EVERYONE[:0])[0]
    assert (answer.parts, answer.ids.tolist(), answer.bytes_up) == ({}, [], 0)
    assert CALLS == []


def test_blocks_leave_room_for_what_clients_are_sent_keep_and_compute() -> None:
    worker = clients((4,) * 12)  # rows: 4 x 2 x 8 = 64 bytes a client
    sizes = []
    for changes in (
        {},  # + theta 16 = 80
        {"fresh": {"visits": torch.zeros(2, dtype=torch.float64)}},  # + 16 = 96
        {"each": {"own": torch.zeros(12, dtype=torch.float64)}},  # + 8 = 88
        {"scratch": 2},  # + two numbers for each of 4 rows = 144
    ):
        CALLS.clear()
        worker.private.clear()
        worker.block_bytes = 480
        worker.answer({0: ask(1, 0, **({"scratch": 0} | changes))}, torch.arange(12))
        sizes.append(len(CALLS[0][1]))
    assert sizes == [6, 5, 5, 3]
    CALLS.clear()
    worker.answer({run: ask(run, 0, scratch=0) for run in range(4)}, torch.arange(12))  # 64 + 4 x 16 = 128
    assert len(CALLS[0][1]) == 3


def vote(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Every client votes for cluster id % 2 with its number as the value."""
    runs = len(shared["theta"])
    share = torch.nn.functional.one_hot(data.ids % 2, 2).double().expand(runs, -1, -1)
    return {"value": shared["theta"][:, None] * data.ids, "share": share}, {}


def test_cluster_sums_are_the_same_in_one_block_and_in_many() -> None:
    for block_bytes in (1, 1 << 20):
        worker = clients()
        worker.block_bytes = block_bytes
        asks = {
            run: Ask(vote, {"theta": torch.tensor(run + 1.0, dtype=torch.float64)}, {"value": ByCluster("share")})
            for run in range(2)
        }
        for run, answer in worker.answer(asks, EVERYONE).items():
            assert answer.parts["value"]["sum"].tolist() == [[6.0 * (run + 1), 4.0 * (run + 1)]]  # 0+2+4 and 1+3
            assert answer.parts["value"]["weight"].tolist() == [[3.0, 2.0]]


BLOCKS: list[Block] = []


def look(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Note the block."""
    BLOCKS.append(data)
    return {"n": data.n[None]}, {}


def blocks_of(worker: Worker, ids: Tensor, scratch: int = 1) -> list[Block]:
    BLOCKS.clear()
    worker.answer({0: Ask(look, {}, {"n": Sum()}, scratch=scratch)}, ids)
    return list(BLOCKS)


def test_few_rows_are_handed_out_in_the_same_blocks_until_something_else_is_asked() -> None:
    worker = clients()
    first, again = blocks_of(worker, EVERYONE), blocks_of(worker, EVERYONE)
    assert all(a is b for a, b in zip(first, again, strict=True))
    some = blocks_of(worker, torch.tensor([0, 4]))
    assert [i for block in some for i in block.ids.tolist()] == [0, 4]
    other = blocks_of(worker, EVERYONE, scratch=1000)
    assert not any(a is b for a in first for b in other)
    assert sorted(i for block in other for i in block.ids.tolist()) == EVERYONE.tolist()


def test_many_rows_are_cut_anew_every_time_so_that_nothing_is_kept_of_them() -> None:
    worker = Worker(clients().rows, block_bytes=64)  # four rows of two numbers; there are nine
    first, again = blocks_of(worker, EVERYONE), blocks_of(worker, EVERYONE)
    assert len(first) == len(again) > 1
    assert not any(a is b for a in first for b in again)
