# SPDX-License-Identifier: Apache-2.0
"""Placing and measuring clients, against plain loops and by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.fedavg import local_models
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.evaluate import Measured, Placed, measure_ask, measure_own_ask, place_ask
from coterie.models import Dense, linear_regression, softmax_regression
from helpers import LINE, SOFTMAX, federation, ragged

SCALAR = linear_regression(1, intercept=False)  # y = theta x, so a row's loss can be computed in the head


def placed(model: Dense, theta: Tensor, rows: Ragged, **engine: int) -> Placed:
    return Placed(**InProcess(rows, **engine).ask(place_ask(model, theta)).values)


def measured(model: Dense, theta: Tensor, label: Tensor, rows: Ragged, **engine: int) -> Measured:
    return Measured(**InProcess(rows, **engine).ask(measure_ask(model, theta, label)).values)


def scalars(*clients: tuple[list[float], list[float]]) -> Ragged:
    return ragged(
        [torch.tensor(x, dtype=torch.float64)[:, None] for x, _ in clients],
        [torch.tensor(y, dtype=torch.float64) for _, y in clients],
    )


def models(*theta: float) -> Tensor:
    return torch.tensor(theta, dtype=torch.float64)[:, None]


def row_losses(model: Dense, theta: Tensor, x: Tensor, y: Tensor) -> np.ndarray:
    """[n] by numpy."""
    ((weight, bias),) = model.unpack(theta)
    out = x.numpy() @ weight.numpy().T + (0 if bias is None else bias.numpy())
    if model.loss == "squared":
        return np.asarray((out[:, 0] - y.numpy()) ** 2)
    return np.log(np.exp(out).sum(1)) - out[np.arange(len(x)), y.numpy()]


# -- placing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", [LINE, SOFTMAX])
@pytest.mark.parametrize("block_bytes", [1, 1 << 30])
def test_placing_equals_a_loop_over_clients_and_models(model: Dense, block_bytes: int) -> None:
    made = federation(classes=3 if model is SOFTMAX else 0)
    theta = model.initial(4, torch.Generator().manual_seed(5))
    found = placed(model, theta, made.rows, block_bytes=block_bytes)
    for i, (x, y) in enumerate(zip(made.xs, made.ys, strict=True)):
        assert int(found.rows[i]) == len(x)
        if not len(x):
            continue
        per_row = np.stack([row_losses(model, one, x, y) for one in theta])  # [K, n]
        losses = per_row.mean(1)
        first, second = np.argsort(losses)[:2]
        np.testing.assert_allclose(found.losses[i], losses, rtol=1e-12)
        assert int(found.label[i]) == first
        difference = per_row[second] - per_row[first]
        assert float(found.margin[i]) == pytest.approx(difference.mean(), rel=1e-9)
        if len(x) > 1:
            error = difference.std(ddof=1) / math.sqrt(len(x))
            assert float(found.margin_error[i]) == pytest.approx(error, rel=1e-9)
            assert bool(found.certain[i]) == (difference.mean() > 2 * error)


def test_margin_and_its_error_by_hand() -> None:
    # Rows (x, y) = (1, 1), (1, 2), (1, 6). Model 1 loses 0, 1, 25; model 3 loses 4, 1, 9; model -9 is hopeless.
    # Means 26/3 and 14/3: model 3 is best. Runner-up minus best by row: -4, 0, 16; mean 4, variance (64+16+144)/2 = 112.
    found = placed(SCALAR, models(1, -9, 3), scalars(([1, 1, 1], [1, 2, 6])))
    assert found.label.tolist() == [2]
    assert found.losses[0, [0, 2]].tolist() == pytest.approx([26 / 3, 14 / 3])
    assert float(found.margin) == pytest.approx(4)
    assert float(found.margin_error) == pytest.approx(math.sqrt(112 / 3))
    assert found.certain.tolist() == [False]  # 4 < 2 * 6.1


def test_certain_means_more_than_two_standard_errors() -> None:
    # Differences 16 - 2 e and 16 + 2 e have mean 16 and standard error 2 e: at e = 4 exactly two of them.
    # With models 0 and 4 a row (1, y) has the difference (y - 0)^2 - (y - 4)^2 = 8 y - 16, so y = 4 -+ e / 4.
    def certain(e: float) -> bool:
        found = placed(SCALAR, models(0, 4), scalars(([1, 1], [4 - e / 4, 4 + e / 4])))
        assert float(found.margin) == pytest.approx(16)
        assert float(found.margin_error) == pytest.approx(2 * e)
        return bool(found.certain)

    assert certain(3.9)
    assert not certain(4.1)


def test_one_row_cannot_be_certain() -> None:
    found = placed(SCALAR, models(0, 4), scalars(([1], [4]), ([1, 1], [4, 4])))
    assert found.label.tolist() == [1, 1]
    assert found.margin.tolist() == [16, 16]
    assert found.margin_error.tolist() == [math.inf, 0]
    assert found.certain.tolist() == [False, True]


def test_without_rows_there_is_no_margin() -> None:
    found = placed(SCALAR, models(0, 4), scalars(([], []), ([1], [1])))
    assert (int(found.label[0]), float(found.margin[0]), int(found.rows[0])) == (0, 0, 0)
    assert not bool(found.certain[0])


def test_ties_go_to_the_lowest_number_and_are_uncertain() -> None:
    found = placed(SCALAR, models(5, 1, 3), scalars(([1, 1], [2, 2])))
    assert found.label.tolist() == [1]
    assert (float(found.margin), found.certain.tolist()) == (0, [False])


def test_with_one_model_everybody_belongs_to_it_for_certain() -> None:
    found = placed(SCALAR, models(2), scalars(([1], [4]), ([1, 1], [4, 5])))
    assert found.label.tolist() == [0, 0]
    assert found.losses.tolist() == [[4], [6.5]]
    assert found.margin.tolist() == [0, 0]
    assert found.certain.tolist() == [True, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nobody_belongs_to_a_model_that_diverged(bad: float) -> None:
    found = placed(SCALAR, models(bad, 3, bad), scalars(([1, 1], [4, 5]), ([1], [0])))
    assert found.label.tolist() == [1, 1]
    assert found.losses.tolist() == [[math.inf, 2.5, math.inf], [math.inf, 9, math.inf]]
    assert found.margin.tolist() == [math.inf, math.inf]
    assert found.certain.tolist() == [True, True]


def test_when_all_diverged_nothing_is_certain() -> None:
    found = placed(SCALAR, models(math.nan, math.nan), scalars(([1, 1], [4, 5])))
    assert found.certain.tolist() == [False]


# -- measuring --------------------------------------------------------------------------------------------------------
def test_squared_errors_of_each_clients_own_model_equal_a_loop() -> None:
    made = federation()
    theta = LINE.initial(3, torch.Generator().manual_seed(6))
    label = torch.arange(len(made.xs)) % 3
    for block_bytes in (1, 1 << 30):
        found = measured(LINE, theta, label, made.rows, block_bytes=block_bytes)
        want = [
            row_losses(LINE, theta[k], x, y).mean() if len(x) else 0.0
            for k, x, y in zip(label, made.xs, made.ys, strict=True)
        ]
        np.testing.assert_allclose(found.loss, want, rtol=1e-12)
        np.testing.assert_allclose(found.metric, want, rtol=1e-12)
        pooled = np.concatenate(
            [row_losses(LINE, theta[k], x, y) for k, x, y in zip(label, made.xs, made.ys, strict=True)]
        )
        assert found.mean_metric == pytest.approx(pooled.mean(), rel=1e-12)


def test_accuracy_of_each_clients_own_model_equals_a_loop() -> None:
    made = federation(classes=3)
    theta = SOFTMAX.initial(2, torch.Generator().manual_seed(7))
    label = torch.tensor([0, 1] * 5)
    found = measured(SOFTMAX, theta, label, made.rows)
    right = []
    for i, (k, x, y) in enumerate(zip(label, made.xs, made.ys, strict=True)):
        ((weight, bias),) = SOFTMAX.unpack(theta[k])
        hit = (x.numpy() @ weight.numpy().T + bias.numpy()).argmax(1) == y.numpy()
        right.append(hit)
        if len(x):
            assert float(found.metric[i]) == pytest.approx(hit.mean())
            assert float(found.loss[i]) == pytest.approx(row_losses(SOFTMAX, theta[k], x, y).mean(), rel=1e-12)
    assert 0 < np.concatenate(right).mean() < 1
    assert found.mean_metric == pytest.approx(np.concatenate(right).mean())


def test_the_mean_over_rows_is_not_the_mean_over_clients() -> None:
    # One row with error 3, three rows with error 1: (9 + 1 + 1 + 1) / 4 = 3, while clients' means would give 5.
    found = measured(SCALAR, models(0), torch.tensor([0, 0]), scalars(([1], [3]), ([1, 1, 1], [1, -1, 1])))
    assert found.metric.tolist() == [9, 1]
    assert found.rows.tolist() == [1, 3]
    assert found.mean_metric == pytest.approx(3)


def test_no_rows_at_all_measure_as_nothing() -> None:
    assert measured(SCALAR, models(1), torch.tensor([0]), scalars(([], []))).mean_metric == 0


def test_private_models_are_measured_and_stay() -> None:
    made = federation((6, 9, 4))
    engine = InProcess(made.rows)
    engine.run([lambda state: local_models(state, model=LINE, rounds=1, step_size=0.1, seed=0, l2=0.5)])
    before = engine.worker.private[0]["theta"].clone()
    found = Measured(**engine.ask(measure_own_ask(LINE)).values)
    for i, (x, y) in enumerate(zip(made.xs, made.ys, strict=True)):
        # Ridge with a free intercept, by the normal equations of centred rows.
        xc, yc = (x - x.mean(0)).numpy(), (y - y.mean()).numpy()
        w = np.linalg.solve(xc.T @ xc / len(x) + 0.5 * np.eye(3), xc.T @ yc / len(x))
        assert float(found.metric[i]) == pytest.approx(((xc @ w - yc) ** 2).mean(), rel=1e-6)
    assert torch.equal(engine.worker.private[0]["theta"], before)


def test_cross_entropy_of_a_hopeless_model_is_large_and_finite() -> None:
    model = softmax_regression(1, 2, intercept=False)
    theta = torch.tensor([[1000.0, -1000.0]], dtype=torch.float64)  # class 0 with certainty when x > 0
    rows = ragged([torch.ones(2, 1, dtype=torch.float64)], [torch.tensor([1, 0])])
    found = measured(model, theta, torch.tensor([0]), rows)
    assert float(found.loss) == pytest.approx(1000)
    assert float(found.metric) == 0.5
