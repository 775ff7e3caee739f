# SPDX-License-Identifier: Apache-2.0
"""Folds against plain loops, whatever the blocks are cut into."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import RunError
from coterie.protocol import (
    NOBODY,
    Ask,
    Block,
    ByCluster,
    ClusterSums,
    Lowest,
    Mean,
    Replies,
    RowProduct,
    Save,
    Stack,
    Sum,
    Tensors,
    WeightedMean,
    one_run_at_a_time,
    together,
)

RUNS, CLIENTS, CLUSTERS = 2, 6, 3


def replies(shape: tuple[int, ...], seed: int = 0) -> Tensors:
    """Values [S, C, ...] with weights, and hard and soft shares, of six clients in two runs."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(RUNS, CLIENTS, *size, generator=draw, dtype=torch.float64)

    label = torch.tensor([[0, 2, 0, 2, 2, 0], [1, 1, 1, 1, 1, 1]])  # nobody in cluster 1, or nobody anywhere else
    return {
        "value": normal(*shape),
        "each": normal(CLUSTERS, *shape),
        "weight": torch.tensor([[1.0, 0.0, 2.5, 1.0, 3.0, 0.5], [0.0] * 6], dtype=torch.float64),
        "hard": torch.nn.functional.one_hot(label, CLUSTERS).double(),
        "soft": normal(CLUSTERS).softmax(-1),
    }


def of_clients(value: Any, i: int, j: int) -> Any:
    """A block's part of a reply."""
    return RowProduct(value.x[i:j], value.g[:, i:j]) if isinstance(value, RowProduct) else value[:, i:j]


def folded(fold: Any, reply: dict[str, Any], field: str, cuts: list[int]) -> list[Any]:
    """Fold block by block, as a worker does, and finish each run."""
    edges = [0, *cuts, CLIENTS]
    merged: Tensors | None = None
    for i, j in pairwise(edges):
        block = {name: of_clients(value, i, j) for name, value in reply.items()}
        part = fold.part(block[field], block)
        merged = part if merged is None else fold.merge(merged, part)
    assert merged is not None
    return [fold.finish({name: value[s] for name, value in merged.items()}) for s in range(RUNS)]


cuts = st.lists(st.integers(1, CLIENTS - 1), unique=True).map(sorted)
shapes = st.sampled_from([(), (4,), (2, 3)])


@given(shapes, cuts)
def test_sum_and_mean_are_those_of_a_loop(shape: tuple[int, ...], at: list[int]) -> None:
    reply = replies(shape)
    for s in range(RUNS):
        total = sum(reply["value"][s, c] for c in range(CLIENTS))
        torch.testing.assert_close(folded(Sum(), reply, "value", at)[s], total)
        torch.testing.assert_close(folded(Mean(), reply, "value", at)[s], total / 6)


@given(shapes, cuts, st.integers(1, CLIENTS + 2))
def test_the_lowest_are_those_of_a_loop_and_ties_go_by_key(shape: tuple[int, ...], at: list[int], n: int) -> None:
    reply = replies(shape)
    reply["score"] = torch.tensor([[3.0, 1.0, NOBODY, 1.0, 2.0, 1.0], [NOBODY] * 6], dtype=torch.float64)
    reply["key"] = torch.tensor([[0, 9, 1, -5, 4, 7]] * 2)
    order = [3, 5, 1, 4, 0][:n]  # the third is not in the running; of three with score 1, by key
    first, nobody = folded(Lowest("score", "key", n), reply, "value", at)
    assert torch.equal(first, reply["value"][0, order])
    assert nobody.shape == (0, *shape)


def test_the_lowest_of_many_blocks_may_be_merged_in_any_order() -> None:
    reply, fold = replies((2,)), Lowest("score", "key", 3)
    reply["score"] = torch.tensor([[5.0, 2.0, 4.0, 1.0, 3.0, 0.0]] * 2, dtype=torch.float64)
    reply["key"] = torch.arange(6).expand(2, -1)
    blocks = [{name: of_clients(value, i, i + 2) for name, value in reply.items()} for i in (0, 2, 4)]
    a, b, c = (fold.part(block["value"], block) for block in blocks)
    left, right = fold.merge(fold.merge(a, b), c), fold.merge(c, fold.merge(b, a))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(left["value"], reply["value"][:, [5, 3, 1]])


