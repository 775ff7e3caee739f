# SPDX-License-Identifier: Apache-2.0
"""How well models serve clients: all of them, on training rows, held-out rows and rows of new clients, in one message."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.evaluate import Measured, measured_in, summed, target_ask
from coterie.methods.base import Score
from coterie.methods.session import Answered, On, Prepared, Session
from coterie.models.outcomes import metric_of
from coterie.protocol import Ask, Replies, slot

__all__ = ["Entry", "Outcome", "measure", "metric", "overall", "score", "target_variance", "variance_from"]

_TARGETS = 1 << 10  # the run that asks for sums of targets: no method has so many
_DIGITS = 1e-4  # of the mean square that a variance must be: four of sixteen digits may be lost


@dataclass(frozen=True)
class Entry:
    """A method, or a baseline, that is measured.

    Attributes
    ----------
    run : int
        Whose private state it reads and leaves.
    judge : Ask
        What is asked on any rows; make a `Measured` of the values.
    learn : Ask or None
        What is asked before, on training rows and on those that new clients show: where a client belongs, or a part of its
        own. It stays with the client; what else training clients say is in `Outcome.learnt`.
    judged : callable, optional
        Makes a `Measured` of what `learn` brings, so that training rows need no other question.
    newcomers : bool
        Whether it has something for new clients.
    more : Ask or None
        What else is asked on held-out rows and on those of new clients.
    mixed : Ask or None
        What is asked on training rows and on those of new clients, of models that nobody has chosen among.
    """

    run: int
    judge: Ask
    learn: Ask | None = None
    judged: Callable[[Replies], Measured] | None = None
    newcomers: bool = True
    more: Ask | None = None
    mixed: Ask | None = None


@dataclass(frozen=True)
class Outcome:
    """How one method serves clients.

    Attributes
    ----------
    train : Measured
        On training rows.
    test, new : Measured or None
        On held-out rows, and on rows of new clients; None where there are none.
    variance : dict
        Of the targets on each of these sides.
    learnt : Replies or None
        What training clients said when they learnt.
    private : dict or RemoteState
        What training clients keep after that.
    more, mixed : dict
        What came of what else was asked, on each side.
    """

    train: Measured
    test: Measured | None = None
    new: Measured | None = None
    variance: dict[str, float] = field(default_factory=dict)
    learnt: Replies | None = None
    private: Any = None
    more: dict[str, Replies] = field(default_factory=dict)
    mixed: dict[str, Replies] = field(default_factory=dict)


def measure(session: Session, made: Prepared, entries: Sequence[Entry], private: Any = None) -> list[Outcome]:
    """Measure all entries in one message; `private` is what clients keep of the runs that it is about."""
    if session.options.secure:
        entries = [replace(entry, judge=summed(entry.judge)) for entry in entries]
    parts = {"train": On(made.rows, _first(made, entries), private)}
    if made.test is not None:
        parts["test"] = On(made.test, _then(made, entries), after=0)
    new = [entry for entry in entries if entry.newcomers]
    if made.newcomers is not None and new:
        shown, judged = made.newcomers
        learn = {entry.run: replace(entry.learn, fold={}) for entry in new if entry.learn is not None}
        if learn:
            parts["shown"] = On(shown, learn)
        parts["new"] = On(judged, _then(made, new) | _mixed(new), after=len(parts) - 1 if learn else None)
    answered = dict(zip(parts, session.exchange(list(parts.values())), strict=True))
    sides = {side: got for side, got in answered.items() if side != "shown"}
    variance = {
        side: variance_from(session, parts[side].rows, got[_TARGETS])
        for side, got in sides.items()
        if _TARGETS in got.replies
    }
    return [_outcome(entry, sides, variance) for entry in entries]


def _first(made: Prepared, entries: Sequence[Entry]) -> dict[int, Ask]:
    """What is asked on training rows: everybody learns, and is judged."""
    asks = {entry.run: entry.learn for entry in entries if entry.learn is not None}
    asks |= {slot(entry.run, 1): entry.judge for entry in entries if entry.judged is None}
    return asks | _mixed(entries) | _targets(made)


def _then(made: Prepared, entries: Sequence[Entry]) -> dict[int, Ask]:
    """What is asked on other rows."""
    more = {slot(entry.run, 2): entry.more for entry in entries if entry.more is not None}
    return {slot(entry.run, 1): entry.judge for entry in entries} | more | _targets(made)


def _mixed(entries: Sequence[Entry]) -> dict[int, Ask]:
    return {slot(entry.run, 3): entry.mixed for entry in entries if entry.mixed is not None}


def _targets(made: Prepared) -> dict[int, Ask]:
    if metric_of(made.model.loss) != "rmse":
        return {}
    return {_TARGETS: target_ask(torch.zeros((), dtype=torch.float64))}


def _outcome(entry: Entry, sides: dict[str, Answered], variance: dict[str, float]) -> Outcome:
    at, train = slot(entry.run, 1), sides["train"]
    learnt = train.replies.get(entry.run) if entry.learn is not None else None
    found: dict[str, Any] = {side: measured_in(got[at]) for side, got in sides.items() if at in got.replies}
    if entry.judged is not None and learnt is not None:
        found["train"] = entry.judged(learnt)
    more, mixed = (
        {side: got[slot(entry.run, part)] for side, got in sides.items() if slot(entry.run, part) in got.replies}
        for part in (2, 3)
    )
    return Outcome(**found, variance=variance, learnt=learnt, private=train.private, more=more, mixed=mixed)


# -- scores -----------------------------------------------------------------------------------------------------------
def score(made: Prepared, name: tuple[str, str], found: Outcome) -> Score:
    """Put a score together: what was measured on three kinds of rows."""
    sides = {side: getattr(found, side) for side in ("train", "test", "new")}
    values = [None if m is None else overall(made, m) for m in sides.values()]
    return Score(*name, *values, *(_r2(m, found.variance.get(side, 0.0)) for side, m in sides.items()))


def overall(made: Prepared, measured: Measured) -> float:
    """Accuracy or root mean squared error over all rows."""
    return float(metric(made, torch.tensor(measured.mean_metric, dtype=torch.float64)))


def metric(made: Prepared, right: Tensor) -> Tensor:
    """Clients' accuracy as it is, and of squared errors the root, in the target's units.  [...]"""
    if metric_of(made.model.loss) != "rmse":
        return right
    return right.clamp(min=0).sqrt() * made.scaling.y_scale.to(right.dtype)


def _r2(measured: Measured | None, variance: float) -> float | None:
    return None if measured is None or not variance > 0 else 1.0 - measured.mean_metric / variance


# -- targets ----------------------------------------------------------------------------------------------------------
def target_variance(rows: Ragged, session: Session | None = None) -> float:
    """Variance of all rows' targets, from sums."""
    session = session or Session()

    def asked() -> float:
        return variance_from(session, rows, session.ask(rows, target_ask(torch.zeros((), dtype=torch.float64))))

    return float(rows.once("target variance", asked)) if isinstance(rows, RemoteRows) else asked()


def variance_from(session: Session, rows: Ragged, got: Replies) -> float:
    """Squares about zero will do, and are asked for once more about the mean where that would cost digits."""
    n = max(int(got["n"]), 1)
    mean, square = got["sum"] / n, float(got["square"]) / n
    variance = square - float(mean) ** 2
    return variance if variance > _DIGITS * square else float(session.ask(rows, target_ask(mean))["square"]) / n
