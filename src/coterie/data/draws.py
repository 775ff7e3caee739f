# SPDX-License-Identifier: Apache-2.0
"""Which of a client's rows are taken, in a random order or in that of time: a share, the first few, or a fold."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = [
    "CALIBRATION",
    "DEALS",
    "FOLDS",
    "NEXT_DEAL",
    "SUPPORT",
    "VALIDATION",
    "First",
    "Fold",
    "Rule",
    "Share",
    "fold_of",
]

FOLDS = 5  # of the cross-validation within clients
DEALS = 2  # of rows to folds, over which scores are averaged
NEXT_DEAL = 1_000_003  # from the seed of one deal to that of the next
CALIBRATION = 0.2  # rows held out of training to calibrate prediction intervals
VALIDATION = 0.2  # rows held out of training to choose among starts and penalties
SUPPORT = 0.5  # rows of a new client that place it; the others judge


class Rule(Protocol):
    """What is taken of a client's rows."""

    def takes(self, rank: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Tell whether rows are taken, by their places in the order and the row counts of their clients."""

    def takes_in_time(self, place: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Tell the same of rows whose places are those in time; as many are taken."""

    def taken(self, counts: np.ndarray, /) -> np.ndarray:
        """Tell how many rows of clients are taken, by their row counts."""


@dataclass(frozen=True)
class Share:
    """A share of the rows; a client keeps at least one."""

    fraction: float

    def takes(self, rank: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Those before the share is full."""
        below: np.ndarray = rank < self.taken(counts)
        return below

    def takes_in_time(self, place: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """The last ones: what comes later is predicted from what came before."""
        last: np.ndarray = place >= counts - self.taken(counts)
        return last

    def taken(self, counts: np.ndarray, /) -> np.ndarray:
        """Round the share."""
        share: np.ndarray = np.minimum(np.round(counts * self.fraction).astype(np.int64), np.maximum(counts - 1, 0))
        return share


@dataclass(frozen=True)
class First:
    """At most so many rows."""

    n: int

    def takes(self, rank: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """The first of them."""
        first: np.ndarray = rank < self.n
        return first

    def takes_in_time(self, place: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """The first of them."""
        return self.takes(place, counts)

    def taken(self, counts: np.ndarray, /) -> np.ndarray:
        """As many as there are, at most."""
        few: np.ndarray = np.minimum(counts, self.n)
        return few


@dataclass(frozen=True)
class Fold:
    """Every `n_folds`-th row, from this number on, or in time a block of rows: folds are as equal as can be."""

    number: int
    n_folds: int

    def takes(self, rank: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Those of the fold."""
        own: np.ndarray = fold_of(rank, counts, self.n_folds, in_time=False) == self.number
        return own

    def takes_in_time(self, place: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Those of the fold."""
        own: np.ndarray = fold_of(place, counts, self.n_folds, in_time=True) == self.number
        return own

    def taken(self, counts: np.ndarray, /) -> np.ndarray:
        """Count them."""
        return (counts - self.number + self.n_folds - 1) // self.n_folds


def fold_of(rank: np.ndarray, counts: np.ndarray, n_folds: int, *, in_time: bool) -> np.ndarray:
    """The fold of every row, by its place in the order: dealt like cards, or in time a block of rows after the other."""
    if not in_time:
        dealt: np.ndarray = rank % n_folds
        return dealt
    size, longer = counts // n_folds, counts % n_folds  # the first folds have a row more
    edge = longer * (size + 1)
    block: np.ndarray = np.where(rank < edge, rank // (size + 1), longer + (rank - edge) // np.maximum(size, 1))
    return block
