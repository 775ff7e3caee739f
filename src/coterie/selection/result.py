# SPDX-License-Identifier: Apache-2.0
"""What a comparison found: how every structure does, which one was chosen, and what is known of every client."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from coterie.config import FitOptions, options
from coterie.engines.drive import Traffic
from coterie.errors import ConfigError
from coterie.methods.linear.structures import ORDER, Setting
from coterie.select import Difference

__all__ = ["ORDER", "Comparison", "Difference", "FitAdvice", "Grouping", "Structure", "Trial"]


@dataclass(frozen=True)
class Trial:
    """One setting that was tried, and its cross-validated score."""

    setting: Setting
    label: str
    score: float
    stderr: float


@dataclass(frozen=True)
class FitAdvice:
    """How `coterie fit` fits a structure: a method (None: there is none), and options by their flat names."""

    method: str | None
    options: dict[str, Any] = field(default_factory=dict)

    def into(self, chosen: FitOptions) -> FitOptions:
        """Put method and options in place of what is chosen: what the printed command, `auto` and `fit_chosen` fit."""
        tree = chosen.model_dump()
        tree["method"] = self.method
        for name, value in self.options.items():
            group, _, option = name.partition(".")
            if not isinstance(tree.get(group), dict):
                raise ConfigError(f"there is no option '{name}'", "the comparison is of another version: compare again")
            tree[group][option] = value
        return options(tree)


@dataclass(frozen=True, eq=False)
class Structure:
    """How one structure does, with its best setting.

    Scores are mean log-likelihoods of a held-out row, metrics RMSE, accuracy or log density; all are means over judged
    clients. Without a prefix they are cross-validated on training rows; `test_` is on test rows, `new_` on held-out clients.
    """

    name: str
    setting: Setting
    label: str
    score: float
    stderr: float
    metric: float
    metric_stderr: float
    test_metric: float | None
    test_stderr: float | None
    test_score: float | None
    test_overall: float | None  # over all test rows together
    test_r2: float | None
    new_metric: float | None
    new_stderr: float | None
    new_score: float | None
    versus_global: Difference | None
    versus_chosen: Difference | None
    test_versus_global: Difference | None
    as_good: bool  # as the best structure, by the rule of the choice, and not clearly worse than the chosen one
    trials: tuple[Trial, ...]
    client_score: np.ndarray | None  # [M], as others of clients; None where sums are secure
    client_test_metric: np.ndarray | None  # [M]
    client_test_score: np.ndarray | None  # [M]
    models: np.ndarray | None  # [K, D + 1] in original units, intercept last
    fit: FitAdvice
    test_metric_versus_global: Difference | None = None  # in the metric's units: of errors, below 0 is better
    new_versus_global: Difference | None = None  # likewise, on held-out clients
    client_new_metric: np.ndarray | None = None  # [N] of held-out clients
    barred: bool = False  # a mixture that predicts worse than others, whatever its score
    chosen_share: float | None = None  # of the repetitions in which it was chosen
    df: float | None = None  # effective parameters; None where nobody can count them


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups that clusters found, whatever was chosen in the end."""

    labels: np.ndarray | None  # [M] -1 for who did not answer; None where sums are secure, as others of clients
    sizes: np.ndarray  # [K]
    profile: (
        np.ndarray | None
    )  # [K, D] target per standard deviation of a feature; of classes, log odds [K, (classes,) D]
    features: tuple[str, ...]
    stability: float  # mean adjusted Rand index over folds and restarts
    agreement: np.ndarray | None  # [M] share of the folds in which a client is in its cluster
    margin: np.ndarray | None  # [M] how much worse the runner-up serves, in nats per row
    map: np.ndarray | None  # [M, 2]; networks have neither a profile nor a map


