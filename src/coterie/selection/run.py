# SPDX-License-Identifier: Apache-2.0
"""Compare structures: one protocol for all, the choice, and what comes of it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_ifca import Clusters
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.random_effects import Prior
from coterie.config import options
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.methods.session import Session, Watch, model_for
from coterie.protocol import Algorithm
from coterie.select import difference, simplest
from coterie.selection.choice import OUTLIER, outlying
from coterie.selection.density import density_newcomers, fit_densities
from coterie.selection.networks import FOLDS, Networks
from coterie.selection.result import ORDER, Comparison, Setting
from coterie.selection.structures import (
    Effort,
    Found,
    clusters,
    common_model,
    local,
    map_of_clients,
    mixture,
    on_newcomers,
    representation,
    shrunk,
)
from coterie.selection.summary import Evidence, New, summarised
from coterie.selection.task import Task, checked

__all__ = ["chosen_setting", "compare"]

MIXTURE_ROWS = 2000  # of a client that mixtures are fitted to and judged by, at most
TOLERANCE = 0.005  # in the score: a simpler setting or structure that is worse by no more is as good
_FOLDS = 5
_SHARE = 0.03  # of what the best brings over one model for all: who loses no more is as good
_WORSE = 0.05  # in squared errors: more than that is seen, whatever chance may be
_SHARED = ("global", "clusters", "representation", "mixture")  # structures in which clients have models in common
_CLASSES = Effort(rounds=12, steps=10, starts=2)  # every round of classification looks at all rows
_ROUNDS = (10, 30, 60)  # after which networks may be done
_STARTS = 3  # of networks' groups, at most
_QUICK = Effort(rounds=8, mixture_rounds=20, steps=10, starts=2, max_clusters=4, max_rank=4, max_components=2)


def compare(
    clients: Clients,
    *,
    structures: Sequence[str] | None = None,
    hidden: Sequence[int] = (),
    folds: int | None = None,
    max_clusters: int = 8,
    max_rank: int = 8,
    max_components: int = 4,
    few_shot: int = 5,
    seed: int = 0,
    quick: bool = False,
    tolerance: float = TOLERANCE,
    watch: Watch | None = None,
) -> Comparison:
    """Find the structure of the clients.

    Cross-validation within clients chooses every structure's settings and the structure itself, by the mean log-likelihood
    of held-out rows. Test rows and new clients, which are not used for selection, then evaluate the choice.

    Parameters
    ----------
    clients : Clients
        Training rows, and test rows and new clients for evaluation, if there are any.
    structures : sequence of str, optional
        Structures to compare; "global" is always included. All by default.
    hidden : sequence of int
        Hidden layers, to compare networks instead of linear models.
    folds : int, optional
        Folds of the cross-validation: 5 by default, 3 for networks. Clients with fewer training rows take part, but their
        score does not count.
    max_clusters, max_rank, max_components : int
        Largest settings tried.
    few_shot : int
        Labelled rows of every new client.
    quick : bool
        Try fewer settings and starts.
    tolerance : float
        A simpler structure is as good as the best if its score is worse by at most this, one standard error, or 3 % of the
        best one's gain over one model for all; 0.005 is half a percent of the error.
    watch : callable, optional
        Told of every round: for which structure, what happened, and how many rounds are expected.
    """
    began = time.perf_counter()
    layers = options({"model": {"hidden": hidden}}).model.hidden
    folds = folds if folds is not None else FOLDS if layers else _FOLDS
    wanted = checked(clients, structures, layers, folds, few_shot)
    session = Session(options({"seed": seed}), watch=watch)
    most = {"max_clusters": max_clusters, "max_rank": max_rank, "max_components": max_components}
    effort = replace(Effort() if clients.schema.task == "regression" else _CLASSES, **most)
    if quick:
        effort = replace(_QUICK, **{name: min(given, getattr(_QUICK, name)) for name, given in most.items()})
    task = Task.of(session, clients, folds, few_shot)
    if clients.schema.task == "none":
        evidence, new = _densities(task, wanted, effort, tolerance)
        made = summarised(clients, task, evidence, new)
    elif layers:
        model = model_for(clients, options({"model": {"hidden": layers}}), None)
        rounds = _ROUNDS[:2] if quick else _ROUNDS
        networks = Networks(task, model, layers, rounds, min(effort.starts, _STARTS), effort.max_clusters)
        made = _networks(clients, networks, wanted, tolerance)
    else:
        found, place = _fitted(task, wanted, effort)
        evidence = _chosen(task, found, tolerance)
        new = {} if task.newcomers is None else _new_clients(task, evidence)
        made = summarised(clients, task, evidence, new, place=place)
    settings = {
        "folds": folds, "few_shot": few_shot, "tolerance": tolerance, "structures": list(wanted), "quick": quick, **most,
    }  # fmt: skip
    settings |= {"hidden": list(layers)} if layers else {}
    return replace(made, seed=seed, settings=settings, seconds=time.perf_counter() - began)


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
    problem = Problem(rows.shape[0], n_classes, _FOLDS, tuple(range(_FOLDS + 1)))
    task = Task(
        replace(session, folder=None), problem, scaling, rows.to(torch.float64), None, None, session.options.seed
    )
    effort = _CLASSES if n_classes else Effort()
    found, _ = _fitted(task, ("global", structure), effort)
    return found[structure].settings[_chosen(task, found, TOLERANCE).settings[structure]]


# -- fitting ----------------------------------------------------------------------------------------------------------
def _fitted(task: Task, wanted: tuple[str, ...], effort: Effort) -> tuple[dict[str, Found], Tensor]:
    """Fit and judge all structures; and where clients' models lie, for a map."""
    found = {"global": _run(task, "global", common_model(task.problem, effort), effort.steps)}
    base, penalty = _base(found["global"], task.judged)
    for name in ("local", "shrunk", "representation", "clusters"):
        if name == "shrunk" or name in wanted:  # others begin with what is learnt for it
            program = _structure(name, task, effort, found, base, penalty)
            found[name] = _run(task, name, program, 2 * effort.rounds)
    place = _run(task, None, map_of_clients(task.problem, base, _free(found["shrunk"])), 1)
    if "mixture" in wanted and task.problem.is_regression:
        found["mixture"] = _mixture(task, effort, found["global"])
    return {name: found[name] for name in ORDER if name in wanted and name in found}, place


