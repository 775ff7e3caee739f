# SPDX-License-Identifier: Apache-2.0
"""SRPFL's speed-up: virtual time until the accuracy that all N clients are needed for, against FedRep, by N.

Tziotis et al., Theorem 4.6: with exponential times, E[T_SRPFL] / E[T_FedRep] = O(l / (log N + l)) for l = log(1 / (c - 1)).
The paper proves it and has no experiment on it. Here the proof's own rounds are spent on drawn times and on expected ones
(`srpfl_speedup_theory.py`), and linear representations are trained (`srpfl_speedup_training.py`). Where each number is from:

- Rounds: Theorem 4.5 as an equality, from distance 1 for both methods (Lemma B.3), to c times what all N clients reach in
  the limit; 1 < c < sqrt(2), so that half of them do not reach it (eq. (11)). 1.01 and 1.4 are near the ends, 1.2 is not.
- a = 1/4, the largest in Theorem 4.5; it cancels in the bound, eq. (248).
- Stages: Lemma B.1, in both of its forms. `rounds`: tau_r of eq. (195) in every stage, as in Algorithm 2 and the sum of
  Lemma B.2. `distance`: the doubling points of eq. (194), so that stages which end above distance 1 are left out. From one
  point to the next it takes the same tau_r rounds; but only the points know of communication.
- n0 = 1, and N = 16, 32, ..., 8192. N / n0 is a power of two, or the target would not need the last stage. The target is
  below 1, the largest distance, only if N / n0 > 4.64 c^2: with 16 clients and c = 1.4, n0 = 1 is the only choice.
- Times: Exp(1), drawn once for each client, as for Figure 3; communication 0, 10 and 100, as there, and 1.

What is trained is compared with the theory too, at the limit that training has shown.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from coterie.algorithms.srpfl import exponential_order
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError
from coterie.participation import Exponential
from coterie.studies.common import Column, Outcome, Tell, at_least, silent
from coterie.studies.parallel import side_by_side
from coterie.studies.srpfl_speedup_theory import Law, Plan, everyone, planned, spent
from coterie.studies.srpfl_speedup_training import CONTRACTION, START, Plant, arrival, train

__all__ = ["CAPTION", "COLUMNS", "NAME", "Settings", "run", "settings"]

NAME = "srpfl-speedup"
STAGES: tuple[Literal["rounds", "distance"], ...] = ("rounds", "distance")
CAPTION = (
    "Virtual time of SRPFL over that of FedRep with everyone, until the distance is c times the least that N clients reach. "
    "stages: those of Lemma B.1 by its rounds, by its distances, or by its rounds and trained; C: communication, in mean "
    "times of a client's round; fewest N, most N: the ratio of mean times over seeds; exact: of expected times, "
    "for what is trained at the limit that it shows; below 1: from how many clients on; fit: intercept + slope / log N"
)
_TOLD_APART = (1.1, 1.3)  # c that training, where limits are draws, tells from 1 and from sqrt(2)


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    clients : tuple of int
        N, each n0 times a power of two.
    communication : tuple of float
        C, in mean times of a client's round.
    c_hat : tuple of float
        Targets over the least distance, between 1 and sqrt(2).
    first : int
        n0.
    contraction : float
        a, at most 1/4 in the theorem.
    trained : tuple of int
        N with which representations are trained as well.
    features, rank, noise : int, int, float
        d, k and sigma of what is planted for training.
    seed, seeds, jobs : int
        First seed, how many, and processes.
    """

    clients: tuple[int, ...] = tuple(2**k for k in range(4, 14))
    communication: tuple[float, ...] = (0.0, 1.0, 10.0, 100.0)
    c_hat: tuple[float, ...] = (1.01, 1.2, 1.4)
    first: int = 1
    contraction: float = 0.25
    trained: tuple[int, ...] = tuple(2**k for k in range(4, 9))
    features: int = 50
    rank: int = 1
    noise: float = 1.0
    seed: int = 0
    seeds: int = 20
    jobs: int | None = None

    def __post_init__(self) -> None:
        at_least(1, first=self.first, seeds=self.seeds, jobs=self.jobs, rank=self.rank, features=self.features)
        at_least(0, communication=min(self.communication), noise=self.noise)
        if not 0 < self.contraction < 1:
            raise ConfigError(f"--contraction is {self.contraction}", "give a number between 0 and 1")
        if self.trained and self.rank > min(self.first, self.features):
            raise ConfigError(
                f"--rank is {self.rank}, and the heads of {self.first} clients do not span so much",
                "give --first and --features at least the rank (Assumption 4.3)",
            )
        for c in self.c_hat:
            if not 1 < c < math.sqrt(2):
                raise ConfigError(f"--c-hat is {c}", "give numbers above 1 and below 1.414")
        for n in (*self.clients, *self.trained):
            self._check_stages(n)
        for n, c in itertools.product((*self.clients, *self.trained), self.c_hat):
            if c * self.law.limit(n) >= 1:
                least = self.first * (c * self.law.limit(self.first)) ** 2
                raise ConfigError(
                    f"with {n} clients the target of c = {c} is not below 1, the largest distance",
                    f"give more than {least:.0f} --clients, or a smaller --first",
                )

    def _check_stages(self, n: int) -> None:
        stages = math.log2(max(n, 1) / self.first)
        if stages < 1 or stages != int(stages):
            raise ConfigError(
                f"{n} clients are not {self.first} times a power of two",
                f"give some of {', '.join(str(self.first << k) for k in range(1, 6))}, ...",
            )

    @property
    def law(self) -> Law:
        """Theorem 4.5."""
        return Law(self.contraction, self.first)

    @property
    def plant(self) -> Plant:
        """What is trained on."""
        return Plant(self.features, self.rank, self.noise, self.first)


