# SPDX-License-Identifier: Apache-2.0
"""The preset that is the loop of FedGrEM's authors: an uncapped step, and one step of the central update from the mean."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms.central import central_update, central_weights
from coterie.algorithms.fedgrem import estimates, fedgrem
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.engines.in_process import InProcess
from coterie.methods.mixture.fit import PRESETS
from coterie.models.mixtures import Family, Gaussian, Regression
from helpers import ragged

START = MixtureStart(restarts=3, iterations=8)


def authors_loop(
    xs: list[np.ndarray], ys: list[np.ndarray] | None, theta: np.ndarray, w: np.ndarray, rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """What their code does with as many rows at every client; theta [M, R, P], w [M, R]."""
    first, lam, (clients, components, p), n = w.copy(), 1.0, theta.shape, len(xs[0])
    for _ in range(rounds):
        tilde = np.empty_like(theta)
        for k, x in enumerate(xs):
            away = (
                x[:, None] - theta[k] if ys is None else (ys[k][:, None] - x @ theta[k].T)[..., None]
            )  # [N, R, P | 1]
            gamma = w[k] * np.exp(-(away**2).sum(-1) / 2)
            gamma /= gamma.sum(1, keepdims=True)
            w[k] = gamma.mean(0)
            gradient = away if ys is None else away * x[:, None]
            tilde[k] = theta[k] + 0.95 / first[k][:, None] * (gamma[..., None] * gradient).mean(0)
        lam = 0.1 * lam + 2.0 * math.sqrt(p + math.log(clients))
        for r in range(components):
            centre = tilde[:, r].mean(0)
            for _ in range(2):  # the differences of the first time give the centre, those of the second the estimates
                away = tilde[:, r] - centre
                left = np.maximum(1 - lam / math.sqrt(n) / np.linalg.norm(away, axis=1), 0)[:, None] * away
                theta[:, r] = centre + left
                centre = (tilde[:, r] - left).mean(0)
    return theta, w


@pytest.mark.parametrize("kind", ["gmm", "mor"])
def test_six_rounds_equal_the_authors_loop(kind: str) -> None:
    draw = np.random.default_rng(1)
    sign = 1 - 2 * (np.arange(60) % 2)
    xs = [draw.normal(size=(60, 2)) for _ in range(4)]
    ys = None
    family: Family = Gaussian(2)
    if kind == "gmm":
        xs = [x + 1.5 * sign[:, None] + 3 * (k == 3) for k, x in enumerate(xs)]  # the last is an outlier
    else:
        family = Regression(2)
        ys = [2 * (1 + (k == 3)) * sign * x[:, 0] + 0.5 * draw.normal(size=60) for k, x in enumerate(xs)]
    engine = InProcess(ragged([torch.from_numpy(x) for x in xs], ys and [torch.from_numpy(y) for y in ys]))
    how: dict[str, Any] = {"family": family, "n_components": 2, "seed": 0, "start": START, **PRESETS["fedgrem-exact"]}
    engine.run([partial(fedgrem, rounds=0, **how)])
    first = {name: value.clone().numpy() for name, value in engine.worker.private[0].items()}
    state = engine.run([partial(fedgrem, rounds=6, **how)]).states[0]
    theta, w = authors_loop(xs, ys, first["tilde"], first["weights"], 6)
    found = estimates(state, family, engine.worker.private[0], torch.full((4,), 60), "norm")
    np.testing.assert_allclose(found.numpy(), theta, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(engine.worker.private[0]["weights"].numpy(), w, rtol=1e-9)


def test_one_step_of_the_central_update_is_not_where_it_ends() -> None:
    # Three clients at 0, one at 8, four rows each, lambda 2: whatever is more than 1 away counts as 1.
    tilde, n = torch.tensor([0.0, 0.0, 0.0, 8.0]).double().view(4, 1, 1), torch.full((4,), 4)
    centre = [float((central_weights(tilde, n, 2.0, tilde[0], k) * tilde).sum()) for k in (0, 1, 2, 200)]
    # the mean 2; then 2 + (-1 - 1 - 1 + 1) / 4; then 1.5 + (-1 - 1 - 1 + 1) / 4; in the end 3 c = 1
    assert centre == pytest.approx([2.0, 1.5, 1.0, 1 / 3])
    assert float(central_update(tilde, n, 2.0, tilde[0])) == pytest.approx(1 / 3)
    uneven = central_weights(tilde, torch.tensor([1, 1, 1, 9]), 2.0, tilde[0], 1)
    # the mean 6; 2 is as far as one row counts and 2 / 3 as far as nine do: 6 - 3 * 2 / 12 + 9 * (2 / 3) / 12
    assert float((uneven * tilde).sum()) == pytest.approx(6.0)
    torch.testing.assert_close(uneven.sum(0), torch.ones(1, 1, dtype=torch.float64))


def test_an_uncapped_step_that_diverges_stays_a_number() -> None:
    rows = ragged([1e3 * torch.randn(20, 2, generator=torch.Generator().manual_seed(k)).double() for k in range(3)],
                  [torch.full((20,), 1e3).double()] * 3)  # fmt: skip
    engine = InProcess(rows)
    how: dict[str, Any] = {"family": Regression(2), "n_components": 2, "seed": 0, "start": START}
    state = engine.run([partial(fedgrem, rounds=15, **how, **PRESETS["fedgrem-exact"])]).states[0]
    assert state.centre.isfinite().all()
    assert float(engine.worker.private[0]["tilde"].abs().max()) == 1e4
