# SPDX-License-Identifier: Apache-2.0
"""Training in the space of a client's rows against training step by step, and against least squares."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie import keys
from coterie.algorithms.fedavg import fedavg
from coterie.errors import ConfigError
from coterie.local import Training, own_outputs, train, training_moves
from coterie.local.row_space import features
from coterie.models import Dense, Model, Network, linear_regression, softmax_regression
from coterie.protocol import Block, RowProduct
from helpers import federation, one_block, ragged, run_one

D = 7
SHORT = (0, 1, 2, 4, 7, 7)  # not more rows than features: the row space is the smaller one
TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}  # float64, sums in another order
STEP = torch.tensor([0.05, 0.02], dtype=torch.float64)


def clients(counts: Sequence[int] = SHORT, classes: int = 0) -> Block:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, D, generator=draw, dtype=torch.float64) for n in counts]
    ys = [x.sum(1) + 3 + 0.3 * torch.randn(len(x), generator=draw, dtype=torch.float64) for x in xs]
    return one_block(ragged(xs, [y.long().abs() % classes for y in ys] if classes else ys))


def starts(model: Model, block: Block) -> Tensor:
    """Two runs, a model for every client.  [2, C, P]"""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(2, len(block.n), model.n_parameters, generator=draw, dtype=torch.float64)


def moves(model: Model, theta: Tensor, block: Block, how: Training) -> tuple[Tensor | RowProduct, Tensor]:
    """What `training_moves` says, and what training says."""
    key, step = keys.key(0, torch.arange(len(theta))), STEP[: len(theta)]
    got = training_moves(model, theta, own_outputs(model, theta, block), block, step, how, key)
    return got, train(model, theta, block, step, how, key) - theta


SUITED = {
    "two steps": Training(steps=2),
    "many steps": Training(steps=12),
    "passes": Training(epochs=3),
    "proximal": Training(steps=6, proximal=0.7),
    "exact": Training(exact=True, proximal=0.7),
    "exact, hardly held": Training(exact=True, proximal=1e-3),
}


@pytest.mark.parametrize("how", SUITED.values(), ids=SUITED)
@pytest.mark.parametrize("intercept", [True, False])
def test_moves_are_those_of_training(how: Training, intercept: bool) -> None:
    model, block = linear_regression(D, intercept=intercept), clients()
    theta = starts(model, block)
    got, want = moves(model, theta, block, how)
    assert isinstance(got, RowProduct)
    # With mu = 1e-3 the systems' conditions are about 1e5, and both sides are solved.
    torch.testing.assert_close(got.formed(), want, **(TIGHT if how.proximal != 1e-3 else {"rtol": 1e-9, "atol": 1e-9}))
    assert not got.formed()[:, 0].any()  # the client without rows
    common = theta[:, :1].expand_as(theta)  # everybody starts at the same model: a view
    got, want = moves(model, common, block, how)
    assert isinstance(got, RowProduct)
    torch.testing.assert_close(got.total(), want.sum(1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mu", [1e-3, 0.5, 40.0])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("counts", [SHORT, (*SHORT, 20)], ids=["dual", "primal"])
def test_an_exact_move_ends_at_the_minimum(counts: tuple[int, ...], mu: float, intercept: bool) -> None:
    model, block = linear_regression(D, intercept=intercept), clients(counts)
    theta = starts(model, block)
    got, _ = moves(model, theta, block, Training(exact=True, proximal=mu))
    assert isinstance(got, RowProduct) == (counts == SHORT)
    moved = got.formed() if isinstance(got, RowProduct) else got
    root = np.sqrt(mu / 2) * np.eye(model.n_parameters)
    for s in range(2):
        for c, n in enumerate(block.n.tolist()):
            # mean (y - z w)^2 + mu/2 |w - theta|^2 as one sum of squares.
            z = features(model, block)[c, :n].numpy()
            a = np.vstack([z / np.sqrt(max(n, 1)), root])
            b = np.concatenate([block.target[c, :n].numpy() / np.sqrt(max(n, 1)), root @ theta[s, c].numpy()])
            want = torch.from_numpy(np.linalg.lstsq(a, b, rcond=None)[0])
            torch.testing.assert_close(theta[s, c] + moved[s, c], want, rtol=1e-9, atol=1e-9)


def test_two_steps_by_hand() -> None:
    # One row x = 2, y = 6 from theta = 1, step 0.05: residuals 4, then 6 - 2 * 1.8 = 2.4; each step adds 0.05 * 2 * 2 * r.
    block = one_block(ragged([torch.tensor([[2.0, 0.0]]).double()], [torch.tensor([6.0]).double()]))
    model = linear_regression(2, intercept=False)
    theta = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    got = training_moves(
        model, theta, own_outputs(model, theta, block), block, STEP[:1], Training(steps=2), keys.key(0)[None]
    )
    assert isinstance(got, RowProduct)
    assert got.formed().flatten().tolist() == pytest.approx([0.05 * 4 * (4 + 2.4), 0.0])


def test_what_padding_scores_is_irrelevant() -> None:
    model, block = linear_regression(D), clients()
    theta = starts(model, block)
    scores = own_outputs(model, theta, block)
    scores[:, ~block.real] = 99.0
    for how in SUITED.values():
        got = training_moves(model, theta, scores, block, STEP, how, keys.key(0, torch.arange(2)))
        want, _ = moves(model, theta, block, how)
        assert isinstance(got, RowProduct)
        assert isinstance(want, RowProduct)
        assert torch.equal(got.formed(), want.formed())


NET = Dense((D, 3, 1), "squared")
OTHERWISE: dict[str, tuple[Model, Sequence[int], Training]] = {
    "momentum": (linear_regression(D), SHORT, Training(steps=5, momentum=0.5)),
    "ridge": (linear_regression(D, l2=0.3), SHORT, Training(steps=5)),
    "ridge, exact": (linear_regression(D, l2=0.3), SHORT, Training(exact=True, proximal=0.5)),
    "minibatches": (linear_regression(D), SHORT, Training(steps=5, batch_size=2)),
    "more rows than features": (linear_regression(D), (*SHORT, 20), Training(steps=12)),
    "more rows than features, exact": (linear_regression(D), (*SHORT, 20), Training(exact=True, proximal=0.5)),
    "hidden layer": (NET, SHORT, Training(steps=5)),
    "module": (Network(nn.Sequential(nn.Linear(D, 1)).double(), "squared"), SHORT, Training(steps=5)),
}


@pytest.mark.parametrize(("model", "counts", "how"), OTHERWISE.values(), ids=OTHERWISE)
def test_elsewhere_models_are_trained_as_they_are(model: Model, counts: Sequence[int], how: Training) -> None:
    block = clients(counts)
    theta = starts(model, block)
    kept = theta.clone()
    got, want = moves(model, theta, block, how)
    assert isinstance(got, Tensor)
    assert torch.equal(got, want)
    assert torch.equal(theta, kept)


def test_products_of_rows_are_not_worth_a_single_step_of_a_single_run() -> None:
    model, block = linear_regression(D), clients()
    theta = starts(model, block)
    alone, _ = moves(model, theta[:1], block, Training(steps=1))
    together, want = moves(model, theta, block, Training(steps=1))
    assert isinstance(alone, Tensor)
    assert isinstance(together, RowProduct)
    torch.testing.assert_close(together.formed(), want, **TIGHT)
    torch.testing.assert_close(alone[0], want[0], **TIGHT)


def test_what_is_kept_with_a_block_serves_any_later_training() -> None:
    block = clients()
    for intercept, how in [(True, SUITED["exact"]), (False, SUITED["exact"]), (True, SUITED["two steps"])]:
        model = linear_regression(D, intercept=intercept)
        for mu in (how.proximal, 2 * how.proximal + 0.1):
            changed = replace(how, proximal=mu)
            for _ in range(2):
                got, want = moves(model, starts(model, block), block, changed)
                assert isinstance(got, RowProduct)
                torch.testing.assert_close(got.formed(), want, **TIGHT)
    assert len(block.kept) == 2 + 4  # products with and without intercept; a factor for each of these and each mu


def test_classes_are_trained_as_they_are() -> None:
    model, block = softmax_regression(D, 3), clients(classes=3)
    got, want = moves(model, starts(model, block), block, Training(steps=5))
    assert isinstance(got, Tensor)
    assert torch.equal(got, want)


def test_features_have_a_one_for_the_intercept_and_zeros_on_padding() -> None:
    block = clients()
    assert torch.equal(features(linear_regression(D, intercept=False), block), block.x)
    got = features(linear_regression(D), block)
    assert torch.equal(got[..., :D], block.x)
    assert torch.equal(got[..., D], block.real.double())


# -- what has no closed form ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("counts", [SHORT, (*SHORT, 20), (4, 4)], ids=["short", "long", "not padded"])
@pytest.mark.parametrize("mu", [0.0, -0.5])
def test_an_exact_move_that_nothing_holds_is_refused(counts: tuple[int, ...], mu: float) -> None:
    model, block = linear_regression(D), clients(counts)
    theta, how, key = starts(model, block), Training(exact=True, proximal=mu), keys.key(0, torch.arange(2))
    with pytest.raises(ConfigError, match="is not defined") as caught:
        training_moves(model, theta, own_outputs(model, theta, block), block, STEP, how, key)
    assert "proximal above 0" in caught.value.hint


MODULE = Network(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double(), "squared")


@pytest.mark.parametrize("model", [Dense((3, 4, 1), "squared"), MODULE], ids=["dense", "module"])
def test_an_exact_move_of_a_network_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="needs linear regression") as caught:
        run_one(
            lambda state: fedavg(
                state, model=model, rounds=1, step_size=0.1, seed=0, training=Training(exact=True, proximal=1.0)
            ),
            federation().rows,
        )
    assert "exact=False" in caught.value.hint


def test_an_exact_round_without_a_proximal_term_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not defined"):
        run_one(
            lambda state: fedavg(
                state, model=linear_regression(3), rounds=1, step_size=0.1, seed=0, training=Training(exact=True)
            ),
            federation((3, 2, 1)).rows,
        )
