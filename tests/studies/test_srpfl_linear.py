# SPDX-License-Identifier: Apache-2.0
"""The study of linear representations: what the paper claims, on a small plant and (marked `study`) on the whole one."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.errors import ConfigError
from coterie.studies import srpfl_linear
from coterie.studies.common import Outcome
from coterie.studies.personal_commands import app
from coterie.studies.srpfl_linear import METHODS, Settings

SMALL = Settings(
    clients=32, rows=300, features=10, rank=2, batch_size=30, rounds=110, first=4, stage_rounds=10, seeds=2, jobs=1
)  # fmt: skip


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return srpfl_linear.run(SMALL)


def summary(found: Outcome) -> dict[str, Any]:
    assert found.summary is not None
    return {line["method"]: line for line in found.summary}


def curve(found: Outcome, method: str, field: str, seed: int = 0) -> list[Any]:
    return [row[field] for row in found.rows if row["method"] == method and row["seed"] == seed]


def test_every_round_of_every_method_has_a_row(outcome: Outcome) -> None:
    assert list(summary(outcome)) == list(METHODS)
    for method in METHODS:
        for seed in (0, 1):
            assert curve(outcome, method, "round", seed) == list(range(SMALL.rounds + 1))
            assert all(0 < d <= 1 for d in curve(outcome, method, "distance", seed))
            times = curve(outcome, method, "virtual_time", seed)
            assert times == sorted(times)


def test_stragglers_come_last(outcome: Outcome) -> None:
    """Three stages of ten rounds, with 4, 8 and 16 clients, and then everybody."""
    assert curve(outcome, "srpfl", "participants")[1:] == [4] * 10 + [8] * 10 + [16] * 10 + [32] * 80
    assert set(curve(outcome, "fedrep", "participants")[1:]) == {32}
    assert set(curve(outcome, "fastest", "participants")[1:]) == {4}


def test_srpfl_ends_where_fedrep_with_everyone_does_and_takes_less_time(outcome: Outcome) -> None:
    found = summary(outcome)
    assert found["fedrep"]["ratio"] == found["fedrep"]["max_ratio"] == 1.0
    for method, share in (("srpfl", 0.5), ("srpfl-random", 0.8)):  # from a random start, more rounds are everybody's
        assert found[method]["max_ratio"] <= 1.2
        assert found[method]["time_to_2x"] < share * found[method.replace("srpfl", "fedrep")]["time_to_2x"]
    assert found["fastest"]["ratio"] > 1.2  # without the others it stays further away


def test_the_distance_falls_exponentially_and_faster_than_theorem_4_5_promises(outcome: Outcome) -> None:
    """With a great many rows the rate is 1 - eta sigma_min^2, and sigma_min is at most 1."""
    for method in ("fedrep", "fedrep-random"):
        line = summary(outcome)[method]
        assert 1 - SMALL.step_size < line["rate"] < line["rate_bound"] < 1
        assert line["rate_r2"] > 0.95


def test_the_method_of_moments_beats_a_random_start(outcome: Outcome) -> None:
    found = summary(outcome)
    for method in ("srpfl", "fedrep"):
        moments, random = found[method], found[f"{method}-random"]
        assert moments["start_distance"] < 0.6 * random["start_distance"]
        assert moments["rounds_to_2x"] < random["rounds_to_2x"]
    # The start is charged: six exchanges with everyone, each as long as a round.
    a_round = curve(outcome, "fedrep", "virtual_time")[1] - curve(outcome, "fedrep", "virtual_time")[0]
    assert curve(outcome, "fedrep", "virtual_time")[0] == pytest.approx(6 * a_round)
    assert curve(outcome, "srpfl", "virtual_time")[0] == pytest.approx(6 * a_round)
    assert curve(outcome, "srpfl-random", "virtual_time")[0] == 0


def test_communication_is_charged_for_every_exchange(outcome: Outcome) -> None:
    dearer = srpfl_linear.run(replace(SMALL, communication=2.0, seeds=1))
    for method, exchanges in (("fedrep", SMALL.rounds + 6), ("srpfl-random", SMALL.rounds)):
        assert curve(dearer, method, "distance") == curve(outcome, method, "distance")
        more = curve(dearer, method, "virtual_time")[-1] - curve(outcome, method, "virtual_time")[-1]
        assert more == pytest.approx(2.0 * exchanges)


@pytest.mark.parametrize("stages", ["theory", "adaptive"])
def test_other_rules_of_stages_end_with_everyone_too(stages: str) -> None:
    found = srpfl_linear.run(replace(SMALL, stages=stages, seeds=1, methods=("srpfl",)))
    asked = curve(found, "srpfl", "participants")[1:]
    assert asked == sorted(asked)
    assert set(asked) == {4, 8, 16, 32}
    assert summary(found)["srpfl"]["ratio"] <= 1.2


def test_speeds_that_change_give_others_the_chance_to_be_fast() -> None:
    fixed, dynamic = (
        srpfl_linear.run(replace(SMALL, speeds=speeds, seeds=1, methods=("fastest",)))
        for speeds in ("fixed", "dynamic")
    )
    # Of the same four clients all rounds, or of four of 32 in turn: these find the subspace that all have.
    assert curve(dynamic, "fastest", "distance")[-1] < curve(fixed, "fastest", "distance")[-1]


def test_a_seed_can_be_run_alone(outcome: Outcome) -> None:
    alone = srpfl_linear.run(replace(SMALL, seed=1, seeds=1, methods=("srpfl",)))
    assert alone.rows == [row for row in outcome.rows if row["method"] == "srpfl" and row["seed"] == 1]


def test_rates_of_curves_made_by_hand() -> None:
    far = [0.9, 0.8, *(0.4 * 0.5**t for t in range(5)), 0.02, 0.02]
    rate, fit = srpfl_linear._rate(far)
    assert rate == pytest.approx(0.5)
    assert fit == pytest.approx(1.0)
    assert srpfl_linear._rate([0.9, 0.8, 0.7]) == (None, None)


def test_the_command_takes_its_options() -> None:
    line = "srpfl-linear --quick --clients 16 --rows 60 --features 6 --rank 2 --rounds 5 --first 4 --stage-rounds 2"
    line += " --noise 0.2 --batch-size 20 --step-size 0.1 --speeds dynamic --communication 1 --methods srpfl --seeds 1"
    result = CliRunner().invoke(app, [*line.split(), "--jobs", "1", "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert set(document) == {"study", "settings", "rows", "summary"}
    assert {row["method"] for row in document["rows"]} == {"srpfl"}
    wanted = {"clients": 16, "noise": 0.2, "first": 4, "stage_rounds": 2, "speeds": "dynamic", "communication": 1.0}
    assert wanted.items() <= document["settings"].items()


@pytest.mark.parametrize(
    "line",
    [
        "--speeds slow",
        "--methods fedavg",
        "--stages none",
        "--first 0",
        "--first 200",
        "--rounds 0",
        "--rank 60",
        "--step-size 0",
        "--communication -1",
        "--noise -1",
    ],
)
def test_options_that_make_no_sense_are_refused_with_a_hint(line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CliRunner().invoke(app, ["srpfl-linear", *line.split(), "--jobs", "1"], catch_exceptions=False)
    assert raised.value.hint


@pytest.mark.study
def test_the_whole_study_shows_what_theorem_4_5_says() -> None:
    found = summary(srpfl_linear.run(srpfl_linear.settings()))
    assert found["srpfl"]["max_ratio"] <= 1.2
    assert found["fedrep"]["rate"] < found["fedrep"]["rate_bound"]
    assert found["fedrep"]["rate_r2"] > 0.99
    assert found["srpfl"]["time_to_2x"] < found["fedrep"]["time_to_2x"]
    assert found["fedrep"]["rounds_to_2x"] < found["fedrep-random"]["rounds_to_2x"]
