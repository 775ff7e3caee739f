# SPDX-License-Identifier: Apache-2.0
"""What a privacy budget leaves of models and choices: fits and comparisons of 500 clients for several values of epsilon.

Planted clients as of `compare-planted`, with 40 rows of 10 features and noise of half the signal's deviation. Models are
judged here on all held-out rows, without noise: the scores that a fit itself tells have noise as well. Fits whose budget
would be refused are made all the same. Sizes, rounds and shares of the budget were set on seeds below 100.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.config import options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.evaluate import match_labels
from coterie.methods.base import Fitted
from coterie.methods.baselines import measured_models, placed
from coterie.methods.cluster_models import ClusterModels
from coterie.methods.fit import fit
from coterie.selection import compare
from coterie.selection.private import compare_private
from coterie.studies.common import Column, Outcome, Tell, silent
from coterie.studies.data.planted import Truth, planted_structure
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "CASES", "COLUMNS", "NAME", "QUICK", "Case", "Settings", "run"]

NAME = "privacy-utility"
QUICK: dict[str, Any] = {"reps": 1, "epsilon": (8.0,), "clients": 300}

_FEATURES, _NOISE = 10, 0.5
_FEDREP: dict[str, Any] = {
    "model": {"hidden": (4,)}, "training": {"rounds": 30, "step_size": 0.05},
    "personal": {"body_epochs": 1, "head_epochs": 5},
}  # fmt: skip
_RIGHT = 0.95  # share of the clients that must be with others of their group, for groups to be found


@dataclass(frozen=True)
class Case:
    """Clients of a planted structure, and the method that is fitted to them; without one, a comparison chooses."""

    name: str
    truth: Truth
    size: int = 1
    method: str = ""


CASES = (
    Case("fedavg", "global", method="fedavg"),
    Case("ifca, 3 groups", "clusters", 3, "ifca"),
    Case("fedrep, 2 dimensions", "representation", 2, "fedrep"),
    Case("shrunk", "shrunk", method="shrunk"),
    Case("compare, one group", "global"),
    Case("compare, 2 groups", "clusters", 2),
    Case("compare, 3 groups", "clusters", 3),
    Case("compare, independent clients", "local"),
    Case("compare, deviations from a common model", "shrunk"),
)


@dataclass(frozen=True)
class Settings:
    """What is planted and fitted; without privacy, too, unless `epsilon` says so."""

    epsilon: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    clients: int = 500
    rows: int = 40
    rounds: int = 10
    reps: int = 30
    jobs: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class _Task:
    settings: Settings
    case: Case
    epsilon: float | None
    seed: int


def run(settings: Settings, tell: Tell = silent) -> Outcome:
    """Fit and compare with every epsilon, and without."""
    tasks = [
        _Task(settings, case, epsilon, settings.seed + rep)
        for rep in range(settings.reps)
        for case in CASES
        for epsilon in (*settings.epsilon, None)
    ]
    rows = side_by_side(_one, tasks, settings.jobs, lambda n: tell(NAME, n, len(tasks)))
    return Outcome(NAME, asdict(settings), rows, _summary(settings, rows))


def _one(task: _Task) -> dict[str, Any]:
    """One fit, or one comparison."""
    began, clients = time.process_time(), _clients(task)
    found = _fitted(task, clients) if task.case.method else _compared(task, clients)
    about = {"case": task.case.name, "epsilon": task.epsilon, "seed": task.seed}
    return about | found | {"seconds": time.process_time() - began}


def _clients(task: _Task) -> Clients:
    s = task.settings
    sizes: dict[str, Any] = {"n_clients": s.clients, "rows": s.rows, "n_features": _FEATURES}
    made = planted_structure(task.case.truth, task.case.size, noise=_NOISE, seed=task.seed, **sizes)
    assert isinstance(made.x, Tensor)
    assert isinstance(made.y, Tensor)
    names = made.names[made.owners]
    return from_arrays(made.x.numpy(), made.y.numpy(), names, task="regression", test_size=0.2, seed=task.seed)


def _fitted(task: _Task, clients: Clients) -> dict[str, Any]:
    """Fit, and judge on held-out rows."""
    case = task.case
    tree: dict[str, Any] = {
        "method": case.method, "seed": task.seed, "baselines": False,
        "privacy": {} if task.epsilon is None else {"epsilon": task.epsilon, "anyway": True},
    }  # fmt: skip
    if case.method != "shrunk":
        tree["training"] = {"rounds": task.settings.rounds}
    if case.method == "ifca":
        tree["clusters"] = {"n_clusters": case.size}
    if case.method == "fedrep":
        tree |= _FEDREP
    found = fit(clients, options(tree))
    error, right = _judged(found, clients, case)
    spent = None if task.epsilon is None else found.extra["privacy"]["spent"]
    return {"rmse": error, "right": right, "chosen": None, "spent": spent}


def _judged(found: Fitted, clients: Clients, case: Case) -> tuple[float, bool | None]:
    """Root mean squared error on held-out rows, and whether planted groups were found."""
    models, test = found.models, clients.test
    assert test is not None
    train, test = (rows.scaled(models.scaling).to(models.model.dtype) for rows in (clients.train, test))
    right = None
    if isinstance(models, ClusterModels):
        label = placed(models.model, models.theta, train).label
        measured = measured_models(models.model, models.theta, label, test)
        if case.truth == "clusters":
            right = match_labels(label, torch.arange(len(label)) % case.size) >= _RIGHT
    else:
        measured = models.measured(test, models.own)
    return math.sqrt(measured.mean_metric) * float(models.scaling.y_scale), right


def _compared(task: _Task, clients: Clients) -> dict[str, Any]:
    """Choose, and see whether that is what was planted; without a budget, as `coterie compare --quick` does."""
    case = task.case
    if task.epsilon is None:
        free = compare(clients, structures=("clusters", "local", "shrunk"), seed=task.seed, quick=True, max_clusters=5)
        structure, setting, spent = free.chosen, free[free.chosen].setting, None
    else:
        found = compare_private(clients, epsilon=task.epsilon, seed=task.seed, anyway=True)
        structure, setting, spent = found.chosen.structure, dict(found.chosen.setting), found.privacy["spent"]
    size = int(setting.get("n_clusters", 1))
    right = structure == case.truth and size == case.size
    return {"rmse": None, "right": right, "chosen": f"{structure} {size}" if size > 1 else structure, "spent": spent}


def _summary(settings: Settings, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every case and epsilon."""
    out = []
    for case in CASES:
        for epsilon in (*settings.epsilon, None):
            some = [row for row in rows if (row["case"], row["epsilon"]) == (case.name, epsilon)]
            errors = [row["rmse"] for row in some if row["rmse"] is not None]
            right = [row["right"] for row in some if row["right"] is not None]
            spent = [row["spent"] for row in some if row["spent"] is not None]
            out.append(
                {
                    "case": case.name, "epsilon": epsilon, "reps": len(some),
                    "rmse": sum(errors) / len(errors) if errors else None,
                    "right": sum(right) / len(right) if right else None,
                    "chosen": ", ".join(sorted({row["chosen"] for row in some if row["chosen"]})),
                    "spent": max(spent, default=None),
                    "seconds": sum(row["seconds"] for row in some) / len(some),
                }
            )  # fmt: skip
    return out


CAPTION = (
    "epsilon: the budget, with delta 1e-5; a dash is none. RMSE on held-out rows, of which the noise alone has 0.5. right:\n"
    "share of repetitions in which the planted groups were found, or the planted structure, with its size, was chosen."
)
COLUMNS = [
    Column("case", "case"), Column("epsilon", "epsilon", "g"), Column("reps", "reps"), Column("rmse", "RMSE", ".3f"),
    Column("right", "right", ".0%"), Column("chosen", "chosen"), Column("spent", "spent", ".2f"),
    Column("seconds", "CPU seconds", ".1f"),
]  # fmt: skip
