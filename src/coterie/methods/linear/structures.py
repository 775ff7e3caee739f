# SPDX-License-Identifier: Apache-2.0
"""The structures that are compared: how each is fitted with all its settings, and judged.

Each is a generator that asks clients and returns what it `Found`. All of them go through the same folds. What a structure
needs of another (everything begins with the model for all) is handed on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coterie.algorithms.intercept_test import intercepts_differ
from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_fedprox import newton_fedprox
from coterie.algorithms.newton_ifca import Clusters, judge_clusters_ask, newton_ifca
from coterie.algorithms.noise_model import NoiseModel, judge_noise_ask, noise_model
from coterie.algorithms.noise_model import by_size as noises_by_size
from coterie.algorithms.outcome_start import first_models
from coterie.algorithms.random_effects import Kind, Prior, judge_effects_ask, low_rank, random_effects, ridge_prior
from coterie.algorithms.row_mixture import Mixed, judge_mixed_ask, row_mixture
from coterie.algorithms.row_mixture import by_size as mixtures_by_size
from coterie.algorithms.score_sums import ERRORS, PLAIN, SHAPED
from coterie.methods.linear.scores import Judged, joined, judged, over_deals
from coterie.methods.linear.sources import answered
from coterie.protocol import Algorithm, Lockstep, together

__all__ = [
    "KINDS", "ORDER", "Effort", "Found", "Setting", "Within", "also", "around", "clusters", "common_model",
    "kinds_of", "local", "map_of_clients", "mixture", "most_rank", "on_newcomers", "pooled_models", "priors_for",
    "proximal_models", "representation", "settings_of", "shrunk", "with_deals", "with_noise",
]  # fmt: skip

ORDER = ("global", "clusters", "local", "shrunk", "representation", "mixture")  # the simplest first
KINDS: tuple[Kind, ...] = ("intercept", "same", "diagonal", "full")  # of the covariance of clients' models
_COMMON_PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
_NEAR = 2  # the penalty whose model FedProx begins with, and with which priors are fitted to all rows
_STRENGTHS = (1.0, 0.1)  # with which FedProx holds clients near the common model
_LOCAL_PENALTIES = (64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.12, 0.06, 0.03)
_FINAL = "final"  # what clients keep of priors that are fitted to all rows while others choose the setting
_FIRST_SPREAD = 0.3  # standard deviation of clients' weights that EM begins with, where features have deviation 1

Setting = dict[str, int | float | str]


@dataclass(frozen=True)
class Effort:
    """How long structures are worked on."""

    rounds: int = 16  # of EM, for models around a common one
    mixture_rounds: int = 40
    steps: int = 20  # of Newton's method and of clustering
    growing: int = 8  # of them, before a further cluster is added: what is left is done beside that
    starts: int = 5  # of every further cluster, and of mixtures
    max_clusters: int = 8
    max_rank: int = 8
    max_components: int = 4
    drawn: bool = False  # whether clusters begin with models that are drawn, as with secure sums

    @property
    def messages(self) -> int:
        """About how many it takes to fit all structures side by side: clusters come after shrunk models."""
        steps = min(self.growing, self.steps)
        return 6 + steps + 2 * self.rounds + (self.max_clusters - 1) * (2 + steps) + steps


@dataclass(frozen=True)
class Within:
    """A mixture within clients, and what a mixture of noises alone would be."""

    mixed: Mixed
    noise: NoiseModel


@dataclass(frozen=True)
class Found:
    """What came of a structure: its settings, the simplest first; how they do; and what was fitted, one for each.

    `free` is whether any setting may be taken that is best, since none is simpler than another; one with another key must
    be better than those before it. `eligible` is false for settings that may not be taken.

    Effective parameters are those of the common part (models, and their covariance) and the clients' own: of models around
    a common one the trace of every client's hat matrix, which is below the number of its parameters as far as they are
    shrunk; of clusters one for every client's label; of mixtures its proportions.
    """

    name: str
    settings: tuple[Setting, ...]
    judged: Judged
    fits: tuple[Prior | Clusters | Within, ...]
    free: bool = False
    eligible: tuple[bool, ...] = ()
    df: tuple[float, ...] = ()  # [J] effective parameters of the fit to all rows; none where nobody can count them
    scored: tuple[float, ...] = ()  # [J] of one model for all: sums of scores, with the common noise of the fits
    sizes: tuple[tuple[int, ...], ...] = ()  # [J] clients of every cluster, in the fit to all rows
    levels: float = math.nan  # of shrunk models: standard normal where clients' intercepts do not differ


def on_newcomers(found: Found, setting: int, problem: Problem) -> Lockstep:
    """Let new clients keep how the last fit serves them.  -> Judged"""
    fit = found.fits[setting]
    if isinstance(fit, Within):
        within = yield from _judged_within(Within(fit.mixed.last(), fit.noise.last()), problem, f"new {found.name}")
        return within.judged
    return (yield from judged_fit(fit.last(), problem, f"new {found.name}"))


def judged_fit(fit: Prior | Clusters, problem: Problem, tag: str) -> Algorithm:
    """Let clients keep how a fit serves them, with each of its settings.  -> Judged"""
    ask = judge_clusters_ask(fit, problem, tag) if isinstance(fit, Clusters) else judge_effects_ask(fit, problem, tag)
    return judged((yield from answered(ask)), problem, tag, _kind(problem))


def _kind(problem: Problem) -> int:
    return ERRORS if problem.is_regression else PLAIN


def common_model(problem: Problem, effort: Effort) -> Algorithm:
    """One model for all: of all rows together, with each penalty, or FedProx's, with each strength.  -> Found"""
    plain: Found = yield from pooled_models(problem, effort)
    return also(plain, (yield from proximal_models(problem, plain)))


