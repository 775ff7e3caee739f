# SPDX-License-Identifier: Apache-2.0
"""The baselines: one model for all, by rounds or in closed form, and one model each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from torch import Tensor

from coterie import keys
from coterie.algorithms.fedavg import RidgeState, State, fedavg, local_models, local_ridge, pooled_ridge
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import Dense, Model, linear_regression, mlp, softmax_regression
from helpers import NET, Federation, Late, Only, federation, ragged, run_one

LINE = linear_regression(1, intercept=False)
Program = Callable[[Any], Any]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def two_clients() -> Federation:
    """A: one row (1, 2).  B: rows (1, 2) and (2, 2)."""
    return Federation([column(1), column(1, 2)], [column(2)[:, 0], column(2, 2)[:, 0]], ["a", "b"])


def from_zero(**options: Any) -> Program:
    """FedAvg from theta = 0."""
    settings = {"model": LINE, "rounds": 1, "step_size": 0.1, "seed": 0, "training": Training(steps=1)} | options
    return lambda state: fedavg(state or State(torch.zeros(1, dtype=torch.float64)), **settings)


# -- one model for all ------------------------------------------------------------------------------------------------
def test_one_round_matches_hand_calculation() -> None:
    # Gradients of the mean squared error at 0: A 2 (0 - 2) = -4; B mean(-4, 2 * 2 (0 - 2)) = -6. One step of 0.1: 0.4, 0.6.
    rows = two_clients().rows
    state, finished, _ = run_one(from_zero(), rows)
    assert state.theta.tolist() == pytest.approx([(1 * 0.4 + 2 * 0.6) / 3])
    assert state.round == 1
    assert finished.rounds[-1].info == {"loss": pytest.approx(4.0)}  # of the model that was received
    state, _, _ = run_one(from_zero(weighting="clients"), rows)
    assert state.theta.tolist() == pytest.approx([0.5])


def test_one_round_of_fedprox_matches_hand_calculation() -> None:
    # The second step: A -3.2 + mu 0.4, B -3.0 + mu 0.6; with mu = 0.5: 0.4 + 0.3 = 0.7 and 0.6 + 0.27 = 0.87.
    program = from_zero(training=Training(steps=2, proximal=0.5))
    state, _, _ = run_one(program, two_clients().rows)
    assert state.theta.tolist() == pytest.approx([(0.7 + 2 * 0.87) / 3])


def test_the_step_size_decays_by_round() -> None:
    state, _, _ = run_one(from_zero(rounds=2, decay=0.5), two_clients().rows)
    first = 1.6 / 3
    # Second round at 0.05: A 2 (t - 2); B mean(2 (t - 2), 4 (2 t - 2)) = 5 t - 6.
    a, b = first - 0.05 * 2 * (first - 2), first - 0.05 * (5 * first - 6)
    assert state.theta.tolist() == pytest.approx([(a + 2 * b) / 3])


def numpy_fedprox(data: Federation, theta: np.ndarray, rounds: int, eta: float, steps: int, mu: float) -> np.ndarray:
    """Linear regression with intercept, weighted by rows."""
    for _ in range(rounds):
        total, weight = np.zeros_like(theta), 0
        for x, y in zip(data.xs, data.ys, strict=True):
            if len(x) == 0:
                continue
            z, w = np.column_stack([x.numpy(), np.ones(len(x))]), theta
            for _ in range(steps):
                w = w - eta * (2 * z.T @ (z @ w - y.numpy()) / len(x) + mu * (w - theta))
            total, weight = total + len(x) * w, weight + len(x)
        theta = total / weight
    return theta


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_many_rounds_match_a_numpy_loop(mu: float) -> None:
    data, model = federation(), linear_regression(3)
    state, _, _ = run_one(
        lambda s: fedavg(s, model=model, rounds=15, step_size=0.05, seed=4, training=Training(steps=3, proximal=mu)),
        data.rows,
    )
    begin = model.initial(1, keys.generator(4, "start"))[0].numpy()
    want = numpy_fedprox(data, begin, 15, 0.05, 3, mu)
    np.testing.assert_allclose(state.theta.numpy(), want, rtol=1e-10, atol=1e-12)


def test_one_local_step_by_rows_is_gradient_descent_on_the_pooled_rows() -> None:
    data, model = federation(), softmax_regression(3, 3, l2=0.02)
    data = federation(classes=3)
    state, _, _ = run_one(
        lambda s: fedavg(s, model=model, rounds=12, step_size=0.3, seed=1, training=Training(steps=1)), data.rows
    )
    x, y = torch.cat(data.xs), torch.cat(data.ys)
    theta = model.initial(1, keys.generator(1, "start"))[0].requires_grad_()
    for _ in range(12):
        weight, bias = theta[:9].view(3, 3), theta[9:]
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y) + 0.01 * (weight**2).sum()
        (g,) = torch.autograd.grad(loss, theta)
        theta = (theta - 0.3 * g).detach().requires_grad_()
    torch.testing.assert_close(state.theta, theta.detach(), rtol=1e-10, atol=1e-12)


def test_it_stops_when_the_model_has_settled() -> None:
    state, finished, _ = run_one(from_zero(rounds=500, tol=1e-3), two_clients().rows)
    assert state.settled
    assert state.round < 60
    assert len(finished.rounds) == state.round
    unchecked, _, _ = run_one(from_zero(rounds=20), two_clients().rows)
    assert (unchecked.round, unchecked.settled) == (20, False)


def test_clients_without_rows_have_no_weight() -> None:
    nothing = torch.zeros(0, 1, dtype=torch.float64)
    more = two_clients().plus("c", nothing, nothing[:, 0])
    for weighting in ("rows", "clients"):
        with_, _, _ = run_one(from_zero(weighting=weighting), more.rows)
        without, _, _ = run_one(from_zero(weighting=weighting), two_clients().rows)
        assert torch.equal(with_.theta, without.theta)


@pytest.mark.parametrize("weighting", ["rows", "clients"])
def test_when_only_clients_without_rows_answer_the_model_stays(weighting: str) -> None:
    rows = federation().rows  # client 1 has no rows
    begin = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    model = linear_regression(3)
    state, finished, _ = run_one(
        lambda s: fedavg(s or State(begin), model=model, rounds=2, step_size=0.1, seed=0, weighting=weighting),  # type: ignore[arg-type]
        rows,
        participation=Only((1,)),
    )
    assert torch.equal(state.theta, begin)
    assert state.round == 2
    assert finished.rounds[-1].info == {"events": ["nobody answered"]}


def test_a_silent_round_changes_nothing_and_is_told() -> None:
    silent, finished, _ = run_one(from_zero(rounds=3), two_clients().rows, participation=Late(silent=(0, 1, 2)))
    assert silent.theta.tolist() == [0.0]
    assert silent.round == 3
    assert [r.info for r in finished.rounds] == [{"events": ["nobody answered"]}] * 3


# -- closed form ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_pooled_ridge_is_scikit_learns_on_all_rows_together(l2: float, intercept: bool) -> None:
    data, model = federation(), linear_regression(3, intercept=intercept)
    for block_bytes in (1, 1 << 26):
        program = lambda s: pooled_ridge(s, model=model, l2=l2)  # noqa: E731
        state, _, _ = run_one(program, data.rows, block_bytes=block_bytes)
        x, y = torch.cat(data.xs).numpy(), torch.cat(data.ys).numpy()
        # Ours is the mean of squares + l2 |w|^2, scikit-learn's the sum of squares + alpha |w|^2.
        kind = Ridge(alpha=len(x) * l2, fit_intercept=intercept) if l2 else LinearRegression(fit_intercept=intercept)
        fit = kind.fit(x, y)
        want = [*fit.coef_, *([fit.intercept_] if intercept else [])]
        np.testing.assert_allclose(state.theta.numpy(), want, rtol=1e-9, atol=1e-10)
        assert state.round == 1


def test_pooled_ridge_that_nobody_answered_may_be_asked_again() -> None:
    program = lambda s: pooled_ridge(s, model=LINE, l2=0.0)  # noqa: E731
    state, finished, _ = run_one(program, two_clients().rows, participation=Late(silent=(0,)))
    assert (state.theta.tolist(), state.round) == ([0.0], 0)
    assert finished.rounds[0].info == {"events": ["nobody answered"]}
    again = InProcess(two_clients().rows).run([lambda _: pooled_ridge(state, model=LINE, l2=0.0)]).states[0]
    assert again.theta.tolist() == pytest.approx([(2 + 2 + 4) / (1 + 1 + 4)])


# -- one model each ---------------------------------------------------------------------------------------------------
def own_models(program: Program, data: Federation, **engine: Any) -> tuple[Tensor, Any]:
    _, finished, made = run_one(program, data.rows, **engine)
    return made.worker.private[0]["theta"], finished


def test_the_penalty_of_local_models_is_the_best_for_all_on_rows_that_they_hold_out() -> None:
    data, penalties = federation((9, 14, 0, 1, 11), noise=2.0), (1e-3, 0.3, 100.0)
    model = linear_regression(3)
    state, _, engine = run_one(
        lambda state: local_ridge(state, model=model, penalties=penalties, share=0.2, seed=7), data.rows
    )
    rest, held = data.rows.split(0.2, seed=7, purpose="validation")  # every client holds out the same rows by itself
    totals = []
    for l2 in penalties:
        total = 0.0
        for i in range(5):
            a, b = rest.client(i), held.client(i)
            if len(b.x[0]):
                fit = Ridge(alpha=len(a.x[0]) * l2).fit(a.x[0].numpy(), a.target[0].numpy())
                total += float(((fit.predict(b.x[0].numpy()) - b.target[0].numpy()) ** 2).sum())
        totals.append(total)
    best = penalties[int(np.argmin(totals))]
    assert state == RidgeState(best, fitted=True)
    fit = Ridge(alpha=14 * best).fit(data.xs[1].numpy(), data.ys[1].numpy())  # with all rows
    np.testing.assert_allclose(engine.private[0]["theta"][1], [*fit.coef_, fit.intercept_], rtol=1e-5)


def test_linear_local_models_are_fitted_in_closed_form_in_one_round() -> None:
    data, model = federation(), linear_regression(3)
    theta, finished = own_models(lambda s: local_models(s, model=model, rounds=9, step_size=0.1, seed=0, l2=0.05), data)
    assert len(finished.rounds) == 1
    losses, n = 0.0, 0
    for i, (x, y) in enumerate(zip(data.xs, data.ys, strict=True)):
        if len(x) == 0:
            assert not theta[i].any()
            continue
        fit = Ridge(alpha=len(x) * 0.05).fit(x.numpy(), y.numpy())
        np.testing.assert_allclose(theta[i].numpy(), [*fit.coef_, fit.intercept_], rtol=1e-6, atol=1e-7)
        losses += float(((fit.predict(x.numpy()) - y.numpy()) ** 2).sum())
        n += len(x)
    assert finished.rounds[0].info["loss"] == pytest.approx(losses / n, rel=1e-6)


def descended(model: Model, theta: Tensor, x: Tensor, y: Tensor, schedule: list[float], momentum: float) -> Tensor:
    """One client's rounds of 3 steps each, momentum from zero in every round, by autograd."""
    for eta in schedule:
        velocity = torch.zeros_like(theta)
        for _ in range(3):
            at = theta.clone().requires_grad_()
            w1, b1, w2, b2 = at[:12].view(4, 3), at[12:16], at[16:20].view(1, 4), at[20:]
            out = (x @ w1.T + b1).clamp(min=0) @ w2.T + b2
            (g,) = torch.autograd.grad(((out[:, 0] - y) ** 2).mean(), at)
            velocity = momentum * velocity + g
            theta = theta - eta * velocity
    return theta


