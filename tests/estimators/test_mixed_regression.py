# SPDX-License-Identifier: Apache-2.0
"""Moment descent and the clustering that follows, on planted truth and where things go wrong."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.anchors import Anchors
from coterie.algorithms.moment_descent import Descent, State, mixed_regression, moment_descent
from coterie.engines.in_process import Finished, InProcess
from coterie.evaluate import adjusted_rand
from coterie.local import Training
from coterie.models import linear_regression
from helpers import Federation, Late, Only, run_one, spying

# -- planted truth ----------------------------------------------------------------------------------------------------
WIDTH, K, SIGMA = 15, 3, 0.2
LINE = linear_regression(WIDTH, intercept=False)


def planted(
    counts: Sequence[int] = (20,) * 120,
    clusters: Sequence[int] | None = None,
    *,
    seed: int = 0,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Federation, list[int], Tensor]:
    """Clients of three models in turn, the models, as in the paper: 2 / sqrt(D) N(0, I), about sqrt(8) apart."""
    truth = [i % K for i in range(len(counts))] if clusters is None else list(clusters)
    draw = torch.Generator().manual_seed(seed)
    theta = 2 / WIDTH**0.5 * torch.randn(K, WIDTH, generator=draw, dtype=torch.float64)
    xs = [change(torch.randn(n, WIDTH, generator=draw, dtype=torch.float64)) for n in counts]
    ys = [
        x @ theta[k] + SIGMA * torch.randn(len(x), generator=draw, dtype=torch.float64)
        for x, k in zip(xs, truth, strict=True)
    ]
    return Federation(xs, ys, [f"site-{i:03d}" for i in range(len(counts))]), truth, theta


def fixed_point(data: Federation, truth: list[int], how: Training, step_size: float) -> Tensor:
    """Where Phase 2 stays if the clusters are the true ones: sum_i x_i^T P_i (x_i theta - y_i) = 0, P_i of Lemma 1.

    For one step P_i is I, and this is the least-squares fit of the cluster's rows.
    """
    out = []
    for k in range(K):
        a, b = np.zeros((WIDTH, WIDTH)), np.zeros(WIDTH)
        for x, y, own in zip(data.xs, data.ys, truth, strict=True):
            if own == k and len(x):
                gram = 2 * (x @ x.T).numpy() / len(x)
                eye = np.eye(len(x))
                powers = [np.linalg.matrix_power(eye - step_size * gram, t) for t in range(how.steps)]
                p = np.linalg.inv(eye + gram / how.proximal) if how.exact else sum(powers)
                a += x.numpy().T @ p @ x.numpy()
                b += x.numpy().T @ p @ y.numpy()
        out.append(np.linalg.solve(a, b))
    return torch.from_numpy(np.stack(out))


def error(theta: Tensor, truth: Tensor) -> float:
    """The largest distance, of the permutation for which it is smallest."""
    apart = torch.cdist(theta, truth)
    return min(float(apart[list(order), range(len(truth))].max()) for order in permutations(range(len(theta))))


def solved(data: Federation, *, participation: Any = None, **options: Any) -> tuple[State, Finished, list[int]]:
    """Run both phases: the last state, what happened, and the clients' labels."""
    options = {
        "model": LINE, "n_clusters": K, "rounds": 60, "step_size": 0.5, "seed": 0, "training": Training(steps=1),
    } | options  # fmt: skip
    state, finished, engine = run_one(
        lambda state: mixed_regression(state, **options), data.rows, participation=participation
    )
    return state, finished, engine.worker.private[0]["label"].tolist()


def events_of(finished: Finished) -> list[str]:
    return [event for r in finished.rounds for event in r.info["events"]]


STARTS = {
    "zero": lambda theta: None,
    "random": lambda theta: torch.randn(WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64),
    "far": lambda theta: 10 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64),
    "at a model": lambda theta: theta[1],
    "between two": lambda theta: (theta[0] + theta[2]) / 2,
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_recovers_planted_models_from_any_start(start: Callable[[Tensor], Tensor | None]) -> None:
    data, truth, theta = planted()
    state, _, label = solved(data, start=start(theta))
    fit = fixed_point(data, truth, Training(steps=1), 0.5)
    assert error(state.theta, fit) < 1e-6  # least squares on the true clusters: sixty rounds, each leaving about 0.7
    assert adjusted_rand(label, truth) == 1.0


