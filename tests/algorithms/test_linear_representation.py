# SPDX-License-Identifier: Apache-2.0
"""Algorithm 2: heads against numpy's least squares, a round by hand, the planted subspace; the plant, and distances."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor

from coterie.algorithms.linear_representation import State, improve_representation, linear_representation, random_start
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.studies.data.representations import PlantedRepresentation, principal_distance
from coterie.studies.data.representations import linear_representation as plant
from helpers import Late, federation, one_block, ragged, run_one, spying

D, K = 12, 3


def planted(**changes: Any) -> PlantedRepresentation:
    sizes: dict[str, Any] = {"n_clients": 40, "rows": 60, "n_features": D, "rank": K, "noise": 0.1, "seed": 1}
    return plant(**(sizes | changes))


def options(**changes: Any) -> dict[str, Any]:
    return {"n_features": D, "rank": K, "rounds": 20, "step_size": 0.125, "seed": 0, **changes}


def fit(rows: Ragged, **changes: Any) -> tuple[list[State], Tensor]:
    """All states that a run saves, and the clients' heads."""
    states: list[State] = []
    _, _, engine = run_one(spying(lambda state: linear_representation(state, **options(**changes)), states), rows)
    return states, engine.worker.private[0]["head"] if changes.get("rounds", 1) else torch.zeros(0)


def distances(states: list[State], basis: Tensor) -> list[float]:
    return [float(principal_distance(state.theta, basis)) for state in states]


# -- heads ------------------------------------------------------------------------------------------------------------
def test_heads_are_numpys_least_squares() -> None:
    data = federation((9, 4, 2, 1, 7))  # of two columns: well determined, just so, and not at all
    start = random_start(3, 2, seed=5)
    _, heads = fit(data.rows, n_features=3, rank=2, rounds=1, start=start)
    for x, y, head in zip(data.xs, data.ys, heads, strict=True):
        want = np.linalg.lstsq((x @ start).numpy(), y.numpy(), rcond=None)[0]  # the shortest where many fit
        np.testing.assert_allclose(head.numpy(), want, rtol=0, atol=1e-8)


def test_a_client_with_fewer_rows_than_a_batch_uses_all_of_them() -> None:
    data = federation((20, 60))
    start = random_start(3, 2, seed=5)
    _, heads = fit(data.rows, n_features=3, rank=2, rounds=1, start=start, batch_size=30)
    few, many = (np.linalg.lstsq((x @ start).numpy(), y.numpy())[0] for x, y in zip(data.xs, data.ys, strict=True))
    np.testing.assert_allclose(heads[0].numpy(), few, rtol=0, atol=1e-8)
    assert np.abs(heads[1].numpy() - many).max() > 1e-3


def test_a_client_without_rows_has_no_head_and_no_say() -> None:
    full = federation((9, 4, 7))
    with_one_more = full.plus("z", full.xs[0][:0], full.ys[0][:0])
    few, _ = fit(full.rows, n_features=3, rank=2, rounds=2)
    more, heads = fit(with_one_more.rows, n_features=3, rank=2, rounds=2)
    torch.testing.assert_close(few[-1].theta, more[-1].theta, rtol=0, atol=1e-12)
    assert not heads[3].any()


# -- a round ----------------------------------------------------------------------------------------------------------
def test_one_round_matches_hand_calculation() -> None:
    # D = 2, K = 1, B = (1, 0). Client 1 has rows (1, 0) -> 2 and (1, 1) -> 4: w = (2 + 4) / 2 = 3, residuals -1 and 1;
    # X^T r / m = (0, 1/2), so B moves by eta (0, 1/2) w = eta (0, 3/2). Client 2 has row (2, 1) -> 2: w = 1, residual 0.
    # With eta = 2/3 the mean is B = (1, 1/2), of length sqrt(5) / 2. The losses are (1 + 1) / (2 * 2) = 1/2 and 0.
    xs = [torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double(), torch.tensor([[2.0, 1.0]]).double()]
    ys = [torch.tensor([2.0, 4.0]).double(), torch.tensor([2.0]).double()]
    start = torch.tensor([[1.0], [0.0]]).double()
    how = options(n_features=2, rank=1, rounds=1, step_size=2 / 3, start=start)
    state, done, engine = run_one(lambda s: linear_representation(s, **how), ragged(xs, ys))
    assert state.theta[:, 0].tolist() == pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5)])
    assert engine.worker.private[0]["head"][:, 0].tolist() == pytest.approx([3.0, 1.0])
    assert done.rounds[-1].info["loss"] == pytest.approx(0.25)
    # By rows: (2 * (1, 1) + (1, 0)) / 3 = (1, 2/3), of length sqrt(13) / 3.
    state, done, _ = run_one(lambda s: linear_representation(s, **how, weighting="rows"), ragged(xs, ys))
    assert state.theta[:, 0].tolist() == pytest.approx([3 / math.sqrt(13), 2 / math.sqrt(13)])
    assert done.rounds[-1].info["loss"] == pytest.approx(1 / 3)


