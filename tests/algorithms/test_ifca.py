# SPDX-License-Identifier: Apache-2.0
"""IFCA against hand calculation, against a plain-loop twin of Algorithm 1, and on planted truth."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.ifca import State, ifca
from coterie.algorithms.starts import Start
from coterie.engines.in_process import Finished, InProcess
from coterie.evaluate import adjusted_rand, match_models
from coterie.local import Training
from coterie.local.parts import part_of
from coterie.models import Dense, Model, linear_regression
from coterie.studies.data.synthetic import mixed_regression
from helpers import LINE, NET, STEPS, Federation, Late, Only, federation, ragged, run_one, spying

Program = Callable[[Any], Any]
SCALAR = linear_regression(1, intercept=False)
ONE_STEP = Training(steps=1)


def given(*theta: Any) -> Start:
    return Start("warm", theta=torch.tensor(theta, dtype=torch.float64).view(len(theta), -1))


def program(start: Start, *, model: Model = SCALAR, **changes: Any) -> Program:
    options: dict[str, Any] = {"rounds": 1, "step_size": 0.3, "seed": 0, "training": ONE_STEP} | changes
    options.setdefault("n_clusters", 2 if start.theta is None else len(start.theta))
    return lambda state: ifca(state, model=model, start=start, **options)


def after(
    start: Start, data: Federation, *, participation: Any = None, **changes: Any
) -> tuple[State, Finished, Tensor]:
    """Run: the last state, what happened, and the clients' labels."""
    state, finished, engine = run_one(program(start, **changes), data.rows, participation=participation)
    private = engine.worker.private.get(0, {})
    return state, finished, private.get("label", torch.full((len(data.xs),), -1))


def scalars(**clients: list[tuple[float, float]]) -> Federation:
    """Clients given by name and rows (x, y)."""
    table = [torch.tensor(rows, dtype=torch.float64).view(-1, 2) for rows in clients.values()]
    return Federation([t[:, :1] for t in table], [t[:, 1] for t in table], list(clients))


# theta = (0, 4). Losses: a 1, 9; b 25, 1; c (9 + 64) / 2, (1 + 0) / 2. So a is in cluster 0, b and c in cluster 1.
THREE = scalars(a=[(1, 1)], b=[(1, 5)], c=[(1, 3), (2, 8)])


# -- one round by hand ------------------------------------------------------------------------------------------------
def test_one_round_of_gradient_averaging_matches_hand_calculation() -> None:
    # Gradients: a 2 (0 - 1) = -2; b 2 (4 - 5) = -2; c mean(2 (4 - 3), 0) = 1. Divided by all 3, not by the cluster.
    state, finished, label = after(given(0.0, 4.0), THREE, averaging="gradient")
    assert state.theta[:, 0].tolist() == pytest.approx([0 + 0.3 / 3 * 2, 4 + 0.3 / 3 * (2 - 1)])
    assert label.tolist() == [0, 1, 1]
    info = finished.rounds[-1].info
    assert info["sizes"] == [1, 2]
    assert info["moved"] == 3
    assert info["loss"] == pytest.approx((1 * 1 + 1 * 1 + 2 * 0.5) / 4)  # over rows, of the models received
    assert info["events"] == []


def test_one_round_of_gradient_averaging_by_rows_matches_hand_calculation() -> None:
    state, _, _ = after(given(0.0, 4.0), THREE, averaging="gradient", weighting="rows")
    assert state.theta[:, 0].tolist() == pytest.approx([0 + 0.3 / 4 * 2, 4 + 0.3 / 4 * (2 - 2 * 1)])


def test_one_round_of_model_averaging_matches_hand_calculation() -> None:
    # One step of 0.3: a 0.6; b 4.6; c 3.7. Cluster 1: their plain mean; by rows (4.6 + 2 * 3.7) / 3.
    state, _, _ = after(given(0.0, 4.0), THREE)
    assert state.theta[:, 0].tolist() == pytest.approx([0.6, 4.15])
    state, _, _ = after(given(0.0, 4.0), THREE, weighting="rows")
    assert state.theta[:, 0].tolist() == pytest.approx([0.6, 4.0])


def test_two_local_steps_match_hand_calculation() -> None:
    # Second step: a 0.6 - 0.3 * 2 (0.6 - 1) = 0.84; b 4.6 + 0.24 = 4.84; c 3.7: mean(2 * 0.7, 4 (7.4 - 8)) = -0.5, 3.85.
    state, _, _ = after(given(0.0, 4.0), THREE, training=Training(steps=2))
    assert state.theta[:, 0].tolist() == pytest.approx([0.84, (4.84 + 3.85) / 2])