def _run(task: Task, phase: str | None, program: Algorithm, total: int, rows: Ragged | None = None) -> Any:
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
    rows = task.rows.thinned(MIXTURE_ROWS, seed=task.seed)
    program = mixture(task.problem, effort, base, common.judged.at(best), task.seed)
    found: Found = _run(task, "mixture", program, 2 * effort.mixture_rounds * (effort.max_components - 1), rows)
    return found


# -- choosing ---------------------------------------------------------------------------------------------------------
def _chosen(task: Task, found: dict[str, Found], tolerance: float) -> Evidence:
    """Choose settings, find outliers, choose settings without them, and then the structure."""
    nobody = torch.zeros_like(task.judged)
    settings = {name: _setting(one, task.judged, tolerance) for name, one in found.items()}
    shared = torch.stack([_score(found[name], settings[name], task.judged) for name in _SHARED if name in found])
    score = outlying(shared, found["global"].judged.rows)
    odd = (score > OUTLIER) & task.judged
    if int((task.judged & ~odd).sum()) < 2:
        odd = nobody
    counted = task.judged & ~odd
    settings = {name: _setting(one, counted, tolerance) for name, one in found.items()}
    scores = torch.stack([_score(one, settings[name], counted) for name, one in found.items()])
    may = [not one.eligible or any(one.eligible) for one in found.values()]
    if task.problem.is_regression and "mixture" in found:
        may[list(found).index("mixture")] = _predicts(found, settings, scores)
    best = scores[may].nanmean(1).max()
    tolerance = max(tolerance, _SHARE * float(best - scores[list(found).index("global")].nanmean()))
    order = sorted(range(len(scores)), key=lambda j: _complexity(*list(settings.items())[j], found))
    winner = list(found)[order[simplest(scores[order], tolerance=tolerance, eligible=[may[j] for j in order])]]
    barred = tuple(name for name, can in zip(found, may, strict=True) if not can)
    return Evidence(found, settings, winner, task.judged, odd, score, tolerance, barred)


