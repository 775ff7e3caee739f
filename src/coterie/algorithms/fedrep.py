# SPDX-License-Identifier: Apache-2.0
"""FedRep: a shared representation, and a head of its own for every client, trained in turn.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021;
the alternating scheme of Tziotis et al., "Straggler-Resilient Personalized Federated Learning", Algorithm 1, lines 6 to 15.

`partly_shared` is the scheme for any personal layers and any turns: FedRep, LG-FedAvg (`lg_fedavg.py`), FedPer.
Departure: clients without rows take part without weight; optionally clients count by their rows.
"""

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.averaging import State, averaged
from coterie.algorithms.robust import Robust
from coterie.local import Training
from coterie.local.personal import hold, share_of_work
from coterie.models import Model, Part, last_layers, split
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean, answers

__all__ = ["State", "fedrep", "first_model", "new_client", "partly_shared", "train_in_turn"]

Run = Generator[Ask | Save, Replies | None, State]


def fedrep(
    state: State | None,
    *,
    model: Model,
    rounds: int,
    step_size: float,
    seed: int,
    personal: tuple[str, ...] | None = None,
    head: Training = Training(epochs=10, batch_size=10),  # noqa: B008  (frozen)
    body: Training = Training(epochs=5, batch_size=10),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    start: Tensor | None = None,
    tol: float = 0.0,
    robust: Robust = "none",
) -> Run:
    """Train a shared representation and every client's own head.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts. `theta` is the representation.
    model : Model
        What is trained.
    rounds : int
        T.
    step_size : float
        eta, of heads and representation. It is multiplied by `decay` every round.
    personal : tuple of str, optional
        The head: layers by the beginning of their names; the last layer when not given.
    head, body : Training
        What a client does with its head, the representation fixed (tau_h), and then with the representation, its head
        fixed (tau_phi).
    weighting : {"clients", "rows"}
        Whether clients count alike in the mean (paper) or by their rows.
    start : Tensor, optional
        [P] where representation and heads begin; drawn with the seed when not given.
    tol : float
        Stop when the representation changes by no more than this, relative to its length; 0 never stops early.
    robust : {"none", "clip", "trimmed", "median", "near"}
        How updates are averaged where some clients are bad: see `robust.py`.
    """
    return (
        yield from partly_shared(
            state, model=model, personal=last_layers(model, 1) if personal is None else personal, rounds=rounds,
            step_size=step_size, seed=seed, turns=(("personal", head), ("shared", body)), decay=decay,
            weighting=weighting, start=start, tol=tol, robust=robust,
        )
    )  # fmt: skip


def partly_shared(
    state: State | None,
    *,
    model: Model,
    personal: tuple[str, ...],
    rounds: int,
    step_size: float,
    seed: int,
    turns: tuple[tuple[Part, Training], ...],
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    start: Tensor | None = None,
    tol: float = 0.0,
    robust: Robust = "none",
) -> Run:
    """Train a model of which some layers are personal: they stay with the client, and only the others are averaged.

    Parameters
    ----------
    turns : tuple of (part, Training)
        What a client trains in a round, one after the other: its "personal" part, the "shared" part, or "both" at once.
    model, personal, rounds, step_size, seed, decay, weighting, start, tol, robust
        As for `fedrep`.
    """
    cut = split(model, personal)
    common, own = cut.parts(first_model(model, seed) if start is None else start)
    if state is None:
        state = State(common.clone())
        yield Save(state)

    def question(now: State) -> Ask:
        return Ask(
            train_in_turn,
            {
                "model": model,
                "split": cut,
                "theta": now.theta,
                "step_size": torch.tensor(step_size * decay**now.round, dtype=torch.float64),
                "key": keys.key(seed, now.round, "partly shared"),
                "turns": turns,
                "by_rows": weighting == "rows",
            },
            fold={"update": WeightedMean("weight"), "loss": WeightedMean("n"), "n": Sum()},
            fresh={"personal": own.clone(), "visits": torch.tensor(0)},
            work=sum(how.work() * share_of_work(model, cut, part) for part, how in turns),
            scratch=model.n_outputs,
        )

    return (yield from averaged(state, question, rounds=rounds, tol=tol, robust=robust))  # line 15


def first_model(model: Model, seed: int) -> Tensor:
    """Draw where all begin: the shared part, and the personal part of a client that was never asked.  [P]"""
    return model.initial(1, keys.generator(seed, "start"))[0]


def new_client(step_size: float, head: Training) -> tuple[float, Training]:
    """How a client that is new gets a head: step size and training, the representation fixed."""
    return step_size, replace(head, proximal=0.0)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(update=WeightedMean("weight"), loss=WeightedMean("n"), n=Sum())
def train_in_turn(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[dict[str, Any], Tensors]:
    """Alg. 1, lines 8 to 10: train the parts in turn, keep the personal one, and send how far the shared one moved.

    The loss is that of the representation as it was received, with the head that was just fitted to it; where the first
    turn moves what is shared, that of the model before it.
    """
    model, theta, own = shared["model"], shared["theta"][:, None], private["personal"]  # [S, 1, Q], [S, C, P - Q]
    loss = None
    for turn, (part, how) in enumerate(shared["turns"]):
        held = hold(model, shared["split"], part, theta, own, data)
        if loss is None and part != "personal":
            loss = held.losses(theta, own)
        theta, own = held.train(theta, own, shared["step_size"], how, keys.key(shared["key"], turn))
        if loss is None:
            loss = held.losses(theta, own)
    assert loss is not None
    n = data.n.to(torch.float64).expand(len(own), -1)
    reply = {
        "update": (theta - shared["theta"][:, None]).expand(-1, len(data.n), -1),
        "loss": loss.to(torch.float64),
        "n": n,
        "weight": n if shared["by_rows"] else (n > 0).to(torch.float64),
    }
    return reply, {"personal": own, "visits": private["visits"] + (data.n > 0)}