HOWS = {
    "one step": (Training(steps=1), 0.5),
    "five steps": (Training(steps=5), 0.05),
    "fedprox": (Training(exact=True, proximal=1.0), 0.5),
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("how", "step_size"), HOWS.values(), ids=HOWS)
def test_fedavg_and_fedprox_both_reach_the_fit_of_the_true_clusters(how: Training, step_size: float, seed: int) -> None:
    data, truth, theta = planted(seed=seed)
    state, _, label = solved(data, seed=seed, training=how, step_size=step_size, rounds=120)
    assert adjusted_rand(label, truth) == 1.0
    assert error(state.theta, fixed_point(data, truth, how, step_size)) < 1e-4
    # Local steps weigh rows a little differently from least squares, at no great cost.
    best = error(fixed_point(data, truth, Training(steps=1), 0.5), theta)
    assert error(state.theta, theta) < 1.5 * best


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "rademacher": torch.sign,
    "scaled": lambda x: x * torch.linspace(0.7, 1.5, WIDTH, dtype=torch.float64),
    "heavier tails": lambda x: x * (x.abs() / 1.3) ** 0.5,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_features_need_not_be_normal(change: Callable[[Tensor], Tensor]) -> None:
    data, truth, _ = planted(seed=4, change=change)
    state, _, label = solved(data, step_size=0.2, rounds=150)
    assert adjusted_rand(label, truth) == 1.0
    assert error(state.theta, fixed_point(data, truth, Training(steps=1), 0.2)) < 1e-4


@pytest.mark.parametrize("estimator", ["pairs", "halves"])
@pytest.mark.parametrize("subspace", ["range", "orthogonal"])
def test_anchors_arrive_with_either_estimator_and_subspace(estimator: Any, subspace: Any) -> None:
    data, truth, theta = planted((30,) * 120, seed=2)
    how = Descent(estimator=estimator, subspace=subspace, iterations=6)
    state, finished, _ = run_one(
        lambda state: moment_descent(state, model=LINE, n_clusters=K, seed=0, descent=how), data.rows
    )
    far = (state.local - theta[[truth[i] for i in state.anchors.tolist()]]).norm(dim=1)
    separation = float(torch.pdist(theta).min())
    assert far.max() < separation / 2  # nearer to its own model than to any other
    assert error(state.theta, theta) < separation / 4
    moved = [r.info["movement"] for r in finished.rounds if "movement" in r.info]
    assert np.mean(moved[0]) > 2 * np.mean(moved[-1])


def test_soft_labels_reach_the_same_models() -> None:
    data, truth, _ = planted(seed=5)
    state, _, label = solved(data, soft=True, seed=5)
    assert adjusted_rand(label, truth) == 1.0
    # Twenty rows with noise of 0.2, models 2 apart: no posterior is anything but 0 or 1.
    assert error(state.theta, fixed_point(data, truth, Training(steps=1), 0.5)) < 1e-6


def test_the_second_phase_averages_over_clusters_by_rows_unless_told_otherwise() -> None:
    data, _, _ = planted([10, 20, 30] * 20)
    states = [solved(data, rounds=2)[0].theta]
    for weighting, over in (("rows", "cluster"), ("clients", "cluster"), ("rows", "everyone")):
        states.append(solved(data, rounds=2, weighting=weighting, average_over=over)[0].theta)
    assert [torch.equal(states[0], other) for other in states[1:]] == [True, False, False]


def test_averaging_by_cluster_reaches_them_in_fewer_rounds() -> None:
    data, truth, _ = planted(seed=6)
    fit = fixed_point(data, truth, Training(steps=1), 0.3)
    after = [
        error(solved(data, seed=6, rounds=12, step_size=0.3, average_over=over)[0].theta, fit)
        for over in ("cluster", "everyone")
    ]
    assert after[0] < 1e-3 < after[1]  # with all of a cluster's move, not a third of it


def test_clients_with_one_row_and_none_take_part() -> None:
    counts = [1, 0, 2, 1] * 30 + [20] * 90
    data, truth, theta = planted(counts, seed=7)
    state, finished, label = solved(data, rounds=100)
    sure = [i for i, n in enumerate(counts) if n >= 20]
    assert adjusted_rand([label[i] for i in sure], [truth[i] for i in sure]) == 1.0
    best = error(fixed_point(data, truth, Training(steps=1), 0.5), theta)
    assert error(state.theta, theta) < 1.5 * best  # a single row may be nearer to a wrong model
    assert sum(finished.rounds[-1].info["sizes"]) == sum(n > 0 for n in counts)