def pooled_models(problem: Problem, effort: Effort) -> Algorithm:
    """One model of all rows together, with each penalty.  -> Found"""
    fit: Clusters = yield from _for_all(problem, _COMMON_PENALTIES, effort)
    return (yield from _judged_common(fit, problem, {"penalty": _COMMON_PENALTIES}))


def proximal_models(problem: Problem, pooled: Found) -> Algorithm:
    """One model for all by FedProx, with each strength, from that of all rows together.  -> Found"""
    base = pooled.fits[_NEAR]
    assert isinstance(base, Clusters)
    near = yield from newton_fedprox(None, start=base.theta, problem=problem, strengths=_STRENGTHS)
    noise, objective = (value.expand(-1, len(_STRENGTHS)) for value in (base.noise, base.objective))
    fit = Clusters(near.theta, noise, objective, base.hessian)
    return (yield from _judged_common(fit, problem, {"proximal": _STRENGTHS}))


def also(one: Found, other: Found) -> Found:
    """Put a structure's further settings beside those before."""
    return replace(
        one, settings=one.settings + other.settings, judged=joined([one.judged, other.judged]), fits=one.fits + other.fits,
        df=one.df + other.df, scored=one.scored + other.scored,
    )  # fmt: skip


def with_deals(first: Found, others: Sequence[Found]) -> Found:
    """Judged with further deals of the folds as well."""
    if not others:
        return first
    every = (first, *others)
    levels = sum(one.levels for one in every) / len(every)
    return replace(first, judged=over_deals([one.judged for one in every]), levels=levels)


def _judged_common(fit: Clusters, problem: Problem, values: dict[str, tuple[float, ...]]) -> Algorithm:
    """Judge one model for all with each setting.  -> Found"""
    ((key, each),) = values.items()
    tag = f"judged by {key}"
    got = yield from answered(judge_clusters_ask(fit, problem, tag))
    settings: tuple[Setting, ...] = tuple({key: value} for value in each)
    fits = tuple(fit.setting(j) for j in range(len(each)))
    df = (float(problem.n_parameters),) * len(each)
    done, scored = judged(got, problem, tag, _kind(problem)), tuple(got["level"].tolist())
    return Found("global", settings, done, fits, free=True, df=df, scored=scored)


def _for_all(problem: Problem, penalties: tuple[float, ...], effort: "Effort") -> Algorithm:
    """One model for all rows together, with each penalty.  -> Clusters with K = 1"""
    start = yield from first_models(problem, len(penalties))
    how: dict[str, Any] = {"n_clusters": 1, "penalties": penalties, "rounds": effort.steps}
    return (yield from newton_ifca(None, start=start, problem=problem, **how))


