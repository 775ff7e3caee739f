# SPDX-License-Identifier: Apache-2.0
"""`compare` with very many small clients: seconds, of tables of the shape of two public ones about schools and lectures.

- exams: 31,000 rows of 2,410 clients (median 9 rows), 4 features after coding, 6 classes.
- ratings: 73,000 rows of 1,128 clients, 26 features after coding, regression of grades from 1 to 5.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.selection.run import NEW_CLIENTS, compare

LIMITS = {"exams": 120.0, "ratings": 30.0}  # seconds


def exams(seed: int = 0) -> Clients:
    """Exam grades of pupils by school: age, gender and an earlier score; schools differ in level and a little in slopes."""
    draw = np.random.default_rng(seed)
    groups = _owners(draw, rows=31_000, clients=2_410, spread=0.85)
    score, age, girl = draw.normal(size=len(groups)), draw.uniform(-6, 5, len(groups)), draw.integers(0, 2, len(groups))
    level, slope = draw.normal(0, 0.7, 2_410), draw.normal(1.6, 0.25, 2_410)
    ability = level[groups] + slope[groups] * score - 0.4 * girl - 0.03 * age + draw.logistic(size=len(groups))
    grade = np.searchsorted([-2.4, -1.0, 0.1, 1.3, 2.9], ability)
    x = np.column_stack([age, girl, 1 - girl, score])
    return _clients(x, np.array(["0", "2", "4", "6", "8", "10"])[grade], groups, "classification", seed)


def ratings(seed: int = 0) -> Clients:
    """Ratings of lectures by lecturer: categories of age, service and department; lecturers differ in their level."""
    draw = np.random.default_rng(seed)
    groups = _owners(draw, rows=73_000, clients=1_128, spread=1.1)
    department = draw.integers(0, 14, 1_128)[groups]
    parts = [(draw.integers(0, 4, len(groups)), 4), (draw.integers(0, 6, len(groups)), 6)]
    parts += [(draw.integers(0, 2, len(groups)), 2), (department, 14)]
    x = np.concatenate([np.eye(levels)[part] for part, levels in parts], 1)
    effect, level = draw.normal(0, 0.1, x.shape[1]), draw.normal(0, 0.5, 1_128)
    mean = 3.2 + x @ effect + level[groups] + draw.normal(0, 1.2, len(groups))
    return _clients(x, np.clip(np.round(mean), 1, 5), groups, "regression", seed)


TABLES: dict[str, Callable[[int], Clients]] = {"exams": exams, "ratings": ratings}


def run(names: tuple[str, ...] = tuple(TABLES), out: Path | None = None) -> list[dict]:
    rows = []
    for name in names:
        clients = TABLES[name](0)
        begin = time.perf_counter()
        found = compare(clients, seed=0)
        seconds = time.perf_counter() - begin
        rows.append({"bench": f"compare, {name}: {clients!r}", "seconds": seconds, "limit": LIMITS[name]})
        if out is not None:
            scores = {one.name: [trial.score for trial in one.trials] for one in found.structures}
            said = {"chosen": found.chosen, "scores": scores, "settings": found.document()["settings"]}
            said["clients"] = {one.name: one.client_score.tolist() for one in found.structures}
            (out / f"{name}.json").write_text(json.dumps(said, indent=1) + "\n")
    return rows


def _owners(draw: np.random.Generator, *, rows: int, clients: int, spread: float) -> np.ndarray:
    """[N] the client of every row: sizes are log-normal, and nobody has none."""
    share = np.exp(draw.normal(0, spread, clients))
    sizes = np.maximum(1, np.floor(rows * share / share.sum())).astype(int)
    return np.repeat(np.arange(clients), sizes)


def _clients(x: np.ndarray, y: np.ndarray, groups: np.ndarray, task: str, seed: int) -> Clients:
    how: dict = {"task": task, "test_size": 0.2, "new_clients": NEW_CLIENTS, "seed": seed}
    return from_arrays(x.astype(np.float64), y, groups, **how)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_small", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TABLES)}; all by default")
    parser.add_argument("--out", type=Path, help="folder for the scores, to compare versions by")
    given = parser.parse_args()
    for row in run(tuple(given.names) or tuple(TABLES), given.out):
        print(json.dumps(row))
