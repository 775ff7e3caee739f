# SPDX-License-Identifier: Apache-2.0
"""The structures that are compared: how each is fitted with all its settings, and judged.

Each is a generator that asks clients and returns what it `Found`. All of them go through the same folds. What a structure
needs of another (everything begins with the model for all) is handed on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.protocol import Ask, Replies, Sum
from coterie.selection.clusters import Clusters, fit_global, grow, judge_clusters_ask
from coterie.selection.fedprox import fit_fedprox
from coterie.selection.mixed import Mixed, fit_mixed, judge_mixed_ask
from coterie.selection.prior import Kind, Prior, fit_effects, judge_effects_ask, low_rank, ridge_prior
from coterie.selection.problem import Problem, Run, answered, keep_products
from coterie.selection.result import Setting
from coterie.selection.scores import Judged, joined, judged_newcomers, judged_rows
from coterie.selection.shape import Shape, fit_shape, judge_shape_ask

__all__ = [
    "KINDS", "Effort", "Found", "Run", "Within", "begin", "clusters", "common_model", "local", "map_of_clients", "mixture",
    "on_newcomers", "prior_for", "representation", "shrunk",
]  # fmt: skip

KINDS: tuple[Kind, ...] = ("intercept", "same", "diagonal", "full")  # of the covariance of clients' models
_COMMON_PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
_STRENGTHS = (1.0, 0.1)  # with which FedProx holds clients near the common model
_LOCAL_PENALTIES = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.12, 0.06, 0.03)
_FIRST_SPREAD = 0.3  # standard deviation of clients' weights that EM begins with, where features have deviation 1


@dataclass(frozen=True)
class Effort:
    """How long structures are worked on."""

    rounds: int = 16  # of EM, for models around a common one
    mixture_rounds: int = 40
    steps: int = 20  # of Newton's method and of clustering
    starts: int = 5  # of every further cluster, and of mixtures
    max_clusters: int = 8
    max_rank: int = 8
    max_components: int = 4


@dataclass(frozen=True)
class Within:
    """A mixture within clients, and what a mixture of noises alone would be."""

    mixed: Mixed
    shape: Shape


@dataclass(frozen=True)
class Found:
    """What came of a structure: its settings, the simplest first; how they do; and what was fitted, one for each.

    `free` is whether any setting may be taken that is best, since none is simpler than another; one with another key must
    be better than those before it. `eligible` is false for settings that may not be taken.
    """

    name: str
    settings: tuple[Setting, ...]
    judged: Judged
    fits: tuple[Prior | Clusters | Within, ...]
    free: bool = False
    eligible: tuple[bool, ...] = ()
    labels: Tensor | None = None  # [J, M, F] of clusters
    margin: Tensor | None = None  # [J, M]


def on_newcomers(found: Found, setting: int, problem: Problem) -> Run:
    """Judge the last fit by new clients.  -> scores [M], squared errors or shares of rows predicted right [M], rows [M]"""
    fit, noise = found.fits[setting], found.judged.noise[setting : setting + 1]
    if isinstance(fit, Within):
        last, shape = (_last(part) for part in (fit.mixed, fit.shape))
        got = yield from answered(judge_mixed_ask(last, problem))
        noise_only = yield from answered(judge_shape_ask(shape, problem))
        rows = got["rows"][:, -1, 0]
        return _beyond_noise(got, noise_only)[:, -1] / rows, got["right"][:, -1, 0] / rows, rows
    if isinstance(fit, Clusters):
        got = yield from answered(judge_clusters_ask(_last(fit), problem))
    else:
        got = yield from answered(judge_effects_ask(_last(fit), problem, f"judged {found.name}"))
    score, right, rows = judged_newcomers(got, problem, noise)
    return score[0], right[0], rows


def _last(fit: Any) -> Any:
    """The fit on all training rows."""
    return type(fit)(*(value[-1:] for value in vars(fit).values()))


def _one(prior: Prior, j: int) -> Prior:
    at = slice(j, j + 1)
    return Prior(prior.mean[:, at], prior.root[:, at], prior.noise[:, at])


def begin(problem: Problem) -> Run:
    """Let clients form what they need of their rows."""
    if problem.is_regression:
        yield Ask(keep_products, {"problem": problem}, {"n": Sum()}, fresh=problem.fresh, scratch=problem.n_features)


def common_model(problem: Problem, effort: Effort) -> Run:
    """One model for all: of all rows together, with each penalty, or FedProx's, with each strength.  -> Found"""
    plain: Clusters = yield from fit_global(problem, _COMMON_PENALTIES, effort.steps)
    near: Clusters = yield from fit_fedprox(_start(plain, 2), problem, _STRENGTHS)
    theta, noise, objective = (
        torch.cat([getattr(fit, name) for fit in (plain, near)], 1) for name in ("theta", "noise", "objective")
    )
    fit = Clusters(theta, noise, objective, plain.bend)
    got = yield from answered(judge_clusters_ask(fit, problem))
    settings: list[Setting] = [{"penalty": l2} for l2 in _COMMON_PENALTIES]
    settings += [{"proximal": strength} for strength in _STRENGTHS]
    fits = tuple(_start(fit, j) for j in range(len(settings)))
    return Found("global", tuple(settings), judged_rows(got, problem), fits, free=True)


