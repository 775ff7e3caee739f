# SPDX-License-Identifier: Apache-2.0
"""Clients without a target: one mixture for all, mixtures that are alike (FedGrEM), one mixture each.

Components are normal with a common covariance. Scores are log densities of held-out rows, fold by fold; the number of
components is chosen like any other setting. All structures, numbers of components and folds advance side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from coterie.algorithms.inference import adopt_ask
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart
from coterie.algorithms.score_sums import PLAIN, keep_judged
from coterie.data.ragged import Ragged
from coterie.methods.linear.scores import Judged, judged
from coterie.methods.linear.sources import Here, Source, finished
from coterie.methods.linear.structures import Effort, Found, Setting
from coterie.methods.linear.task import Task
from coterie.methods.mixture.fit import OUTLIER, How, MixtureFit, make_fit, program, state_type
from coterie.methods.mixture.results import log_likelihoods
from coterie.methods.session import On, Phase
from coterie.models.mixtures import Gaussian
from coterie.protocol import Replies
from coterie.selection.result import ORDER
from coterie.selection.told import NewTold, new_told

__all__ = ["DENSITIES", "density_newcomers", "fit_densities"]

DENSITIES = ("global", "local", "mixture")

_METHODS = {"global": "pooled-em", "local": "local-em", "mixture": "fedgrem"}
_PENALTY = 2.0  # C_lambda, the paper's
_ROUNDS, _TOL = 200, 1e-4


def fit_densities(
    task: Task, wanted: tuple[str, ...], effort: Effort
) -> tuple[dict[str, Found], dict[str, list[MixtureFit]], Source]:
    """Fit and judge mixtures with 1 to `max_components` components; and hand over those that all rows gave, and who
    answers how they serve clients.

    Rows are scaled, and in float64.
    """
    names = [name for name in ORDER if name in wanted and name in DENSITIES]
    sizes = tuple(range(1, effort.max_components + 1))
    train, test = task.train, task.test
    parts, held = zip(*train.fold_by_fold(task.problem.n_folds, seed=task.seed), strict=True)
    every = list(product(names, sizes))
    *by_fold, final = _fits(task, every, [*parts, train], effort)
    on = [*zip(by_fold, held, strict=True), *([] if test is None else [(final, test)])]
    likelihood = log_likelihoods(on, task.session)  # [K, M] each
    sides = [*held, *([] if test is None else [test])]
    rows = torch.stack([one.counts for one in sides], 1).double()[..., None]  # [M, F, 1]
    value = torch.stack(likelihood, 1).movedim(2, 0).transpose(1, 2)  # [M, F, K]
    value = torch.where(rows > 0, value, 0.0) * rows
    if test is None:
        rows, value = (torch.cat([one, torch.zeros_like(one[:, :1])], 1) for one in (rows, value))
    found, fits, kept, problem = {}, {}, dict[str, Tensor](), task.problem
    for name in names:
        own = [i for i, (structure, _) in enumerate(every) if structure == name]
        values = {"loss": -value[..., own], "metric": value[..., own], "rows": rows}
        kept |= keep_judged(problem, name, values)
        got = Replies({"loss": values["loss"].sum(0), "rows": rows.sum(0)}, torch.arange(1), torch.arange(0))
        settings: tuple[Setting, ...] = tuple({"n_components": r} for r in sizes)
        found[name] = Found(name, settings, judged(got, problem, name, PLAIN), ())
        fits[name] = [final[i] for i in own]
    return found, fits, Here(kept, train.keys)


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


def density_newcomers(task: Task, fits: Mapping[str, MixtureFit]) -> NewTold:
    """Judge the centres' components by new clients, who have own proportions of a "mixture"."""
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
    problem, kept, every = replace(task.problem, n_folds=1, held=(1,)), dict[str, Tensor](), dict[str, Judged]()
    rows = query.counts.double()[:, None, None]  # [M, 1, 1]
    for name, score in zip(fits, scores, strict=True):
        value = torch.where(query.counts > 0, score, 0.0)[:, None, None] * rows
        kept |= keep_judged(problem, name, {"loss": -value, "metric": value, "rows": rows})
        sums = Replies({"loss": -value.sum(0), "rows": rows.sum(0)}, torch.arange(1), torch.arange(0))
        every[name] = judged(sums, problem, name, PLAIN)
    told: NewTold = finished(new_told(Here(kept, query.keys), task, every, torch.ones(len(every), dtype=torch.float64)))
    return told
