# SPDX-License-Identifier: Apache-2.0
"""Starts of mixtures: as good as scikit-learn's, the same for all who begin alike, and nobody's outliers in the scale."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from coterie.algorithms import mixture_starts
from coterie.algorithms.em import em, own_parameters
from coterie.algorithms.fedgrem import fedgrem
from coterie.algorithms.mixture_starts import MixtureStart, fit_locally, own_scale
from coterie.engines.in_process import InProcess
from coterie.models.mixtures import Family, Gaussian, Regression
from coterie.studies.data.mixtures import matched, planted_mixture
from helpers import one_block, ragged, run_one


def test_local_fits_are_as_likely_as_scikit_learns() -> None:
    planted = planted_mixture("gmm", n_clients=4, n_outliers=0, rows=200, seed=0)
    start = MixtureStart(restarts=10, iterations=100)
    state, _, engine = run_one(
        partial(fedgrem, family=Gaussian(10), n_components=5, rounds=0, seed=0, start=start), planted.rows
    )
    kept = engine.worker.private[0]
    for c in range(4):
        x = planted.rows.client(c).x[0].numpy()
        unit = GaussianMixture(
            5, covariance_type="spherical", means_init=kept["tilde"][c].numpy(), weights_init=kept["weights"][c].numpy(),
            precisions_init=np.ones(5), max_iter=1,
        )  # fmt: skip
        with pytest.warns(match="did not converge"):
            unit.fit(x)
        # One more EM step of scikit-learn's from where ours ended moves nothing: it is a fixed point of EM.
        np.testing.assert_allclose(unit.means_, kept["tilde"][c].numpy(), atol=0.02)
    assert matched(kept["tilde"], kept["weights"], planted)[0] < 1.5
    assert state.round == 0


def test_runs_that_begin_alike_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = planted_mixture("gmm", n_clients=3, n_outliers=0, rows=40, seed=0).rows
    seen: list[int] = []
    original = mixture_starts._best_start

    def counting(shared: object, key: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(key))
        return original(shared, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(mixture_starts, "_best_start", counting)
    start = MixtureStart(restarts=2, iterations=5)
    engine = InProcess(rows)
    engine.run(
        [
            partial(fedgrem, family=Gaussian(10), n_components=3, rounds=1, seed=0, start=start, c_lambda=c)
            for c in (0.0, 1.0, 9.0)
        ]
    )
    assert seen == [1]
    engine.run([partial(fedgrem, family=Gaussian(10), n_components=3, rounds=1, seed=s, start=start) for s in (0, 1)])
    assert seen == [1, 2]


def test_most_regressions_land_where_em_from_the_truth_does() -> None:
    planted = planted_mixture("mor", n_clients=8, n_outliers=0, h=0.5, seed=3)
    family = Regression(10)
    data = next(planted.rows.blocks())
    shared = {
        "family": family, "n_components": 5, "restarts": 20, "iterations": 40, "rough": False,
        "scale": torch.ones(1, dtype=torch.float64), "own_metric": False, "key": torch.tensor([7]),
    }  # fmt: skip
    reply, _ = fit_locally(shared, {}, {}, data)
    distance = torch.cdist(planted.theta[data.ids], reply["theta"][0]).min(-1).values  # [C, R]
    assert float((distance < 2.0).double().mean()) > 0.5


def test_a_client_that_copies_one_row_does_not_shape_the_covariance() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(60, 2, generator=draw, dtype=torch.float64) for _ in range(9)]
    xs = [x + 6 * (torch.arange(60) % 2)[:, None] for x in xs]
    xs[8] = torch.full((60, 2), 50.0, dtype=torch.float64)
    family = Gaussian(2, "full")
    program = partial(fedgrem, family=family, n_components=2, rounds=0, seed=0, start=MixtureStart(5, 20))
    state, _, _ = run_one(program, ragged(xs, None))
    covariance = torch.linalg.inv(state.scale @ state.scale.T)
    torch.testing.assert_close(covariance, torch.eye(2, dtype=torch.float64), atol=0.2, rtol=0)


# -- in a client's own metric -----------------------------------------------------------------------------------------
def long_groups(factor: float) -> list[Tensor]:
    """Three clients with two groups of rows, far longer in one column than apart in the other; one with another scale."""
    draw = torch.Generator().manual_seed(0)
    noise = [torch.randn(60, 2, generator=draw, dtype=torch.float64) for _ in range(3)]
    group = 6.0 * (torch.arange(60) % 2)
    xs = [torch.stack([20 * e[:, 0], e[:, 1] + group], 1) for e in noise]
    return [xs[0] * factor, xs[1] + factor, xs[2]]


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("rounds", [0, 1, 20])
def test_a_local_baseline_hears_nothing_of_the_others(rounds: int, gradient: bool) -> None:
    found = []
    for factor in (1.0, 300.0):
        program = partial(
            em, family=Gaussian(2, "full"), n_components=2, rounds=rounds, seed=0, sharing="local", gradient=gradient,
            start=MixtureStart(3, 8),
        )  # fmt: skip
        state, _, engine = run_one(program, ragged(long_groups(factor), None))
        theta, weights, scale = own_parameters(state, engine.worker.private[0], "local")
        order = theta[2, :, 1].argsort()  # how components are numbered is agreed on
        found.append((theta[2, order], weights[2, order], scale[2]))
    for alone, beside in zip(*found, strict=True):
        assert torch.equal(alone, beside)


def test_the_own_metric_is_that_of_rows_about_the_first_fit() -> None:
    xs, family = long_groups(1.0), Gaussian(2, "full")
    shared = {
        "family": family, "n_components": 2, "restarts": 5, "iterations": 10, "own_metric": False, "rough": False,
        "scale": family.unit_scale()[None], "key": torch.tensor([7]),
    }  # fmt: skip
    own, kept = fit_locally(shared | {"own_metric": True}, {}, {}, one_block(ragged(xs, None)))
    for k, x in enumerate(xs):
        alone = one_block(ragged([x], None, [f"c{k:04d}"]))
        first, _ = fit_locally(shared | {"rough": True}, {}, {}, alone)
        left = x - first["theta"][0, 0][torch.cdist(x, first["theta"][0, 0]).argmin(1)]
        covariance = (left.T @ left + torch.eye(2)) / (len(x) + 1)
        scale = kept["own_scale"][0, k]
        torch.testing.assert_close(torch.linalg.inv(scale @ scale.T), covariance, atol=1e-3, rtol=1e-5)  # and a floor
        in_it, _ = fit_locally(shared | {"scale": scale[None]}, {}, {}, alone)
        torch.testing.assert_close(own["theta"][0, k], in_it["theta"][0, 0])
    assert kept["has_scale"].all()


@pytest.mark.parametrize("family", [Gaussian(2, "full"), Gaussian(2, "diagonal"), Regression(2, variance="estimated")])
def test_one_further_row_of_unit_variance_keeps_the_own_scale_of_few_rows_from_vanishing(family: Family) -> None:
    xs = [torch.zeros(n, 2, dtype=torch.float64) for n in (1, 3, 0)]  # copies: nothing scatters
    data = one_block(ragged(xs, [x[:, 0] for x in xs]))
    theta = torch.zeros(1, 3, 1, family.n_parameters, dtype=torch.float64)
    gamma = data.real[None, ..., None].to(torch.float64)
    scale = own_scale(family, family.scatter(theta, gamma, data), data)[0]
    variance = 1 / (data.n + 1).to(torch.float64)  # (0 + 1) / (n + 1)
    if isinstance(family, Gaussian):
        covariance = torch.linalg.inv(scale @ scale.mT)
        expected = variance[:, None, None] * torch.eye(2, dtype=torch.float64)
        torch.testing.assert_close(covariance, expected, atol=0, rtol=1e-5)  # a trace of a floor
    else:
        torch.testing.assert_close(scale.square().reciprocal(), variance, atol=0, rtol=1e-5)


def test_own_scales_of_known_variances_are_the_unit() -> None:
    data = one_block(ragged([torch.randn(4, 2).double(), torch.randn(9, 2).double()], None))
    theta, gamma = torch.zeros(1, 2, 1, 2).double(), data.real[None, ..., None].double()
    scale = own_scale(Gaussian(2), Gaussian(2).scatter(theta, gamma, data), data)
    assert torch.equal(scale, torch.eye(2, dtype=torch.float64).expand_as(scale))


def test_of_starts_that_are_as_likely_but_for_rounding_the_first_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    family, data = Regression(2), one_block(ragged([torch.ones(4, 2).double()] * 2, [torch.ones(4).double()] * 2))
    merit = torch.tensor([[-1.0, -2.0], [-1.0 + 1e-12, -1.5], [-3.0, -1.5 + 1e-12], [-4.0, -1.6]], dtype=torch.float64)
    theta = torch.arange(4.0, dtype=torch.float64)[:, None, None, None].expand(4, 2, 3, 2)  # says which start it is
    monkeypatch.setattr(mixture_starts, "_anneal", lambda *given: (theta, merit))
    shared = {"family": family, "n_components": 3, "restarts": 4, "iterations": 1}
    scale = torch.ones(1, 1, dtype=torch.float64)
    found = mixture_starts._best_start(shared, torch.tensor([7]), scale, data)
    assert found[0, :, 0, 0].tolist() == [0.0, 1.0]