def _start(fit: Clusters, j: int) -> Clusters:
    at = slice(j, j + 1)
    return Clusters(fit.theta[:, at], fit.noise[:, at], fit.objective[:, at], fit.bend)


def local(problem: Problem, effort: Effort, base: Clusters) -> Run:
    """One model each.  -> Found"""
    prior = yield from _noisy(ridge_prior(problem, _LOCAL_PENALTIES, len(problem.held), base.noise[:, 0]), problem)
    return (yield from _judged("local", prior, problem, {"penalty": _LOCAL_PENALTIES}, free=True))


def _noisy(prior: Prior, problem: Problem) -> Run:
    """Learn the noise around local models.  -> Prior"""
    if not problem.is_regression:
        return prior
    return (yield from fit_effects(prior, problem=problem, kinds=(), rounds=5, tag="local", learn=False))


def shrunk(problem: Problem, effort: Effort, base: Clusters) -> Run:
    """Models of clients' own around a common one. Clients keep the freest as their own.  -> Found

    The full covariance begins with the diagonal one: it has too many numbers to be found from anywhere.
    """
    simple = yield from fit_effects(
        _around(problem, base, 3), problem=problem, kinds=KINDS[:3], rounds=effort.rounds, tag="simple"
    )
    free = yield from fit_effects(_one(simple, 2), problem=problem, kinds=KINDS[3:], rounds=effort.rounds, tag="shrunk")
    every = Prior(*(torch.cat([a, b], 1) for a, b in zip(vars(simple).values(), vars(free).values(), strict=True)))
    return (yield from _judged("shrunk", every, problem, {"prior": KINDS}, keep=len(KINDS) - 1))


def representation(problem: Problem, effort: Effort, base: Clusters, free: Prior, most: int) -> Run:
    """Models around a common one, in a subspace of few dimensions.  -> Found"""
    ranks = tuple(range(1, most + 1))
    kinds: tuple[Kind, ...] = tuple("full" for _ in ranks)
    prior = yield from fit_effects(
        low_rank(free, base.bend, ranks), problem=problem, kinds=kinds, rounds=effort.rounds // 2, tag="representation"
    )
    return (yield from _judged("representation", prior, problem, {"rank": ranks}))


def _around(problem: Problem, base: Clusters, n: int) -> Prior:
    """Where EM begins: around the model for all."""
    root = _FIRST_SPREAD * torch.eye(problem.n_parameters, dtype=torch.float64)
    fits = len(problem.held)
    return Prior(base.theta[:, 0].expand(-1, n, -1), root.expand(fits, n, -1, -1), base.noise.expand(-1, n))


def _judged(
    name: str, prior: Prior, problem: Problem, values: dict[str, Any], *, keep: int | None = None, free: bool = False
) -> Run:
    """Judge a prior with each setting.  -> Found"""
    got = yield from answered(judge_effects_ask(prior, problem, f"judged {name}", keep=keep))
    ((key, each),) = values.items()
    settings: tuple[Setting, ...] = tuple({key: value} for value in each)
    return Found(name, settings, judged_rows(got, problem), tuple(_one(prior, j) for j in range(len(each))), free)