def test_one_round_of_averaging_over_everyone_matches_hand_calculation() -> None:
    # As above a makes 0.84 of 0, b 4.84 and c 3.85 of 4; those who chose the other model return it as it was.
    options: dict[str, Any] = {"average_over": "everyone", "training": Training(steps=2)}
    state, finished, _ = after(given(0.0, 4.0), THREE, weighting="rows", **options)
    assert state.theta[:, 0].tolist() == pytest.approx([(1 * 0.84 + 3 * 0) / 4, (1 * 4 + 1 * 4.84 + 2 * 3.85) / 4])
    assert finished.rounds[-1].info["sizes"] == [1, 2]
    state, _, _ = after(given(0.0, 4.0), THREE, **options)  # clients alike
    assert state.theta[:, 0].tolist() == pytest.approx([(0.84 + 0 + 0) / 3, (4 + 4.84 + 3.85) / 3])


def test_one_round_of_exact_fedprox_over_everyone_matches_hand_calculation() -> None:
    # With mu = 2, a: (1 - w)^2 + w^2, so 1/2. b: (5 - w)^2 + (w - 4)^2, so 9/2.
    # c: ((3 - w)^2 + (8 - 2 w)^2) / 2 + (w - 4)^2, so 7 w = 3 + 16 + 8 = 27.
    options: dict[str, Any] = {"weighting": "rows", "training": Training(exact=True, proximal=2.0)}
    state, _, _ = after(given(0.0, 4.0), THREE, average_over="everyone", **options)
    assert state.theta[:, 0].tolist() == pytest.approx([0.5 / 4, (4 + 4.5 + 2 * 27 / 7) / 4])
    state, _, _ = after(given(0.0, 4.0), THREE, average_over="cluster", **options)
    assert state.theta[:, 0].tolist() == pytest.approx([0.5, (4.5 + 2 * 27 / 7) / 3])


def lemma_1(data: Federation, theta: np.ndarray, eta: float, s: int | None, temperature: float | None) -> np.ndarray:
    """Equation (11) of Su, Xu, Yang with its matrices written out; s None is FedProx, a temperature soft labels."""
    there = [i for i, x in enumerate(data.xs) if len(x)]
    zs = [np.column_stack([data.xs[i].numpy(), np.ones(len(data.xs[i]))]) for i in there]
    y = np.concatenate([data.ys[i].numpy() for i in there])
    starts = np.cumsum([0, *(len(z) for z in zs)])
    phi, P, Lambda = np.vstack(zs), np.zeros((len(y), len(y))), np.zeros((len(theta), len(y)))
    for z, i in zip(zs, starts, strict=False):
        n = len(z)
        own, gram = slice(i, i + n), eta * z @ z.T / n
        powers = [np.linalg.matrix_power(np.eye(n) - gram, power) for power in range(s or 0)]
        P[own, own] = np.linalg.inv(np.eye(n) + gram) if s is None else sum(powers)
        squares = ((z @ theta.T - y[own, None]) ** 2).sum(0)  # eq. (8)
        share = np.exp(-(squares - squares.min()) / (temperature or 1e-9))
        Lambda[:, own] = (share / share.sum())[:, None]
    B = phi.T @ P / len(y)
    return np.stack([theta[j] - eta * B @ (Lambda[j] * (phi @ theta[j] - y)) for j in range(len(theta))])


@pytest.mark.parametrize("temperature", [None, 30.0], ids=["hard", "soft"])
@pytest.mark.parametrize("s", [1, 5, None], ids=["one step", "five steps", "fedprox"])
def test_averaging_over_everyone_is_lemma_1(s: int | None, temperature: float | None) -> None:
    data, theta, eta = federation(), LINE.initial(2, torch.Generator().manual_seed(3)), 0.1
    # The paper's loss is half of ours: its eta is twice our step, and FedProx's mu is 2 / eta.
    how = Training(exact=True, proximal=2 / eta) if s is None else Training(steps=s)
    soft: dict[str, Any] = {} if temperature is None else {"soft": True, "temperature": temperature}
    state, _, _ = after(
        Start("warm", theta=theta), data, model=LINE, rounds=4, step_size=eta / 2, training=how, weighting="rows",
        average_over="everyone", **soft,
    )  # fmt: skip
    want = theta.numpy()
    for _ in range(4):
        want = lemma_1(data, want, eta, s, temperature)
    np.testing.assert_allclose(state.theta.numpy(), want, rtol=1e-10, atol=1e-12)


def test_gradients_are_averaged_over_everyone_either_way() -> None:
    options: dict[str, Any] = {"averaging": "gradient", "rounds": 3, "weighting": "rows"}
    one, _, _ = after(given(0.0, 4.0), THREE, average_over="everyone", **options)
    other, _, _ = after(given(0.0, 4.0), THREE, average_over="cluster", **options)
    assert torch.equal(one.theta, other.theta)


def test_an_empty_cluster_keeps_its_model_when_everyone_counts() -> None:
    state, _, _ = after(given(0.0, 4.0, 1e3), THREE, average_over="everyone", weighting="rows", rounds=3)
    assert state.theta[2].tolist() == [1e3]


