# SPDX-License-Identifier: Apache-2.0
"""The studies of moment descent: rows, errors, settings, command line; the long ones (marked `study`) against the paper."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coterie.errors import ConfigError
from coterie.studies import mixed_ablation, mixed_regression, mixed_scaling
from coterie.studies.common import Outcome
from coterie.studies.mixed_commands import app
from coterie.studies.mixed_methods import (
    FEDAVG,
    FEDPROX,
    METHODS,
    ORACLE,
    ORACLE_FEDPROX,
    PAPER,
    PRESETS,
    Methods,
    compare,
)
from coterie.studies.mixed_problem import Problem, worst_errors
from coterie.studies.parallel import side_by_side

# Easy: a cluster has some 330 rows for 10 features, so that the oracle's error is about 0.2 sqrt(10 / 330) = 0.03.
EASY = Problem(((60, 10), (10, 40)), n_features=10)
FEW = Methods(rounds=120, anchors=10)
SMALL = mixed_regression.Settings("c2", EASY, FEW, seeds=2, jobs=1)
FIELDS = {
    "setting", "method", "local_steps", "seed", "final_error", "oracle_error", "ratio", "rounds_to_2x_oracle",
    "anchor_error", "n_anchors", "delta", "seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return mixed_regression.run(replace(SMALL, how=replace(FEW, local_steps=(1, 5), curves=True)))


def of(rows: Any, method: str, steps: int | None = None) -> list[Any]:
    return [row for row in rows if row["method"] == method and (steps is None or row["local_steps"] == steps)]


def without_seconds(found: Outcome) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found.rows]


# -- rows -------------------------------------------------------------------------------------------------------------
def test_every_method_has_a_complete_row_for_every_seed(outcome: Outcome):
    assert all(set(row) >= FIELDS for row in outcome.rows)
    steps: dict[str, tuple[int | None, ...]] = {FEDAVG: (1, 5), FEDPROX: (None,)}
    runs = [(m, s) for m in METHODS[:-2] for s in steps.get(m, (5,))]
    runs += [(ORACLE, 1), (ORACLE, 5), (ORACLE_FEDPROX, None)]
    assert [(r["seed"], r["method"], r["local_steps"]) for r in outcome.rows] == [
        (seed, *run) for seed, run in itertools.product((0, 1), runs)
    ]
    for row in outcome.rows:
        assert row["ratio"] == pytest.approx(row["final_error"] / row["oracle_error"])
        assert (row["anchor_error"] is None) == (row["n_anchors"] is None) == (row["method"] not in (FEDAVG, FEDPROX))


def test_every_run_is_compared_with_the_oracle_that_trains_alike(outcome: Outcome):
    for seed in (0, 1):
        rows = [row for row in outcome.rows if row["seed"] == seed]
        error = {(row["method"], row["local_steps"]): row["final_error"] for row in rows}
        assert len({error[ORACLE, 1], error[ORACLE, 5], error[ORACLE_FEDPROX, None]}) == 3
        for row in rows:
            own = (ORACLE_FEDPROX if row["local_steps"] is None else ORACLE, row["local_steps"])
            assert row["oracle_error"] == error[own]
    for row in of(
        outcome.rows, FEDPROX
    ):  # both have ended at the fixed point of the same rounds; the start is forgotten
        assert row["ratio"] == pytest.approx(1.0, abs=1e-3)


def test_fedprox_solves_the_papers_proximal_problem():
    # Lemma 1 for FedProx: theta + (eta / n) X^T [I + (eta / n) X X^T]^-1 (y - X theta), in closed form, for one client.
    problem = Problem(((1, 12),), (1.0,), n_features=3)
    eta, planted = 0.7, problem.plant(0)
    x, y = planted.rows.x, planted.rows.y
    theta, n = planted.theta[0], len(x)
    inner = torch.eye(n, dtype=x.dtype) + eta / n * x @ x.T
    want = theta + eta / n * x.T @ torch.linalg.solve(inner, y - x @ theta)
    (row,) = compare(problem, Methods(methods=(ORACLE_FEDPROX,), rounds=1, eta=eta), 0)
    assert row["final_error"] == pytest.approx(float((want - theta).norm()), rel=1e-9)


def test_ours_reaches_the_oracle_and_one_model_for_all_does_not(outcome: Outcome):
    for row in [*of(outcome.rows, FEDAVG, 5), *of(outcome.rows, FEDPROX)]:
        assert row["ratio"] < 1.05
        assert row["anchor_error"] < row["delta"] / 2
        assert row["n_anchors"] >= 10
    for oracle in (ORACLE, ORACLE_FEDPROX):
        assert all(row["ratio"] == 1.0 and row["rounds_to_2x_oracle"] == 0 for row in of(outcome.rows, oracle))
    for row in of(outcome.rows, "fedavg"):
        # One model cannot be nearer than half of the planted models' distance to both of two.
        assert row["final_error"] >= row["delta"] / 2
        assert row["rounds_to_2x_oracle"] is None


def test_curves_begin_at_the_start_and_end_with_the_final_error(outcome: Outcome):
    for row in outcome.rows:
        assert row["curve"][-1] == row["final_error"]
        reached, before = row["rounds_to_2x_oracle"], len(row["curve"]) - 121
        assert before == (5 if row["method"] in (FEDAVG, FEDPROX) else 0)  # iterations of Phase 1
        if reached is not None:
            first = next(t for t, e in enumerate(row["curve"]) if t >= before and e <= 2 * row["oracle_error"])
            assert reached == first
    for row in of(outcome.rows, FEDAVG):
        # Anchors begin at a model of length 2 or so, in a random direction: as far as planted models from each other.
        assert row["curve"][0] > row["delta"] / 2 > row["curve"][4]
    assert all(row["curve"][0] == 0.0 for row in of(outcome.rows, ORACLE))


def test_summary_is_of_the_rows(outcome: Outcome):
    assert outcome.summary is not None
    line = of(outcome.summary, FEDAVG, 5)[0]
    rows = of(outcome.rows, FEDAVG, 5)
    assert line["seeds"] == 2
    assert line["mean_ratio"] == pytest.approx(sum(row["ratio"] for row in rows) / 2)
    assert line["max_ratio"] == max(row["ratio"] for row in rows)
    assert line["success"] == line["anchors_near"] == 1.0
    assert line["median_rounds"] == max(row["rounds_to_2x_oracle"] for row in rows)
    assert of(outcome.summary, "fedavg")[0]["median_rounds"] is None
    document = json.loads(outcome.json())
    assert set(document) == {"study", "settings", "rows", "summary"}
    assert len(document["rows"]) == 2 * len(document["summary"])


def test_a_median_needs_more_than_half_of_the_seeds():
    rows: list[dict[str, Any]] = [
        {"ratio": r, "rounds_to_2x_oracle": t, "final_error": 1.0, "anchor_error": None, "delta": 1.0}
        for r, t in ((1.0, 7), (1.04, 3), (9.0, None), (math.inf, None))
    ]
    assert mixed_regression.of_rows(rows)["median_rounds"] is None
    assert mixed_regression.of_rows(rows)["success"] == 0.5
    assert mixed_regression.of_rows(rows[:3])["median_rounds"] == 7


def test_same_seed_gives_the_same_rows_in_any_process_and_seeds_can_be_run_alone(outcome: Outcome):
    short = replace(SMALL, how=replace(FEW, rounds=20))
    once, again = mixed_regression.run(short), mixed_regression.run(replace(short, jobs=2))
    assert without_seconds(once) == without_seconds(again)
    second = mixed_regression.run(replace(short, seed=1, seeds=1))
    assert without_seconds(second) == without_seconds(once)[len(METHODS) :]


def test_averaged_over_everyone_models_move_by_their_clusters_share():
    over = {
        name: compare(EASY, replace(FEW, methods=(FEDAVG,), average_over=name), 0)[0]
        for name in ("cluster", "everyone")
    }
    assert over["everyone"]["rounds_to_2x_oracle"] > 2 * over["cluster"]["rounds_to_2x_oracle"]
    assert over["everyone"]["final_error"] == pytest.approx(over["cluster"]["final_error"], rel=0.05)


def test_the_oracle_is_run_even_if_nobody_asks_for_its_row():
    rows = compare(EASY, replace(FEW, methods=("fedavg", ORACLE, "one-shot"), rounds=10), 0)
    assert [row["method"] for row in rows] == ["fedavg", "one-shot", ORACLE]
    alone = compare(EASY, replace(FEW, methods=("fedavg",), rounds=10), 0)
    assert [row["method"] for row in alone] == ["fedavg"]
    assert alone[0]["oracle_error"] == rows[0]["oracle_error"]


def test_divergence_is_a_failure_and_null_in_json():
    how = replace(FEW, methods=("ifca-random",), rounds=60, step_size=1e30)
    found = mixed_regression.run(replace(SMALL, how=how, seeds=1))
    row = json.loads(found.json())["rows"][0]
    assert row["final_error"] is None
    assert row["rounds_to_2x_oracle"] is None


def test_baselines_take_five_local_steps_if_these_are_among_those_asked_for():
    assert Methods(local_steps=(1, 5, 10)).common_steps == 5
    assert Methods(local_steps=(2, 3)).common_steps == 2


def test_settings_are_those_of_appendix_c():
    for name, n_clients in (("c1", 200), ("c2", 920), ("c3", 920)):
        chosen = mixed_regression.settings(name)
        planted = chosen.problem.plant(0)
        assert planted.rows.n_clients == n_clients
        assert int(planted.rows.counts.sum()) == 10000
        assert planted.theta.shape == (3, 100)
        assert (chosen.problem.noise, chosen.how.rounds, chosen.how.iterations) == (0.2, 200, 5)
    assert mixed_regression.SETTINGS["c3"].shares == (0.2, 0.3, 0.5)


def test_the_papers_preset_is_that_of_its_experiments():
    how = mixed_regression.settings("c1", PAPER).how
    assert (how.rounds, how.iterations, how.average_over) == (400, 5, "everyone")
    truth = torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 4.0, 0.0]], dtype=torch.float64)  # 3, 4 and 5 apart
    descent = how.descent(truth)
    assert descent.delta == 3.0
    assert (descent.step, descent.step_size) == ("plain", 0.5)  # alpha / (2 beta^2) for features of unit variance
    assert descent.anchors.number == 10  # 3 * 3 * log 3 = 9.9
    assert (descent.anchors.swaps, descent.anchors.further) == (False, False)
    assert (descent.subspace, descent.oversampling) == ("range", 3)  # every column: the decomposition itself
    assert Methods().descent(truth).delta == 0.0


def test_the_papers_preset_reaches_its_oracle():
    (row,) = compare(EASY, replace(PRESETS[PAPER], methods=(FEDAVG,), rounds=150), 0)
    assert row["n_anchors"] == 10
    assert row["anchor_error"] < row["delta"]  # they began further away, and models are refined in Phase 2
    assert row["ratio"] == pytest.approx(1.0, abs=0.05)


# -- errors -----------------------------------------------------------------------------------------------------------
def test_error_by_hand():
    truth = torch.tensor([[0.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    theta = torch.tensor([[[10.0, 3.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, -1.0]]], dtype=torch.float64)
    # At first the models are 1 and 3 away, the other way round. Then one of them has to take (10, 0): (0, -1) leaves 2 and
    # sqrt(101), (0, 2) leaves 1 and sqrt(104): the worst is smaller in the first case.
    assert worst_errors(theta, truth).tolist() == pytest.approx([3.0, math.sqrt(101)])


def test_matching_makes_the_worst_error_smallest_and_not_the_sum():
    # On a line: truths 0 and 3; models 2 and 5. In order the distances are 2, 2; crossed 5, 1. With models 3 and 4.4:
    # in order 3, 1.4 (sum 4.4); crossed 4.4, 0 (the same sum): the worst is 3.
    truth = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    theta = torch.tensor([[[2.0], [5.0]], [[3.0], [4.4]], [[4.4], [3.0]]], dtype=torch.float64)
    assert worst_errors(theta, truth).tolist() == pytest.approx([2.0, 3.0, 3.0])


def test_fewer_models_serve_the_nearest_and_more_models_are_left_over():
    truth = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    assert worst_errors(torch.tensor([[[1.0]]], dtype=torch.float64), truth).tolist() == [2.0]
    assert worst_errors(torch.tensor([[[9.0], [3.0], [0.5]]], dtype=torch.float64), truth).tolist() == [0.5]


def test_a_model_that_diverged_is_infinitely_far():
    truth = torch.zeros(1, 2, dtype=torch.float64)
    theta = torch.tensor([[[math.nan, 0.0]], [[math.inf, 0.0]]], dtype=torch.float64)
    assert worst_errors(theta, truth).tolist() == [math.inf, math.inf]


def test_error_agrees_with_all_permutations_one_by_one():
    draw = torch.Generator().manual_seed(0)
    truth, theta = torch.randn(4, 3, generator=draw), torch.randn(5, 4, 3, generator=draw)
    for found, models in zip(worst_errors(theta, truth).tolist(), theta, strict=True):
        orders = itertools.permutations(range(4))
        assert found == pytest.approx(min(float((models[list(o)] - truth).norm(dim=1).max()) for o in orders))


# -- side by side -----------------------------------------------------------------------------------------------------
def _threads(task: int) -> tuple[int, int]:
    if task < 0:
        raise ConfigError("no", "yes")
    return task, torch.get_num_threads()


@pytest.mark.parametrize("jobs", [1, 2, 9, None])
def test_tasks_come_back_in_order_from_one_thread_each(jobs: int | None):
    told: list[int] = []
    assert side_by_side(_threads, [3, 1, 2], jobs, told.append) == [(3, 1), (1, 1), (2, 1)]
    assert told == [1, 2, 3]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_comes_through_with_its_hint(jobs: int):
    with pytest.raises(ConfigError, match="no") as raised:
        side_by_side(_threads, [1, -1, 2], jobs, lambda done: None)
    assert raised.value.hint == "yes"


# -- scaling ----------------------------------------------------------------------------------------------------------
TINY = mixed_scaling.Settings(
    {"clients": (30, 60), "covariance": ("same", "differs"), "anchor_noise": (0.0, 0.05)},
    mixed_scaling.Point(clients=60, dimension=8, clusters=2),
    methods=(FEDAVG, "fedavg"),
    seeds=2,
    jobs=1,
)


def test_scaling_varies_one_factor_at_a_time():
    found = mixed_scaling.run(TINY)
    assert len(found.rows) == 6 * 2 * 2
    assert found.summary is not None
    assert [(line["factor"], line["value"]) for line in found.summary[::2]] == [
        ("clients", 30), ("clients", 60), ("covariance", "same"),
        ("covariance", "differs"), ("anchor_noise", 0.0), ("anchor_noise", 0.05),
    ]  # fmt: skip
    for row in found.rows:
        point = {name: getattr(TINY.base, name) for name in vars(TINY.base)} | {row["factor"]: row["value"]}
        assert {name: row[name] for name in point} == point
    base = [[r["final_error"] for r in found.rows if (r["factor"], r["value"]) == at] for at in
            (("clients", 60), ("covariance", "same"), ("anchor_noise", 0.0))]  # fmt: skip
    assert all(errors == base[0] for errors in base)
    success = {(line["factor"], line["value"]): line["success"] for line in found.summary if line["method"] == FEDAVG}
    assert all(success.values())


def test_scaling_points_have_rounds_and_steps_for_their_size():
    how = mixed_scaling.Point().how(METHODS)
    assert (how.rounds, how.step_size, how.eta, how.anchors) == (300, 0.045, pytest.approx(0.396), 30)
    few = mixed_scaling.Point(rows=2).how(METHODS)
    assert (few.rounds, few.step_size) == (1500, pytest.approx(0.45 * 2 / 50))


# -- what additions are worth -----------------------------------------------------------------------------------------
def test_variants_change_what_they_are_called_after():
    default = vars(mixed_ablation.VARIANTS["default"])
    changed = {
        name: {field for field, value in vars(how).items() if value != default[field]}
        for name, how in mixed_ablation.VARIANTS.items()
    }
    assert changed == {
        "default": set(), "no-swaps": {"swaps"}, "no-further": {"further"}, "neither": {"swaps", "further"},
        "few-anchors": {"anchors"}, "few-and-neither": {"anchors", "swaps", "further"}, "known-delta": {"known_delta"},
        "plain-step": {"step"}, "half-step": {"step", "descent_step"}, "halves": {"estimator"}, "two": {"estimator"},
        "orthogonal": {"subspace"}, "svd": {"subspace"}, "everyone": {"average_over"},
        PAPER: {"rounds", "average_over", "anchors", "step", "descent_step", "subspace", "swaps", "further", "known_delta"},
    }  # fmt: skip


def test_the_ablation_has_a_row_for_every_variant_and_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(mixed_ablation.SETTINGS, "c1", EASY)
    monkeypatch.setitem(mixed_ablation.SETTINGS, "c3", replace(EASY, noise=0.4))
    line = "mixed-regression-ablation --settings c1,c3 --variants default,two --rounds 60 --seeds 1 --jobs 1"
    document = command(*line.split())
    assert [(row["setting"], row["variant"], row["method"]) for row in document["rows"]] == [
        (setting, variant, FEDAVG) for setting in ("c1", "c3") for variant in ("default", "two")
    ]
    for row, line in zip(document["rows"], document["summary"], strict=True):
        assert row["ratio"] == line["mean_ratio"] == row["final_error"] / row["oracle_error"]
    first, second = document["rows"][:2]
    assert first["oracle_error"] == second["oracle_error"]  # the same clients, the same Phase 2
    assert first["anchor_error"] < second["anchor_error"]  # all pairs of rows, not one of them


# -- the command line -------------------------------------------------------------------------------------------------
def command(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_options_reach_the_study():
    line = (
        "mixed-regression --setting c3 --seeds 1 --seed 4 --rounds 2 --features laplace --covariance differs --eta 0.2"
    )
    line += " --estimator halves --noise-on-anchors 0.01 --anchors 5 --step-size 0.02 --average-over everyone"
    document = command(*line.split(), "--methods", "moment-descent-fedavg,oracle", "--jobs", "1", "--curves")
    assert [(r["method"], r["local_steps"], r["seed"]) for r in document["rows"]] == [
        (method, steps, 4) for method in (FEDAVG, ORACLE) for steps in (1, 5, 10)
    ]
    assert all(len(row["curve"]) >= 3 for row in document["rows"])
    settings = document["settings"]
    assert settings["how"]["average_over"] == "everyone"
    assert (settings["problem"]["features"], settings["problem"]["covariance"]) == ("laplace", "differs")
    assert (settings["how"]["estimator"], settings["how"]["noise_on_anchors"], settings["how"]["eta"]) == (
        "halves",
        0.01,
        0.2,
    )


def test_the_table_has_a_line_for_every_method():
    line = "mixed-regression --setting c1 --seeds 1 --rounds 2 --methods fedavg,one-shot,oracle --jobs 1"
    shown = CliRunner().invoke(app, line.split(), catch_exceptions=False).stdout
    assert all(method in shown for method in ("fedavg", "one-shot", "oracle"))
    assert "100%" in shown


def test_scaling_from_the_command_line():
    line = "mixed-regression-scaling --factors covariance --quick --methods fedavg --jobs 1"
    document = command(*line.split())
    assert [(row["factor"], row["value"], row["method"]) for row in document["rows"]] == [
        ("covariance", "same", "fedavg"), ("covariance", "differs", "fedavg"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "mixed-regression --setting c4",
        "mixed-regression --preset paper",
        "mixed-regression-ablation --settings c4",
        "mixed-regression-ablation --variants none",
        "mixed-regression --features cauchy",
        "mixed-regression --covariance other",
        "mixed-regression --methods ifca",
        "mixed-regression --estimator three",
        "mixed-regression --average-over all",
        "mixed-regression --seeds 0",
        "mixed-regression --jobs 0",
        "mixed-regression --rounds 0",
        "mixed-regression --local-steps 1,many",
        "mixed-regression --local-steps 0,5",
        "mixed-regression --step-size 0",
        "mixed-regression --eta -1",
        "mixed-regression --eta nan",
        "mixed-regression --anchors 0",
        "mixed-regression --noise-on-anchors -1",
        "mixed-regression-scaling --factors rows,time",
        "mixed-regression-scaling --methods fedrep",
        "mixed-regression-scaling --seeds 0",
    ],
)
def test_options_that_make_no_sense_are_refused_with_a_hint(line: str):
    with pytest.raises(ConfigError) as raised:
        CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert raised.value.hint


@pytest.mark.parametrize("clients", [((5, 1),), ((0, 9), (3, 1))])
def test_problems_without_anchors_are_refused(clients: tuple[tuple[int, int], ...]):
    with pytest.raises(ConfigError, match="anchor"):
        Problem(clients)


def test_problems_with_too_many_clusters_are_refused():
    with pytest.raises(ConfigError, match="8 clusters"):
        Problem(((100, 10),), (1 / 8,) * 8)


# -- against the paper, a minute or more each -------------------------------------------------------------------------
@pytest.mark.study
@pytest.mark.parametrize("setting", ["c1", "c2", "c3"])
def test_ours_reaches_the_oracle_in_every_setting(setting: str):
    rows = command("mixed-regression", "--setting", setting, "--seeds", "4")["rows"]
    for row in rows:
        if row["method"] in (FEDAVG, FEDPROX):
            assert row["ratio"] <= 1.05
            assert setting == "c3" or row["anchor_error"] < row["delta"] / 2


@pytest.mark.study
def test_two_rows_of_a_client_do_not_lead_anchors_to_their_clusters():
    rows = command("mixed-regression", "--setting", "c2", "--seeds", "3", "--estimator", "two", "--methods", FEDAVG)[
        "rows"
    ]
    assert all(row["anchor_error"] > row["delta"] / 2 for row in rows)
