# SPDX-License-Identifier: Apache-2.0
"""LG-FedAvg against hand calculation, and where clients see the same things in different ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.fedrep import fedrep
from coterie.algorithms.lg_fedavg import lg_fedavg
from coterie.errors import ConfigError
from coterie.local import Training, own_outputs
from coterie.models import Dense, linear_regression, mlp, split
from helpers import BATCHES, NET, Federation, federation, one_block, run_one

SCALAR = Dense((1, 1, 1), "squared", intercept=False)  # w relu(a x)
ONE = Training(steps=1)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def by_hand(**options: Any) -> tuple[Any, Any]:
    """A: one row (1, 2).  B: rows (1, 2) and (2, 2).  A step of 0.1 from a = 1, w = 1."""
    data = Federation([column(1), column(1, 2)], [column(2)[:, 0], column(2, 2)[:, 0]], ["a", "b"])
    start = torch.ones(2, dtype=torch.float64)
    settings = {"personal": ("0",), "rounds": 1, "step_size": 0.1, "seed": 0, "training": ONE, "start": start}
    state, _, engine = run_one(lambda s: lg_fedavg(s, model=SCALAR, **settings | options), data.rows)
    return state, engine.worker.private[0]["personal"].flatten().tolist()


def test_one_round_matches_hand_calculation() -> None:
    # Outputs are x. A: both by 2 (1 - 2) = -2, to 1.2; B: by mean(2 (1 - 2), 0) = -1, to 1.1. Only w is averaged.
    state, own = by_hand()
    assert state.theta.tolist() == pytest.approx([1.15])
    assert own == pytest.approx([1.2, 1.1])
    state, _ = by_hand(weighting="rows")
    assert state.theta.tolist() == pytest.approx([(1.2 + 2 * 1.1) / 3])


def test_one_alternating_round_matches_hand_calculation() -> None:
    # First a as above. Then w: A 2 (1.2 - 2) 1.2 = -1.92, to 1.192; B mean(2 (1.1 - 2) 1.1, 2 (2.2 - 2) 2.2) = -0.55: 1.055.
    state, own = by_hand(alternating=ONE)
    assert state.theta.tolist() == pytest.approx([(1.192 + 1.055) / 2])
    assert own == pytest.approx([1.2, 1.1])


def test_it_mirrors_fedrep() -> None:
    how: dict[str, Any] = {"model": NET, "rounds": 3, "step_size": 0.05, "seed": 1}
    mirrored, _, left = run_one(
        lambda s: lg_fedavg(s, personal=("0",), training=BATCHES, alternating=BATCHES, **how), federation().rows
    )
    same, _, right = run_one(lambda s: fedrep(s, personal=("0",), head=BATCHES, body=BATCHES, **how), federation().rows)
    assert torch.equal(mirrored.theta, same.theta)
    assert torch.equal(left.worker.private[0]["personal"], right.worker.private[0]["personal"])


def test_all_but_the_last_two_layers_are_personal_when_not_said() -> None:
    model = mlp(3, 6, 5, 4, n_outputs=3)
    data = federation(classes=3)
    rows = Federation([x.float() for x in data.xs], data.ys, data.names).rows
    state, _, engine = run_one(lambda s: lg_fedavg(s, model=model, rounds=1, step_size=0.1, seed=0), rows)
    assert len(state.theta) == (5 * 4 + 4) + (4 * 3 + 3)
    assert engine.worker.private[0]["personal"].shape == (10, (3 * 6 + 6) + (6 * 5 + 5))
    with pytest.raises(ConfigError, match="all of the model's layers would be personal"):
        next(lg_fedavg(None, model=linear_regression(3), rounds=1, step_size=0.1, seed=0))


def test_recovers_a_common_top_under_representations_that_differ() -> None:
    # Everybody's target is the same function of two hidden features, which every client sees in a rotation of its own.
    draw = torch.Generator().manual_seed(0)
    xs, ys = [], []
    for _ in range(30):
        hidden = torch.randn(60, 4, generator=draw, dtype=torch.float64)
        turn = torch.linalg.qr(torch.randn(4, 4, generator=draw, dtype=torch.float64)).Q
        xs.append(hidden @ turn)
        ys.append(hidden[:, 0].relu() - hidden[:, 1].relu())
    data = Federation(xs, ys, [f"{i:02d}" for i in range(30)])
    model = Dense((4, 8, 1), "squared")
    how: dict[str, Any] = {"model": model, "rounds": 60, "step_size": 0.1, "seed": 0, "training": Training(steps=10)}
    state, _, engine = run_one(lambda s: lg_fedavg(s, personal=("0",), **how), data.rows)
    common, _, _ = run_one(lambda s: fedavg(s, **how), data.rows)
    theta = split(model, ("0",)).join(state.theta[None], engine.worker.private[0]["personal"])
    block = one_block(data.rows)
    own, one = (
        float((own_outputs(model, t, block)[0, ..., 0] - block.target).square().mean())
        for t in (theta[None], common.theta.expand(1, 30, -1))
    )
    assert own < 0.1 * one