def settings(*, quick: bool = False) -> Settings:
    """Give the settings; with `quick`, fewer clients and seeds."""
    return Settings(clients=(16, 64, 256, 1024), trained=(16, 64, 256), seeds=5) if quick else Settings()


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run both methods for every N and seed, by theory and in training."""
    rows = [*_by_theory(chosen), *_in_training(chosen, tell)]
    return Outcome(NAME, asdict(chosen), rows, _summary(rows))


# -- rows -------------------------------------------------------------------------------------------------------------
def _by_theory(chosen: Settings) -> Iterator[dict[str, Any]]:
    """Draw clients' times, and spend them as planned."""
    law, seeds = chosen.law, range(chosen.seed, chosen.seed + chosen.seeds)
    drawn = {n: [_drawn(n, seed) for seed in seeds] for n in chosen.clients}
    for stages, cost, c, n in itertools.product(STAGES, chosen.communication, chosen.c_hat, chosen.clients):
        target = c * law.limit(n)
        srpfl = planned(law, n, target, stages=stages, communication=cost)
        plans = {"srpfl": srpfl, "fedrep": everyone(law, n, target)}
        rounds = {method: float(sum(rounds for _, rounds in plan)) for method, plan in plans.items()}
        times = {method: np.array([spent(plan, each, cost) for each in drawn[n]]) for method, plan in plans.items()}
        yield _row((stages, n, cost, c), rounds, times, plans)


def _drawn(n_clients: int, seed: int) -> list[float]:
    """What each client takes for a round, the fastest first."""
    clients = Ragged.from_blocks(torch.zeros(n_clients, 1, 1), None).keys
    ordered: list[float] = Exponential().times(0, clients, seed).sort().values.tolist()
    return ordered


def _in_training(chosen: Settings, tell: Tell) -> Iterator[dict[str, Any]]:
    """Train, and compare with the theory at the limit that is seen."""
    near = [c for c in chosen.c_hat if _TOLD_APART[0] <= c <= _TOLD_APART[1]]
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    tasks = sorted(itertools.product(chosen.trained if near else (), seeds), reverse=True)  # the longest first
    found = side_by_side(
        partial(train, chosen.plant), tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks), "federations")
    )
    at = dict(zip(tasks, found, strict=True))
    for cost, c, n in itertools.product(chosen.communication, near, chosen.trained):
        curves = [at[n, seed] for seed in seeds]
        limits = [each["fedrep"].distance[-1] for each in curves]
        law = Law(CONTRACTION, chosen.first, float(np.mean(limits)) * math.sqrt(n / chosen.first), START)
        rounds, times = {}, {}
        for method in ("srpfl", "fedrep"):
            arrived = [arrival(each[method], c * least) for each, least in zip(curves, limits, strict=True)]
            rounds[method] = float(np.mean(arrived))
            times[method] = np.array([each[method].time[t] + t * cost for each, t in zip(curves, arrived, strict=True)])
        target = c * law.limit(n)
        plans = {"srpfl": planned(law, n, target, stages="rounds"), "fedrep": everyone(law, n, target)}
        yield _row(("trained", n, cost, c), rounds, times, plans)


