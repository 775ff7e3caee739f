# SPDX-License-Identifier: Apache-2.0
"""How a question divides a node's rows: counts alone, so that it is known before any row is touched."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.data.clients import Clients
from coterie.data.draws import First, Fold, Rule, Share
from coterie.data.ragged import Ragged
from coterie.data.remote import Cast, Divided, Folded, Part, RemoteRows, Scaled, View

__all__ = ["Division", "Seen", "seen"]


@dataclass(frozen=True)
class Division:
    """One division of clients' rows.

    Attributes
    ----------
    rule : Rule or Folded
        How.
    names, counts : ndarray
        The clients, and the rows of each.
    """

    rule: Rule | Folded
    names: np.ndarray
    counts: np.ndarray

    def allowed(self, share: float) -> bool:
        """Whether every piece is at least such a share of the rows, or none at all; `First` says how many in rows."""
        if isinstance(self.rule, Share):
            return self.rule.fraction == 0 or share <= self.rule.fraction <= 1 - share
        if isinstance(self.rule, Fold | Folded):
            return self.rule.n_folds >= 1 and self.rule.n_folds * share <= 1
        return isinstance(self.rule, First) and self.rule.n >= 0

    def pieces(self) -> Iterator[np.ndarray]:
        """Rows of each client in each piece."""
        if isinstance(self.rule, Folded):
            for number in range(self.rule.n_folds):
                yield Fold(number, self.rule.n_folds).taken(self.counts)
        else:
            taken = self.rule.taken(self.counts)
            yield taken
            yield self.counts - taken


@dataclass(frozen=True)
class Seen:
    """What a question is about: whose rows, how many, and by which divisions they came about."""

    names: np.ndarray
    counts: np.ndarray
    divisions: tuple[Division, ...]

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of these clients."""
        return torch.from_numpy(self.counts)[ids]

    def fewest(self, ids: Tensor) -> int | None:
        """The fewest rows of these clients together that are asked about, or that a division sets apart; None for no rows.

        Sums over all rows and over all but a few differ by the sum over these few.
        """
        whose = self.names[ids.numpy()]
        totals = [int(self.counts[ids.numpy()].sum())]
        for division in self.divisions:
            at = np.searchsorted(division.names, whose)
            totals += [int(piece[at].sum()) for piece in division.pieces()]
        return min((total for total in totals if total), default=None)


def seen(clients: Clients, part: Part | Folded, views: tuple[View, ...]) -> Seen:
    """Follow what is to be done to the node's rows, by their counts."""
    found: list[Division] = []
    rows = _followed(clients, part, views, found)
    return Seen(rows.names, rows.layout.counts, tuple(found))


def _part(clients: Clients, part: Part | Folded, found: list[Division]) -> RemoteRows:
    if isinstance(part, Part):
        return _counted(part.of(clients))
    train = _followed(clients, part.train, part.views, found)
    found.append(Division(part, train.names, train.layout.counts))
    test = None if part.test is None else _followed(clients, part.test, part.test_views, found)
    return train.with_folds(part.n_folds, seed=part.seed, test=test)


def _followed(clients: Clients, part: Part | Folded, views: tuple[View, ...], found: list[Division]) -> RemoteRows:
    rows = _part(clients, part, found)
    for view in views:
        rows = _step(rows, view, found)
    return rows


def _step(rows: RemoteRows, view: View, found: list[Division]) -> RemoteRows:
    if isinstance(view, Scaled | Cast):
        return rows
    if isinstance(view, Divided):
        found.append(Division(view.rule, rows.names, rows.layout.counts))
    with np.errstate(all="ignore"):  # by whatever a message says; what makes no sense is refused afterwards
        made = view(rows)
    assert isinstance(made, RemoteRows)
    return made


def _counted(rows: Ragged) -> RemoteRows:
    """Rows of which only the counts are known."""
    return RemoteRows(
        rows.layout, torch.zeros(0, *rows.shape), None, place=np.zeros(rows.n_clients, dtype=np.int64),
        number=np.arange(rows.n_clients),
    )  # fmt: skip
