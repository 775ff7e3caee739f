# SPDX-License-Identifier: Apache-2.0
"""What clients tell after a choice: sums for what is said of structures, and values of their own for tables of clients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.score_sums import LIMITS, SUMS, tags_of, tell_new, tell_scores
from coterie.evaluate import agreement
from coterie.methods.linear.choice import Evidence
from coterie.methods.linear.scores import Judged, every_paired, joined
from coterie.methods.linear.sources import Source
from coterie.methods.linear.task import Task
from coterie.protocol import Algorithm, Ask, Fold, Stack, Sum
from coterie.select import Paired

__all__ = ["Groups", "Individual", "NewTold", "Told", "new_told", "told"]


@dataclass(frozen=True)
class Individual:
    """Values of single clients, which secure sums do not tell.  S structures with their settings, M clients"""

    score: Tensor  # [S, M] NaN for who is not judged
    test_metric: Tensor  # [S, M] NaN for who has no test rows, as below
    test_score: Tensor  # [S, M]
    outlier_score: Tensor  # [M]
    judged: Tensor  # [M]
    odd: Tensor  # [M]
    absent: Tensor  # [M]
    label: Tensor | None  # [M, L] clusters in every fit, the last to all rows
    margin: Tensor | None  # [M]


@dataclass(frozen=True)
class Groups:
    """How many clients clusters have, and how far they would come out again."""

    sizes: np.ndarray  # [K]
    stability: float


@dataclass(frozen=True)
class Told:
    """What is known of all structures with their settings; each is a candidate, in the order of their names."""

    names: tuple[str, ...]
    metric: Paired  # of judged clients
    test_metric: Paired  # of clients with test rows, as below
    test_score: Paired
    test_counted: Paired  # scores of those that are no outliers
    overall: np.ndarray  # [1 + S] test rows, and sums of metrics over these
    held_out: tuple[int, int, int]  # judged clients that are better off than with one model for all, worse off, neither
    on_test: tuple[int, int, int]
    judged: int
    outliers: int
    absent: int
    groups: Groups | None
    individual: Individual | None

    def at(self, name: str) -> int:
        """A structure's place."""
        return self.names.index(name)


def told(source: Source, task: Task, evidence: Evidence, metric: str) -> Algorithm:
    """Ask what is to be said of the structures.  -> Told"""
    table, names = evidence.table, tuple(evidence.found)
    grouped, size = "", 1
    if "clusters" in names:
        j = evidence.settings["clusters"]
        size = int(evidence.found["clusters"].settings[j]["n_clusters"])
        grouped = _kept_at(evidence.found["clusters"].judged, j)
    more = {
        "settings": tuple(evidence.column(name) for name in names), "chosen": names.index(evidence.chosen),
        "base": names.index("global"), "scale": task.scaling.y_scale if task.problem.is_number else 0.0,
        "lower": metric == "rmse", "grouped": grouped, "n_clusters": size,
    }  # fmt: skip
    fold: dict[str, Fold] = {name: Sum() for name in SUMS if grouped or name not in ("pairs", "sizes")}
    if source.individual:
        own = ("score", "tested", "test_score", "outlying", "state", *(("label", "margin") if grouped else ()))
        fold |= {name: Stack() for name in own}
    if not table.usual:
        more |= {"own": (), "shared": (), "least": 0}
    got = yield from source.asked(table.ask(tell_scores, fold, **more))
    better = [(round(a), round(b), round(c)) for a, b, c in got["better"].tolist()]
    judged, odd = (round(n) for n in got["count"].tolist())
    paired = {name: every_paired(got[name], 0.0)[0] for name in ("told", "told_tested", "told_all", "told_counted")}
    groups = _groups(got["sizes"], got["pairs"]) if grouped else None
    own_values = _individual(got, task, bool(grouped)) if source.individual else None
    return Told(
        names, paired["told"], paired["told_tested"], paired["told_all"], paired["told_counted"],
        got["overall"].double().numpy(), better[0], better[1], judged, odd, int(task.judged.sum()) - judged,
        groups, own_values,
    )  # fmt: skip


def _kept_at(one: Judged, setting: int) -> str:
    """Where clients keep a setting that has a name of its own."""
    for name, settings in one.kept:
        if setting < settings:
            return name
        setting -= settings
    raise IndexError(setting)


def _groups(sizes: Tensor, pairs: Tensor) -> Groups:
    counts = sizes.round().long().numpy()
    return Groups(counts, float(np.mean([agreement(one) for one in pairs.round().long().numpy()])))


def _individual(got: Any, task: Task, grouped: bool) -> Individual:
    judged, odd, absent, tested, enough = (got["state"].T > 0.5).unbind(0)
    absent = absent | (task.judged & ~enough)  # who was not there keeps nothing
    nan = torch.tensor(math.nan, dtype=torch.float64)
    score = torch.where(judged, got["score"].T, nan)
    on_test, test_score = (torch.where(tested, got[name].T, nan) for name in ("tested", "test_score"))
    outlying = torch.where(judged, got["outlying"], nan)
    label, margin = (got["label"], got["margin"]) if grouped else (None, None)
    return Individual(score, on_test, test_score, outlying, judged, odd, absent, label, margin)


# -- new clients ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NewTold:
    """How structures with their settings serve new clients, after these have shown a few rows."""

    names: tuple[str, ...]
    metric: Paired
    score: Paired
    individual: Tensor | None  # [S, N] metrics, NaN for who has no rows

    def at(self, name: str) -> int:
        """A structure's place."""
        return self.names.index(name)


def new_told(source: Source, task: Task, judged: Mapping[str, Judged], noise: Tensor) -> Algorithm:
    """Ask how structures serve clients that keep it.  noise [S] common  -> NewTold"""
    problem: Problem = task.problem
    one = joined(list(judged.values()))
    shared = {
        "kept": tuple(name for name, _ in one.kept), "kinds": one.kind, "noise": noise, "shape": one.shape[0, -1],
        "scale": task.scaling.y_scale if problem.is_number else 0.0,
    }  # fmt: skip
    fold: dict[str, Fold] = {"told": Sum(), "scores": Sum(), "count": Sum()}
    fold |= {"metric": Stack(), "there": Stack()} if source.individual else {}
    fresh = tags_of(one.kept, 1, (1, 1))
    got = yield from source.asked(Ask(tell_new, shared, fold, fresh=fresh, limits={"count": LIMITS["count"]}))
    metric, score = (every_paired(got[name], 0.0)[0] for name in ("told", "scores"))
    own = torch.where(got["there"] > 0, got["metric"].T, math.nan) if source.individual else None
    return NewTold(tuple(judged), metric, score, own)
