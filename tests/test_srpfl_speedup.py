# SPDX-License-Identifier: Apache-2.0
"""The study of SRPFL's speed-up: its times by hand, its fit, and its command."""

import json
import math
from functools import partial
from typing import Any

import pytest
import torch

from command import coterie
from coterie.algorithms.srpfl import Fixed, Theory, srpfl
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.participation import Exponential, VirtualClock
from coterie.studies import srpfl_speedup as speedup
from coterie.studies.srpfl_speedup import Settings, contraction, run, settings

SMALL = Settings(clients=(20, 40, 80), communication=(0.0, 2.0), c_hat=(1.1, 1.3), seeds=2, seed=3, jobs=1)


@pytest.fixture(scope="module")
def outcome() -> Any:
    return run(SMALL)


def row(outcome: Any, n: int, communication: float, c: float) -> dict[str, Any]:
    (found,) = [r for r in outcome.rows if (r["n_clients"], r["communication"], r["c_hat"]) == (n, communication, c)]
    return found


def test_fedrep_takes_the_slowest_clients_time_in_every_round(outcome: Any) -> None:
    # 40 clients, n0 = 5: the limit is sqrt(1/8), and d - limit shrinks by sqrt(3/4) in a round, from 1 - sqrt(1/8).
    least = math.sqrt(1 / 8)
    rounds = math.ceil(math.log((1.1 - 1) * least / (1 - least)) / math.log(math.sqrt(0.75)))
    names = Ragged.from_blocks(torch.zeros(40, 1, 1), None).keys
    slowest = [float(Exponential().times(0, names, seed).max()) for seed in (3, 4)]
    assert row(outcome, 40, 0.0, 1.1)["rounds_fedrep"] == rounds
    assert row(outcome, 40, 0.0, 1.1)["time_fedrep"] == pytest.approx(rounds * sum(slowest) / 2)
    assert row(outcome, 40, 2.0, 1.1)["time_fedrep"] == pytest.approx(rounds * (sum(slowest) / 2 + 2))


def test_srpfl_takes_the_lemmas_rounds_with_the_fastest(outcome: Any) -> None:
    # By hand: 5, 10 and 20 of 40 clients for tau_r rounds each, then all until the target.
    order = {
        seed: Exponential().times(0, Ragged.from_blocks(torch.zeros(40, 1, 1), None).keys, seed).sort().values
        for seed in (3, 4)
    }
    expected = [0.0, *torch.tensor([1 / (40 - i) for i in range(40)], dtype=torch.float64).cumsum(0).tolist()]
    half = (expected[2] + expected[3]) / 2  # of two and a half clients
    points = {2.5: half, **{n: expected[n] for n in (5, 10, 20, 40)}}
    rate, far, took, count = math.sqrt(0.75), 1.0, 0.0, 0
    for before, n, after in ((2.5, 5, 10), (5, 10, 20), (10, 20, 40)):
        ratio = (points[after] - points[n]) / (points[n] - points[before])
        for _ in range(math.ceil(2 * math.log(math.sqrt(2) * ratio) / math.log(4 / 3))):
            far = min(1.0, rate * far + (1 - rate) / math.sqrt(n / 5))
            took, count = took + sum(float(times[n - 1]) for times in order.values()) / 2, count + 1
    while far > 1.3 * math.sqrt(1 / 8):
        far = rate * far + (1 - rate) / math.sqrt(8)
        took, count = took + sum(float(times[-1]) for times in order.values()) / 2, count + 1
    got = row(outcome, 40, 0.0, 1.3)
    assert (got["rounds_srpfl"], got["time_srpfl"]) == (count, pytest.approx(took))