def test_sum_of_yes_and_no_counts() -> None:
    got = folded(Sum(), {"value": torch.tensor([[True, False, True, True, False, True]] * 2)}, "value", [2])
    assert got[0].item() == 4


@given(shapes, cuts)
def test_weighted_mean_is_that_of_a_loop_and_zero_without_weight(shape: tuple[int, ...], at: list[int]) -> None:
    reply = replies(shape)
    got = folded(WeightedMean("weight"), reply, "value", at)
    want = sum(float(reply["weight"][0, c]) * reply["value"][0, c] for c in range(CLIENTS)) / 8.0
    torch.testing.assert_close(got[0], want)
    assert torch.equal(got[1], torch.zeros(shape, dtype=torch.float64))
    small = folded(WeightedMean("weight"), reply | {"weight": reply["weight"] / 1000}, "value", at)
    torch.testing.assert_close(small[0], want)  # only the ratio of weights matters
    assert WeightedMean("weight").needs == ("weight",)


@given(shapes, cuts, st.sampled_from(["hard", "soft"]), st.booleans())
def test_cluster_sums_are_those_of_a_loop(shape: tuple[int, ...], at: list[int], share: str, per_cluster: bool) -> None:
    reply = replies(shape)
    got = folded(ByCluster(share, per_cluster=per_cluster), reply, "each" if per_cluster else "value", at)
    for s in range(RUNS):
        for k in range(CLUSTERS):
            total, weight = torch.zeros(shape, dtype=torch.float64), 0.0
            for c in range(CLIENTS):
                part = float(reply[share][s, c, k])
                total = total + part * (reply["each"][s, c, k] if per_cluster else reply["value"][s, c])
                weight += part
            torch.testing.assert_close(got[s].sum[k], total)
            torch.testing.assert_close(float(got[s].weight[k]), weight)


@given(shapes, cuts)
def test_a_cluster_that_nobody_chose_keeps_its_model(shape: tuple[int, ...], at: list[int]) -> None:
    reply = replies(shape)
    old = torch.full((CLUSTERS, *shape), 7.0, dtype=torch.float64)
    first, second = (got.mean_or(old) for got in folded(ByCluster("hard"), reply, "value", at))
    torch.testing.assert_close(first[0], reply["value"][0, [0, 2, 5]].mean(0))
    torch.testing.assert_close(first[2], reply["value"][0, [1, 3, 4]].mean(0))
    assert torch.equal(first[1], old[1])
    assert torch.equal(second[0], old[0])
    torch.testing.assert_close(second[1], reply["value"][1].mean(0))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("per_cluster", [False, True])
def test_a_client_that_diverged_spoils_its_own_cluster_only(bad: float, per_cluster: bool) -> None:
    reply = replies((4,))
    want = folded(ByCluster("hard", per_cluster=per_cluster), reply, "each" if per_cluster else "value", [3])
    reply["value"][0, 1] = bad
    reply["each"][0, 1] = bad
    got = folded(ByCluster("hard", per_cluster=per_cluster), reply, "each" if per_cluster else "value", [3])
    assert not got[0].sum[2].isfinite().any()  # client 1 is in cluster 2
    torch.testing.assert_close(got[0].sum[:2], want[0].sum[:2])
    torch.testing.assert_close(got[1].sum, want[1].sum)


def test_a_small_share_still_counts_in_full() -> None:
    got = ClusterSums(torch.tensor([[3e-12], [0.0]]), torch.tensor([1e-12, 0.0], dtype=torch.float64))
    torch.testing.assert_close(got.mean_or(torch.tensor([[1.0], [5.0]])), torch.tensor([[3.0], [5.0]]))


def test_sums_keep_the_values_precision_and_count_in_double() -> None:
    reply = {name: value.float() for name, value in replies((4,)).items()}
    got = folded(ByCluster("hard"), reply, "value", [3])[0]
    assert got.sum.dtype == torch.float32
    assert got.weight.dtype == torch.float64
    assert got.mean_or(torch.zeros(3, 4)).dtype == torch.float32
    assert folded(WeightedMean("weight"), reply, "value", [3])[0].dtype == torch.float32
    assert folded(Mean(), reply, "value", [3])[0].dtype == torch.float32


