# SPDX-License-Identifier: Apache-2.0
"""Clients without a target: one mixture for all, mixtures that are alike (FedGrEM), one mixture each.

Components are normal with a common covariance. Scores are log densities of held-out rows, fold by fold; the number of
components is chosen like any other setting.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.algorithms.mixture_starts import MixtureStart
from coterie.algorithms.serving import adopt_ask
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.methods.mixture.fit import MixtureFit, fit_methods, fit_mixture, log_likelihood
from coterie.models.mixtures import Gaussian
from coterie.selection.result import ORDER
from coterie.selection.scores import Judged
from coterie.selection.structures import Effort, Found

__all__ = ["DENSITIES", "density_newcomers", "fit_densities"]

DENSITIES = ("global", "local", "mixture")

_PENALTY = 2.0  # C_lambda, the paper's
_ROUNDS, _TOL = 200, 1e-4

Told = Callable[[str], None]


def fit_densities(
    train: Ragged, test: Ragged | None, wanted: tuple[str, ...], effort: Effort, n_folds: int, seed: int, told: Told
) -> tuple[dict[str, Found], dict[str, list[MixtureFit]]]:
    """Fit and judge mixtures with 1 to `max_components` components; and hand over those that all rows gave.

    Rows are scaled, and in float64.
    """
    sizes = tuple(range(1, effort.max_components + 1))
    parts = train.fold_by_fold(n_folds, seed=seed)
    found, final = {}, {}
    for name in (one for one in ORDER if one in wanted and one in DENSITIES):
        told(name)
        scores, tests, fits = [], [], []
        for n_components in sizes:
            total = torch.zeros(train.n_clients, dtype=torch.float64)
            for part, held in parts:
                total += log_likelihood(_fit(name, part, n_components, effort, seed), held) * held.counts
            fits.append(_fit(name, train, n_components, effort, seed))
            scores.append(total / train.counts)
            tests.append(torch.full_like(total, torch.nan) if test is None else log_likelihood(fits[-1], test))
        test_rows = torch.zeros_like(train.counts) if test is None else test.counts
        score, on_test = torch.stack(scores), torch.stack(tests)
        one = torch.ones(len(sizes), dtype=torch.float64)
        judged = Judged(score, score, on_test, on_test, train.counts, test_rows, one)
        found[name] = Found(name, tuple({"n_components": r} for r in sizes), judged, ())
        final[name] = fits
    return found, final


def _fit(name: str, rows: Ragged, n_components: int, effort: Effort, seed: int) -> MixtureFit:
    family = Gaussian(rows.shape[0], "full")
    start = MixtureStart(restarts=effort.starts)
    if name == "mixture":
        return fit_mixture(
            rows,
            family,
            n_components,
            c_lambda=_PENALTY,
            penalty="norm",
            rounds=_ROUNDS,
            tol=_TOL,
            seed=seed,
            start=start,
        )
    method = {"global": "pooled-em", "local": "local-em"}[name]
    return fit_methods(rows, family, n_components, (method,), rounds=_ROUNDS, tol=_TOL, seed=seed, start=start)[method]


def density_newcomers(fit: MixtureFit, support: Ragged, query: Ragged, *, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Judge the centre's components by new clients, with proportions of their own if `own`.  -> score, score, rows [M]"""
    weights = fit.weights.mean(0)
    scale = fit.scale.mean(0)
    theirs = weights.expand(support.n_clients, -1)
    if own:
        theirs = InProcess(support).ask(adopt_ask(fit.family, fit.centre, weights, scale))["weights"]
    clients = support.n_clients
    given = MixtureFit(
        fit.method, fit.family, fit.centre, fit.centre.expand(clients, -1, -1), theirs, scale[None],
        torch.zeros(clients), torch.zeros(clients), 0,
    )  # fmt: skip
    score = log_likelihood(given, query)
    return score, score, query.counts
