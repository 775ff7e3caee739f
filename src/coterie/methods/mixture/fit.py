# SPDX-License-Identifier: Apache-2.0
"""Mixtures from rows: FedGrEM and what it is compared with, and the choice of C_lambda and of the number of components.

Candidates and methods advance in lockstep. Those that start alike are started once, since clients notice it: see
`coterie.algorithms.mixture_starts`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from coterie.algorithms import em, fedgmm, fedgrem
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart
from coterie.data.ragged import Ragged
from coterie.engines.drive import Program
from coterie.errors import ConfigError
from coterie.methods.mixture.results import (
    EM_METHODS,
    OUTLIER,
    Choice,
    MixtureFit,
    bic,
    deviations,
    labels,
    log_likelihood,
    of_baseline,
    of_fedgrem,
)  # fmt: skip
from coterie.methods.session import Session
from coterie.models.mixtures import Family
from coterie.protocol import Tensors
from coterie.select import as_good

__all__ = [
    "C_LAMBDAS", "METHODS", "OUTLIER", "PRESETS", "Choice", "Drive", "MixtureFit", "bic", "choose_c_lambda",
    "choose_components", "fit_methods", "fit_mixture", "in_process", "labels", "log_likelihood",
]  # fmt: skip

C_LAMBDAS = (0.25, 0.5, 0.8, 1.25, 2.0, 3.2, 5.0, 8.0, math.inf)
METHODS = (
    "fedgrem", "fedgrem-paper", "fedgrem-exact", "local-em", "local-grem", "pooled-em", "pooled-grem",
    "pooled-components", "fedem", "tgmm", "tgmm-mutual", "fedgmm",
)  # fmt: skip
_PAPER: Mapping[str, Any] = {"penalty": "norm", "together": 0.0, "robust": math.inf, "share_weights": 0.0}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fedgrem-paper": _PAPER,
    "fedgrem-exact": {**_PAPER, "inner": 1, "capped": False},
}  # of FedGrEM with C = 2, where nobody is rejected: the paper's algorithm, and the authors' code

_HELD_OUT = 0.2
_SPLITS, _SHARE = 3, 0.25  # C_lambda is validated so often, each time on this share of the rows
_ERRORS = 2.0  # standard errors, of differences paired over clients, that a candidate may be behind the best
_TIE = 1e-6  # and, relative to it, what rounding may be
_ABOVE = 1.25  # C_lambda may be so many times one over the deviation of clients' own fits: candidates are 1.6 apart
_CLEARLY = 6.0  # log-likelihood of held-out rows by which a client must do better alone to be left alone
_ROUNDS, _TOL = 60, 10.0  # candidates are compared after so many rounds at most, and at so many times the tolerance


class Drive(Protocol):
    """How programs are run in lockstep: `phase` says what for, `state` is the type of their states."""

    def __call__(
        self, phase: str, rows: Ragged, programs: Sequence[Program], state: type, /
    ) -> tuple[list[Any], list[Tensors]]:
        """Run, and give every program's last state and what its clients keep."""


def in_process(
    phase: str, rows: Ragged, programs: Sequence[Program], state: type, /
) -> tuple[list[Any], list[Tensors]]:
    """Run with everyone, and keep no checkpoint."""
    engine = Session().engine(rows)
    done = engine.run(programs)
    return done.states, engine.revealed(range(len(programs)), REVEALED)


@dataclass(frozen=True)
class _How:
    """Options that methods and candidates have in common."""

    family: Family
    seed: int
    rounds: int
    tol: float
    start: MixtureStart
    reject: float
    drive: Drive = in_process
    options: Mapping[str, Any] = field(default_factory=dict)  # further ones of FedGrEM

    @property
    def squared(self) -> bool:
        """Whether C_lambda is one over a deviation."""
        return bool(self.options.get("penalty", "squared") == "squared")


