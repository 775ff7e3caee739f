# SPDX-License-Identifier: Apache-2.0
"""Mixtures from rows: FedGrEM and what it is compared with, and the choice of C_lambda and of the number of components.

Candidates and methods advance in lockstep. Those that start alike are started once, since clients notice it: see
`coterie.algorithms.mixture_starts`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms import em, fedgmm, fedgrem
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart
from coterie.data.ragged import Ragged
from coterie.engines.drive import Program, Round
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
    log_likelihoods,
    of_baseline,
    of_fedgrem,
)  # fmt: skip
from coterie.methods.session import Phase, Session
from coterie.models.mixtures import Family
from coterie.protocol import Tensors
from coterie.select import Paired, as_good

__all__ = [
    "C_LAMBDAS", "METHODS", "OUTLIER", "PRESETS", "Choice", "How", "MixtureFit", "bic", "choose_c_lambda",
    "choose_components", "fit_methods", "fit_mixture", "fitted_methods", "labels", "log_likelihood", "make_fit", "program",
    "state_type",
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

_OWN = "fedgrem-own"  # the mixtures of those who do better alone
_PRESET = 2.0  # C of the presets
_HELD_OUT = 0.2
_SPLITS, _SHARE = 3, 0.25  # C_lambda is validated so often, each time on this share of the rows
_ERRORS = 2.0  # standard errors, of differences paired over clients, that a candidate may be behind the best
_TIE = 1e-6  # and, relative to it, what rounding may be
_ABOVE = 1.25  # C_lambda may be so many times one over the deviation of clients' own fits: candidates are 1.6 apart
_CLEARLY = 6.0  # log-likelihood of held-out rows by which a client must do better alone to be left alone
_ROUNDS, _TOL = 60, 10.0  # candidates are compared after so many rounds at most, and at so many times the tolerance


@dataclass(frozen=True)
class How:
    """Options that methods and candidates have in common, and what runs them."""

    family: Family
    seed: int
    rounds: int
    tol: float
    start: MixtureStart
    reject: float
    session: Session = field(default_factory=Session)
    options: Mapping[str, Any] = field(default_factory=dict)  # further ones of FedGrEM

    @property
    def penalty(self) -> fedgrem.Penalty:
        """Of the distance from the centre."""
        return "norm" if self.options.get("penalty") == "norm" else "squared"

    def preset(self, name: str) -> "How":
        """With what a preset says, where nobody is rejected."""
        return replace(self, reject=math.inf, options={**self.options, **PRESETS[name]})


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
    session: Session | None = None,
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
    session : Session, optional
        What runs it; in this process, without checkpoints, by default.
    options
        Further ones of `fedgrem`.
    """
    how = How(family, seed, rounds, tol, start, reject, session or Session(), options)
    return fitted_methods(rows, how, n_components, ("fedgrem",), c_lambda, candidates)[0]["fedgrem"]


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
    session: Session | None = None,
) -> dict[str, MixtureFit]:
    """Fit several methods in lockstep, from one start: "fedgrem" with C_lambda validated, the presets with C = 2.

    Parameters are those of `fit_mixture`; with presets clients do not begin together, and nobody is rejected.
    "fedgrem-paper" has a step that is never too long and a central update that converges; "fedgrem-exact" has neither.
    Baselines know nothing of `c_eta`.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ConfigError(f"there is no method '{unknown[0]}'", f"choose among {', '.join(METHODS)}")
    how = How(family, seed, rounds, tol, start, reject, session or Session(), {"c_eta": c_eta})
    return fitted_methods(rows, how, n_components, methods, None, candidates)[0]


def fitted_methods(
    rows: Ragged, how: How, n_components: int, methods: Sequence[str], c_lambda: float | None = None,
    candidates: Sequence[float] = C_LAMBDAS,
) -> tuple[dict[str, MixtureFit], list[Round]]:  # fmt: skip
    """Fit methods side by side, "fedgrem" with its C_lambda or else the one that is chosen.  -> fits, rounds of the first"""
    choice, alone, freest = None, None, min(candidates)
    if "fedgrem" in methods and c_lambda is None:
        choice, alone = _validated(rows, how, n_components, candidates)
        c_lambda = choice.value
    programs = {name: program(how, n_components, name, c_lambda) for name in methods}
    own = alone is not None and bool(alone.any()) and c_lambda != freest
    if own:
        programs[_OWN] = program(how, n_components, "fedgrem", freest)
    fits, rounds = _run_side_by_side(rows, how, programs, {"fedgrem": c_lambda, _OWN: freest})
    if own and alone is not None:
        fits["fedgrem"] = _with_own(fits["fedgrem"], fits.pop(_OWN), alone)
    if choice is not None:
        fits["fedgrem"] = replace(fits["fedgrem"], choice=choice)
    return fits, rounds


def _run_side_by_side(
    rows: Ragged, how: How, programs: Mapping[str, Program], c_lambda: Mapping[str, float | None]
) -> tuple[dict[str, MixtureFit], list[Round]]:
    """Run programs as one phase, or baselines, which need everyone, after the others if only a share takes part."""
    session, fits, rounds = how.session, {}, list[Round]()
    everyone = session.options.training.participation == 1
    apart = [name for name in programs if not everyone and not _is_fedgrem(name)]
    for phase, names in (("fit", [name for name in programs if name not in apart]), ("baselines", apart)):
        if not names:
            continue
        states = [state_type(name) for name in names]
        done = session.run(phase, rows, [programs[name] for name in names], states, how.rounds)
        rounds = rounds or done.rounds_of(0)
        (kept,) = session.revealed([(rows, range(len(names)))], REVEALED)
        for name, state, private in zip(names, done.states, kept, strict=True):
            fits[name] = make_fit(how, name, rows, state, private, c_lambda.get(name))
    return {name: fits[name] for name in programs}, rounds


def program(how: How, n_components: int, name: str, c_lambda: float | None = None) -> Program:
    """A method by its name."""
    common: dict[str, Any] = {
        "family": how.family, "n_components": n_components, "rounds": how.rounds, "seed": how.seed, "tol": how.tol,
        "start": how.start,
    }  # fmt: skip
    if name in PRESETS:
        return program(how.preset(name), n_components, "fedgrem", _PRESET)
    if name == "fedgrem":
        assert c_lambda is not None
        return partial(fedgrem.fedgrem, c_lambda=c_lambda, reject=how.reject, **how.options, **common)
    if name == "fedgmm":
        return partial(fedgmm.fedgmm, **common)
    sharing, gradient = EM_METHODS[name]
    return partial(em.em, sharing=sharing, gradient=gradient, **common)


def state_type(name: str) -> type:
    """Of a method's state."""
    return fedgrem.State if _is_fedgrem(name) else fedgmm.State if name == "fedgmm" else em.State