def test_few_anchors_with_many_rows_lead_many_clients_with_two() -> None:
    data, truth, theta = planted([2] * 900 + [40] * 30, seed=8)
    state, _, label = solved(data, rounds=80)
    assert sorted(state.anchors.tolist()) == list(range(900, 930))
    assert adjusted_rand(label[900:], truth[900:]) == 1.0
    assert error(state.theta, theta) < 0.2  # the planted models are 2 apart; two rows leave some labels in doubt


# -- a cluster without an anchor --------------------------------------------------------------------------------------
def without_third() -> tuple[Federation, list[int], Tensor]:
    """Only clients of the first two models have enough rows for the first anchors."""
    truth = [i % K for i in range(120)]
    return planted([18 if k == 2 else 22 for k in truth], truth, seed=1)


def test_a_cluster_without_an_anchor_is_found_by_further_anchors() -> None:
    data, truth, _ = without_third()
    how = Descent(anchors=Anchors(number=12, min_rows=22))
    state, finished, label = solved(data, descent=how)
    assert {truth[i] for i in state.anchors[:12].tolist()} == {0, 1}
    assert {truth[i] for i in state.anchors[12:].tolist()} == {2}
    assert len(state.anchors.unique()) == len(state.anchors)
    (found,) = [e for e in events_of(finished) if "high loss" in e]
    assert found == f"many clients have a high loss: {len(state.anchors) - 12} more anchors among them"
    assert state.descents == 10
    assert adjusted_rand(label, truth) == 1.0
    assert error(state.theta, fixed_point(data, truth, Training(steps=1), 0.5)) < 1e-6


def test_it_is_missed_without_them() -> None:
    data, _, theta = without_third()
    how = Descent(anchors=Anchors(number=12, min_rows=22, further=False))
    state, _, _ = run_one(lambda state: moment_descent(state, model=LINE, n_clusters=K, seed=0, descent=how), data.rows)
    assert state.descents == 5
    assert error(state.theta, theta) > 1.0


# -- an unknown number ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_the_number_of_clusters_is_found(seed: int) -> None:
    data, truth, _ = planted((40,) * 120, seed=seed)
    state, finished, label = solved(data, n_clusters=None, seed=seed)
    assert len(state.theta) == K
    assert "make 3 clusters: their tree is cut at its largest gap" in events_of(finished)[0]
    assert adjusted_rand(label, truth) == 1.0


def test_one_cluster_is_found_to_be_one() -> None:
    data, _, _ = planted((40,) * 60, [0] * 60)
    state, _, label = solved(data, n_clusters=None)
    assert len(state.theta) == 1
    want = np.linalg.lstsq(torch.cat(data.xs).numpy(), torch.cat(data.ys).numpy(), rcond=None)[0]
    np.testing.assert_allclose(state.theta[0], want, atol=1e-6)
    assert set(label) == {0}


def test_a_known_distance_gives_the_number_and_stops_anchors() -> None:
    data, _, theta = planted((40,) * 120, seed=1)
    delta = float(torch.pdist(theta).min())
    states: list[State] = []
    how = Descent(delta=delta, eps=0.25, iterations=8)
    _, finished, _ = run_one(
        spying(lambda state: moment_descent(state, model=LINE, n_clusters=None, seed=0, descent=how), states), data.rows
    )
    assert len(states[-1].theta) == K
    assert "those within half of the given distance are one" in events_of(finished)[0]
    moved = [r.info["movement"] for r in finished.rounds if "movement" in r.info]
    assert 0.0 in moved[-1]
    assert 0.0 not in moved[0]


# -- privacy ----------------------------------------------------------------------------------------------------------
def test_a_little_noise_on_the_copies_does_no_harm() -> None:
    data, truth, _ = planted(seed=3)
    state, _, label = solved(data, descent=Descent(noise=0.1))
    assert adjusted_rand(label, truth) == 1.0
    exact, _, _ = solved(data)
    assert torch.equal(state.anchors, exact.anchors)
    assert not torch.equal(state.local, exact.local)
    assert error(state.theta, fixed_point(data, truth, Training(steps=1), 0.5)) < 1e-6


