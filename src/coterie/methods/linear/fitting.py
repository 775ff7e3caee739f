# SPDX-License-Identifier: Apache-2.0
"""Fit linear models under every structure, side by side, on the same rows with their folds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_ifca import Clusters
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.random_effects import Prior
from coterie.algorithms.target_shape import Shape, target_shape
from coterie.data.draws import FOLDS
from coterie.data.ragged import Ragged
from coterie.data.stand_ins import StandIns
from coterie.engines.drive import Program
from coterie.methods.linear.choice import chosen
from coterie.methods.linear.sources import InProgram, OnSession, Source
from coterie.methods.linear.structures import (
    ORDER,
    Effort,
    Found,
    Setting,
    also,
    clusters,
    local,
    map_of_clients,
    mixture,
    most_rank,
    pooled_models,
    priors_for,
    proximal_models,
    representation,
    settings_of,
    shrunk,
    with_deals,
)
from coterie.methods.linear.task import Task
from coterie.methods.session import Phase, Session
from coterie.models import Dense
from coterie.models.outcomes import OUTCOMES
from coterie.protocol import Lockstep, together

__all__ = ["CLASSES", "FOLDS", "TOLERANCE", "Fitted", "fitted", "prior_phase", "problem_of", "run"]

TOLERANCE = 0.005  # in the score: a simpler setting or structure that is worse by no more is as good
CLASSES = Effort(rounds=12, steps=10, starts=2)  # every round of classification looks at all rows
_MIXTURE_ROWS = 2000  # of a client that mixtures are fitted to and judged by, at most


def prior_phase(
    session: Session, structure: str, setting: Setting | None, rows: Ragged, scaling: Scaling, about: Problem
) -> Phase:
    """What fits one structure to all rows: with a setting that is given, or with the one that `compare` would choose.

    The last state is the setting and its `Prior`. While the setting is chosen, by cross-validation within clients, models
    with each of them are fitted to all rows beside.

    Parameters
    ----------
    session : Session
        What runs it; its seed deals the folds.
    structure : {"local", "shrunk", "representation"}
        Which.
    setting : dict, optional
        A penalty, a kind of prior, or a rank.
    rows : Ragged
        Training rows, with the features that will be fitted: products of them, and as they were scaled.
    scaling : Scaling
        That they were made with.
    about : Problem
        What is fitted: numbers, classes or an outcome, and what rows of these count.
    """
    folds = FOLDS if setting is None else 1
    problem = replace(about, n_folds=folds, held=tuple(range(folds)))
    task = Task(session, problem, scaling, rows.to(torch.float64), None, None, session.options.seed)
    program = _with_chosen(task, structure) if setting is None else _with_given(task, structure, setting)
    return Phase(None, task.rows, [lambda state: program], None, Effort().messages, said="structures")


def problem_of(model: Dense) -> Problem:
    """What the comparison calls a linear model; all rows are of fold 0, so that all of them are learnt from."""
    classes = {"cross_entropy": model.n_outputs, "ordinal": model.n_outputs + 1}  # two thresholds are no parameters
    outcome = model.loss if model.loss in OUTCOMES else ""
    return Problem(model.sizes[0], classes.get(model.loss, 0), 1, (1,), model.class_weights, outcome)


def _with_given(task: Task, structure: str, setting: Setting) -> Lockstep:
    """Fit a structure to all rows with one setting.  -> Setting, Prior"""
    return setting, (yield from priors_for(structure, (setting,), _whole(task)))


def _with_chosen(task: Task, structure: str) -> Lockstep:
    """Choose a structure's setting as `compare` does, and fit it to all rows.  -> Setting, Prior"""
    effort = Effort() if task.problem.is_regression else CLASSES
    settings = settings_of(structure, task.problem, effort, task.n_clients)
    done = yield from together({
        "settings": _structures(task, ("global", structure), effort, mixed=False, placed=False),
        "priors": priors_for(structure, settings, _whole(task)),
    })  # fmt: skip
    found = {name: one for name, one in done["settings"].items() if name in ("global", structure)}
    evidence = yield from chosen(InProgram(), task, found, TOLERANCE, shape=done["settings"]["shape"])
    best = evidence.settings[structure]
    return settings[best], done["priors"].setting(best)


def _whole(task: Task) -> Problem:
    """The fit to all training rows."""
    return replace(task.problem, held=(task.problem.n_folds,))


@dataclass(frozen=True)
class Fitted:
    """All structures, fitted and judged with each deal of the folds.

    Attributes
    ----------
    found : dict
        By name.
    place : Tensor or None
        [M, 2] where clients' models lie, for a map, if that may be known.
    shape : Shape
        Of the target.
    source : Source
        Who answers what clients keep of how they are served.
    """

    found: dict[str, Found]
    place: Tensor | None
    shape: Shape
    source: Source


