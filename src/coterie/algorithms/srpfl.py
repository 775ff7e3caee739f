# SPDX-License-Identifier: Apache-2.0
"""SRPFL: begin with the fastest clients, and double their number in stages, around any algorithm.

Tziotis, Shen, Pedarsani, Hassani, Mokhtari, "Straggler-Resilient Personalized Federated Learning", Algorithm 1. Around
FedAvg it is FLANP; around FedRep, the paper's SRPFL.

The inner algorithm runs as it is. Its questions pass through, and say on the way how many answers are enough; which clients
are fastest is for the engine's clock and participation policy (Remark 3.2: ask all, go on with the first). What the inner
algorithm knows is the warm start of the next stage. Questions to clients that it names (`Ask.to`), and those for which it
says itself how many answers are enough (Algorithm 2, lines 2 and 3: everybody's), are left alone.

Departures: clients are sampled anew in every round, not in every stage (Remark 3.1 allows for it); before stage 0, where
Lemma B.1 has no stage to come from, a stage of half as many clients is thought; adaptive stages estimate what the lemma
takes as known.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.protocol import Ask, Lockstep, Save

__all__ = ["Adaptive", "Fixed", "Stage", "Stages", "State", "Theory", "exponential_order", "srpfl"]

S = TypeVar("S")


@dataclass(frozen=True)
class State(Generic[S]):
    """What the next round needs. To continue from a checkpoint, an engine is told `State[InnerState]`."""

    inner: S
    losses: Tensor  # [t] of the stage's rounds, as far as they were told
    stage: int = 0
    spent: int = 0  # rounds of this stage
    seconds: float = 0.0  # that they took
    before: float = 0.0  # seconds that a round of the stage before took, on average
    round: int = 0


@dataclass(frozen=True)
class Stage:
    """Where a run is when the rule is asked whether the stage is over.

    Attributes
    ----------
    clients, before, after, last : int
        n of this stage, of those before and after it, and N.
    state : State
        Its rounds.
    """

    clients: int
    before: float
    after: int
    last: int
    state: State[Any]


class Stages(Protocol):
    """When a stage is over."""

    def over(self, stage: Stage) -> bool:
        """Say whether to go on with more clients; asked after every round, but not in the last stage."""


def srpfl(
    program: Callable[[Any], Lockstep],
    state: State[Any] | None = None,
    *,
    n0: int,
    n_clients: int,
    stages: "Stages | None" = None,
    rounds: int | None = None,
) -> Lockstep:
    """Run an algorithm with the fastest n0 clients, then 2 n0, 4 n0, ..., N.

    Parameters
    ----------
    program : callable
        The inner algorithm with all its options, given its state, or None at the start.
    state : State or None
        Where to go on; None starts.
    n0 : int
        How many clients the first stage waits for.
    n_clients : int
        N: how many are waited for in the end. Where the engine samples, the size of the sample.
    stages : Fixed, Theory or Adaptive
        When a stage is over; after 10 rounds by default.
    rounds : int, optional
        Rounds altogether; by default the inner algorithm says when it ends.
    """
    if not 1 <= n0 <= n_clients:
        raise ConfigError(f"n0 is {n0} and there are {n_clients} clients", "give 1 <= n0 <= n_clients")
    rule = Fixed() if stages is None else stages
    inner = program(None if state is None else state.inner)
    now = State(None, torch.zeros(0, dtype=torch.float64)) if state is None else state
    now = _skipped(now, rule, n0, n_clients)
    replies: Any = None
    seconds = 0.0
    while rounds is None or now.inner is None or now.round < rounds:
        try:
            wanted = inner.send(replies)
        except StopIteration as end:
            return replace(now, inner=end.value)
        n = _clients(n0, now.stage, n_clients)
        if not isinstance(wanted, Save):
            replies = yield tuple(_few(ask, n) for ask in wanted) if isinstance(wanted, tuple) else _few(wanted, n)
            seconds += max(one.elapsed for one in (replies if isinstance(wanted, tuple) else (replies,)))
            continue
        info = {**wanted.info, "stage": now.stage, "enough": n}
        start = now.inner is None and getattr(wanted.state, "round", None) == 0  # what is saved first may be no round
        now = replace(now, inner=wanted.state)
        if not start:
            now = _counted(now, wanted.info.get("loss"), seconds, last=n == n_clients)
            now = _skipped(now, rule, n0, n_clients)
        seconds = 0.0
        replies = yield Save(now, info)
    return now


def _few(ask: Ask, n: int) -> Ask:
    """Let n answers be enough, where the algorithm does not say otherwise."""
    return ask if ask.to is not None or ask.enough is not None else replace(ask, enough=n)


def _clients(n0: int, stage: int, n_clients: int) -> int:
    return min(n_clients, n0 << stage)  # Alg. 1, line 17


def _counted(state: State[Any], loss: float | None, seconds: float, *, last: bool) -> State[Any]:
    """Count a round; in the last stage there is nothing to decide, and nothing to keep for it."""
    losses = state.losses
    if loss is not None and math.isfinite(loss) and not last:
        losses = torch.cat([losses, losses.new_tensor([loss])])
    counted = replace(state, losses=losses, round=state.round + 1)
    return replace(counted, spent=state.spent + 1, seconds=state.seconds + seconds)


def _skipped(state: State[Any], rule: Stages, n0: int, n_clients: int) -> State[Any]:
    """Go on to the stage that the next round belongs to: a stage may have no rounds at all."""
    while (n := _clients(n0, state.stage, n_clients)) < n_clients:
        after = _clients(n0, state.stage + 1, n_clients)
        if not rule.over(Stage(n, n / 2, after, n_clients, state)):
            break
        took = state.seconds / state.spent if state.spent else state.before
        state = replace(state, stage=state.stage + 1, spent=0, seconds=0.0, before=took, losses=state.losses[:0])
    return state


# -- when a stage is over ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fixed:
    """As many rounds in every stage."""

    rounds: int = 10

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"a stage has {self.rounds} rounds", "give at least 1")

    def over(self, stage: Stage) -> bool:
        """Count."""
        return stage.state.spent >= self.rounds


@dataclass(frozen=True)
class Theory:
    """Lemma B.1: rounds until, by the contraction of Theorem 4.5, more clients make more progress in a second.

    Parameters
    ----------
    contraction : float
        a: a round leaves sqrt(1 - a) of the distance.
    times : tuple of float, optional
        E[T_(1)], E[T_(2)], ..., E[T_(N)]: what the fastest client takes, the second, and so on; by default those of the
        exponential law. Communication plays no part in the lemma's number of rounds.
    """

    contraction: float = 0.25
    times: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.contraction < 1:
            raise ConfigError(f"the contraction is {self.contraction}", "give 0 < contraction < 1")
        if self.times is not None and list(self.times) != sorted(self.times):
            raise ConfigError("the expected times are not ascending", "give those of the fastest client first")

    def over(self, stage: Stage) -> bool:
        """Count."""
        return stage.state.spent >= self.rounds(stage)

    def rounds(self, stage: Stage) -> int:
        """tau_r, eq. (195), where the number of clients need not double in the end.

        Solving eq. (200) with X of eq. (194) for clients that grow g-fold:
        (1 - a)^(t/2) <= (1 - 1/sqrt(g)) / (sqrt(2) - 1) * (E[T_n] - E[T_(n/2)]) / (E[T_(gn)] - E[T_n]), and for g = 2 the
        first factor is 1/sqrt(2).
        """
        times = exponential_order(stage.last) if self.times is None else self.times
        if len(times) < stage.last:
            raise ConfigError(f"{len(times)} times are given for {stage.last} clients", "give one for each")
        before, now, after = (_at(times, n) for n in (stage.before, stage.clients, stage.after))
        growth = (1 - math.sqrt(stage.clients / stage.after)) / (math.sqrt(2) - 1)
        if after <= now or before == now:  # more clients cost nothing, or these cost no more than half of them
            return 0 if after <= now else 1
        left = growth * (now - before) / (after - now)
        return max(0, math.ceil(2 * math.log(left) / math.log(1 - self.contraction)))


def exponential_order(n: int) -> tuple[float, ...]:
    """E[T_(1)], ..., E[T_(n)] of n exponential times with rate 1: 1/n, 1/n + 1/(n-1), ..."""
    return tuple((1.0 / torch.arange(n, 0, -1, dtype=torch.float64)).cumsum(0).tolist())


def _at(times: tuple[float, ...], n: float) -> float:
    """E[T_(n)], in between for half a client; nobody takes no time."""
    below = int(n)
    low, high = (0.0 if k == 0 else times[k - 1] for k in (below, min(below + 1, len(times))))
    return low + (n - below) * (high - low)


@dataclass(frozen=True)
class Adaptive:
    """Go on when more clients would improve the loss more in a second: eqs. (192), (193), with what rounds have shown.

    The contraction of Theorem 4.5 has the form d+ = rho d + c, where c shrinks with the square root of the clients. Within
    a stage, rho and c are fitted to its losses. A round of the next stage is thought to take longer than one of this
    by as much as this one's do than the last one's; in the first stage, and without a clock, by the growth of the clients.

    Parameters
    ----------
    least, most : int
        Rounds that a stage has at least and at most.
    """

    least: int = 4
    most: int = 50

    def __post_init__(self) -> None:
        if not 4 <= self.least <= self.most:
            raise ConfigError(f"a stage has {self.least} to {self.most} rounds", "give 4 <= least <= most")

    def over(self, stage: Stage) -> bool:
        """Compare progress per second."""
        state = stage.state
        if state.spent < self.least or len(state.losses) < self.least:
            return state.spent >= self.most
        rho, c = _contraction(state.losses)
        loss = float(state.losses[-1])
        gain = loss * (1 - rho) - c
        larger = loss * (1 - rho) - c * math.sqrt(stage.clients / stage.after)
        took = state.seconds / state.spent
        longer = took / state.before if state.before > 0 else stage.after / stage.clients
        return state.spent >= self.most or gain <= 0 or larger > gain * max(longer, 1.0)


def _contraction(losses: Tensor) -> tuple[float, float]:
    """rho in [0, 1] and c >= 0 of l+ = rho l + c, by least squares."""
    x, y = losses[:-1], losses[1:]
    spread = x - x.mean()
    rho = float((spread @ y) / (spread @ spread).clamp(min=1e-300))
    rho = min(max(rho, 0.0), 1.0)
    return rho, max(float(y.mean()) - rho * float(x.mean()), 0.0)
