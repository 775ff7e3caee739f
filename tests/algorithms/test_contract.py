# SPDX-License-Identifier: Apache-2.0
"""The rules of the contract, for every algorithm in the registry of helpers.py."""

import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.engines.in_process import Finished, InProcess
from coterie.engines.worker import Answer
from coterie.participation import Sampled
from coterie.protocol import Ask, Lowest, Stack
from coterie.robust_folds import Trimmed, TrimmedByCluster
from helpers import (
    CASES,
    Case,
    Federation,
    KilledError,
    Late,
    assert_same_state,
    federation,
    interrupt_after,
    overhear,
    run_one,
    spying,
    state_tensors,
)

TOLERANCE = 1e-10  # float64: sums over blocks and clients in another order

every = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def some(wanted: Callable[[Case], bool]) -> Any:
    chosen = [case for case in CASES if wanted(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])


def data_of(case: Case) -> Federation:
    return federation(classes=case.classes, folds=case.folds)


def finished(case: Case, rows: Ragged, *, start: int = 0, **engine: Any) -> tuple[Any, dict[str, Tensor], Finished]:
    """Run a case with seed `start`: the last state, the clients' private state, and what happened."""
    state, done, made = run_one(case.program(start), rows, **engine)
    return state, made.worker.private.get(0, {}), done


def assert_same_outcome(a: Any, b: Any, *, atol: float | None = None, clients: Tensor | None = None) -> None:
    """Same state, and the same private state of the clients (where a's are b's, or as numbered in `clients`)."""
    assert_same_state(a[0], b[0], atol=atol)
    for name, kept in a[1].items():
        other = b[1][name] if clients is None else b[1][name][clients]
        torch.testing.assert_close(kept, other, rtol=atol or 0.0, atol=atol or 0.0)


# -- 1. state ---------------------------------------------------------------------------------------------------------
@every
def test_resume_is_bit_equal(case: Case, tmp_path: Path) -> None:
    rows = data_of(case).rows
    engine: dict[str, Any] = {"participation": Sampled(0.7), "seed": 3}
    whole = finished(case, rows, **engine)
    for stop in range(1, len(whole[2].rounds) + 1):
        path = tmp_path / str(stop)
        with pytest.raises(KilledError):
            InProcess(rows, **engine).run(
                [case.program(0)], checkpoint=path, state_type=case.state_type, watch=interrupt_after(stop)
            )
        made = InProcess(rows, **engine)
        done = made.run([case.program(0)], checkpoint=path, state_type=case.state_type)
        assert_same_outcome((done.states[0], made.worker.private.get(0, {})), whole)
        assert [r.info for r in done.rounds] == [r.info for r in whole[2].rounds]


@every
def test_state_is_one_frozen_dataclass_of_tensors_and_numbers(case: Case) -> None:
    state, _, done = finished(case, data_of(case).rows)
    assert is_dataclass(state)
    assert type(state) is (get_origin(case.state_type) or case.state_type)
    for one in (state, *(value for value in vars(state).values() if is_dataclass(value))):  # SRPFL's holds another
        assert type(one).__dataclass_params__.frozen
        for field in fields(one):
            value = getattr(one, field.name)
            assert isinstance(value, Tensor | int | float | bool | str | None) or (one is state and is_dataclass(value))
    assert done.rounds


# -- what must not matter ---------------------------------------------------------------------------------------------
@every
def test_the_block_size_is_irrelevant(case: Case) -> None:
    rows = data_of(case).rows
    assert_same_outcome(finished(case, rows, block_bytes=1), finished(case, rows), atol=case.rounding * TOLERANCE)


