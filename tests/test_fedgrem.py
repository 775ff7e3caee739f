# SPDX-License-Identifier: Apache-2.0
"""FedGrEM: the central update is optimal, rounds are as calculated by hand, and nothing breaks it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from coterie.algorithms.fedgrem import State, central_update, estimates, fedgrem, scores, shrunk
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.algorithms.outliers import chance, outlier_scores
from coterie.data.mixtures import PlantedMixture, matched, planted_mixture
from coterie.engines.in_process import InProcess
from coterie.models.mixtures import Custom, Family, Gaussian, Regression
from helpers import Only, ragged, run_one, spying, state_tensors

FEW = MixtureStart(restarts=3, iterations=8)


def program(family: Family, n_components: int = 2, **options: Any) -> Callable[[Any], Any]:
    options = {"rounds": 5, "seed": 0, "start": FEW, **options}
    return partial(fedgrem, family=family, n_components=n_components, **options)


def blobs(counts: list[int], *, seed: int = 0, spread: float = 1.0) -> list[Tensor]:
    """Clients with rows about (4, 0) and (-4, 0), in turn."""
    draw = torch.Generator().manual_seed(seed)
    sign = [1 - 2 * (torch.arange(n) % 2) for n in counts]
    noise = [spread * torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in counts]
    return [e + 4 * torch.stack([s, 0 * s], 1) for s, e in zip(sign, noise, strict=True)]


# -- the central update -----------------------------------------------------------------------------------------------
def objective(flat: np.ndarray, tilde: np.ndarray, n: np.ndarray, lam: float) -> float:
    """Of all nu_k and the centre, for one component, smoothed by far less than the tolerance."""
    points = flat.reshape(-1, tilde.shape[1])
    nu, centre = points[:-1], points[-1]
    fit = (n / 2 * ((nu - tilde) ** 2).sum(1)).sum()
    return float(fit + (np.sqrt(n) * lam * np.sqrt(((nu - centre) ** 2).sum(1) + 1e-18)).sum())


@pytest.mark.parametrize("lam", [1e-3, 0.5, 3.0, 20.0, 1e4])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "unequal"])
def test_the_central_update_is_optimal(lam: float, equal: bool) -> None:
    draw = np.random.default_rng(0)
    tilde = draw.normal(size=(5, 3)) + np.array([[0, 0, 0]] * 4 + [[6, 0, 0]])
    n = np.full(5, 20) if equal else np.array([3, 10, 40, 200, 15])
    at, rows = torch.from_numpy(tilde)[:, None], torch.from_numpy(n)
    centre = central_update(at, rows, lam, at.median(0).values)
    nu = shrunk(at, centre, lam / rows.sqrt()[:, None])
    ours = np.concatenate([nu[:, 0].numpy(), centre.numpy()])
    value = objective(ours.ravel(), tilde, n, lam)
    starts = [ours, np.concatenate([tilde, tilde.mean(0, keepdims=True)]), draw.normal(size=ours.shape)]
    best = min(
        minimize(objective, s.ravel(), (tilde, n, lam), "L-BFGS-B", options={"maxiter": 5000}).fun for s in starts
    )
    assert value <= best + 1e-6 * (1 + abs(best))  # the solver stops within 1e-6 or so


def test_the_central_update_satisfies_the_first_order_condition() -> None:
    # The centre's gradient is the sum of soft-thresholded pulls: it must vanish, whatever a solver says.
    draw = torch.Generator().manual_seed(1)
    tilde, n = torch.randn(30, 4, 6, generator=draw, dtype=torch.float64), torch.arange(1, 31)
    tilde[:5] += 10
    for lam in (0.1, 1.0, 5.0):
        centre = central_update(tilde, n, lam, torch.zeros(4, 6, dtype=torch.float64))
        pull = n[:, None, None] * (tilde - shrunk(tilde, centre, lam / n.sqrt()[:, None].expand(-1, 4)))
        left = pull.sum(0) / n.sum()  # about as far as the centre is from the best one
        torch.testing.assert_close(left, torch.zeros(4, 6, dtype=torch.float64), atol=1e-7, rtol=0)


def test_an_infinite_penalty_gives_the_mean_by_rows_and_no_penalty_the_geometric_median() -> None:
    tilde = torch.tensor([[[0.0]], [[1.0]], [[5.0]]], dtype=torch.float64)
    n = torch.tensor([1, 1, 2])
    start = torch.tensor([[0.4]], dtype=torch.float64)
    assert float(central_update(tilde, n, math.inf, start)) == pytest.approx(11 / 4)
    assert float(central_update(tilde, torch.ones(3), 0.0, start)) == pytest.approx(1.0, abs=1e-6)
    everyone = shrunk(tilde, torch.full((1, 1), 2.0, dtype=torch.float64), torch.full((3, 1), math.inf))
    assert everyone.flatten().tolist() == [2.0, 2.0, 2.0]


def test_far_points_pull_with_bounded_strength() -> None:
    # Huber: nine at 0 and one at z. Gradient: 9 n c = sqrt(n) lam, so c = lam / (9 sqrt n) for every far z.
    for z in (1e3, 1e6, 1e100):
        tilde = torch.zeros(10, 1, 1, dtype=torch.float64)
        tilde[9] = z
        centre = central_update(tilde, torch.full((10,), 25), 2.0, torch.zeros(1, 1, dtype=torch.float64))
        assert float(centre) == pytest.approx(2.0 / (9 * 5), rel=1e-3)


# -- rounds -----------------------------------------------------------------------------------------------------------
def by_hand(xs: list[Tensor], theta: Tensor, weights: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """A local update with unit covariance, row by row.  theta [M, R, D] -> tilde, weights"""
    tilde, new = theta.clone(), weights.clone()
    for k, x in enumerate(xs):
        joint = torch.stack([weights[k, r] * torch.exp(-((x - theta[k, r]) ** 2).sum(1) / 2) for r in range(2)], 1)
        gamma = joint / joint.sum(1, keepdim=True)
        new[k] = gamma.mean(0)
        for r in range(2):
            gradient = (gamma[:, r : r + 1] * (x - theta[k, r])).mean(0)
            tilde[k, r] = theta[k, r] + min(0.95 / first[k, r], 0.95 / new[k, r]) * gradient
    return tilde, new


def test_two_rounds_match_hand_calculation() -> None:
    xs = blobs([6, 9, 14], spread=2.0)
    family, states = Gaussian(2), []
    engine = InProcess(ragged(xs, None))
    engine.run([spying(program(family, rounds=0), states)])
    begun = {name: value.clone() for name, value in engine.worker.private[0].items()}
    engine.run([spying(program(family, rounds=2, c_lambda=0.7, kappa=0.3, together=0.0), states)])
    start, one, two = states[1:]
    n = torch.tensor([6, 9, 14])
    # Round 1 begins at the local estimates, which nothing has shrunk yet; lambda_1 = kappa lambda_0 + C sqrt(P + log M).
    torch.testing.assert_close(start.tilde, begun["tilde"])
    step = 0.7 * math.sqrt(2 + math.log(3))
    assert one.lam == pytest.approx(0.3 + step)
    assert two.lam == pytest.approx(0.3 * (0.3 + step) + step)
    tilde, weights = by_hand(xs, begun["tilde"], begun["weights"], begun["first_weights"])
    torch.testing.assert_close(one.tilde, tilde)
    torch.testing.assert_close(one.centre, central_update(tilde, n, one.lam, start.centre))
    # Round 2 begins at what the central update of round 1 made of them, with that round's lambda.
    theta = shrunk(tilde, one.centre, (one.lam / n.sqrt())[:, None].expand(-1, 2))
    tilde, _ = by_hand(xs, theta, weights, begun["first_weights"])
    torch.testing.assert_close(two.tilde, tilde)
    torch.testing.assert_close(two.centre, central_update(tilde, n, two.lam, one.centre))
    found = estimates(two, family, engine.worker.private[0], n)
    torch.testing.assert_close(found, shrunk(tilde, two.centre, (two.lam / n.sqrt())[:, None].expand(-1, 2)))


def test_c_lambda_zero_leaves_every_client_alone() -> None:
    xs = blobs([20, 30, 25])
    state, _, engine = run_one(program(Gaussian(2), c_lambda=0.0, rounds=20), ragged(xs, None))
    assert (state.lam, state.pull) == (0.0, 0.0)
    alone = []
    for k, x in enumerate(xs):
        rows = ragged([x], None, [f"c{k:04d}"])
        alone.append(run_one(program(Gaussian(2), c_lambda=0.0, rounds=20), rows)[2].worker.private[0]["tilde"][0])
    found = engine.worker.private[0]["tilde"]
    for k in range(3):
        order = found[k][:, 0].argsort()
        torch.testing.assert_close(found[k][order], alone[k][alone[k][:, 0].argsort()])


def test_c_lambda_infinity_makes_components_common() -> None:
    rows = ragged(blobs([20, 30, 25]), None)
    family = Gaussian(2)
    state, _, engine = run_one(program(family, c_lambda=math.inf, rounds=10), rows)
    found = estimates(state, family, engine.worker.private[0], torch.tensor([20, 30, 25]))
    assert torch.equal(found, state.centre.expand(3, -1, -1))
    n = torch.tensor([20.0, 30.0, 25.0], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(state.centre, (n * state.tilde).sum(0) / 75)


def test_shared_weights_are_drawn_to_their_mean() -> None:
    xs = [torch.cat([x[: 10 + 5 * k], x[::2]]) for k, x in enumerate(blobs([60, 60, 60]))]
    free, _, one = run_one(program(Gaussian(2), rounds=20), ragged(xs, None))
    tied, _, two = run_one(program(Gaussian(2), rounds=20, share_weights=0.5), ragged(xs, None))
    assert torch.isfinite(tied.centre).all() and torch.isfinite(free.centre).all()  # noqa: PT018
    assert float(two.worker.private[0]["weights"].std(0).max()) <= float(one.worker.private[0]["weights"].std(0).max())


def test_clipped_rows_move_a_client_less() -> None:
    xs = blobs([40, 40, 40])
    xs[0][0] = torch.tensor([1e6, 1e6], dtype=torch.float64)
    plain, _, _ = run_one(program(Gaussian(2), rounds=3), ragged(xs, None))
    clipped, _, _ = run_one(program(Gaussian(2), rounds=3, clip=5.0, start=MixtureStart(1, 1)), ragged(xs, None))
    assert clipped.tilde.isfinite().all()
    assert plain.tilde.isfinite().all()


def test_minibatches_end_near_the_full_batch() -> None:
    rows = ragged(blobs([200, 220, 180]), None)
    full, _, _ = run_one(program(Gaussian(2), rounds=30), rows)
    some, _, _ = run_one(program(Gaussian(2), rounds=30, batch_size=100), rows)
    assert not torch.equal(full.centre, some.centre)
    torch.testing.assert_close(some.centre, full.centre, atol=0.3, rtol=0)  # 100 of 200 rows: deviation about 0.1
    assert some.n.tolist() == [200, 220, 180]  # the penalty goes by all rows


def test_tol_stops_when_nothing_moves() -> None:
    rows = ragged(blobs([40, 50, 60]), None)
    state, done, _ = run_one(program(Gaussian(2), rounds=500, tol=1e-6), rows)
    assert state.settled
    assert state.round < 100
    assert done.rounds[-1].info["change"] <= 1e-6


def test_a_client_that_missed_the_start_begins_at_the_centre() -> None:
    rows = ragged(blobs([40, 50, 60]), None)

    class Later:
        def choose(self, round_: int, clients: Tensor, seed: int) -> tuple[Tensor, Tensor]:
            return Only((0, 1) if round_ == 0 else (0, 1, 2)).choose(round_, clients, seed)

    state, _, _ = run_one(program(Gaussian(2), rounds=5), rows, participation=Later())
    assert state.n.tolist() == [40, 50, 60]
    torch.testing.assert_close(state.tilde[2], state.centre, atol=1.0, rtol=0)


# -- awkward clients --------------------------------------------------------------------------------------------------
def regressions(counts: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in counts]
    return xs, [x[:, 0] * (1 - 2 * (torch.arange(len(x)) % 2)) for x in xs]


FAMILIES = [
    Gaussian(2), Gaussian(2, "diagonal"), Gaussian(2, "full"), Regression(2), Regression(2, intercept=True),
    Regression(2, variance="estimated"),
    Custom(lambda x, y, theta: -0.5 * (x - theta).square().sum(), 2, lambda x, u: x + 0.1 * u),
]  # fmt: skip


@pytest.mark.parametrize("far", [1e6, 1e200])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{type(f).__name__}-{getattr(f, 'covariance', '')}")
def test_awkward_clients_give_no_nan(family: Family, far: float) -> None:
    xs, ys = regressions([30, 0, 1, 40, 25, 20, 2, 30])
    xs[4] = xs[4].clone()
    xs[4][:3] = far  # some rows far away
    xs[5] = torch.full_like(xs[5], far)  # all rows far away
    xs[7] = torch.zeros_like(xs[7])  # constant rows
    for c_lambda in (0.0, 2.0, math.inf):
        chosen = program(family, 3, c_lambda=c_lambda, rounds=6)
        state, done, engine = run_one(chosen, ragged(xs, ys))
        for value in [*state_tensors(state).values(), *engine.worker.private[0].values()]:
            assert not value.isnan().any()
        assert not any(math.isnan(r.info.get("loss", 0.0)) for r in done.rounds)
        found = estimates(state, family, engine.worker.private[0], torch.tensor([len(x) for x in xs]))
        assert not found.isnan().any()


def test_nobody_has_rows() -> None:
    empty = [torch.zeros(0, 2, dtype=torch.float64)] * 3
    state, done, _ = run_one(program(Gaussian(2)), ragged(empty, None))
    assert state.round == 5
    assert all(r.info["events"] == ["nobody answered"] for r in done.rounds)


def test_an_empty_component_stays_where_it_is() -> None:
    xs = [torch.zeros(12, 2, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)]
    state, _, engine = run_one(program(Gaussian(2), 3, rounds=10), ragged(xs, None))
    assert state.centre.isfinite().all()
    assert engine.worker.private[0]["weights"].sum(1).allclose(torch.ones(2, dtype=torch.float64))


# -- what it is for ---------------------------------------------------------------------------------------------------
def test_outlier_scores_are_robust_z_values() -> None:
    d = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0, math.inf, 2.5], dtype=torch.float64)
    middle, spread, none = 3.0, 1.4826 * 1.0, torch.zeros(7, dtype=torch.float64)
    assert outlier_scores(d, none)[:5].tolist() == pytest.approx([(v - middle) / spread for v in d[:5].tolist()])
    assert outlier_scores(d, none)[5] == math.inf
    assert outlier_scores(torch.ones(4), none[:4]).tolist() == [0.0] * 4
    assert outlier_scores(torch.tensor([1.0, 1.0, 1.0, 2.0]).double(), none[:4])[3] > 1e100
    assert outlier_scores(none[:0], none[:0]).tolist() == []


def test_nobody_is_an_outlier_by_chance() -> None:
    # Three clients that agree exactly; the fourth is as far as 4 parameters of 2 components are after 32 rows: 0.5.
    noise = chance(torch.tensor([32, 32, 32, 32]), 2, 4)
    assert noise.tolist() == [0.5] * 4
    distance = torch.tensor([0.1, 0.1, 0.1, 0.6], dtype=torch.float64)
    assert outlier_scores(distance, noise).tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0])
    draw = torch.Generator().manual_seed(0)
    alike = torch.randn(1000, 2, 4, generator=draw, dtype=torch.float64).div(4).norm(dim=-1).mean(1)
    assert float(outlier_scores(alike, chance(torch.full((1000,), 32), 2, 4)).max()) < 3.5


@pytest.mark.parametrize("kind", ["gmm", "mor"])
def test_planted_outliers_have_the_highest_scores_and_do_not_hurt(kind: Any) -> None:
    family = Gaussian(10) if kind == "gmm" else Regression(10)
    planted = planted_mixture(kind, n_clients=12, n_outliers=2, h=0.25, seed=1)
    truth = (planted.theta[:10], planted.weights[:10], planted.good[:10])
    good = PlantedMixture(planted.rows.only(np.arange(10)), *truth)

    def error(planted: PlantedMixture, c_lambda: float) -> tuple[float, State]:
        start = MixtureStart(restarts=10)
        chosen = program(family, 5, rounds=60, start=start, c_lambda=c_lambda, reject=3.5)
        state, _, engine = run_one(chosen, planted.rows)
        found = estimates(state, family, engine.worker.private[0], state.n)
        return matched(found, engine.worker.private[0]["weights"], planted)[0], state

    with_them, state = error(planted, 4.0)
    assert scores(state).argsort()[-2:].sort().values.tolist() == [10, 11]
    assert float(scores(state)[-2:].min()) > 3.5
    assert float(scores(state)[:-2].max()) < 3.5
    assert with_them < 1.2 * error(good, 4.0)[0]
    assert with_them < 0.5 * error(planted, 0.0)[0]


def test_the_common_covariance_is_not_the_outliers() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [x * torch.tensor([0.5, 2.0]) + torch.tensor([0.0, 3.0]) for x in blobs([80] * 12)]
    xs[10], xs[11] = (100 * torch.randn(80, 2, generator=draw, dtype=torch.float64) for _ in range(2))
    state, _, _ = run_one(program(Gaussian(2, "full"), rounds=20), ragged(xs, None))
    covariance = torch.linalg.inv(state.scale @ state.scale.T)
    torch.testing.assert_close(covariance, torch.diag(torch.tensor([0.25, 4.0]).double()), atol=0.5, rtol=0.15)
