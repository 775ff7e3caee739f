# SPDX-License-Identifier: Apache-2.0
"""Outcomes: likelihoods of targets that are counts, positive and skewed numbers, or classes in an order.

A model has a linear predictor eta for every row, and extra parameters that all rows share: a dispersion, a shape, a spread,
or thresholds. Both are outputs of the model, the extra ones the same for every row: [..., 1 + Q]. Each outcome gives minus
the log-likelihood of a row (with all constants, so that outcomes can be compared), its first derivatives by the outputs, and
second derivatives that are exact where the first ones sum to zero, and never negative elsewhere; so Newton's method ends at
the maximum of the likelihood.

Cox's partial likelihood, whose rows are not independent, is in `models/cox.py`.
"""

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from coterie.models.cox import Cox
from coterie.models.ordinal import Ordinal

__all__ = ["OUTCOMES", "ROWS", "Outcome", "RowOutcome", "explained", "measured", "metric_of", "outcome_of"]

_FAR = 50.0  # the linear predictor counts as no larger: its exponential stays a number
_ZERO = 1e-15  # stands for a mean of zero
_LEAST = 1e-300  # of a positive target: padding is zero
_FLAT, _STEEP = -12.0, 12.0  # the logarithm of an extra parameter counts as no smaller and no larger
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Outcome(Protocol):
    """What a target is. Outputs are [..., 1 + Q], targets [...], where the last axis is that of a client's rows."""

    metric: str  # "rmse", "accuracy" or "concordance"

    def n_extra(self, n_classes: int) -> int:
        """Q: how many extra parameters there are."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the log-likelihood of every row.  [...]"""

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Derivatives of its sum by the outputs.  [..., 1 + Q]"""

    def mean(self, outputs: Tensor) -> Tensor:
        """What is predicted, in the target's own units; of classes, their number; of times, hazard ratios.  [...]"""

    def hit(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Squared errors of predictions, or whether they are right; of times, the client's concordance.  [...]"""

    def least(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of rows that are predicted exactly, with the same extra parameters.  [...]"""


class RowOutcome(Outcome, Protocol):
    """An outcome whose rows are independent. Statistics have S numbers for each row, the first is 1."""

    def second(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Second derivatives of the loss.  [..., 1 + Q, 1 + Q]"""

    def stiffening(self, outputs: Tensor, y: Tensor) -> Tensor:
        """By how much the second derivative by eta grows with each extra parameter.  [..., Q]"""

    def statistics(self, y: Tensor, n_classes: int) -> Tensor:
        """What of every row's target is summed up to begin with.  [..., S]"""

    def start(self, sums: Tensor) -> Tensor:
        """Outputs of the model that knows no features, about.  [..., S] -> [..., 1 + Q]"""


class _Numbers(ABC):
    """Outcomes with a logarithmic link, whose mean is a number."""

    metric = "rmse"

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the log-likelihood of every row."""

    def least(self, outputs: Tensor, y: Tensor) -> Tensor:
        exact = y.clamp(min=_ZERO).log().expand(outputs.shape[:-1])[..., None]
        return self.loss(torch.cat([exact, outputs[..., 1:]], -1), y)

    def hit(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (self.mean(outputs) - y).square()

    def mean(self, outputs: Tensor) -> Tensor:
        return _eta(outputs).exp()


class Poisson(_Numbers):
    """Counts whose variance is their mean exp(eta)."""

    def n_extra(self, n_classes: int) -> int:
        return 0

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        eta = _eta(outputs)
        return eta.exp() - y * eta + torch.lgamma(y + 1)

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (_eta(outputs).exp() - y)[..., None]

    def second(self, outputs: Tensor, y: Tensor) -> Tensor:
        return _eta(outputs).exp()[..., None, None]

    def stiffening(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs[..., 1:]

    def statistics(self, y: Tensor, n_classes: int) -> Tensor:
        return torch.stack([torch.ones_like(y), y], -1)

    def start(self, sums: Tensor) -> Tensor:
        n, y = sums.unbind(-1)
        return _log_mean(y, n)[..., None]


class NegativeBinomial(_Numbers):
    """Counts with mean exp(eta) and variance mean + alpha mean^2; the extra parameter is log alpha."""

    def n_extra(self, n_classes: int) -> int:
        return 1

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        z, r = self._parts(outputs)
        known = torch.lgamma(r) + torch.lgamma(y + 1) - torch.lgamma(y + r)
        return known - y * z + (y + r) * softplus(z)

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        z, r = self._parts(outputs)
        by_eta = (y + r) * z.sigmoid() - y
        return torch.stack([by_eta, r * (torch.digamma(y + r) - torch.digamma(r)) + by_eta - r * softplus(z)], -1)

    def second(self, outputs: Tensor, y: Tensor) -> Tensor:
        z, r = self._parts(outputs)
        s = z.sigmoid()
        by_eta = (y + r) * s * (1 - s)
        gap = r * (torch.digamma(y + r) - torch.digamma(r))
        steep = r.square() * (torch.polygamma(1, r) - torch.polygamma(1, y + r))
        return _diagonal(by_eta, steep - gap - 2 * r * s + by_eta + r * softplus(z))  # the mixed one has mean 0

    def stiffening(self, outputs: Tensor, y: Tensor) -> Tensor:
        z, r = self._parts(outputs)
        s = z.sigmoid()
        return (s * (1 - s) * ((y + r) * (1 - 2 * s) - r))[..., None]

    def statistics(self, y: Tensor, n_classes: int) -> Tensor:
        return torch.stack([torch.ones_like(y), y, y.square()], -1)

    def start(self, sums: Tensor) -> Tensor:
        n, y, square = sums.unbind(-1)
        mean = (y / n.clamp(min=1)).clamp(min=1e-3)
        variance = square / n.clamp(min=1) - mean.square()
        return torch.stack([_log_mean(y, n), ((variance - mean) / mean.square()).clamp(0.01, 100.0).log()], -1)

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """eta + log alpha, and 1 / alpha."""
        a = outputs[..., 1].clamp(_FLAT, _STEEP)
        return _eta(outputs) + a, (-a).exp()


class Gamma(_Numbers):
    """Positive numbers with mean exp(eta), and a variance in proportion to its square; the extra parameter is log shape."""

    def n_extra(self, n_classes: int) -> int:
        return 1

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        eta, k, log_y = _eta(outputs), self._shape(outputs), _log(y)
        return torch.lgamma(k) - k * k.log() + k * eta - (k - 1) * log_y + k * y * (-eta).exp()

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        eta, k, log_y = _eta(outputs), self._shape(outputs), _log(y)
        ratio = y * (-eta).exp()
        return torch.stack([k * (1 - ratio), k * (torch.digamma(k) - k.log() - 1 + eta - log_y + ratio)], -1)

    def second(self, outputs: Tensor, y: Tensor) -> Tensor:
        eta, k = _eta(outputs), self._shape(outputs)
        by_eta = k * y * (-eta).exp()
        return _diagonal(by_eta, (k.square() * torch.polygamma(1, k) - k).expand_as(by_eta))

    def stiffening(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (self._shape(outputs) * y * (-_eta(outputs)).exp())[..., None]

    def statistics(self, y: Tensor, n_classes: int) -> Tensor:
        return torch.stack([torch.ones_like(y), y, _log(y)], -1)

    def start(self, sums: Tensor) -> Tensor:
        n, y, log_y = sums.unbind(-1)
        gap = (_log_mean(y, n) - log_y / n.clamp(min=1)).clamp(1e-6, 50.0)
        shape = (3 - gap + ((gap - 3).square() + 24 * gap).sqrt()) / (12 * gap)  # Minka's first step
        return torch.stack([_log_mean(y, n), shape.log()], -1)

    def _shape(self, outputs: Tensor) -> Tensor:
        return outputs[..., 1].clamp(_FLAT, _STEEP).exp()


class LogNormal(_Numbers):
    """Positive numbers whose logarithm is normal around eta; the extra parameter is the log of its deviation.

    Predictions are means, exp(eta + sigma^2 / 2), not medians.
    """

    def n_extra(self, n_classes: int) -> int:
        return 1

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        log_y = _log(y)
        return (
            0.5 * (log_y - outputs[..., 0]).square() * self._precision(outputs)
            + outputs[..., 1]
            + log_y
            + _HALF_LOG_2PI
        )

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        gap, precision = _log(y) - outputs[..., 0], self._precision(outputs)
        return torch.stack([-gap * precision, 1 - gap.square() * precision], -1)

    def second(self, outputs: Tensor, y: Tensor) -> Tensor:
        precision = self._precision(outputs)
        return _diagonal(precision, torch.full_like(precision, 2.0))

    def stiffening(self, outputs: Tensor, y: Tensor) -> Tensor:
        return -2 * self._precision(outputs)[..., None]

    def mean(self, outputs: Tensor) -> Tensor:
        return (outputs[..., 0] + 0.5 / self._precision(outputs)).clamp(-_FAR, _FAR).exp()

    def statistics(self, y: Tensor, n_classes: int) -> Tensor:
        log_y = _log(y)
        return torch.stack([torch.ones_like(y), log_y, log_y.square()], -1)

    def start(self, sums: Tensor) -> Tensor:
        n, log_y, square = sums.unbind(-1)
        mean = log_y / n.clamp(min=1)
        return torch.stack([mean, 0.5 * (square / n.clamp(min=1) - mean.square()).clamp(min=1e-12).log()], -1)

    def _precision(self, outputs: Tensor) -> Tensor:
        return (-2 * outputs[..., 1].clamp(_FLAT, _STEEP)).exp()


def _eta(outputs: Tensor) -> Tensor:
    return outputs[..., 0].clamp(-_FAR, _FAR)


def _log(y: Tensor) -> Tensor:
    return y.clamp(min=_LEAST).log()


def _log_mean(total: Tensor, n: Tensor) -> Tensor:
    """Of a target that may be zero everywhere."""
    return (total / n.clamp(min=1)).clamp(min=1e-3).log()


def _diagonal(*values: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack(values, -1))


ROWS: dict[str, RowOutcome] = {
    "poisson": Poisson(),
    "negative-binomial": NegativeBinomial(),
    "gamma": Gamma(),
    "log-normal": LogNormal(),
    "ordinal": Ordinal(),
}
OUTCOMES: dict[str, Outcome] = {**ROWS, "cox": Cox(efron=True), "cox-breslow": Cox(efron=False)}


def measured(name: str, outputs: Tensor, y: Tensor) -> dict[str, float]:
    """What is measured of independent rows beside the metric: explained deviance, or the ranked probability score."""
    outcome = ROWS[name]
    if isinstance(outcome, Ordinal):
        return {"ranked_probability_score": float(outcome.ranked_score(outputs, y).mean())}
    return {"deviance_explained": explained(name, outputs, y)}


def outcome_of(name: str) -> Outcome:
    """The outcome of a name."""
    return OUTCOMES[name]


def explained(name: str, outputs: Tensor, y: Tensor) -> float:
    """The share of the deviance of numbers that a model explains: 1 - deviance / deviance of one mean for all rows."""
    outcome = ROWS[name]
    alone = outcome.start(outcome.statistics(y, 0).sum(0))[:1]  # eta of a model that knows no features
    one = torch.cat([alone.expand(len(y), 1), outputs[:, 1:]], -1)
    least = outcome.least(outputs, y).sum()
    return float(1 - (outcome.loss(outputs, y).sum() - least) / (outcome.loss(one, y).sum() - least).clamp(min=1e-300))


def metric_of(loss: str) -> str:
    """What models with this loss are measured by: "rmse", "accuracy" or "concordance"."""
    known = {"squared": "rmse", "cross_entropy": "accuracy"}
    return known[loss] if loss in known else OUTCOMES[loss].metric