@every
def test_the_order_in_which_clients_arrive_is_irrelevant(case: Case) -> None:
    data = data_of(case)
    there = [i for i, x in enumerate(data.xs) if len(x)]
    outcomes = []
    for order in (there, there[::-1], np.random.default_rng(0).permutation(there).tolist()):
        x, y = torch.cat([data.xs[i] for i in order]), torch.cat([data.ys[i] for i in order])
        groups = np.repeat([data.names[i] for i in order], [len(data.xs[i]) for i in order])
        rows = Ragged.from_groups(x, y, groups)
        outcomes.append(finished(case, rows.with_folds(case.folds, seed=0) if case.folds else rows))
    for other in outcomes[1:]:
        assert_same_outcome(outcomes[0], other)  # not even a sum changes its order


@some(lambda case: not case.draws_clients)
def test_the_numbers_of_clients_are_irrelevant(case: Case) -> None:
    data = data_of(case)
    if (
        case.minibatch or case.lots or case.folds
    ):  # names decide what is drawn: keep them, and shift the numbers by one without rows
        other, numbers = data.plus("a newcomer", data.xs[0][:0], data.ys[0][:0]), torch.arange(1, 11)
    else:
        other, numbers = data.renamed([f"{9 - i}" for i in range(10)]), torch.arange(9, -1, -1)
    state, private, _ = finished(case, data.rows)
    state = replace(state, **{name: numbers[getattr(state, name)] for name in case.numbers})
    there, kept, _ = finished(case, other.rows)
    there = replace(there, **{name: getattr(there, name)[numbers] for name in case.by_client})
    assert_same_outcome((state, private), (there, kept), atol=case.rounding * TOLERANCE, clients=numbers)


# -- weights ----------------------------------------------------------------------------------------------------------
BUSY = 3  # the client that is duplicated; it has 12 rows


def duplicated(data: Federation, clients: list[int]) -> Federation:
    for i in clients:
        data = data.plus(f"{data.names[i]} again", data.xs[i], data.ys[i])
    return data


@some(lambda case: case.weight == "rows" and not case.minibatch)
def test_where_rows_count_a_duplicated_client_equals_one_with_every_row_twice(case: Case) -> None:
    data = data_of(case)
    twice = data.changed(BUSY, data.xs[BUSY].repeat(2, 1), data.ys[BUSY].repeat(2))
    one, two = finished(case, duplicated(data, [BUSY]).rows), finished(case, twice.rows)
    assert_same_state(one[0], two[0], atol=TOLERANCE)
    assert_differs(one[0], finished(case, data.rows)[0])


@some(lambda case: case.weight == "clients" and not case.minibatch and not case.draws_clients)
def test_where_clients_count_alike_everybody_twice_changes_nothing_and_one_twice_does(case: Case) -> None:
    data = data_of(case)
    single = finished(case, data.rows)[0]
    tolerance = 1e-7 if "median" in case.name else TOLERANCE  # the middle that is left has a width of 2e-9
    assert_same_state(finished(case, duplicated(data, list(range(10))).rows)[0], single, atol=tolerance)
    assert_differs(finished(case, duplicated(data, [BUSY]).rows)[0], single)


@some(lambda case: case.name in {"ifca-model", "fedavg-by-clients"})
def test_where_clients_count_alike_a_duplicated_client_has_weight_two(case: Case) -> None:
    # From the same start, a client alone gives the model that it would send; the mean of those, one counted twice, is due.
    data = data_of(case)
    start, label = one_round(case, data, range(10))
    sent = {i: one_round(case, data, [i])[0] for i in range(10) if len(data.xs[i])}
    got, _ = one_round(case, duplicated(data, [BUSY]), range(11))
    clusters = label if label is not None else torch.zeros(10, dtype=torch.int64)
    for k in range(1 if label is None else len(start)):
        mine = [i for i in sent if int(clusters[i]) == k]
        weight = {i: 2.0 if i == BUSY else 1.0 for i in mine}
        models = {i: sent[i] if label is None else sent[i][k] for i in mine}
        want = sum(weight[i] * models[i] for i in mine) / sum(weight.values())
        torch.testing.assert_close(got if label is None else got[k], want, rtol=TOLERANCE, atol=TOLERANCE)


