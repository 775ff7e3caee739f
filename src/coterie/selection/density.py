# SPDX-License-Identifier: Apache-2.0
"""Clients without a target: one mixture for all, mixtures that are alike (FedGrEM), one mixture each.

Components are normal with a common covariance. Scores are log densities of held-out rows, fold by fold; the number of
components is chosen like any other setting. All structures, numbers of components and folds advance side by side.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from coterie.algorithms.inference import adopt_ask
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart
from coterie.data.ragged import Ragged
from coterie.methods.linear.scores import Judged
from coterie.methods.linear.structures import Effort, Found
from coterie.methods.linear.task import Task
from coterie.methods.mixture.fit import OUTLIER, How, MixtureFit, make_fit, program, state_type
from coterie.methods.mixture.results import log_likelihoods
from coterie.methods.session import On, Phase
from coterie.models.mixtures import Gaussian
from coterie.selection.result import ORDER

__all__ = ["DENSITIES", "density_newcomers", "fit_densities"]

DENSITIES = ("global", "local", "mixture")

_METHODS = {"global": "pooled-em", "local": "local-em", "mixture": "fedgrem"}
_PENALTY = 2.0  # C_lambda, the paper's
_ROUNDS, _TOL = 200, 1e-4


def fit_densities(
    task: Task, wanted: tuple[str, ...], effort: Effort
) -> tuple[dict[str, Found], dict[str, list[MixtureFit]]]:
    """Fit and judge mixtures with 1 to `max_components` components; and hand over those that all rows gave.

    Rows are scaled, and in float64.
    """
    names = [name for name in ORDER if name in wanted and name in DENSITIES]
    sizes = tuple(range(1, effort.max_components + 1))
    train, test = task.train, task.test
    parts, held = zip(*train.fold_by_fold(task.problem.n_folds, seed=task.seed), strict=True)
    every = list(product(names, sizes))
    *by_fold, final = _fits(task, every, [*parts, train], effort)
    judged = [*zip(by_fold, held, strict=True), *([] if test is None else [(final, test)])]
    likelihood = log_likelihoods(judged, task.session)  # [K, M] each
    total = torch.stack([one * rows.counts for one, rows in zip(likelihood, held, strict=False)]).sum(0)
    score = total / train.counts
    on_test = torch.full_like(score, torch.nan) if test is None else likelihood[-1]
    test_rows = torch.zeros_like(train.counts) if test is None else test.counts
    found, fits = {}, {}
    for name in names:
        own = [i for i, (structure, _) in enumerate(every) if structure == name]
        one = torch.ones(len(sizes), dtype=torch.float64)
        judgement = Judged(score[own], score[own], on_test[own], on_test[own], train.counts, test_rows, one)
        found[name] = Found(name, tuple({"n_components": r} for r in sizes), judgement, ())
        fits[name] = [final[i] for i in own]
    return found, fits


def _fits(
    task: Task, every: Sequence[tuple[str, int]], parts: Sequence[Ragged], effort: Effort
) -> list[list[MixtureFit]]:
    """Fit each structure with each number of components to each set of rows.  -> by rows, by structure and number"""
    session, start = task.session, MixtureStart(restarts=effort.starts)
    family = Gaussian(task.train.shape[0], "full")
    how = How(family, task.seed, _ROUNDS, _TOL, start, OUTLIER, session, {"penalty": "norm"})
    methods = [_METHODS[name] for name, _ in every]
    programs = [program(how, r, method, _PENALTY) for method, (_, r) in zip(methods, every, strict=True)]
    states = [state_type(method) for method in methods]
    phases = [
        Phase(f"mixtures {i}", rows, programs, states, _ROUNDS, said="" if i else "mixtures")
        for i, rows in enumerate(parts)
    ]
    done = session.run_all(phases)
    kept = session.revealed([(rows, range(len(every))) for rows in parts], REVEALED)
    return [
        [
            make_fit(how, method, rows, state, private, _PENALTY)
            for method, state, private in zip(methods, one.states, left, strict=True)
        ]
        for rows, one, left in zip(parts, done, kept, strict=True)
    ]


def density_newcomers(task: Task, fits: Mapping[str, MixtureFit]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Judge the centres' components by new clients, who have own proportions of a "mixture".  -> score, score, rows [M]"""
    assert task.newcomers is not None
    (support, query), clients = task.newcomers, task.newcomers[0].n_clients
    asks = {
        i: adopt_ask(fit.family, fit.centre, fit.weights.mean(0), fit.scale.mean(0))
        for i, (name, fit) in enumerate(fits.items()) if name == "mixture"
    }  # fmt: skip
    got = task.session.exchange([On(support, asks)])[0].replies if asks else {}
    given = []
    for i, fit in enumerate(fits.values()):
        theirs = got[i]["weights"] if i in got else fit.weights.mean(0).expand(clients, -1)
        given.append(MixtureFit(
            fit.method, fit.family, fit.centre, fit.centre.expand(clients, -1, -1), theirs, fit.scale.mean(0)[None],
            torch.zeros(clients), torch.zeros(clients), 0,
        ))  # fmt: skip
    (scores,) = log_likelihoods([(given, query)], task.session)
    return {name: (score, score, query.counts) for name, score in zip(fits, scores, strict=True)}