@given(shapes, cuts)
def test_stack_keeps_every_reply_in_order(shape: tuple[int, ...], at: list[int]) -> None:
    reply = replies(shape)
    # A worker keeps the run axis of one until the end: the second axis is that of the clients.
    fold, edges = Stack(), [0, *at, CLIENTS]
    merged: Tensors | None = None
    for i, j in pairwise(edges):
        part = fold.part(reply["value"][:, i:j], {})
        merged = part if merged is None else fold.merge(merged, part)
    assert merged is not None
    assert torch.equal(merged["stack"], reply["value"])


def test_parts_merge_in_any_tree() -> None:
    reply = replies((4,))
    fold = ByCluster("soft")
    a, b, c = (fold.part(reply["value"][:, i:j], {"soft": reply["soft"][:, i:j]}) for i, j in ((0, 1), (1, 4), (4, 6)))
    left, right = fold.merge(fold.merge(a, b), c), fold.merge(a, fold.merge(c, b))
    for name in left:
        torch.testing.assert_close(left[name], right[name])


# -- products over rows -----------------------------------------------------------------------------------------------
P = 4
# Rows of the longest client; with three clusters, 10 is the last for which clusters are spread out before the product.
lengths = st.sampled_from([0, 1, 2, 10, 11])


def product(rows: int, shape: tuple[int, ...], seed: int = 1) -> RowProduct:
    """Unformed replies [S, C, P, ...] of six clients, of which the third has no rows and others are padded."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS, rows, P, generator=draw, dtype=torch.float64)
    for c, n in enumerate([rows, rows // 2, 0, rows, min(1, rows), rows]):
        x[c, n:] = 0
    return RowProduct(x, torch.randn(RUNS, CLIENTS, rows, *shape, generator=draw, dtype=torch.float64))


@cache
def row_by_row(rows: int, shape: tuple[int, ...]) -> Tensor:
    """What every client would send of `product`: the sum of its rows' outer products.  [S, C, P, ...]"""
    value = product(rows, shape)
    out = torch.zeros(RUNS, CLIENTS, P, *value.g.shape[3:], dtype=torch.float64)
    for s in range(RUNS):
        for c in range(CLIENTS):
            for n in range(value.x.shape[1]):
                out[s, c] += torch.tensordot(value.x[c, n, None], value.g[s, c, n, None], dims=([0], [0]))
    return out


@given(lengths, shapes)
def test_a_product_over_rows_is_that_of_a_loop(rows: int, shape: tuple[int, ...]) -> None:
    value = product(rows, shape)
    want = row_by_row(rows, shape)
    torch.testing.assert_close(value.formed(), want)
    torch.testing.assert_close(value.total(), want.sum(1))
    weight = replies(())["weight"]
    lead = (RUNS, CLIENTS, *(1,) * (1 + len(shape)))
    torch.testing.assert_close(value.times(weight).formed(), weight.view(lead) * want)
    assert value.bytes_per_run == want[0].nbytes
    one = RowProduct(value.x, value.g[:1])
    torch.testing.assert_close(one.expand(RUNS).formed(), want[:1].expand(RUNS, *want.shape[1:]))


@given(st.sampled_from([0, 1, 10, 700]), shapes)
def test_products_of_columns_are_as_if_they_had_been_formed(rows: int, shape: tuple[int, ...]) -> None:
    value = product(rows, shape)  # of six clients: with 700 rows each, more than are formed at once
    i, j = torch.triu_indices(P, P)
    formed = RowProduct(value.x[..., i] * value.x[..., j], value.g)
    pairs = RowProduct(value.x, value.g, pairs=True)
    torch.testing.assert_close(pairs.formed(), formed.formed())
    torch.testing.assert_close(pairs.total(), formed.total())
    torch.testing.assert_close(pairs.times(replies(())["weight"]).total(), formed.times(replies(())["weight"]).total())
    assert pairs.bytes_per_run == formed.bytes_per_run


