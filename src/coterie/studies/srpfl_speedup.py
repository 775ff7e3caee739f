# SPDX-License-Identifier: Apache-2.0
"""SRPFL's speed-up: virtual time until the accuracy that all N clients are needed for, against FedRep, by N.

Tziotis et al., Theorem 4.6: with exponential times, E[T_SRPFL] / E[T_FedRep] = O(l / (log N + l)) for l = log(1 / (c - 1)).
The target is c times what N clients reach in the limit, 1 < c < sqrt(2). As in the proof, rounds come from the contraction
of Theorem 4.5, here taken as an equality,

    d+ = sqrt(1 - a) d + b / sqrt(n / n0),

and time from the clock: the same engine, clock and stages (Lemma B.1) as everywhere else run it. Both methods begin at
distance 1, the largest there is.

Departure: the theorem's b, a / sqrt(1 - a), keeps the bound above 2 with n0 clients, where it says nothing. It shrinks with
the square root of the rows; here b = 1 - sqrt(1 - a), so that n0 clients are the fewest that do not lose what they have.
"""

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from coterie.algorithms.srpfl import Theory, srpfl
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess, Round
from coterie.errors import ConfigError
from coterie.participation import Exponential, VirtualClock
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors
from coterie.studies.common import Column, Outcome, Tell, at_least, silent
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "Settings", "contraction", "run", "settings", "take_part"]

NAME = "srpfl-speedup"
CAPTION = (
    "Virtual time of SRPFL over that of FedRep with everyone, until the distance is c times the least that N clients reach: "
    "means over seeds,\nfor the fewest and the most clients; fit: ratio = intercept + slope / log N over all N; "
    "communication in mean times of a client's round"
)
_MOST = 10_000  # rounds: far more than any target takes


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    clients : tuple of int
        N, each n0 times a power of two: else the target may need fewer than all clients.
    communication : tuple of float
        C, in mean times of a client's round.
    c_hat : tuple of float
        Targets over the least distance, between 1 and sqrt(2).
    first : int
        n0.
    contraction : float
        a, at most 1/4 in the theorem.
    seed, seeds, jobs : int
        First seed, how many, and processes.
    """

    clients: tuple[int, ...] = tuple(20 * 2**k for k in range(9))
    communication: tuple[float, ...] = (0.0, 1.0, 10.0)
    c_hat: tuple[float, ...] = (1.05, 1.2, 1.4)
    first: int = 5
    contraction: float = 0.25
    seed: int = 0
    seeds: int = 20
    jobs: int | None = None

    def __post_init__(self) -> None:
        at_least(1, first=self.first, seeds=self.seeds, jobs=self.jobs)
        at_least(0, communication=min(self.communication))
        if not 0 < self.contraction < 1:
            raise ConfigError(f"--contraction is {self.contraction}", "give a number between 0 and 1")
        for n in self.clients:
            stages = math.log2(max(n, 1) / self.first)
            if stages < 1 or stages != int(stages):
                raise ConfigError(
                    f"--clients {n} is not {self.first} times a power of two",
                    f"give some of {', '.join(str(self.first << k) for k in range(1, 6))}, ...",
                )
        for c in self.c_hat:
            if not 1 < c < math.sqrt(2):
                raise ConfigError(f"--c-hat is {c}", "give numbers above 1 and below 1.414")


def settings(*, quick: bool = False) -> Settings:
    """Give the settings; with `quick`, fewer clients and seeds."""
    return Settings(clients=(20, 80, 320, 1280), seeds=5) if quick else Settings()


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run both methods for every N and seed; costs and targets are read off the same rounds."""
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    tasks = sorted(itertools.product(chosen.clients, seeds), reverse=True)  # the longest first
    found = side_by_side(
        partial(_repeat, chosen), tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks), "federations")
    )
    at = dict(zip(tasks, found, strict=True))
    rows = [
        {"n_clients": n, "communication": cost, "c_hat": c} | _mean([at[n, seed][cost, c] for seed in seeds])
        for cost, c, n in itertools.product(chosen.communication, chosen.c_hat, chosen.clients)
    ]
    for row in rows:
        row["bound"] = _bound(row["n_clients"], row["communication"], row["c_hat"])
    return Outcome(NAME, asdict(chosen), rows, _summary(chosen, rows))


# -- the contraction, as an algorithm ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class State:
    """How far the representation is."""

    distance: float = 1.0
    round: int = 0