def local(problem: Problem, effort: Effort, base: Clusters) -> Algorithm:
    """One model each.  -> Found"""
    about = (len(problem.held), base.noise[:, 0], base.theta[:, 0, 0])
    prior = yield from with_noise(ridge_prior(problem, _LOCAL_PENALTIES, *about), problem)
    return (yield from _judged("local", prior, problem, {"penalty": _LOCAL_PENALTIES}, free=True))


def with_noise(prior: Prior, problem: Problem, tag: str = "local") -> Algorithm:
    """Learn the noise around local models, or what else clients have in common.  -> Prior"""
    if not problem.is_regression and not problem.n_extra:
        return prior
    return (yield from random_effects(None, start=prior, problem=problem, kinds=(), rounds=5, tag=tag, learn=False))


def shrunk(problem: Problem, effort: Effort, base: Clusters) -> Lockstep:
    """Models of clients' own around a common one, and whether intercepts differ at all.  -> Found"""
    programs: dict[str, Lockstep] = {"models": _shrunk(problem, effort, base)}
    if not problem.is_stratified:
        programs["levels"] = intercepts_differ(problem, base.theta[-1, 0, 0], base.noise[-1, 0])
    done = yield from together(programs)
    return replace(done["models"], levels=done.get("levels", math.nan))


def _shrunk(problem: Problem, effort: Effort, base: Clusters) -> Lockstep:
    """Clients keep the freest as their own.  -> Found

    The full covariance begins with the diagonal one: it has too many numbers to be found from anywhere.
    """
    kinds = kinds_of(problem)
    last = len(kinds) - 1
    how: dict[str, Any] = {"problem": problem, "rounds": effort.rounds}
    simple = yield from _simple(problem, effort, base, kinds[:last], "simple")
    free = yield from random_effects(None, start=simple.setting(last - 1), kinds=kinds[last:], tag="shrunk", **how)
    return (yield from _judged("shrunk", _side_by_side([simple, free]), problem, {"prior": kinds}, keep=last))


def _simple(problem: Problem, effort: Effort, base: Clusters, kinds: tuple[Kind, ...], tag: str) -> Lockstep:
    """Models around a common one with covariances of each kind.  -> Prior

    Of numbers each kind goes alone, and in the same messages: where all weights vary alike, or intercepts only, clients
    need not factor matrices.
    """
    groups = [(kind,) for kind in kinds] if problem.is_regression else [kinds]
    found = yield from together({
        " ".join(some): random_effects(
            None, start=around(problem, base, len(some)), problem=problem, kinds=some, rounds=effort.rounds,
            tag=f"{tag} {some[0]}",
        )
        for some in groups
    })  # fmt: skip
    return _side_by_side(list(found.values()))


def kinds_of(problem: Problem) -> tuple[Kind, ...]:
    """What clients' models may differ in; where each has a baseline of its own, intercepts mean nothing."""
    return KINDS[1:] if problem.is_stratified else KINDS


def representation(problem: Problem, effort: Effort, base: Clusters, free: Prior, most: int) -> Algorithm:
    """Models around a common one, in a subspace of few dimensions.  -> Found"""
    ranks = tuple(range(1, most + 1))
    kinds: tuple[Kind, ...] = tuple("full" for _ in ranks)
    prior = yield from random_effects(
        None,
        start=low_rank(free, base.hessian, ranks),
        problem=problem,
        kinds=kinds,
        rounds=effort.rounds // 2,
        tag="representation",
    )
    return (yield from _judged("representation", prior, problem, {"rank": ranks}))


def around(problem: Problem, base: Clusters, n: int) -> Prior:
    """Where EM begins: around the model for all."""
    root = _FIRST_SPREAD * torch.diag(problem.own)
    fits = len(problem.held)
    return Prior(base.theta[:, 0].expand(-1, n, -1), root.expand(fits, n, -1, -1), base.noise.expand(-1, n))


def _judged(
    name: str, prior: Prior, problem: Problem, values: dict[str, Any], *, keep: int | None = None, free: bool = False
) -> Algorithm:
    """Judge a prior with each setting.  -> Found"""
    got = yield from answered(judge_effects_ask(prior, problem, f"judged {name}", keep=keep))
    ((key, each),) = values.items()
    settings: tuple[Setting, ...] = tuple({key: value} for value in each)
    df = tuple(
        float(own) + _common(setting, problem.n_parameters)
        for own, setting in zip(got["df"][-1], settings, strict=True)
    )
    fits = tuple(prior.setting(j) for j in range(len(each)))
    return Found(name, settings, judged(got, problem, f"judged {name}", _kind(problem)), fits, free, df=df)


