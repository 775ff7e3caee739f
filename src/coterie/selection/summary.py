# SPDX-License-Identifier: Apache-2.0
"""From scores to what people read: means with errors, differences, groups, models in the data's own units."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching  # scipy.optimize's is slow to load
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_ifca import Clusters
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.random_effects import Prior
from coterie.algorithms.target_shape import Shape
from coterie.config import PRIOR
from coterie.data.clients import Clients
from coterie.methods.coefficients import coefficient_table, own_units, prior_coefficients, weights_in
from coterie.methods.linear.choice import Evidence
from coterie.methods.linear.structures import Setting, Within
from coterie.methods.linear.task import Task
from coterie.methods.measuring import target_variance
from coterie.methods.session import target_of
from coterie.models.outcomes import metric_of
from coterie.select import as_good, difference
from coterie.selection.result import Comparison, FitAdvice, Grouping, Structure, Trial
from coterie.selection.told import NewTold, Told

__all__ = ["Linear", "Wording", "metric_name_of", "names_where", "summarised"]

_SKEWED = 2.0  # skewness of a target that is told: that of an exponential law
_PRIORS = {
    "intercept": "own intercepts", "same": "random effects (equal variances)",
    "diagonal": "random effects (diagonal covariance)", "full": "random effects (full covariance)",
}  # fmt: skip


class Wording(Protocol):
    """How a kind of models speaks of structures."""

    def label(self, name: str, setting: Setting) -> str:
        """A setting in words."""

    def advice(self, name: str, setting: Setting) -> FitAdvice:
        """How `coterie fit` fits it."""


@dataclass(frozen=True)
class Linear:
    """Linear models, and mixtures."""

    regression: bool

    def label(self, name: str, setting: Setting) -> str:
        """A setting in words."""
        if "n_components" in setting and name != "mixture":
            return f"one mixture {'for all' if name == 'global' else 'each'}, {setting['n_components']} components"
        if name in ("global", "local"):
            by = f", by FedProx with {setting['proximal']:g}" if "proximal" in setting else ""
            return {"global": "one model for all", "local": "one model each"}[name] + by
        ((_, value),) = setting.items()
        if name == "shrunk":
            return _PRIORS[str(value)]
        many = {"clusters": f"{value} clusters", "representation": f"rank {value}", "mixture": f"{value} components"}
        return many[name]

    def advice(self, name: str, setting: Setting) -> FitAdvice:
        """How `coterie fit` fits it."""
        if "n_components" in setting and name != "mixture":
            alone: float | str = "common" if name == "global" else 0.0
            return FitAdvice("mixture", {"mixture.n_components": setting["n_components"], "mixture.c_lambda": alone})
        if name == "global":
            return FitAdvice("fedavg", self._proximal(float(setting["proximal"])) if "proximal" in setting else {})
        if name == "clusters":
            return FitAdvice("ifca", {"clusters.n_clusters": setting["n_clusters"], "clusters.n_init": 5})
        if name == "mixture":
            return FitAdvice("mixture", {"mixture.n_components": setting["n_components"]})
        ((_, value),) = setting.items()
        return FitAdvice(name, {f"prior.{PRIOR[name]}": value})

    def _proximal(self, strength: float) -> dict[str, Any]:
        """FedProx's options: `coterie fit` has squared errors where a comparison has halves of them."""
        if self.regression:
            return {"training.proximal": 2 * strength, "training.exact": True}
        return {"training.proximal": strength}


def summarised(
    clients: Clients, task: Task, evidence: Evidence, said: Told, new: NewTold | None, *,
    place: Tensor | None = None, words: Wording | None = None,
) -> Comparison:  # fmt: skip
    """Put the result together; `place` [M, 2] is where clients lie on the map, where there is one."""
    names, taken = clients.names, [name for name in evidence.found if name not in evidence.barred]
    able = as_good(evidence.scores, [evidence.column(name) for name in taken], tolerance=evidence.tolerance)
    good = dict.fromkeys(evidence.found, False) | dict(zip(taken, able, strict=True))
    problem, own = task.problem, said.individual
    words = words or Linear(problem.is_regression)
    parts = _Parts(clients, task, evidence, said, new, words)
    gain = None if own is None else own.score[said.at(evidence.chosen)] - own.score[said.at("global")]
    return Comparison(
        task=clients.schema.task,
        target=clients.schema.target,
        metric=metric_name_of(clients),
        chosen=evidence.chosen,
        structures=tuple(parts.structure(name, good[name]) for name in evidence.found),
        names=names,
        rows=clients.train.counts.numpy(),
        too_small=names_where(names, ~task.judged),
        n_judged=said.judged,
        n_outliers=said.outliers,
        n_absent=said.absent,
        held_out=said.held_out,
        on_test=said.on_test,
        judged=None if own is None else own.judged.numpy(),
        absent=() if own is None else names_where(names, own.absent),
        outliers=() if own is None else names_where(names, own.odd),
        outlier_score=None if own is None else own.outlier_score.numpy(),
        worse_off=() if gain is None else names_where(names, gain < 0),
        gain=None if gain is None else gain.numpy(),
        grouping=None if said.groups is None else _grouping(clients, task, evidence, said, place),
        seconds=0.0,
        seed=0,
        settings={},
        notes=_skewed(evidence.shape),
        coefficients=parts.coefficients(),
        tolerance=evidence.tolerance,
    )


