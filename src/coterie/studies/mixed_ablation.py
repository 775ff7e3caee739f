# SPDX-License-Identifier: Apache-2.0
"""What each addition to moment descent is worth: Phase 1 without it, or as the paper has it, in the settings of appendix C.

Every variant changes one thing of the default (`mixed_methods.py`), but for the last, which is the paper's in all. Each is
compared with the oracle of its own Phase 2, so that a ratio above 1 is the start's fault.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.mixed_methods import FEDAVG, PAPER, PRESETS, Methods, compare
from coterie.studies.mixed_regression import RATIOS, SETTINGS, summary
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "VARIANTS", "Settings", "run", "settings"]

NAME = "mixed-regression-ablation"
CAPTION = (
    "ratio: error over that of the oracle, which begins at the planted models and has the same Phase 2; <= 1.05: share of "
    "seeds;\nrounds: until the error is twice the oracle's, Phase 1 counted, median (- if half of the seeds never get "
    "there);\nanchors: share of seeds whose worst anchor is within half of the planted models' least distance after Phase 1"
)
_DEFAULT = PRESETS["default"]
VARIANTS: dict[str, Methods] = {
    "default": _DEFAULT,
    "no-swaps": replace(_DEFAULT, swaps=False),
    "no-further": replace(_DEFAULT, further=False),
    "neither": replace(_DEFAULT, swaps=False, further=False),
    "few-anchors": replace(_DEFAULT, anchors=None),
    "few-and-neither": replace(_DEFAULT, anchors=None, swaps=False, further=False),
    "known-delta": replace(_DEFAULT, known_delta=True),
    "plain-step": replace(_DEFAULT, step="plain"),
    "half-step": replace(_DEFAULT, step="plain", descent_step=0.5),
    "halves": replace(_DEFAULT, estimator="halves"),
    "two": replace(_DEFAULT, estimator="two"),
    "orthogonal": replace(_DEFAULT, subspace="orthogonal"),
    "svd": replace(_DEFAULT, subspace="svd"),
    "everyone": replace(_DEFAULT, average_over="everyone"),
    PAPER: PRESETS[PAPER],
}


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    settings : tuple of str
        c1, c2, c3 of appendix C.
    variants : tuple of str
        Of `VARIANTS`.
    methods : tuple of str
        See `Methods`.
    rounds : int or None
        Of Phase 2; each variant's own by default.
    seed, seeds, jobs : int
        As in `mixed_regression.py`.
    """

    settings: tuple[str, ...] = tuple(SETTINGS)
    variants: tuple[str, ...] = tuple(VARIANTS)
    methods: tuple[str, ...] = (FEDAVG,)
    rounds: int | None = None
    seed: int = 0
    seeds: int = 20
    jobs: int | None = None

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds, jobs=self.jobs, rounds=self.rounds)
        for setting in self.settings:
            one_of("--settings", setting, tuple(SETTINGS))
        for variant in self.variants:
            one_of("--variants", variant, tuple(VARIANTS))

    def how(self, variant: str) -> Methods:
        """Say what is run."""
        how = replace(VARIANTS[variant], methods=self.methods)
        return how if self.rounds is None else replace(how, rounds=self.rounds)


def settings(*, quick: bool = False) -> Settings:
    """Give all settings; with `quick`, one seed of c2 and the variants that differ most."""
    few = ("default", "few-and-neither", "half-step", "two", "everyone", PAPER)
    return Settings(settings=("c2",), variants=few, seeds=1) if quick else Settings()


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run every variant in every setting with every seed."""
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    tasks = list(itertools.product(chosen.settings, chosen.variants, seeds))
    found = side_by_side(partial(_at, chosen), tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks), "runs"))
    rows = list(itertools.chain.from_iterable(found))
    shown = asdict(chosen) | {"how": {variant: asdict(chosen.how(variant)) for variant in chosen.variants}}
    return Outcome(NAME, shown, rows, summary(rows, "setting", "variant", "method"))


def _at(chosen: Settings, task: tuple[str, str, int]) -> list[dict[str, Any]]:
    setting, variant, seed = task
    rows = compare(SETTINGS[setting], chosen.how(variant), seed)
    return [{"setting": setting, "variant": variant, **row} for row in rows]


COLUMNS = [
    Column("setting", "setting"), Column("variant", "variant"), Column("method", "method"), *RATIOS,
    Column("mean_anchor_error", "anchor error", ".2f"), Column("anchors_near", "anchors", ".0%"),
]  # fmt: skip
