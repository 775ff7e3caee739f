# SPDX-License-Identifier: Apache-2.0
"""Is FedGrEM ever worse than doing without it? Planted mixtures of many sizes, from clients alike to clients far apart.

Tian, Weng, Feng, ICML 2024, promise that FedGrEM adapts: it is no worse than every client alone, and better where clients
are alike. The plant is their simulation (Section 4.1: ten clients, one of them an outlier, unit covariance) with R centres
in D dimensions that are drawn at random, at least 3.75 apart. Errors are theirs: the largest over the good clients and
components, mean over repetitions. A cell's ratio is FedGrEM's error over the better one of local EM and FedEM.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coterie.methods.mixture.fit import fit_methods
from coterie.models.mixtures import Gaussian
from coterie.studies.common import Column, Outcome, Tell, at_least, silent
from coterie.studies.data.mixtures import drawn_centres, matched, planted_mixture
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "METHODS", "NAME", "QUICK", "Settings", "run"]

NAME = "fedgrem-adaptive"
CAPTION = (
    "Errors: the largest over good clients and components, mean over repetitions and cells.\n"
    "within: share of cells where fedgrem's is at most 1.05 times the better of local-em's and fedem's; ratio: the largest"
)
METHODS = ("fedgrem", "local-em", "fedem")

_CLOSE = 1.05  # a ratio that counts as no worse

Cell = tuple[int, int, float, int]


@dataclass(frozen=True)
class Settings:
    """What is run: every combination of the sizes.

    Attributes
    ----------
    d, r : tuple of int
        Dimensions, and components.
    h : tuple of float
        Distances of clients' parameters from common ones.
    n : tuple of int
        Rows of every client.
    apart : float
        Smallest distance between two centres.
    reps, rounds : int
        Repetitions, and T.
    tol : float
        Rounds end when no estimate moves by more than this.
    seed : int
        Repetition t has the seed `seed` + t.
    jobs : int, optional
        Processes; see `side_by_side`.
    """

    d: tuple[int, ...] = (2, 3, 5, 10)
    r: tuple[int, ...] = (2, 4, 6)
    h: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
    n: tuple[int, ...] = (100, 150, 400)
    apart: float = 3.75
    reps: int = 10
    rounds: int = 300
    tol: float = 1e-3
    seed: int = 0
    jobs: int | None = None

    def __post_init__(self) -> None:
        at_least(1, d=min(self.d), r=min(self.r), n=min(self.n), reps=self.reps, rounds=self.rounds, jobs=self.jobs)
        at_least(0, h=min(self.h), apart=self.apart, tol=self.tol)


QUICK: Mapping[str, Any] = {"d": (2,), "r": (2, 4), "h": (0.0, 1.5), "n": (150,), "reps": 2}


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run every cell and repetition."""
    begin = time.perf_counter()
    cells: list[Cell] = list(itertools.product(chosen.d, chosen.r, chosen.h, chosen.n))
    tasks = [(chosen, cell, chosen.seed + rep) for cell in cells for rep in range(chosen.reps)]
    found = side_by_side(_repetition, tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks)))
    rows = []
    for i, (d, r, h, n) in enumerate(cells):
        own = found[i * chosen.reps : (i + 1) * chosen.reps]
        fedgrem, local, fedem = (float(np.mean([errors[name] for errors in own])) for name in METHODS)
        row = {"d": d, "r": r, "h": h, "n": n, "reps": chosen.reps, "fedgrem": fedgrem, "local_em": local}
        rows.append(row | {"fedem": fedem, "ratio": fedgrem / min(local, fedem)})
    seconds = round(time.perf_counter() - begin, 3)
    summary = [_summed_up(d, [row for row in rows if row["d"] == d]) for d in chosen.d] + [_summed_up("all", rows)]
    return Outcome(NAME, asdict(chosen), rows, [line | {"seconds_all": seconds} for line in summary])


def _repetition(task: tuple[Settings, Cell, int]) -> dict[str, float]:
    """Errors of every method on the same rows."""
    chosen, (d, r, h, n), seed = task
    centres = drawn_centres(r, d, apart=chosen.apart, seed=seed)
    planted = planted_mixture("gmm", rows=n, h=h, centres=centres, seed=seed)
    fits = fit_methods(planted.rows, Gaussian(d), r, METHODS, rounds=chosen.rounds, tol=chosen.tol, seed=seed)
    return {method: matched(fit.theta, fit.weights, planted)[0] for method, fit in fits.items()}


def _summed_up(d: int | str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratio = np.array([row["ratio"] for row in rows])
    mean = {name: float(np.mean([row[name] for row in rows])) for name in ("fedgrem", "local_em", "fedem")}
    return {"d": d, "cells": len(rows), **mean, "within": float((ratio <= _CLOSE).mean()), "ratio": float(ratio.max())}


COLUMNS = [
    Column("d", "D"), Column("cells", "cells"), Column("fedgrem", "fedgrem", ".3f"),
    Column("local_em", "local-em", ".3f"), Column("fedem", "fedem", ".3f"), Column("within", "within", ".1%"),
    Column("ratio", "ratio", ".3f"), Column("seconds_all", "seconds, all", ".1f"),
]  # fmt: skip