def one_round(case: Case, data: Federation, clients: Any) -> tuple[Tensor, Tensor | None]:
    """The models after the first round with some clients only, and their labels."""
    part = Federation([data.xs[i] for i in clients], [data.ys[i] for i in clients], [data.names[i] for i in clients])
    made = InProcess(part.rows)
    states: list[Any] = []
    with pytest.raises(KilledError):
        made.run([spying(case.program(0), states)], watch=interrupt_after(2))
    return states[1].theta, made.worker.private.get(0, {}).get("label")


@some(lambda case: case.weight == "none" and not case.minibatch)
def test_where_nothing_is_averaged_a_duplicate_has_the_same_model_and_nobody_else_changes(case: Case) -> None:
    data = data_of(case)
    _, single, _ = finished(case, data.rows)
    more = duplicated(data, [BUSY])
    _, double, _ = finished(case, more.rows)
    place = {name: i for i, name in enumerate(sorted(more.names))}
    for name, kept in single.items():
        same = double[name][[place[n] for n in data.names]]
        torch.testing.assert_close(same, kept, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(double[name][place[more.names[-1]]], kept[BUSY], rtol=TOLERANCE, atol=TOLERANCE)


def assert_differs(a: Any, b: Any) -> None:
    assert any(not torch.allclose(value, state_tensors(b)[name]) for name, value in state_tensors(a).items())


# -- 4. missing replies -----------------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize("silent", [(), (0,), (1,), (2, 3), tuple(range(20))], ids=str)
def test_missing_replies_survive(case: Case, silent: tuple[int, ...]) -> None:
    rows = data_of(case).rows
    state, private, done = finished(case, rows, participation=Late(silent))
    for value in [*state_tensors(state).values(), *private.values()]:
        assert value.isfinite().all()
    assert all(not r.info.get("sizes") and "loss" not in r.info for r in done.rounds if r.round in silent)
    # Who is late is as if it had not been asked.
    unasked = finished(case, rows, participation=Late(silent, ask_late=False))
    assert_same_outcome((state, private), unasked)


@some(lambda case: case.state_type.__name__ == "State" and case.name != "pooled-ridge" and not case.descends)
def test_a_silent_round_is_counted_and_changes_no_model(case: Case) -> None:
    states: list[Any] = []
    engine = InProcess(data_of(case).rows, participation=Late(silent=(2,)))
    engine.run([spying(case.program(0), states)])
    assert [s.round for s in states] == list(range(len(states)))
    models = [state_tensors(s)[case.model] for s in states]
    assert torch.equal(models[2], models[1])
    assert not torch.equal(models[3], models[2])


@some(lambda case: case.descends)
def test_a_silent_iteration_is_counted_and_moves_no_anchor(case: Case) -> None:
    for silent, stays in ((1, True), (2, False)):
        states: list[Any] = []
        engine = InProcess(data_of(case).rows, participation=Late(silent=(silent,)))
        engine.run([spying(case.program(0), states)])
        begun = states[0].descents  # 1 where the first iteration begins before it is known who the anchors are
        assert [s.descents for s in states[: 3 - begun]] == list(range(begun, 3))
        assert torch.equal(states[1].local, states[0].local) == stays
        assert begun or torch.equal(states[2].local, states[1].local) != stays
        assert len(states[-1].theta)


@some(lambda case: case.name.startswith("mixed-regression"))
def test_a_silent_round_of_the_second_phase_is_counted_and_changes_no_model(case: Case) -> None:
    states: list[Any] = []
    InProcess(data_of(case).rows, participation=Late()).run([spying(case.program(0), states)])
    first = next(i for i, s in enumerate(states) if len(s.theta))  # the end of Phase 1
    states.clear()
    engine = InProcess(data_of(case).rows, participation=Late(silent=(first + 1,)))
    engine.run([spying(case.program(0), states)])
    assert [s.round for s in states[first:]] == [0, 1, 2]
    assert torch.equal(states[first + 1].theta, states[first].theta)
    assert not torch.equal(states[first + 2].theta, states[first + 1].theta)


# -- 2, 3. messages ---------------------------------------------------------------------------------------------------
@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ask, Answer]]:
    """Everything that goes to the clients and comes back."""
    return overhear(monkeypatch)


