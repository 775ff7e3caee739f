# SPDX-License-Identifier: Apache-2.0
"""FedPer against hand calculation and a plain loop over clients, and where heads should differ."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.algorithms.fedper import fedper
from coterie.algorithms.fedrep import first_model
from coterie.local import Training
from coterie.models import Dense
from helpers import NET, Federation, federation, run_one

SCALAR = Dense((1, 1, 1), "squared", intercept=False)  # w relu(a x)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_one_round_matches_hand_calculation() -> None:
    # A: the row (1, 2).  B: rows (1, 2) and (2, 2).  A step of 0.1 from a = 1, w = 1, where outputs are x. Both parts move
    # by the same: A by 0.1 2 (2 - 1) = 0.2, B by 0.1 mean(2 (2 - 1), 0) = 0.1. Only a is averaged.
    data = Federation([column(1), column(1, 2)], [column(2)[:, 0], column(2, 2)[:, 0]], ["a", "b"])
    how: dict[str, Any] = {"model": SCALAR, "rounds": 1, "step_size": 0.1, "seed": 0, "training": Training(steps=1)}
    start = torch.ones(2, dtype=torch.float64)
    for weighting, body in (("clients", 1.15), ("rows", (1.2 + 2 * 1.1) / 3)):
        state, _, engine = run_one(lambda s, w=weighting: fedper(s, start=start, weighting=w, **how), data.rows)
        assert state.theta.tolist() == pytest.approx([body])
        assert engine.worker.private[0]["personal"].flatten().tolist() == pytest.approx([1.2, 1.1])


def test_three_rounds_match_a_plain_loop_over_clients() -> None:
    data, rounds = federation((5, 9, 7)), 3
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    *body, w1, b1 = (part.clone() for part in torch.split(first_model(NET, 1), [12, 4, 4, 1]))
    heads = [[w1, b1] for _ in data.xs]
    for _ in range(rounds):
        sent = []
        for c, (x, y) in enumerate(zip(data.xs, data.ys, strict=True)):
            values = [*body, *heads[c]]
            for part, value in zip(module.parameters(), values, strict=True):
                part.data = value.view_as(part).clone()
            for _ in range(4):
                module.zero_grad()
                ((module(x)[:, 0] - y) ** 2).mean().backward()
                for part in module.parameters():
                    part.data -= 0.05 * part.grad
            trained = [part.data.flatten() for part in module.parameters()]
            sent.append(trained[:2])
            heads[c] = trained[2:]
        body = [torch.stack(parts).mean(0) for parts in zip(*sent, strict=True)]
    how: dict[str, Any] = {"model": NET, "rounds": rounds, "step_size": 0.05, "seed": 1, "training": Training(steps=4)}
    state, _, engine = run_one(lambda s: fedper(s, **how), data.rows)
    torch.testing.assert_close(state.theta, torch.cat(body), rtol=1e-10, atol=1e-12)
    own = torch.stack([torch.cat(head) for head in heads])
    torch.testing.assert_close(engine.worker.private[0]["personal"], own, rtol=1e-10, atol=1e-12)


def test_clients_who_share_features_and_differ_in_what_follows_are_served() -> None:
    # 8 clients, one feature: all see relu(x) and relu(-x), and weigh these by -1 or 1, every client in its own way.
    draw = np.random.default_rng(0)
    x, sign = draw.normal(size=(8, 40, 1)), draw.choice([-1.0, 1.0], size=(8, 2))
    y = sign[:, :1] * np.maximum(x[..., 0], 0) + sign[:, 1:] * np.maximum(-x[..., 0], 0)
    groups = np.repeat([f"s{i:02d}" for i in range(8)], 40)
    data = x.reshape(-1, 1), y.reshape(-1), groups
    heads = coterie.FedPer(hidden=(8,), rounds=10, step_size=0.05).fit(*data)
    one = coterie.FedAvg(hidden=(8,), rounds=10, step_size=0.05).fit(*data)
    assert heads.score(*data) > 0.95
    assert one.score(*data) < 0.5
