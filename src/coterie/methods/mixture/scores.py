# SPDX-License-Identifier: Apache-2.0
"""How well mixtures do on rows of clients old and new: all of them, on all these rows, in one message."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.algorithms.inference import error_ask
from coterie.algorithms.validation import judge_ask
from coterie.data.ragged import Ragged
from coterie.evaluate import target_ask
from coterie.methods.base import Score
from coterie.methods.measuring import variance_from
from coterie.methods.mixture.model import Mixtures
from coterie.methods.session import Answered, On, Session
from coterie.models.mixtures import Regression
from coterie.protocol import Ask, slot

__all__ = ["Entry", "MixtureScore", "Outcome", "measured", "row_counts"]

_TARGETS = 1 << 10  # the run that asks for sums of targets: there are not so many mixtures


@dataclass(frozen=True)
class MixtureScore(Score):
    """How one method does: mean log-likelihood of a row in the columns' own units, R^2 and RMSE where there is a target."""

    test_rmse: float | None = None


@dataclass(frozen=True)
class Entry:
    """A mixture that is measured under a name and a label, and what new clients have of it, if they have anything."""

    name: str
    label: str
    found: Mixtures
    new: Mixtures | None = None


@dataclass(frozen=True)
class Outcome:
    """A score, and what it is made of.

    Attributes
    ----------
    likelihood, error : dict
        Side ("train", "test", "new") -> [M] mean log-likelihood of every client's rows, and its mean squared error in
        scaled units where there is a target.
    """

    score: MixtureScore
    likelihood: dict[str, Tensor] = field(default_factory=dict)
    error: dict[str, Tensor] = field(default_factory=dict)


def measured(
    session: Session, entries: Sequence[Entry], rows: Ragged, test: Ragged | None, new: Ragged | None
) -> list[Outcome]:
    """Measure all entries on training rows, held-out rows, and rows of new clients."""
    sides = {side: one for side, one in (("train", rows), ("test", test), ("new", new)) if one is not None}
    asked = {side: _asks(entries, side, one) for side, one in sides.items()}
    asked = {side: asks for side, asks in asked.items() if asks}
    got = session.exchange([On(sides[side], asks) for side, asks in asked.items()])
    answered = dict(zip(asked, got, strict=True))
    variance = {
        side: variance_from(session, sides[side], one[_TARGETS])
        for side, one in answered.items()
        if _TARGETS in one.replies
    }
    return [_outcome(i, entry, sides, answered, variance) for i, entry in enumerate(entries)]


def _of(entry: Entry, side: str) -> Mixtures | None:
    return entry.new if side == "new" else entry.found


def _asks(entries: Sequence[Entry], side: str, rows: Ragged) -> dict[int, Ask]:
    """What is asked on one set of rows; nothing if nobody has anything for its clients."""
    asks = {}
    for i, entry in enumerate(entries):
        found = _of(entry, side)
        if found is None:
            continue
        fit = found.of(rows.names)
        asks[i] = judge_ask(fit.family, fit.theta, fit.weights, fit.scale)
        if isinstance(fit.family, Regression):
            asks[slot(i, 1)] = error_ask(fit.family, fit.theta, fit.weights)
            asks[_TARGETS] = target_ask(torch.zeros((), dtype=torch.float64))
    return asks


def _outcome(
    i: int, entry: Entry, sides: dict[str, Ragged], answered: dict[str, Answered], variance: dict[str, float]
) -> Outcome:
    likelihood, error = dict[str, Tensor](), dict[str, Tensor]()
    for side, got in answered.items():
        found = _of(entry, side)
        if found is not None:
            likelihood[side] = found.in_units(got[i]["likelihood"], sides[side])
            if slot(i, 1) in got.replies:
                error[side] = got[slot(i, 1)]["error"]
    value = {side: _per_row(one, sides[side]) for side, one in likelihood.items()}
    squared = {side: _per_row(one, sides[side]) for side, one in error.items()}
    r2 = {side: 1.0 - one / variance[side] for side, one in squared.items() if variance[side] > 0}
    rmse = squared["test"] ** 0.5 * float(entry.found.scaling.y_scale) if "test" in squared else None
    (train, held_out, fresh), (train_r2, test_r2, new_r2) = (
        [part.get(side) for side in ("train", "test", "new")] for part in (value, r2)
    )
    score = MixtureScore(entry.name, entry.label, train, held_out, fresh, train_r2, test_r2, new_r2, test_rmse=rmse)
    return Outcome(score, likelihood, error)


def row_counts(rows: Ragged) -> Tensor:
    """[M] rows of every client."""
    return torch.from_numpy(rows.layout.counts)


def _per_row(means: Tensor, rows: Ragged) -> float:
    """Mean over all rows of clients' means."""
    return float((means * row_counts(rows)).sum() / max(rows.layout.n_rows, 1))
