# SPDX-License-Identifier: Apache-2.0
"""Cox's model of times to an event, stratified by client: every client has a baseline hazard of its own.

The partial likelihood compares rows with those of the same client that were still at risk, so it is a sum over clients, and
so are its derivatives. Ties are treated as by Efron (JASA 1977), or as by Breslow (1974).

A target is the time of the event, or minus the time until which it had not happened; zero is padding. The last axis is that
of a client's rows.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

__all__ = ["Cox", "Risk", "concordance"]

_FAR = 50.0  # the linear predictor counts as no larger
_TOGETHER = 16  # rows that are compared with all others at once


class Cox:
    """Times to an event; outputs are log hazard ratios."""

    metric = "concordance"

    def __init__(self, *, efron: bool) -> None:
        self.efron = efron

    def n_extra(self, n_classes: int) -> int:
        return 0

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return self._risk(outputs, y).losses

    def first(self, outputs: Tensor, y: Tensor) -> Tensor:
        risk = self._risk(outputs, y)
        return (risk.hazards - risk.events)[..., None]

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs[..., 0].clamp(-_FAR, _FAR).exp()

    def hit(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The client's concordance, in each of its rows."""
        found = concordance(outputs[..., 0], y, (y != 0).to(outputs.dtype))
        return found[..., None].expand(outputs.shape[:-1])

    def least(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Of a model that knows nothing: what may be gained depends on how many are at risk."""
        return self.loss(torch.zeros_like(outputs), y)

    def _risk(self, outputs: Tensor, y: Tensor) -> "Risk":
        return Risk(outputs[..., 0], y, (y != 0).to(outputs.dtype), self.efron)


@dataclass(frozen=True)
class Risk:
    """Who is at risk with whom, and what that says of log hazard ratios.

    Attributes
    ----------
    eta : Tensor
        [..., N] log hazard ratios.
    y : Tensor
        [..., N] times, below zero where there was no event.
    mask : Tensor
        [..., N] 1 for rows that count.
    efron : bool
        How ties are treated.
    """

    eta: Tensor
    y: Tensor
    mask: Tensor
    efron: bool

    @cached_property
    def _order(self) -> Tensor:
        """The longest time first."""
        order = self.y.abs().argsort(dim=-1, descending=True, stable=True)
        return order.expand(self._shape)

    @property
    def _shape(self) -> torch.Size:
        return _shape(self.eta, self.y, self.mask)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """The first and the last row, in that order, with the same time."""
        time = self._sorted(self.y.abs())
        n, place = time.shape[-1], torch.arange(time.shape[-1])
        new = torch.ones_like(time, dtype=torch.bool)
        new[..., 1:] = time[..., 1:] != time[..., :-1]
        last = torch.ones_like(new)
        last[..., :-1] = new[..., 1:]
        first = torch.where(new, place, 0).cummax(-1).values
        return first, torch.where(last, place, n - 1).flip(-1).cummin(-1).values.flip(-1)

    def _sorted(self, values: Tensor) -> Tensor:
        return values.expand(self._shape).gather(-1, self._order)

    def _back(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter(-1, self._order, values)

    def _until(self, values: Tensor) -> Tensor:
        """Sums over all rows at risk: of this time, or a longer one.  [..., N]"""
        return values.cumsum(-1).gather(-1, self._ends[1])

    def _later(self, values: Tensor) -> Tensor:
        """Sums over rows of longer times only."""
        return (values.cumsum(-1) - values).gather(-1, self._ends[0])

    @cached_property
    def events(self) -> Tensor:
        """[..., N] 1 for rows with an event that count."""
        return ((self.y > 0) * self.mask).expand(self._shape)

    @cached_property
    def _shift(self) -> Tensor:
        """[..., 1] so that exponentials neither overflow nor vanish."""
        return torch.where(self.mask > 0, self._eta, -_FAR).amax(-1, keepdim=True)

    @cached_property
    def _eta(self) -> Tensor:
        return self.eta.clamp(-_FAR, _FAR).expand(self._shape)

    @cached_property
    def weights(self) -> Tensor:
        """[..., N] hazards, up to a factor for every client; sorted."""
        return self._sorted((self._eta - self._shift).exp() * self.mask)

    @cached_property
    def _happened(self) -> Tensor:
        return self._sorted(self.events)

    @cached_property
    def share(self) -> Tensor:
        """[..., N] the share of those with an event at the same time that is no longer at risk: 0 without ties; sorted."""
        if not self.efron:
            return torch.zeros_like(self._happened)
        before = self._happened.cumsum(-1) - self._happened - self._later(self._happened)
        return before / self.ties(self._happened).clamp(min=1)

    def ties(self, values: Tensor) -> Tensor:
        """Sums over rows of the same time."""
        return self._until(values) - self._later(values)

    @cached_property
    def at_risk(self) -> Tensor:
        """[..., N] total hazard of those at risk when the row has its event; 1 where it has none; sorted."""
        total = self._until(self.weights) - self.share * self.ties(self.weights * self._happened)
        return torch.where(self._happened > 0, total, 1.0)

    @cached_property
    def losses(self) -> Tensor:
        """[..., N] minus the logarithm of the partial likelihood, row by row."""
        gap = self.at_risk.log() + self._shift - self._sorted(self._eta)
        return self._back(self._happened * gap)

    @cached_property
    def _hazards(self) -> Tensor:
        each = self._happened / self.at_risk
        shorter = each.sum(-1, keepdim=True) - self._later(each)  # all events until this time
        return self.weights * (shorter - self._happened * self.ties(each * self.share))

    @cached_property
    def hazards(self) -> Tensor:
        """[..., N] the events that were to be expected of every row."""
        return self._back(self._hazards)

    def hessian(self, x: Tensor) -> Tensor:
        """Second derivatives by parameters, of which x [..., N, D] are the features.  [..., D, D]"""
        place = self._order[..., None].expand(*self._order.shape, x.shape[-1])
        x = x.expand(*self._shape, x.shape[-1]).gather(-2, place)
        weighted = x * self.weights[..., None]
        at_end = self._ends[1][..., None].expand_as(x)
        mean = weighted.cumsum(-2).gather(-2, at_end)
        if self.efron:
            gone = weighted * self._happened[..., None]
            total = gone.cumsum(-2)
            start = self._ends[0][..., None].expand_as(x)
            mean = mean - self.share[..., None] * (total.gather(-2, at_end) - (total - gone).gather(-2, start))
        mean = mean / self.at_risk[..., None] * self._happened[..., None]
        return (x * self._hazards[..., None]).transpose(-2, -1) @ x - mean.transpose(-2, -1) @ mean


def _shape(*values: Tensor) -> torch.Size:
    """What all of them are as large as."""
    return torch.Size(np.broadcast_shapes(*(tuple(value.shape) for value in values)))


def concordance(eta: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The share of pairs of which the one with the larger hazard has its event first; one half if there are no pairs.

    eta [..., N], y, mask -> [...]
    """
    shape = _shape(eta, y, mask)
    eta, y, mask = (value.expand(shape) for value in (eta, y, mask))
    time, event = y.abs(), (y > 0) & (mask > 0)
    right = pairs = torch.zeros(shape[:-1], dtype=eta.dtype)
    for start in range(0, shape[-1], _TOGETHER):
        part = slice(start, start + _TOGETHER)
        first, other = time[..., part, None], time[..., None, :]
        after = (first < other) | ((first == other) & (y[..., None, :] < 0))
        known = (event[..., part, None] & after) * mask[..., None, :]
        gap = eta[..., part, None] - eta[..., None, :]
        right = right + (known * ((gap > 0) + 0.5 * (gap == 0))).sum((-2, -1))
        pairs = pairs + known.sum((-2, -1))
    return torch.where(pairs > 0, right / pairs.clamp(min=1), 0.5)