def test_local_models_go_on_where_they_were_from_a_common_start() -> None:
    data = federation()
    theta, finished = own_models(
        lambda s: local_models(
            s, model=NET, rounds=3, step_size=0.05, seed=2, training=Training(steps=3, momentum=0.6), decay=0.5
        ),
        data,
    )
    begin = NET.initial(1, keys.generator(2, "start"))[0]
    losses, n = 0.0, 0
    for i, (x, y) in enumerate(zip(data.xs, data.ys, strict=True)):
        if len(x) == 0:
            assert torch.equal(theta[i], begin)
            continue
        want = descended(NET, begin, x, y, [0.05, 0.025, 0.0125], 0.6)
        torch.testing.assert_close(theta[i], want, rtol=1e-10, atol=1e-12)
        losses += float(((NET.outputs(want[None], x)[0, :, 0] - y) ** 2).sum())
        n += len(x)
    assert [r.round for r in finished.rounds] == [0, 1, 2]
    assert finished.rounds[-1].info["loss"] == pytest.approx(losses / n, rel=1e-9)  # of the models after training


def test_local_minibatches_match_a_loop_with_the_same_keys() -> None:
    data, model, seed = federation(classes=3), softmax_regression(3, 3), 4
    how = Training(steps=2, batch_size=3)
    theta, _ = own_models(
        lambda s: local_models(s, model=model, rounds=3, step_size=0.3, seed=seed, training=how), data
    )
    begin = model.initial(1, keys.generator(seed, "start"))[0]
    for i, (name, x, y) in enumerate(zip(data.names, data.xs, data.ys, strict=True)):
        n, own = len(x), begin
        client = keys.name_keys(np.array([name]))[0]
        for t in range(3):
            batches: list[Tensor] = []
            epoch = 0
            while n and len(batches) < 2:
                key = keys.key(keys.key(seed, t, "local"), epoch, "batch", client)
                batches += list(keys.uniform(key, n).argsort(stable=True).split(3))
                epoch += 1
            for b in batches[:2]:
                at = own.clone().requires_grad_()
                out = x[b] @ at[:9].view(3, 3).T + at[9:]
                (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(out, y[b]), at)
                own = own - 0.3 * g
        torch.testing.assert_close(theta[i], own, rtol=1e-10, atol=1e-12)


