# SPDX-License-Identifier: Apache-2.0
"""Local training against a loop over clients that draws its batches with the same keys."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.local import Training, sgd, train
from coterie.models import Dense, Model, Network, linear_regression
from helpers import batches_of, federation, one_block, ragged

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
NET = Dense((3, 4, 1), "squared")
COUNTS = [0, 1, 2, 3, 5, 7, 7, 11]


def clients() -> Ragged:
    return federation(COUNTS).rows


def starts(model: Model, n: int = len(COUNTS), seed: int = 0) -> Tensor:
    return torch.randn(n, model.n_parameters, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(
    theta: Tensor, x: Tensor, y: Tensor, eta: float, how: Training, batches: list[list[int]], end: Tensor | None = None
) -> Tensor:
    """One client, linear regression, numpy: the reference."""
    z = np.column_stack([x.numpy(), np.ones(len(x))])
    w, end = theta.numpy(), (theta if end is None else end).numpy()
    v = np.zeros_like(w)
    for rows in batches:
        if not rows:
            break
        g = 2 * z[rows].T @ (z[rows] @ w - y.numpy()[rows]) / len(rows)
        v = how.momentum * v + g + how.proximal * (w - end)
        w = w - eta * v
    return torch.from_numpy(w)


HOWS = {
    "one-step": Training(steps=1),
    "full-batch": Training(steps=6),
    "full-batch-epochs": Training(epochs=3),
    "momentum": Training(steps=6, momentum=0.8),
    "proximal": Training(steps=6, proximal=0.7),
    "minibatch-steps": Training(steps=5, batch_size=2),
    "minibatch-steps-momentum": Training(steps=7, batch_size=3, momentum=0.8),
    "minibatch-epochs": Training(epochs=3, batch_size=3),
    "minibatch-epochs-all": Training(epochs=2, batch_size=4, momentum=0.8, proximal=0.3),
    "batch-larger-than-data": Training(epochs=2, batch_size=100),
    "single-rows": Training(epochs=2, batch_size=1, momentum=0.5),
    "nothing": Training(steps=0, batch_size=2),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_training_agrees_with_a_loop_over_clients(how: Training) -> None:
    rows, model = clients(), linear_regression(3)
    block = one_block(rows)
    theta = torch.stack([starts(model, seed=s) for s in range(2)])  # two runs, with keys and step sizes of their own
    eta, key = torch.tensor([0.05, 0.02], dtype=torch.float64), keys.key(0, torch.arange(2))
    got = train(model, theta, block, eta, how, key)
    for s in range(2):
        for c, n in enumerate(block.n.tolist()):
            want = loop(
                theta[s, c],
                block.x[c, :n],
                block.target[c, :n],
                float(eta[s]),
                how,
                batches_of(how, n, key[s], block.keys[c]),
            )
            torch.testing.assert_close(got[s, c], want, **TIGHT)


@pytest.mark.parametrize("kind", ["dense", "network"])
@pytest.mark.parametrize("how", [how for how in HOWS.values() if how.proximal])
def test_a_proximal_term_may_draw_models_to_others_than_those_at_the_start(how: Training, kind: str) -> None:
    model: Model = linear_regression(3) if kind == "dense" else Network(nn.Linear(3, 1).double(), "squared")
    block, key = one_block(clients()), keys.key(0, torch.arange(2))
    theta, towards = (torch.stack([starts(model, seed=s) for s in seeds]) for seeds in ((0, 1), (2, 3)))
    got = train(model, theta, block, torch.tensor([0.05, 0.02], dtype=torch.float64), how, key, towards=towards)
    for s, eta in enumerate((0.05, 0.02)):
        for c, n in enumerate(block.n.tolist()):
            x, y, batches = block.x[c, :n], block.target[c, :n], batches_of(how, n, key[s], block.keys[c])
            want = loop(theta[s, c], x, y, eta, how, batches, towards[s, c])
            torch.testing.assert_close(got[s, c], want, **TIGHT)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("kind", ["dense", "network"])
def test_a_client_in_a_block_gets_what_it_gets_alone(how: Training, kind: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model: Model = NET if kind == "dense" else Network(module, "squared")
    rows = clients()
    theta, eta, key = starts(model), torch.tensor([0.05], dtype=torch.float64), keys.key(3, torch.zeros(1).long())
    block = one_block(rows)
    together = train(model, theta[None], block, eta, how, key)[0]
    for c, number in enumerate(block.ids.tolist()):
        alone = train(model, theta[None, c : c + 1], rows.client(number), eta, how, key)[0, 0]
        torch.testing.assert_close(together[c], alone, **TIGHT)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_clients_without_rows_do_not_move(how: Training) -> None:
    theta = starts(NET)[None]
    ridge = Dense((3, 4, 1), "squared", l2=0.5)  # not even towards zero
    for model in (NET, ridge):
        got = train(model, theta, one_block(clients()), torch.tensor([0.05]), how, keys.key(0, torch.zeros(1).long()))
        assert torch.equal(got[0, 0], theta[0, 0])
        assert how.steps == 0 or not torch.equal(got[0, 1], theta[0, 1])
    nobody = ragged([torch.zeros(0, 3, dtype=torch.float64)] * 2, [torch.zeros(0, dtype=torch.float64)] * 2)
    got = train(NET, theta[:, :2], one_block(nobody), torch.tensor([0.05]), how, keys.key(0, torch.zeros(1).long()))
    assert torch.equal(got, theta[:, :2])


def test_the_chunk_size_is_irrelevant(monkeypatch: pytest.MonkeyPatch) -> None:
    theta, eta = starts(NET)[None], torch.tensor([0.05], dtype=torch.float64)
    how, key, block = Training(epochs=2, batch_size=3, momentum=0.5), keys.key(0, torch.zeros(1).long()), clients()
    at_once = train(NET, theta, one_block(block), eta, how, key)
    calls = []
    original = sgd._train_chunk

    def counting(*args: Any) -> Tensor:
        calls.append(len(args[1]))
        return original(*args)

    monkeypatch.setattr(sgd, "_train_chunk", counting)
    for size, expected in ((1, [1] * 8), (NET.n_parameters * 8 * 3, [3, 3, 2])):
        calls.clear()
        monkeypatch.setattr(sgd, "CHUNK_BYTES", size)
        torch.testing.assert_close(train(NET, theta, one_block(block), eta, how, key), at_once, **TIGHT)
        assert calls == expected


def test_every_row_is_used_once_in_a_pass() -> None:
    seen: list[list[float]] = []
    x = torch.arange(1.0, 8.0, dtype=torch.float64)[:, None]
    block = one_block(ragged([x], [x[:, 0]]))
    for batch in sgd.batches(linear_regression(1), block, Training(epochs=2, batch_size=3), keys.key(1)):
        seen.append(batch[0][0, :, 0].tolist())
        weights = batch[2][0]
        torch.testing.assert_close(weights.sum(), torch.ones((), dtype=torch.float64))
    assert [len(b) for b in seen] == [3, 3, 1, 3, 3, 1]
    first, second = ([row for batch in part for row in batch] for part in (seen[:3], seen[3:]))
    assert sorted(first) == sorted(second) == x[:, 0].tolist()
    assert first != second  # a new order in every pass


def test_no_step_is_computed_that_nobody_takes() -> None:
    x = [torch.ones(n, 1, dtype=torch.float64) for n in (2, 400)]
    block = one_block(ragged(x, [v[:, 0] for v in x]))
    steps = list(sgd._lots(block, Training(steps=5, batch_size=2), keys.key(1)))
    # The short client has one batch a pass: five passes; the long one takes its five steps in the first of them.
    assert len(steps) == 5 + 4


def test_a_minibatch_gradient_is_unbiased() -> None:
    rows, model = federation([30]).rows, linear_regression(3)
    block = one_block(rows)
    theta = starts(model, 1)
    full = model.gradient(theta[None], block.x, block.target, block.weights)[0, 0]
    n = 1000
    key = keys.key(5, torch.arange(n))
    one_step = train(model, theta.expand(n, 1, -1), block, torch.ones(n), Training(steps=1, batch_size=5), key)
    gradients = theta[0] - one_step[:, 0]
    error = gradients.std(0) / n**0.5
    assert ((gradients.mean(0) - full).abs() < 4 * error).all()  # four standard errors, in each of four coordinates
    assert (gradients.std(0) > 0.1).all()


def test_seeds_change_minibatches_and_nothing_else() -> None:
    theta, eta, block = starts(NET)[None], torch.tensor([0.05], dtype=torch.float64), one_block(clients())

    def trained(seed: int, how: Training) -> Tensor:
        return train(NET, theta, block, eta, how, keys.key(seed, torch.zeros(1).long()))

    batches = Training(steps=3, batch_size=2)
    assert torch.equal(trained(0, batches), trained(0, batches))
    assert not torch.equal(trained(0, batches), trained(1, batches))
    assert torch.equal(trained(0, Training(steps=3)), trained(1, Training(steps=3)))


def noisy(x: Tensor, ks: Tensor) -> Tensor:
    return x + keys.uniform(ks, x.shape[-1])


@pytest.mark.parametrize("how", [HOWS["full-batch"], HOWS["minibatch-steps"], HOWS["minibatch-epochs"]])
def test_augmentation_is_driven_by_keys_so_a_client_gets_in_a_block_what_it_gets_alone(how: Training) -> None:
    def made(augment: Callable[[Tensor, Tensor], Tensor] | None) -> Network:
        return Network(nn.Sequential(nn.Linear(3, 1)).double(), "squared", augment=augment)

    model, rows = made(noisy), clients()
    theta, eta, key = starts(model), torch.tensor([0.05], dtype=torch.float64), keys.key(3, torch.zeros(1).long())
    block = one_block(rows)
    together = train(model, theta[None], block, eta, how, key)[0]
    for c, number in enumerate(block.ids.tolist()):
        alone = train(model, theta[None, c : c + 1], rows.client(number), eta, how, key)[0, 0]
        torch.testing.assert_close(together[c], alone, **TIGHT)
    assert not torch.equal(together, train(made(None), theta[None], block, eta, how, key)[0])


def test_augmentation_draws_anew_for_every_row_and_step() -> None:
    drawn: list[Tensor] = []

    def record(x: Tensor, ks: Tensor) -> Tensor:
        drawn.append(ks)
        return x

    model = Network(nn.Sequential(nn.Linear(3, 1)).double(), "squared", augment=record)
    train(
        model,
        starts(model)[None],
        one_block(clients()),
        torch.tensor([0.1]),
        HOWS["minibatch-epochs"],
        keys.key(0)[None],
    )
    every = torch.cat([ks.flatten() for ks in drawn])
    assert len(torch.unique(every)) == len(every)


def test_work_counts_steps_or_passes() -> None:
    assert Training(steps=7).work() == 7
    assert Training(epochs=3, batch_size=5).work() == 3


# -- the first layer in the space of the rows -------------------------------------------------------------------------
WIDE = Dense((30, 6, 5, 1), "squared")  # at most 11 rows of 30 features


def wide_clients() -> Ragged:
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 30, generator=draw, dtype=torch.float64) for n in COUNTS]
    return ragged(xs, [x[:, 0] - x[:, 1].relu() for x in xs])


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize(
    "layers",
    [None, {"0.weight"}, {"0.weight", "0.bias", "1.weight"}, {"0.weight", "2.bias"}],
    ids=lambda names: " ".join(sorted(names or ["all"])),
)
@pytest.mark.parametrize("intercept", [True, False])
def test_training_in_the_space_of_the_rows_is_the_same_training(
    how: Training, layers: set[str] | None, intercept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(WIDE, intercept=intercept)
    moving = None if layers is None else frozenset(layers & set(model.layers))
    block, key = one_block(wide_clients()), keys.key(0, torch.arange(2))
    theta = torch.stack([starts(model, seed=s) for s in range(2)])
    eta = torch.tensor([0.02, 0.01], dtype=torch.float64)
    monkeypatch.setattr(sgd, "_PASSES", 0)
    assert sgd._suits_rows(model, how, block, moving)
    by_rows = train(model, theta, block, eta, how, key, moving)
    monkeypatch.setattr(sgd, "_WIDER", 1000)
    assert not sgd._suits_rows(model, how, block, moving)
    torch.testing.assert_close(by_rows, train(model, theta, block, eta, how, key, moving), **TIGHT)
    if moving is not None:
        fixed = torch.cat([torch.arange(part.start, part.stop) for n, part in model.layers.items() if n not in moving])
        assert torch.equal(by_rows[..., fixed], theta[..., fixed])
    assert torch.equal(by_rows[:, block.n == 0], theta[:, block.n == 0])


def test_rows_stand_for_the_first_layer_only_where_that_pays() -> None:
    block = one_block(wide_clients())
    often = Training(epochs=5, batch_size=4)

    def suits(model: Dense = WIDE, how: Training = often, layers: frozenset[str] | None = None) -> bool:
        return sgd._suits_rows(model, how, block, layers)

    assert suits()
    assert suits(how=Training(steps=2))
    assert not suits(Dense((21, 6, 1), "squared"))  # 11 rows are more than half of the features
    assert not suits(Dense((30, 1), "squared"))
    assert not suits(replace(WIDE, l2=0.1))
    assert not suits(how=Training(steps=5, batch_size=4))  # less than two passes
    assert suits(how=Training(epochs=1, batch_size=4, momentum=0.5))  # the layer's velocity is spared too
    assert not suits(how=Training(steps=2, batch_size=4, momentum=0.5))  # less than one pass
    assert not suits(layers=frozenset({"1.weight"}))
