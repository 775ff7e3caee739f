# SPDX-License-Identifier: Apache-2.0
"""EM baselines: rounds as calculated by hand, fixed points of scikit-learn's EM, and what each has in common."""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from coterie.algorithms.em import State, em, own_parameters
from coterie.algorithms.fedgmm import State as JointState
from coterie.algorithms.fedgmm import fedgmm, marginal
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.models.mixtures import Custom, Gaussian, Regression
from coterie.studies.data.mixtures import planted_mixture
from helpers import ragged, run_one, spying, state_tensors

FEW = MixtureStart(restarts=3, iterations=8)
UNIT = Gaussian(2)


def clients(counts: tuple[int, ...] = (30, 40, 50), seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 2, generator=draw, dtype=torch.float64) + 3 * (torch.arange(n) % 2)[:, None] for n in counts]


def program(sharing: Any, family: Any = UNIT, **options: Any) -> Any:
    return partial(
        em, sharing=sharing, **{"family": family, "n_components": 2, "rounds": 1, "seed": 0, "start": FEW, **options}
    )


def e_step(x: Tensor, theta: Tensor, weights: Tensor) -> Tensor:
    joint = torch.stack([w * torch.exp(-(x - t).square().sum(1) / 2) for t, w in zip(theta, weights, strict=True)], 1)
    return joint / joint.sum(1, keepdim=True)


def begun(xs: list[Tensor], sharing: Any, **options: Any) -> tuple[dict[str, Tensor], list[State], InProcess]:
    """Private state after the start, all states, and the engine after the rounds."""
    engine, states = InProcess(ragged(xs, None)), []
    engine.run([program(sharing, **{**options, "rounds": 0})])
    first = {name: value.clone() for name, value in engine.worker.private[0].items()}
    engine.run([spying(program(sharing, **options), states)])
    return first, states, engine


def test_a_local_round_matches_hand_calculation() -> None:
    xs = clients()
    first, _, engine = begun(xs, "local")
    for k, x in enumerate(xs):
        gamma = e_step(x, first["tilde"][k], first["weights"][k])
        torch.testing.assert_close(engine.worker.private[0]["tilde"][k], gamma.T @ x / gamma.sum(0)[:, None])
        torch.testing.assert_close(engine.worker.private[0]["weights"][k], gamma.mean(0))


def test_a_pooled_round_is_an_em_step_on_all_rows() -> None:
    xs = clients()
    _, (start, after), _ = begun(xs, "pooled")
    x = torch.cat(xs)
    gamma = e_step(x, start.theta, start.weights)
    torch.testing.assert_close(after.theta, gamma.T @ x / gamma.sum(0)[:, None])
    torch.testing.assert_close(after.weights, gamma.mean(0))


def test_a_pooled_gradient_round_steps_towards_the_em_step() -> None:
    xs = clients()
    _, (start, after), _ = begun(xs, "pooled", gradient=True)
    x = torch.cat(xs)
    gamma = e_step(x, start.theta, start.weights)
    share = torch.maximum(gamma.mean(0), start.first_weights)[:, None]
    slope = (gamma[:, :, None] * (x[:, None] - start.theta)).mean(0)
    torch.testing.assert_close(after.theta, start.theta + 0.95 / share * slope)


def test_a_fedem_round_averages_whole_m_steps_of_the_clients_by_all_their_rows() -> None:
    xs = clients()
    first, (start, after), engine = begun(xs, "fedem")
    gammas = [e_step(x, start.theta, first["weights"][k]) for k, x in enumerate(xs)]
    steps = [g.T @ x / g.sum(0)[:, None] for g, x in zip(gammas, xs, strict=True)]
    torch.testing.assert_close(after.theta, (30 * steps[0] + 40 * steps[1] + 50 * steps[2]) / 120)
    torch.testing.assert_close(engine.worker.private[0]["weights"], torch.stack([g.mean(0) for g in gammas]))
    pooled = torch.cat(gammas).T @ torch.cat(xs) / torch.cat(gammas).sum(0)[:, None]
    assert float((after.theta - pooled).abs().max()) > 1e-3  # it is not the M-step of all rows


def test_a_fedem_round_averages_the_clients_covariances_about_their_own_means() -> None:
    xs = clients()
    first, (start, after), _ = begun(xs, "fedem", family=Gaussian(2, "full"))
    total = torch.zeros(2, 2, dtype=torch.float64)
    for k, x in enumerate(xs):
        gamma = e_step(x @ start.scale, start.theta @ start.scale, first["weights"][k])
        away = x[:, None] - gamma.T @ x / gamma.sum(0)[:, None]  # [N, R, D]
        total += torch.einsum("nr,nrd,nre->de", gamma, away, away)
    torch.testing.assert_close(torch.linalg.inv(after.scale @ after.scale.T), total / 120, rtol=1e-4, atol=1e-4)


