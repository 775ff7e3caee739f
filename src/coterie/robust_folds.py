# SPDX-License-Identifier: Apache-2.0
"""Folds that a minority of clients cannot move far: coordinate-wise trimmed means, and medians.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018. They need every client's own value,
which leaves its worker: sums alone will not do (docs/privacy.md).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.protocol import Ask, ByCluster, ClusterSums, Fold, Individual, RowProduct, Tensors, WeightedMean

__all__ = ["MEDIAN", "Trimmed", "TrimmedByCluster", "plainly"]

MEDIAN = 0.5 - 1e-9  # of the weight is trimmed at either end: the middle is left, or the mean of the two middle ones


@dataclass(frozen=True)
class Trimmed(Individual):
    """Mean over clients, in every coordinate without the lowest and the highest `share` of the weight.

    Attributes
    ----------
    by : str
        Field of the reply with the weights [S, C].
    share : float
        Below a half; `MEDIAN` makes it the weighted median.
    """

    by: str = "weight"
    share: float = MEDIAN

    @property
    def needs(self) -> tuple[str, ...]:
        """The weights."""
        return (self.by,)

    @property
    def plain(self) -> Fold:
        """What it takes the place of."""
        return WeightedMean(self.by)

    def part(self, value: "Tensor | RowProduct", reply: Tensors) -> Tensors:
        """Keep everything."""
        return _kept(value, reply[self.by])

    def finish(self, part: Tensors) -> Tensor:
        """Trim; with no weight at all, zero."""
        return _trimmed(part["stack"], part["weight"], self.share)


@dataclass(frozen=True)
class TrimmedByCluster(Individual):
    """The same for every cluster: its clients by their shares [S, C, K].

    The value is one per client [S, C, ...], or one per client and cluster [S, C, K, ...] with `per_cluster`.
    """

    by: str = "share"
    share: float = MEDIAN
    per_cluster: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The shares."""
        return (self.by,)

    @property
    def plain(self) -> Fold:
        """What it takes the place of."""
        return ByCluster(self.by, self.per_cluster)

    def part(self, value: "Tensor | RowProduct", reply: Tensors) -> Tensors:
        """Keep everything."""
        return _kept(value, reply[self.by])

    def finish(self, part: Tensors) -> ClusterSums:
        """Trim; the sum of a cluster is its trimmed mean times its weight."""
        value, weight = part["stack"], part["weight"]  # [C, ...], [C, K]
        sums = [
            _trimmed(value[:, k] if self.per_cluster else value, weight[:, k], self.share)
            * weight[:, k].sum().to(value.dtype)
            for k in range(weight.shape[1])
        ]
        return ClusterSums(torch.stack(sums), weight.sum(0))


def plainly(ask: Ask) -> Ask:
    """The ask with means where it has trimmed ones: what client functions declare."""
    plain = {name: how.plain for name, how in ask.fold.items() if isinstance(how, Trimmed | TrimmedByCluster)}
    return replace(ask, fold={**ask.fold, **plain}) if plain else ask


def _kept(value: "Tensor | RowProduct", weight: Tensor) -> Tensors:
    return {"stack": value.formed() if isinstance(value, RowProduct) else value, "weight": weight.to(torch.float64)}


def _trimmed(value: Tensor, weight: Tensor, share: float) -> Tensor:
    """[C, ...], [C] -> [...]"""
    there = weight > 0
    value, weight = value[there], weight[there]
    if not len(value):
        return value.new_zeros(value.shape[1:])
    ordered, order = value.flatten(1).sort(0)  # [C, P]
    w = (weight / weight.sum())[order]
    above = w.cumsum(0)
    inside = (above.clamp(max=1 - share) - (above - w).clamp(min=share)).clamp(min=0)
    made = (inside * ordered.to(torch.float64)).sum(0) / inside.sum(0)
    return made.to(value.dtype).view(value.shape[1:])
