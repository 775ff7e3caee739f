# SPDX-License-Identifier: Apache-2.0
"""LG-FedAvg: the mirror of FedRep, a representation of its own for every client under shared top layers.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020, Algorithm 1,
where both parts move together. With `alternating` they move in turn, as in Algorithm 1 of Tziotis et al.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from coterie.algorithms.averaging import State
from coterie.algorithms.fedrep import Run, partly_shared
from coterie.algorithms.robust import Robust
from coterie.local import Training
from coterie.models import Model, Part, first_layers

__all__ = ["State", "lg_fedavg", "new_client"]


def lg_fedavg(
    state: State | None,
    *,
    model: Model,
    rounds: int,
    step_size: float,
    seed: int,
    personal: tuple[str, ...] | None = None,
    training: Training = Training(epochs=5, batch_size=10),  # noqa: B008  (frozen)
    alternating: Training | None = None,
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    start: Tensor | None = None,
    tol: float = 0.0,
    robust: Robust = "none",
) -> Run:
    """Train every client's own representation and the top layers that all share.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts. `theta` is the shared top.
    personal : tuple of str, optional
        The representation: layers by the beginning of their names; all but the last two when not given.
    training : Training
        What a client does with its model.
    alternating : Training, optional
        When given, `training` moves the representation only, the top fixed, and then this moves the top.
    model, rounds, step_size, seed, decay, weighting, start, tol, robust
        As for `fedrep`.
    """
    together: tuple[tuple[Part, Training], ...] = (("both", training),)
    return (
        yield from partly_shared(
            state, model=model, personal=first_layers(model, 2) if personal is None else personal, rounds=rounds,
            step_size=step_size, seed=seed,
            turns=together if alternating is None else (("personal", training), ("shared", alternating)),
            decay=decay, weighting=weighting, start=start, tol=tol, robust=robust,
        )
    )  # fmt: skip


def new_client(step_size: float, training: Training) -> tuple[float, Training]:
    """How a client that is new gets a representation: step size and training, the top fixed."""
    return step_size, replace(training, proximal=0.0)