def test_a_round_of_common_components_pools_rows_under_every_clients_own_proportions() -> None:
    xs = clients()
    first, (start, after), engine = begun(xs, "components")
    gammas = [e_step(x, start.theta, first["weights"][k]) for k, x in enumerate(xs)]
    gamma, x = torch.cat(gammas), torch.cat(xs)
    torch.testing.assert_close(after.theta, gamma.T @ x / gamma.sum(0)[:, None])
    torch.testing.assert_close(engine.worker.private[0]["weights"], torch.stack([g.mean(0) for g in gammas]))


@pytest.mark.parametrize("sharing", ["tgmm", "mutual"])
def test_five_rounds_of_borrowing_equal_a_plain_loop(sharing: Any) -> None:
    xs = clients()
    first, states, engine = begun(xs, sharing, rounds=5)
    theta, weights, sources = list(first["tilde"]), list(first["weights"]), list(first["tilde"])
    for _ in range(5):
        steps = []
        for k, x in enumerate(xs):
            gamma = e_step(x, theta[k], weights[k])
            weights[k] = gamma.mean(0)
            steps.append(gamma.T @ x / gamma.sum(0)[:, None])
        for k in range(3):
            others = sum(sources[j] for j in range(3) if j != k)
            theta[k] = (steps[k] + 0.4 * others) / 1.8
        if sharing == "mutual":  # else sources stay what clients began with
            sources = steps
    found, proportions, _ = own_parameters(states[-1], engine.worker.private[0], sharing)
    torch.testing.assert_close(found, torch.stack(theta))
    torch.testing.assert_close(proportions, torch.stack(weights))


@pytest.mark.parametrize("sharing", ["tgmm", "mutual"])
def test_borrowing_has_had_its_effect_when_rounds_end(sharing: Any) -> None:
    # Clients begin at optima of their own, where their M-steps stay: that must not end the rounds.
    rows = ragged(clients((60, 60, 60, 60, 60)), None)
    how = {"start": MixtureStart(restarts=3, iterations=100), "rounds": 200}
    found = []
    for tol in (1e-3, 1e-10):
        state, _, engine = run_one(program(sharing, tol=tol, **how), rows)
        found.append(own_parameters(state, engine.worker.private[0], sharing)[0])
    spread = [float((theta - theta.mean(0)).norm(dim=-1).max()) for theta in found]
    alone = run_one(program("local", rounds=1, start=how["start"]), rows)[2].worker.private[0]["tilde"]
    assert spread[0] < 0.5 * float((alone - alone.mean(0)).norm(dim=-1).max())
    torch.testing.assert_close(found[0], found[1], atol=0.02, rtol=0)  # 1e-3 of lengths up to 4, and what is left to go


def test_twenty_local_rounds_of_regressions_equal_a_plain_loop() -> None:
    draw = np.random.default_rng(0)
    xs = [draw.normal(size=(n, 2)) for n in (40, 60)]
    ys = [x[:, 0] * (1 - 2 * (np.arange(len(x)) % 2)) + 0.3 * draw.normal(size=len(x)) for x in xs]
    rows = ragged([torch.from_numpy(x) for x in xs], [torch.from_numpy(y) for y in ys])
    engine = InProcess(rows)
    engine.run([program("local", Regression(2), rounds=0)])
    first = {name: value.clone().numpy() for name, value in engine.worker.private[0].items()}
    engine.run([program("local", Regression(2), rounds=20)])
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        theta, weights = first["tilde"][k], first["weights"][k]
        for _ in range(20):
            joint = weights * np.exp(-((y[:, None] - x @ theta.T) ** 2) / 2)
            gamma = joint / joint.sum(1, keepdims=True)
            weights = gamma.mean(0)
            roots = np.sqrt(gamma)
            theta = np.stack([np.linalg.lstsq(x * r[:, None], y * r, rcond=None)[0] for r in roots.T])
        found = engine.worker.private[0]
        np.testing.assert_allclose(found["tilde"][k].numpy(), theta, rtol=1e-4, atol=1e-5)  # a trace of ridge
        np.testing.assert_allclose(found["weights"][k].numpy(), weights, rtol=1e-4)