def fitted(task: Task, wanted: tuple[str, ...], effort: Effort, deals: int = 1) -> Fitted:
    """Fit and judge all structures, with each deal of the folds.

    Deals do not wait for each other, and share their messages. Only the first has a fit to all rows.
    """
    secure = task.session.options.secure
    tasks = [task, *(task.dealt(again) for again in range(1, deals))]
    few = [one.rows.thinned(_MIXTURE_ROWS, seed=one.seed) for one in tasks]
    mixed, apart = "mixture" in wanted and task.problem.is_regression, few[0] is not task.rows
    programs = [
        _structures(
            one, wanted, effort, mixed and not apart, placed=one is task and not secure, shaped=one is task,
            drawn=secure or effort.drawn,
        )
        for one in tasks
    ]  # fmt: skip
    found = _run_deals(tasks, "structures", programs, effort.messages)
    if mixed and apart:  # large clients: on some of their rows
        programs = [_mixture(one, effort, each["global"]) for one, each in zip(tasks, found, strict=True)]
        for each, mixture_ in zip(
            found, _run_deals(tasks, "mixture", programs, effort.mixture_rounds, few), strict=True
        ):
            each["mixture"] = mixture_
    first, *others = found
    asked = [
        rows
        for one, some in zip(tasks, few, strict=True)
        for rows in ([one.rows, some] if mixed and apart else [one.rows])
    ]
    source = OnSession.after(task.session, asked[::-1], individual=not secure)  # the last are all rows, first dealt
    together_ = {
        name: with_deals(first[name], [one[name] for one in others])
        for name in ORDER
        if name in wanted and name in first
    }
    return Fitted(together_, first.get("map"), first["shape"], source)


def _run_deals(
    tasks: Sequence[Task], phase: str, programs: Sequence[Lockstep], total: int, rows: Sequence[Ragged] | None = None
) -> list[Any]:
    """Let the session run a program for each deal, side by side; of the first it is told how far all have come."""
    phases = [
        Phase(
            f"{phase} {i}" if i else phase, task.rows if rows is None else rows[i], [_from_start(program)], None,
            total, goes_on=True, said="" if i else phase,
        )
        for i, (task, program) in enumerate(zip(tasks, programs, strict=True))
    ]  # fmt: skip
    return [done.states[0] for done in tasks[0].session.run_all(phases)]


def _from_start(program: Lockstep) -> Program:
    """A comparison has no checkpoints: whatever the state, it begins here."""
    return lambda state: program


def run(task: Task, phase: str | None, program: Lockstep, total: int, rows: Ragged | None = None) -> Any:
    """Let the session run a program; clients keep what they have learnt in those before."""
    rows = task.rows if rows is None else rows
    return task.session.run(phase, rows, [lambda state: program], None, total, goes_on=True).states[0]


def _structures(
    task: Task, wanted: tuple[str, ...], effort: Effort, mixed: bool, placed: bool = True, shaped: bool = True,
    drawn: bool = False,
) -> Lockstep:  # fmt: skip
    """Fit and judge structures side by side; all begin with one model for all.

    -> by name what was `Found`, the "map" where clients are placed, and the target's "shape"
    """
    begin: dict[str, Lockstep] = {"common": pooled_models(task.problem, effort)}
    if (
        shaped and not task.problem.outcome and not isinstance(task.train, StandIns)
    ):  # sums of products have no third powers
        begin["shape"] = target_shape(task.problem, task.zero)
    begun = yield from together(begin)
    common: Found = begun["common"]
    base, penalty = _base(common)
    programs: dict[str, Lockstep] = {}
    if not task.problem.outcome:  # the fixed point of FedProx is that of squared errors and classes
        programs["near"] = proximal_models(task.problem, common)
    if placed or not {"shrunk", "representation", "clusters"}.isdisjoint(wanted):
        programs["shrunk"] = _shrunk_and_others(task, wanted, effort, base, penalty, placed, drawn)
    if "local" in wanted:
        programs["local"] = local(task.problem, effort, base)
    if mixed:
        programs["mixture"] = _mixture(task, effort, common)
    found = yield from together(programs)
    near: Found | None = found.pop("near", None)
    plain = common if near is None else also(common, near)
    return {"global": plain, **found.pop("shrunk", {}), **found, "shape": begun.get("shape", Shape())}


def _shrunk_and_others(
    task: Task, wanted: tuple[str, ...], effort: Effort, base: Clusters, penalty: float, placed: bool, drawn: bool
) -> Lockstep:
    """Shrunk models, and then what begins with them: the map, low-rank models and clusters.  -> by name"""
    problem, m = task.problem, task.n_clients
    first: Found = yield from shrunk(problem, effort, base)
    free = _free(first)
    programs: dict[str, Lockstep] = {"map": map_of_clients(problem, base, free)} if placed else {}
    if "representation" in wanted:
        programs["representation"] = representation(problem, effort, base, free, most_rank(problem, effort, m))
    if "clusters" in wanted:
        most = max(2, min(effort.max_clusters, m // 2))
        least = max(2, -(-m // 30))
        programs["clusters"] = clusters(problem, effort, base, most, penalty, least, task.seed, free if drawn else None)
    return {"shrunk": first, **(yield from together(programs))}


def _base(common: Found) -> tuple[Clusters, float]:
    """The model of all rows together with the best penalty."""
    best = max((j for j, setting in enumerate(common.settings) if "penalty" in setting), key=lambda j: common.scored[j])
    fit = common.fits[best]
    assert isinstance(fit, Clusters)
    return fit, float(common.settings[best]["penalty"])


def _free(found: Found) -> Prior:
    last = found.fits[-1]
    assert isinstance(last, Prior)
    return last


def _mixture(task: Task, effort: Effort, common: Found) -> Lockstep:
    """Mixtures within clients, beside the best model for all."""
    return mixture(task.problem, effort, _base(common)[0], task.seed)
