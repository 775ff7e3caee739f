# SPDX-License-Identifier: Apache-2.0
"""The study of SRPFL's speed-up: its plans by hand and on an engine, its expectations, its training, and its command."""

import json
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch

from command import coterie
from coterie.algorithms.srpfl import Stage, Stages, Theory, srpfl
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.participation import Exponential, VirtualClock
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors
from coterie.studies import srpfl_speedup as speedup
from coterie.studies.srpfl_speedup import Settings, run, settings
from coterie.studies.srpfl_speedup_theory import Law, everyone, planned, spent
from coterie.studies.srpfl_speedup_training import CONTRACTION, Curve, Plant, arrival, train

SMALL = Settings(clients=(16, 32, 64), communication=(0.0, 2.0), c_hat=(1.1, 1.3), trained=(), seeds=2, seed=3, jobs=1)
LAW = Law(0.25, 1)
RATE = math.sqrt(0.75)


@pytest.fixture(scope="module")
def outcome() -> Any:
    return run(SMALL)


def row(outcome: Any, stages: str, n: int, communication: float, c: float) -> dict[str, Any]:
    key = (stages, n, communication, c)
    (found,) = [r for r in outcome.rows if (r["stages"], r["n_clients"], r["communication"], r["c_hat"]) == key]
    return dict(found)


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def slowest(n: int, of: int) -> float:
    """E[T_(n)] of N exponential times."""
    return harmonic(of) - harmonic(of - n)


# -- plans ------------------------------------------------------------------------------------------------------------
def test_the_law_is_that_of_theorem_4_5() -> None:
    # One step with 8 clients from 0.9, written as in eq. (9); its fixed point is the limit.
    assert LAW.after(0.9, 8, 1) == pytest.approx(0.9 * RATE + 0.25 / math.sqrt(8 * 0.75))
    assert LAW.limit(8) * RATE + 0.25 / math.sqrt(8 * 0.75) == pytest.approx(LAW.limit(8))
    assert LAW.after(1.0, 1, 3) == 1.0  # one client's bound is above 2, which no distance is


def test_rounds_in_every_stage_are_those_of_the_lemma() -> None:
    # Eq. (195) for 32 clients; before one client, half of one, who takes half of his time.
    times = {0.5: slowest(1, 32) / 2} | {n: slowest(n, 32) for n in (1, 2, 4, 8, 16, 32)}
    tau = [
        math.ceil(2 * math.log(math.sqrt(2) * (times[2 * n] - times[n]) / (times[n] - times[n / 2])) / math.log(4 / 3))
        for n in (1, 2, 4, 8, 16)
    ]
    plan = planned(LAW, 32, 1.2 * LAW.limit(32), stages="rounds")
    assert plan[:-1] == list(zip((1, 2, 4, 8, 16), tau, strict=True))
    assert plan == planned(LAW, 32, 1.2 * LAW.limit(32), stages="rounds", communication=10.0)


def test_at_a_doubling_point_twice_as_many_clients_make_as_much_progress_in_a_second() -> None:
    times = [slowest(n, 64) for n in range(1, 65)]
    for n, cost in ((4, 0.0), (16, 1.0), (32, 10.0)):
        point = LAW.doubling_point(n, times, cost)
        few, many = ((1 - RATE) * (point - LAW.limit(k)) / (times[k - 1] + cost) for k in (n, 2 * n))
        assert few == pytest.approx(many)  # eqs. (192) and (193)