def _row(
    key: tuple[str, int, float, float], rounds: dict[str, float], times: dict[str, np.ndarray], plans: dict[str, Plan]
) -> dict[str, Any]:
    """Average over seeds, beside the expectation; the ratio is that of the mean times, as in the theorem."""
    _, n, communication, c = key
    mean = {method: float(each.mean()) for method, each in times.items()}
    ratio, seeds = mean["srpfl"] / mean["fedrep"], len(times["srpfl"])
    off = (times["srpfl"] - ratio * times["fedrep"]) / mean["fedrep"]  # of a ratio of means, to first order
    expected = {method: spent(plan, exponential_order(n), communication) for method, plan in plans.items()}
    near = math.log(1 / (c - 1))
    return {
        **dict(zip(("stages", "n_clients", "communication", "c_hat"), key, strict=True)),
        "time_srpfl": mean["srpfl"],
        "time_fedrep": mean["fedrep"],
        "ratio": ratio,
        "ratio_error": float(off.std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else None,
        "rounds_srpfl": rounds["srpfl"],
        "rounds_fedrep": rounds["fedrep"],
        "expected_srpfl": expected["srpfl"],
        "expected_fedrep": expected["fedrep"],
        "expected_ratio": expected["srpfl"] / expected["fedrep"],
        "bound": (6 * (communication + 1) + 4 * near) / (math.log(n) + 2 * near),  # eq. (248)
        "seeds": seeds,
    }


# -- the fit ----------------------------------------------------------------------------------------------------------
def _summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit the ratio against 1 / log N for every kind of stages, communication cost and target."""
    lines = []
    for key, group in itertools.groupby(rows, lambda row: (row["stages"], row["communication"], row["c_hat"])):
        mine = list(group)
        x = 1 / np.log([row["n_clients"] for row in mine])
        ratio, exact = (np.array([row[name] for row in mine]) for name in ("ratio", "expected_ratio"))
        ends = {"ratio_first": ratio[0], "ratio_last": ratio[-1], "exact_first": exact[0], "exact_last": exact[-1]}
        line = dict(zip(("stages", "communication", "c_hat"), key, strict=True)) | {"seeds": mine[0]["seeds"]}
        line |= ends | {"below_one": _below_one(mine)} | _fit(x, ratio)
        lines.append(line | {f"exact_{name}": value for name, value in _fit(x, exact).items()})
    return lines


def _below_one(rows: Sequence[dict[str, Any]]) -> int | None:
    """From how many clients on SRPFL takes less time than FedRep; None if with the most it does not."""
    found = None
    for row in sorted(rows, key=lambda row: -int(row["n_clients"])):
        if row["ratio"] >= 1:
            break
        found = row["n_clients"]
    return found


def _fit(x: np.ndarray, y: np.ndarray) -> dict[str, float | None]:
    """Least squares of a line; none through fewer than three points, and no R2 where all are the same."""
    if len(x) < 3:
        return {"slope": None, "intercept": None, "r2": None}
    slope, intercept = np.polyfit(x, y, 1)
    left, spread = float(((y - intercept - slope * x) ** 2).sum()), float(((y - y.mean()) ** 2).sum())
    return {"slope": float(slope), "intercept": float(intercept), "r2": 1 - left / spread if spread > 1e-12 else None}


COLUMNS = [
    Column("stages", "stages"), Column("communication", "C", "g"), Column("c_hat", "c", "g"),
    Column("seeds", "seeds"), Column("ratio_first", "fewest N", ".3f"), Column("exact_first", "exact", ".3f"),
    Column("ratio_last", "most N", ".3f"), Column("exact_last", "exact", ".3f"), Column("below_one", "below 1"),
    Column("slope", "slope", ".2f"), Column("intercept", "intercept", ".2f"), Column("r2", "R2", ".3f"),
    Column("exact_r2", "exact R2", ".3f"),
]  # fmt: skip