def test_the_step_is_the_gradient_of_half_the_mean_squared_residual() -> None:
    data = planted(n_clients=4)
    block = one_block(data.rows)
    theta = random_start(D, K, seed=2).requires_grad_()
    shared = {"theta": theta[None].detach(), "step_size": torch.ones(1).double(), "key": torch.zeros(1).long()}
    shared |= {"round": 1, "batch_size": None, "by_rows": False}  # type: ignore[dict-item]
    reply, private = improve_representation(shared, {}, {}, block)
    residual = block.target - (block.x @ theta @ private["head"][0][..., None])[..., 0]
    for i in range(4):
        (gradient,) = torch.autograd.grad(residual[i].square().mean() / 2, theta, retain_graph=True)
        torch.testing.assert_close(reply["update"][0, i], -gradient)


def test_the_representation_stays_orthonormal_and_a_round_changes_it_little() -> None:
    states, _ = fit(planted().rows, start="random", step_size=1e-6)
    for state in states:
        torch.testing.assert_close(state.theta.T @ state.theta, torch.eye(K).double())
    # No column changes its sign, so that the heads that clients keep still fit.
    torch.testing.assert_close(states[-1].theta, states[0].theta, rtol=0, atol=1e-3)


# -- batches ----------------------------------------------------------------------------------------------------------
def test_batches_are_fresh_until_all_rows_were_used() -> None:
    # Row j has the feature 2^j and the target 1, and B = 1: the head, sum(x) / sum(x^2), tells which rows were used.
    x = 2.0 ** torch.arange(6).double()
    rows = ragged([x[:, None]], [torch.ones(6).double()])
    seen = []
    for rounds in range(1, 7):
        _, heads = fit(rows, n_features=1, rank=1, rounds=rounds, batch_size=2, start=torch.ones(1, 1).double())
        pairs = [(a, b) for a in range(6) for b in range(a) if _head(x[[a, b]]) == pytest.approx(float(heads[0, 0]))]
        assert len(pairs) == 1
        seen.append(set(pairs[0]))
    assert seen[0] & seen[1] == set()  # of the first shuffling, whose first batch was for the start
    assert seen[2] | seen[3] | seen[4] == set(range(6))  # the second


def _head(x: Tensor) -> float:
    return float(x.sum() / x.square().sum())


