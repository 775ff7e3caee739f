# SPDX-License-Identifier: Apache-2.0
"""FedGrEM on planted mixtures: how far are estimates from the truth, as clients become less alike?

Tian, Weng, Feng, ICML 2024, Section 4.1, Figure 3, Tables 4 and 5: ten clients, one of them an outlier, five components in
ten dimensions. Errors are the largest over the good clients and components, mean over repetitions, not logarithms.

`fedgrem` chooses C_lambda by federated validation, `fedgrem-paper` has the paper's C = 2, and `fedgrem-exact` the loop of
the authors' code. Rounds end early when nothing moves any more.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from coterie.errors import ConfigError
from coterie.methods.mixture.fit import PRESETS, fit_methods
from coterie.models.mixtures import Family, Gaussian, Regression
from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.data.mixtures import CENTRES, Kind, Outliers, matched, planted_mixture
from coterie.studies.mixture_common import METHODS, mean_and_error
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "PAPER", "QUICK", "Settings", "family_of", "run"]

NAME = "fedgrem-simulation"
CAPTION = (
    "Largest error over good clients and components, mean over repetitions, and standard errors (se).\n"
    "paper: FedGrEM in Tables 5 and 4 at the same C_eta (GMM only), to compare with fedgrem-paper"
)

_PAPER_H = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
# Tables 5 and 4: C_eta -> means, by h. The captions say logarithms; the values are plain.
PAPER = {
    0.55: (1.36, 1.47, 1.62, 1.71, 1.89, 2.07, 2.23, 2.44),
    0.65: (1.28, 1.38, 1.52, 1.62, 1.79, 1.99, 2.14, 2.33),
    0.75: (1.22, 1.34, 1.44, 1.54, 1.71, 1.93, 2.02, 2.25),
    0.85: (1.17, 1.30, 1.38, 1.49, 1.66, 1.88, 1.95, 2.22),
    0.95: (1.13, 1.30, 1.34, 1.45, 1.60, 1.82, 1.90, 2.14),
    1.05: (1.12, 1.27, 1.30, 1.42, 1.54, 1.79, 1.85, 2.07),
    1.15: (1.10, 1.25, 1.32, 1.39, 1.52, 1.79, 1.82, 2.04),
    1.25: (1.09, 1.23, 1.34, 1.40, 1.50, 1.78, 1.81, 1.99),
    1.35: (1.21, 1.24, 1.31, 1.36, 1.49, 1.81, 1.79, 1.99),
}
_PAPER_WEIGHTS = {
    0.55: (0.072, 0.071, 0.068, 0.071, 0.072, 0.071, 0.071),
    0.65: (0.072, 0.071, 0.068, 0.071, 0.072, 0.071, 0.071),
    0.75: (0.072, 0.071, 0.068, 0.071, 0.072, 0.071, 0.071),
    0.85: (0.072, 0.071, 0.068, 0.071, 0.072, 0.071, 0.071),
    0.95: (0.072, 0.071, 0.068, 0.071, 0.072, 0.071, 0.071),
    1.05: (0.072, 0.071, 0.068, 0.071, 0.071, 0.071, 0.071),
    1.15: (0.072, 0.071, 0.069, 0.071, 0.071, 0.071, 0.071),
    1.25: (0.072, 0.071, 0.068, 0.071, 0.071, 0.072, 0.071),
    1.35: (0.073, 0.071, 0.069, 0.071, 0.071, 0.072, 0.071),
}
_OURS = ("fedgrem", *PRESETS)  # the methods that C_eta is of
_C_ETA = (0.95,)


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes
    ----------
    model : {"gmm", "mor"}
        Gaussian mixtures, or mixtures of regressions.
    h : tuple of float
        Distances of clients' parameters from common ones.
    outliers : {"paper", "official"}
        What the outlier client is drawn from (see data/mixtures.py).
    methods : tuple of str
        Which methods.
    c_eta : tuple of float
        Step sizes of the FedGrEM methods, each with rows of its own; the others are run once.
    reps, rounds : int
        Repetitions, and T.
    tol : float
        Rounds end when no estimate moves by more than this.
    seed : int
        Repetition t has the seed `seed` + t.
    jobs : int, optional
        Processes; see `side_by_side`.
    """

    model: Kind = "gmm"
    h: tuple[float, ...] = (0.0, 1.0, 2.0)
    outliers: Outliers = "paper"
    methods: tuple[str, ...] = METHODS
    c_eta: tuple[float, ...] = _C_ETA
    reps: int = 20
    rounds: int = 1000
    tol: float = 1e-3
    seed: int = 0
    jobs: int | None = None

    def __post_init__(self) -> None:
        one_of("--model", self.model, get_args(Kind))
        one_of("--outliers", self.outliers, get_args(Outliers))
        at_least(1, reps=self.reps, rounds=self.rounds, jobs=self.jobs)
        at_least(0, h=min(self.h), tol=self.tol)
        if not all(0 < value < math.inf for value in self.c_eta):
            raise ConfigError("--c-eta has a step size that is none", "give numbers above 0, like 0.55,0.95,1.35")
        if self.c_eta != _C_ETA and not set(self.methods) & set(_OURS):
            raise ConfigError("--c-eta is given, and no method has it", f"add one of {', '.join(_OURS)} to --methods")

    def methods_at(self, place: int) -> tuple[str, ...]:
        """Which methods are run with a step size: all with the first, and with others those that have one."""
        return self.methods if place == 0 else tuple(name for name in self.methods if name in _OURS)


