# SPDX-License-Identifier: Apache-2.0
"""Coefficients of linear models in the data's own units: a table with a row for each feature, for documents and reports.

Models are fitted to scaled features, here as [O, D + 1]: the weights of each output, and its intercept last. What follows is
linear in them, so that directions in which clients differ are turned into the data's units as models are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.random_effects import Prior
from coterie.data.schema import Schema
from coterie.methods.mixed.design import INTERCEPT
from coterie.models import Dense
from coterie.models.outcomes import OUTCOMES, metric_of

__all__ = ["cluster_coefficients", "coefficient_table", "own_units", "prior_coefficients", "weights_in"]

MOST_ROWS = 40  # of the table; of more, those with the largest coefficients
_WHOLE = 1e-6  # how near to 1 the shares of a column's levels must be, that every row is known to have one

_Kind = Literal["one", "clusters", "spread", "directions"]


def cluster_coefficients(model: object, theta: Tensor, schema: Schema, scaling: Scaling) -> dict[str, Any] | None:
    """The coefficients of K models, a column each; None where they are no linear models of features.  theta [K, P]"""
    if not isinstance(model, Dense) or not model.is_linear or scaling.degree > 1:
        return None
    ((weight, bias),) = model.unpack(theta.double())
    bias = torch.zeros_like(weight[..., 0]) if bias is None else bias
    weights = torch.cat([weight, bias[..., None]], -1)
    if model.loss in OUTCOMES:  # the other outputs are extra parameters, which no feature changes
        weights = weights[:, :1]
    return coefficient_table(weights, schema, scaling)


def coefficient_table(weights: Tensor, schema: Schema, scaling: Scaling) -> dict[str, Any]:
    """The coefficients of K models of scaled features, a column each.  weights [K, O, D + 1]"""
    made = _Layout(schema, scaling)
    return made.table("one" if len(weights) == 1 else "clusters", made.models(weights))


def prior_coefficients(
    structure: str, prior: Prior, problem: Problem, schema: Schema, scaling: Scaling
) -> dict[str, Any] | None:
    """The common model, and how clients' models vary around it: standard deviations, or directions of low rank.

    None for models that have nothing in common, and for products of features.
    """
    if structure not in ("shrunk", "representation") or scaling.degree > 1:
        return None
    made, root = _Layout(schema, scaling), prior.root[-1, 0].double()  # [P, R]
    common = made.models(weights_in(prior.mean[-1].double(), problem))
    if structure == "shrunk":
        spread = made.directions(weights_in(root.T, problem)).square().sum(0, keepdim=True).sqrt()
        return made.table("spread", torch.cat([common, spread]))
    # Whatever basis EM has ended in, the principal axes of clients' models are the same.
    axes, size, _ = torch.linalg.svd(root, full_matrices=False)
    there = size > 1e-9 * size.max().clamp(min=1e-300)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    loadings = made.directions(weights_in((axes * size)[:, there].T, problem))
    share = size[there].square() / size[there].square().sum()
    return made.table("directions", torch.cat([common, loadings]), shares=share.tolist())


def weights_in(theta: Tensor, problem: Problem) -> Tensor:
    """Weights and intercepts, without extra parameters.  [K, P] -> [K, O, D + 1]"""
    return theta[:, : problem.n_parameters - problem.n_extra].reshape(len(theta), problem.n_outputs, -1)


def own_units(weights: Tensor, scaling: Scaling) -> Tensor:
    """Models of scaled features as models of the data.  [..., D + 1]"""
    made = _changes(weights, scaling)
    made[..., -1] += scaling.y_mean
    return made


def _changes(weights: Tensor, scaling: Scaling) -> Tensor:
    """Differences of models, likewise: the target's mean is in all of them."""
    mean, scale = scaling.mean.double().flatten(), scaling.scale.double().flatten()
    slopes = scaling.y_scale * weights[..., :-1] / scale
    intercept = scaling.y_scale * weights[..., -1] - (slopes * mean).sum(-1)
    return torch.cat([slopes, intercept[..., None]], -1)


