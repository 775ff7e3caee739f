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
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.data.ragged import Ragged
from coterie.engines.chosen import engine_on
from coterie.engines.drive import Program
from coterie.errors import ConfigError
from coterie.mixture.results import (
    EM_METHODS,
    OUTLIER,
    REVEALED,
    Choice,
    MixtureFit,
    bic,
    labels,
    log_likelihood,
    of_baseline,
    of_fedgrem,
)  # fmt: skip
from coterie.models.mixtures import Family
from coterie.protocol import Tensors

__all__ = [
    "C_LAMBDAS", "METHODS", "OUTLIER", "PRESETS", "Choice", "Drive", "MixtureFit", "bic", "choose_c_lambda",
    "choose_components", "fit_methods", "fit_mixture", "in_process", "labels", "log_likelihood",
]  # fmt: skip

C_LAMBDAS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, math.inf)
METHODS = (
    "fedgrem", "fedgrem-paper", "fedgrem-exact", "local-em", "local-grem", "pooled-em", "pooled-grem",
    "pooled-components", "fedem", "tgmm", "tgmm-mutual", "fedgmm",
)  # fmt: skip
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fedgrem-paper": {"together": 0.0, "robust": math.inf},
    "fedgrem-exact": {"together": 0.0, "robust": math.inf, "inner": 1, "capped": False},
}  # of FedGrEM with C = 2, where nobody is rejected: the paper's algorithm, and the authors' code

_HELD_OUT = 0.2
_ERRORS = 2.0  # standard errors, of differences paired over clients, that a simpler candidate may be behind the best
_ROUNDS, _TOL = 100, 10.0  # candidates are compared after so many rounds at most, and at so many times the tolerance


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
    engine = engine_on(rows)
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
    choice = None
    if c_lambda is None:
        choice = choose_c_lambda(
            rows, family, n_components, candidates=candidates, rounds=rounds, tol=tol, seed=seed, start=start,
            reject=reject, drive=drive, **options,
        )  # fmt: skip
        c_lambda = choice.value
    (fit,) = _fedgrem_fits("fit", rows, how, [(n_components, c_lambda)])
    return replace(fit, choice=choice)


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
) -> dict[str, MixtureFit]:
    """Fit several methods in lockstep, from one start: "fedgrem" with C_lambda validated, the presets with C = 2.

    Parameters are those of `fit_mixture`; with presets clients do not begin together, and nobody is rejected.
    "fedgrem-paper" has a step that is never too long and a central update that converges; "fedgrem-exact" has neither.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ConfigError(f"there is no method '{unknown[0]}'", f"choose among {', '.join(METHODS)}")
    how, choice = _How(family, seed, rounds, tol, start, reject), None
    programs: dict[str, Program] = {}
    for name in methods:
        if name == "fedgrem":
            choice = choose_c_lambda(
                rows, family, n_components, candidates=candidates, rounds=rounds, tol=tol, seed=seed, start=start,
                reject=reject,
            )  # fmt: skip
            programs[name] = _fedgrem(how, n_components, choice.value)
        elif name in PRESETS:
            programs[name] = _fedgrem(replace(how, reject=math.inf, options=PRESETS[name]), n_components, 2.0)
        else:
            programs[name] = _baseline(how, n_components, name)
    engine = engine_on(rows)
    done = engine.run(list(programs.values()))
    kept = engine.revealed(range(len(programs)), REVEALED)
    fits = {}
    for run, name in enumerate(programs):
        state, private = done.states[run], kept[run]
        if name.startswith("fedgrem"):
            c_lambda = 2.0 if choice is None or name in PRESETS else choice.value
            fit = of_fedgrem(name, family, rows, state, private, c_lambda)
            fits[name] = replace(fit, choice=choice if name == "fedgrem" else None)
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
    return [of_fedgrem("fedgrem", how.family, rows, states[i], private[i], c) for i, (_, c) in enumerate(settings)]


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
    """Choose C_lambda by federated validation: the largest whose held-out log-likelihood is as good as the best.

    It may be worse by two standard errors, paired over clients that are no outliers: from few rows the likelihood hardly
    tells, and where it does not, sharing errs less.

    Clients hold rows out and fit all candidates, in lockstep and from one start, on the others. Who is an outlier is judged
    by most candidates. Parameters are those of `fit_mixture`.
    """
    part, held = rows.split(_HELD_OUT, seed=seed, purpose="validation")
    rough = _How(family, seed, min(rounds, _ROUNDS), _TOL * tol, start, reject, drive, options)  # see `_ROUNDS`
    fits = _fedgrem_fits("choose C_lambda", part, rough, [(n_components, c) for c in candidates])
    return _simplest(tuple(candidates), [-c for c in candidates], fits, held)


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
    return _simplest(values, values, _fedgrem_fits("choose components", part, how, settings), held)


def _simplest(values: tuple[float, ...], size: Sequence[float], fits: Sequence[MixtureFit], held: Ragged) -> Choice:
    """Choose the candidate of the smallest size whose held-out likelihood is as good as the best, but for chance."""
    n, good = torch.from_numpy(held.layout.counts), _good(fits, held)
    each = torch.stack([(log_likelihood(fit, held) * n)[good] for fit in fits])  # [K, M] sums over rows
    scores = each.sum(1) / n[good].sum().clamp(min=1)
    worse = each[int(scores.argmax())] - each
    error = worse.std(1).nan_to_num() * worse.shape[1] ** 0.5 if worse.shape[1] > 1 else worse.new_zeros(len(worse))
    as_good = (worse.sum(1) <= _ERRORS * error).tolist()
    return Choice(values, tuple(scores.tolist()), min((s, i) for i, s in enumerate(size) if as_good[i])[1])


def _good(fits: Sequence[MixtureFit], rows: Ragged) -> Tensor:
    """Clients with rows whom most fits do not call outliers: all candidates are judged by the same.  [M]"""
    there = torch.from_numpy(rows.layout.counts > 0)
    good = there & (torch.stack([fit.outliers for fit in fits]).double().mean(0) <= 0.5)
    return good if bool(good.any()) else there
