# SPDX-License-Identifier: Apache-2.0
"""FedPer: a shared body, and a head of its own for every client, trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2. FedRep
(`fedrep.py`) trains the same two parts in turn.
Departure: the paper weighs clients by their rows; that is `weighting="rows"`.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from coterie.algorithms.averaging import State
from coterie.algorithms.fedrep import Run, partly_shared
from coterie.algorithms.robust import Robust
from coterie.local import Training
from coterie.models import Model, last_layers

__all__ = ["State", "fedper", "new_client"]


def fedper(
    state: State | None,
    *,
    model: Model,
    rounds: int,
    step_size: float,
    seed: int,
    personal: tuple[str, ...] | None = None,
    training: Training = Training(epochs=5, batch_size=10),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    start: Tensor | None = None,
    tol: float = 0.0,
    robust: Robust = "none",
) -> Run:
    """Train a shared body and every client's own head.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts. `theta` is the body.
    personal : tuple of str, optional
        The head: layers by the beginning of their names; the last layer when not given.
    training : Training
        What a client does with the body that it received and its own head, both together.
    model, rounds, step_size, seed, decay, weighting, start, tol, robust
        As for `fedrep`.
    """
    return (
        yield from partly_shared(
            state, model=model, personal=last_layers(model, 1) if personal is None else personal, rounds=rounds,
            step_size=step_size, seed=seed, turns=(("both", training),), decay=decay, weighting=weighting, start=start,
            tol=tol, robust=robust,
        )
    )  # fmt: skip


def new_client(step_size: float, training: Training) -> tuple[float, Training]:
    """How a client that is new gets a head: step size and training, the body fixed."""
    return step_size, replace(training, proximal=0.0)
