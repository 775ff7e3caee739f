# SPDX-License-Identifier: Apache-2.0
"""Folds that a minority of clients cannot move far: coordinate-wise trimmed means and medians, and means of who is near.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning", ICML 2018; and, from the median on, reweighted
means (Huber, "Robust Statistics", 1981): clients count in full, unless they are far from the middle beside others, or point
the other way by more than chance explains, in this round or in all rounds so far: flipped signs are hardly seen in a single
round in which clients differ much. All need every client's own value, which leaves its worker: sums alone will not do
(docs/privacy.md).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.protocol import Ask, ByCluster, ClusterSums, Fold, Individual, RowProduct, Tensors, WeightedMean

__all__ = ["MEDIAN", "Trimmed", "TrimmedByCluster", "plainly"]

MEDIAN = 0.5 - 1e-9  # of the weight is trimmed at either end: the middle is left, or the mean of the two middle ones
_NEAR, _FAR = (
    3.0,
    6.0,
)  # usual distances from the middle: up to one a client counts in full, beyond the other not at all
_OPPOSED = 2.0  # standard deviations of a random direction's cosine: who points the other way by so much does not count
_STEPS = 5  # of reweighting
_ALWAYS_OPPOSED = 3.0  # likewise over all rounds together
_AS_OTHERS_AGREE = 0.5  # and by so much of what most clients agree


@dataclass(frozen=True)
class Trimmed(Individual):
    """Mean over clients, in every coordinate without the lowest and the highest `share` of the weight.

    Attributes
    ----------
    by : str
        Field of the reply with the weights [S, C].
    share : float
        Below a half; `MEDIAN` makes it the weighted median.
    near : bool
        Whether that is only where one begins: the mean is over clients, each as far as it is near to the middle.
    """

    by: str = "weight"
    share: float = MEDIAN
    near: bool = False

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
        return self.finish_knowing(part, _nothing(part))[0]

    def finish_knowing(self, part: Tensors, past: Tensor) -> tuple[Tensor, Tensor]:
        """Trim, and add to the sums of how clients agreed and of rounds.  past [C, 2]"""
        return _middle(part["stack"], part["weight"], self.share, past if self.near else None)


@dataclass(frozen=True)
class TrimmedByCluster(Individual):
    """The same for every cluster: its clients by their shares [S, C, K].

    The value is one per client [S, C, ...], or one per client and cluster [S, C, K, ...] with `per_cluster`.
    """

    by: str = "share"
    share: float = MEDIAN
    per_cluster: bool = False
    near: bool = False

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
        return self.finish_knowing(part, _nothing(part))[0]

    def finish_knowing(self, part: Tensors, past: Tensor) -> tuple[ClusterSums, Tensor]:
        """Trim, and add to the sums of how clients agreed with those of their clusters and of rounds.  past [C, 2]"""
        value, weight = part["stack"], part["weight"]  # [C, ...], [C, K]
        sums, now = [], past
        for k in range(weight.shape[1]):
            own, past_of_own = value[:, k] if self.per_cluster else value, past if self.near else None
            middle, after = _middle(own, weight[:, k], self.share, past_of_own)
            sums.append(middle * weight[:, k].sum().to(value.dtype))
            now = now + (after - past) * (weight[:, k] / weight.sum(1).clamp(min=1e-300))[:, None]
        return ClusterSums(torch.stack(sums), weight.sum(0)), now


def plainly(ask: Ask) -> Ask:
    """The ask with means where it has trimmed ones: what client functions declare."""
    plain = {name: how.plain for name, how in ask.fold.items() if isinstance(how, Trimmed | TrimmedByCluster)}
    return replace(ask, fold={**ask.fold, **plain}) if plain else ask


def _kept(value: "Tensor | RowProduct", weight: Tensor) -> Tensors:
    return {"stack": value.formed() if isinstance(value, RowProduct) else value, "weight": weight.to(torch.float64)}


def _nothing(part: Tensors) -> Tensor:
    return torch.zeros(len(part["stack"]), 2, dtype=torch.float64)


def _middle(value: Tensor, weight: Tensor, share: float, past: Tensor | None) -> tuple[Tensor, Tensor]:
    """The middle, of who is near where there is a past, and the past with this round.

    [C, ...], [C], [C, 2] -> [...], [C, 2]
    """
    there = weight > 0
    now = _nothing({"stack": value}) if past is None else past.clone()
    if not bool(there.any()):
        return value.new_zeros(value.shape[1:]), now
    flat = value[there].flatten(1).to(torch.float64)
    made = _trimmed(flat, weight[there], share)
    if past is not None:
        made, agreed = _mean_of_near(flat, weight[there], made, past[there])
        now[there] += torch.stack([agreed, torch.ones_like(agreed)], 1)
    return made.to(value.dtype).view(value.shape[1:]), now


def _trimmed(value: Tensor, weight: Tensor, share: float) -> Tensor:
    """[C, P], [C] -> [P]"""
    ordered, order = value.sort(0)
    w = (weight / weight.sum())[order]
    above = w.cumsum(0)
    inside = (above.clamp(max=1 - share) - (above - w).clamp(min=share)).clamp(min=0)
    return (inside * ordered).sum(0) / inside.sum(0)


def _mean_of_near(value: Tensor, weight: Tensor, middle: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Reweight clients by distance and direction, from the middle.  [C, P], [C], [P], [C, 2] -> [P], how they agree [C]"""
    weight, agreed = weight * _trusted(past), weight.new_zeros(len(weight))
    for _ in range(_STEPS):
        distance = torch.linalg.vector_norm(value - middle, dim=1)
        usual = _trimmed(distance[:, None], weight, MEDIAN)
        within = (_FAR - distance / usual.clamp(min=1e-300)) / (_FAR - _NEAR)
        agreed = torch.nn.functional.cosine_similarity(value, middle[None], dim=1) * value.shape[1] ** 0.5
        counts = weight * within.clamp(0, 1) * (agreed + _OPPOSED).clamp(0, 1)
        if not float(counts.sum()) > 0:
            break
        middle = (counts[:, None] * value).sum(0) / counts.sum()
    return middle, agreed


def _trusted(past: Tensor) -> Tensor:
    """How far clients count by what they did so far: not if they oppose others round after round.  [C, 2] -> [C]

    A client that others never agree with has a sum near to zero, of as many standard normal variables as there were rounds.
    Where most agree clearly, one that is merely different may oppose them a little.
    """
    agreed = past[:, 0] / past[:, 1].clamp(min=1).sqrt()
    bound = max(_ALWAYS_OPPOSED, _AS_OTHERS_AGREE * float(agreed.median()))
    return (agreed + bound + 1).clamp(0, 1)