def test_a_block_of_some_rows_keeps_their_order_and_pads_with_zeros() -> None:
    x = torch.arange(1.0, 9.0).view(2, 4, 1)
    mask, fold = torch.tensor([[True] * 4, [True, True, True, False]]), torch.tensor([[0, 1, 0, 1], [1, 0, 1, 1]])
    block = Block(torch.arange(2), torch.arange(2), x, x[..., 0], mask.sum(1), mask, fold, x[..., 0])
    some = block.rows(fold == 0)
    assert some.x[..., 0].tolist() == [[1.0, 3.0], [6.0, 0.0]]
    assert some.target.tolist() == [[1.0, 3.0], [6.0, 0.0]]
    assert some.mass.tolist() == [[1.0, 3.0], [6.0, 0.0]]
    assert some.n.tolist() == [2, 1]


@given(lengths, shapes, cuts)
def test_a_product_over_rows_folds_as_if_it_were_formed(rows: int, shape: tuple[int, ...], at: list[int]) -> None:
    value = product(rows, shape)
    unformed = {**replies(()), "value": value}
    formed = {**unformed, "value": row_by_row(rows, shape)}
    for fold in (Sum(), WeightedMean("weight")):
        for got, want in zip(folded(fold, unformed, "value", at), folded(fold, formed, "value", at), strict=True):
            torch.testing.assert_close(got, want)


@given(lengths, shapes, cuts, st.sampled_from(["hard", "soft"]))
def test_products_over_rows_by_cluster_fold_as_if_they_were_formed(
    rows: int, shape: tuple[int, ...], at: list[int], share: str
) -> None:
    value = product(rows, shape)
    unformed = {**replies(()), "value": value}
    formed = {**unformed, "value": row_by_row(rows, shape)}
    fold = ByCluster(share)
    for got, want in zip(folded(fold, unformed, "value", at), folded(fold, formed, "value", at), strict=True):
        torch.testing.assert_close(got.sum, want.sum)
        torch.testing.assert_close(got.weight, want.weight)


@pytest.mark.parametrize("fold", [Sum(), WeightedMean("weight"), ByCluster("hard")], ids=["sum", "mean", "clusters"])
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_a_block_without_clients_adds_nothing(fold: Any, shape: tuple[int, ...]) -> None:
    value = product(3, shape)
    reply = {**replies(()), "value": value}
    nobody = {name: of_clients(v, 0, 0) for name, v in reply.items()}
    alone, empty = fold.part(value, reply), fold.part(nobody["value"], nobody)
    for name, merged in fold.merge(alone, empty).items():
        assert torch.equal(merged, alone[name])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("rows", [2, 11], ids=["spread", "formed"])
def test_a_product_that_diverged_spoils_its_own_cluster_only(bad: float, rows: int) -> None:
    value, reply = product(rows, ()), replies(())
    want = folded(ByCluster("hard"), {**reply, "value": value}, "value", [3])
    value.g[0, 1, 0] = bad
    got = folded(ByCluster("hard"), {**reply, "value": value}, "value", [3])
    assert not got[0].sum[2].isfinite().any()  # client 1 is in cluster 2
    torch.testing.assert_close(got[0].sum[:2], want[0].sum[:2])
    torch.testing.assert_close(got[1].sum, want[1].sum)


@pytest.mark.parametrize("rows", [2, 11], ids=["spread", "formed"])
def test_products_keep_their_precision_and_weights_count_in_double(rows: int) -> None:
    value = product(rows, ())
    reply: dict[str, Any] = {name: v.float() for name, v in replies(()).items()}
    reply["value"] = RowProduct(value.x.float(), value.g.float())
    by_cluster = folded(ByCluster("hard"), reply, "value", [3])[0]
    assert (by_cluster.sum.dtype, by_cluster.weight.dtype) == (torch.float32, torch.float64)
    assert folded(Sum(), reply, "value", [3])[0].dtype == torch.float32
    assert folded(WeightedMean("weight"), reply, "value", [3])[0].dtype == torch.float32


def test_replies_give_fields_by_name_and_count_who_answered() -> None:
    got = Replies({"loss": 1.5}, torch.tensor([2, 5]), torch.tensor([3]))
    assert got.n == 2
    assert got["loss"] == 1.5
    with pytest.raises(KeyError):
        got["theta"]
    with pytest.raises(RunError, match="no client has answered: there is no 'loss' to go on with"):
        Replies({}, torch.tensor([]), torch.tensor([3]))["loss"]