def test_the_step_size_decays_every_round() -> None:
    state, _, _ = after(given(0.0, 4.0), THREE, averaging="gradient", rounds=2, decay=0.5)
    # From (0.2, 4.1) with 0.15: a 2 (0.2 - 1) = -1.6; b 2 (4.1 - 5) = -1.8; c mean(2 * 1.1, 4 * 0.2) = 1.5.
    assert state.theta[:, 0].tolist() == pytest.approx([0.2 + 0.05 * 1.6, 4.1 + 0.05 * (1.8 - 1.5)])


def test_ties_go_to_the_lowest_number() -> None:
    state, finished, label = after(given(7.0, 7.0, 7.0), THREE)
    assert label.tolist() == [0, 0, 0]
    assert finished.rounds[-1].info["sizes"] == [3, 0, 0]
    assert state.theta[1:, 0].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_an_empty_cluster_keeps_its_model(averaging: str) -> None:
    state, finished, _ = after(given(0.0, 4.0, 1e3), THREE, averaging=averaging, rounds=3)
    assert state.theta[2].tolist() == [1e3]
    assert state.empty.tolist() == [0, 0, 3]
    assert [r.info["sizes"][2] for r in finished.rounds[1:]] == [0, 0, 0]


def test_clients_that_stay_are_not_counted_as_moved() -> None:
    _, finished, label = after(given(0.0, 4.0), scalars(a=[(1, 1)], b=[(1, 5)], c=[(1, 2.1)]), rounds=3)
    # c: 4.41 and 3.61, so it goes to cluster 1, drags it to mean(4.6, 2.86) = 3.73, and is nearer to 0.6 then (2.25, 2.66).
    assert label.tolist() == [0, 1, 0]
    assert [r.info["moved"] for r in finished.rounds[1:]] == [3, 1, 0]


# -- options ----------------------------------------------------------------------------------------------------------
def mean_by_hand(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0)


def common_of(model: Dense) -> Tensor:
    first = torch.zeros(model.n_parameters, dtype=torch.bool)
    first[: 3 * 4 + 4] = True  # "0.weight" and "0.bias"
    return first


def own_steps(theta: Tensor, x: Tensor, y: Tensor, steps: int) -> Tensor:
    """Gradient steps of one client's perceptron by autograd, size 0.05."""
    for _ in range(steps):
        at = theta.clone().requires_grad_()
        w1, b1, w2, b2 = at[:12].view(4, 3), at[12:16], at[16:20].view(1, 4), at[20:]
        loss = ((((x @ w1.T + b1).clamp(min=0) @ w2.T + b2)[:, 0] - y) ** 2).mean()
        (g,) = torch.autograd.grad(loss, at)
        theta = theta - 0.05 * g
    return theta


def net_labels(theta: Tensor, data: Federation) -> list[int]:
    out = []
    for x, y in zip(data.xs, data.ys, strict=True):
        out.append(int(((NET.outputs(theta, x)[..., 0] - y) ** 2).mean(1).argmin()) if len(x) else -1)
    return out


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_shared_layers_are_averaged_over_everyone_and_the_rest_by_cluster(averaging: str) -> None:
    data = federation()
    theta = NET.initial(2, torch.Generator().manual_seed(3))
    common = common_of(NET)
    state, finished, _ = after(
        Start("warm", theta=theta), data, model=NET, rounds=3, step_size=0.05, averaging=averaging,
        training=Training(steps=2), shared_layers=("0",),
    )  # fmt: skip
    there = [i for i, x in enumerate(data.xs) if len(x)]
    for _ in range(3):
        label = net_labels(theta, data)
        steps = 2 if averaging == "model" else 1
        made = {i: own_steps(theta[label[i]], data.xs[i], data.ys[i], steps) for i in there}
        new = theta.clone()
        for k in range(2):
            mine = [made[i] for i in there if label[i] == k]
            if averaging == "model" and mine:
                new[k] = mean_by_hand(mine)
            elif averaging == "gradient":
                new[k] = theta[k] + sum((made[i] - theta[k] for i in there if label[i] == k), 0 * theta[k]) / len(there)
        new[:, common] = mean_by_hand([made[i] for i in there])[common]
        theta = new
    torch.testing.assert_close(state.theta, theta, rtol=1e-10, atol=1e-12)
    # One set of shared layers: up to rounding, since with gradients it is a mean of equal vectors.
    torch.testing.assert_close(state.theta[0, common], state.theta[1, common], rtol=1e-14, atol=1e-14)
    assert not torch.allclose(state.theta[0, ~common], state.theta[1, ~common])
    assert min(finished.rounds[-1].info["sizes"]) > 0


@pytest.mark.parametrize("layers", [("0",), ("0.weight", "0.bias")])
def test_shared_layers_are_named_by_their_beginning(layers: tuple[str, ...]) -> None:
    theta = NET.initial(2, torch.Generator().manual_seed(3))
    state, _, _ = after(Start("warm", theta=theta), federation(), model=NET, step_size=0.05, shared_layers=layers)
    same = (state.theta[0] == state.theta[1]).tolist()
    assert same == common_of(NET).tolist()


