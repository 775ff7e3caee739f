# SPDX-License-Identifier: Apache-2.0
"""Starts of mixtures: as good as scikit-learn's, the same for all who begin alike, and nobody's outliers in the scale."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture

from coterie.algorithms import mixture_starts
from coterie.algorithms.fedgrem import fedgrem
from coterie.algorithms.mixture_starts import MixtureStart, fit_locally
from coterie.data.mixtures import matched, planted_mixture
from coterie.engines.in_process import InProcess
from coterie.models.mixtures import Gaussian, Regression
from helpers import ragged, run_one


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
        "scale": torch.ones(1, dtype=torch.float64), "key": torch.tensor([7]),
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
