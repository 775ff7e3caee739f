# SPDX-License-Identifier: Apache-2.0
"""How well mixtures do on rows of clients old and new."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.methods.base import Score
from coterie.methods.measuring import target_variance
from coterie.methods.mixture.model import Mixtures
from coterie.methods.session import Session
from coterie.models.mixtures import Regression

__all__ = ["MixtureScore", "row_counts", "scored"]


@dataclass(frozen=True)
class MixtureScore(Score):
    """How one method does: mean log-likelihood of a row in the columns' own units, R^2 and RMSE where there is a target."""

    test_rmse: float | None = None


def scored(
    session: Session,
    name: tuple[str, str],
    found: Mixtures,
    rows: Ragged,
    test: Ragged | None,
    new: tuple[Mixtures, Ragged] | None,
) -> MixtureScore:
    """Put a score together: of training rows, held-out rows, and rows of new clients with mixtures of their own."""
    sides = [(found, rows), (found, test), new or (found, None)]
    values = [None if side is None else _per_row(one.log_likelihood(side, session), side) for one, side in sides]
    errors = [None if side is None else _squared_error(session, one, side) for one, side in sides]
    r2 = [
        None if e is None or side is None else _r2(session, e, side) for e, (_, side) in zip(errors, sides, strict=True)
    ]
    rmse = None if errors[1] is None else errors[1] ** 0.5 * float(found.scaling.y_scale)
    (train, held_out, fresh), (train_r2, test_r2, new_r2) = values, r2
    return MixtureScore(*name, train, held_out, fresh, train_r2, test_r2, new_r2, rmse)


def row_counts(rows: Ragged) -> Tensor:
    """[M] rows of every client."""
    return torch.from_numpy(rows.layout.counts)


def _per_row(means: Tensor, rows: Ragged) -> float:
    """Mean over all rows of clients' means."""
    return float((means * row_counts(rows)).sum() / max(rows.layout.n_rows, 1))


def _squared_error(session: Session, found: Mixtures, rows: Ragged) -> float | None:
    return _per_row(found.squared_errors(rows, session), rows) if isinstance(found.fit.family, Regression) else None


def _r2(session: Session, error: float, rows: Ragged) -> float | None:
    variance = target_variance(rows, session)
    return 1.0 - error / variance if variance > 0 else None
