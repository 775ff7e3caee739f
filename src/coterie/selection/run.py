# SPDX-License-Identifier: Apache-2.0
"""Compare structures: one protocol for all, the choice, and what comes of it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.config import options
from coterie.data.clients import Clients
from coterie.data.draws import DEALS
from coterie.data.stand_ins import FOLDS_AGAIN, StandIns
from coterie.methods.linear.choice import REPETITIONS, Evidence, chosen
from coterie.methods.linear.fitting import CLASSES, FOLDS, TOLERANCE, fitted, run
from coterie.methods.linear.sources import InProgram, Source, finished
from coterie.methods.linear.structures import ORDER, Effort, Found, on_newcomers
from coterie.methods.linear.task import Task, checked
from coterie.methods.mixture.results import MixtureFit
from coterie.methods.secure import check_secure_comparison
from coterie.methods.session import Session, Watch, model_for
from coterie.protocol import Lockstep, together
from coterie.selection import networks as on_networks
from coterie.selection.density import density_newcomers, fit_densities
from coterie.selection.networks import Networks
from coterie.selection.result import Comparison
from coterie.selection.summary import metric_name_of, summarised
from coterie.selection.told import NewTold, Told, new_told, told

__all__ = ["FEW", "NEW_CLIENTS", "compare"]

NEW_CLIENTS = 0.2  # share of the clients that commands hold out, when nobody says
FEW = 10  # clients: of fewer, none is held out

_LONG = 1e7  # rows times squared parameters: classes of more are dealt once, since every round looks at all rows
_ROUNDS = (10, 30, 60)  # after which networks may be done
_STARTS = 3  # of networks' groups, at most
_NO_MIXTURE = (
    "Mixtures within clients were not compared: they need rows, and site summaries hold sums of products only."
)
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
    deals: int | None = None,
    repetitions: int = REPETITIONS,
    seed: int = 0,
    quick: bool = False,
    effort: Effort | None = None,
    tolerance: float = TOLERANCE,
    secure: bool = False,
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
    deals : int, optional
        How often rows are dealt to folds. Scores are averaged over deals, which share their messages: 2 for linear models, 1
        for classes with many rows (every pass is long), for networks, without a target, for site summaries of one deal, and
        if `quick`.
    repetitions : int
        How often the choice is repeated, with clients drawn again and one of the deals: what is chosen most often is chosen,
        and how often tells how sure that is. 0 chooses once.
    quick : bool
        Try fewer settings and starts, with one deal of the folds.
    effort : Effort, optional
        How long structures are worked on (`coterie.methods.linear.structures.Effort`), in place of what `quick` and the
        largest settings say.
    tolerance : float
        A simpler structure is as good as the best if its score is worse by at most this, one standard error, or 3 % of the
        best one's gain over one model for all; 0.005 is half a percent of the error. Of classes it is smaller where one is
        rare: in proportion to their entropy.
    secure : bool
        Whether the server learns sums over nodes only, also of scores: nothing is then said of single clients, and clusters
        grow from models that are drawn.
    watch : callable, optional
        Told of every round: for which structure, what happened, and how many rounds are expected.
    """
    began = time.perf_counter()
    layers = options({"model": {"hidden": hidden}}).model.hidden
    folds = folds if folds is not None else on_networks.FOLDS if layers else FOLDS
    wanted = checked(clients, structures, layers, folds, few_shot)
    check_secure_comparison(clients, layers, secure=secure)
    session = Session(options({"seed": seed, "secure": secure}), watch=watch)
    most = {"max_clusters": max_clusters, "max_rank": max_rank, "max_components": max_components}
    if effort is not None:
        most = {name: getattr(effort, name) for name in most}
    elif quick:
        few: dict[str, Any] = {name: min(given, getattr(_QUICK, name)) for name, given in most.items()}
        effort = replace(_QUICK, **few)
    else:
        much: dict[str, Any] = dict(most)
        effort = replace(Effort() if clients.schema.task == "regression" else CLASSES, **much)
    task, used = Task.of(session, clients, folds, few_shot), 1
    if clients.schema.task == "none":
        evidence, said, new = _densities(clients, task, wanted, effort, tolerance, repetitions)
        made = summarised(clients, task, evidence, said, new)
    elif layers:
        model = model_for(clients, options({"model": {"hidden": layers}}), None)
        rounds = _ROUNDS[:2] if quick else _ROUNDS
        networks = Networks(task, model, layers, rounds, min(effort.starts, _STARTS), effort.max_clusters)
        made = _networks(clients, networks, wanted, tolerance, repetitions)
    else:
        used = _deals(task, quick) if deals is None else deals
        fits = fitted(task, wanted, effort, used)
        how: dict[str, Any] = {"shape": fits.shape, "repetitions": repetitions}
        evidence, said = _chosen(clients, task, fits.source, fits.found, tolerance, **how)
        new = None if task.newcomers is None else _new_clients(task, evidence)
        made = summarised(clients, task, evidence, said, new, place=fits.place)
    settings = {
        "folds": folds, "deals": used, "repetitions": repetitions, "few_shot": few_shot, "tolerance": tolerance,
        "structures": list(wanted), "quick": quick, **most,
    }  # fmt: skip
    settings |= {"hidden": list(layers)} if layers else {}
    settings |= {"secure": session.secured()} if secure else {}
    if isinstance(clients.train, StandIns):
        made = replace(made, notes=(*made.notes, _NO_MIXTURE))
    made = replace(made, notes=(*made.notes, *session.remarks()))
    return replace(made, seed=seed, settings=settings, seconds=time.perf_counter() - began, traffic=session.traffic)