def _predicts(found: dict[str, Found], settings: dict[str, int], scores: Tensor) -> bool:
    """Whether the mean of a mixture predicts about as well as the best of the other structures.

    If not, its components stand for noise, not for structure.
    """
    others = [j for j, name in enumerate(found) if name != "mixture"]
    best = list(found)[max(others, key=lambda j: float(scores[j].nanmean()))]
    errors = (found[name].judged.right[settings[name]] for name in ("mixture", best))
    ours, theirs = (torch.where(scores[0].isnan(), torch.nan, error) for error in errors)
    gap = difference(ours, theirs)
    return not (gap.low > 0 or gap.mean > _WORSE * float(theirs.nanmean()))


def _complexity(name: str, setting: int, found: dict[str, Found]) -> float:
    """The place of a structure in the order.

    Own levels are simpler than own models, and a spread by feature or by direction is less simple than a few directions.
    """
    after = {"intercept": "clusters", "diagonal": "representation", "full": "representation"}
    prior = found[name].settings[setting].get("prior")
    return ORDER.index(after[str(prior)]) + 0.5 if prior in after else ORDER.index(name)


def _score(one: Found, setting: int, counted: Tensor) -> Tensor:
    """[M] NaN for who does not count."""
    return torch.where(counted, one.judged.score[setting], torch.nan)


def _setting(one: Found, counted: Tensor, tolerance: float) -> int:
    scores = torch.where(counted, one.judged.score, torch.nan)
    if one.free:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for j, setting in enumerate(one.settings):
            kinds.setdefault(tuple(setting), []).append(j)
        best = [max(some, key=lambda j: float(scores[j].nanmean())) for some in kinds.values()]
        return best[simplest(scores[best], tolerance=tolerance)]
    return simplest(scores, tolerance=tolerance, eligible=one.eligible)


# -- new clients ------------------------------------------------------------------------------------------------------
def _new_clients(task: Task, evidence: Evidence) -> New:
    """Judge the chosen settings by new clients, who show a few labelled rows.  -> score, right, rows by structure"""
    assert task.newcomers is not None
    problem = replace(task.problem, n_folds=1, held=(1,))
    support, query = task.newcomers
    rows = support.with_folds(1, seed=task.seed, test=query)
    return {
        name: _run(task, None, on_newcomers(one, evidence.settings[name], problem), 1, rows)
        for name, one in evidence.found.items()
    }


# -- networks ---------------------------------------------------------------------------------------------------------
def _networks(clients: Clients, networks: Networks, wanted: tuple[str, ...], tolerance: float) -> Comparison:
    """Networks in place of linear models."""
    task = networks.task
    found, fits = networks.fitted(wanted)
    evidence = _chosen(task, {name: found[name] for name in ORDER if name in found}, tolerance)
    new: New = {}
    if task.newcomers is not None:
        new = networks.on_newcomers(found, fits, evidence.settings)
    made = summarised(clients, task, evidence, new, words=networks)
    return replace(made, notes=networks.notes(evidence.chosen))


# -- without a target -------------------------------------------------------------------------------------------------
def _densities(task: Task, wanted: tuple[str, ...], effort: Effort, tolerance: float) -> tuple[Evidence, New]:
    """Mixtures of the rows themselves; a new client has no rows enough for a mixture of its own."""
    found, fits = fit_densities(task, wanted, effort)
    evidence = _chosen(task, found, tolerance)
    new: New = {}
    if task.newcomers is not None:
        for name in ("global", "mixture"):
            if name in found:
                fit = fits[name][evidence.settings[name]]
                new[name] = density_newcomers(task, fit, own=name == "mixture")
    return evidence, new