@dataclass(frozen=True)
class _Layout:
    """How models of these rows are laid out for readers."""

    schema: Schema
    scaling: Scaling

    def models(self, weights: Tensor) -> Tensor:
        """[K, O, D + 1] of scaled features -> [K, O', D + 1] of the data, against the first class and the first levels."""
        return self._against(own_units(weights, self.scaling))

    def directions(self, weights: Tensor) -> Tensor:
        """Differences of models, likewise."""
        return self._against(_changes(weights, self.scaling))

    def table(self, kind: _Kind, columns: Tensor, **more: Any) -> dict[str, Any]:
        """Lay columns [K, O', D + 1] out, the intercept first; of many rows the largest, per standard deviation."""
        names, places = self._names(columns.shape[1])
        values = columns.flatten(1).T[places]  # [rows, K]
        scale = torch.cat([self.scaling.scale.double().flatten(), torch.zeros(1, dtype=torch.float64)])
        sizes = values.abs().amax(1) * scale.repeat(columns.shape[1])[places]
        first = 0 if self._stratified else columns.shape[1]
        sizes[:first] = torch.inf
        kept = sizes.argsort(descending=True, stable=True)[: first + MOST_ROWS].sort().values.tolist()
        return {
            "kind": kind, "of": self._of, "names": [names[k] for k in kept], "values": values[kept].tolist(),
            "total": len(names), "baselines": [self.schema.feature_names[k] for k in self._first_levels],
            **more,
        }  # fmt: skip

    def _against(self, weights: Tensor) -> Tensor:
        """Compare classes with the first one, and levels with the first of their column.

        What all outputs, or all levels and the intercept, have in common changes no prediction: fits differ in it.
        """
        made = weights[:, 1:] - weights[:, :1] if weights.shape[1] > 1 else weights.clone()
        for at, levels in self._levels:
            base = made[..., at : at + 1].clone()
            made[..., at : at + levels] -= base
            made[..., -1:] += base
        return made

    @property
    def _levels(self) -> list[tuple[int, int]]:
        """Where the levels of columns begin, and how many there are; only of columns of which every row has a level."""
        found, at, share = [], 0, self.scaling.fill.double().flatten()
        for column in self.schema.columns:
            size = len(column.feature_names)
            if column.kind == "categorical" and abs(float(share[at : at + size].sum()) - 1) < _WHOLE:
                found.append((at, size))
            at += size
        return found

    @property
    def _first_levels(self) -> list[int]:
        return [at for at, _ in self._levels]

    def _names(self, outputs: int) -> tuple[list[str], list[int]]:
        """Names of the rows, the intercepts first, and where they lie in [O', D + 1]."""
        features = [INTERCEPT, *self.schema.feature_names]
        wide, left_out = len(features), {1 + at for at in self._first_levels}
        if self._stratified:
            left_out.add(0)
        names, places = list[str](), list[int]()
        for k in (k for k in range(wide) if k not in left_out):
            names += self._by_class(features[k], outputs)
            places += [o * wide + (k - 1) % wide for o in range(outputs)]
        return names, places

    @property
    def _stratified(self) -> bool:
        """Whether every client has a baseline hazard of its own, so that intercepts mean nothing."""
        return self.schema.outcome is not None and metric_of(self.schema.outcome) == "concordance"

    def _by_class(self, name: str, outputs: int) -> Sequence[str]:
        return [name] if outputs == 1 else [f"{name}, {one}" for one in self.schema.classes[1:]]

    @property
    def _of(self) -> str:
        """What a unit of a feature changes."""
        schema, target = self.schema, self.schema.target or "target"
        if schema.outcome is not None:
            odd = {"concordance": "the log hazard", "accuracy": f"the log odds of a higher {target}"}
            return odd.get(metric_of(schema.outcome), f"the logarithm of {target}")
        if schema.task != "classification":
            return target
        first = schema.classes[0]
        if len(schema.classes) == 2:
            return f"the log odds of {schema.classes[1]} against {first}"
        return f"the log odds of each class against {first}"
