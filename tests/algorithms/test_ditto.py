# SPDX-License-Identifier: Apache-2.0
"""Ditto against hand calculation, against local models and FedAvg at the ends of lambda, and where it should help."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import coterie
from coterie.algorithms.ditto import ditto, new_client
from coterie.algorithms.fedavg import State, fedavg
from coterie.algorithms.fedrep import first_model
from coterie.data.ragged import Ragged
from coterie.local import Training
from coterie.models import linear_regression
from helpers import LINE, NET, STEPS, Federation, federation, run_one

SLOPE = linear_regression(1, intercept=False)  # w x, squared error
TIGHT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def by_hand(rounds: int, **options: Any) -> tuple[float, list[float]]:
    """A: the row (1, 2).  B: the row (1, 4).  A step of 0.1 with each model, from w = 1."""
    data = Federation([column(1), column(1)], [column(2)[:, 0], column(4)[:, 0]], ["a", "b"])
    begin = State(torch.ones(1, dtype=torch.float64))
    how: dict[str, Any] = {"model": SLOPE, "step_size": 0.1, "seed": 0, "training": Training(steps=1), **options}
    state, _, engine = run_one(lambda s: ditto(s or begin, rounds=rounds, **how), data.rows)
    return float(state.theta), engine.worker.private[0]["theta"].flatten().tolist()


def test_one_round_and_a_second_match_hand_calculation() -> None:
    # Gradients 2 (w - y): A's w goes to 1 + 0.2 = 1.2, B's to 1 + 0.6 = 1.6, the mean to 1.4. Own models begin at w, where
    # nothing pulls: 1.2 and 1.6 too.
    assert by_hand(1, lam=0.5) == (pytest.approx(1.4), pytest.approx([1.2, 1.6]))
    # From w = 1.4: A 1.4 + 0.12, B 1.4 + 0.52, the mean 1.72. Own: A 1.2 - 0.1 (2 (1.2 - 2) + 0.5 (1.2 - 1.4)) = 1.37;
    # B 1.6 - 0.1 (2 (1.6 - 4) + 0.5 (1.6 - 1.4)) = 2.07.
    assert by_hand(2, lam=0.5) == (pytest.approx(1.72), pytest.approx([1.37, 2.07]))


def test_steps_that_lambda_would_make_diverge_are_shortened() -> None:
    assert new_client(0.1, STEPS, 5.0)[0] == 0.1
    assert new_client(0.1, STEPS, 50.0)[0] == 0.02
    # Own steps of 0.02 in the second round: A 1.04 - 0.02 (2 (1.04 - 2) + 50 (1.04 - 1.4)) = 1.4384; B 1.4 + 0.02 2 2.88.
    assert by_hand(2, lam=50.0) == (pytest.approx(1.72), pytest.approx([1.4384, 1.5152]))


def test_the_common_model_is_fedavgs_whatever_lambda_is() -> None:
    how: dict[str, Any] = {"model": NET, "rounds": 3, "step_size": 0.05, "seed": 1, "training": STEPS}
    wanted, _, _ = run_one(lambda s: fedavg(s, weighting="clients", **how), federation().rows)
    for lam in (0.0, 1.0, 1e6):
        found, _, _ = run_one(lambda s, lam=lam: ditto(s, lam=lam, **how), federation().rows)
        torch.testing.assert_close(found.theta, wanted.theta, **TIGHT)


def own_models(lam: float, rows: Ragged) -> tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"model": LINE, "rounds": 30, "step_size": 0.05, "seed": 1, "training": STEPS}
    state, _, engine = run_one(lambda s: ditto(s, lam=lam, **how), rows)
    return state.theta, engine.worker.private[0]["theta"]


def test_lambda_0_leaves_clients_alone_and_a_large_one_gives_all_the_common_model() -> None:
    data = federation((9, 12, 15, 20))
    _, alone = own_models(0.0, data.rows)
    for c in range(4):  # gradient descent alone, 30 rounds of 3 steps, from the same start
        z = torch.cat([data.xs[c], torch.ones(len(data.xs[c]), 1, dtype=torch.float64)], 1)
        w = first_model(LINE, 1)
        for _ in range(90):
            w = w - 0.05 * 2 * z.T @ (z @ w - data.ys[c]) / len(z)
        torch.testing.assert_close(alone[c], w, rtol=1e-9, atol=1e-9)
    common, near = own_models(1e6, data.rows)
    torch.testing.assert_close(
        near, common.expand(4, -1), rtol=0, atol=1e-3
    )  # own gradients over lambda, and w's last move
    assert (alone - common).abs().amax() > 1


def test_models_that_differ_a_little_are_found_better_than_alone_or_together() -> None:
    # 24 clients with 8 rows of 5 features each, whose slopes are a common vector plus 0.3 times their own.
    draw = np.random.default_rng(0)
    truth = draw.normal(size=5) + 0.3 * draw.normal(size=(24, 5))
    x = draw.normal(size=(24, 8, 5))
    y = np.einsum("cnd,cd->cn", x, truth) + 0.5 * draw.normal(size=(24, 8))
    names, flat = np.repeat([f"s{i:02d}" for i in range(24)], 8), x.reshape(-1, 5)
    new_x = draw.normal(size=(24, 50, 5))
    groups, there = np.repeat([f"s{i:02d}" for i in range(24)], 50), new_x.reshape(-1, 5)
    wanted = np.einsum("cnd,cd->cn", new_x, truth).reshape(-1)

    def error(lam: float) -> float:
        model = coterie.Ditto(lam=lam, rounds=20).fit(flat, y.reshape(-1), names)
        return float(np.mean((model.predict(there, groups=groups) - wanted) ** 2))

    alone, some, together = error(0.0), error(0.5), error(1e6)
    assert some < 0.8 * min(alone, together)


def test_a_new_client_begins_at_the_common_model_and_takes_the_same_steps() -> None:
    data = federation((12, 12, 12, 12))
    x, y = torch.cat(data.xs).numpy(), torch.cat(data.ys).numpy()
    groups = np.repeat(data.names, 12)
    known = coterie.Ditto(lam=2.0, rounds=2, batch_size=100, body_epochs=4, step_size=0.05, standardise=False)
    known.fit(x[:36], y[:36], groups[:36])
    z, target = np.column_stack([x[36:], np.ones(12)]), y[36:] - float(known.scaling_.y_mean)
    w = v = known.theta_.numpy()
    for _ in range(4):  # passes over one batch
        v = v - 0.05 * (2 * z.T @ (z @ v - target / float(known.scaling_.y_scale)) / 12 + 2.0 * (v - w))
    np.testing.assert_allclose(known.assign(x[36:], y[36:], groups[36:]).own[0].numpy(), v, rtol=1e-9)
