# SPDX-License-Identifier: Apache-2.0
"""Mixed regression from any start: moment descent, then FedAvg or FedProx, against what else there is.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, appendix C and Figures 1 to 3: K
= 3 models in D = 100 dimensions, noise 0.2, 10,000 rows ("1,000" in the text is a slip), in three settings of increasing
heterogeneity. The paper shows curves and prints no numbers of them; it says that its method reaches the oracle's error.

Departure: 20 anchors, where the paper takes ceil(3 K log K) = 10. In c2 and c3 these are the clients with 50 rows; 10 of
them miss the smallest cluster of c3 with probability 0.8^10 = 0.11. `--preset moment-descent-paper` is as near to the paper
as it can be told from it; `mixed_ablation.py` takes our additions away one at a time.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.mixed_methods import PRESETS, Methods, compare
from coterie.studies.mixed_problem import Problem
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "RATIOS", "SETTINGS", "Settings", "of_rows", "run", "settings", "summary"]

NAME = "mixed-regression"
CAPTION = (
    "ratio: error (largest of the clusters') over that of the oracle, which begins at the planted models and trains alike;\n"
    "<= 1.05: share of seeds; rounds: until the error is twice the oracle's, Phase 1 counted, median (- if half of the "
    "seeds\nnever get there); anchors: share of seeds whose worst anchor is within half of the planted models' least "
    "distance after Phase 1"
)
GOOD = 1.05  # ratio to the oracle's error that counts as having reached it
LEFT_PANELS = (1, 5, 10)  # local steps of the figures' left panels

_UNEQUAL = ((900, 10), (20, 50))
SETTINGS = {
    "c1": Problem(((200, 50),)),
    "c2": Problem(_UNEQUAL),
    "c3": Problem(_UNEQUAL, (0.2, 0.3, 0.5)),
}


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    setting : str
        c1, c2 or c3.
    problem, how : Problem, Methods
        What is planted, and what is run on it.
    seed, seeds : int
        Repetition i has the seed `seed` + i.
    jobs : int or None
        Processes; see `side_by_side`.
    """

    setting: str
    problem: Problem
    how: Methods = Methods()  # noqa: RUF009  (frozen)
    seed: int = 0
    seeds: int = 20
    jobs: int | None = None

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, jobs=self.jobs)


def settings(setting: str = "c1", preset: str = "default", *, quick: bool = False) -> Settings:
    """Give a setting of appendix C, our way or the paper's, or two seeds of it, which take less than a minute."""
    one_of("--setting", setting, tuple(SETTINGS))
    one_of("--preset", preset, tuple(PRESETS))
    chosen = Settings(setting, SETTINGS[setting], PRESETS[preset])
    return replace(chosen, seeds=2) if quick else chosen


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run all methods for all seeds."""
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    found = side_by_side(
        partial(compare, chosen.problem, chosen.how), seeds, chosen.jobs,
        lambda done: tell(chosen.setting, done, chosen.seeds, "seeds"),
    )  # fmt: skip
    rows = [{"setting": chosen.setting, **row} for row in itertools.chain.from_iterable(found)]
    return Outcome(NAME, asdict(chosen), rows, summary(rows, "setting", "method", "local_steps"))


def summary(rows: Sequence[Mapping[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Sum up what has the same in these fields, in the order in which it was run."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row[name] for name in names), []).append(row)
    return [dict(zip(names, values, strict=True)) | of_rows(own) for values, own in alike.items()]


def of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up one method's rows over seeds."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    rounds = [row["rounds_to_2x_oracle"] for row in rows]
    reached = sorted(t for t in rounds if t is not None)
    far = [row["anchor_error"] for row in rows if row["anchor_error"] is not None]
    anchors = [
        row["anchor_error"] < row["delta"] / 2 for row in rows if row["anchor_error"] is not None and row["delta"]
    ]
    return {
        "seeds": len(rows),
        "mean_error": statistics.fmean(row["final_error"] for row in rows),
        "mean_ratio": statistics.fmean(ratios) if ratios else None,
        "median_ratio": statistics.median(ratios) if ratios else None,
        "max_ratio": max(ratios, default=None),
        "success": statistics.fmean(ratio <= GOOD for ratio in ratios) if ratios else None,
        "median_rounds": reached[len(rounds) // 2] if len(reached) > len(rounds) // 2 else None,
        "mean_anchor_error": statistics.fmean(far) if far else None,
        "anchors_near": statistics.fmean(anchors) if anchors else None,
    }


RATIOS = [
    Column("seeds", "seeds"),
    Column("mean_error", "error", ".4f"),
    Column("mean_ratio", "mean ratio", ".3f"),
    Column("max_ratio", "max", ".3f"),
    Column("success", "<= 1.05", ".0%"),
    Column("median_rounds", "rounds"),
]  # of all studies of mixed regression
COLUMNS = [
    Column("setting", "setting"), Column("method", "method"), Column("local_steps", "steps"), *RATIOS[:3],
    Column("median_ratio", "median", ".3f"), *RATIOS[3:], Column("anchors_near", "anchors", ".0%"),
]  # fmt: skip
