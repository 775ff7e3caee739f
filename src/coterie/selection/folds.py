# SPDX-License-Identifier: Apache-2.0
"""Rows that know their fold: who is trained on, who judges, and what a new client shows.

Folds depend on the seed and on a client's name only, so that every client could deal its rows itself.
"""

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import Layout, Ragged

__all__ = ["fold_by_fold", "support_and_query", "thinned", "with_folds", "with_support"]


def with_folds(train: Ragged, test: Ragged | None, n_folds: int, seed: int) -> Ragged:
    """Put every client's training and test rows together, with the number of their fold as last feature.

    Folds are as equal as can be, and depend on the seed and on the client's name only.
    """
    parts = [_numbered(train, _dealt(train, n_folds, seed))]
    if test is not None:
        parts.append(_numbered(test, torch.full((test.layout.n_rows,), n_folds)))
    return _together(train.names, parts)


def with_support(new: Ragged, few: int, n_folds: int, seed: int) -> Ragged:
    """Number new clients' rows: `few` of them, 0, are to learn from; the others judge."""
    rank = _rank(new, seed, "few shots")
    return _together(new.names, [_numbered(new, torch.where(rank < few, 0, n_folds))])


def _dealt(rows: Ragged, n_folds: int, seed: int) -> Tensor:
    return _rank(rows, seed, "folds") % n_folds


def _rank(rows: Ragged, seed: int, purpose: str) -> Tensor:
    """A random order of every client's rows: [N] the place of each."""
    owner = torch.from_numpy(rows.owners)
    row = torch.arange(len(owner)) - torch.from_numpy(rows.layout.starts)[owner]
    u = keys.uniform_at(keys.key(seed, purpose, rows.keys)[owner], row).numpy()
    rank = torch.empty(len(owner), dtype=torch.int64)
    rank[torch.from_numpy(np.lexsort((u, rows.layout.starts[rows.owners])))] = row
    return rank


Part = tuple[Tensor, Tensor | None, np.ndarray]


def _numbered(rows: Ragged, number: Tensor) -> Part:
    """Features with the number of the fold, targets, and the client of every row, in memory."""
    xs, ys, owners = [], [], []
    for i in rows.layout.order:
        block = rows.client(int(i))
        xs.append(block.x[0])
        ys.append(block.y[0] if block.y is not None else None)
        owners.append(np.full(len(block.x[0]), rows.names[i]))
    x = torch.cat([torch.cat(xs).to(torch.float64), number[:, None].to(torch.float64)], 1)
    y = None if ys[0] is None else torch.cat([y for y in ys if y is not None])
    return x, y, np.concatenate(owners)


def _together(names: np.ndarray, parts: list[Part]) -> Ragged:
    """Join parts; a client keeps its number, whatever rows it has."""
    x, owners = torch.cat([part[0] for part in parts]), np.concatenate([part[2] for part in parts])
    ys = [part[1] for part in parts if part[1] is not None]
    number = np.searchsorted(names, owners)
    layout = Layout.plan(names, np.bincount(number, minlength=len(names)))
    place = np.empty(len(names), dtype=np.int64)
    place[layout.order] = np.arange(len(names))
    order = torch.from_numpy(np.argsort(place[number], kind="stable"))
    return Ragged(layout, x[order], torch.cat(ys)[order] if ys else None)


def thinned(rows: Ragged, most: int, seed: int) -> Ragged:
    """Keep at most so many rows of every client, drawn by its name."""
    return rows if int(rows.counts.max()) <= most else _some(rows, _rank(rows, seed, "thin") < most)


def fold_by_fold(train: Ragged, n_folds: int, seed: int) -> list[tuple[Ragged, Ragged]]:
    """For every fold the rows of all the others, and its own: for what cannot share passes over the rows."""
    number = _dealt(train, n_folds, seed)
    return [(_some(train, number != fold), _some(train, number == fold)) for fold in range(n_folds)]


def support_and_query(new: Ragged, few: int, seed: int) -> tuple[Ragged, Ragged]:
    """Divide new clients' rows: `few` of them to learn from, and the others to judge by."""
    shown = _rank(new, seed, "few shots") < few
    return _some(new, shown), _some(new, ~shown)


def _some(rows: Ragged, keep: Tensor) -> Ragged:
    """Keep some rows (a mask, in the order of storage) of all clients."""
    x, y, owners = _numbered(rows, keep)
    return _together(rows.names, [(x[keep, :-1], None if y is None else y[keep], owners[keep.numpy()])])