def fit_mixture(
    rows: Ragged,
    family: Family,
    n_components: int,
    *,
    c_lambda: float | None = None,
    candidates: Sequence[float] = C_LAMBDAS,
    rounds: int = 1000,
    tol: float = 1e-5,
    seed: int = 0,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    reject: float = OUTLIER,
    drive: Drive = in_process,
    **options: Any,
) -> MixtureFit:
    """Fit FedGrEM; without c_lambda, it is chosen among candidates on held-out rows first.

    Then a client whose held-out rows were clearly likelier under the smallest candidate, next to alone, has that mixture.

    Parameters
    ----------
    rows : Ragged
        The clients' rows, in float64.
    family : Family
        Of the components.
    n_components : int
        R.
    c_lambda : float, optional
        C of the penalty: 0 is every client alone, infinity common components.
    rounds, tol : int, float
        At most so many rounds; a move that ends them.
    reject : float
        Outlier score above which a client has no part in the central update; infinity is the paper's.
    drive : callable
        What runs it.
    options
        Further ones of `fedgrem`.
    """
    how = _How(family, seed, rounds, tol, start, reject, drive, options)
    if c_lambda is not None:
        return _fedgrem_fits("fit", rows, how, [(n_components, c_lambda)])[0]
    choice, alone = _validated(rows, how, n_components, candidates)
    (fit,) = _fedgrem_fits("fit", rows, how, [(n_components, choice.value)])
    return _with_own(replace(fit, choice=choice), rows, how, alone, min(candidates))


