# SPDX-License-Identifier: Apache-2.0
"""Linear representations with stragglers: how far the common subspace is from the planted one, round by round and in time.

Tziotis et al., "Straggler-Resilient Personalized Federated Learning", Section 4. The paper has no experiment on linear
representations; what is planted follows its assumptions (normal features, heads of length sqrt(k), a subspace with
orthonormal columns), the step is its 1 / (8 sigma_max^2), where heads are spread evenly and sigma_max is 1, and times are
exponential as in Theorem 4.6. All methods take the steps of Algorithm 2 and differ in who takes part, and in the start.

The start by the method of moments is everybody's work, for SRPFL as well (Algorithm 2, line 2), and is charged as such.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.linear_representation import State, linear_representation
from coterie.algorithms.srpfl import Adaptive, Fixed, Stages, Theory, srpfl
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.participation import DynamicExponential, Exponential, Speeds, VirtualClock
from coterie.protocol import Lockstep, Save
from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, seen, silent
from coterie.studies.data.representations import PlantedRepresentation, principal_distance
from coterie.studies.data.representations import linear_representation as plant
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "METHODS", "NAME", "SPEEDS", "STAGES", "Settings", "run", "settings"]

NAME = "srpfl-linear"
METHODS = ("srpfl", "fedrep", "fastest", "srpfl-random", "fedrep-random")
STAGES = ("fixed", "theory", "adaptive")
SPEEDS: dict[str, Speeds] = {"fixed": Exponential(), "dynamic": DynamicExponential()}
CAPTION = (
    "distance: sine of the largest principal angle to the planted subspace; ratio: final distance over fedrep's; rate: "
    "factor on the distance in a round while it falls, with R2 of the fit and Theorem 4.5's bound; rounds, time: until the "
    "distance is twice fedrep's final one; in all: virtual time of all rounds. Means over seeds, medians for rounds and "
    "time. fedrep: everyone in every round; fastest: SRPFL's first clients and nobody else; -random: from a random "
    "subspace, the others from the method of moments"
)
_NEAR = 0.5  # from here on a distance falls exponentially; a random start is in no direction yet

Program = Callable[[Any], Lockstep]


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    clients, rows, features, rank, noise : int, int, int, int, float
        M, rows of each client, d, k and sigma.
    batch_size, step_size, rounds : int, float, int
        m, eta, and the rounds of every method.
    first : int
        n_0, clients of the first stage of SRPFL.
    stages : {"fixed", "theory", "adaptive"}
        When a stage is over: after `stage_rounds`, by Lemma B.1, or when more clients promise more in a second.
    stage_rounds : int
        tau_r of fixed stages.
    speeds : {"fixed", "dynamic"}
        Whether clients' times are drawn once or every round.
    communication : float
        Virtual seconds of every exchange.
    methods : tuple of str
        Of `METHODS`. FedRep is run in any case: the others are compared with it.
    seed, seeds : int
        Of the first repetition, and their number.
    jobs : int or None
        Processes; None takes as many as there are seeds or cores.
    """

    clients: int = 128
    rows: int = 1000
    features: int = 50
    rank: int = 3
    noise: float = 0.1
    batch_size: int = 50
    step_size: float = 0.125
    rounds: int = 100
    first: int = 8
    stages: str = "fixed"
    stage_rounds: int = 10
    speeds: str = "fixed"
    communication: float = 0.0
    methods: tuple[str, ...] = METHODS
    seed: int = 0
    seeds: int = 5
    jobs: int | None = None

    def __post_init__(self) -> None:
        one_of("--speeds", self.speeds, tuple(SPEEDS))
        one_of("--stages", self.stages, STAGES)
        for method in self.methods:
            one_of("--methods", method, METHODS)
        at_least(1, rounds=self.rounds, batch_size=self.batch_size, stage_rounds=self.stage_rounds)
        at_least(1, seeds=self.seeds, jobs=self.jobs, first=self.first)
        if self.first > self.clients:
            raise ConfigError(
                f"--first is {self.first} of {self.clients} clients", "begin with at most as many clients as there are"
            )
        if not 0 < self.step_size < 1:
            raise ConfigError(f"--step-size is {self.step_size}", "give it above 0 and below 1: heads have sigma_max 1")

    @property
    def rule(self) -> Stages:
        """When a stage is over. A round leaves about 1 - eta of the distance, and sqrt(1 - a) in Lemma B.1."""
        if self.stages == "theory":
            return Theory(contraction=1 - (1 - self.step_size) ** 2)
        return Adaptive() if self.stages == "adaptive" else Fixed(self.stage_rounds)

    @property
    def runs(self) -> tuple[str, ...]:
        """What is run: FedRep first."""
        return ("fedrep", *(method for method in self.methods if method != "fedrep"))


