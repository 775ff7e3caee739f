# SPDX-License-Identifier: Apache-2.0
"""FedGrEM on planted mixtures: how far are estimates from the truth, as clients become less alike?

Tian, Weng, Feng, ICML 2024, Section 4.1, Figure 3, Tables 4 and 5: ten clients, one of them an outlier, five components in
ten dimensions. Errors are the largest over the good clients and components, mean over repetitions, not logarithms.

`fedgrem` chooses C_lambda by federated validation, `fedgrem-paper` has the paper's C = 2, and `fedgrem-exact` the loop of
the authors' code. Rounds end early when nothing moves any more.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from coterie.data.mixtures import CENTRES, Kind, Outliers, matched, planted_mixture
from coterie.mixture.fit import fit_methods
from coterie.models.mixtures import Family, Gaussian, Regression
from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.mixture_common import METHODS, mean_and_error
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "PAPER", "QUICK", "Settings", "family_of", "run"]

NAME = "fedgrem-simulation"
CAPTION = (
    "Largest error over good clients and components, mean over repetitions, and standard errors (se).\n"
    "paper: theta error of FedGrEM in Table 5 (C_eta = 0.95; GMM only), to compare with fedgrem-paper"
)

# Table 5, C_eta = 0.95, h -> mean. The caption says logarithms; the values are plain.
PAPER = {0.0: 1.13, 0.25: 1.30, 0.5: 1.34, 0.75: 1.45, 1.0: 1.60, 1.25: 1.82, 1.5: 1.90, 1.75: 2.14}
_PAPER_WEIGHTS = {0.0: 0.072, 0.25: 0.071, 0.5: 0.068, 0.75: 0.071, 1.0: 0.072, 1.25: 0.071, 1.5: 0.071}  # Table 4


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
        rows += [_row(chosen, method, h, [errors[method] for errors in own]) for method in chosen.methods]
    return Outcome(NAME, asdict(chosen), [row | {"seconds_all": seconds} for row in rows])


def family_of(kind: Kind) -> Family:
    """The components of the planted mixtures; their variances are known to be one."""
    n_features = CENTRES.shape[1]
    return Gaussian(n_features, "unit") if kind == "gmm" else Regression(n_features)


def _repetition(task: tuple[Settings, float, int]) -> dict[str, tuple[float, float]]:
    """Errors of theta and w, of every method on the same rows."""
    chosen, h, seed = task
    planted = planted_mixture(chosen.model, h=h, outliers=chosen.outliers, seed=seed)
    fits = fit_methods(
        planted.rows, family_of(chosen.model), len(CENTRES), chosen.methods,
        rounds=chosen.rounds, tol=chosen.tol, seed=seed,
    )  # fmt: skip
    return {method: matched(fit.theta, fit.weights, planted) for method, fit in fits.items()}


def _row(chosen: Settings, method: str, h: float, errors: list[tuple[float, float]]) -> dict[str, Any]:
    (theta, theta_se), (w, w_se) = (mean_and_error(values) for values in zip(*errors, strict=True))
    ours = method == "fedgrem-paper" and chosen.model == "gmm"
    return {
        "model": chosen.model, "outliers": chosen.outliers, "method": method, "h": h, "reps": chosen.reps,
        "theta_error": theta, "theta_error_se": theta_se, "w_error": w, "w_error_se": w_se,
        "paper_theta_error": PAPER.get(h) if ours else None,
        "paper_w_error": _PAPER_WEIGHTS.get(h) if ours else None,
    }  # fmt: skip


COLUMNS = [
    Column("model", "model"),
    Column("h", "h", "{:g}".format),
    Column("method", "method"),
    Column("theta_error", "theta error", "{:.3f}".format),
    Column("theta_error_se", "se", "{:.3f}".format),
    Column("paper_theta_error", "paper", "{:.2f}".format),
    Column("w_error", "w error", "{:.3f}".format),
    Column("w_error_se", "se", "{:.3f}".format),
    Column("paper_w_error", "paper", "{:.3f}".format),
    Column("reps", "reps"),
    Column("seconds_all", "seconds, all", "{:.1f}".format),
]
