# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of a common model: by hand, from what it was given, and leaving that as it was."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms.averaging import State
from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.fine_tuning import fine_tuning
from coterie.algorithms.maml import maml
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import linear_regression
from helpers import BATCHES, NET, Federation, federation, run_one

LINE = linear_regression(1, intercept=False)
ONE = Training(steps=1)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def two_clients() -> Federation:
    """A: one row (1, 2), f' = 2 t - 4.  B: rows (1, 2) and (2, 2), f' = 5 t - 6.  C: none."""
    nothing = torch.zeros(0, 1, dtype=torch.float64)
    return Federation(
        [column(1), column(1, 2), nothing], [column(2)[:, 0], column(2, 2)[:, 0], nothing[:, 0]], [*"abc"]
    )


def tuned(theta: Tensor, step_size: float = 0.1, training: Training = ONE) -> tuple[Tensor, Any]:
    _, finished, engine = run_one(
        lambda s: fine_tuning(s, model=LINE, theta=theta, step_size=step_size, seed=0, training=training),
        two_clients().rows,
    )
    return engine.worker.private[0]["theta"][:, 0], finished


def test_one_step_matches_hand_calculation() -> None:
    theta = torch.ones(1, dtype=torch.float64)
    own, finished = tuned(theta)
    assert own.tolist() == pytest.approx([1.2, 1.1, 1.0])
    # A (1.2 - 2)^2; B the mean of (1.1 - 2)^2 and (2.2 - 2)^2.
    assert [r.info for r in finished.rounds] == [{"loss": pytest.approx((0.64 + 0.81 + 0.04) / 3)}]
    assert torch.equal(theta, torch.ones(1, dtype=torch.float64))


def test_many_steps_reach_every_clients_own_optimum() -> None:
    own, _ = tuned(torch.ones(1, dtype=torch.float64), training=Training(steps=200))
    assert own.tolist() == pytest.approx([2.0, 1.2, 1.0])


def test_the_run_that_made_the_model_stays_as_it_was() -> None:
    rows = federation().rows
    engine = InProcess(rows)
    state = engine.run([lambda s: fedavg(s, model=NET, rounds=3, step_size=0.05, seed=0)]).states[0]
    before = state.theta.clone()
    for seed in (0, 1):
        _, _, tuning = run_one(
            lambda s, seed=seed: fine_tuning(
                s, model=NET, theta=state.theta, step_size=0.05, seed=seed, training=BATCHES
            ),
            rows,
        )
        own = tuning.worker.private[0]["theta"]
        assert (own != before).any(1).tolist() == (rows.counts > 0).tolist()
        own.zero_()  # not even this reaches the common model
    assert torch.equal(state.theta, before)
    assert engine.worker.private == {}


def test_after_one_step_a_model_from_maml_serves_better_than_one_from_fedavg() -> None:
    begin, how = State(torch.zeros(1, dtype=torch.float64)), {"model": LINE, "rounds": 300, "seed": 0, "training": ONE}
    rows = two_clients().rows
    meta, _, _ = run_one(lambda s: maml(s or begin, alpha=0.1, beta=0.1, **how), rows)
    plain, _, _ = run_one(lambda s: fedavg(s or begin, step_size=0.1, weighting="clients", **how), rows)

    def mean_loss(own: Tensor) -> float:
        a, b = own[:2].tolist()
        return ((a - 2) ** 2 + ((b - 2) ** 2 + (2 * b - 2) ** 2) / 2) / 2

    assert mean_loss(plain.theta.expand(2)) < mean_loss(meta.theta.expand(2))  # as they are
    assert mean_loss(tuned(meta.theta)[0]) < mean_loss(tuned(plain.theta)[0])  # after the step
