# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning: every client goes on from a common model alone, before it uses it (FedAvg-FT, FLANP-FT, MAML).

A run of its own, after training and beside it: the common model, and what clients keep of the run that made it, stay as
they are.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.fedavg import LocalState, train_private
from coterie.local import Training
from coterie.models import Model
from coterie.protocol import Ask, Block, Replies, Save, Tensors, WeightedMean, answers

__all__ = ["fine_tuning", "train_unvisited", "tuning_ask"]


def fine_tuning(
    state: LocalState | None,
    *,
    model: Model,
    theta: Tensor,
    step_size: float,
    seed: int,
    training: Training = Training(epochs=1, batch_size=10),  # noqa: B008  (frozen)
) -> Generator[Ask | Save, Replies | None, LocalState]:
    """Let every client train the common model on its own rows, once; what it finds stays with it, as private `theta`.

    Parameters
    ----------
    state : LocalState or None
        Where to go on; None starts.
    model : Model
        What was trained.
    theta : Tensor
        [P] the common model.
    step_size, training
        How the clients go on; one step of MAML's alpha is what MAML trains for.
    """
    state = state or LocalState()
    if state.round:
        return state
    got = yield tuning_ask(model, theta, step_size, seed, training)
    state = LocalState(round=1)
    if got is None or got.n == 0:
        yield Save(state, {"events": ["nobody answered"]})
    else:
        yield Save(state, {"loss": float(got["loss"])})
    return state


def tuning_ask(
    model: Model, theta: Tensor, step_size: float, seed: int, training: Training, *, only_new: bool = False
) -> Ask:
    """Ask clients to train the common model; with `only_new`, who has one of its own (`visits` above 0) keeps it."""
    return Ask(
        train_unvisited if only_new else train_private,
        {
            "model": model,
            "step_size": torch.tensor([step_size], dtype=torch.float64),
            "key": keys.key(seed, "fine-tuning")[None],
            "training": training,
            "l2": None,
            **({"theta": theta} if only_new else {}),
        },
        fold={"loss": WeightedMean("n")},
        fresh={"theta": theta, "visits": torch.tensor(0)} if only_new else {"theta": theta},
        work=training.work(),
        scratch=model.n_outputs,
    )


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(loss=WeightedMean("n"))
def train_unvisited(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Train the common model where the client has none of its own yet."""
    common = {"theta": shared["theta"][:, None].expand(private["theta"].shape)}
    reply, found = train_private(shared, each, common, data)
    return reply, {"theta": torch.where(private["visits"][..., None] > 0, private["theta"], found["theta"])}