def _common(setting: Setting, p: int) -> int:
    """Parameters of the mean and of the covariance; local models have neither."""
    if "penalty" in setting:
        return 0
    if "rank" in setting:
        r = int(setting["rank"])
        return p + r * p - r * (r - 1) // 2
    return p + {"intercept": 1, "same": 2, "diagonal": p, "full": p * (p + 1) // 2}[str(setting["prior"])]


def clusters(
    problem: Problem, effort: Effort, base: Clusters, most: int, penalty: float, least: int, seed: int,
    drawn: Prior | None = None,
) -> Lockstep:  # fmt: skip
    """Groups of clients, each with a model: 2 to `most` of them, none smaller than `least`.  -> Found

    They grow from clients' own models, or from models that are drawn from a prior of these, which takes sums only.
    While a number of clusters is polished and judged, the next one grows.
    """
    how: dict[str, Any] = {"problem": problem, "penalties": (penalty,), "rounds": effort.steps}
    grown: Clusters = base
    fits, answers = [], []
    for k in range(2, most + 2):
        programs: dict[str, Lockstep] = {}
        if k > 2:
            programs["judged"] = _polished(grown, how)
        if k <= most:
            some = how | {
                "rounds": min(effort.growing, effort.steps),
                "starts": effort.starts,
                "seed": seed,
                "drawn": drawn,
            }
            programs["grown"] = newton_ifca(None, start=grown, n_clusters=k, **some)
        found = yield from together(programs)
        grown = found.get("grown", grown)
        if k > 2:
            fits.append(found["judged"][0])
            answers.append(found["judged"][1])
    sizes = tuple(tuple(round(n) for n in got["sizes"][0].tolist()) for got in answers)
    eligible = tuple(min(own) >= least for own in sizes)
    settings: tuple[Setting, ...] = tuple({"n_clusters": k} for k in range(2, most + 1))
    every = [judged(got, problem, _tag(k), _kind(problem)) for k, got in enumerate(answers, 2)]
    df = tuple(k * problem.n_parameters + float(got["there"]) for k, got in enumerate(answers, 2))
    return Found("clusters", settings, joined(every), tuple(fits), False, eligible, df, sizes=sizes)


def _tag(n_clusters: int) -> str:
    return f"judged {n_clusters} clusters"


def _polished(fit: Clusters, how: dict[str, Any]) -> Lockstep:
    """Let clusters settle as far as they will, and judge them.  -> Clusters, Replies"""
    done: Clusters = yield from newton_ifca(None, start=fit, n_clusters=fit.theta.shape[2], **how)
    return done, (yield from answered(judge_clusters_ask(done, how["problem"], _tag(done.theta.shape[2]))))


def mixture(problem: Problem, effort: Effort, base: Clusters, seed: int) -> Lockstep:
    """Components that every client has, in its own proportions.  -> Found"""
    sizes = tuple(range(2, effort.max_components + 1))
    how: dict[str, Any] = {"problem": problem, "rounds": effort.mixture_rounds, "sizes": sizes}
    how |= {"base": base.theta[:, 0, 0], "spread": base.noise[:, 0]}
    mixed = row_mixture(None, starts=effort.starts, seed=seed, **how)
    made = yield from together({"mixed": mixed, "noise": noise_model(None, **how)})
    fits = [
        Within(*both)
        for both in zip(mixtures_by_size(made["mixed"], sizes), noises_by_size(made["noise"], sizes), strict=True)
    ]
    every = yield from together({
        str(r): _judged_within(fit, problem, f"judged {r} components") for r, fit in zip(sizes, fits, strict=True)
    })  # fmt: skip
    settings: tuple[Setting, ...] = tuple({"n_components": r} for r in sizes)
    there = [one.there for one in every.values()]
    df = tuple(r * problem.n_parameters + (r - 1) * n for r, n in zip(sizes, there, strict=True))
    return Found("mixture", settings, joined([one.judged for one in every.values()]), tuple(fits), df=df)


@dataclass(frozen=True)
class _Within:
    judged: Judged
    there: float  # clients that have rows


def _judged_within(fit: Within, problem: Problem, tag: str) -> Lockstep:
    """Let clients keep how a mixture serves them, beyond what a model of the noise alone would bring.  -> _Within"""
    asked = {"mixed": judge_mixed_ask(fit.mixed, problem, tag), "noise": judge_noise_ask(fit.noise, problem)}
    got = yield from together({name: answered(ask) for name, ask in asked.items()})
    rows = got["mixed"]["rows"][:, 0].clamp(min=1)
    shape = (got["noise"]["plain"] - got["noise"]["loss"]).clamp(
        min=0
    ) / rows  # what noise of all clients has in common
    return _Within(judged(got["mixed"], problem, tag, SHAPED, shape), float(got["mixed"]["there"]))


def map_of_clients(problem: Problem, base: Clusters, free: Prior) -> Algorithm:
    """Where clients' models lie in the two directions in which they differ most.  -> [M, 2]"""
    most = min(2, problem.n_parameters)
    got = yield from answered(judge_effects_ask(low_rank(free, base.hessian, (most,)), problem, "map", effects=True))
    place = got["effects"][:, -1, 0]
    return torch.cat([place, torch.zeros(len(place), 2 - most, dtype=place.dtype)], 1)


def settings_of(structure: str, problem: Problem, effort: Effort, n_clients: int) -> tuple[Setting, ...]:
    """The settings of local, shrunk or low-rank models, as the comparison orders them."""
    if structure == "representation":
        return tuple({"rank": r} for r in range(1, most_rank(problem, effort, n_clients) + 1))
    if structure == "local":
        return tuple({"penalty": l2} for l2 in _LOCAL_PENALTIES)
    return tuple({"prior": kind} for kind in kinds_of(problem))


def most_rank(problem: Problem, effort: Effort, n_clients: int) -> int:
    """The largest rank that is tried."""
    return max(1, min(effort.max_rank, problem.n_parameters // 2, n_clients // 2))


def priors_for(
    structure: str,
    settings: Sequence[Setting],
    problem: Problem,
    effort: Effort = Effort(),  # noqa: B008
) -> Lockstep:
    """Fit local, shrunk or low-rank models with each of some settings, as the comparison does.  -> Prior

    Parameters
    ----------
    structure : {"local", "shrunk", "representation"}
        Which.
    settings : sequence of dict
        As the comparison gives them: penalties, kinds of priors, or ranks.
    """
    base: Clusters = yield from _for_all(problem, _COMMON_PENALTIES[_NEAR : _NEAR + 1], effort)
    if structure == "local":
        penalties = tuple(float(setting["penalty"]) for setting in settings)
        prior = ridge_prior(problem, penalties, len(problem.held), base.noise[:, 0], base.theta[:, 0, 0])
        return (yield from with_noise(prior, problem, f"{_FINAL} local"))
    wanted = [next(kind for kind in KINDS if kind == one.get("prior", "full")) for one in settings]
    simple = tuple(kind for kind in KINDS[:3] if kind in wanted or (kind == "diagonal" and "full" in wanted))
    how: dict[str, Any] = {"problem": problem, "rounds": effort.rounds}
    first = yield from _simple(problem, effort, base, simple, f"{_FINAL} simple")
    found: dict[Kind, Prior] = {kind: first.setting(i) for i, kind in enumerate(simple)}
    if "full" in wanted:
        found["full"] = yield from random_effects(
            None, start=found["diagonal"], kinds=("full",), tag=f"{_FINAL} shrunk", **how
        )
    if structure == "shrunk":
        return _side_by_side([found[kind] for kind in wanted])
    prior = low_rank(found["full"], base.hessian, tuple(int(setting["rank"]) for setting in settings))
    kinds: tuple[Kind, ...] = tuple("full" for _ in settings)
    how["rounds"] = effort.rounds // 2
    return (yield from random_effects(None, start=prior, kinds=kinds, tag=f"{_FINAL} representation", **how))


def _side_by_side(priors: Sequence[Prior]) -> Prior:
    """Settings of several as those of one, with columns of zeros where only intercepts differ."""
    roots = [torch.nn.functional.pad(p.root, (p.root.shape[-2] - p.root.shape[-1], 0)) for p in priors]
    mean, noise = (torch.cat([getattr(p, name) for p in priors], 1) for name in ("mean", "noise"))
    return Prior(mean, torch.cat(roots, 1), noise)