def make_fit(
    how: How, name: str, rows: Ragged, state: Any, private: Tensors, c_lambda: float | None = None
) -> MixtureFit:
    """What a method left with the server (state) and with the clients (private)."""
    if name in PRESETS:
        return of_fedgrem(name, how.family, rows, state, private, _PRESET, "norm")
    if _is_fedgrem(name):
        assert c_lambda is not None
        return of_fedgrem("fedgrem", how.family, rows, state, private, c_lambda, how.penalty)
    return of_baseline(name, how.family, rows, state, private)


def _is_fedgrem(name: str) -> bool:
    return name.startswith("fedgrem")


def _fedgrem_fits(
    how: How, parts: Mapping[str, Ragged], settings: Sequence[tuple[int, float]], said: str
) -> list[list[MixtureFit]]:
    """FedGrEM with each (components, C_lambda), on several sets of rows, all side by side.  -> by rows, by setting"""
    programs = [program(how, r, "fedgrem", c) for r, c in settings]
    phases = [
        Phase(name, rows, programs, fedgrem.State, how.rounds, said=said if not i else "")
        for i, (name, rows) in enumerate(parts.items())
    ]
    done = how.session.run_all(phases)
    kept = how.session.revealed([(rows, range(len(settings))) for rows in parts.values()], REVEALED)
    return [
        [
            make_fit(how, "fedgrem", phase.rows, state, private, c)
            for state, private, (_, c) in zip(one.states, left, settings, strict=True)
        ]
        for phase, one, left in zip(phases, done, kept, strict=True)
    ]


