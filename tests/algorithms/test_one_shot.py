# SPDX-License-Identifier: Apache-2.0
"""One-shot clustering: fits, k-means, and FedAvg within fixed clusters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms.one_shot import State, one_shot
from coterie.data.ragged import Ragged
from coterie.engines.in_process import Finished, InProcess
from coterie.evaluate import match_labels, match_models
from coterie.local import Training
from coterie.models import Dense, linear_regression
from coterie.participation import Participants
from coterie.studies.data.synthetic import unequal_mixture
from helpers import Late, Only, ragged

SLOPE = linear_regression(1, intercept=False)
ONE_STEP = Training(steps=1)


def clients(*slopes: float, rows: int = 1) -> Ragged:
    """Clients with x = 1 in every row and y = slope: a fit alone is slope / 1.001 (a ridge of 0.001)."""
    x = torch.ones(rows, 1, dtype=torch.float64)
    return ragged([x] * len(slopes), [slope * x[:, 0] for slope in slopes])


def run(rows: Ragged, *, model: Dense = SLOPE, **options: Any) -> tuple[State, Tensor, Finished]:
    """The last state, the clients' clusters, and what happened."""
    engine = InProcess(rows, participation=options.pop("participation", None))
    options = {"n_clusters": 2, "rounds": 1, "step_size": 0.25, "seed": 0, "training": ONE_STEP, **options}
    done = engine.run([lambda state: one_shot(state, model=model, **options)])
    return done.states[0], engine.worker.private[0]["label"], done


def by_value(theta: Tensor) -> list[float]:
    return sorted(theta[:, 0].tolist())


def test_models_begin_at_the_means_of_local_fits():
    state, label, _ = run(clients(1.0, 2.0, 10.0, 14.0), rounds=0)
    assert by_value(state.theta) == pytest.approx([1.5 / 1.001, 12 / 1.001])
    assert label[0] == label[1] != label[2] == label[3]


def test_one_round_matches_hand_calculation():
    # Client 1 has slope 1 in one row, client 2 slope 2 in three rows: the centre is c = 1.5 / 1.001, both alike. A step
    # with size 1/4 on the mean of (y - w)^2 moves w by (y - w) / 2; weighted by rows, c + ((1 - c) + 3 (2 - c)) / 8.
    x = [torch.ones(n, 1, dtype=torch.float64) for n in (1, 3, 2)]
    rows = ragged(x, [slope * own[:, 0] for slope, own in zip((1.0, 2.0, 10.0), x, strict=True)])
    c, far = 1.5 / 1.001, 10 / 1.001
    state, _, done = run(rows)
    assert by_value(state.theta) == pytest.approx([c + (7 - 4 * c) / 8, far + (10 - far) / 2], abs=1e-7)
    assert done.rounds[-1].info["loss"] == pytest.approx(((1 - c) ** 2 + 3 * (2 - c) ** 2 + 2 * (10 - far) ** 2) / 6)
    assert sorted(done.rounds[-1].info["sizes"]) == [1, 2]
    alike, _, _ = run(rows, weighting="clients")
    assert by_value(alike.theta)[0] == pytest.approx(c + (3 - 2 * c) / 4, abs=1e-7)


def test_recovers_planted_clusters_when_clients_have_enough_rows():
    planted = unequal_mixture(rows=torch.full((60,), 40), shares=[1, 1, 1], n_features=10, noise=0.2, seed=0)
    state, label, _ = run(
        planted.rows, model=linear_regression(10, intercept=False), n_clusters=3, rounds=60, step_size=0.1
    )
    assert match_labels(label, planted.truth) == 1.0
    # A cluster has some 800 rows for 10 features: its least-squares error is about 0.2 sqrt(10 / 800) = 0.022.
    assert match_models(state.theta, planted.theta)[0] < 0.05


