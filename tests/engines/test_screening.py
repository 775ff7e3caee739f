# SPDX-License-Identifier: Apache-2.0
"""Answers that do not count: left out client by client, named with the reason, and the same on both engines."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.ifca import ifca
from coterie.engines.engine_for import engine_for
from coterie.engines.in_process import InProcess
from coterie.engines.screening import (
    Bounds,
    ClientWarning,
    bounds_after,
    left_out_text,
    lengths_of,
    longest,
    look,
)
from coterie.local import Training
from coterie.models import linear_regression
from coterie.protocol import Ask, Block, Fold, Limit, Mean, RowProduct, Save, Stack, Sum, Tensors, WeightedMean
from coterie.studies.bad_replies import answering_wrongly
from helpers import assert_same_state, federation, ragged

LIMIT = Limit(clip=4.0, out=40.0)


def told(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Every client sends its first row, its second entry as a weight, and counts its visits."""
    value, visits = data.x[None, :, 0, :1], private["visits"] + 1
    return {"value": value, "weight": data.x[None, :, 0, 1], "n": data.n[None].double()}, {"visits": visits}


def engine(values: list[float], weights: list[float] | None = None, **how: Any) -> InProcess:
    """Clients 'a', 'b', ... with two rows each, which say what they send."""
    rows = [
        torch.tensor([[v, w]] * 2, dtype=torch.float64) for v, w in zip(values, weights or [1.0] * 99, strict=False)
    ]
    return InProcess(ragged(rows, None, [chr(97 + i) for i in range(len(rows))]), **how)


def ask(fold: Fold, limit: Limit | None = None) -> Ask:
    return Ask(
        told, {}, {"value": fold}, fresh={"visits": torch.tensor(0)}, limits={} if limit is None else {"value": limit}
    )


def one_ask(question: Ask, seen: list[Any]) -> Any:
    """An algorithm of one question; its replies go on the list."""
    seen.append((yield question))
    return None