def contraction(
    state: State | None, *, a: float, n0: int, target: float
) -> Generator[Ask | Save, Replies | None, State]:
    """Go on until the distance is the target, contracting in each round with as many clients as answer."""
    if state is None:
        state = State()
        yield Save(state, {"distance": state.distance})
    rate = math.sqrt(1 - a)
    while state.distance > target and state.round < _MOST:
        got = yield Ask(take_part, {}, {"clients": Sum()})
        state = replace(state, round=state.round + 1)
        if got is not None and got.n:
            noise = (1 - rate) / math.sqrt(int(got["clients"]) / n0)
            state = replace(state, distance=min(1.0, rate * state.distance + noise))
        yield Save(state, {"distance": state.distance})
    return state


def take_part(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say that one is there."""
    return {"clients": torch.ones_like(data.n)[None]}, {}


# -- one federation ---------------------------------------------------------------------------------------------------
def _repeat(chosen: Settings, task: tuple[int, int]) -> dict[tuple[float, float], dict[str, float]]:
    """Run FedRep and SRPFL once: (communication, c) -> times and rounds."""
    n, seed = task
    least = math.sqrt(chosen.first / n)  # what all clients reach in the limit
    program = partial(contraction, a=chosen.contraction, n0=chosen.first, target=min(chosen.c_hat) * least)
    staged = partial(srpfl, program, n0=chosen.first, n_clients=n, stages=Theory(chosen.contraction))
    engine = InProcess(Ragged.from_blocks(torch.zeros(n, 1, 1), None), clock=VirtualClock(Exponential()), seed=seed)
    done = engine.run([program, staged]).rounds
    return {
        (cost, c): {
            f"{what}_{method}": value
            for run_, method in enumerate(("fedrep", "srpfl"))
            for what, value in _reached([r for r in done if r.run == run_], c * least, cost).items()
        }
        for cost, c in itertools.product(chosen.communication, chosen.c_hat)
    }


def _reached(rounds: Sequence[Round], target: float, communication: float) -> dict[str, float]:
    """Say when the target was reached; communication is the same for every round, so that it need not be run anew."""
    count, there = next((i, r) for i, r in enumerate(rounds) if r.info["distance"] <= target)  # round 0 is the start
    return {"time": there.time + count * communication, "rounds": count}


# -- the summary ------------------------------------------------------------------------------------------------------
def _mean(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Average over seeds; the ratio is that of the mean times, as in the theorem."""
    mean = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
    each = [one["time_srpfl"] / one["time_fedrep"] for one in found]
    error = float(np.std(each, ddof=1) / math.sqrt(len(each))) if len(each) > 1 else None
    return {
        "time_srpfl": mean["time_srpfl"],
        "time_fedrep": mean["time_fedrep"],
        "ratio": mean["time_srpfl"] / mean["time_fedrep"],
        "ratio_error": error,
        "rounds_srpfl": round(mean["rounds_srpfl"]),
        "rounds_fedrep": round(mean["rounds_fedrep"]),
        "seeds": len(found),
    }


def _bound(n: int, communication: float, c: float) -> float:
    """The right side of eq. (248)."""
    near = math.log(1 / (c - 1))
    return (6 * (communication + 1) + 4 * near) / (math.log(n) + 2 * near)


def _summary(chosen: Settings, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit the ratio against 1 / log N for every communication cost and target."""
    lines = []
    for cost, c in itertools.product(chosen.communication, chosen.c_hat):
        mine = [row for row in rows if (row["communication"], row["c_hat"]) == (cost, c)]
        ratio = np.array([row["ratio"] for row in mine])
        line = {
            "communication": cost,
            "c_hat": c,
            "seeds": chosen.seeds,
            "ratio_first": ratio[0],
            "ratio_last": ratio[-1],
        }
        lines.append(line | _fit(1 / np.log([row["n_clients"] for row in mine]), ratio))
    return lines


def _fit(x: np.ndarray, y: np.ndarray) -> dict[str, float | None]:
    """Least squares of a line; none through fewer than three points."""
    if len(x) < 3:
        return {"slope": None, "intercept": None, "r2": None}
    slope, intercept = np.polyfit(x, y, 1)
    left = float(((y - intercept - slope * x) ** 2).sum() / ((y - y.mean()) ** 2).sum())
    return {"slope": float(slope), "intercept": float(intercept), "r2": 1 - left}


COLUMNS = [
    Column("communication", "communication", "{:g}".format),
    Column("c_hat", "c", "{:g}".format),
    Column("seeds", "seeds"),
    Column("ratio_first", "fewest N", "{:.3f}".format),
    Column("ratio_last", "most N", "{:.3f}".format),
    Column("slope", "slope", "{:.2f}".format),
    Column("intercept", "intercept", "{:.2f}".format),
    Column("r2", "R2", "{:.3f}".format),
]
