# SPDX-License-Identifier: Apache-2.0
"""Does `compare` find the structure that was planted? Eighteen truths, how often each is recognised, and how surely.

Sizes were set before anything was run: 60 clients with 40 rows (8 of them test rows), 10 features, noise of half the
signal's deviation; low-rank heads in 2 dimensions, mixtures of 2 components, a tenth of the clients as outliers on top of 3
groups. Later truths: own intercepts with 5, 15 and 40 % of the variance beside the signal; 2 % positives, with own
intercepts (standard deviation 0.8) and 300 rows; clients of 12 rows that do not differ; and Poisson counts with mean 2 and
log-normal costs (standard deviation 1 of the logarithm), either in 2 groups or with own intercepts, whose standard
deviations in the logarithm (0.3 and 0.4) make about 15 % of the variance beside the signal.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.errors import ConfigError
from coterie.outcome_names import OutcomeName
from coterie.selection import compare
from coterie.selection.result import Comparison
from coterie.selection.text import answer
from coterie.studies.common import Column, Outcome, Tell, silent
from coterie.studies.data.planted import (
    Truth,
    planted_costs,
    planted_counts,
    planted_intercepts,
    planted_rare,
    planted_structure,
)
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "CASES", "COLUMNS", "NAME", "QUICK", "Case", "Settings", "planted_clients", "run"]

NAME = "compare-planted"


@dataclass(frozen=True)
class Case:
    """A planted truth: the structure, its size, the share of outlier clients, or that of intercepts in the variance.

    `rows` are in place of those of the settings; with `rare` there are two classes, one of them rare. With an outcome the
    target is a count or a cost, and `spread` the standard deviation of intercepts.
    """

    name: str
    truth: Truth
    size: int = 1
    outliers: float = 0.0
    icc: float = 0.0
    rows: int | None = None
    rare: bool = False
    outcome: OutcomeName | None = None
    spread: float = 0.0

    @property
    def setting(self) -> dict[str, str]:
        """What the setting must be, beside its size."""
        return {"prior": "intercept"} if self.icc or self.rare or self.spread else {}


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
    Case("own intercepts of 5 %", "shrunk", icc=0.05),
    Case("own intercepts of 15 %", "shrunk", icc=0.15),
    Case("own intercepts of 40 %", "shrunk", icc=0.4),
    Case("own intercepts with 2 % positives", "shrunk", rare=True, rows=300),
    Case("one group of small clients", "global", rows=12),
    Case("counts with own intercepts", "shrunk", outcome="poisson", spread=0.3),
    Case("counts in 2 groups", "clusters", 2, outcome="poisson"),
    Case("costs with own intercepts", "shrunk", outcome="log-normal", spread=0.4),
    Case("costs in 2 groups", "clusters", 2, outcome="log-normal"),
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
    chosen = found[found.chosen]
    best = max(found.structures, key=lambda one: -1e9 if one.test_score is None else one.test_score)
    correct = found.chosen == case.truth and case.setting.items() <= chosen.setting.items()
    assert chosen.test_score is not None
    assert best.test_score is not None
    return {
        "case": case.name,
        "seed": seed,
        "truth": case.truth,
        "truth_size": case.size,
        "chosen": found.chosen,
        "chosen_size": _size(found),
        "setting": chosen.setting,
        "correct": correct,
        "correct_size": correct and _size(found) == case.size,
        "headline": answer(found).headline,
        "share": chosen.chosen_share,
        "truth_share": found[case.truth].chosen_share,
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
    sizes: dict[str, Any] = {
        "n_clients": settings.clients, "rows": case.rows or settings.rows, "n_features": settings.features, "seed": seed,
    }  # fmt: skip
    if case.outcome is not None:
        draw = {"poisson": planted_counts, "log-normal": planted_costs}[case.outcome]
        rows = draw(case.size, spread=case.spread, **sizes)
    elif case.rare:
        rows = planted_rare(**sizes)
    elif case.icc:
        rows = planted_intercepts(case.icc, noise=settings.noise, **sizes)
    else:
        rows = planted_structure(case.truth, case.size, noise=settings.noise, outliers=case.outliers, **sizes)
    assert isinstance(rows.x, Tensor)
    assert isinstance(rows.y, Tensor)
    return from_arrays(
        rows.x.numpy(), rows.y.numpy(), rows.names[rows.owners], task="classification" if case.rare else "regression",
        outcome=case.outcome, test_size=test_size, seed=seed,
    )  # fmt: skip


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
                "share": sum(row["share"] for row in some) / len(some),
                "worst_excess": max(wrong, default=None),
                "chosen": ", ".join(sorted({row["chosen"] for row in some})),
                "seconds": sum(row["seconds"] for row in some) / len(some),
            }
        )
    return out


CAPTION = (
    "correct: share of repetitions in which the planted structure was chosen; size: with the planted number of groups,\n"
    "dimensions or components. sure: mean share of the repeated choices, with clients drawn again, that are the same.\n"
    "excess: where another was chosen, the largest share by which held-out loss is above the best."
)
COLUMNS = [
    Column("case", "truth"), Column("reps", "reps"), Column("correct", "correct", ".0%"),
    Column("correct_size", "size", ".0%"), Column("share", "sure", ".0%"), Column("worst_excess", "excess", ".1%"),
    Column("chosen", "chosen"), Column("seconds", "CPU seconds", ".1f"),
]  # fmt: skip