def replies(made: InProcess, question: Ask) -> Any:
    """What one round of a single question brings."""
    seen: list[Any] = []
    with pytest.warns(ClientWarning):
        made.run([lambda state: one_ask(question, seen)])
    return seen[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fold", [Mean(), Stack()])
def test_a_client_whose_numbers_are_not_finite_is_missing_and_the_others_count(bad: float, fold: Fold) -> None:
    got = replies(engine([1.0, bad, 3.0]), ask(fold))
    assert float(got["value"].mean()) == 2.0
    assert got.ids.tolist() == [0, 2]
    assert got.missing.tolist() == [1]
    assert got.left_out == {1: "'value' is not finite"}


def test_where_most_numbers_are_not_finite_the_fault_is_not_the_clients() -> None:
    seen: list[Any] = []
    engine([1.0, math.inf, math.inf]).run([lambda state: one_ask(ask(Sum()), seen)])
    assert seen[0].n == 3
    assert seen[0]["value"].isinf().all()


def test_a_client_with_a_negative_weight_is_left_out() -> None:
    got = replies(engine([1.0, 9.0, 3.0], [1.0, -5.0, 3.0]), ask(WeightedMean("weight")))
    assert float(got["value"]) == (1.0 + 3.0 * 3.0) / 4
    assert got.left_out == {1: "'weight' is negative"}


HONEST = [1.0, 1.1, -1.2, 1.3, 0.9]


def test_who_is_beyond_the_bound_is_left_out_and_who_is_long_is_shortened() -> None:
    """The median of the lengths is 1.2, within half powers of two 2^(1/2); 4 times that is the bound."""
    got = replies(engine([*HONEST, 30.0, -4000.0]), ask(Stack(), LIMIT))
    bound = 4 * math.sqrt(2)
    torch.testing.assert_close(got["value"][:, 0], torch.tensor([*HONEST, bound], dtype=torch.float64))
    assert got.left_out == {6: "'value' is far longer than others'"}


@pytest.mark.parametrize("values", [HONEST, [*HONEST, 5.0], [0.0] * 9 + [1.0]])
def test_clients_who_differ_a_little_or_only_a_few_who_move_are_left_alone(values: list[float]) -> None:
    seen: list[Any] = []
    engine(values).run([lambda state: one_ask(ask(Stack(), LIMIT), seen)])
    assert seen[0]["value"][:, 0].tolist() == values


def test_what_is_short_beside_the_floor_is_left_alone() -> None:
    seen: list[Any] = []
    values = [*[v / 1000 for v in HONEST], 0.9]
    engine(values).run([lambda state: one_ask(ask(Stack(), Limit(4.0, 40.0, floor=1.0)), seen)])
    assert seen[0]["value"][:, 0].tolist() == values


def test_asking_again_begins_from_the_private_state_that_there_was() -> None:
    made = engine([*HONEST, 1e9])
    replies(made, ask(Stack(), LIMIT))
    assert made.private[0]["visits"].tolist() == [1] * 6


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_who_is_left_out_depends_neither_on_blocks_nor_on_the_order_of_clients(block_bytes: int) -> None:
    values = [*HONEST, 30.0, -4000.0, math.nan]
    for order in (range(8), reversed(range(8))):
        at = list(order)
        got = replies(engine([values[i] for i in at], block_bytes=block_bytes), ask(Sum(), LIMIT))
        assert {at[i] for i in got.left_out} == {6, 7}
        assert float(got["value"]) == pytest.approx(sum(HONEST) + 4 * math.sqrt(2), abs=1e-12)


def test_runs_in_lockstep_leave_out_different_clients() -> None:
    made, seen = engine([1.0, 2.0, 3.0]), [list[Any](), list[Any]()]

    def question(bad: float) -> Ask:
        return Ask(times, {"factor": torch.tensor([1.0, bad, 1.0], dtype=torch.float64)}, {"value": Sum()})

    with pytest.warns(ClientWarning, match="'b' left out"):
        made.run([lambda state, s=s: one_ask(question([1.0, 0.0][s]), seen[s]) for s in (0, 1)])  # type: ignore[misc]
    assert float(seen[0][0]["value"]) == 6.0
    assert float(seen[1][0]["value"]) == 4.0


def times(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The first number of every client, times its factor in the run; without one, no number."""
    factor = shared["factor"][:, data.ids]
    return {"value": (data.x[:, 0, 0] * torch.where(factor > 0, factor, math.nan))[..., None]}, {}


def test_outside_rounds_who_is_left_out_counts_as_a_client_without_rows() -> None:
    with pytest.warns(ClientWarning, match="client 'b' left out: 'value' is not finite"):
        got = engine([1.0, math.nan, 3.0]).ask(ask(Stack()))
    assert got["value"][:, 0].tolist() == [1.0, 0.0, 3.0]


def strictly(run: int) -> bool:
    """Of all runs."""
    return True


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("positive", [[1.0, 2.0], [1.0, -1.0]]),
        ("definite", [[[1.0, -9.0], [-9.0, 1.0]], [[-1.0, 0.0], [0.0, 1.0]]]),
    ],
)
def test_values_that_cannot_be_negative(kind: Any, values: Any) -> None:
    value = torch.tensor(values, dtype=torch.float64)[None]
    question = Ask(told, {}, {"value": Sum()}, limits={"value": Limit(kind=kind)})
    block = Block(torch.arange(2), torch.arange(2), torch.ones(2, 2, 1), None, torch.tensor([2, 2]), None)
    assert look(question, [Bounds()], strictly, {"value": value}, block).keep.tolist() == [[True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_that_are_not_formed_are_never_longer_than_is_said(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, g = torch.randn(4, 5, 3, generator=draw, dtype=dtype), torch.randn(2, 4, 5, 2, generator=draw, dtype=dtype)
    g[1, 2], g[0, 3] = 1e30 * g[1, 2], 0.0
    value, block = RowProduct(x, g), Block(torch.arange(4), torch.arange(4), x, None, torch.full((4,), 5), None)
    question = Ask(told, {}, {"value": Sum()}, limits={"value": Limit()})
    said = look(question, [Bounds()] * 2, strictly, {"value": value}, block).lengths["value"]
    true = value.formed().double().flatten(2).norm(dim=2)
    assert bool((said >= true * (1 - 1e-6)).all())
    assert bool((said <= 5**0.5 * 3**0.5 * true.clamp(min=1e-12) * 10).all())
    assert said[1, 2] == pytest.approx(float(x[2].double().norm() * g[1, 2].double().norm()), rel=1e-5)


def test_nobody_is_left_out_where_what_was_sent_is_not_finite() -> None:
    made, seen = engine([1.0, 2.0, math.nan]), list[Any]()
    question = replace(ask(Sum()), shared={"theta": torch.tensor([math.inf])})
    made.run([lambda state: one_ask(question, seen)])
    assert not len(seen[0].missing)


@pytest.mark.parametrize("before", [[], [[0.0] * 7]])
def test_a_round_is_the_same_whether_the_one_before_diverged_or_not(before: list[list[float]]) -> None:
    """A run that diverges is asked at once as if it still does, and then again: as often as it takes."""
    made, seen = engine([*HONEST, 4000.0, 1.0]), list[Any]()

    def rounds(state: Any) -> Any:
        for factor in (*before, [0.0] * 7, [1.0] * 6 + [0.0], [0.0] * 7):
            how = {"factor": torch.tensor(factor, dtype=torch.float64)}
            seen.append((yield Ask(times, how, {"value": Sum()}, limits={"value": LIMIT})))
            yield Save(None)

    with pytest.warns(ClientWarning):
        made.run([rounds])
    *first, recovered, last = seen
    assert all(got.n == 7 and got["value"].isnan().all() for got in (*first, last))
    assert recovered.left_out == {5: "'value' is far longer than others'", 6: "'value' is not finite"}
    assert float(recovered["value"]) == pytest.approx(sum(HONEST), abs=1e-12)


def lengths_in(length: Tensor) -> Tensor:
    """Counts of clients by length, as they travel.  [C] -> [L, 2]"""
    return lengths_of(length[None])[0]


def test_lengths_are_counted_run_by_run() -> None:
    lengths = torch.tensor([[0.0, 1.0, 1.3], [1e-300, 8.0, 1e300]], dtype=torch.float64)
    one, other = (rows.tolist() for rows in lengths_of(lengths))
    assert one == [[0, 2]]  # 1.3 is below the root of 2
    assert other == [[-512, 1], [6, 1], [511, 1]]


def test_lengths_add_up_over_nodes() -> None:
    lengths = torch.tensor([0.0, 1.0, 1.2, 1.5, 2.5, 700.0, 1.1], dtype=torch.float64)
    parts = torch.cat([lengths_in(lengths[:3]), lengths_in(lengths[3:])])
    question = ask(Sum(), LIMIT)
    together, apart = (bounds_after(question, {"value": c}, [], 7) for c in (lengths_in(lengths), parts))
    assert together == apart == Bounds({"value": 4 * 2.0}, {"value": 40 * 2.0})  # 65 % are up to 1.5, rounded up to 2
    assert longest(parts) == pytest.approx(512 / 2)


def test_of_two_groups_of_equal_size_none_is_left_out() -> None:
    lengths = torch.tensor([1.0] * 5 + [1e6] * 5, dtype=torch.float64)
    assert bounds_after(ask(Sum(), LIMIT), {"value": lengths_in(lengths)}, [], 10) is None
    few = torch.tensor([1.0] * 7 + [1e6] * 3, dtype=torch.float64)
    assert bounds_after(ask(Sum(), LIMIT), {"value": lengths_in(few)}, [], 10) is not None


def test_clients_are_named_with_the_reason() -> None:
    names = np.array([f"site-{i}" for i in range(9)])
    assert left_out_text(names, {3: "'loss' is negative"}) == ["client 'site-3' left out: 'loss' is negative"]
    (many,) = left_out_text(names, dict.fromkeys(range(8), "'loss' is negative"))
    assert many == ("clients 'site-0', 'site-1', 'site-2', 'site-3', 'site-4' and 3 more left out: 'loss' is negative")


# -- both engines -----------------------------------------------------------------------------------------------------
FEW = federation((14, 22, 17, 12, 17, 20, 19, 17, 14, 12))
PROGRAMS = {
    "fedavg": partial(fedavg, model=linear_regression(3), rounds=3, step_size=0.05, seed=1, robust="clip"),
    "ifca": partial(
        ifca,
        model=linear_regression(3),
        n_clusters=2,
        rounds=3,
        step_size=0.05,
        seed=1,
        training=Training(3),
        robust="clip",
    ),
}


@pytest.mark.parametrize("attack", ["nan", "scale back"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_engines_leave_out_the_same_clients(name: str, attack: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flower_grid import connected

    rows = FEW.rows
    clients, _ = connected(rows, tmp_path)
    bad: Tensor = rows.keys[torch.tensor([2, 5])]
    with answering_wrongly(bad, attack), pytest.warns(ClientWarning, match="left out"):
        far, here = engine_for(clients.train).run([PROGRAMS[name]]), InProcess(rows).run([PROGRAMS[name]])
    assert far.left_out == here.left_out
    assert set(here.left_out) == {2, 5}
    assert_same_state(far.states[0], here.states[0], atol=1e-10)
