# SPDX-License-Identifier: Apache-2.0
"""Mixtures from rows: FedGrEM and what it is compared with, and the choice of C_lambda and of the number of components.

Candidates and methods advance in lockstep. Those that start alike are started once, since clients notice it: see
`coterie.algorithms.mixture_starts`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms import em, fedgmm, fedgrem
from coterie.algorithms.judging import judge_ask, responsibilities
from coterie.algorithms.mixture_starts import MixtureStart, outlier_scores
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess, Program
from coterie.errors import ConfigError
from coterie.models.mixtures import Family, Gaussian
from coterie.protocol import Tensors

__all__ = [
    "C_LAMBDAS", "METHODS", "OUTLIER", "Choice", "MixtureFit", "bic", "choose_c_lambda", "choose_components", "fit_methods",
    "fit_mixture", "labels", "log_likelihood",
]  # fmt: skip

C_LAMBDAS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
OUTLIER = 3.5  # score above which a client is called an outlier
METHODS = (
    "fedgrem", "fedgrem-paper", "local-em", "local-grem", "pooled-em", "pooled-grem", "fedem", "tgmm", "fedgmm"
)  # fmt: skip

_EM: dict[str, tuple[em.Sharing, bool]] = {
    "local-em": ("local", False), "local-grem": ("local", True), "pooled-em": ("pooled", False),
    "pooled-grem": ("pooled", True), "fedem": ("fedem", False), "tgmm": ("tgmm", False),
}  # fmt: skip
_HELD_OUT = 0.2


@dataclass(frozen=True)
class Choice:
    """Candidates, what their held-out rows said (higher is better), and which was chosen."""

    values: tuple[float, ...]
    scores: tuple[float, ...]
    best: int

    @property
    def value(self) -> float:
        """The chosen one."""
        return self.values[self.best]


@dataclass(frozen=True)
class MixtureFit:
    """A mixture for every client.

    Attributes
    ----------
    centre : Tensor
        [R, P] common components, or the centre of the clients'.
    theta, weights : Tensor
        [M, R, P], [M, R] of every client.
    scale : Tensor
        [M | 1, ...] each client's own, or common.
    outlier_score : Tensor
        [M] robust z of a client's mean distance from the centre: (d - median) / (1.4826 MAD). Who was never heard has -inf;
        above `OUTLIER` one is called an outlier.
    freedom : Tensor
        [M, R] how much of a client's component is its own: 0 at the centre, 1 where nothing draws it there.
    """

    method: str
    family: Family
    centre: Tensor
    theta: Tensor
    weights: Tensor
    scale: Tensor
    outlier_score: Tensor
    freedom: Tensor
    rounds: int
    c_lambda: float | None = None
    choice: Choice | None = None

    @property
    def outliers(self) -> Tensor:
        """[M] who is one."""
        return self.outlier_score > OUTLIER


@dataclass(frozen=True)
class _How:
    """Options that methods and candidates have in common."""

    family: Family
    seed: int
    rounds: int
    tol: float
    start: MixtureStart
    reject: float


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
    """
    how = _How(family, seed, rounds, tol, start, reject)
    choice = None
    if c_lambda is None:
        choice = choose_c_lambda(
            rows, family, n_components, candidates=candidates, rounds=rounds, tol=tol, seed=seed, start=start, reject=reject
        )
        c_lambda = choice.value
    (fit,) = _fedgrem_fits(rows, how, [(n_components, c_lambda)])
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
    """Fit several methods in lockstep, from one start: "fedgrem" with C_lambda validated, "fedgrem-paper" with C = 2.

    Parameters are those of `fit_mixture`; "fedgrem-paper" rejects nobody.
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
        elif name == "fedgrem-paper":
            programs[name] = _fedgrem(replace(how, reject=math.inf), n_components, 2.0)
        else:
            programs[name] = _baseline(how, n_components, name)
    engine = InProcess(rows)
    done = engine.run(list(programs.values()))
    fits = {}
    for run, name in enumerate(programs):
        state, private = done.states[run], engine.worker.private[run]
        if name.startswith("fedgrem"):
            c_lambda = 2.0 if choice is None or name == "fedgrem-paper" else choice.value
            fit = _of_fedgrem(name, family, rows, state, private, c_lambda)
            fits[name] = replace(fit, choice=choice if name == "fedgrem" else None)
        else:
            fits[name] = _of_baseline(name, family, rows, state, private)
    return fits


def _common(how: _How, n_components: int) -> dict[str, Any]:
    return {
        "family": how.family, "n_components": n_components, "rounds": how.rounds, "seed": how.seed, "tol": how.tol,
        "start": how.start,
    }  # fmt: skip


def _fedgrem(how: _How, n_components: int, c_lambda: float) -> Program:
    return partial(fedgrem.fedgrem, c_lambda=c_lambda, reject=how.reject, **_common(how, n_components))


def _baseline(how: _How, n_components: int, name: str) -> Program:
    if name == "fedgmm":
        return partial(fedgmm.fedgmm, **_common(how, n_components))
    sharing, gradient = _EM[name]
    return partial(em.em, sharing=sharing, gradient=gradient, **_common(how, n_components))


def _fedgrem_fits(rows: Ragged, how: _How, settings: Sequence[tuple[int, float]]) -> list[MixtureFit]:
    """FedGrEM with each (components, C_lambda), in lockstep."""
    engine = InProcess(rows)
    done = engine.run([_fedgrem(how, r, c) for r, c in settings])
    return [
        _of_fedgrem("fedgrem", how.family, rows, done.states[i], engine.worker.private[i], c)
        for i, (_, c) in enumerate(settings)
    ]


# -- results ----------------------------------------------------------------------------------------------------------
def _of_fedgrem(
    name: str, family: Family, rows: Ragged, state: fedgrem.State, private: Tensors, c_lambda: float
) -> MixtureFit:
    theta = fedgrem.estimates(state, family, private, torch.from_numpy(rows.layout.counts))
    left, whole = (_lengths(family, v - state.centre, state.scale) for v in (theta, private["tilde"]))
    freedom = torch.where(private["begun"][:, None] & (whole > 0), left / whole.clamp(min=1e-300), 0.0)
    scores = torch.full((rows.n_clients,), -math.inf, dtype=torch.float64)
    scores[: len(state.n)] = fedgrem.scores(state, family)
    return MixtureFit(
        name, family, state.centre, theta, private["weights"], state.scale[None], scores, freedom, state.round, c_lambda
    )


def _of_baseline(name: str, family: Family, rows: Ragged, state: Any, private: Tensors) -> MixtureFit:
    if isinstance(state, fedgmm.State):
        theta, scale = state.theta.expand(rows.n_clients, -1, -1), state.scale[None]
        weights = fedgmm.marginal(private)
    else:
        sharing = "fedem" if name == "fedgmm" else _EM[name][0]
        theta, weights, scale = em.own_parameters(state, private, sharing)
    if name == "fedgmm" and isinstance(family, Gaussian):
        family = replace(family, covariance="full")
    there = torch.from_numpy(rows.layout.counts > 0)
    centre = theta[there].median(0).values
    score = torch.full((rows.n_clients,), -math.inf, dtype=torch.float64)
    score[there] = outlier_scores(_lengths(family, theta - centre, state.scale)[there].mean(1))
    freedom = torch.full(weights.shape, float(name in ("local-em", "local-grem", "tgmm")), dtype=torch.float64)
    return MixtureFit(name, family, centre, theta, weights, scale, score, freedom, state.round)


def _lengths(family: Family, difference: Tensor, scale: Tensor) -> Tensor:
    return family.coordinates(difference, scale).norm(dim=-1)


def labels(fit: MixtureFit, rows: Ragged) -> Tensor:
    """The likeliest component of every row, in the order of storage; the clients must be those of the fit.  [N]"""
    out = []
    for block in rows.blocks():
        gamma = responsibilities(fit.family, fit.theta, fit.weights, fit.scale, block)
        out.append(gamma.argmax(-1)[block.real])
    return torch.cat(out)


def log_likelihood(fit: MixtureFit, rows: Ragged) -> Tensor:
    """Mean log-likelihood of every client's rows, zero for who has none; the clients must be those of the fit.  [M]"""
    got = InProcess(rows).ask(judge_ask(fit.family, fit.theta, fit.weights, fit.scale))
    return got["likelihood"]