def names_where(names: np.ndarray, mask: Tensor | np.ndarray) -> tuple[str, ...]:
    """Names of the clients for whom it is so."""
    return tuple(str(name) for name in names[np.asarray(mask)])


def _skewed(shape: Shape) -> tuple[str, ...]:
    """Say that a target is skewed, and what to do."""
    if abs(shape.skewness) < _SKEWED:
        return ()
    said = f"The target is skewed (skewness {shape.skewness:.1f}): a few rows weigh more than all others in squared errors."
    if shape.positive and shape.skewness > 0:
        return (f"{said} All its values are positive: take logarithms, or compare again with --outcome log-normal.",)
    return (f"{said} Compare again with a target that is transformed to be less skewed.",)


@dataclass(frozen=True)
class _Parts:
    """What structures' summaries are made of."""

    clients: Clients
    task: Task
    evidence: Evidence
    said: Told
    new: NewTold | None
    words: Wording

    def structure(self, name: str, good: bool) -> Structure:
        """All that is said of one structure."""
        evidence, scores, own = self.evidence, self.evidence.scores, self.said.individual
        setting = evidence.found[name].settings[evidence.settings[name]]
        at, chosen = evidence.column(name), evidence.column(evidence.chosen)
        score, error = scores.mean_and_error(at)
        metric, metric_error = self.said.metric.mean_and_error(self.said.at(name))
        versus = None if name == evidence.chosen else difference(scores, at, chosen)
        return Structure(
            name=name,
            setting=_telling(name, setting),
            label=self.words.label(name, setting),
            score=score,
            stderr=error,
            metric=metric,
            metric_stderr=metric_error,
            versus_global=None if name == "global" else difference(scores, at, evidence.column("global")),
            versus_chosen=versus,
            as_good=versus is None or (good and not versus.high < 0),
            barred=name in evidence.barred,
            chosen_share=evidence.shares.get(name),
            df=evidence.df(name),
            trials=self._trials(name),
            client_score=None if own is None else own.score[self.said.at(name)].numpy(),
            models=self._models(name),
            fit=self._advice(name, setting),
            **self._on_test_rows(name),
            **self._on_new_clients(name),
        )

    def _advice(self, name: str, setting: Setting) -> FitAdvice:
        """How `coterie fit` fits it; with secure sums not from models of single clients."""
        advice = self.words.advice(name, setting)
        if not self.task.session.options.secure:
            return advice
        if advice.method == "ifca":
            return replace(advice, options={**advice.options, "clusters.init": "balanced"})
        return advice if advice.method != "mixture" else FitAdvice(None)  # FedGrEM's centre is robust, not a sum

    def _on_test_rows(self, name: str) -> dict[str, Any]:
        said, own, at = self.said, self.said.individual, self.said.at(name)
        out: dict[str, Any] = {
            "client_test_metric": None if own is None else own.test_metric[at].numpy(),
            "client_test_score": None if own is None else own.test_score[at].numpy(),
        }
        fields = ("test_metric", "test_stderr", "test_score", "test_overall", "test_r2", "test_versus_global")
        if self.clients.test is None:
            return out | dict.fromkeys(fields)
        mean, error = said.test_metric.mean_and_error(at)
        overall, r2 = self._overall(said.overall, at)
        out |= {"test_metric": mean, "test_stderr": error, "test_score": said.test_score.mean_and_error(at)[0]}
        out |= {"test_overall": overall, "test_r2": r2, "test_versus_global": None}
        if name != "global":
            out["test_versus_global"] = difference(said.test_counted, at, said.at("global"))
            out["test_metric_versus_global"] = difference(said.test_metric, at, said.at("global"))
        return out

    def _on_new_clients(self, name: str) -> dict[str, Any]:
        new = self.new
        if new is None or name not in new.names:
            return dict.fromkeys(("new_metric", "new_stderr", "new_score"))
        at = new.at(name)
        mean, error = new.metric.mean_and_error(at)
        out: dict[str, Any] = {"new_metric": mean, "new_stderr": error, "new_score": new.score.mean_and_error(at)[0]}
        out["client_new_metric"] = None if new.individual is None else new.individual[at].numpy()
        if name != "global":
            out["new_versus_global"] = difference(new.metric, at, new.at("global"))
        return out

    def _overall(self, sums: np.ndarray, at: int) -> tuple[float, float | None]:
        """Over all test rows together, and R^2."""
        mean = float(sums[1 + at]) / float(sums[0])
        if not self.task.problem.is_number:
            return mean, None
        variance = self._test_variance
        squares = mean * float(self.task.scaling.y_scale) ** 2
        return math.sqrt(squares), 1.0 - squares / variance if variance > 0 else None

    @cached_property
    def _test_variance(self) -> float:
        """Of the test rows' targets."""
        assert self.clients.test is not None
        return target_variance(self.clients.test, self.task.session)

    def _trials(self, name: str) -> tuple[Trial, ...]:
        found, scores = self.evidence.found[name], self.evidence.scores
        every = zip(self.evidence.table.columns(name), found.settings, strict=True)
        return tuple(
            Trial(_telling(name, setting) or setting, self.words.label(name, setting), *scores.mean_and_error(column))
            for column, setting in every
        )

    def _models(self, name: str) -> np.ndarray | None:
        """Models in the data's own units, intercept last.  [K, D + 1], or [K, classes, D + 1]"""
        fits = self.evidence.found[name].fits
        if not fits:
            return None
        fit = fits[self.evidence.settings[name]]
        if isinstance(fit, Clusters):
            return _own_units(fit.theta[-1, 0], self.task.problem, self.task.scaling)
        if isinstance(fit, Within):
            return _own_units(fit.mixed.theta[-1, 0], self.task.problem, self.task.scaling)
        return None

    def coefficients(self) -> dict[str, Any] | None:
        """The table of coefficients of what was chosen; None where there is none."""
        name, problem = self.evidence.chosen, self.task.problem
        fits = self.evidence.found[name].fits
        fit = fits[self.evidence.settings[name]] if fits else None
        if isinstance(fit, Clusters):
            weights = weights_in(fit.theta[-1, 0], problem)
            return coefficient_table(weights, self.clients.schema, self.task.scaling)
        if isinstance(fit, Prior):
            return prior_coefficients(name, fit, problem, self.clients.schema, self.task.scaling)
        return None


