# SPDX-License-Identifier: Apache-2.0
"""Who is asked, who answers in time, and what that takes: a policy and a clock meet a question."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from coterie import keys
from coterie.participation.clocks import Clock
from coterie.protocol import Ask

__all__ = ["Participants", "Participation", "fastest", "select_participants"]


@dataclass(frozen=True)
class Participants:
    """Who takes part.

    Attributes
    ----------
    asked, answered : Tensor
        Client numbers, ascending; who answers is among the asked.
    until : float
        Seconds that the server waits at least: a deadline that somebody missed.
    seconds : float
        How long it takes until the last answer that counts is there; 0 where no clock knows before.
    """

    asked: Tensor
    answered: Tensor
    until: float = 0.0
    seconds: float = 0.0

    def same_as(self, other: "Participants") -> bool:
        """Whether the same clients are asked and heard, in the same time."""
        alike = torch.equal(self.asked, other.asked) and torch.equal(self.answered, other.answered)
        return alike and self.seconds == other.seconds


class Participation(Protocol):
    """A policy: which of the clients are asked in a round, and which of those answer."""

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Choose among clients.

        Parameters
        ----------
        round_, seed : int
            What draws are keyed by, together with the clients.
        clients : Tensor
            [M] their keys.
        times : Tensor, optional
            [M] when each one's answer would be there; without, all answer at once.
        enough : int, optional
            How many answers are wanted. Who plans with it asks no more than that; the engine sees to it in any case.
        """


def select_participants(
    policy: Participation, clock: Clock | None, ask: Ask, *, round_: int, clients: Tensor, seed: int
) -> Participants:
    """Say who answers a question: those whom it names, or the first (`Ask.enough`) of those whom the policy chooses."""
    times = None if clock is None else clock.arrivals(round_, clients, seed, ask.work)  # [M]
    if ask.to is not None:
        made = Participants(ask.to, ask.to)
    else:
        made = policy.choose(round_, clients, seed, times, ask.enough)
        if ask.enough is not None and ask.enough <= len(made.answered):
            made = replace(made, answered=fastest(made.answered, ask.enough, round_, clients, seed, times), until=0.0)
    if times is None or not len(made.answered):
        return replace(made, seconds=made.until)
    return replace(made, seconds=max(float(times[made.answered].max()), made.until))


def fastest(ids: Tensor, n: int, round_: int, clients: Tensor, seed: int, times: Tensor | None) -> Tensor:
    """Take the first n of some clients, ascending by number; lots decide between those who are equally fast."""
    if n >= len(ids):
        return ids
    lots = keys.uniform(keys.key(seed, round_, "order", clients[ids]), 1)[:, 0]
    order = lots.argsort(stable=True)
    if times is not None:
        order = order[times[ids][order].argsort(stable=True)]
    return ids[order[:n]].sort().values