def soft_twin(
    data: Federation, theta: Tensor, *, rounds: int, averaging: str, temperature: float | None, by_rows: bool = False
) -> Tensor:
    """Soft labels by a loop: posterior of each cluster ~ exp(-sum of squares / temperature)."""
    noise = 1.0 if temperature is None else temperature
    for _ in range(rounds):
        total, weight = torch.zeros_like(theta), torch.zeros(len(theta), dtype=torch.float64)
        best, n_rows = 0.0, 0
        for x, y in zip(data.xs, data.ys, strict=True):
            if len(x) == 0:
                continue
            z = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
            squares = torch.stack([((z @ t - y) ** 2).sum() for t in theta])
            share = torch.softmax(-squares / noise, 0) * (len(x) if by_rows else 1)
            best, n_rows = best + float(squares.min()), n_rows + len(x)
            for k, t in enumerate(theta):
                made = 2 * z.T @ (z @ t - y) / len(x)
                if averaging == "model":
                    made = t
                    for _ in range(3):
                        made = made - 0.05 * 2 * z.T @ (z @ made - y) / len(x)
                total[k] += share[k] * made
            weight += share
        theta = total / weight[:, None] if averaging == "model" else theta - 0.05 * total / weight.sum()
        noise = 2 * best / n_rows if temperature is None else temperature
    return theta


@pytest.mark.parametrize("averaging", ["model", "gradient"])
@pytest.mark.parametrize(("temperature", "by_rows"), [(None, False), (30.0, False), (30.0, True)])
def test_soft_labels_match_a_loop(averaging: str, temperature: float | None, by_rows: bool) -> None:
    data = federation()
    theta = LINE.initial(3, torch.Generator().manual_seed(0))
    state, _, _ = after(
        Start("warm", theta=theta), data, model=LINE, rounds=4, step_size=0.05, averaging=averaging, training=STEPS,
        soft=True, temperature=temperature, weighting="rows" if by_rows else "clients",
    )  # fmt: skip
    want = soft_twin(data, theta, rounds=4, averaging=averaging, temperature=temperature, by_rows=by_rows)
    torch.testing.assert_close(state.theta, want, rtol=1e-9, atol=1e-10)