def test_one_run_at_a_time_gives_a_step_its_own_run() -> None:
    calls = []

    def step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block) -> tuple[Tensors, Tensors]:
        calls.append(shared["theta"].shape)
        return {"sum": shared["theta"] + each["own"] + shared["plain"]}, {"seen": private["seen"] + 1}

    looped = one_run_at_a_time(step)
    theta, own = torch.tensor([10.0, 20.0]), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    block = Block(torch.arange(3), torch.arange(3), torch.zeros(3, 1, 1), None, torch.ones(3, dtype=torch.int64), None)
    reply, private = looped({"theta": theta, "plain": 0.5}, {"own": own}, {"seen": torch.zeros(2, 3)}, block)
    assert reply["sum"].tolist() == [[11.5, 12.5, 13.5], [24.5, 25.5, 26.5]]
    assert private["seen"].tolist() == [[1.0] * 3] * 2
    assert calls == [(), ()]
    assert (looped.__name__, looped.__module__) == (step.__name__, step.__module__)


# -- several asks in one message --------------------------------------------------------------------------------------
def counted(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How often a client was asked under a name, and its rows times a number."""
    name = shared["name"]
    times = private[name] + 1
    return {"value": shared["factor"][:, None] * data.n, "times": times}, {name: times}


def count_ask(name: str, factor: float, **how: Any) -> Ask:
    shared = {"name": name, "factor": torch.tensor(factor, dtype=torch.float64)}
    fresh = {name: torch.zeros((), dtype=torch.float64)}
    return Ask(counted, shared, {"value": Sum(), "times": Stack()}, fresh=fresh, **how)


def asks_in_turn(name: str, n: int, **how: Any) -> Any:
    """Ask n times, save between, and return all answers."""
    got = []
    for i in range(n):
        replies = yield count_ask(name, float(i + 1), **how)
        got.append((float(replies["value"]), replies["times"].tolist()))
        yield Save(None)
    return got


@pytest.fixture
def three_clients() -> InProcess:
    return InProcess(Ragged.from_blocks(torch.zeros(3, 2, 1), torch.zeros(3, 2)))


def test_algorithms_together_answer_as_each_alone_and_share_messages(three_clients: InProcess) -> None:
    lengths = {"a": 3, "b": 1, "c": 2}
    alone = {
        name: InProcess(three_clients.worker.rows).run([lambda _, a=name: asks_in_turn(a, lengths[a])])
        for name in lengths
    }
    messages = []
    answer = three_clients.dispatch
    three_clients.dispatch = lambda groups: messages.append(groups) or answer(groups)  # type: ignore[method-assign]
    both = three_clients.run([lambda _: together({name: asks_in_turn(name, n) for name, n in lengths.items()})])
    assert both.states[0] == {name: done.states[0] for name, done in alone.items()}
    assert [[len(asks) for asks, _ in groups] for groups in messages] == [[3], [2], [1]]
    assert [done.info["running"] for done in both.rounds] == [["a", "b", "c"], ["a", "c"], ["a"]]


def test_asks_to_different_clients_share_a_message(three_clients: InProcess) -> None:
    def both(_: Any) -> Any:
        got = yield count_ask("all", 1.0), count_ask("one", 1.0, to=torch.tensor([1]))
        return [replies.ids.tolist() for replies in got]

    messages = []
    answer = three_clients.dispatch
    three_clients.dispatch = lambda groups: messages.append(groups) or answer(groups)  # type: ignore[method-assign]
    assert three_clients.run([both]).states[0] == [[0, 1, 2], [1]]
    assert len(messages) == 1
    assert three_clients.private[0]["one"].tolist() == [0, 1, 0]  # of one run, whichever ask it was


def test_together_may_be_nested(three_clients: InProcess) -> None:
    def inner() -> Any:
        first = yield from asks_in_turn("first", 1)
        rest = yield from together({"x": asks_in_turn("x", 2), "y": asks_in_turn("y", 1)})
        return first, rest

    done = three_clients.run([lambda _: together({"in": inner(), "out": asks_in_turn("out", 4)})])
    (first, rest), out = done.states[0]["in"], done.states[0]["out"]
    assert [value for value, _ in first + rest["x"]] == [6.0, 6.0, 12.0]
    assert [value for value, _ in out] == [6.0, 12.0, 18.0, 24.0]
    assert len(done.rounds) == 4