def _deals(task: Task, quick: bool) -> int:
    """How often rows are dealt to folds: twice, but not where sums were made of one deal, or where every pass is long."""
    if quick or (isinstance(task.train, StandIns) and FOLDS_AGAIN not in task.train.divisions):
        return 1
    numbers = int(task.train.counts.sum()) * task.problem.n_parameters**2
    return DEALS if task.problem.is_regression or numbers <= _LONG else 1


def _chosen(
    clients: Clients, task: Task, source: Source, found: dict[str, Found], tolerance: float, **how: Any
) -> tuple[Evidence, Told]:
    """Choose, and ask what is to be said of what was chosen and of the others."""
    evidence: Evidence = finished(chosen(source, task, found, tolerance, **how))
    return evidence, finished(told(source, task, evidence, metric_name_of(clients)))


# -- new clients ------------------------------------------------------------------------------------------------------
def _new_clients(task: Task, evidence: Evidence) -> NewTold:
    """Judge the chosen settings by new clients, who show a few labelled rows."""
    assert task.newcomers is not None
    problem = replace(task.problem, n_folds=1, held=(1,))
    support, query = task.newcomers
    rows = support.with_folds(1, seed=task.seed, test=query)
    noise = torch.stack([evidence.table.noise[0, -1, evidence.column(name)] for name in evidence.found])
    found: NewTold = run(task, None, _judged_by_new(task, evidence, problem, noise), 2, rows)
    return found


def _judged_by_new(task: Task, evidence: Evidence, problem: Problem, noise: Tensor) -> Lockstep:
    """Let new clients judge, and ask what came of it.  -> NewTold"""
    programs = {name: on_newcomers(one, evidence.settings[name], problem) for name, one in evidence.found.items()}
    judged = yield from together(programs)
    return (yield from new_told(InProgram(individual=not task.session.options.secure), task, judged, noise))


# -- networks ---------------------------------------------------------------------------------------------------------
def _networks(
    clients: Clients, networks: Networks, wanted: tuple[str, ...], tolerance: float, repetitions: int
) -> Comparison:
    """Networks in place of linear models."""
    task = networks.task
    found, fits = networks.fitted(wanted)
    ordered = {name: found[name] for name in ORDER if name in found}
    evidence, said = _chosen(clients, task, networks.source, ordered, tolerance, repetitions=repetitions)
    new = None
    if task.newcomers is not None:
        new = networks.on_newcomers(fits, evidence)
    made = summarised(clients, task, evidence, said, new, words=networks)
    return replace(made, notes=(*made.notes, *networks.notes(evidence.chosen)))


# -- without a target -------------------------------------------------------------------------------------------------
def _densities(
    clients: Clients, task: Task, wanted: tuple[str, ...], effort: Effort, tolerance: float, repetitions: int
) -> tuple[Evidence, Told, NewTold | None]:
    """Mixtures of the rows themselves; a new client has no rows enough for a mixture of its own."""
    found, fits, source = fit_densities(task, wanted, effort)
    evidence, said = _chosen(clients, task, source, found, tolerance, repetitions=repetitions)
    new = None
    if task.newcomers is not None:
        used: dict[str, MixtureFit] = {
            name: fits[name][evidence.settings[name]] for name in ("global", "mixture") if name in found
        }
        new = density_newcomers(task, used)
    return evidence, said, new
