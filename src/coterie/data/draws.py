# SPDX-License-Identifier: Apache-2.0
"""Which of a client's rows are taken, once they stand in a random order: a share, the first few, or a fold."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["CALIBRATION", "FOLDS", "SUPPORT", "VALIDATION", "First", "Fold", "Rule", "Share"]

FOLDS = 5  # of the cross-validation within clients
CALIBRATION = 0.2  # rows held out of training to calibrate prediction intervals
VALIDATION = 0.2  # rows held out of training to choose among starts and penalties
SUPPORT = 0.5  # rows of a new client that place it; the others judge


class Rule(Protocol):
    """What is taken of a client's rows."""

    def takes(self, rank: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Tell whether rows are taken, by their places in the order and the row counts of their clients."""

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

    def taken(self, counts: np.ndarray, /) -> np.ndarray:
        """As many as there are, at most."""
        few: np.ndarray = np.minimum(counts, self.n)
        return few


@dataclass(frozen=True)
class Fold:
    """Every `n_folds`-th row, from this number on: folds are as equal as can be."""

    number: int
    n_folds: int

    def takes(self, rank: np.ndarray, counts: np.ndarray, /) -> np.ndarray:
        """Those of the fold."""
        own: np.ndarray = rank % self.n_folds == self.number
        return own

    def taken(self, counts: np.ndarray, /) -> np.ndarray:
        """Count them."""
        return (counts - self.number + self.n_folds - 1) // self.n_folds