def clusters(problem: Problem, effort: Effort, base: Clusters, most: int, penalty: float, least: int, seed: int) -> Run:
    """Groups of clients, each with a model: 2 to `most` of them, none smaller than `least`.  -> Found"""
    fits, every, labels, margins = [], [], [], []
    fit = base
    for _ in range(2, most + 1):
        fit = yield from grow(fit, problem, penalty=penalty, starts=effort.starts, rounds=effort.steps, seed=seed)
        got = yield from answered(judge_clusters_ask(fit, problem))
        fits.append(fit)
        every.append(judged_rows(got, problem))
        labels.append(got["label"][:, :, 0])
        margins.append(got["margin"][:, -1, 0])
    eligible = [int(torch.bincount(label[:, -1], minlength=k).min()) >= least for k, label in enumerate(labels, 2)]
    settings: tuple[Setting, ...] = tuple({"n_clusters": k} for k in range(2, most + 1))
    return Found(
        "clusters",
        settings,
        joined(every),
        tuple(fits),
        False,
        tuple(eligible),
        torch.stack(labels),
        torch.stack(margins),
    )


def mixture(problem: Problem, effort: Effort, base: Clusters, plain: Judged, seed: int) -> Run:
    """Components that every client has, in its own proportions; `plain` judges the model for all.  -> Found"""
    fits, every, v = [], [], problem.n_folds
    sizes = tuple(range(2, effort.max_components + 1))
    how: dict[str, Any] = {"problem": problem, "rounds": effort.mixture_rounds}
    for n_components in sizes:
        at = (base.theta[:, 0, 0], base.noise[:, 0])
        mixed = yield from fit_mixed(*at, n_components=n_components, starts=effort.starts, seed=seed, **how)
        shape = yield from fit_shape(*at, n_components=n_components, **how)
        got = yield from answered(judge_mixed_ask(mixed, problem))
        noise = yield from answered(judge_shape_ask(shape, problem))
        right, n = (got[field][:, :, 0] for field in ("right", "rows"))  # [M, F]
        value, rows = _beyond_noise(got, noise), n[:, :v].sum(1)
        each = (value[:, :v].sum(1) / rows, right[:, :v].sum(1) / rows, value[:, v] / n[:, v], right[:, v] / n[:, v])
        score, error, test_score, test_error = (one[None] for one in each)
        every.append(Judged(score, error, test_score, test_error, plain.rows, plain.test_rows, plain.noise))
        fits.append(Within(mixed, shape))
    settings: tuple[Setting, ...] = tuple({"n_components": r} for r in sizes)
    return Found("mixture", settings, joined(every), tuple(fits))


def _beyond_noise(got: Replies, noise: Replies) -> Tensor:
    """Log-likelihoods under a mixture, without what a model of the noise alone would bring over normal noise.  [M, F]"""
    shape = (noise["plain"] - noise["loss"]).sum(0)  # of all clients: what their noise has in common
    rows = got["rows"][:, :, 0]
    value: Tensor = -got["loss"][:, :, 0] - shape.clamp(min=0) * rows / rows.sum(0).clamp(min=1)
    return value


def map_of_clients(problem: Problem, base: Clusters, free: Prior) -> Run:
    """Where clients' models lie in the two directions in which they differ most.  -> [M, 2]"""
    most = min(2, problem.n_parameters)
    got = yield from answered(judge_effects_ask(low_rank(free, base.bend, (most,)), problem, "map", effects=True))
    place = got["effects"][:, -1, 0]
    return torch.cat([place, torch.zeros(len(place), 2 - most, dtype=place.dtype)], 1)


def prior_for(structure: str, setting: Setting, problem: Problem, effort: Effort = Effort()) -> Run:  # noqa: B008
    """Fit local, shrunk or low-rank models with one setting, as the comparison does.  -> Prior

    Parameters
    ----------
    structure : {"local", "shrunk", "representation"}
        Which.
    setting : dict
        As the comparison gave it: a penalty, a kind of prior, or a rank.
    """
    yield from begin(problem)
    fit: Clusters = yield from fit_global(problem, _COMMON_PENALTIES[-2:-1], effort.steps)
    if structure == "local":
        prior = ridge_prior(problem, (float(setting["penalty"]),), len(problem.held), fit.noise[:, 0])
        return (yield from _noisy(prior, problem))
    kind = next(kind for kind in KINDS if kind == setting.get("prior", "full"))
    first = kind if kind != "full" else "diagonal"
    prior = yield from fit_effects(
        _around(problem, fit, 1), problem=problem, kinds=(first,), rounds=effort.rounds, tag="simple"
    )
    if kind == "full":
        prior = yield from fit_effects(prior, problem=problem, kinds=(kind,), rounds=effort.rounds, tag="shrunk")
    if structure == "shrunk":
        return prior
    prior = low_rank(prior, fit.bend, (int(setting["rank"]),))
    return (
        yield from fit_effects(prior, problem=problem, kinds=("full",), rounds=effort.rounds // 2, tag="representation")
    )
