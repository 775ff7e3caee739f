# SPDX-License-Identifier: Apache-2.0
"""Scores of structures and settings, by sums over clients that keep what these are worth to them.

The columns of a `Table` are all settings of all structures. What is asked about them is in `algorithms/score_sums.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.score_sums import (
    ERRORS,
    HELD,
    LIMITS,
    SIDE,
    count_distances,
    kept_name,
    noise_sums,
    score_moments,
    tags_of,
)
from coterie.methods.linear.sources import Source
from coterie.protocol import Algorithm, Ask, Replies, Step, Sum
from coterie.select import Paired

__all__ = ["Judged", "Table", "distances", "joined", "judged", "over_deals", "paired", "with_noise"]

_TINY = 1e-12
_ASKED = 6  # times for the common noise, at most
_CLOSE = 3e-4  # a change of it, relative, after which another step would change it by less than a millionth
_CUTS = SIDE**2 - 1  # points between which clients are counted
_EVENLY = 0.02  # standard deviations within which these lie evenly, and beyond which ever further apart
_PASSES = 3  # in which clients are counted, at most
_FINE = 0.02  # median absolute deviations that bins may be wide around the median
_SCRATCH = 64  # numbers of a row


@dataclass(frozen=True)
class Judged:
    """Where clients keep how J settings serve them, and what is known of it in all.

    Attributes
    ----------
    kept : tuple
        Names under which they do, in the order of the settings, and how many each has.
    kind : Tensor
        [J] of the losses: see `score_sums.py`.
    loss, rows : Tensor
        [D, V + 1, J] sums over clients, with each of D deals of the folds; the last are of test rows.
    shape : Tensor
        [D, V + 1, J] what a model of the noise alone would bring to every row.
    """

    kept: tuple[tuple[str, int], ...]
    kind: Tensor
    loss: Tensor
    rows: Tensor
    shape: Tensor

    @property
    def settings(self) -> int:
        """J."""
        return len(self.kind)


def judged(got: Replies, problem: Problem, tag: str, kind: int, shape: Tensor | None = None) -> Judged:
    """What clients have told of a question that they keep the answer of.  loss [F, J], rows [F, 1], shape [F]"""
    loss, n = got["loss"], got["rows"]
    rows = n.expand_as(loss)
    extra = torch.zeros_like(loss) if shape is None else shape[:, None].expand_as(loss)
    if problem.n_folds not in problem.held:
        loss, rows, extra = (torch.cat([value, torch.zeros_like(value[:1])]) for value in (loss, rows, extra))
    j = loss.shape[1]
    name = kept_name(replace(problem, deal=0), tag)
    return Judged(((name, j),), torch.full((j,), kind), loss[None], rows[None], extra[None])


def joined(every: Sequence[Judged]) -> Judged:
    """Settings that were judged one after the other."""
    kept = tuple(one for some in every for one in some.kept)
    loss, rows, shape = (torch.cat([getattr(one, name) for one in every], 2) for name in ("loss", "rows", "shape"))
    return Judged(kept, torch.cat([one.kind for one in every]), loss, rows, shape)


def over_deals(every: Sequence[Judged]) -> Judged:
    """The same settings with further deals of the folds."""
    loss, rows, shape = (torch.cat([getattr(one, name) for one in every]) for name in ("loss", "rows", "shape"))
    return replace(every[0], loss=loss, rows=rows, shape=shape)


@dataclass(frozen=True)
class Table:
    """All settings of all structures, side by side.

    Attributes
    ----------
    problem : Problem
        Of the first deal of the folds.
    names : dict
        Structure -> its place among the columns.
    judged : Judged
        Of all of them.
    noise : Tensor
        [D, V + 1, J] common noise variance.
    usual : dict
        What is asked beside, once it is known who is an outlier.
    """

    problem: Problem
    names: Mapping[str, slice]
    judged: Judged
    noise: Tensor
    usual: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, every: Mapping[str, Judged], problem: Problem) -> "Table":
        """Put structures side by side."""
        names, at = {}, 0
        for name, one in every.items():
            names[name] = slice(at, at + one.settings)
            at += one.settings
        all_ = joined(list(every.values()))
        return cls(problem, names, all_, torch.ones_like(all_.loss))

    def at(self, name: str, setting: int) -> int:
        """The column of a structure's setting."""
        return self.columns(name)[setting]

    def columns(self, name: str) -> list[int]:
        """Of all of a structure's settings."""
        own = self.names[name]
        return list(range(own.start, own.stop))

    def ask(self, step: Step, fold: Mapping[str, Any], **more: Any) -> Ask:
        """Ask about all columns."""
        one, v = self.judged, self.problem.n_folds
        shared = {
            "kept": tuple(name for name, _ in one.kept), "n_folds": v, "kinds": one.kind, "noise": self.noise,
            "shape": one.shape, **self.usual, **more,
        }  # fmt: skip
        fresh = tags_of(one.kept, len(one.loss), (len(self.problem.held), v))
        limits = {name: LIMITS[name] for name in fold if name in LIMITS}
        return Ask(step, shared, fold, fresh=fresh, scratch=_SCRATCH, limits=limits)


def with_noise(source: Source, table: Table) -> Algorithm:
    """Find the common noise variance that clients' own are drawn to: their harmonic mean, by which wide ones hardly count.

    With S the sum of inverse variances of N clients, c = N / S(c). As a function of 1 / c, N c / (c^2 S) - 1 is concave and
    nearly straight, so that Newton's method takes few messages.  -> Table
    """
    one = table.judged
    errors = one.kind == ERRORS
    if not bool(errors.any()):
        return table
    h, n = _other_folds(one.loss), _other_folds(one.rows)
    noise = torch.where(errors, (2 * h / n.clamp(min=1)).nan_to_num(nan=1.0, posinf=HELD).clamp(min=_TINY), 1.0)
    fold = {name: Sum() for name in ("inverse", "slope", "there")}
    for _ in range(_ASKED):
        got = yield from source.asked(replace(table, noise=noise).ask(noise_sums, fold))
        new = torch.where(errors, _improved(noise, got), 1.0)
        change = float(((new - noise) / noise).abs().max())
        noise = new
        if change < _CLOSE:
            break
    return replace(table, noise=noise)