def test_communication_is_what_a_clock_with_it_would_charge(outcome: Any) -> None:
    rows = Ragged.from_blocks(torch.zeros(20, 1, 1), None)
    program = partial(contraction, a=0.25, n0=5, target=1.1 * math.sqrt(5 / 20))
    staged = partial(srpfl, program, n0=5, n_clients=20, stages=Theory(0.25))
    times = [
        [max(r.time for r in done.rounds if r.run == i) for i in (0, 1)]
        for done in (
            InProcess(rows, clock=VirtualClock(communication=2.0), seed=s).run([program, staged]) for s in (3, 4)
        )
    ]
    got = row(outcome, 20, 2.0, 1.1)
    assert got["time_fedrep"] == pytest.approx((times[0][0] + times[1][0]) / 2)
    assert got["time_srpfl"] == pytest.approx((times[0][1] + times[1][1]) / 2)


def test_the_ratio_falls_with_the_clients_as_the_theorem_says() -> None:
    found = run(Settings(clients=(20, 80, 320, 1280), communication=(0.0, 1.0), c_hat=(1.2,), seeds=4))
    for cost in (0.0, 1.0):
        ratios = [r["ratio"] for r in found.rows if r["communication"] == cost]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[-1] < 0.5 * ratios[0]
    assert all(r["ratio"] <= r["bound"] for r in found.rows)
    assert found.summary is not None
    assert all(line["slope"] > 0 and line["r2"] > 0.95 for line in found.summary)


def test_a_target_that_needs_everybody_is_not_reached_with_half() -> None:
    # What half of the clients reach is sqrt(2) times the limit of all: no c below that.
    rows = Ragged.from_blocks(torch.zeros(40, 1, 1), None)
    program = partial(contraction, a=0.25, n0=5, target=1.4 * math.sqrt(5 / 40))
    half = partial(srpfl, program, n0=5, n_clients=20, stages=Fixed(10), rounds=200)
    (state,) = InProcess(rows, clock=VirtualClock()).run([half]).states
    assert state.inner.distance > 1.4 * math.sqrt(5 / 40)
    assert state.inner.distance == pytest.approx(math.sqrt(5 / 20))


def test_the_fit_is_that_of_a_line(outcome: Any) -> None:
    assert outcome.summary is not None
    x = [1 / math.log(n) for n in SMALL.clients]
    line = outcome.summary[0]
    y = [row(outcome, n, 0.0, 1.1)["ratio"] for n in SMALL.clients]
    off = [v - line["intercept"] - line["slope"] * u for u, v in zip(x, y, strict=True)]
    assert sum(off) == pytest.approx(0.0, abs=1e-9)
    assert sum(o * u for o, u in zip(off, x, strict=True)) == pytest.approx(0.0, abs=1e-9)
    mean = sum(y) / 3
    assert line["r2"] == pytest.approx(1 - sum(o**2 for o in off) / sum((v - mean) ** 2 for v in y))
    assert (line["ratio_first"], line["ratio_last"]) == (y[0], y[-1])


def test_the_same_seed_gives_the_same_rows_in_any_number_of_processes(outcome: Any) -> None:
    again = run(Settings(**{**vars(SMALL), "jobs": 2}))
    assert again.rows == outcome.rows


@pytest.mark.parametrize(
    "changes",
    [
        {"clients": (20, 50)},
        {"clients": (5,)},
        {"clients": (0,)},
        {"c_hat": (1.0,)},
        {"c_hat": (1.42,)},
        {"communication": (-1.0,)},
        {"contraction": 0.0},
        {"seeds": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Settings(**changes)


def test_the_command_prints_one_document() -> None:
    said = coterie("study", speedup.NAME, "--json", "--clients", "20,40", "--communication", "0,1", "--seeds", "2")
    document = json.loads(said.out)
    assert document["study"] == "srpfl-speedup"
    assert {"n_clients", "communication", "c_hat", "time_srpfl", "time_fedrep", "ratio"} <= document["rows"][0].keys()
    assert len(document["rows"]) == 2 * 2 * 3
    assert document["summary"][0]["r2"] is None  # two points are no fit
    assert document["settings"]["seeds"] == 2
    assert settings().seeds == 20
