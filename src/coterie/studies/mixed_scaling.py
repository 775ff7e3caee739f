# SPDX-License-Identifier: Apache-2.0
"""Mixed regression at other sizes: error and success against one factor at a time.

The base is a small sibling of setting c2 (`mixed_regression.py`): 300 clients with 10 rows and 30 with 50, which are the
anchors, D = 50, K = 3, noise 0.2. Factors are varied around it, also Remark 2's noise on what clients see of the anchors.

A client with n rows moves a model within n of its D dimensions, and a cluster's model by the cluster's share of that. So
rounds are in proportion to D K / n, and steps not longer than in proportion to n / D.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.data.synthetic import Covariance, Law
from coterie.studies.mixed_methods import FEDAVG, FEDPROX, ORACLE, ORACLE_FEDPROX, Methods, compare
from coterie.studies.mixed_problem import Problem
from coterie.studies.mixed_regression import RATIOS, summary
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "FACTORS", "NAME", "Point", "Settings", "run", "settings"]

NAME = "mixed-regression-scaling"
CAPTION = (
    "One factor at a time around 300 clients x 10 rows + 30 x 50, 50 features, 3 clusters, noise 0.2. ratio: error over "
    "the oracle's;\n<= 1.05: share of seeds; rounds: until the error is twice the oracle's, median; anchors: error of the "
    "worst after Phase 1, mean;\nanchor_noise: standard deviation of what is added to each coordinate of the anchors' "
    "models (Remark 2)"
)
_ROUNDS, _LEAST_ROUNDS = 20, 200  # for every unit of D K / n, and altogether
_LARGE = (10, 50)  # clients with many rows: how many for each cluster, and their rows
_STEP, _STEP_BY_ROWS, _ETA_BY_STEP = 0.045, 0.45, 8.8


@dataclass(frozen=True)
class Point:
    """One point of the study.

    Attributes
    ----------
    clients, rows : int
        Small clients and their rows.
    dimension, clusters, noise : int, int, float
        D, K and sigma.
    covariance, law : str
        Of the features; see `unequal_mixture`.
    anchor_noise : float
        See `Methods`.
    """

    clients: int = 300
    rows: int = 10
    dimension: int = 50
    clusters: int = 3
    noise: float = 0.2
    covariance: Covariance = "same"
    law: Law = "normal"
    anchor_noise: float = 0.0

    @property
    def problem(self) -> Problem:
        """What is planted."""
        sizes = ((self.clients, self.rows), (_LARGE[0] * self.clusters, _LARGE[1]))
        shares = (1 / self.clusters,) * self.clusters
        return Problem(sizes, shares, self.dimension, self.noise, self.law, self.covariance)

    def how(self, methods: tuple[str, ...]) -> Methods:
        """Say what is run on it."""
        step = min(_STEP, _STEP_BY_ROWS * self.rows / self.dimension)
        rounds = max(_LEAST_ROUNDS, _ROUNDS * self.dimension * self.clusters // self.rows)
        return Methods(
            methods, rounds=rounds, step_size=step,
            eta=_ETA_BY_STEP * step, anchors=_LARGE[0] * self.clusters, noise_on_anchors=self.anchor_noise,
        )  # fmt: skip


FACTORS: dict[str, tuple[Any, ...]] = {
    "clients": (30, 100, 300, 1000),
    "rows": (2, 5, 10, 20),
    "dimension": (20, 50, 100, 200),
    "clusters": (2, 3, 4, 6),
    "noise": (0.1, 0.2, 0.5, 1.0),
    "covariance": ("same", "differs"),
    "law": ("normal", "rademacher", "uniform", "laplace"),
    "anchor_noise": (0.0, 0.2, 0.5, 1.0),
}
_QUICK: dict[str, tuple[Any, ...]] = {
    "clients": (100, 300),
    "rows": (5, 10),
    "dimension": (20, 50),
    "clusters": (2, 3),
    "noise": (0.2, 0.5),
    "covariance": ("same", "differs"),
    "law": ("normal", "laplace"),
    "anchor_noise": (0.0, 0.5),
}


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    factors : mapping
        Factor, a field of `Point`, -> its values.
    base : Point
        What the other factors are meanwhile.
    methods : tuple of str
        See `Methods`.
    seed, seeds, jobs : int
        As in `mixed_regression.py`.
    """

    factors: Mapping[str, Sequence[Any]] = field(default_factory=lambda: dict(FACTORS))
    base: Point = Point()
    methods: tuple[str, ...] = (FEDAVG, FEDPROX, "ifca-random", "ifca-spread", "one-shot", ORACLE, ORACLE_FEDPROX)
    seed: int = 0
    seeds: int = 5
    jobs: int | None = None

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, jobs=self.jobs)
        for factor in self.factors:
            one_of("--factors", factor, tuple(each.name for each in fields(Point)))

    @property
    def points(self) -> list[tuple[str, Any, Point]]:
        """Factor, its value, and the point."""
        pairs = ((factor, value) for factor, values in self.factors.items() for value in values)
        return [(factor, value, replace(self.base, **{factor: value})) for factor, value in pairs]


def settings(factors: Sequence[str] | None = None, *, quick: bool = False) -> Settings:
    """Give the settings for some factors (all by default); with `quick`, two values of each and one seed."""
    values = _QUICK if quick else FACTORS
    chosen = Settings({factor: values[factor] for factor in factors or FACTORS})
    return replace(chosen, seeds=1) if quick else chosen


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run every point with every seed; the base, which all factors share, once."""
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    tasks = list(itertools.product(dict.fromkeys(point for _, _, point in chosen.points), seeds))
    found = side_by_side(
        partial(_at, chosen.methods), tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks), "points")
    )
    at = dict(zip(tasks, found, strict=True))
    rows = [
        {"factor": factor, "value": value, **asdict(point), **row}
        for factor, value, point in chosen.points
        for seed in seeds
        for row in at[point, seed]
    ]
    return Outcome(NAME, asdict(chosen), rows, summary(rows, "factor", "value", "method"))


def _at(methods: tuple[str, ...], task: tuple[Point, int]) -> list[dict[str, Any]]:
    point, seed = task
    how = point.how(methods)
    return [{"rounds": how.rounds, **row} for row in compare(point.problem, how, seed)]


COLUMNS = [
    Column("factor", "factor"), Column("value", "value"), Column("method", "method"), *RATIOS,
    Column("mean_anchor_error", "anchors", ".2f"),
]  # fmt: skip