def bic(fit: MixtureFit, rows: Ragged) -> float:
    """Bayesian information criterion over the clients that are no outliers; smaller is better.

    A common component counts P parameters, and a client's own as many as it is free: see `MixtureFit.freedom`.
    """
    n = torch.from_numpy(rows.layout.counts).to(torch.float64)
    good = (n > 0) & ~fit.outliers
    r, p = fit.centre.shape
    free = r * p + float(fit.freedom[good].sum()) * p + int(good.sum()) * (r - 1) + len(fit.scale) * fit.family.n_scale
    likelihood = float((log_likelihood(fit, rows) * n)[good].sum())
    return -2 * likelihood + free * math.log(max(float(n[good].sum()), 2.0))


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
) -> Choice:
    """Choose C_lambda by federated validation: the held-out log-likelihood per row, over clients that are no outliers.

    Clients hold rows out and fit all candidates, in lockstep and from one start, on the others. Who is an outlier is judged
    by the first candidate. Parameters are those of `fit_mixture`.
    """
    part, held = rows.split(_HELD_OUT, seed=seed, purpose="validation")
    fits = _fedgrem_fits(part, _How(family, seed, rounds, tol, start, reject), [(n_components, c) for c in candidates])
    scores = _held_out(fits, held)  # [K, M]
    totals = _per_row(scores, held)
    return Choice(tuple(candidates), tuple(totals.tolist()), int(totals.argmax()))


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
) -> Choice:
    """Choose the number of components, all candidates in lockstep.

    By held-out log-likelihood it is the smallest within one standard error of the best, paired over clients that are no
    outliers; by BIC, on all rows, the best (scores are then negative BICs). Other parameters are those of `fit_mixture`.
    """
    how, settings = _How(family, seed, rounds, tol, start, reject), [(r, c_lambda) for r in candidates]
    values = tuple(float(r) for r in candidates)
    if by == "bic":
        scores = [-bic(fit, rows) for fit in _fedgrem_fits(rows, how, settings)]
        return Choice(values, tuple(scores), scores.index(max(scores)))
    part, held = rows.split(_HELD_OUT, seed=seed, purpose="validation")
    each = _held_out(_fedgrem_fits(part, how, settings), held)  # [K, M]
    totals = _per_row(each, held)
    worse = each[int(totals.argmax())] - each  # [K, M]
    error = worse.std(1).nan_to_num() * worse.shape[1] ** 0.5
    within = worse.sum(1) <= error
    return Choice(values, tuple(totals.tolist()), min(i for i in range(len(values)) if bool(within[i])))


def _held_out(fits: Sequence[MixtureFit], held: Ragged) -> Tensor:
    """Total held-out log-likelihood of every client that counts, under each fit.  [K, good clients]"""
    n = torch.from_numpy(held.layout.counts).to(torch.float64)
    good = (n > 0) & ~fits[0].outliers
    return torch.stack([(log_likelihood(fit, held) * n)[good if bool(good.any()) else n >= 0] for fit in fits])


def _per_row(scores: Tensor, held: Ragged) -> Tensor:
    """Sums over clients, on the scale of one row."""
    return scores.sum(1) / max(held.layout.n_rows, 1)
