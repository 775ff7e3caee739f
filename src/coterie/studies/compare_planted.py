# SPDX-License-Identifier: Apache-2.0
"""Does `compare` find the structure that was planted? Eight truths, and how often each is recognised.

Sizes were set before anything was run: 60 clients with 40 rows (8 of them test rows), 10 features, noise of half the
signal's deviation; low-rank heads in 2 dimensions, mixtures of 2 components, a tenth of the clients as outliers on top of 3
groups.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.errors import ConfigError
from coterie.selection import compare
from coterie.selection.result import Comparison
from coterie.studies.common import Column, Outcome, Tell, silent
from coterie.studies.data.planted import Truth, planted_structure
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "CASES", "COLUMNS", "NAME", "QUICK", "Case", "Settings", "planted_clients", "run"]

NAME = "compare-planted"


@dataclass(frozen=True)
class Case:
    """A planted truth: the structure, its size, and the share of outlier clients."""

    name: str
    truth: Truth
    size: int = 1
    outliers: float = 0.0


CASES = (
    Case("one group", "global"),
    Case("2 groups", "clusters", 2),
    Case("3 groups", "clusters", 3),
    Case("5 groups", "clusters", 5),
    Case("low-rank heads", "representation", 2),
    Case("independent clients", "local"),
    Case("mixture within clients", "mixture", 2),
    Case("3 groups and outliers", "clusters", 3, 0.1),
    Case("deviations from a common model", "shrunk"),
)
QUICK: dict[str, Any] = {"reps": 1, "quick": True}


@dataclass(frozen=True)
class Settings:
    """What is planted, how often, and where the repetitions begin."""

    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    reps: int = 30
    clients: int = 60
    rows: int = 40
    features: int = 10
    noise: float = 0.5
    quick: bool = False
    jobs: int | None = None
    seed: int = 0


def run(settings: Settings, tell: Tell = silent) -> Outcome:
    """Plant, compare, and count how often the truth is found."""
    unknown = [name for name in settings.cases if name not in {case.name for case in CASES}]
    if unknown:
        raise ConfigError(f"there is no case '{unknown[0]}'", f"choose among {', '.join(case.name for case in CASES)}")
    tasks = [
        (settings, case, settings.seed + rep)
        for rep in range(settings.reps)
        for case in CASES
        if case.name in settings.cases
    ]
    rows = side_by_side(_one, tasks, settings.jobs, lambda n: tell(NAME, n, len(tasks)))
    order = {case.name: i for i, case in enumerate(CASES)}
    rows = sorted(rows, key=lambda row: (order[row["case"]], row["seed"]))
    return Outcome(NAME, asdict(settings), rows, _summary(settings, rows))


def _one(task: tuple[Settings, Case, int]) -> dict[str, Any]:
    """One repetition of one case."""
    settings, case, seed = task
    began = time.process_time()
    found = compare(planted_clients(settings, case, seed), seed=seed, quick=settings.quick)
    chosen, best = found[found.chosen], max(found.structures, key=lambda one: one.test_score or 0.0)
    assert chosen.test_score is not None
    assert best.test_score is not None
    return {
        "case": case.name,
        "seed": seed,
        "truth": case.truth,
        "truth_size": case.size,
        "chosen": found.chosen,
        "chosen_size": _size(found),
        "correct": found.chosen == case.truth,
        "correct_size": found.chosen == case.truth and _size(found) == case.size,
        "loss": -chosen.test_score,
        "best_loss": -best.test_score,
        "best_on_test": best.name,
        "excess": (best.test_score - chosen.test_score) / abs(best.test_score),
        "outliers": len(found.outliers),
        "scores": {one.name: one.score for one in found.structures},
        "seconds": time.process_time() - began,
    }


def planted_clients(settings: Settings, case: Case, seed: int, *, test_size: float = 0.2) -> Clients:
    """Clients of one repetition of a case."""
    rows = planted_structure(
        case.truth, case.size, n_clients=settings.clients, rows=settings.rows, n_features=settings.features,
        noise=settings.noise, outliers=case.outliers, seed=seed,
    )  # fmt: skip
    assert isinstance(rows.x, Tensor)
    assert isinstance(rows.y, Tensor)
    return from_arrays(
        rows.x.numpy(), rows.y.numpy(), rows.names[rows.owners], task="regression", test_size=test_size, seed=seed
    )


def _size(found: Comparison) -> int:
    """Groups, dimensions or components; 1 where there is no such number."""
    setting = found[found.chosen].setting
    return int(next((setting[name] for name in ("n_clusters", "rank", "n_components") if name in setting), 1))


def _summary(settings: Settings, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every case, and one for all of them."""
    out = []
    for name in (*settings.cases, "all"):
        some = [row for row in rows if name in (row["case"], "all")]
        wrong = [row["excess"] for row in some if not row["correct"]]
        out.append(
            {
                "case": name,
                "reps": len(some),
                "correct": sum(row["correct"] for row in some) / len(some),
                "correct_size": sum(row["correct_size"] for row in some) / len(some),
                "worst_excess": max(wrong, default=None),
                "chosen": ", ".join(sorted({row["chosen"] for row in some})),
                "seconds": sum(row["seconds"] for row in some) / len(some),
            }
        )
    return out


CAPTION = (
    "correct: share of repetitions in which the planted structure was chosen; size: with the planted number of groups,\n"
    "dimensions or components. excess: where it was not, the largest share by which held-out loss is above the best."
)
COLUMNS = [
    Column("case", "truth"), Column("reps", "reps"), Column("correct", "correct", ".0%"),
    Column("correct_size", "size", ".0%"), Column("worst_excess", "excess", ".1%"), Column("chosen", "chosen"),
    Column("seconds", "CPU seconds", ".1f"),
]  # fmt: skip