def test_a_network_is_clustered_by_its_fits():
    """Fits from a common start by gradient descent: two opposite slopes are told apart."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(30, 2, generator=draw, dtype=torch.float64) for _ in range(8)]
    ys = [x.sum(1) * (1 if i % 2 else -1) for i, x in enumerate(xs)]
    _, label, done = run(
        ragged(xs, ys), model=Dense((2, 8, 1), "squared"), step_size=0.05, training=Training(steps=5), rounds=20
    )
    assert match_labels(label, [0, 1] * 4) == 1.0
    assert done.rounds[-1].info["loss"] < done.rounds[1].info["loss"]


def test_with_fewer_rows_than_features_the_fit_is_the_shortest():
    # From y = 3 for the row (1, 0, 0) the shortest solution is (3, 0, 0).
    x = torch.tensor([[1.0, 0, 0]], dtype=torch.float64)
    rows = ragged([x, -x], [torch.tensor([3.0], dtype=torch.float64)] * 2)
    state, _, _ = run(rows, model=linear_regression(3, intercept=False), rounds=0)
    assert sorted(state.theta.tolist()) == [pytest.approx([-3 / 1.001, 0, 0]), pytest.approx([3 / 1.001, 0, 0])]


def test_clusters_stay_as_they_are_even_if_another_model_serves_better():
    # k-means joins the fits 0 and 2.8, and 4.5 and 6.5. By rows, the models become (99 x 0 + 2.8) / 100 = 0.028 and
    # (99 x 4.5 + 6.5) / 100 = 4.52: now the latter is nearer to 2.8.
    x = [torch.ones(n, 1, dtype=torch.float64) for n in (99, 1, 99, 1)]
    rows = ragged(x, [slope * own[:, 0] for slope, own in zip((0.0, 2.8, 4.5, 6.5), x, strict=True)])
    state, label, _ = run(rows, rounds=40)
    assert label[0] == label[1] != label[2] == label[3]
    assert by_value(state.theta) == pytest.approx([0.028, 4.52], abs=1e-6)


def test_who_was_late_joins_the_cluster_that_serves_best():
    state, label, done = run(clients(1.0, 1.2, 10.0, 10.2, 9.0, 1.5), participation=Late(), rounds=3)
    assert set(label.tolist()) == {0, 1}  # clients 0 and 3 were late when fits were asked for
    assert label[0] == label[1] == label[5] != label[3] == label[2] == label[4]
    assert all(r.participants == 4 for r in done.rounds)
    assert state.theta.isfinite().all()


def test_a_cluster_whose_members_are_late_keeps_its_model():
    rows = clients(1.0, 1.2, 10.0)
    start, _, _ = run(rows, rounds=0)
    k = int(start.theta[:, 0].argmax())

    class FirstEverybodyThenTwo:
        def choose(self, round_: int, clients: Tensor, seed: int, *how: Any) -> Participants:
            return Only((0, 1, 2) if round_ == 0 else (0, 1)).choose(round_, clients, seed)

    state, _, done = run(rows, participation=FirstEverybodyThenTwo(), rounds=2)
    assert torch.equal(state.theta[k], start.theta[k])
    assert not torch.equal(state.theta[1 - k], start.theta[1 - k])
    assert done.rounds[-1].info["sizes"][k] == 0


def test_nobody_at_the_start_leaves_random_models_and_says_so():
    state, label, done = run(clients(1.0, 10.0), participation=Late(silent=(0,)), rounds=2)
    assert done.rounds[0].info["events"] == ["nobody answered: the clusters' models are random"]
    assert state.round == 2
    assert state.theta.isfinite().all()
    assert (label >= 0).any()


def test_clients_without_rows_have_no_say():
    empty = torch.zeros(0, 1, dtype=torch.float64)
    x = torch.ones(1, 1, dtype=torch.float64)
    rows = ragged([x, empty, x, empty], [x[:, 0], empty[:, 0], 9 * x[:, 0], empty[:, 0]])
    state, _, done = run(rows, rounds=40)
    assert by_value(state.theta) == pytest.approx([1.0, 9.0], abs=1e-6)  # a fit of nothing would be a third point, 0
    assert sorted(done.rounds[-1].info["sizes"]) == [1, 1]


def test_fewer_different_fits_than_clusters_is_survived():
    state, label, done = run(clients(2.0, 2.0, 5.0), n_clusters=4, rounds=30)
    assert done.rounds[0].info["events"] == ["there are only 2 different local fits"]
    assert label[0] == label[1] != label[2]
    assert state.theta[label][:, 0].tolist() == pytest.approx([2.0, 2.0, 5.0], abs=1e-6)


def test_stops_when_nothing_changes():
    state, _, done = run(clients(1.0, 9.0), rounds=1000, tol=1e-8)
    assert state.settled
    assert state.round == len(done.rounds) - 1 < 50
    assert by_value(state.theta) == pytest.approx([1.0, 9.0], abs=1e-7)