def test_cold_soft_labels_are_hard_labels() -> None:
    data, theta = federation(), LINE.initial(2, torch.Generator().manual_seed(0))
    start, options = Start("warm", theta=theta), {"model": LINE, "rounds": 3, "step_size": 0.05, "training": STEPS}
    hard, _, _ = after(start, data, **options)
    cold, _, _ = after(start, data, soft=True, temperature=1e-9, **options)
    torch.testing.assert_close(cold.theta, hard.theta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_minibatches_match_a_loop_with_the_same_keys(averaging: str) -> None:
    data, eta, size = federation(), 0.05, 3
    theta = LINE.initial(2, torch.Generator().manual_seed(0))
    how = Training(epochs=1, batch_size=size)
    state, _, _ = after(
        Start("warm", theta=theta),
        data,
        model=LINE,
        rounds=3,
        step_size=eta,
        averaging=averaging,
        training=how,
        seed=11,
    )
    now = theta.numpy()
    for t in range(3):
        updates: dict[int, list[np.ndarray]] = {0: [], 1: []}
        for name, x, y in zip(data.names, data.xs, data.ys, strict=True):
            n = len(x)
            if n == 0:
                continue
            z, target = np.column_stack([x.numpy(), np.ones(n)]), y.numpy()
            k = int(np.argmin([np.mean((z @ w - target) ** 2) for w in now]))
            own_key = keys.key(keys.key(11, t, "ifca"), 0, "batch", keys.name_keys(np.array([name]))[0])
            order = np.argsort(keys.uniform(own_key, n).numpy(), kind="stable")
            w = now[k]
            for i in range(0, n, size) if averaging == "model" else (0,):
                b = order[i : i + size]
                g = 2 * z[b].T @ (z[b] @ w - target[b]) / len(b)
                w = w - eta * g
            updates[k].append(w if averaging == "model" else g)
        n_there = sum(map(len, updates.values()))
        now = np.stack(
            [
                (np.mean(updates[k], 0) if updates[k] else now[k])
                if averaging == "model"
                else now[k] - eta * np.sum([np.zeros(4), *updates[k]], 0) / n_there
                for k in range(2)
            ]
        )
    np.testing.assert_allclose(state.theta.numpy(), now, rtol=1e-9, atol=1e-10)


# -- the twin ---------------------------------------------------------------------------------------------------------
def algorithm_1(
    data: Federation,
    theta: np.ndarray,
    *,
    rounds: int,
    gamma: float,
    option: str,
    tau: int = 1,
    takes_part: Callable[[int, int], bool] = lambda t, i: True,
) -> tuple[np.ndarray, list[list[int]]]:
    """Algorithm 1 of the paper, line by line: linear regression, full batch. Labels -1 for those who are not there."""
    theta, labels = theta.copy(), []
    for t in range(rounds):
        members = [i for i in range(len(data.xs)) if takes_part(t, i) and len(data.xs[i])]  # line 3: M_t
        label, sent = [-1] * len(data.xs), {}
        for i in members:  # line 5, "in parallel"
            z = np.column_stack([data.xs[i].numpy(), np.ones(len(data.xs[i]))])
            y = data.ys[i].numpy()
            loss = [np.mean((z @ theta[j] - y) ** 2) for j in range(len(theta))]
            label[i] = int(np.argmin(loss))  # line 6
            if option == "gradient":  # line 9
                sent[i] = 2 * z.T @ (z @ theta[label[i]] - y) / len(y)
            else:  # line 11
                w = theta[label[i]]
                for _ in range(tau):
                    w = w - gamma * 2 * z.T @ (z @ w - y) / len(y)
                sent[i] = w
        for j in range(len(theta)):
            mine = [sent[i] for i in members if label[i] == j]
            if option == "gradient":  # line 14
                theta[j] = theta[j] - gamma / len(members) * sum(mine)
            elif mine:  # line 15; who is empty keeps its model
                theta[j] = sum(mine) / len(mine)
        labels.append(label)
    return theta, labels


@pytest.mark.parametrize(("option", "tau"), [("gradient", 1), ("model", 1), ("model", 5)])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("n_clusters", [2, 3])
def test_twenty_rounds_agree_with_the_plain_loop_twin(option: str, tau: int, partial: bool, n_clusters: int) -> None:
    data = federation((5, 0, 7, 12, 7, 1, 9, 7, 4, 12, 30, 2))
    theta = LINE.initial(n_clusters, torch.Generator().manual_seed(5))
    gamma = 0.2 if option == "gradient" else 0.04
    state, finished, label = after(
        Start("warm", theta=theta), data, model=LINE, rounds=20, step_size=gamma, averaging=option,
        training=Training(steps=tau), patience=0, participation=Late() if partial else None,
    )  # fmt: skip
    # The engine's round 0 is the start, so the algorithm's round t is its round t + 1.
    want, labels = algorithm_1(
        data, theta.numpy(), rounds=20, gamma=gamma, option=option, tau=tau,
        takes_part=(lambda t, i: (i + t + 1) % 3 != 0) if partial else lambda t, i: True,
    )  # fmt: skip
    np.testing.assert_allclose(state.theta.numpy(), want, rtol=1e-10, atol=1e-10)
    sizes = [[row.count(k) for k in range(n_clusters)] for row in labels]
    assert [r.info["sizes"] for r in finished.rounds[1:]] == sizes
    last = {i: row[i] for row in labels for i in range(len(row)) if row[i] >= 0}
    assert {i: int(label[i]) for i in last} == last


# -- recovery ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n_clusters", [2, 3])
@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_recovers_planted_clusters_from_a_spread_start(n_clusters: int, averaging: str) -> None:
    for seed in range(4):
        planted = mixed_regression(
            n_clients=30, rows=25, n_features=6, n_clusters=n_clusters, noise=0.3, separation=2.0, seed=seed
        )
        model = linear_regression(6, intercept=False)
        # With gradients a cluster's share of 1/K slows its descent: K times the step makes up for it.
        step = 0.1 if averaging == "model" else 0.1 * n_clusters
        state, _, engine = run_one(
            program(
                Start("spread"),
                model=model,
                n_clusters=n_clusters,
                rounds=60,
                step_size=step,
                averaging=averaging,
                training=Training(steps=5),
                seed=seed,
            ),
            planted.rows,
        )
        assert adjusted_rand(engine.worker.private[0]["label"], planted.truth) == 1.0
        error, _ = match_models(state.theta, planted.theta)
        # The mean of local solutions is a little worse than pooled least squares, and the error itself is random.
        # That of N rows is sigma sqrt(D / (N - D - 1)) in the mean: 0.038 with 375 rows, 0.047 with 250.
        assert error < 2 * 0.3 * math.sqrt(6 / (750 / n_clusters - 7))


def test_soft_labels_recover_planted_clusters() -> None:
    planted = mixed_regression(n_clients=30, rows=25, n_features=6, n_clusters=3, noise=0.3, separation=2.0, seed=0)
    model = linear_regression(6, intercept=False)
    state, _, engine = run_one(
        program(Start("spread"), model=model, n_clusters=3, rounds=40, step_size=0.1, training=STEPS, soft=True),
        planted.rows,
    )
    assert adjusted_rand(engine.worker.private[0]["label"], planted.truth) == 1.0
    assert float(state.temperature) == pytest.approx(
        2 * 0.3**2, rel=0.15
    )  # it is estimated as twice the noise variance


# -- collapse ---------------------------------------------------------------------------------------------------------
def far_start() -> Start:
    """One model near both planted ones, and one that attracts nobody."""
    return given([0.0, 0.0, 0.0, 0.0], [1e3, 0.0, 0.0, 0.0])


def test_collapse_is_found_reseeded_and_told() -> None:
    data = federation((20,) * 10)
    options: dict[str, Any] = {"model": LINE, "rounds": 40, "step_size": 0.05, "training": Training(steps=5)}
    state, finished, label = after(far_start(), data, patience=4, **options)
    events = [(r.round, event) for r in finished.rounds for event in r.info["events"]]
    assert len(events) == 1
    round_, event = events[0]
    assert round_ == 4
    assert event.startswith("cluster 1 was empty for 4 rounds; reseeded from a client with a high loss")
    assert adjusted_rand(label, [i % 2 for i in range(10)]) == 1.0
    sizes = [r.info["sizes"] for r in finished.rounds[1:]]
    assert sizes[:4] == [[10, 0]] * 4
    assert sorted(sizes[-1]) == [5, 5]
    assert state.empty.tolist() == [0, 0]


def test_a_reseeded_cluster_is_given_its_patience_again() -> None:
    states: list[State] = []
    options: dict[str, Any] = {"model": LINE, "rounds": 4, "step_size": 0.05, "patience": 2}
    theta = far_start().theta
    assert theta is not None
    start = Start("warm", theta=torch.cat([theta, theta[1:] * 2]))  # two clusters that attract nobody
    run_one(spying(program(start, **options), states), federation((20,) * 12).rows)
    # After two rounds both are empty: the first is reseeded, the other waits for its turn, a round later.
    assert [s.empty.tolist() for s in states[:3]] == [[0, 0, 0], [0, 1, 1], [0, 0, 2]]
    assert states[3].empty[2] == 0


def test_without_patience_a_collapse_stays() -> None:
    data = federation((20,) * 10)
    state, finished, _ = after(far_start(), data, model=LINE, rounds=12, step_size=0.05, patience=0)
    assert all(r.info["events"] == [] for r in finished.rounds)
    assert state.empty.tolist() == [0, 12]


def test_the_last_round_does_not_reseed() -> None:
    state, finished, _ = after(far_start(), federation(), model=LINE, rounds=3, step_size=0.05, patience=3)
    assert finished.rounds[-1].info["events"] == []
    assert state.theta[1].tolist() == [1e3, 0, 0, 0]


def test_it_stops_when_nobody_moves_and_nothing_changes() -> None:
    data = federation((20,) * 10)
    truth = torch.tensor([[1.0, -2.0, 0.5, 0.3], [-1.5, 1.0, 2.0, 0.3]], dtype=torch.float64)
    state, finished, _ = after(
        Start("warm", theta=truth), data, model=LINE, rounds=500, step_size=0.1, training=Training(steps=5), tol=1e-4
    )
    assert state.settled
    assert state.round < 40
    assert finished.rounds[-1].info["moved"] == 0
    assert len(finished.rounds) == state.round + 1


def test_a_cluster_that_was_just_reseeded_is_trained_before_it_stops() -> None:
    data = federation((20,) * 10)
    options: dict[str, Any] = {"model": LINE, "rounds": 300, "step_size": 0.1, "training": Training(steps=5)}
    state, finished, label = after(far_start(), data, patience=2, tol=0.5, **options)
    reseeded = next(r.round for r in finished.rounds if r.info["events"])
    assert state.round > reseeded
    assert state.empty.tolist() == [0, 0]
    assert adjusted_rand(label, [i % 2 for i in range(10)]) == 1.0


# -- awkward clients --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("averaging", ["model", "gradient"])
@pytest.mark.parametrize("options", [{}, {"weighting": "rows"}, {"soft": True}])
def test_a_client_without_rows_changes_nothing(averaging: str, options: dict[str, Any]) -> None:
    none = torch.zeros(0, 1, dtype=torch.float64)
    more = THREE.plus("0 nobody", none, none[:, 0])  # by its name the first
    with_, finished, _ = after(given(0.0, 4.0), more, rounds=3, averaging=averaging, **options)
    without, reference, _ = after(given(0.0, 4.0), THREE, rounds=3, averaging=averaging, **options)
    torch.testing.assert_close(with_.theta, without.theta, rtol=1e-12, atol=1e-12)
    assert [r.info["sizes"] for r in finished.rounds[1:]] == [r.info["sizes"] for r in reference.rounds[1:]]
    assert [r.info["moved"] for r in finished.rounds[1:]] == [r.info["moved"] for r in reference.rounds[1:]]
    assert finished.rounds[-1].info["loss"] == pytest.approx(reference.rounds[-1].info["loss"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("averaging", ["model", "gradient"])
@pytest.mark.parametrize("options", [{}, {"soft": True}, {"shared_layers": ("0",)}])
def test_when_only_clients_without_rows_answer_the_models_stay(
    dtype: torch.dtype, averaging: str, options: dict[str, Any]
) -> None:
    data = federation()  # client 1 has no rows
    model = Dense((3, 4, 1), "squared", dtype=dtype)
    theta = model.initial(2, torch.Generator().manual_seed(0))
    rows = ragged([x.to(dtype) for x in data.xs], [y.to(dtype) for y in data.ys], data.names)
    state, finished, _ = run_one(
        program(Start("warm", theta=theta), model=model, rounds=3, averaging=averaging, **options),
        rows,
        participation=Only((1,)),
    )
    assert torch.equal(state.theta, theta)
    assert float(state.temperature) == 1.0
    assert state.round == 3
    assert [r.info["events"] for r in finished.rounds[1:]] == [["nobody answered"]] * 3


def test_one_row_clients_are_fine() -> None:
    data = federation((1,) * 8)
    state, _, label = after(Start("spread"), data, model=LINE, rounds=10, step_size=0.05)
    assert state.theta.isfinite().all()
    assert set(label.tolist()) <= {0, 1}


def test_a_silent_round_is_lost_and_told() -> None:
    state, finished, _ = after(given(0.0, 4.0), THREE, rounds=2, participation=Late(silent=(1, 2)))
    assert state.theta[:, 0].tolist() == [0.0, 4.0]
    assert [r.info for r in finished.rounds[1:]] == [{"events": ["nobody answered"]}] * 2
    assert state.round == 2


@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_a_step_that_is_far_too_long_ends_without_an_exception(averaging: str) -> None:
    state, finished, _ = after(
        Start("spread"), federation(), model=LINE, rounds=60, step_size=1e8, averaging=averaging, patience=2
    )
    assert state.round == 60
    assert len(finished.rounds) == 61


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"averaging": "gradient"}, {"averaging": "model"}, {"soft": True}])
def test_nobody_chooses_a_model_that_diverged(bad: float, options: dict[str, Any]) -> None:
    """The other models do what they do without it."""
    without, _, label = after(given(0.0, 4.0), THREE, rounds=3, patience=0, **options)
    beside, _, among = after(given(bad, 0.0, 4.0), THREE, rounds=3, patience=0, **options)
    assert among.tolist() == [1 + k for k in label.tolist()] == [1, 2, 2]
    torch.testing.assert_close(beside.theta[1:], without.theta)