def test_local_rounds_may_be_asked_for_together() -> None:
    data, how = federation(), Training(steps=2, batch_size=3, momentum=0.6)
    options: dict[str, Any] = {"model": NET, "rounds": 5, "step_size": 0.05, "seed": 2, "training": how, "decay": 0.9}
    one, apart = own_models(lambda s: local_models(s, **options), data)
    two, together = own_models(lambda s: local_models(s, together=3, **options), data)
    assert torch.equal(one, two)
    assert [len(done.rounds) for done in (apart, together)] == [5, 2]


def test_a_late_client_keeps_its_model_and_misses_the_round() -> None:
    data = federation()
    options: dict[str, Any] = {"model": NET, "step_size": 0.05, "seed": 2, "training": Training(steps=3)}
    theta, _ = own_models(lambda s: local_models(s, rounds=3, **options), data, participation=Late())
    begin = NET.initial(1, keys.generator(2, "start"))[0]
    for i, (x, y) in enumerate(zip(data.xs, data.ys, strict=True)):
        if len(x):
            rounds = sum((i + t) % 3 != 0 for t in range(3))
            assert rounds == 2
            torch.testing.assert_close(
                theta[i], descended(NET, begin, x, y, [0.05] * rounds, 0.0), rtol=1e-10, atol=1e-12
            )
    late = Late(silent=(0,))
    _, finished, _ = run_one(lambda s: local_models(s, rounds=1, **options), data.rows, participation=late)
    assert finished.rounds[0].info == {"events": ["nobody answered"]}


def test_other_precisions_and_losses_work() -> None:
    data = federation(classes=3)
    single = ragged([x.float() for x in data.xs], data.ys)
    net = mlp(3, 5, n_outputs=3)
    state, _, _ = run_one(
        lambda s: fedavg(s, model=net, rounds=2, step_size=0.1, seed=0, training=Training(epochs=1, batch_size=4)),
        single,
    )
    assert state.theta.dtype == torch.float32
    assert state.theta.isfinite().all()
    wide: Dense = softmax_regression(3, 3)
    theta, _ = own_models(lambda s: local_models(s, model=wide, rounds=2, step_size=0.1, seed=0), data)
    assert theta.shape == (10, wide.n_parameters)
