# SPDX-License-Identifier: Apache-2.0
"""FedGrEM's central update against an independent convex solver, its first-order condition, and cases solved by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from coterie.algorithms.central import central_update, central_weights, shrunk

Problem = tuple[np.ndarray, np.ndarray, float]


def problem(seed: int, lam: float, counts: list[int]) -> Problem:
    """Four points about 0 and one that is far.  tilde [M, P], n [M]"""
    tilde = np.random.default_rng(seed).normal(size=(5, 3))
    tilde[4] += [6, 0, 0]
    return tilde, np.array(counts), lam


def ours(tilde: np.ndarray, n: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """nu [M, P] and the centre [P]."""
    at, rows = torch.from_numpy(tilde)[:, None], torch.from_numpy(n)
    centre = central_update(at, rows, lam, at.median(0).values)
    return shrunk(at, centre, lam / rows.sqrt()[:, None])[:, 0].numpy(), centre[0].numpy()


def value(nu: np.ndarray, centre: np.ndarray, tilde: np.ndarray, n: np.ndarray, lam: float) -> float:
    fit = n / 2 * ((nu - tilde) ** 2).sum(1)
    return float((fit + np.sqrt(n) * lam * np.linalg.norm(nu - centre, axis=1)).sum())


def bound(tilde: np.ndarray, n: np.ndarray, lam: float) -> tuple[float, np.ndarray]:
    """No point of the joint problem in nu and the centre has a smaller value: its dual, solved by SLSQP.

    For any u with sum_k u_k = 0 and |u_k| <= sqrt(n_k) lam, sum_k <u_k, tilde_k> - |u_k|^2 / (2 n_k) is a lower bound;
    at the best u, nu_k = tilde_k - u_k / n_k.
    """
    size = np.sqrt(n) * lam  # u = size * v, so that |v| <= 1
    curve = size**2 / n

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = flat.reshape(tilde.shape)
        dual = (size * (v * tilde).sum(1) - curve / 2 * (v**2).sum(1)).sum()
        return -float(dual), -(size[:, None] * tilde - curve[:, None] * v).ravel()

    def balls(flat: np.ndarray) -> np.ndarray:
        return np.asarray(1 - (flat.reshape(tilde.shape) ** 2).sum(1))

    def inward(flat: np.ndarray) -> np.ndarray:
        return -2 * np.kron(np.eye(len(n)), np.ones(tilde.shape[1])) * flat

    balance = np.kron(size, np.eye(tilde.shape[1]))  # [P, M P]
    found = minimize(
        objective, np.zeros(tilde.size), jac=True, method="SLSQP", options={"maxiter": 500, "ftol": 1e-13},
        constraints=[{"type": "ineq", "fun": balls, "jac": inward},
                     {"type": "eq", "fun": lambda v: balance @ v, "jac": lambda _: balance}],
    )  # fmt: skip
    assert balls(found.x).min() > -1e-7
    assert np.abs(balance @ found.x).max() < 1e-7 * size.max()
    return -float(found.fun), tilde - size[:, None] / n[:, None] * found.x.reshape(tilde.shape)


COUNTS = [[20, 20, 20, 20, 20], [3, 10, 40, 200, 15], [1, 1, 1, 1, 500]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("lam", [0.05, 0.5, 3.0, 20.0, 200.0])
def test_the_point_is_the_best_of_the_joint_problem(lam: float, counts: list[int]) -> None:
    for seed in range(3):
        case = problem(seed, lam, counts)
        nu, centre = ours(*case)
        least, other = bound(*case)
        assert value(nu, centre, *case) == pytest.approx(least, rel=1e-7)
        np.testing.assert_allclose(nu, other, atol=1e-3)  # the solver stops when the value does not change any more


def test_the_first_order_condition_holds() -> None:
    # The centre's gradient is the sum of soft-thresholded pulls: it must vanish, whatever a solver says.
    draw = torch.Generator().manual_seed(1)
    tilde, n = torch.randn(30, 4, 6, generator=draw, dtype=torch.float64), torch.arange(1, 31)
    tilde[:5] += 10
    for lam in (0.1, 1.0, 5.0):
        centre = central_update(tilde, n, lam, torch.zeros(4, 6, dtype=torch.float64))
        pull = n[:, None, None] * (tilde - shrunk(tilde, centre, lam / n.sqrt()[:, None].expand(-1, 4)))
        left = pull.sum(0) / n.sum()  # about as far as the centre is from the best one
        torch.testing.assert_close(left, torch.zeros(4, 6, dtype=torch.float64), atol=1e-7, rtol=0)


def test_components_do_not_depend_on_each_other_nor_the_centre_on_where_it_begins() -> None:
    draw = torch.Generator().manual_seed(2)
    tilde, n = torch.randn(12, 3, 2, generator=draw, dtype=torch.float64), torch.arange(3, 15)
    together = central_update(tilde, n, 2.0, torch.zeros(3, 2, dtype=torch.float64))
    for r in range(3):
        alone = central_update(tilde[:, r : r + 1], n, 2.0, torch.full((1, 2), 5.0, dtype=torch.float64))
        torch.testing.assert_close(together[r], alone[0], atol=1e-7, rtol=0)


def test_weights_sum_to_one_and_are_those_of_the_rows_for_clients_nearby() -> None:
    tilde = torch.tensor([[[0.0]], [[0.1]], [[0.2]], [[50.0]]], dtype=torch.float64)
    weight = central_weights(tilde, torch.tensor([10, 20, 30, 40]), 5.0, torch.zeros(1, 1, dtype=torch.float64))
    assert float(weight.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(weight[:3, 0, 0] / weight[0, 0, 0], torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert float(weight[3] / weight[0]) < 0.1  # 4 if it were near


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


# -- a sparse centre --------------------------------------------------------------------------------------------------
def column(*values: float) -> Tensor:
    """One component of one parameter.  [M, 1, 1]"""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


@pytest.mark.parametrize(("tau", "expected"), [(0.0, 5 + 4 / 12), (2.0, 5 + 2 / 12), (10.0, 4.5), (17.0, 0.0)])
def test_a_sparse_centre_is_that_of_the_hand_calculation(tau: float, expected: float) -> None:
    # Three clients at 5, one at 13, four rows each, lambda 2: who is more than 1 away pulls with 4. Within 1 of 5,
    # 3 * 4 (c - 5) - 4 + tau = 0. All four pull a centre of 0 by 16 in all, less than a tau of 17.
    tilde, n = column(5, 5, 5, 13), torch.full((4,), 4)
    assert float(central_update(tilde, n, 2.0, column(5)[0], tau)) == pytest.approx(expected, abs=1e-7)


def test_a_sparse_mean_and_sparse_steps_are_those_of_the_hand_calculation() -> None:
    mean = central_update(torch.tensor([[[2.0, 0.2]], [[4.0, -1.0]]]).double(), torch.tensor([4, 8]), math.inf,
                          torch.zeros(1, 2).double(), 12.0)  # fmt: skip
    assert mean.flatten().tolist() == pytest.approx([10 / 3 - 1, 0.0])  # the mean (10 / 3, -0.6), by 12 / (4 + 8)
    # Thresholds are 8 / 16. The mean 2 becomes 1.5; then tilde - D is 0.5 three times and 2.5, whose mean 1 becomes 0.5.
    tilde, n = column(0, 0, 0, 8), torch.full((4,), 4)
    centre = [float((central_weights(tilde, n, 2.0, tilde[0], k, 8.0) * tilde).sum()) for k in (0, 1)]
    assert centre == pytest.approx([1.5, 0.5])


@pytest.mark.parametrize("steps", [None, 300])
def test_the_first_order_condition_of_a_sparse_centre_holds(steps: int | None) -> None:
    # What clients pull is balanced by tau where the centre is not 0, and at most tau where it is.
    draw = torch.Generator().manual_seed(1)
    tilde, n = torch.randn(30, 2, 6, generator=draw, dtype=torch.float64), torch.arange(1, 31)
    tilde[:, :, :3] += 2
    lam, tau = 3.0, 60.0
    weight = central_weights(tilde, n, lam, torch.zeros(2, 6, dtype=torch.float64), steps, tau)
    centre = (weight * tilde).sum(0)
    pull = (n[:, None, None] * (tilde - shrunk(tilde, centre, lam / n.sqrt()[:, None].expand(-1, 2)))).sum(0)
    assert (centre != 0).tolist() == [[True] * 3 + [False] * 3] * 2
    torch.testing.assert_close(pull[:, :3], torch.full((2, 3), tau, dtype=torch.float64), atol=1e-5, rtol=0)
    assert float(pull[:, 3:].abs().max()) < tau


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_shrinking_moves_towards_the_centre_by_the_reach_and_never_beyond() -> None:
    tilde, centre = torch.stack([vector(4, 5), vector(1, 1.5)]), vector(1, 1)  # 5 and 0.5 away
    torch.testing.assert_close(shrunk(tilde, centre, vector(1, 1)), torch.stack([vector(3.4, 4.2), centre]))
    # Lengths may be measured in other coordinates: halved, the first is 2.5 away, and 1 of those are two fifths.
    found = shrunk(tilde, centre, vector(1, 1), (tilde - centre) / 2)
    torch.testing.assert_close(found, torch.stack([centre + 0.6 * vector(3, 4), centre]))