def test_a_model_that_diverged_does_not_spoil_shared_layers() -> None:
    without, _, _ = after(given(0.0, 4.0), THREE, patience=0, shared_layers=("0.weight",))
    beside, _, _ = after(given(math.nan, 0.0, 4.0), THREE, patience=0, shared_layers=("0.weight",))
    torch.testing.assert_close(beside.theta, without.theta[:1].expand(3, -1))


# At theta = (0, 4), b's losses are 1 and infinite: it is alone in cluster 0, which its gradient of -2e160 throws to 6e159.
# In the second round all losses of b are infinite, and its next gradient is too.
ONE_DIVERGES = scalars(a=[(1.0, 4.0)], b=[(1e160, 1.0)])


def test_a_model_that_diverged_is_named_once_where_nothing_is_reseeded() -> None:
    state, finished, label = after(given(0.0, 4.0), ONE_DIVERGES, rounds=4, patience=0)
    events = [r.info["events"] for r in finished.rounds]
    assert events == [[], [], ["the model of cluster 0 diverged"], [], []]
    assert state.theta[:, 0].isfinite().tolist() == [False, True]
    assert label.tolist() == [1, 0]


def test_a_model_that_diverged_is_reseeded_in_the_same_round() -> None:
    """All are in the second cluster at first; then the first is given a client's own model, and they part as they should."""
    state, finished, label = after(given(math.nan, 4.0), THREE, rounds=20, patience=50)
    (event,) = finished.rounds[1].info["events"]
    assert event.startswith("cluster 0 had a model that diverged; reseeded from a client with a high loss")
    assert not any(r.info["events"] for r in finished.rounds[2:])
    assert state.theta.isfinite().all()
    assert len({label[0].item(), label[1].item()}) == 2