@dataclass(frozen=True, eq=False)
class Comparison:
    """All that came of a comparison."""

    task: str
    target: str | None
    metric: str  # "rmse", "accuracy" or "log density"
    chosen: str
    structures: tuple[Structure, ...]
    names: np.ndarray  # [M]
    rows: np.ndarray  # [M] training rows
    judged: np.ndarray | None  # [M] whether a client is judged; None where sums are secure, as others of clients
    too_small: tuple[str, ...]
    outliers: tuple[str, ...]
    outlier_score: np.ndarray | None  # [M]
    worse_off: tuple[str, ...]
    gain: np.ndarray | None  # [M] chosen minus global, nats per row
    grouping: Grouping | None
    seconds: float
    seed: int
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()  # clients that did not answer, and are left out
    traffic: Traffic = field(default_factory=Traffic)
    tolerance: float = 0.0  # what a simpler structure may be behind in any case, in nats per row
    coefficients: dict[str, Any] | None = None  # of what was chosen, where its models are linear
    n_judged: int = 0
    n_outliers: int = 0
    n_absent: int = 0  # clients that did not answer
    # Clients that are better off than with one model for all, worse off, and neither: by score, and by test rows' metric.
    held_out: tuple[int, int, int] = (0, 0, 0)
    on_test: tuple[int, int, int] = (0, 0, 0)

    def __repr__(self) -> str:
        from coterie.selection.display import comparison_text  # which reads this module

        return comparison_text(self)

    def _repr_html_(self) -> str:
        """Headline and table, for notebooks."""
        from coterie.selection.display import comparison_html

        return comparison_html(self)

    def __getitem__(self, name: str) -> Structure:
        return next(one for one in self.structures if one.name == name)

    @property
    def best(self) -> Structure:
        """The structure with the best score, of those that may be taken."""
        return max((one for one in self.structures if not one.barred), key=lambda one: one.score)

    def document(self) -> dict[str, Any]:
        """All but what is known of single clients, as JSON can say it."""
        return {
            "chosen": self.chosen,
            "settings": {one.name: one.setting for one in self.structures},
            "task": self.task,
            "target": self.target,
            "metric": self.metric,
            "seed": self.seed,
            "seconds": self.seconds,
            **vars(self.traffic),
            "protocol": self.settings,
            "n_clients": len(self.names),
            "n_judged": self.n_judged,
            "n_outliers": self.n_outliers,
            "n_absent": self.n_absent,
            "tolerance": self.tolerance,
            "rows": [_row(one, self) for one in self.structures],
            "grouping": None if self.grouping is None else _said(self.grouping),
            "coefficients": self.coefficients,
            "outliers": list(self.outliers),
            "too_small": list(self.too_small),
            "absent": list(self.absent),
            "worse_off": list(self.worse_off),
            "notes": list(self.notes),
        }


def _row(one: Structure, found: Comparison) -> dict[str, Any]:
    """A row of the table: on test rows where there are any, else cross-validated."""
    tested = one.test_metric is not None
    plain = (
        "score", "test_score", "test_overall", "test_r2", "new_metric", "new_stderr", "new_score", "as_good",
        "chosen_share", "df",
    )  # fmt: skip
    differences = ("versus_global", "versus_chosen", "test_versus_global")
    return {
        "structure": one.name,
        "setting": one.setting,
        "label": one.label,
        "metric": found.metric,
        "mean": one.test_metric if tested else one.metric,
        "stderr": one.test_stderr if tested else one.metric_stderr,
        "rows": "test" if tested else "cross-validation",
        "score_stderr": one.stderr,
        "cv_metric": one.metric,
        "cv_metric_stderr": one.metric_stderr,
        **{name: getattr(one, name) for name in plain},
        **{name: None if (d := getattr(one, name)) is None else asdict(d) for name in differences},
        "chosen": one.name == found.chosen,
        "trials": [asdict(trial) for trial in one.trials],
        "models": None if one.models is None else one.models.tolist(),
        "fit": asdict(one.fit),
    }


def _said(groups: Grouping) -> dict[str, Any]:
    return {
        "sizes": groups.sizes.tolist(),
        "stability": groups.stability,
        "features": list(groups.features),
        "profile": None if groups.profile is None else groups.profile.tolist(),
    }