def test_twenty_fedem_rounds_equal_a_plain_loop() -> None:
    xs = clients()
    first, states, engine = begun(xs, "fedem", rounds=20)
    theta, weights = states[0].theta, first["weights"]
    for _ in range(20):
        gammas = [e_step(x, theta, w) for x, w in zip(xs, weights, strict=True)]
        weights = torch.stack([g.mean(0) for g in gammas])
        theta = sum(len(x) / 120 * (g.T @ x / g.sum(0)[:, None]) for g, x in zip(gammas, xs, strict=True))
    torch.testing.assert_close(states[-1].theta, theta)
    torch.testing.assert_close(engine.worker.private[0]["weights"], weights)


def test_local_and_gradient_em_have_the_same_fixed_point() -> None:
    rows = ragged(clients(), None)
    found = []
    for gradient in (False, True):
        state, _, engine = run_one(program("local", rounds=500, tol=1e-10, gradient=gradient), rows)
        found.append(own_parameters(state, engine.worker.private[0], "local")[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)


def test_pooled_em_with_a_common_covariance_equals_scikit_learns_tied_mixture() -> None:
    xs = clients((80, 90, 100))
    state, _, _ = run_one(program("pooled", Gaussian(2, "full"), rounds=300, tol=1e-10), ragged(xs, None))
    other = GaussianMixture(2, covariance_type="tied", n_init=5, random_state=0, tol=1e-12, max_iter=1000, reg_covar=0)
    other.fit(torch.cat(xs).numpy())
    order, mine = np.argsort(other.means_[:, 0]), state.theta[:, 0].argsort()
    np.testing.assert_allclose(state.theta[mine].numpy(), other.means_[order], atol=1e-4)
    np.testing.assert_allclose(torch.linalg.inv(state.scale @ state.scale.T).numpy(), other.covariances_, atol=1e-4)
    np.testing.assert_allclose(state.weights[mine].numpy(), other.weights_[order], atol=1e-4)


def test_local_covariances_are_every_clients_own() -> None:
    xs = [x * f for x, f in zip(clients((80, 80, 80)), (1.0, 1.0, 3.0), strict=True)]
    state, _, engine = run_one(program("local", Gaussian(2, "full"), rounds=50), ragged(xs, None))
    scale = own_parameters(state, engine.worker.private[0], "local")[2]
    volume = torch.linalg.slogdet(scale).logabsdet
    assert scale.shape == (3, 2, 2)
    assert float(volume[:2].min() - volume[2]) > 1.0


FAMILIES = [
    Gaussian(2),
    Gaussian(2, "diagonal"),
    Gaussian(2, "full"),
    Regression(2, intercept=True, variance="estimated"),
]


@pytest.mark.parametrize(
    "method",
    ["local", "local-gradient", "pooled", "pooled-gradient", "components", "fedem", "tgmm", "mutual", "fedgmm"],
)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.filterwarnings("ignore::coterie.engines.screening.ClientWarning")  # whose squares overflow is left out
def test_awkward_clients_give_no_nan(family: Any, method: str) -> None:
    draw = torch.Generator().manual_seed(0)
    for far in (1e6, 1e200):
        xs = [torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in (30, 0, 1, 25, 20, 2, 30)]
        ys = [x[:, 0] * (1 - 2 * (torch.arange(len(x)) % 2)) for x in xs]
        xs[3][:3], xs[4][:], xs[6][:], ys[5][:] = far, far, 0.0, -far
        sharing, _, gradient = method.partition("-")
        chosen = (
            partial(fedgmm, family=family, n_components=3, rounds=5, seed=0, start=FEW)
            if method == "fedgmm"
            else program(sharing, family, n_components=3, rounds=5, gradient=bool(gradient))
        )
        state, done, engine = run_one(chosen, ragged(xs, ys))
        for value in [*state_tensors(state).values(), *engine.worker.private[0].values()]:
            assert not value.isnan().any()
        assert not any(np.isnan(r.info.get("loss", 0.0)) for r in done.rounds)


@pytest.mark.parametrize("sharing", ["local", "pooled", "components"])  # the others are no ascent of one objective
@pytest.mark.parametrize("kind", ["gmm", "mor"])
def test_likelihood_never_falls(sharing: Any, kind: Any) -> None:
    planted = planted_mixture(kind, n_clients=5, n_outliers=0, seed=0)
    family = Gaussian(10) if kind == "gmm" else Regression(10)
    _, done, _ = run_one(program(sharing, family, n_components=5, rounds=15), planted.rows)
    losses = [r.info["loss"] for r in done.rounds[1:]]
    assert all(b <= a + 1e-8 for a, b in pairwise(losses))


def test_fedgmm_of_regressions_recovers_the_common_components() -> None:
    planted = planted_mixture("mor", n_clients=6, n_outliers=0, seed=2)
    start = MixtureStart(restarts=20)
    state, done, engine = run_one(
        partial(fedgmm, family=Regression(10), n_components=5, rounds=60, seed=0, start=start), planted.rows
    )
    assert isinstance(state, JointState)
    assert done.rounds[-1].info["loss"] < done.rounds[1].info["loss"]
    weights = marginal(engine.worker.private[0])
    torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64))
    assert float(torch.cdist(planted.theta[0], state.theta).min(1).values.median()) < 1.0