def test_all_models_that_diverged_are_reseeded_together() -> None:
    state, finished, _ = after(given(math.nan, math.inf), THREE, rounds=5)
    assert [event[:9] for event in finished.rounds[1].info["events"]] == ["cluster 0", "cluster 1"]
    assert state.theta.isfinite().all()


def test_a_run_settles_beside_a_model_that_diverged() -> None:
    state, _, _ = after(given(math.nan, 0.0, 4.0), THREE, rounds=200, patience=0, tol=1e-9)
    assert state.settled
    assert state.round < 200


# -- fresh rows -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("averaging", ["model", "gradient"])
def test_resampling_chooses_by_one_part_and_trains_on_another(averaging: str) -> None:
    """Section 5 as a plain loop: round t takes parts 2 t and 2 t + 1, and after two rounds rows are cut anew."""
    data = scalars(**{name: [(1.0, y), (1.0, y + 0.5), (1.0, y - 1), (1.0, y + 2), (1.0, y)] for name, y in PEOPLE})
    theta = [0.0, 4.0]
    for t in range(5):
        shuffle = keys.key(0, t // 2, "resample")
        moves: list[list[float]] = [[], []]
        for i in range(len(PEOPLE)):
            judged, trained = (part_of(data.rows.client(i), shuffle, 2 * (t % 2) + j, 4).target for j in range(2))
            losses = [float(((model - judged[0]) ** 2).mean()) for model in theta]
            k = losses.index(min(losses))
            moves[k].append(-0.3 * 2 * (theta[k] - float(trained[0].mean())))
        shares = [len(PEOPLE)] * 2 if averaging == "gradient" else [max(len(of), 1) for of in moves]
        theta = [model + sum(of) / n for model, of, n in zip(theta, moves, shares, strict=True)]
    state, _, _ = after(given(0.0, 4.0), data, rounds=5, averaging=averaging, resample=4, patience=0)
    torch.testing.assert_close(state.theta[:, 0], torch.tensor(theta, dtype=torch.float64))


PEOPLE = (("a", 0.0), ("b", 0.5), ("c", 4.0), ("d", 5.0), ("e", 6.0))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_parts_are_disjoint_and_together_all_rows(parts: int) -> None:
    data = federation((7, 4, 1, 0))
    for i in range(4):
        mine = data.rows.client(i)
        held = [part_of(mine, keys.key(5), p, parts) for p in range(parts)]
        sizes = [int(part.n) for part in held]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == [int(part.real.sum()) for part in held]
        rows = torch.cat([part.x[part.real] for part in held])
        assert sorted(rows.tolist()) == sorted(mine.x[mine.real].tolist())
        targets = torch.cat([part.target[part.real] for part in held])
        assert sorted(targets.tolist()) == sorted(mine.target[mine.real].tolist())
        assert all(not part.x[~part.real].any() for part in held)


def test_a_part_does_not_depend_on_who_else_is_there_and_another_key_cuts_anew() -> None:
    data = federation((7, 4, 9))
    block = next(data.rows.blocks())
    (at,) = (block.ids == 0).nonzero()[:, 0].tolist()
    together, alone = part_of(block, keys.key(5), 1, 3), part_of(data.rows.client(0), keys.key(5), 1, 3)
    assert torch.equal(together.x[at][together.real[at]], alone.x[0][alone.real[0]])
    other = part_of(data.rows.client(0), keys.key(6), 1, 3)
    assert sorted(alone.x[0].tolist()) != sorted(other.x[0].tolist())


def test_who_has_no_row_in_a_part_sits_the_round_out() -> None:
    data = scalars(a=[(1.0, 1.0)], b=[(1.0, 5.0), (1.0, 5.0)])
    state, finished, label = after(given(0.0, 4.0), data, resample=2)
    assert finished.rounds[1].info["sizes"] == [0, 1]
    assert state.theta[:, 0].tolist() == pytest.approx([0.0, 4.0 + 0.3 * 2 * 1.0])
    assert label.tolist() == [0, 1]


# -- state ------------------------------------------------------------------------------------------------------------
def test_a_warm_start_is_not_changed() -> None:
    start = given(0.0, 4.0)
    after(start, THREE, rounds=3)
    assert start.theta is not None
    assert start.theta[:, 0].tolist() == [0.0, 4.0]


def test_it_goes_on_from_a_state() -> None:
    half, _, _ = after(given(0.0, 4.0), THREE, rounds=2)
    whole, _, _ = after(given(0.0, 4.0), THREE, rounds=5)
    rest = InProcess(THREE.rows).run([lambda _: program(given(0.0, 4.0), rounds=5)(half)]).states[0]
    assert torch.equal(rest.theta, whole.theta)
    assert rest.round == 5


def test_restarts_in_lockstep_each_do_what_they_do_alone() -> None:
    planted = mixed_regression(n_clients=20, rows=20, n_features=5, n_clusters=2, noise=0.2, separation=2.0, seed=3)
    model = linear_regression(5, intercept=False)
    programs = [
        program(Start(kind), model=model, n_clusters=k, rounds=8, step_size=step, seed=s)  # type: ignore[arg-type]
        for s, (kind, k, step) in enumerate(
            [("spread", 2, 0.1), ("random", 2, 0.2), ("balanced", 2, 0.1), ("spread", 3, 0.1)]
        )
    ]
    together = InProcess(planted.rows).run(programs)
    for state, one in zip(together.states, programs, strict=True):
        torch.testing.assert_close(state.theta, run_one(one, planted.rows)[0].theta, rtol=1e-12, atol=1e-12)
