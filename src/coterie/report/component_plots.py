# SPDX-License-Identifier: Apache-2.0
"""Plots about mixtures: candidates with their scores, and how values spread within each component."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coterie.report.frame import N_COLOURS, Axis, Plot, colour, escape, marker, n, svg
from coterie.report.numbers import TickFormat, decimals_for, fixed, plain_ticks
from coterie.report.plots import SIZE, Line, drawn_line

__all__ = ["boxes", "candidates", "least_shown"]

MOST_LABELS = 16
_REACH = 4.0  # so many times as far from the best as the median candidate


def candidates(
    names: Sequence[str],
    scores: Sequence[float],
    chosen: int | None,
    *,
    below: Sequence[str] = (),
    x_label: str = "",
    y_label: str = "",
    title: str = "",
) -> str:
    """Draw the score of each candidate, evenly spaced in their order, and mark the chosen one.

    Those far below the others are triangles at the edge: see `least_shown`.

    Parameters
    ----------
    names : sequence of str
        The candidates, as the axis names them.
    scores : sequence of float
        One each; a missing one (NaN) breaks the line.
    chosen : int, optional
        The candidate that was kept.
    below : sequence of str
        A word under each name, empty for none.
    """
    floor = least_shown(scores, chosen)
    plot = _with_slots(names, Plot.fit([0.0], [v for v in scores if v >= floor], size=SIZE))
    places = [float(i) for i in range(len(names))]
    body = plot.axes("", y_label)
    notes = [((plot.x.start + plot.x.stop) / 2, x_label)]  # in the middle: words may stand under either end
    notes += [(plot.x.at(place), word) for place, word in zip(places, below, strict=False) if word]
    body.extend(f'<text class="mid" x="{n(x)}" y="{n(plot.y.start + 34)}">{escape(text)}</text>' for x, text in notes)
    inside = [v if v >= floor else math.nan for v in scores]
    body.extend(drawn_line(plot, Line(places, inside, thin=True), "plain"))
    decimals = decimals_for(scores)
    for i, score in enumerate(scores):
        if math.isfinite(score):
            tone, radius = ("k0", 6.0) if i == chosen else ("plain", 3.5)
            text = f"{names[i]}: {fixed(score, decimals)}"
            body.append(marker(plot.x.at(i), plot.y.at(score), radius, tone, 0 if score >= floor else 2, text))
    return svg(body, size=SIZE, describe=title or y_label)


def least_shown(scores: Sequence[float], chosen: int | None) -> float:
    """The score below which candidates are off the scale, so that the differences between the good ones can be seen."""
    finite = [v for v in scores if math.isfinite(v)]
    best, middle = max(finite, default=0.0), float(np.median(finite or [0.0]))
    if best == middle:  # no measure of what is far
        return -math.inf
    floor = best - _REACH * (best - middle)
    return floor if chosen is None else min(floor, scores[chosen])


def boxes(
    groups: Sequence[Sequence[float]],
    *,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    y_form: TickFormat = plain_ticks,
) -> str:
    """Draw how values spread in each group: a line from least to most, a box for the middle half, a bar at the median.

    Parameters
    ----------
    groups : sequence of sequences of float
        The values of group 0, 1 and so on; what is missing (NaN) does not count.
    """
    finite = [[v for v in group if math.isfinite(v)] for group in groups]
    every = [v for group in finite for v in group]
    plot = _with_slots(range(len(groups)), Plot.fit([0.0], [0.0, *every], size=SIZE, y_form=y_form, anchored=True))
    body = plot.axes(x_label, y_label)
    half = 0.3 * min((plot.x.stop - plot.x.start) / max(len(groups), 1), 60.0)
    for k, values in enumerate(finite):
        if values:
            body.extend(_box(plot, k, np.quantile(values, [0.0, 0.25, 0.5, 0.75, 1.0]).tolist(), half, y_form))
    return svg(body, size=SIZE, describe=title or y_label)


def _box(plot: Plot, k: int, quantiles: Sequence[float], half: float, form: TickFormat) -> list[str]:
    """Draw one group."""
    x = plot.x.at(k)
    least, low, middle, high, most = (plot.y.at(v) for v in quantiles)
    short = [round(v, 3) for v in quantiles]
    name = "{0}: {3}, middle half {2} to {4}, all {1} to {5}".format(k, *(form([v])[0] for v in short))
    shade = colour(k) + " again" * (k >= N_COLOURS)
    return [
        f'<path class="whisker {colour(k)}" d="M{n(x)} {n(least)}V{n(most)}"/>',
        f'<rect class="area {shade}" x="{n(x - half)}" y="{n(high)}" width="{n(2 * half)}" '
        f'height="{n(max(low - high, 1.0))}"><title>{escape(name)}</title></rect>',
        f'<path class="reach" d="M{n(x - half)} {n(middle)}H{n(x + half)}"/>',
    ]


def _with_slots(names: Sequence[object], plot: Plot) -> Plot:
    """Replace the axis of x: a place for each name, and as many labels as there is room for."""
    stride = -(-len(names) // MOST_LABELS) or 1
    ticks = [float(i) for i in range(0, len(names), stride)]
    labels = [str(name) for name in names[::stride]]
    return replace(plot, x=Axis(-0.5, max(len(names), 1) - 0.5, plot.x.start, plot.x.stop, ticks, labels))