def test_a_fedgmm_round_matches_hand_calculation() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 2, generator=draw, dtype=torch.float64) + 2 * (torch.arange(n) % 3)[:, None] for n in (40, 60)]
    ys = [x[:, 0] * (1 - 2 * (torch.arange(len(x)) % 2)) for x in xs]
    rows, how, states = ragged(xs, ys), {"family": Regression(2), "n_components": 2, "seed": 0, "start": FEW}, []
    engine = InProcess(rows)
    engine.run([partial(fedgmm, **how, rounds=0, parts=3)])
    kept = {name: value.clone() for name, value in engine.worker.private[0].items()}
    done = engine.run([spying(partial(fedgmm, **how, rounds=1, parts=3), states)])
    start, after = states
    gammas, losses = [], []
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        where = torch.stack(
            [
                torch.distributions.MultivariateNormal(
                    p, precision_matrix=start.part_scale @ start.part_scale.T
                ).log_prob(x)
                for p in start.parts
            ],
            1,
        ).exp()  # [N, Q]
        target = torch.exp(-((y[:, None] - x @ start.theta.T) ** 2) / 2)  # [N, R]
        joint = (
            where[:, :, None] * target[:, None] * kept["weights"][k] / 3
        )  # at first parts are as likely as each other
        gammas.append(joint / joint.sum((1, 2), keepdim=True))
        losses.append(math.log(2 * math.pi) / 2 - joint.sum((1, 2)).log())
        own = engine.worker.private[0]["joint"][k]
        torch.testing.assert_close(own, gammas[-1].mean(0).flatten())
    assert done.rounds[-1].info["loss"] == pytest.approx(float(torch.cat(losses).mean()))
    regressions, scatter = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    for gamma, x, y in zip(gammas, xs, ys, strict=True):
        for r, share in enumerate(gamma.sum(1).T):  # a client's own least squares, by its share of the 100 rows
            regressions[r] += len(x) / 100 * torch.linalg.solve(x.T @ (share[:, None] * x), x.T @ (share * y))
        part = gamma.sum(2)
        away = x[:, None] - part.T @ x / part.sum(0)[:, None]
        scatter += torch.einsum("nq,nqd,nqe->de", part, away, away) / 100
    torch.testing.assert_close(after.theta, regressions, rtol=1e-4, atol=1e-5)
    part, x = torch.cat(gammas).sum(2), torch.cat(xs)
    torch.testing.assert_close(after.parts, part.T @ x / part.sum(0)[:, None])
    torch.testing.assert_close(torch.linalg.inv(after.part_scale @ after.part_scale.T), scatter, rtol=1e-4, atol=1e-4)


def test_fedgmm_of_rows_is_fedem_with_an_estimated_covariance() -> None:
    rows = ragged(clients(), None)
    joint, _, _ = run_one(partial(fedgmm, family=UNIT, n_components=2, rounds=5, seed=0, start=FEW), rows)
    plain, _, _ = run_one(program("fedem", rounds=5, fitted=Gaussian(2, "full")), rows)
    for name, value in state_tensors(plain).items():
        assert torch.equal(value, state_tensors(joint)[name])


def test_what_makes_no_sense_is_refused() -> None:
    mine = Custom(lambda x, y, theta: -(x - theta).square().sum(), 2, lambda x, u: x + u)
    with pytest.raises(ConfigError, match="sums over rows"):
        next(program("pooled", mine)(None))
    with pytest.raises(ConfigError, match="exact M-steps"):
        next(program("fedem", gradient=True)(None))
    with pytest.raises(ConfigError, match="Gaussian components or regressions"):
        next(fedgmm(None, family=mine, n_components=2, rounds=1, seed=0))