def _with_own(fit: MixtureFit, own: MixtureFit, alone: Tensor) -> MixtureFit:
    """Give those who do better alone [M] the mixtures that their own rows lead to, under the smallest candidate."""
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
    session: Session | None = None,
    **options: Any,
) -> Choice:
    """Choose C_lambda by federated validation, and where this hardly tells, by how far clients' own fits are apart.

    Those whose held-out log-likelihood is worse than the best by two standard errors at most, paired over clients that are
    no outliers, are as good, if all between them and the best are so too. Of these the smallest is taken that is not below
    what the spread of clients' own fits says, or the largest if all are below. Clients hold rows out three times, and fit
    all candidates on the others, in lockstep and from one start. Who is an outlier is judged by most candidates. Parameters
    are those of `fit_mixture`.
    """
    how = How(family, seed, rounds, tol, start, reject, session or Session(), options)
    return _validated(rows, how, n_components, candidates)[0]


def _validated(rows: Ragged, how: How, n_components: int, candidates: Sequence[float]) -> tuple[Choice, Tensor]:
    """Choose C_lambda, and find who does clearly better under the smallest candidate.  -> choice, [M]"""
    rough = replace(how, rounds=min(how.rounds, _ROUNDS), tol=_TOL * how.tol)
    split = [rows.split(_SHARE, seed=how.seed, purpose=f"validation {i}") for i in range(_SPLITS)]
    parts = {f"choose C_lambda {i + 1}": part for i, (part, _) in enumerate(split)}
    held = [out for _, out in split]
    fits = _fedgrem_fits(rough, parts, [(n_components, c) for c in candidates], "choose C_lambda")
    total = torch.stack(_totals(list(zip(fits, held, strict=True)), how.session)).sum(0)  # [K, M]
    good = _good([fit for own in fits for fit in own], held[0])
    n = _SPLITS * int(held[0].layout.counts[good.numpy()].sum())
    scores, level = _as_good(total[:, good], n)
    level = _next_to_the_best(candidates, scores, level)
    freest = candidates.index(min(candidates))
    least = _least(candidates, [own[freest] for own in fits], good) if how.penalty == "squared" else min(candidates)
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
    session: Session | None = None,
    **options: Any,
) -> Choice:
    """Choose the number of components, all candidates in lockstep.

    By held-out log-likelihood it is the smallest within two standard errors of the best, paired over clients that are no
    outliers; by BIC, on all rows, the best (scores are then negative BICs). Other parameters are those of `fit_mixture`.
    """
    how = How(family, seed, rounds, tol, start, reject, session or Session(), options)
    settings, phase = [(r, c_lambda) for r in candidates], "choose components"
    values = tuple(float(r) for r in candidates)
    part, held = (rows, rows) if by == "bic" else rows.split(_HELD_OUT, seed=seed, purpose="validation")
    (fits,) = _fedgrem_fits(how, {phase: part}, settings, phase)
    (total,), good = _totals([(fits, held)], how.session), _good(fits, held)
    if by == "bic":
        scores = [-bic(fit, rows, good=good, total=own) for fit, own in zip(fits, total, strict=True)]
        return Choice(values, tuple(scores), scores.index(max(scores)))
    found, level = _as_good(total[:, good], int(held.layout.counts[good.numpy()].sum()))
    return Choice(values, found, min(level, key=values.__getitem__))


def _totals(judged: Sequence[tuple[Sequence[MixtureFit], Ragged]], session: Session) -> list[Tensor]:
    """Log-likelihood of every client's rows under each of the fits to be judged by them, in one message.  [K, M] each"""
    found = log_likelihoods(judged, session)
    return [one * rows.counts for one, (_, rows) in zip(found, judged, strict=True)]


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
    good = as_good(Paired.of(each), errors=_ERRORS, tie=_TIE)
    return tuple(scores.tolist()), [i for i, one in enumerate(good) if one]


def _good(fits: Sequence[MixtureFit], rows: Ragged) -> Tensor:
    """Clients with rows whom most fits do not call outliers: all candidates are judged by the same.  [M]"""
    there = torch.from_numpy(rows.layout.counts > 0)
    good = there & (torch.stack([fit.outliers for fit in fits]).double().mean(0) <= 0.5)
    return good if bool(good.any()) else there