# -- going on, and going wrong ----------------------------------------------------------------------------------------
def test_it_tells_what_happened_in_both_phases() -> None:
    data, _, _ = planted()
    _, finished, _ = solved(data, rounds=2, descent=Descent(iterations=3, anchors=Anchors(number=9)))
    infos = [dict(r.info) for r in finished.rounds]
    assert [sorted(info) for info in infos] == [
        *[["events", "movement", "spectrum"]] * 3,
        ["events"],
        *[["events", "loss", "moved", "sizes"]] * 2,
    ]
    assert [len(info["movement"]) for info in infos[:3]] == [9] * 3
    for info in infos[:3]:
        assert info["spectrum"] == sorted(info["spectrum"], reverse=True)
        assert len(info["spectrum"]) == K + 8
        assert info["spectrum"][K - 1] > 0
    assert sum(infos[-1]["sizes"]) == 120


def test_it_can_be_stopped_in_either_phase_and_goes_on_bit_by_bit() -> None:
    data, _, _ = planted((20,) * 40)
    rows = data.rows
    options: dict[str, Any] = {"model": LINE, "n_clusters": K, "rounds": 4, "step_size": 0.3, "seed": 1}
    whole: list[State] = []
    run_one(spying(lambda state: mixed_regression(state, **options), whole), rows)
    for saved in (whole[0], whole[3], whole[6], whole[8]):  # after: the draw, three iterations, Phase 1, two rounds
        last = run_one(lambda _: mixed_regression(saved, **options), rows)[0]  # noqa: B023
        for name, value in vars(whole[-1]).items():
            assert (
                torch.equal(getattr(last, name), value) if isinstance(value, Tensor) else getattr(last, name) == value
            )


def test_more_rounds_go_on_from_the_end() -> None:
    data, _, _ = planted((20,) * 40)
    short, _, _ = solved(data, rounds=3)
    whole, _, _ = solved(data, rounds=7)
    rest = InProcess(data.rows).run([
        lambda _: mixed_regression(
            short, model=LINE, n_clusters=K, rounds=7, step_size=0.5, seed=0, training=Training(steps=1)
        )
    ]).states[0]  # fmt: skip
    assert torch.equal(rest.theta, whole.theta)
    assert rest.round == 7


@pytest.mark.parametrize("participation", [Late(silent=(0,)), Only((1,))], ids=["silent", "one row"])
def test_without_anybody_to_begin_with_it_ends_and_says_so(participation: Any) -> None:
    data, _, _ = planted([20, 1, 20])
    state, finished, _ = run_one(
        lambda state: mixed_regression(state, model=LINE, n_clusters=K, rounds=3, step_size=0.1, seed=0),
        data.rows,
        participation=participation,
    )
    assert state.theta.shape == (0, WIDTH)
    assert events_of(finished) == ["nobody answered"]


def test_late_clients_do_not_prevent_it() -> None:
    data, truth, _ = planted(seed=2)
    state, _, label = solved(data, participation=Late(silent=(2, 9)), rounds=90)
    assert adjusted_rand(label, truth) == 1.0
    assert error(state.theta, fixed_point(data, truth, Training(steps=1), 0.5)) < 0.1  # two thirds of them a round


@pytest.mark.filterwarnings("ignore::coterie.engines.screening.ClientWarning")  # some diverge, and are named
@pytest.mark.parametrize("estimator", ["pairs", "halves", "two"])
@pytest.mark.parametrize(
    "options", [{"step": "plain", "step_size": 1e8}, {"step_size": 1e30}], ids=["plain", "curvature"]
)
def test_a_step_that_is_far_too_long_ends_without_an_exception(estimator: Any, options: dict[str, Any]) -> None:
    data, _, _ = planted((20,) * 30)
    state, _, _ = solved(data, rounds=3, descent=Descent(estimator=estimator, iterations=30, **options))
    assert state.descents >= 30
    assert state.round == 3


def test_fewer_features_than_clusters_are_enough() -> None:
    draw = torch.Generator().manual_seed(0)
    slopes = [-4.0, 0.0, 4.0]
    xs = [torch.randn(30, 1, generator=draw, dtype=torch.float64) for _ in range(60)]
    ys = [
        x[:, 0] * slopes[i % 3] + 0.1 * torch.randn(30, generator=draw, dtype=torch.float64) for i, x in enumerate(xs)
    ]
    data = Federation(xs, ys, [f"site-{i:03d}" for i in range(60)])
    state, _, label = solved(data, model=linear_regression(1, intercept=False), rounds=60)
    assert sorted(state.theta[:, 0].tolist()) == pytest.approx(slopes, abs=0.05)
    assert adjusted_rand(label, [i % 3 for i in range(60)]) == 1.0
