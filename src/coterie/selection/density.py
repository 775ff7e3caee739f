# SPDX-License-Identifier: Apache-2.0
"""Clients without a target: one mixture for all, mixtures that are alike (FedGrEM), one mixture each.

Components are normal with a common covariance. Scores are log densities of held-out rows, fold by fold; the number of
components is chosen like any other setting.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.inference import adopt_ask
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart
from coterie.data.ragged import Ragged
from coterie.engines.drive import Program
from coterie.methods.linear.scores import Judged
from coterie.methods.linear.structures import Effort, Found
from coterie.methods.linear.task import Task
from coterie.methods.mixture.fit import MixtureFit, fit_methods, fit_mixture, log_likelihood
from coterie.methods.session import Session
from coterie.models.mixtures import Gaussian
from coterie.protocol import Tensors
from coterie.selection.result import ORDER

__all__ = ["DENSITIES", "density_newcomers", "fit_densities"]

DENSITIES = ("global", "local", "mixture")

_PENALTY = 2.0  # C_lambda, the paper's
_ROUNDS, _TOL = 200, 1e-4


def fit_densities(
    task: Task, wanted: tuple[str, ...], effort: Effort
) -> tuple[dict[str, Found], dict[str, list[MixtureFit]]]:
    """Fit and judge mixtures with 1 to `max_components` components; and hand over those that all rows gave.

    Rows are scaled, and in float64.
    """
    sizes = tuple(range(1, effort.max_components + 1))
    train, test, session = task.train, task.test, task.session
    parts = train.fold_by_fold(task.problem.n_folds, seed=task.seed)
    found, final = {}, {}
    for name in (one for one in ORDER if one in wanted and one in DENSITIES):
        scores, tests, fits = [], [], []
        for n_components in sizes:
            total = torch.zeros(train.n_clients, dtype=torch.float64)
            for part, held in parts:
                total += log_likelihood(_fit(task, name, part, n_components, effort), held, session) * held.counts
            fits.append(_fit(task, name, train, n_components, effort))
            scores.append(total / train.counts)
            tests.append(torch.full_like(total, torch.nan) if test is None else log_likelihood(fits[-1], test, session))
        test_rows = torch.zeros_like(train.counts) if test is None else test.counts
        score, on_test = torch.stack(scores), torch.stack(tests)
        one = torch.ones(len(sizes), dtype=torch.float64)
        judged = Judged(score, score, on_test, on_test, train.counts, test_rows, one)
        found[name] = Found(name, tuple({"n_components": r} for r in sizes), judged, ())
        final[name] = fits
    return found, final


def _fit(task: Task, name: str, rows: Ragged, n_components: int, effort: Effort) -> MixtureFit:
    family = Gaussian(rows.shape[0], "full")
    how: dict[str, Any] = {"rounds": _ROUNDS, "tol": _TOL, "seed": task.seed}
    how |= {"start": MixtureStart(restarts=effort.starts), "drive": partial(_driven, task.session, name)}
    if name == "mixture":
        return fit_mixture(rows, family, n_components, c_lambda=_PENALTY, penalty="norm", **how)
    method = {"global": "pooled-em", "local": "local-em"}[name]
    return fit_methods(rows, family, n_components, (method,), **how)[method]


def _driven(
    session: Session, name: str, phase: str, rows: Ragged, programs: Sequence[Program], state: type, /
) -> tuple[list[Any], list[Tensors]]:
    """Let the session run programs, under the name of the structure."""
    done = session.run(name, rows, programs, state, _ROUNDS)
    return done.states, session.revealed(rows, range(len(programs)), REVEALED)


def density_newcomers(task: Task, fit: MixtureFit, *, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Judge the centre's components by new clients, with proportions of their own if `own`.  -> score, score, rows [M]"""
    assert task.newcomers is not None
    (support, query), weights, scale = task.newcomers, fit.weights.mean(0), fit.scale.mean(0)
    theirs = weights.expand(support.n_clients, -1)
    if own:
        theirs = task.session.ask(support, adopt_ask(fit.family, fit.centre, weights, scale))["weights"]
    clients = support.n_clients
    given = MixtureFit(
        fit.method, fit.family, fit.centre, fit.centre.expand(clients, -1, -1), theirs, scale[None],
        torch.zeros(clients), torch.zeros(clients), 0,
    )  # fmt: skip
    score = log_likelihood(given, query, task.session)
    return score, score, query.counts