QUICK: Mapping[str, Any] = {"reps": 2}


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run every h and repetition with all methods."""
    begin = time.perf_counter()
    tasks = [(chosen, h, chosen.seed + rep) for h in chosen.h for rep in range(chosen.reps)]
    found = side_by_side(_repetition, tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks)))
    seconds = round(time.perf_counter() - begin, 3)
    rows = []
    for i, h in enumerate(chosen.h):
        own = found[i * chosen.reps : (i + 1) * chosen.reps]
        for place, c_eta in enumerate(chosen.c_eta):
            for method in chosen.methods_at(place):
                rows.append(_row(chosen, method, h, c_eta, [errors[place][method] for errors in own]))
    return Outcome(NAME, asdict(chosen), [row | {"seconds_all": seconds} for row in rows])


def family_of(kind: Kind) -> Family:
    """The components of the planted mixtures; their variances are known to be one."""
    n_features = CENTRES.shape[1]
    return Gaussian(n_features, "unit") if kind == "gmm" else Regression(n_features)


def _repetition(task: tuple[Settings, float, int]) -> list[dict[str, tuple[float, float]]]:
    """Errors of theta and w, of every method on the same rows, for each C_eta."""
    chosen, h, seed = task
    planted = planted_mixture(chosen.model, h=h, outliers=chosen.outliers, seed=seed)
    errors = []
    for place, c_eta in enumerate(chosen.c_eta):
        fits = fit_methods(
            planted.rows, family_of(chosen.model), len(CENTRES), chosen.methods_at(place),
            rounds=chosen.rounds, tol=chosen.tol, seed=seed, c_eta=c_eta,
        )  # fmt: skip
        errors.append({method: matched(fit.theta, fit.weights, planted) for method, fit in fits.items()})
    return errors


def _row(chosen: Settings, method: str, h: float, c_eta: float, errors: list[tuple[float, float]]) -> dict[str, Any]:
    (theta, theta_se), (w, w_se) = (mean_and_error(values) for values in zip(*errors, strict=True))
    ours = method == "fedgrem-paper" and chosen.model == "gmm"
    return {
        "model": chosen.model, "outliers": chosen.outliers, "method": method, "h": h,
        "c_eta": c_eta if method in _OURS else None, "reps": chosen.reps,
        "theta_error": theta, "theta_error_se": theta_se, "w_error": w, "w_error_se": w_se,
        "paper_theta_error": _told(PAPER, c_eta, h) if ours else None,
        "paper_w_error": _told(_PAPER_WEIGHTS, c_eta, h) if ours else None,
    }  # fmt: skip


def _told(table: Mapping[float, tuple[float, ...]], c_eta: float, h: float) -> float | None:
    """What the paper's table has, if anything; Table 4 ends before Table 5."""
    return dict(zip(_PAPER_H, table.get(c_eta, ()), strict=False)).get(h)


COLUMNS = [
    Column("model", "model"), Column("h", "h", "g"), Column("method", "method"), Column("c_eta", "C_eta", "g"),
    Column("theta_error", "theta error", ".3f"), Column("theta_error_se", "se", ".3f"),
    Column("paper_theta_error", "paper", ".2f"), Column("w_error", "w error", ".3f"),
    Column("w_error_se", "se", ".3f"), Column("paper_w_error", "paper", ".3f"), Column("reps", "reps"),
    Column("seconds_all", "seconds, all", ".1f"),
]  # fmt: skip