def test_from_one_doubling_point_to_the_next_it_takes_the_rounds_of_the_lemma() -> None:
    # C cancels in the lemma's tau_r (eqs. (202) to (204)), though the points depend on it.
    times = [slowest(n, 1024) for n in range(1, 1025)]
    tau = dict(planned(LAW, 1024, 1.2 * LAW.limit(1024), stages="rounds"))
    for n, cost in ((8, 0.0), (64, 3.0), (512, 100.0)):
        points = [LAW.doubling_point(k, times, cost) for k in (n // 2, n)]
        assert LAW.until(points[0], n, points[1]) == tau[n]


def test_with_much_communication_doubling_points_leave_nothing_but_fedrep() -> None:
    target = 1.2 * LAW.limit(64)
    plan = planned(LAW, 64, target, stages="distance", communication=1e6)
    assert [rounds for _, rounds in plan[:-1]] == [0] * 6
    assert plan[-1:] == everyone(LAW, 64, target)
    assert sum(rounds for n, rounds in planned(LAW, 64, target, stages="distance") if n < 64) > 10


def test_a_target_that_needs_everybody_is_not_reached_with_half() -> None:
    assert LAW.after(1.0, 32, 10_000) == pytest.approx(math.sqrt(2) * LAW.limit(64))


# -- the same on an engine --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class State:
    distance: float = 1.0
    round: int = 0


def contraction(state: State | None, *, target: float) -> Generator[Ask | Save, Replies | None, State]:
    """Theorem 4.5 as an algorithm: every round is a question to clients who say that they are there."""
    state = State() if state is None else state
    yield Save(state, {"distance": state.distance})
    while state.distance > target:
        got = yield Ask(take_part, {}, {"clients": Sum()})
        assert got is not None
        far = RATE * state.distance + 0.25 / math.sqrt(0.75 * int(got["clients"]))
        state = State(min(1.0, far), state.round + 1)
        yield Save(state, {"distance": state.distance})
    return state


def take_part(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return {"clients": torch.ones_like(data.n)[None]}, {}


@dataclass(frozen=True)
class DoublingPoints:
    communication: float

    def over(self, stage: Stage) -> bool:
        far = 1.0 if stage.state.inner is None else stage.state.inner.distance
        now, after = (slowest(n, stage.last) for n in (stage.clients, stage.after))
        least = 0.25 / (math.sqrt(0.75 * stage.clients) * (1 - RATE))
        return bool(far <= least * (1 + (now + self.communication) * (1 - math.sqrt(0.5)) / (after - now)))  # eq. (194)


@pytest.mark.parametrize("stages", ["rounds", "distance"])
@pytest.mark.parametrize("cost", [0.0, 2.0])
def test_an_engine_and_its_clock_take_the_same_rounds_and_time(outcome: Any, stages: str, cost: float) -> None:
    rule: Stages = Theory(0.25) if stages == "rounds" else DoublingPoints(cost)
    fedrep = partial(contraction, target=1.1 * LAW.limit(32))
    staged = partial(srpfl, fedrep, n0=1, n_clients=32, stages=rule)
    rows = Ragged.from_blocks(torch.zeros(32, 1, 1), None)
    last: dict[str, list[Any]] = {"fedrep": [], "srpfl": []}
    for seed in (3, 4):
        done = InProcess(rows, clock=VirtualClock(Exponential(), cost), seed=seed).run([fedrep, staged]).rounds
        for i, method in enumerate(last):
            last[method].append([r for r in done if r.run == i])
    got = row(outcome, stages, 32, cost, 1.1)
    for method, runs in last.items():
        assert {len(rounds) - 1 for rounds in runs} == {got[f"rounds_{method}"]}
        assert got[f"time_{method}"] == pytest.approx(sum(rounds[-1].time for rounds in runs) / 2)


# -- expectations -----------------------------------------------------------------------------------------------------
def test_the_expected_time_is_that_of_order_statistics(outcome: Any) -> None:
    # FedRep by hand: d - limit shrinks by sqrt(3/4) in a round, from 1 - limit to 0.1 limit, and each takes H_64 + C.
    least = 0.25 / (RATE * (1 - RATE)) / 8
    rounds = math.ceil(math.log((1 - least) / (0.1 * least)) / -math.log(RATE))
    got = row(outcome, "rounds", 64, 2.0, 1.1)
    assert got["rounds_fedrep"] == rounds
    assert got["expected_fedrep"] == pytest.approx(rounds * (harmonic(64) + 2.0))
    plan = planned(LAW, 64, 1.1 * LAW.limit(64), stages="rounds")
    assert got["expected_srpfl"] == pytest.approx(sum(t * (slowest(n, 64) + 2.0) for n, t in plan))
    assert got["expected_ratio"] == pytest.approx(got["expected_srpfl"] / got["expected_fedrep"])


@pytest.mark.parametrize("stages", ["rounds", "distance"])
def test_drawn_times_are_around_the_expected_ones(stages: Literal["rounds", "distance"]) -> None:
    # T_(n) is a sum of independent exponentials, of which those of SRPFL's plan share some: spread by hand, 4 of it allowed.
    found = run(replace(SMALL, clients=(128,), communication=(0.0,), c_hat=(1.2,), seeds=200))
    got = row(found, stages, 128, 0.0, 1.2)
    target = 1.2 * LAW.limit(128)
    plans = {"fedrep": everyone(LAW, 128, target), "srpfl": planned(LAW, 128, target, stages=stages)}
    for method, plan in plans.items():
        parts = [sum(t for n, t in plan if n > i) / (128 - i) for i in range(128)]  # of the i-th gap between clients
        spread = math.sqrt(sum(part**2 for part in parts) / 200)
        assert abs(got[f"time_{method}"] - got[f"expected_{method}"]) < 4 * spread
        assert spent(plan, [slowest(n, 128) for n in range(1, 129)], 0.0) == pytest.approx(sum(parts))


# -- the theorem ------------------------------------------------------------------------------------------------------
def test_without_communication_the_ratio_falls_with_the_clients_as_the_theorem_says() -> None:
    found = run(Settings(clients=(16, 64, 256, 1024), communication=(0.0,), c_hat=(1.2,), trained=(), seeds=4))
    assert found.summary is not None
    for stages, line in zip(("rounds", "distance"), found.summary, strict=True):
        mine = [r for r in found.rows if r["stages"] == stages]
        ratios = [r["ratio"] for r in mine]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[-1] < 0.5 * ratios[0]
        assert all(r["ratio"] <= r["bound"] for r in mine)
        assert line["slope"] > 0
        assert line["below_one"] <= 64


def test_much_communication_makes_rounds_in_every_stage_slower_than_fedrep() -> None:
    # SRPFL has about three rounds for one of FedRep; what they cost hardly depends on who takes part.
    found = run(Settings(clients=(16, 64, 256, 1024), communication=(1000.0,), c_hat=(1.2,), trained=(), seeds=2))
    assert found.summary is not None
    by_rounds, by_distance = found.summary
    assert by_rounds["below_one"] is None
    last = row(found, "rounds", 1024, 1000.0, 1.2)
    assert last["ratio"] == pytest.approx(last["rounds_srpfl"] / last["rounds_fedrep"], rel=0.01)
    assert last["ratio"] > 3
    assert by_distance["ratio_last"] == pytest.approx(1.0, abs=0.02)


def test_the_fit_is_that_of_a_line(outcome: Any) -> None:
    x = [1 / math.log(n) for n in SMALL.clients]
    line = outcome.summary[0]
    for prefix, name in (("", "ratio"), ("exact_", "expected_ratio")):
        y = [row(outcome, "rounds", n, 0.0, 1.1)[name] for n in SMALL.clients]
        off = [v - line[f"{prefix}intercept"] - line[f"{prefix}slope"] * u for u, v in zip(x, y, strict=True)]
        assert sum(off) == pytest.approx(0.0, abs=1e-9)
        assert sum(o * u for o, u in zip(off, x, strict=True)) == pytest.approx(0.0, abs=1e-9)
        mean = sum(y) / 3
        assert line[f"{prefix}r2"] == pytest.approx(1 - sum(o**2 for o in off) / sum((v - mean) ** 2 for v in y))


# -- training ---------------------------------------------------------------------------------------------------------
def test_training_reaches_with_stages_what_it_reaches_with_everyone_in_less_time() -> None:
    found = run(
        Settings(clients=(16,), communication=(0.0,), c_hat=(1.2,), trained=(16, 64), features=20, seeds=3, jobs=1)
    )
    trained = [r for r in found.rows if r["stages"] == "trained"]
    assert [r["n_clients"] for r in trained] == [16, 64]
    assert all(r["ratio"] < 0.8 and r["rounds_srpfl"] > r["rounds_fedrep"] for r in trained)
    assert trained[1]["ratio"] < trained[0]["ratio"]


def test_a_client_has_the_rows_that_theorem_4_5_wants() -> None:
    assert Plant(features=10, rank=1, noise=1.0, first=1).rows(1024) == 20  # (1 + 1) * d
    assert Plant(features=8, rank=2, noise=1.0, first=4).rows(1024) == math.ceil(16 * math.log(1024))


def test_both_methods_are_trained_until_they_have_settled_at_the_same_distance() -> None:
    curves = train(Plant(features=10, rank=2, noise=1.0, first=2), (32, 0))
    fedrep, staged = curves["fedrep"].distance, curves["srpfl"].distance
    assert fedrep[0] == pytest.approx(math.sqrt(0.5))  # 45 degrees
    assert staged[0] == fedrep[0]
    assert staged[-1] == pytest.approx(fedrep[-1], rel=0.01)
    assert fedrep[-1] == pytest.approx(fedrep[-5], rel=0.01)
    law = Law(CONTRACTION, 2)
    assert len(staged) == 1 + sum(t for _, t in planned(law, 32, 1.0001 * law.limit(32), stages="rounds"))


def test_training_arrives_in_the_first_round_at_the_target() -> None:
    curve = Curve([0.7, 0.4, 0.1], [0.0, 1.0, 2.0])
    assert arrival(curve, 0.41) == 1
    assert arrival(curve, 0.39) == 2
    for never in (0.7, 0.05):
        with pytest.raises(ConfigError, match=r"from distance 0\.70 to 0\.10"):
            arrival(curve, never)


def test_the_same_seed_gives_the_same_rows_in_any_number_of_processes() -> None:
    few = replace(SMALL, clients=(16,), c_hat=(1.2,), trained=(16,), features=10)
    assert run(replace(few, jobs=2)).rows == run(few).rows


# -- settings and the command -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {"clients": (20, 50)},
        {"clients": (1,)},
        {"clients": (0,)},
        {"clients": (8,)},  # 1.4 times its limit is above 1
        {"first": 2},
        {"trained": (24,)},
        {"c_hat": (1.0,)},
        {"c_hat": (1.42,)},
        {"communication": (-1.0,)},
        {"contraction": 0.0},
        {"rank": 2},
        {"noise": -1.0},
        {"seeds": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Settings(**changes)


def test_the_command_prints_one_document() -> None:
    options = ["--clients", "16,32", "--communication", "0,1", "--trained", "16", "--features", "10", "--seeds", "2"]
    document = json.loads(coterie("study", speedup.NAME, "--json", *options, "--jobs", "1").out)
    assert document["study"] == "srpfl-speedup"
    assert {"n_clients", "communication", "c_hat", "time_srpfl", "time_fedrep", "ratio"} <= document["rows"][0].keys()
    assert len(document["rows"]) == 2 * 2 * 2 * 3 + 2
    assert document["summary"][0]["r2"] is None  # two points are no fit
    assert document["settings"]["seeds"] == 2
    assert settings().seeds == 20
    assert (min(settings().clients), max(settings().clients)) == (16, 8192)
