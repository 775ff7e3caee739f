# SPDX-License-Identifier: Apache-2.0
"""Participation policies: who is asked in a round, and who of them answers in time.

Every policy goes with every algorithm. Who is fast is for the clock to say; without one all are, and lots decide.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie import keys
from coterie.errors import ConfigError
from coterie.participation.participants import Participants, Participation, fastest

__all__ = ["Deadline", "Everyone", "FastestFirst", "FirstReplies", "Lots", "Sampled", "Then"]


@dataclass(frozen=True)
class Everyone:
    """All clients, every round."""

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Ask all."""
        everyone = torch.arange(len(clients))
        return Participants(everyone, everyone)


@dataclass(frozen=True)
class Sampled:
    """A fresh random sample each round.

    Parameters
    ----------
    share : float, optional
        Part of the clients, above 0 and at most 1; at least one client is asked.
    number : int, optional
        How many clients, in place of a share; all, where there are fewer.
    """

    share: float | None = None
    number: int | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.number is None):
            raise ConfigError("a sample needs a share of the clients or their number", "give one of them")
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(
                f"participation is {self.share}, which is not a share of the clients", "give 0 < share <= 1"
            )
        if self.number is not None:
            _at_least_one(self.number)

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Ask those whose keyed draw is smallest."""
        size = self.number if self.share is None else max(1, round(self.share * len(clients)))
        u = keys.uniform(keys.key(seed, round_, "participation", clients), 1)[:, 0]
        asked = u.argsort(stable=True)[:size].sort().values
        return Participants(asked, asked)


@dataclass(frozen=True)
class Lots:
    """Each client takes part with the same probability, whoever else does, by lots that follow from no seed.

    Parameters
    ----------
    share : float
        The probability.
    secret : str
        What lots are drawn from: see `coterie.keys.new_secret`. Who does not have it cannot tell who takes part.
    """

    share: float
    secret: str = field(repr=False)

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Ask those whose lot is below the share."""
        lots = keys.hidden_uniform(self.secret, "participation", round_, lots=clients, n=1)[:, 0]
        asked = (lots < self.share).nonzero()[:, 0]
        return Participants(asked, asked)


@dataclass(frozen=True)
class FastestFirst:
    """The fastest clients only, where speeds are known before: nobody else is asked.

    Parameters
    ----------
    n : int, optional
        How many; by default as many as the algorithm says are enough (`Ask.enough`), or all.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            _at_least_one(self.n)

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Ask the fastest."""
        n = min(len(clients) if each is None else each for each in (self.n, enough))
        asked = fastest(torch.arange(len(clients)), n, round_, clients, seed, times)
        return Participants(asked, asked)


@dataclass(frozen=True)
class FirstReplies:
    """Ask everyone and go on with the first n answers: the fastest clients, without knowing who they are (Remark 3.2)."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one(self.n)

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Hear the fastest."""
        everyone = torch.arange(len(clients))
        return Participants(everyone, fastest(everyone, self.n, round_, clients, seed, times))


@dataclass(frozen=True)
class Deadline:
    """Ask everyone and go on with the answers that are there in time; if some are not, the whole time has passed."""

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"the deadline is {self.seconds} seconds", "give a number above 0")

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Hear who is in time."""
        everyone = torch.arange(len(clients))
        if times is None or bool((times <= self.seconds).all()):
            return Participants(everyone, everyone)
        return Participants(everyone, everyone[times <= self.seconds], until=self.seconds)


@dataclass(frozen=True)
class Then:
    """One policy among those whom another asks: `Then(Sampled(number=20), FirstReplies(5))`."""

    first: Participation
    second: Participation

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        """Choose twice; who answers does so to both."""
        some = self.first.choose(round_, clients, seed, times)
        ids = some.asked
        fewer = self.second.choose(round_, clients[ids], seed, None if times is None else times[ids], enough)
        answered = ids[fewer.answered]
        answered = answered[torch.isin(answered, some.answered)]
        return Participants(ids[fewer.asked], answered, until=max(some.until, fewer.until))


def _at_least_one(n: int) -> None:
    if n < 1:
        raise ConfigError(f"{n} clients cannot take part", "give at least 1")