INDIVIDUAL = {
    "serve": {"loss"},  # what the search for badly served clients needs
    "compete": {"theta"},  # models of the clients that the spread start draws
    "introduce": {"n", "draw"},  # who may be an anchor
    "descend": {"theta", "moved"},  # the anchors' own models
    "answer_to": {"lot"},  # whom to send perturbed copies
    "fit_once": {"theta", "n"},  # what one-shot clustering gives to k-means
    "fit_locally": {"theta", "n"},  # what clients found alone, for alignment
    "gradient_em": {"estimate", "n", "away"},  # what the central update of FedGrEM draws together
    "loss_gap": {"gap"},  # who is served badly, where a cluster is to be added
    "own_model": {"theta"},  # and their models
}


@every
def test_private_state_is_never_in_a_message(case: Case, messages: list[tuple[Ask, Answer]]) -> None:
    n = 10
    _, private, _ = finished(case, data_of(case).rows)
    assert messages
    for ask, answer in messages:
        assert answer.parts.keys() == ask.fold.keys()
        assert not ask.fold.keys() & ask.fresh.keys()
        needed = {name for fold in ask.fold.values() for name in fold.needs}
        assert not needed & ask.fresh.keys()
        for name, part in answer.parts.items():
            if isinstance(ask.fold[name], Trimmed | TrimmedByCluster):
                assert name == "update"  # as `robust` says, and a node's policy must allow
                continue
            if isinstance(ask.fold[name], Stack | Lowest):
                assert name in INDIVIDUAL[ask.step.__name__]
                continue
            # A sum has the run axis and no client axis: nothing in it is as long as there are clients.
            assert all(len(value) == 1 and n not in value.shape for value in part.values())
            for value in part.values():
                for kept in private.values():
                    assert not (value.numel() == kept.numel() and torch.equal(value.flatten(), kept.flatten()))


# -- 5. randomness ----------------------------------------------------------------------------------------------------
@every
def test_the_same_seed_gives_the_same_result(case: Case) -> None:
    rows = data_of(case).rows
    assert_same_outcome(finished(case, rows, start=5), finished(case, rows, start=5))


@some(lambda case: case.minibatch or case.lots)
def test_another_seed_draws_others(case: Case) -> None:
    rows = data_of(case).rows
    one, other = finished(case, rows, start=5), finished(case, rows, start=6)
    values = [*zip(state_tensors(one[0]).values(), state_tensors(other[0]).values(), strict=True)]
    values += [(one[1][name], other[1][name]) for name in one[1]]
    assert any(a.is_floating_point() and (a.shape != b.shape or not torch.allclose(a, b)) for a, b in values)


# -- 6. steps ---------------------------------------------------------------------------------------------------------
@every
def test_client_functions_are_importable_by_module_and_name(case: Case, messages: list[tuple[Ask, Answer]]) -> None:
    finished(case, data_of(case).rows)
    for ask, _ in messages:
        module = importlib.import_module(ask.step.__module__)
        assert getattr(module, ask.step.__name__) is ask.step
        assert ask.step.__module__.startswith("coterie.")


# -- 7. lockstep ------------------------------------------------------------------------------------------------------
@every
def test_runs_in_lockstep_equal_runs_alone(case: Case) -> None:
    rows, tight = data_of(case).rows, 1e-12 * case.rounding
    engine = InProcess(rows)
    together = engine.run([case.program(seed) for seed in range(3)])
    for seed in range(3):
        alone = finished(case, rows, start=seed)
        assert_same_outcome((together.states[seed], engine.worker.private.get(seed, {})), alone, atol=tight)
