# SPDX-License-Identifier: Apache-2.0
"""From scores to what people read: means with errors, differences, groups, models in the data's own units."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
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
from coterie.evaluate import adjusted_rand
from coterie.methods.coefficients import coefficient_table, own_units, prior_coefficients, weights_in
from coterie.methods.linear.choice import Evidence, names_where
from coterie.methods.linear.structures import Setting, Within
from coterie.methods.linear.task import Task
from coterie.methods.measuring import target_variance
from coterie.methods.session import target_of
from coterie.models.outcomes import metric_of
from coterie.select import as_good, difference, mean_and_error
from coterie.selection.result import Comparison, FitAdvice, Grouping, Structure, Trial

__all__ = ["Evidence", "Linear", "New", "Wording", "summarised"]

New = dict[str, tuple[Tensor, Tensor, Tensor]]  # structure -> score, right, rows of new clients

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
    clients: Clients, task: Task, evidence: Evidence, new: New, *,
    place: Tensor | None = None, words: Wording | None = None,
) -> Comparison:  # fmt: skip
    """Put the result together; `place` [M, 2] is where clients lie on the map, where there is one."""
    names, taken = clients.names, [name for name in evidence.found if name not in evidence.barred]
    scores = torch.stack([evidence.counted(evidence.score(name)) for name in taken])
    good = dict.fromkeys(evidence.found, False) | dict(
        zip(taken, as_good(scores, tolerance=evidence.tolerance), strict=True)
    )
    problem, scaling = task.problem, task.scaling
    words = words or Linear(problem.is_regression)
    parts = _Parts(clients, task, evidence, new, words)
    gain = evidence.score(evidence.chosen) - evidence.score("global")
    return Comparison(
        task=clients.schema.task,
        target=clients.schema.target,
        metric=_metric_of(clients),
        chosen=evidence.chosen,
        structures=tuple(parts.structure(name, good[name]) for name in evidence.found),
        names=names,
        rows=clients.train.counts.numpy(),
        judged=evidence.judged.numpy(),
        too_small=names_where(names, ~task.judged),
        absent=names_where(names, evidence.absent),
        outliers=names_where(names, evidence.odd),
        outlier_score=evidence.outlier_score.numpy(),
        worse_off=names_where(names, gain < 0),
        gain=gain.numpy(),
        grouping=_grouping(clients, problem, scaling, evidence, place) if "clusters" in evidence.found else None,
        seconds=0.0,
        seed=0,
        settings={},
        notes=_skewed(evidence.shape),
        coefficients=parts.coefficients(),
        tolerance=evidence.tolerance,
    )


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
    new: New
    words: Wording

    def structure(self, name: str, good: bool) -> Structure:
        """All that is said of one structure."""
        evidence = self.evidence
        setting = evidence.found[name].settings[evidence.settings[name]]
        mine, base = (evidence.counted(evidence.score(one)) for one in (name, "global"))
        score, error = mean_and_error(mine)
        right = evidence.found[name].judged.metric[evidence.settings[name]]
        metric, metric_error = mean_and_error(torch.where(evidence.judged, self._metric(right), torch.nan))
        chosen = evidence.counted(evidence.score(evidence.chosen))
        versus = None if name == evidence.chosen else difference(mine, chosen)
        return Structure(
            name=name,
            setting=_telling(name, setting),
            label=self.words.label(name, setting),
            score=score,
            stderr=error,
            metric=metric,
            metric_stderr=metric_error,
            versus_global=None if name == "global" else difference(mine, base),
            versus_chosen=versus,
            as_good=versus is None or (good and not versus.high < 0),
            barred=name in evidence.barred,
            chosen_share=evidence.shares.get(name),
            df=evidence.df(name),
            trials=self._trials(name),
            client_score=evidence.score(name).numpy(),
            models=self._models(name),
            fit=self.words.advice(name, setting),
            **self._on_test_rows(name),
            **self._on_new_clients(name),
        )

    def _on_test_rows(self, name: str) -> dict[str, Any]:
        evidence, judged = self.evidence, self.evidence.found[name].judged
        right, score = judged.test_metric[evidence.settings[name]], evidence.score(name, test=True)
        metric = self._test_metric(name)
        said: dict[str, Any] = {"client_test_metric": metric.numpy(), "client_test_score": score.numpy()}
        fields = ("test_metric", "test_stderr", "test_score", "test_overall", "test_r2", "test_versus_global")
        if self.clients.test is None:
            return said | dict.fromkeys(fields)
        mean, error = mean_and_error(metric)
        overall, r2 = self._overall(right, judged.test_rows)
        said |= {"test_metric": mean, "test_stderr": error, "test_score": mean_and_error(score)[0]}
        said |= {"test_overall": overall, "test_r2": r2, "test_versus_global": None}
        if name != "global":
            base = evidence.score("global", test=True)
            said["test_versus_global"] = difference(evidence.counted(score), base)
            said["test_metric_versus_global"] = difference(metric, self._test_metric("global"))
        return said

    def _test_metric(self, name: str) -> Tensor:
        """[M] NaN for who has no test rows."""
        judged = self.evidence.found[name].judged
        right = judged.test_metric[self.evidence.settings[name]]
        return torch.where(judged.test_rows > 0, self._metric(right), torch.nan)

    def _on_new_clients(self, name: str) -> dict[str, Any]:
        if name not in self.new:
            return dict.fromkeys(("new_metric", "new_stderr", "new_score"))
        score, right, rows = self.new[name]
        values = torch.where(rows > 0, self._metric(right), torch.nan)
        mean, error = mean_and_error(values)
        new_score = mean_and_error(torch.where(rows > 0, score, torch.nan))[0]
        said = {"new_metric": mean, "new_stderr": error, "new_score": new_score, "client_new_metric": values.numpy()}
        if name != "global":
            base = torch.where(rows > 0, self._metric(self.new["global"][1]), torch.nan)
            said["new_versus_global"] = difference(values, base)
        return said

    def _metric(self, right: Tensor) -> Tensor:
        """RMSE in the target's units, or accuracy."""
        return right.clamp(min=0).sqrt() * self.task.scaling.y_scale if self.task.problem.is_number else right

    def _overall(self, right: Tensor, rows: Tensor) -> tuple[float, float | None]:
        """Over all test rows together, and R^2."""
        there = rows > 0
        mean = (right * rows)[there].sum() / rows[there].sum()
        if not self.task.problem.is_number:
            return float(mean), None
        variance = self._test_variance
        squares = float(mean * self.task.scaling.y_scale**2)
        return math.sqrt(squares), 1.0 - squares / variance if variance > 0 else None

    @cached_property
    def _test_variance(self) -> float:
        """Of the test rows' targets."""
        assert self.clients.test is not None
        return target_variance(self.clients.test, self.task.session)

    def _trials(self, name: str) -> tuple[Trial, ...]:
        found = self.evidence.found[name]
        counted = self.evidence.judged & ~self.evidence.odd
        scores = torch.where(counted, found.judged.score, torch.nan)
        return tuple(
            Trial(_telling(name, setting) or setting, self.words.label(name, setting), *mean_and_error(scores[j]))
            for j, setting in enumerate(found.settings)
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


def _metric_of(clients: Clients) -> str:
    schema = clients.schema
    return "log density" if schema.task == "none" else metric_of(target_of(schema)[0])


# -- groups -----------------------------------------------------------------------------------------------------------
def _grouping(
    clients: Clients, problem: Problem, scaling: Scaling, evidence: Evidence, place: Tensor | None
) -> Grouping:
    found, j = evidence.found["clusters"], evidence.settings["clusters"]
    assert found.labels is not None
    assert found.margin is not None
    labels, k = found.labels[j].numpy(), int(found.settings[j]["n_clusters"])  # [M, F]
    there = ~evidence.absent.numpy()
    final, folds = labels[:, -1], labels[:, :-1].T
    agreement = np.mean([_matched(fold, final, k) == final for fold in folds], axis=0)
    return Grouping(
        labels=np.where(there, final, -1),
        sizes=np.bincount(final[there], minlength=k),
        profile=_profile(found.fits[j], problem, scaling) if found.fits else None,
        features=clients.schema.feature_names,
        stability=float(np.mean([adjusted_rand(fold[there], final[there]) for fold in folds])),
        agreement=np.where(there, agreement, np.nan),
        margin=np.where(there, found.margin[j].numpy(), np.nan),
        map=None if place is None else place.numpy(),
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
