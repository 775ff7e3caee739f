# SPDX-License-Identifier: Apache-2.0
"""The mixed model of two classes against Laplace's approximation done client by client, and a planted truth."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from coterie.algorithms.mixed_logistic import LaplaceState, laplace_sums, mixed_logistic
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.protocol import Ask, Sum


def planted(seed: int, clients: int, rows: int, sd: tuple[float, float] = (1.0, 0.6)) -> tuple[Ragged, Any]:
    draw = np.random.default_rng(seed)
    groups = np.repeat([f"{i:03}" for i in range(clients)], rows)
    x = draw.normal(size=(len(groups), 2))
    own = np.repeat(draw.normal(size=(clients, 2)) * sd, rows, 0)
    odds = -0.5 + x @ [0.8, -0.4] + own[:, 0] + own[:, 1] * x[:, 0]
    y = (draw.random(len(groups)) < 1 / (1 + np.exp(-odds))).astype(np.int64)
    return Ragged.from_groups(torch.tensor(x), torch.tensor(y), groups), (x, y, groups)


def by_client(beta: np.ndarray, lower: np.ndarray, columns: list[int], data: Any) -> float:
    """The deviance, with scipy's mode for each client."""
    x, y, groups = data
    w = np.column_stack([x, np.ones(len(y))])
    total = 0.0
    for name in np.unique(groups):
        at = groups == name
        z, fixed, mine = w[at][:, columns] @ lower, w[at] @ beta, y[at]

        def h(u: np.ndarray, z: np.ndarray = z, fixed: np.ndarray = fixed, mine: np.ndarray = mine) -> float:
            odds = fixed + z @ u
            return float(np.logaddexp(0, odds).sum() - mine @ odds + u @ u / 2)

        u = minimize(h, np.zeros(len(columns)), method="BFGS", options={"gtol": 1e-9}).x
        p = 1 / (1 + np.exp(-(fixed + z @ u)))
        total += 2 * h(u) + np.linalg.slogdet(z.T @ (z * (p * (1 - p))[:, None]) + np.eye(len(columns)))[1]
    return float(total)


def sums(rows: Ragged, beta: Tensor, root: Tensor, columns: list[int]) -> Any:
    basis = torch.eye(3, dtype=torch.float64)[columns]
    shared = {"beta": beta, "root": root, "basis": basis}
    fields = ("deviance", "slope", "in_root", "information", "n", "there")
    return InProcess(rows).ask(Ask(laplace_sums, shared, {name: Sum() for name in fields}))


@pytest.mark.parametrize("columns", [[2], [2, 0]])
def test_deviance_and_gradient_are_those_of_every_client_alone(columns: list[int]) -> None:
    rows, data = planted(0, clients=6, rows=7)
    beta = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)
    size = len(columns)
    root = torch.tensor([[0.9, 0.2], [0.3, 0.5]], dtype=torch.float64)[:size, :size]

    def f(point: Tensor) -> float:
        return by_client(point[:3].numpy(), point[3:].view(size, size).numpy(), columns, data)

    got, at = sums(rows, beta, root, columns), torch.cat([beta, root.flatten()])
    assert float(got["deviance"]) == pytest.approx(f(at), abs=1e-7)
    unit = 1e-3 * torch.eye(len(at), dtype=torch.float64)
    slopes = [*got["slope"].tolist(), *got["in_root"].flatten().tolist()]
    assert slopes == pytest.approx([(f(at + e) - f(at - e)) / 2e-3 for e in unit], abs=1e-4)


def test_nothing_near_the_minimum_is_lower() -> None:
    rows, data = planted(1, clients=20, rows=12)
    basis = torch.eye(3, dtype=torch.float64)[[2, 0]]
    done = InProcess(rows).run(
        [partial(mixed_logistic, basis=basis, units=torch.eye(len(basis)).double(), order=(0, 1))]
    )
    state: LaplaceState = done.states[0]
    assert state.stage == 5
    assert len(done.rounds) - 1 < 30
    found = by_client(state.beta.numpy(), state.root.numpy(), [2, 0], data)
    assert float(state.deviance) == pytest.approx(found, abs=1e-6)
    assert float(state.slope.abs().max()) < 1e-4


def test_without_random_effects_it_is_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    rows, (x, y, _) = planted(2, clients=10, rows=20)
    basis = torch.eye(3, dtype=torch.float64)[[2]]
    state = (
        InProcess(rows)
        .run([partial(mixed_logistic, basis=basis, units=torch.eye(len(basis)).double(), order=(0, 1))])
        .states[0]
    )
    plain = LogisticRegression(C=1e10, tol=1e-10, max_iter=1000).fit(x, y)
    assert float(state.without) == pytest.approx(2 * log_loss(y, plain.predict_proba(x), normalize=False), rel=1e-7)


def test_recovers_a_planted_truth() -> None:
    """With 300 clients of 60 rows, within three standard errors or so."""
    rows, _ = planted(3, clients=300, rows=60)
    basis = torch.eye(3, dtype=torch.float64)[[2, 0]]
    state = (
        InProcess(rows)
        .run([partial(mixed_logistic, basis=basis, units=torch.eye(len(basis)).double(), order=(0, 1), diagonal=True)])
        .states[0]
    )
    assert state.beta.tolist() == pytest.approx([0.8, -0.4, -0.5], abs=0.2)
    assert state.root.diagonal().abs().tolist() == pytest.approx([1.0, 0.6], abs=0.15)


def test_clients_of_one_class_have_modes_far_out_and_finite() -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.tensor([1] * 20 + [0] * 20)
    rows = Ragged.from_groups(x, y, ["a"] * 20 + ["b"] * 20)
    beta = torch.zeros(3, dtype=torch.float64)
    got = sums(rows, beta, torch.tensor([[50.0]], dtype=torch.float64), [2])
    wanted = by_client(beta.numpy(), np.array([[50.0]]), [2], (x.numpy(), y.numpy(), np.array(["a"] * 20 + ["b"] * 20)))
    assert float(got["deviance"]) == pytest.approx(wanted, rel=1e-5)
