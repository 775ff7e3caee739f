# SPDX-License-Identifier: Apache-2.0
"""Rounds of any algorithm that averages updates, differentially private for clients.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, with the number of
clients that is expected in place of their weight; clips as in Andrew, Thakkar, McMahan, Ramaswamy, "Differentially Private
Learning with Adaptive Clipping", NeurIPS 2021, for the median.

Departure: a count below a quarter of what a cluster would have if all were alike counts as that, so that noise in small
counts cannot throw a model away. What an algorithm asks beside updates and cluster sizes is not asked: there is no loss.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from coterie.protocol import WITHIN, Algorithm, Ask, ByCluster, ClusterSums, Noise, Replies, Save, Sum

__all__ = ["Rounds", "State", "privately"]

T = TypeVar("T")

_RATE = 0.3  # of the clip's logarithm in a round, at most
_MOST = 2.0  # times the first clip: else noise makes updates longer, and these the clip and the noise
_TOLD = 0.05  # the part of a round's cost that is for how many were clipped
_COUNTED = 0.15  # and for the sizes of clusters
_FLOOR = 0.25  # of a cluster of average size


@dataclass(frozen=True)
class Rounds:
    """How rounds are noised.

    Attributes
    ----------
    multiplier : float
        Of every round's answer.
    clip : float
        Length to which updates are shortened, at first.
    adapts : bool
        Whether the clip follows the median of updates' lengths.
    n_clients : int
        M.
    sampling : float
        Probability with which a client takes part.
    """

    multiplier: float
    clip: float
    adapts: bool
    n_clients: int
    sampling: float = 1.0

    @property
    def expected(self) -> float:
        """Clients in a round, on average."""
        return self.sampling * self.n_clients


@dataclass(frozen=True)
class State(Generic[T]):
    """After a round."""

    inner: T
    clip: float


def privately(state: "State[Any] | None", program: Callable[[Any], Algorithm], *, rounds: Rounds) -> Algorithm:
    """Run an algorithm that asks for `update`s, with bounded updates and noised sums in place of means."""
    clip = rounds.clip if state is None else state.clip
    inner = program(None if state is None else state.inner)
    replies: Replies | None = None
    while True:
        try:
            wanted = inner.send(replies)
        except StopIteration as end:
            return State(end.value, clip)
        replies = None
        if isinstance(wanted, Save):
            yield Save(State(wanted.state, clip), _said(wanted.info, clip))
            continue
        got = yield noised(wanted, rounds, clip)
        assert got is not None
        if not got.values:
            replies = got
            continue
        replies = replace(got, values=_answers(wanted, got, rounds))
        if rounds.adapts:
            clip *= math.exp(-_RATE * max(-1.0, min(1.0, float(got[WITHIN]) / rounds.expected)))
            clip = min(clip, _MOST * rounds.clip)


def noised(ask: Ask, rounds: Rounds, clip: float) -> Ask:
    """Ask for sums of bounded updates, and for nothing else."""
    how = ask.fold["update"]
    fold: dict[str, Any] = {"update": how if isinstance(how, ByCluster) else Sum()}
    bounds, weights = {"update": clip}, {"update": 1.0}
    if isinstance(how, ByCluster):
        bounds[how.share], weights[how.share] = 1.0, _COUNTED
        weights["update"] -= _COUNTED
    if rounds.adapts:
        fold[WITHIN], bounds[WITHIN], weights[WITHIN] = Sum(), 1.0, _TOLD
        weights["update"] -= _TOLD
    noise = Noise(rounds.multiplier, bounds, weights, rounds.sampling, "training")
    return replace(ask, fold=fold, limits={}, noise=noise)


def _answers(ask: Ask, got: Replies, rounds: Rounds) -> dict[str, Any]:
    """What the algorithm takes for means and counts."""
    found = got["update"]
    out: dict[str, Any] = {"loss": torch.tensor(torch.nan, dtype=torch.float64), "n": torch.tensor(rounds.n_clients)}
    if not isinstance(found, ClusterSums):
        return out | {"update": found / rounds.expected}
    least = _FLOOR * rounds.expected / len(found.weight)
    count: Tensor = found.weight.clamp(min=0)
    sums = ClusterSums(found.sum, count.clamp(min=least))
    return out | {"update": sums, "count": count.round().clamp(min=1).to(torch.int64), "moved": torch.tensor(0)}


def _said(info: Mapping[str, Any], clip: float) -> dict[str, Any]:
    """What is known of a round."""
    kept = {name: value for name, value in info.items() if name in ("sizes", "events") and value}
    return {**kept, "loss": None, "clip": clip} if "loss" in info else kept