def _other_folds(value: Tensor) -> Tensor:
    """Sums over all folds but one; for test rows, over all folds.  [D, V + 1, J]"""
    own = torch.ones(value.shape[1], 1, dtype=value.dtype)
    own[-1] = 0.0
    found: Tensor = value[:, :-1].sum(1, keepdim=True) - value * own
    return found


def _improved(noise: Tensor, got: Replies) -> Tensor:
    """A step of Newton's method for 1 / c."""
    many, s = got["there"].clamp(min=1), got["inverse"]
    a = s * noise
    change = got["slope"] * noise**3 - s * noise.square()  # of a, with 1 / c
    t = 1 / noise + (many / a - 1) * a.square() / (many * change).clamp(max=-1e-300)
    t = torch.where(t > 0, t, 0.1 / noise)
    return torch.where(t.isfinite(), 1 / t, noise).clamp(min=_TINY).nan_to_num(nan=1.0)


def paired(
    source: Source, table: Table, *, centre: float = 0.0, repetitions: int = 0, key: Tensor | None = None,
    metrics: bool = False,
) -> Algorithm:  # fmt: skip
    """Compare scores by sums: over all clients that count, and over these drawn again and again.

    -> for scores and, if wanted, for metrics a list of `Paired`, whose first is of every client once; and rows
    """
    fold = {"moments": Sum(), "rows": Sum(), **({"metrics": Sum()} if metrics else {})}
    more = {"centre": torch.tensor(centre, dtype=torch.float64), "repetitions": repetitions}
    more["key"] = torch.zeros((), dtype=torch.int64) if key is None else key
    got = yield from source.asked(table.ask(score_moments, fold, **more))
    scores = every_paired(got["moments"], centre)
    return scores, every_paired(got["metrics"], 0.0) if metrics else [], float(got["rows"].sum())


def every_paired(products: Tensor, centre: float) -> list[Paired]:
    """Sums of products, as they are told.  [Q (Q + 1) / 2, R] -> R of them"""
    size = int((math.isqrt(8 * len(products) + 1) - 1) // 2)
    square = np.zeros((products.shape[1], size, size))
    one, other = np.triu_indices(size)
    square[:, one, other] = square[:, other, one] = products.T.double().numpy()
    return [Paired(each, centre) for each in square]


def distances(source: Source, table: Table, about: Mapping[str, Any], scores: Paired) -> Algorithm:
    """The median of clients' distances from being served, and their median absolute deviation, from counts.

    Points lie ever further apart from about the mean; if that is too coarse, clients are counted again around the median.

    -> middle, 1.4826 deviations
    """
    first, own = about["shared"][0], about["own"]
    mean, error = scores.gap(own[0], first) if own else scores.mean_and_error(first)
    spread = max(1e-6, error * math.sqrt(scores.n)) if scores.n > 1 else 1.0
    far = math.asinh(4 * HELD / (_EVENLY * spread))
    cuts = torch.sinh(torch.linspace(-far, far, _CUTS, dtype=torch.float64)) * (_EVENLY * spread)
    cuts = cuts + (mean if own else -mean)
    for _ in range(_PASSES):
        counts = yield from _counted(source, table, about, cuts)
        if counts.sum() < 1:
            return 0.0, 0.0
        middle, deviation, width = _usual(cuts.numpy(), counts)
        if width <= _FINE * deviation:
            break
        cuts = torch.linspace(*_around(cuts.numpy(), counts), _CUTS, dtype=torch.float64)
    return middle, 1.4826 * max(deviation, width)  # nothing is known better than a bin is wide


def _usual(edges: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """Median, median absolute deviation, and the width of the widest bin that is nearer to the median than that."""
    places = np.concatenate([edges[:1], (edges[1:] + edges[:-1]) / 2, edges[-1:]])
    middle = _median(places, counts)
    deviation = _median(np.abs(places - middle), counts)
    near = np.abs(places[1:-1] - middle) <= deviation  # the median's own at least
    return middle, deviation, float(np.diff(edges)[near].max(initial=0.0))


def _counted(source: Source, table: Table, about: Mapping[str, Any], cuts: Tensor) -> Algorithm:
    got = yield from source.asked(table.ask(count_distances, {"below": Sum()}, **about, cuts=cuts))
    found: np.ndarray = got["below"].double().flatten().numpy()
    return found


def _median(places: np.ndarray, counts: np.ndarray) -> float:
    """The lower one of those between whom it lies."""
    order = places.argsort(kind="stable")
    reached = counts[order].cumsum()
    return float(places[order][np.searchsorted(reached, (reached[-1] + 1) // 2)])


def _around(cuts: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Between which points the median lies, and half of the clients around it."""
    edges = np.concatenate([cuts[:1] - 1, cuts, cuts[-1:] + 1])
    reached = counts.cumsum()
    at = int(np.searchsorted(reached, (reached[-1] + 1) // 2))
    a, b = edges[at], edges[at + 1]
    inside = np.maximum(b - edges[:-1], edges[1:] - a)  # how far a bin's clients may be from the median
    order = inside.argsort(kind="stable")
    enough = int(np.searchsorted(counts[order].cumsum(), (reached[-1] + 1) // 2))
    reach = float(inside[order][enough])
    return float(a - reach), float(b + reach)
