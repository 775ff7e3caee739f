# SPDX-License-Identifier: Apache-2.0
"""What counts in answers is held against what nodes have, and what nodes are asked is held against bounds, too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from coterie.data.remote import AtLeast, Folded, Part
from coterie.engines.flower.client import answered
from coterie.engines.flower.incoming import printable
from coterie.engines.flower.messages import Batch, Hello, Introduction, Question, Refusal, Reply, State
from coterie.engines.flower.pieces import Expected
from coterie.engines.flower.server import _check_lengths
from coterie.engines.flower.wire import from_records, to_records
from coterie.errors import RunError
from coterie.evaluate import target_ask
from coterie.protocol import Ask, Block, Limit, Mean, Stack, Sum, Tensors, WeightedMean, answers
from flower_grid import dealt
from helpers import federation


# -- on a node --------------------------------------------------------------------------------------------------------
def question(**changes: Any) -> Question:
    ask = target_ask(torch.tensor(0.5, dtype=torch.float64))
    good = Question("run", Part("train"), (), None, torch.arange(3), {0: ask}, State("a", 0, "a", 1, 0))
    return replace(good, **changes)


def said_to(folder: Path, asked: Any) -> Any:
    node = next(holding for holding in dealt(federation().rows, folder, nodes=3).values() if holding.name == "node-1")
    return from_records(answered(to_records(asked), node))


def ask(**changes: Any) -> dict[int, Ask]:
    return {0: replace(target_ask(torch.tensor(0.5, dtype=torch.float64)), **changes)}


def test_a_node_answers_what_is_a_question(tmp_path: Path) -> None:
    assert isinstance(said_to(tmp_path, Batch((question(),))), Reply)
    assert isinstance(said_to(tmp_path, Hello("run", "00")), Introduction)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Hello("r" * 1001, "00"), "greeting is not of texts of at most 1000 characters"),
        (Hello(5, "00"), "greeting is not of texts"),  # type: ignore[arg-type]
        (Batch(5), "it is not at most 1,000 questions"),  # type: ignore[arg-type]
        (Batch((question(),) * 1001), "it is not at most 1,000 questions"),
        (Batch((question(run=7),)), "a question is of no run"),
        (Batch((question(run="../../etc"),)), "cannot be the name of stored state"),
        (Batch((question(schema="s" * (1 << 24)),)), "no text of at most 16,777,216 characters"),
        (Batch((question(schema="s" * (1 << 23) + "s"),)), "columns are not told in at most 8,388,608 characters"),
        (Batch((question(after=0),)), "a question follows a later one"),
        (Batch((question(ids=torch.tensor([-1, 0])),)), "their numbers must be ascending"),
        (Batch((question(ids=torch.tensor([1, 0])),)), "their numbers must be ascending"),
        (Batch((question(ids=torch.tensor([0, 0])),)), "their numbers must be ascending"),
        (Batch((question(ids=torch.arange(100_001)),)), "their numbers must be ascending"),
        (Batch((question(ids=torch.tensor([2, 3])),)), "asks for a client that is not on this node"),
        (Batch((question(views=(AtLeast(1),) * 65),)), "in at most 64 steps"),
        (Batch((question(views=(Part("train"),)),)), "does not say of which rows"),
        (Batch((question(part=5),)), "does not say of which rows"),
        (Batch((question(part=Folded(10**9, 0, Part("train"), (), None, ())),)), "rows have at most 1,000 folds"),
        (Batch((question(state=None),)), "what private state it starts from"),
        (Batch((question(state=State("a", -1, "a", 1, 0)),)), "what private state it starts from"),
        (Batch((question(asks={}),)), "does not have 1 to 10,000 asks"),
        (Batch((question(asks={0: 5}),)), "a int is no ask"),
        (Batch((question(asks=ask(shared={1: 2})),)), "parts without names"),
        (Batch((question(asks=ask(fresh={"a": 5})),)), "parts of another kind"),
        (Batch((question(asks=ask(fold={"n": 5})),)), "parts of another kind"),
        (Batch((question(asks=ask(each={"a": torch.zeros(7)})),)), "an ask is to other clients"),
        (Batch((question(asks=ask(scratch=-1)),)), "less than no room"),
    ],
)  # fmt: skip
def test_a_node_refuses_what_is_none(tmp_path: Path, asked: Any, said: str) -> None:
    found = said_to(tmp_path, asked)
    assert isinstance(found, Refusal)
    assert said in found.why


def test_a_node_keeps_no_more_than_it_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.flower.incoming.MOST_STATE", 3 * 80)
    for size, kind in ((10, Reply), (11, Refusal)):
        fresh = {"a": torch.zeros(size, dtype=torch.float64)}
        assert isinstance(said_to(tmp_path, Batch((question(asks=ask(fresh=fresh)),))), kind)


def test_what_others_say_can_be_shown() -> None:
    assert printable("a\x1b[2Jb\n") == "a [2Jb "
    assert printable("x" * 1000) == "x" * 300 + "..."


# -- what counts ------------------------------------------------------------------------------------------------------
ROWS = torch.tensor([5, 0, 7])
SHARED = {"centre": torch.zeros(3, dtype=torch.float64)}


@answers(value=(Mean, WeightedMean, Sum), n=(Sum, Stack))
def own_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    n = data.n[None].to(torch.float64)
    return {"value": n, "n": n, "weight": n}, {}


own_step.__module__ = "coterie.algorithms.test"


def others_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return own_step(shared, each, private, data)


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(
    ("fold", "part", "said"),
    [
        ({"value": Mean()}, {"sum": number(1), "count": number(3)}, None),
        (
            {"value": Mean()},
            {"sum": number(1), "count": number(1e12)},
            "'value' is a mean of 1e.12, and must be 3 to 3",
        ),
        ({"value": Mean()}, {"sum": number(1), "count": number(2)}, "is a mean of 2, and must be 3 to 3"),
        ({"value": WeightedMean("weight")}, {"sum": number(1), "weight": number(12)}, None),
        ({"value": WeightedMean("weight")}, {"sum": number(1), "weight": number(13)}, "is 13, and must be 0 to 12"),
        ({"value": WeightedMean("weight")}, {"sum": number(1), "weight": number(-1)}, "is -1, and must be 0 to inf"),
        ({"n": Sum()}, {"sum": number(12)}, None),
        ({"n": Sum()}, {"sum": number(13)}, "'n' is 13, and must be 0 to 12"),
        ({"n": Sum()}, {"sum": number(float("inf"))}, "'n' is inf"),
        ({"n": Stack()}, {"stack": ROWS[None].double()}, None),
        ({"n": Stack()}, {"stack": ROWS.flip(0)[None].double()}, "'n' is 7, and must be 0 to 7"),
        ({"value": Sum()}, {"sum": number(-1e12)}, None),  # no count
    ],
)
def test_nobody_counts_for_more_than_the_rows_that_it_has(fold: Any, part: Tensors, said: str | None) -> None:
    expected = Expected(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    name = next(iter(fold))
    asked = Ask(own_step, SHARED, fold)  # type: ignore[arg-type]
    if said is None:
        expected.check(asked, {name: part}, ROWS)
    else:
        with pytest.raises(RunError, match=said):
            expected.check(asked, {name: part}, ROWS)


def test_what_others_weigh_by_is_not_known_but_not_below_zero() -> None:
    expected = Expected(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    asked = Ask(others_step, SHARED, {"value": WeightedMean("weight")})  # type: ignore[arg-type]
    expected.check(asked, {"value": {"sum": number(1), "weight": number(1e6)}}, ROWS)
    with pytest.raises(RunError, match="a weight of 'value' is -1"):
        expected.check(asked, {"value": {"sum": number(1), "weight": number(-1)}}, ROWS)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([[-4, 1], [3, 2]], None),
        ([[1 << 62, 1]], "lengths of 'value' that no number has"),
        ([[2047, 1]], "lengths of 'value' that no number has"),  # 2 to the 1024th is none
        ([[-(1 << 62), 1]], "lengths of 'value' that no number has"),
        ([[3, 4]], "lengths of 'value' of other clients than the 3 that were asked"),
        ([[3, 1 << 62], [4, 1 << 62], [5, 1 << 62]], "of other clients"),
        ([[3, 5], [4, -4]], "of other clients"),
        ([[3, 0]] * 4, "of other clients"),
        ([3, 1], "in a way that was not asked for"),
    ],
)
def test_lengths_are_those_of_clients_that_were_asked(counts: Any, said: str | None) -> None:
    asked = Ask(own_step, SHARED, {"value": Sum()}, limits={"value": Limit()})  # type: ignore[arg-type]
    if said is None:
        _check_lengths(asked, {"value": torch.tensor(counts)}, 3)
    else:
        with pytest.raises(RunError, match=said):
            _check_lengths(asked, {"value": torch.tensor(counts)}, 3)
