# SPDX-License-Identifier: Apache-2.0
"""Linear representations trained by SRPFL and FedRep on a virtual clock: what Theorem 4.6 is about, without its bounds.

Tziotis et al., Algorithm 2, on a plant that meets Assumptions 4.2 to 4.4. The step is 1 / (8 sigma_max^2) of Theorem 4.5,
where heads are spread evenly and sigma_max is 1; a client has (1 + sigma^2) k^3 max(log N, d / n0) rows, the theorem's m
with c_0 kappa^4 / E_0^2 = 1. Near the truth a round leaves 1 - eta of the distance: sqrt(1 - a) in Lemma B.1's tau_r.
The start is a subspace at 45 degrees to the planted one, in a random direction: as near however many clients there are, as
the proof wants it of the method of moments.

Departure: a client uses all its rows in every round. With fresh batches the distance goes up and down in the end, and the
time to come near to its mean is chance. What n clients reach shrinks with sqrt(n) either way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.linear_representation import State, linear_representation, random_start
from coterie.algorithms.srpfl import Theory, srpfl
from coterie.engines.in_process import InProcess, Round
from coterie.errors import ConfigError
from coterie.participation import Exponential, VirtualClock
from coterie.protocol import Lockstep, Save
from coterie.studies.common import seen
from coterie.studies.data.representations import linear_representation as plant
from coterie.studies.data.representations import principal_distance
from coterie.studies.srpfl_speedup_theory import Law, everyone, planned

__all__ = ["CONTRACTION", "START", "Curve", "Plant", "arrival", "train"]

STEP_SIZE = 1 / 8
CONTRACTION = 1 - (1 - STEP_SIZE) ** 2
START = math.sqrt(0.5)
_SETTLED = 1.0001  # of the limit, by the theory: where training ends


@dataclass(frozen=True)
class Plant:
    """What is planted: d, k and sigma, and the clients of the first stage."""

    features: int
    rank: int
    noise: float
    first: int

    def rows(self, n_clients: int) -> int:
        """Rows of each client, as Theorem 4.5 wants them with constants of 1."""
        enough = max(math.log(n_clients), self.features / self.first)
        return math.ceil((1 + self.noise**2) * self.rank**3 * enough)


@dataclass(frozen=True)
class Curve:
    """Distance and virtual time after every round, the start first, communication not counted.  [T + 1] each"""

    distance: list[float]
    time: list[float]


def train(planted: Plant, task: tuple[int, int]) -> dict[str, Curve]:
    """Train with FedRep and with SRPFL until both have settled: N and seed -> method -> curve."""
    n_clients, seed = task
    made = plant(
        n_clients=n_clients, rows=planted.rows(n_clients), n_features=planted.features, rank=planted.rank,
        noise=planted.noise, seed=seed,
    )  # fmt: skip
    start = made.basis + _elsewhere(made.basis, seed)

    def see(save: Save) -> tuple[Save, bool]:
        return replace(save, info={"distance": float(principal_distance(save.state.theta, made.basis))}), True

    def steps(state: State | None, *, rounds: int) -> Lockstep:
        inner = linear_representation(
            state, n_features=planted.features, rank=planted.rank, rounds=rounds, step_size=STEP_SIZE, seed=seed,
            start=start,
        )  # fmt: skip
        return seen(inner, see)

    law = Law(CONTRACTION, planted.first)
    settled = _SETTLED * law.limit(n_clients)
    plans = {"fedrep": everyone(law, n_clients, settled), "srpfl": planned(law, n_clients, settled, stages="rounds")}
    fedrep, inner = (partial(steps, rounds=sum(rounds for _, rounds in plan)) for plan in plans.values())
    staged = partial(srpfl, inner, n0=planted.first, n_clients=n_clients, stages=Theory(CONTRACTION))
    done = InProcess(made.rows, clock=VirtualClock(Exponential()), seed=seed).run([fedrep, staged]).rounds
    return {method: _curve([r for r in done if r.run == run]) for run, method in enumerate(plans)}


def _elsewhere(basis: Tensor, seed: int) -> Tensor:
    """Draw a subspace that is orthogonal to another one.  [D, K]"""
    drawn = random_start(len(basis), basis.shape[1], seed=seed)
    outside: Tensor = torch.linalg.qr(drawn - basis @ (basis.T @ drawn)).Q
    return outside


def _curve(rounds: Sequence[Round]) -> Curve:
    return Curve([r.info["distance"] for r in rounds], [r.time for r in rounds])


def arrival(curve: Curve, target: float) -> int:
    """Say after how many rounds the target is reached."""
    rounds = int(np.argmax(np.array(curve.distance) <= target))
    if rounds == 0:  # at the start already, or never
        far = curve.distance
        raise ConfigError(
            f"training goes from distance {far[0]:.2f} to {far[-1]:.2f}, and the target is {target:.2f}",
            "give more clients with --trained, or less --noise",
        )
    return rounds