# -- starts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weighting", ["clients", "rows"])
def test_the_method_of_moments_finds_the_leading_subspace_of_the_mean_of_p(weighting: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    truth = planted()
    xs = [torch.randn(n, D, generator=draw).double() for n in range(60, 100)]
    ys = [x @ truth.basis @ head for x, head in zip(xs, truth.heads, strict=True)]
    each = torch.stack([(y[:, None] ** 2 * x).T @ x / len(x) for x, y in zip(xs, ys, strict=True)])
    weight = torch.tensor([len(x) if weighting == "rows" else 1 for x in xs]).double()
    p = (each * weight[:, None, None]).sum(0) / weight.sum()
    want = torch.linalg.eigh(p).eigenvectors[:, -K:]
    (state,), _ = fit(ragged(xs, ys), rounds=0, weighting=weighting)
    assert float(principal_distance(state.theta, want)) < 1e-3


def test_the_method_of_moments_beats_a_random_start() -> None:
    for seed in range(5):
        data = planted(seed=seed)
        curves = [distances(fit(data.rows, start=start, seed=seed)[0], data.basis) for start in ("moments", "random")]
        assert all(moments < random for moments, random in zip(*curves, strict=True))
        assert curves[0][0] < 0.6 < curves[1][0]


def test_a_start_that_nobody_answered_is_random_and_says_so() -> None:
    engine = InProcess(planted().rows, participation=Late(silent=(0,)))
    done = engine.run([lambda state: linear_representation(state, **options(rounds=0))])
    assert torch.equal(done.states[0].theta, random_start(D, K, seed=0))
    assert "random start" in done.rounds[0].info["events"][0]


# -- recovery ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("start", ["moments", "random"])
def test_finds_the_planted_subspace_exactly_where_there_is_no_noise(start: Any) -> None:
    data = planted(noise=0.0)
    states, heads = fit(data.rows, start=start, rounds=300)
    # Heads are spread evenly, so that distances shrink by about 1 - 1/8 a round: 0.875^300 is 1e-17.
    assert float(principal_distance(states[-1].theta, data.basis)) < 1e-8
    models = heads @ states[-1].theta.T  # [M, D]
    torch.testing.assert_close(models, data.heads @ data.basis.T, rtol=0, atol=1e-7)


def test_the_distance_falls_exponentially() -> None:
    data = planted(noise=0.0, n_clients=100)
    far = np.log(distances(fit(data.rows, rounds=60, batch_size=30)[0], data.basis))
    slope, intercept = np.polyfit(np.arange(61), far, 1)
    assert np.exp(slope) == pytest.approx(1 - 1 / 8, abs=0.03)
    assert np.abs(far - slope * np.arange(61) - intercept).max() < 0.5


def test_more_clients_get_closer_where_there_is_noise() -> None:
    """The error of the subspace has variance in proportion to 1 / clients: a sixteenth of them, four times as far."""
    far: dict[int, list[float]] = {32: [], 512: []}
    for n_clients, of_seeds in far.items():
        for seed in range(6):
            data = planted(n_clients=n_clients, noise=0.5, seed=seed)
            of_seeds.append(distances(fit(data.rows, rounds=60)[0], data.basis)[-1])
    assert np.mean(far[32]) / np.mean(far[512]) == pytest.approx(4, rel=0.2)


# -- the plant, and distances -----------------------------------------------------------------------------------------
def test_the_plant_meets_the_papers_assumptions() -> None:
    data = planted(n_clients=500, rows=100, noise=0.5)
    torch.testing.assert_close(data.basis.T @ data.basis, torch.eye(K).double())
    torch.testing.assert_close(data.heads.norm(dim=1), torch.full((500,), math.sqrt(K)).double())  # Assumption 4.4
    # W^T W / M is near the identity: standard error of an entry about sqrt(K / 500) = 0.08.
    torch.testing.assert_close(data.heads.T @ data.heads / 500, torch.eye(K).double(), rtol=0, atol=0.3)
    block = one_block(data.rows)
    x = block.x.flatten(0, 1)
    torch.testing.assert_close(x.T @ x / len(x), torch.eye(D).double(), rtol=0, atol=5 * math.sqrt(2 / 50_000))
    residual = block.target - torch.einsum("cnd,cd->cn", block.x, data.heads @ data.basis.T)
    assert float(residual.std()) == pytest.approx(0.5, rel=0.02)


def test_more_clients_keep_the_planted_representation() -> None:
    few, many = planted(n_clients=2), planted(n_clients=9, rows=3)
    assert torch.equal(few.basis, many.basis)


@pytest.mark.parametrize("wrong", [{"n_clients": 0}, {"rows": 0}, {"rank": 0}, {"rank": 13}, {"noise": -1.0}])
def test_a_plant_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        planted(**wrong)
    assert raised.value.hint


def test_distance_by_hand() -> None:
    # The x-y plane against the plane of the x axis and (0, cos 30, sin 30): the sine of the largest angle is 1/2.
    a = torch.eye(3).double()[:, :2]
    b = torch.tensor([[1.0, 0.0], [0.0, math.cos(math.pi / 6)], [0.0, 0.5]]).double()
    assert float(principal_distance(a, b)) == pytest.approx(0.5)
    assert float(principal_distance(a, a.flip(0))) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_distance_is_the_sine_of_the_largest_principal_angle(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(2, D, K, generator=draw).double()
    b = a + size * torch.randn(2, D, K, generator=draw).double()
    change = torch.randn(K, K, generator=draw).double()  # other columns of the same space
    got = principal_distance(a, b @ change)
    for i in range(2):
        want = math.sin(subspace_angles(a[i].numpy(), (b[i] @ change).numpy()).max())
        assert float(got[i]) == pytest.approx(want, rel=1e-5)  # 1e-9 away, rounding is 1e-16 times a condition number
    torch.testing.assert_close(principal_distance(b @ change, a), got, rtol=1e-5, atol=0)
