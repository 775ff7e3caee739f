# SPDX-License-Identifier: Apache-2.0
"""Participation policies: who is asked in a round, and who of them answers in time."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie import keys
from coterie.errors import ConfigError

__all__ = ["Everyone", "Participation", "Sampled"]


class Participation(Protocol):
    """A policy: which of the clients are asked in a round, and which of those answer."""

    def choose(self, round_: int, clients: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Choose among clients, given by their keys [M].

        Returns
        -------
        asked, answered : Tensor
            Client numbers, ascending; who answers is among the asked.
        """


@dataclass(frozen=True)
class Everyone:
    """All clients, every round."""

    def choose(self, round_: int, clients: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Ask all."""
        everyone = torch.arange(len(clients))
        return everyone, everyone


@dataclass(frozen=True)
class Sampled:
    """A fresh random sample each round.

    Parameters
    ----------
    share : float
        Part of the clients, above 0 and at most 1; at least one client is asked.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"participation is {self.share}, which is not a share of the clients", "give 0 < share <= 1"
            )

    def choose(self, round_: int, clients: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Ask those whose keyed draw is smallest."""
        u = keys.uniform(keys.key(seed, round_, "participation", clients), 1)[:, 0]
        asked = u.argsort(stable=True)[: max(1, round(self.share * len(clients)))].sort().values
        return asked, asked