def settings(*, quick: bool = False) -> Settings:
    """Give the settings; with `quick`, fewer clients, rows and seeds."""
    small = Settings(clients=64, rows=400, features=20, rank=2, rounds=80, first=4, seeds=2)
    return small if quick else Settings()


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run all seeds."""
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    found = side_by_side(
        partial(_repeat, chosen), seeds, chosen.jobs, lambda done: tell(NAME, done, len(seeds), "seeds")
    )
    summary = [_summed_up([_judged(each, method, chosen) for each in found]) for method in chosen.methods]
    rows = [row for each in found for method in chosen.methods for row in each.curves[method]]
    return Outcome(NAME, asdict(chosen), rows, summary)


# -- one seed ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Repetition:
    """What one seed gave: a row for every round of each method, round 0 being the start; and sigma_min of all heads."""

    curves: dict[str, list[dict[str, Any]]]
    sigma_min: float


def _repeat(chosen: Settings, seed: int) -> _Repetition:
    """Run every method on one plant."""
    planted = plant(
        n_clients=chosen.clients, rows=chosen.rows, n_features=chosen.features, rank=chosen.rank, noise=chosen.noise,
        seed=seed,
    )  # fmt: skip
    clock = VirtualClock(SPEEDS[chosen.speeds], chosen.communication)
    engine = InProcess(planted.rows, clock=clock, seed=seed)
    begun = engine.run([lambda state: _steps(state, chosen, seed, "moments", rounds=0)])
    moments, waited = begun.states[0].theta, begun.rounds[-1].time
    finished = engine.run([_program(method, chosen, seed, moments, planted) for method in chosen.runs])
    curves: dict[str, list[dict[str, Any]]] = {}
    for i, method in enumerate(chosen.runs):
        before = 0.0 if method.endswith("-random") else waited
        curves[method] = [
            {"method": method, "seed": seed, "round": t, "virtual_time": before + done.time,
             "participants": done.participants, "distance": done.info["distance"]}
            for t, done in enumerate(done for done in finished.rounds if done.run == i)
        ]  # fmt: skip
    return _Repetition(curves, float(torch.linalg.svdvals(planted.heads)[-1]) / math.sqrt(chosen.clients))


def _program(method: str, chosen: Settings, seed: int, moments: Tensor, planted: PlantedRepresentation) -> Program:
    """Say who takes part, and note the distance after every round."""

    def see(save: Save) -> tuple[Save, bool]:
        far = float(principal_distance(save.state.theta, planted.basis))
        return replace(save, info={**save.info, "distance": far}), True

    def everyone(state: Any) -> Lockstep:
        start = "random" if method.endswith("-random") else moments
        return seen(_steps(state, chosen, seed, start, rounds=chosen.rounds), see)

    if method.startswith("fedrep"):
        return everyone
    most = chosen.first if method == "fastest" else chosen.clients
    return lambda state: srpfl(everyone, state, n0=chosen.first, n_clients=most, stages=chosen.rule)


def _steps(state: State | None, chosen: Settings, seed: int, start: Any, *, rounds: int) -> Lockstep:
    return linear_representation(
        state, n_features=chosen.features, rank=chosen.rank, rounds=rounds, step_size=chosen.step_size, seed=seed,
        start=start, batch_size=chosen.batch_size,
    )  # fmt: skip


# -- the summary ------------------------------------------------------------------------------------------------------
def _judged(found: _Repetition, method: str, chosen: Settings) -> dict[str, Any]:
    """Say what a method has reached with one seed."""
    curve, best = found.curves[method], found.curves["fedrep"][-1]["distance"]
    far = [row["distance"] for row in curve]
    rate, fit = _rate(far)
    there = next((row for row in curve if row["distance"] <= 2 * best), None)
    a = chosen.step_size * (1 - far[0] ** 2) * found.sigma_min**2 / 2  # Theorem 4.5, where everyone takes part
    return {
        "method": method,
        "start_distance": far[0],
        "final_distance": far[-1],
        "ratio": far[-1] / best,
        "rate": rate,
        "rate_r2": fit,
        "rate_bound": math.sqrt(1 - a) if method.startswith("fedrep") else None,
        "rounds_to_2x": None if there is None else there["round"],
        "time_to_2x": None if there is None else there["virtual_time"],
        "virtual_time": curve[-1]["virtual_time"],
    }


def _rate(far: Sequence[float]) -> tuple[float | None, float | None]:
    """Fit an exponential to the rounds in which the distance falls: the factor of one round, and R2 of its logarithm."""
    begin = next((t for t, d in enumerate(far) if d <= _NEAR), len(far))
    end = next(t for t, d in enumerate(far) if d <= 2 * far[-1])
    if end - begin < 2:  # two points are on a line in any case
        return None, None
    t, log = np.arange(begin, end + 1), np.log(far[begin : end + 1])
    slope, intercept = np.polyfit(t, log, 1)
    rest = np.square(log - slope * t - intercept).sum() / np.square(log - log.mean()).sum()
    return float(np.exp(slope)), float(1 - rest)


def _summed_up(judged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up one method's seeds."""

    def mean(name: str) -> float | None:
        values = [each[name] for each in judged if each[name] is not None]
        return float(np.mean(values)) if values else None

    def median(name: str) -> float | None:
        values = [math.inf if each[name] is None else each[name] for each in judged]
        middle = float(np.median(values))
        return middle if math.isfinite(middle) else None

    return {
        "method": judged[0]["method"],
        "seeds": len(judged),
        **{name: mean(name) for name in ("start_distance", "final_distance", "ratio")},
        "max_ratio": max(each["ratio"] for each in judged),
        **{name: mean(name) for name in ("rate", "rate_r2", "rate_bound")},
        **{name: median(name) for name in ("rounds_to_2x", "time_to_2x")},
        "virtual_time": mean("virtual_time"),
    }


COLUMNS = [
    Column("method", "method"), Column("start_distance", "start", ".3f"),
    Column("final_distance", "distance", ".5f"), Column("ratio", "ratio", ".3f"), Column("max_ratio", "max", ".3f"),
    Column("rate", "rate", ".3f"), Column("rate_r2", "R2", ".3f"), Column("rate_bound", "bound", ".3f"),
    Column("rounds_to_2x", "rounds", ".0f"), Column("time_to_2x", "time", ".1f"),
    Column("virtual_time", "in all", ".1f"),
]  # fmt: skip
