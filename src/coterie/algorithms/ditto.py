# SPDX-License-Identifier: Apache-2.0
"""Ditto: a model of its own for every client, pulled to a common one that is trained as if nobody had any.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1, with
FedAvg for the common model.
Departures: a client that takes part for the first time begins at the common model; where eta lambda is above 1, which would
make own models diverge, their steps are 1 / lambda long; clients without rows take part without weight.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Literal

import torch

from coterie import keys
from coterie.algorithms.averaging import State, averaged
from coterie.algorithms.fedrep import first_model
from coterie.algorithms.robust import Robust
from coterie.local import Training, client_losses, own_outputs, train
from coterie.models import Model
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean, answers

__all__ = ["State", "ditto", "new_client", "train_both"]


def ditto(
    state: State | None,
    *,
    model: Model,
    rounds: int,
    step_size: float,
    seed: int,
    lam: float = 1.0,
    training: Training = Training(epochs=5, batch_size=10),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    tol: float = 0.0,
    robust: Robust = "none",
) -> Generator[Ask | Save, Replies | None, State]:
    """Train a common model w, and for every client k a model v_k on F_k(v) + lambda/2 |v - w|^2.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts. `theta` is w; every v_k stays with its client, as private `theta`.
    model : Model
        What is trained.
    rounds : int
        T.
    step_size : float
        eta, of both models. It is multiplied by `decay` every round.
    lam : float
        lambda: 0 leaves every client alone, and the larger it is, the nearer all are to w.
    training : Training
        What a client does with w, and then with its own model.
    weighting : {"clients", "rows"}
        Whether clients count alike in the mean (paper) or by their rows.
    tol : float
        Stop when w changes by no more than this, relative to its length; 0 never stops early.
    robust : {"none", "clip", "trimmed", "median", "near"}
        How updates are averaged where some clients are bad: see `robust.py`.
    """
    if state is None:
        state = State(first_model(model, seed))
        yield Save(state)

    def question(now: State) -> Ask:
        eta = step_size * decay**now.round
        own_eta, own = new_client(eta, training, lam)
        return Ask(
            train_both,
            {
                "model": model,
                "theta": now.theta,
                "step_size": torch.tensor(eta, dtype=torch.float64),
                "own_step_size": torch.tensor(own_eta, dtype=torch.float64),
                "key": keys.key(seed, now.round, "ditto"),
                "training": training,
                "own": own,
                "by_rows": weighting == "rows",
            },
            fold={"update": WeightedMean("weight"), "loss": WeightedMean("n"), "n": Sum()},
            fresh={"theta": now.theta, "visits": torch.tensor(0)},
            work=2 * training.work(),
            scratch=model.n_outputs,
        )

    return (yield from averaged(state, question, rounds=rounds, tol=tol, robust=robust))


def new_client(step_size: float, training: Training, lam: float) -> tuple[float, Training]:
    """How clients train models of their own, those who are new from the common one: step size and training."""
    return min(step_size, 1 / lam) if lam else step_size, replace(training, proximal=lam)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(update=WeightedMean("weight"), loss=WeightedMean("n"), n=Sum())
def train_both(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Train the common model and send how far it moved; train the own one, pulled to what was received, and keep it.

    The loss is that of the own model.
    """
    model, key = shared["model"], shared["key"]
    common = shared["theta"][:, None].expand(-1, len(data.n), -1)  # w^t  [S, C, P]
    moved = train(model, common, data, shared["step_size"], shared["training"], keys.key(key, "common"))
    own = torch.where(private["visits"][..., None] > 0, private["theta"], common)  # v_k
    own = train(
        model, own, data, shared["own_step_size"], shared["own"], keys.key(key, "own"), towards=common
    )  # v - eta (grad F_k(v) + lambda (v - w^t))
    n = data.n.to(torch.float64).expand(len(own), -1)
    reply = {
        "update": moved - common,
        "loss": client_losses(model, own_outputs(model, own, data), data).to(torch.float64),
        "n": n,
        "weight": n if shared["by_rows"] else (n > 0).to(torch.float64),
    }
    return reply, {"theta": own, "visits": private["visits"] + (data.n > 0)}