def fit_methods(
    rows: Ragged,
    family: Family,
    n_components: int,
    methods: Sequence[str] = METHODS,
    *,
    candidates: Sequence[float] = C_LAMBDAS,
    rounds: int = 1000,
    tol: float = 1e-5,
    seed: int = 0,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    reject: float = OUTLIER,
    c_eta: float = 0.95,
    drive: Drive = in_process,
) -> dict[str, MixtureFit]:
    """Fit several methods in lockstep, from one start: "fedgrem" with C_lambda validated, the presets with C = 2.

    Parameters are those of `fit_mixture`; with presets clients do not begin together, and nobody is rejected.
    "fedgrem-paper" has a step that is never too long and a central update that converges; "fedgrem-exact" has neither.
    Baselines know nothing of `c_eta`.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ConfigError(f"there is no method '{unknown[0]}'", f"choose among {', '.join(METHODS)}")
    how, choice, alone = _How(family, seed, rounds, tol, start, reject, drive, {"c_eta": c_eta}), None, None
    programs: dict[str, Program] = {}
    for name in methods:
        if name == "fedgrem":
            choice, alone = _validated(rows, how, n_components, candidates)
            programs[name] = _fedgrem(how, n_components, choice.value)
        elif name in PRESETS:
            preset = replace(how, reject=math.inf, options={**how.options, **PRESETS[name]})
            programs[name] = _fedgrem(preset, n_components, 2.0)
        else:
            programs[name] = _baseline(how, n_components, name)
    states, kept = drive("fit", rows, list(programs.values()), em.State)
    fits = {}
    for run, name in enumerate(programs):
        state, private = states[run], kept[run]
        if name.startswith("fedgrem"):
            c_lambda = 2.0 if choice is None or name in PRESETS else choice.value
            fit = of_fedgrem(name, family, rows, state, private, c_lambda, "norm" if name in PRESETS else "squared")
            if alone is not None and name == "fedgrem":
                fit = _with_own(replace(fit, choice=choice), rows, how, alone, min(candidates))
            fits[name] = fit
        else:
            fits[name] = of_baseline(name, family, rows, state, private)
    return fits


def _common(how: _How, n_components: int) -> dict[str, Any]:
    return {
        "family": how.family, "n_components": n_components, "rounds": how.rounds, "seed": how.seed, "tol": how.tol,
        "start": how.start,
    }  # fmt: skip


def _fedgrem(how: _How, n_components: int, c_lambda: float) -> Program:
    return partial(fedgrem.fedgrem, c_lambda=c_lambda, reject=how.reject, **how.options, **_common(how, n_components))


def _baseline(how: _How, n_components: int, name: str) -> Program:
    if name == "fedgmm":
        return partial(fedgmm.fedgmm, **_common(how, n_components))
    sharing, gradient = EM_METHODS[name]
    return partial(em.em, sharing=sharing, gradient=gradient, **_common(how, n_components))


def _fedgrem_fits(phase: str, rows: Ragged, how: _How, settings: Sequence[tuple[int, float]]) -> list[MixtureFit]:
    """FedGrEM with each (components, C_lambda), in lockstep."""
    states, private = how.drive(phase, rows, [_fedgrem(how, r, c) for r, c in settings], fedgrem.State)
    penalty = how.options.get("penalty", "squared")
    return [
        of_fedgrem("fedgrem", how.family, rows, states[i], private[i], c, penalty) for i, (_, c) in enumerate(settings)
    ]


def _with_own(fit: MixtureFit, rows: Ragged, how: _How, alone: Tensor, least: float) -> MixtureFit:
    """Give those who do better alone [M] the mixtures that their own rows lead to, under the smallest candidate."""
    if not bool(alone.any()) or fit.c_lambda == least:
        return fit
    (own,) = _fedgrem_fits("own mixtures", rows, how, [(len(fit.centre), least)])
    return replace(
        fit,
        theta=torch.where(alone[:, None, None], own.theta, fit.theta),
        weights=torch.where(alone[:, None], own.weights, fit.weights),
        freedom=torch.where(alone[:, None], own.freedom, fit.freedom),
    )


# -- choices ----------------------------------------------------------------------------------------------------------
def choose_c_lambda(
    rows: Ragged,
    family: Family,
    n_components: int,
    *,
    candidates: Sequence[float] = C_LAMBDAS,
    rounds: int = 1000,
    tol: float = 1e-5,
    seed: int = 0,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    reject: float = OUTLIER,
    drive: Drive = in_process,
    **options: Any,
) -> Choice:
    """Choose C_lambda by federated validation, and where this hardly tells, by how far clients' own fits are apart.

    Those whose held-out log-likelihood is worse than the best by two standard errors at most, paired over clients that are
    no outliers, are as good, if all between them and the best are so too. Of these the smallest is taken that is not below
    what the spread of clients' own fits says, or the largest if all are below. Clients hold rows out three times, and fit
    all candidates on the others, in lockstep and from one start. Who is an outlier is judged by most candidates. Parameters
    are those of `fit_mixture`.
    """
    return _validated(rows, _How(family, seed, rounds, tol, start, reject, drive, options), n_components, candidates)[0]


def _validated(rows: Ragged, how: _How, n_components: int, candidates: Sequence[float]) -> tuple[Choice, Tensor]:
    """Choose C_lambda, and find who does clearly better under the smallest candidate.  -> choice, [M]"""
    rough = replace(how, rounds=min(how.rounds, _ROUNDS), tol=_TOL * how.tol)
    settings, fits, held = [(n_components, c) for c in candidates], [], []
    for split in range(_SPLITS):
        part, out = rows.split(_SHARE, seed=how.seed, purpose=f"validation {split}")
        fits.append(_fedgrem_fits(f"choose C_lambda {split + 1}", part, rough, settings))
        held.append(out)
    total = torch.stack([_totals(own, out) for own, out in zip(fits, held, strict=True)]).sum(0)  # [K, M]
    good = _good([fit for own in fits for fit in own], held[0])
    n = _SPLITS * int(held[0].layout.counts[good.numpy()].sum())
    scores, level = _as_good(total[:, good], n)
    level = _next_to_the_best(candidates, scores, level)
    freest = candidates.index(min(candidates))
    least = _least(candidates, [own[freest] for own in fits], good) if how.squared else min(candidates)
    enough = [i for i in level if candidates[i] >= least]
    best = min(enough, key=candidates.__getitem__) if enough else max(level, key=candidates.__getitem__)
    return Choice(tuple(candidates), scores, best), total[freest] - total[best] > _CLEARLY


def _next_to_the_best(candidates: Sequence[float], scores: Sequence[float], level: Sequence[int]) -> list[int]:
    """Which of those that are as good as the best have none between them and the best that is not.

    One client that loses much makes the standard error of a difference as large as the difference: a strong penalty would
    count as good where weaker ones, under which that client loses less, are clearly worse than the best.
    """
    order = sorted(range(len(candidates)), key=candidates.__getitem__)
    low = high = order.index(max(level, key=scores.__getitem__))
    while low > 0 and order[low - 1] in level:
        low -= 1
    while high + 1 < len(order) and order[high + 1] in level:
        high += 1
    return order[low : high + 1]


def _least(candidates: Sequence[float], fits: Sequence[MixtureFit], good: Tensor) -> float:
    """The smallest C_lambda that the spread of clients' own fits allows: the candidate next to 1 / s.

    Under a normal law with deviation s = 1 / C of the parameters, half of the distances from the centre are above s times
    the root of the median of a chi-squared variable. What fits owe to chance makes s larger, so that the candidate may be a
    little above 1 / s; single components that ran off after few rows do not count in a median. Held-out rows, of which a
    client has few, hardly notice these: so they cannot tell that C is too small.
    """
    p = fits[0].family.n_parameters
    away = torch.cat([deviations(fit)[good].flatten() for fit in fits])
    s = float(away.median()) / math.sqrt(p * (1 - 2 / (9 * p)) ** 3)
    return max((c for c in candidates if c * s <= _ABOVE + _TIE), default=min(candidates))


def choose_components(
    rows: Ragged,
    family: Family,
    candidates: Sequence[int],
    *,
    by: Literal["held-out", "bic"] = "held-out",
    c_lambda: float = 2.0,
    rounds: int = 1000,
    tol: float = 1e-5,
    seed: int = 0,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    reject: float = OUTLIER,
    drive: Drive = in_process,
    **options: Any,
) -> Choice:
    """Choose the number of components, all candidates in lockstep.

    By held-out log-likelihood it is the smallest within two standard errors of the best, paired over clients that are no
    outliers; by BIC, on all rows, the best (scores are then negative BICs). Other parameters are those of `fit_mixture`.
    """
    how = _How(family, seed, rounds, tol, start, reject, drive, options)
    settings = [(r, c_lambda) for r in candidates]
    values = tuple(float(r) for r in candidates)
    if by == "bic":
        fits = _fedgrem_fits("choose components", rows, how, settings)
        scores = [-bic(fit, rows, good=_good(fits, rows)) for fit in fits]
        return Choice(values, tuple(scores), scores.index(max(scores)))
    part, held = rows.split(_HELD_OUT, seed=seed, purpose="validation")
    fits = _fedgrem_fits("choose components", part, how, settings)
    good = _good(fits, held)
    found, level = _as_good(_totals(fits, held)[:, good], int(held.layout.counts[good.numpy()].sum()))
    return Choice(values, found, min(level, key=values.__getitem__))


def _totals(fits: Sequence[MixtureFit], held: Ragged) -> Tensor:
    """Log-likelihood of every client's held-out rows under every fit.  [K, M]"""
    return torch.stack([log_likelihood(fit, held) * torch.from_numpy(held.layout.counts) for fit in fits])


def _as_good(each: Tensor, n: int) -> tuple[tuple[float, ...], list[int]]:
    """Mean log-likelihood of every candidate, and which are as good as the best, but for two standard errors.

    Parameters
    ----------
    each : Tensor
        [K, M] log-likelihoods of the clients' held-out rows.
    n : int
        How many rows these are.
    """
    scores = each.sum(1) / max(n, 1)
    good = as_good(each, errors=_ERRORS, tie=_TIE)
    return tuple(scores.tolist()), [i for i, one in enumerate(good) if one]


def _good(fits: Sequence[MixtureFit], rows: Ragged) -> Tensor:
    """Clients with rows whom most fits do not call outliers: all candidates are judged by the same.  [M]"""
    there = torch.from_numpy(rows.layout.counts > 0)
    good = there & (torch.stack([fit.outliers for fit in fits]).double().mean(0) <= 0.5)
    return good if bool(good.any()) else there