def _telling(name: str, setting: Setting) -> Setting:
    """What tells of a structure: not the penalty of one model for all, nor for how many rounds networks train."""
    dull = ("penalty", "rounds") if name == "global" else ("rounds",)
    return {key: value for key, value in setting.items() if key not in dull}


def _own_units(theta: Tensor, problem: Problem, scaling: Scaling) -> np.ndarray:
    made = own_units(weights_in(theta, problem), scaling)
    out: np.ndarray = (made[:, 0] if problem.n_outputs == 1 else made).numpy()
    return out


def metric_name_of(clients: Clients) -> str:
    """What is measured beside the score."""
    schema = clients.schema
    return "log density" if schema.task == "none" else metric_of(target_of(schema)[0])


# -- groups -----------------------------------------------------------------------------------------------------------
def _grouping(clients: Clients, task: Task, evidence: Evidence, said: Told, place: Tensor | None) -> Grouping:
    found, j, own = evidence.found["clusters"], evidence.settings["clusters"], said.individual
    assert said.groups is not None
    made = Grouping(
        labels=None,
        sizes=said.groups.sizes,
        profile=_profile(found.fits[j], task.problem, task.scaling) if found.fits else None,
        features=clients.schema.feature_names,
        stability=said.groups.stability,
        agreement=None,
        margin=None,
        map=None if place is None else place.numpy(),
    )
    if own is None or own.label is None or own.margin is None:
        return made
    labels, there, k = own.label.numpy(), ~own.absent.numpy(), int(found.settings[j]["n_clusters"])  # [M, L]
    final, folds = labels[:, -1], labels[:, :-1].T
    agreement = np.mean([_matched(fold, final, k) == final for fold in folds], axis=0)
    return replace(
        made,
        labels=np.where(there, final, -1),
        agreement=np.where(there, agreement, np.nan),
        margin=np.where(there, own.margin.numpy(), np.nan),
    )


def _profile(fit: object, problem: Problem, scaling: Scaling) -> np.ndarray:
    """What a standard deviation of every feature does, in every group."""
    assert isinstance(fit, Clusters)
    theta = fit.theta[-1, 0]
    each = weights_in(theta, problem)[..., :-1] * scaling.y_scale
    out: np.ndarray = (each[:, 0] if problem.n_outputs == 1 else each).numpy()
    return out


def _matched(labels: np.ndarray, final: np.ndarray, k: int) -> np.ndarray:
    """Rename labels so that they agree with the final ones as often as can be."""
    together = np.ones((k, k), dtype=np.int64)  # more than none: what is zero is no pair
    np.add.at(together, (labels, final), 1)
    rename = np.empty(k, dtype=np.int64)
    found, true = min_weight_full_bipartite_matching(csr_array(together), maximize=True)
    rename[found] = true
    out: np.ndarray = rename[labels]
    return out
