# SPDX-License-Identifier: Apache-2.0
"""Classes in an order: the proportional odds model (McCullagh, 1980)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

__all__ = ["Ordinal"]

_FAR = 50.0  # the linear predictor counts as no larger
_NEAREST, _FARTHEST = -12.0, 5.0  # the logarithm of the distance of two thresholds counts as no smaller and no larger
_BEYOND = 1e6  # stands for an infinite threshold


class Ordinal:
    """Classes in an order, by proportional odds: P(y <= k) = 1 / (1 + exp(eta - t_k)), with t_0 = 0.

    Extra parameters are the logarithms of the thresholds' distances: there are two fewer than classes.
    """

    metric = "accuracy"

    def n_extra(self, n_classes: int) -> int:
        return max(n_classes - 2, 0)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        high, low = self._ends(outputs, y)
        return -(logsigmoid(high) + logsigmoid(-low) + (-torch.expm1(low - high)).log())

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        high, low = self._ends(outputs, y)
        between = 1 / torch.expm1(high - low)
        to_high, to_low = self._turned(outputs, y)
        return to_high * (-(-high).sigmoid() - between)[..., None] + to_low * (low.sigmoid() + between)[..., None]

    def second(self, outputs: Tensor, y: Tensor) -> Tensor:
        high, low = self._ends(outputs, y)
        between = 0.25 / torch.sinh(0.5 * (high - low)).square()
        to_high, to_low = self._turned(outputs, y)
        parts = zip((_bend(high), _bend(low), between), (to_high, to_low, to_high - to_low), strict=True)
        made: Tensor = sum(weight[..., None, None] * to[..., None] * to[..., None, :] for weight, to in parts)  # type: ignore[assignment]
        return made

    def stiffening(self, outputs: Tensor, y: Tensor) -> Tensor:
        ends, turned = self._ends(outputs, y), self._turned(outputs, y)
        made = [(_bend(end) * (1 - 2 * end.sigmoid()))[..., None] * to for end, to in zip(ends, turned, strict=True)]
        return (made[0] + made[1])[..., 1:]

    def mean(self, outputs: Tensor) -> Tensor:
        return self.probabilities(outputs).argmax(-1)

    def hit(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (self.mean(outputs) == y).to(outputs.dtype)

    def least(self, outputs: Tensor, y: Tensor) -> Tensor:
        return torch.zeros_like(outputs[..., 0])

    def ranked_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The ranked probability score: squared errors of P(y <= k), summed over k; lower is better.  [...]"""
        p = self.probabilities(outputs)
        there = one_hot(y.long(), p.shape[-1]).to(p.dtype)
        return (p - there).cumsum(-1)[..., :-1].square().sum(-1)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of every class.  [..., K]"""
        at_most = (self._thresholds(outputs) - outputs[..., 0].clamp(-_FAR, _FAR)[..., None]).sigmoid()
        return at_most.diff(dim=-1)

    def statistics(self, y: Tensor, n_classes: int) -> Tensor:
        there = one_hot(y.long().clamp(min=0), n_classes).to(torch.float64)
        return torch.cat([torch.ones_like(there[..., :1]), there], -1)

    def start(self, sums: Tensor) -> Tensor:
        counts = sums[..., 1:] + 0.5
        at_most = counts.cumsum(-1)[..., :-1] / counts.sum(-1, keepdim=True)
        place = at_most.logit()
        return torch.cat([-place[..., :1], place.diff(dim=-1).log()], -1)

    def _thresholds(self, outputs: Tensor) -> Tensor:
        """t_-1 = -infinity, t_0 = 0, ..., t_(K-1) = infinity.  [..., K + 1]"""
        gaps = outputs[..., 1:].clamp(_NEAREST, _FARTHEST).exp()
        zero = torch.zeros_like(outputs[..., :1])
        return torch.cat([zero - _BEYOND, zero, gaps.cumsum(-1), zero + _BEYOND], -1)

    def _ends(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The thresholds on both sides of a row's class, less eta."""
        at, eta = self._thresholds(outputs), outputs[..., 0].clamp(-_FAR, _FAR)
        y = y.long().expand(eta.shape)[..., None]
        return at.gather(-1, y + 1)[..., 0] - eta, at.gather(-1, y)[..., 0] - eta

    def _turned(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of the two ends by the outputs.  [..., 1 + Q] each"""
        gaps = outputs[..., 1:].clamp(_NEAREST, _FARTHEST).exp()
        y = y.long().expand(outputs.shape[:-1])[..., None]
        number = torch.arange(gaps.shape[-1])
        last = gaps.shape[-1] + 1
        finite = torch.cat([(y < last), (y > 0)], -1).to(gaps.dtype)
        by_eta = -torch.ones_like(outputs[..., :1])
        high, low = (torch.cat([by_eta, gaps * (number < end)], -1) for end in (y, y - 1))
        return high * finite[..., :1], low * finite[..., 1:]


def _bend(x: Tensor) -> Tensor:
    """Derivative of the logistic function."""
    s = x.sigmoid()
    return s * (1 - s)
