# SPDX-License-Identifier: Apache-2.0
"""Fit linear models under every structure, one after the other, on the same rows with their folds."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_ifca import Clusters
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.random_effects import Prior
from coterie.data.draws import FOLDS
from coterie.data.ragged import Ragged
from coterie.methods.linear.choice import chosen
from coterie.methods.linear.structures import (
    ORDER,
    Effort,
    Found,
    Setting,
    clusters,
    common_model,
    local,
    map_of_clients,
    mixture,
    representation,
    shrunk,
)
from coterie.methods.linear.task import Task
from coterie.methods.session import Session
from coterie.protocol import Algorithm

__all__ = ["CLASSES", "FOLDS", "TOLERANCE", "chosen_setting", "fitted", "run"]

TOLERANCE = 0.005  # in the score: a simpler setting or structure that is worse by no more is as good
CLASSES = Effort(rounds=12, steps=10, starts=2)  # every round of classification looks at all rows
_MIXTURE_ROWS = 2000  # of a client that mixtures are fitted to and judged by, at most


def chosen_setting(session: Session, structure: str, rows: Ragged, scaling: Scaling, n_classes: int) -> Setting:
    """Choose the setting of one structure as `compare` does, on rows that are ready to be fitted.

    Parameters
    ----------
    session : Session
        What runs it; its seed deals the folds.
    structure : {"local", "shrunk", "representation"}
        Whose setting.
    rows : Ragged
        Training rows, with the features that will be fitted: products of them, and as they were scaled.
    scaling : Scaling
        That they were made with.
    n_classes : int
        0 for regression.
    """
    problem = Problem(rows.shape[0], n_classes, FOLDS, tuple(range(FOLDS + 1)))
    task = Task(
        replace(session, folder=None), problem, scaling, rows.to(torch.float64), None, None, session.options.seed
    )
    effort = CLASSES if n_classes else Effort()
    found, _ = fitted(task, ("global", structure), effort)
    return found[structure].settings[chosen(task, found, TOLERANCE).settings[structure]]


def fitted(task: Task, wanted: tuple[str, ...], effort: Effort) -> tuple[dict[str, Found], Tensor]:
    """Fit and judge all structures; and where clients' models lie, for a map."""
    found = {"global": run(task, "global", common_model(task.problem, effort), effort.steps)}
    base, penalty = _base(found["global"], task.judged)
    for name in ("local", "shrunk", "representation", "clusters"):
        if name == "shrunk" or name in wanted:  # others begin with what is learnt for it
            program = _structure(name, task, effort, found, base, penalty)
            found[name] = run(task, name, program, 2 * effort.rounds)
    place = run(task, None, map_of_clients(task.problem, base, _free(found["shrunk"])), 1)
    if "mixture" in wanted and task.problem.is_regression:
        found["mixture"] = _mixture(task, effort, found["global"])
    return {name: found[name] for name in ORDER if name in wanted and name in found}, place


def run(task: Task, phase: str | None, program: Algorithm, total: int, rows: Ragged | None = None) -> Any:
    """Let the session run a structure's program; clients keep what they have learnt in those before."""
    rows = task.rows if rows is None else rows
    return task.session.run(phase, rows, [lambda state: program], None, total, goes_on=True).states[0]


def _base(common: Found, judged: Tensor) -> tuple[Clusters, float]:
    """The model of all rows together with the best penalty."""
    best = _best_penalty(common, judged)
    fit = common.fits[best]
    assert isinstance(fit, Clusters)
    return fit, float(common.settings[best]["penalty"])


def _best_penalty(common: Found, judged: Tensor) -> int:
    means = common.judged.score[:, judged].mean(1)
    return max((j for j, setting in enumerate(common.settings) if "penalty" in setting), key=lambda j: float(means[j]))


def _free(found: Found) -> Prior:
    last = found.fits[-1]
    assert isinstance(last, Prior)
    return last


def _structure(
    name: str, task: Task, effort: Effort, found: dict[str, Found], base: Clusters, penalty: float
) -> Algorithm:
    """Fit and judge one structure.  -> Found, or None where clients or features are too few"""
    problem, m = task.problem, task.n_clients
    if name == "local":
        return (yield from local(problem, effort, base))
    if name == "shrunk":
        return (yield from shrunk(problem, effort, base))
    if name == "representation":
        most = max(1, min(effort.max_rank, problem.n_parameters // 2, m // 2))
        return (yield from representation(problem, effort, base, _free(found["shrunk"]), most))
    most = max(2, min(effort.max_clusters, m // 2))
    return (yield from clusters(problem, effort, base, most, penalty, max(2, -(-m // 30)), task.seed))


def _mixture(task: Task, effort: Effort, common: Found) -> Found:
    """Mixtures within clients, with at most so many rows of each."""
    base, _ = _base(common, task.judged)
    best = _best_penalty(common, task.judged)
    rows = task.rows.thinned(_MIXTURE_ROWS, seed=task.seed)
    program = mixture(task.problem, effort, base, common.judged.at(best), task.seed)
    found: Found = run(task, "mixture", program, 2 * effort.mixture_rounds * (effort.max_components - 1), rows)
    return found
