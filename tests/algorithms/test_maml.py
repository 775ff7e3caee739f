# SPDX-License-Identifier: Apache-2.0
"""MAML: hand-calculated on quadratics, against exact second derivatives, and at its planted minimum."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.maml import State, maml
from coterie.errors import ConfigError
from coterie.local import Training, sgd
from coterie.models import Dense, Model, Network, linear_regression
from helpers import BATCHES, MODULE, NET, Federation, federation, run_one

LINE = linear_regression(1, intercept=False)
ONE = Training(steps=1)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def two_clients() -> Federation:
    """A: one row (1, 2), f' = 2 t - 4, f'' = 2.  B: rows (1, 2) and (2, 2), f' = 5 t - 6, f'' = 5."""
    return Federation([column(1), column(1, 2)], [column(2)[:, 0], column(2, 2)[:, 0]], ["a", "b"])


def from_zero(clients: tuple[int, ...] = (0, 1), **options: Any) -> float:
    """Local steps of 0.1 with inner steps of 0.1, from theta = 0."""
    settings: dict[str, Any] = {"rounds": 1, "alpha": 0.1, "beta": 0.1, "seed": 0, "training": ONE} | options
    data = two_clients()
    some = Federation(*([values[i] for i in clients] for values in (data.xs, data.ys, data.names)))  # type: ignore[arg-type]
    begin = State(torch.zeros(1, dtype=torch.float64))
    state, _, _ = run_one(lambda s: maml(s or begin, model=LINE, **settings), some.rows)
    assert torch.equal(begin.theta, torch.zeros(1, dtype=torch.float64))  # what was sent is not written to
    return float(state.theta)


# -- a step -----------------------------------------------------------------------------------------------------------
def test_a_hessian_free_step_on_a_quadratic_matches_hand_calculation() -> None:
    # A: the inner step goes to 0.4, where f' = -3.2; (1 - 0.1 2)(-3.2) = -2.56.  B: to 0.6, f' = -3; (1 - 0.1 5)(-3) = -1.5.
    assert from_zero((0,)) == pytest.approx(0.256, abs=1e-9)
    assert from_zero((1,)) == pytest.approx(0.15, abs=1e-9)
    assert from_zero() == pytest.approx((0.256 + 0.15) / 2, abs=1e-9)
    assert from_zero(weighting="rows") == pytest.approx((0.256 + 2 * 0.15) / 3, abs=1e-9)


def test_a_client_whose_steps_diverge_has_no_say() -> None:
    sound = two_clients()
    wild = Federation(
        [*sound.xs, column(1e160)], [*sound.ys, torch.ones(1, dtype=torch.float64)], [*sound.names, "wild"]
    )
    how: dict[str, Any] = {"model": LINE, "rounds": 1, "alpha": 0.1, "beta": 0.1, "seed": 0, "training": ONE}
    begin = State(torch.zeros(1, dtype=torch.float64))
    alone, beside = (run_one(lambda s: maml(s or begin, **how), data.rows)[0].theta for data in (sound, wild))
    assert float(alone) != 0.0
    torch.testing.assert_close(beside, alone, rtol=1e-12, atol=0)  # sums of the same two numbers


def test_a_round_says_how_many_clients_were_left_out() -> None:
    xs = [column(1), column(1e160), column(), column(-1e160, 1)]  # a sound one, a wild one, nobody, another wild one
    data = Federation(xs, [torch.ones(len(x), dtype=torch.float64) for x in xs], [*"abcd"])
    how: dict[str, Any] = {"model": LINE, "alpha": 0.1, "beta": 0.1, "seed": 0, "training": ONE}
    begin = State(torch.zeros(1, dtype=torch.float64))
    _, finished, _ = run_one(lambda s: maml(s or begin, rounds=2, **how), data.rows)
    told = [(r.info["left_out"], r.info["events"]) for r in finished.rounds]
    assert told == 2 * [(2, ["clients left out because their steps diverged: 2"])]
    _, sound, _ = run_one(lambda s: maml(s or begin, rounds=2, **how), two_clients().rows)
    assert not any({"left_out", "events"} & r.info.keys() for r in sound.rounds)


def test_a_second_local_step_starts_where_the_first_ended() -> None:
    # A at 0.256: inner to 0.256 + 0.1 3.488 = 0.6048, f' = -2.7904; times 0.8: 0.256 + 0.1 2.23232.
    assert from_zero((0,), training=Training(steps=2)) == pytest.approx(0.479232, abs=1e-9)


def test_a_first_order_step_drops_the_hessian() -> None:
    assert from_zero((0,), hessian="first-order") == pytest.approx(0.32)
    assert from_zero((1,), hessian="first-order") == pytest.approx(0.3)


def test_it_is_not_gradient_descent() -> None:
    data, begin = two_clients(), torch.zeros(1, dtype=torch.float64)
    plain, _, _ = run_one(
        lambda s: fedavg(
            s or State(begin), model=LINE, rounds=1, step_size=0.1, seed=0, training=ONE, weighting="clients"
        ),
        data.rows,
    )
    assert float(plain.theta) == pytest.approx(0.5)
    assert from_zero() == pytest.approx(0.203, abs=1e-9)
    assert from_zero(alpha=0.0) == pytest.approx(0.5)  # without an inner step it is


@pytest.mark.parametrize("model", [NET, MODULE], ids=["dense", "module"])
def test_the_hessian_is_applied_as_autograd_would(model: Model) -> None:
    data = federation([9])
    start = model.initial(1, torch.Generator().manual_seed(1))[0]
    settings: dict[str, Any] = {"model": model, "rounds": 1, "alpha": 0.2, "beta": 0.1, "seed": 0, "training": ONE}

    def loss(theta: Tensor) -> Tensor:
        if isinstance(model, Network):
            out = torch.func.functional_call(model.module, model.unpack(theta), (data.xs[0],))
        else:
            (w1, b1), (w2, b2) = model.unpack(theta)
            out = nn.functional.linear(nn.functional.linear(data.xs[0], w1, b1).relu(), w2, b2)
        return (out[:, 0] - data.ys[0]).square().mean()

    def after(theta: Tensor) -> Tensor:
        return loss(theta - 0.2 * torch.func.grad(loss)(theta))

    want = start - 0.1 * torch.func.grad(after)(start)  # differentiates through the inner step
    got, _, _ = run_one(lambda s: maml(s or State(start), **settings), data.rows)
    first_order, _, _ = run_one(lambda s: maml(s or State(start), hessian="first-order", **settings), data.rows)
    torch.testing.assert_close(got.theta, want, rtol=1e-5, atol=1e-5)  # a finite difference errs by delta squared
    assert (first_order.theta - want).abs().max() > 1e-3


def test_the_three_batches_of_a_step_are_drawn_apart() -> None:
    # On single rows (1, y): f' = 2 (t - y), f'' = 2, so the step is 0.8 (2 (t - 0.2 (t - y1) - y2)) with y1 and y2 apart.
    y = torch.arange(50, dtype=torch.float64)
    data = Federation([torch.ones(50, 1, dtype=torch.float64)], [y], ["a"])
    begin = State(torch.zeros(1, dtype=torch.float64))
    how = Training(steps=1, batch_size=1)
    state, _, _ = run_one(
        lambda s: maml(s or begin, model=LINE, rounds=1, alpha=0.1, beta=0.1, seed=0, training=how), data.rows
    )
    moved = float(state.theta) / 0.16  # = y2 - 0.2 y1
    assert any(abs(moved - (b - 0.2 * a)) < 1e-6 for a in range(50) for b in range(50) if a != b)
    assert all(abs(moved - 0.8 * a) > 1e-6 for a in range(50))


@pytest.mark.parametrize("how", [Training(steps=3), Training(epochs=2, batch_size=3)], ids=["all", "batches"])
def test_a_wide_first_layer_in_the_space_of_the_rows_makes_no_difference(
    how: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 30, generator=draw, dtype=torch.float64) for n in (5, 0, 7, 1, 11)]
    data = Federation(xs, [x[:, 0] - x[:, 1].relu() for x in xs], [*"abcde"])
    settings: dict[str, Any] = {"rounds": 2, "alpha": 0.02, "beta": 0.01, "seed": 0, "training": how}
    model, found = Dense((30, 6, 5, 1), "squared"), []
    for wider in (2, 1000):
        monkeypatch.setattr(sgd, "_WIDER", wider)
        state, _, _ = run_one(lambda s: maml(s, model=model, **settings), data.rows)
        found.append(state.theta)
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)  # finite differences lose some digits


# -- where it ends ----------------------------------------------------------------------------------------------------
def test_recovers_the_model_that_is_best_after_a_step() -> None:
    # f(t - alpha f'(t)) has the derivative h (1 - alpha h)^2 (t - c): A weighs 2 0.8^2 about 2, B 5 0.5^2 about 1.2.
    best = (1.28 * 2 + 1.25 * 1.2) / (1.28 + 1.25)
    assert from_zero(rounds=300) == pytest.approx(best, abs=1e-6)
    assert abs(best - (2 * 2 + 5 * 1.2) / 7) > 0.15  # FedAvg's minimum


def test_minibatches_descend() -> None:
    data = federation()
    alike = Federation(data.xs[::2], data.ys[::2], data.names[::2])  # one planted model
    how: dict[str, Any] = {"alpha": 0.01, "beta": 0.02, "training": Training(epochs=2, batch_size=3)}
    _, finished, _ = run_one(lambda s: maml(s, model=NET, rounds=15, seed=0, **how), alike.rows)
    losses = [r.info["loss"] for r in finished.rounds[1:]]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"training": BATCHES}, "plain gradient steps"), ({"delta": 0.0}, "a finite difference needs a step")],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(maml(None, model=NET, rounds=1, alpha=0.1, beta=0.1, seed=0, **options))


def test_work_counts_gradients() -> None:
    for hessian, gradients in (("free", 4), ("first-order", 2)):
        run: Any = maml(None, model=NET, rounds=1, alpha=0.1, beta=0.1, seed=0, hessian=hessian, training=Training(3))  # type: ignore[arg-type]
        next(run)
        assert next(run).work == 3 * gradients
