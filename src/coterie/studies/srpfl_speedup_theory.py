# SPDX-License-Identifier: Apache-2.0
"""What the proof of SRPFL's Theorem 4.6 counts: the contraction's rounds (Theorem 4.5), stages (Lemma B.1), and their time.

Tziotis et al., Appendix B. The contraction is taken as an equality, as in the proof,

    d+ = d sqrt(1 - a) + a / sqrt((1 - a) n / n0),

but no distance is above 1. Its rounds are no matter of chance: a plan says how many there are with how many clients, and
time is a sum over them of T_(n) + C, where T_(n) is what the n-th fastest client takes. The proof begins with FedRep at
distance 1 and with SRPFL at infinity, where its first stage has no tau_r; here both begin at 1, and `srpfl.Theory` says how
many rounds the first stage has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from coterie.algorithms.srpfl import Stage, State, Theory, exponential_order

__all__ = ["Law", "Plan", "everyone", "planned", "spent"]

Plan = list[tuple[int, int]]  # clients of a stage, and its rounds


@dataclass(frozen=True)
class Law:
    """How the distance to the planted representation falls in a round.

    Parameters
    ----------
    a : float
        A round leaves sqrt(1 - a) of what is above the limit.
    n0 : int
        Clients of the first stage.
    first_limit : float, optional
        What n0 clients reach in the limit; the theorem's by default, which is above 2 and says nothing about them.
    start : float
        The distance that everything begins at.
    """

    a: float
    n0: int
    first_limit: float | None = None
    start: float = 1.0

    @property
    def rate(self) -> float:
        """What a round leaves."""
        return math.sqrt(1 - self.a)

    def limit(self, n: int) -> float:
        """What n clients reach in the limit, after eq. (10)."""
        first = self.a / (self.rate * (1 - self.rate)) if self.first_limit is None else self.first_limit
        return first / math.sqrt(n / self.n0)

    def after(self, distance: float, n: int, rounds: int) -> float:
        """Where n clients are after some rounds, by the sum of the geometric series."""
        limit = self.limit(n)
        return min(1.0, limit + (distance - limit) * self.rate**rounds)

    def until(self, distance: float, n: int, target: float) -> int:
        """In how many rounds n clients reach a target above their limit."""
        if distance <= target:
            return 0
        limit = self.limit(n)
        return math.ceil(math.log((distance - limit) / (target - limit)) / -math.log(self.rate))

    def doubling_point(self, n: int, times: Sequence[float], communication: float) -> float:
        """X_(r+1), eq. (194): the distance from which on 2n clients make more progress in a second than n."""
        now, after = times[n - 1], times[2 * n - 1]
        return self.limit(n) * (1 + (now + communication) * (1 - math.sqrt(0.5)) / (after - now))


# -- plans ------------------------------------------------------------------------------------------------------------
def everyone(law: Law, n_clients: int, target: float) -> Plan:
    """FedRep: all clients in every round, as in Lemma B.3."""
    return [(n_clients, law.until(law.start, n_clients, target))]


def planned(
    law: Law, n_clients: int, target: float, *, stages: Literal["rounds", "distance"], communication: float = 0.0
) -> Plan:
    """SRPFL: say how many rounds it spends with how many clients.

    Parameters
    ----------
    law : Law
        The contraction.
    n_clients : int
        N, n0 times a power of two.
    target : float
        Above the limit of N clients and below that of N/2.
    stages : {"rounds", "distance"}
        Lemma B.1's tau_r in every stage, or its doubling points.
    communication : float
        C, which doubling points depend on and tau_r does not.
    """
    times, distance, n = exponential_order(n_clients), law.start, law.n0
    plan: Plan = []
    while n < n_clients:
        if stages == "rounds":
            rounds = Theory(law.a).rounds(Stage(n, n / 2, 2 * n, n_clients, State(None, torch.zeros(0))))
        else:
            rounds = law.until(distance, n, law.doubling_point(n, times, communication))
        plan.append((n, rounds))
        distance, n = law.after(distance, n, rounds), 2 * n
    return [*plan, (n, law.until(distance, n, target))]


def spent(plan: Plan, times: Sequence[float], communication: float) -> float:
    """Sum up a plan's time.

    Parameters
    ----------
    plan : Plan
        Clients and rounds.
    times : sequence of float
        [N] what clients take for a round, the fastest first: drawn, or expected, which gives the expected sum.
    communication : float
        C, the same for every round.
    """
    return sum(rounds * (times[n - 1] + communication) for n, rounds in plan)
