# SPDX-License-Identifier: Apache-2.0
"""Plots with one mark per client, sorted: gains and losses, margins with their noise, scores with a limit."""

import math
from collections.abc import Sequence

from coterie.report.frame import Plot, escape, marker, n, svg
from coterie.report.numbers import TickFormat, plain_ticks
from coterie.report.plots import SIZE

__all__ = ["FAR", "above_limit", "signed_bars", "whiskers"]

MOST_TITLED = 400  # thinner bars than this cannot be pointed at
FAR = 4.0  # so many limits away, all are equally far


def signed_bars(
    values: Sequence[float],
    *,
    titles: Sequence[str] | None = None,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    y_form: TickFormat = plain_ticks,
    total: int | None = None,
) -> str:
    """Draw one thin bar per value, largest first, coloured by sign.

    Parameters
    ----------
    values : sequence of float
        Missing ones (NaN) are left out.
    titles : sequence of str, optional
        What shows when the pointer rests on a bar.
    total : int, optional
        How many values there were before thinning: the x axis counts to it.
    """
    order = sorted((i for i in range(len(values)) if math.isfinite(values[i])), key=lambda i: -values[i])
    plot = _sorted_plot(len(order), total, [values[i] for i in order], y_form)
    zero = plot.y.at(0.0)
    wide = (plot.x.stop - plot.x.start) / max(len(order), 1)
    one_by_one = titles is not None and len(order) <= MOST_TITLED
    gap = min(1.0, 0.25 * wide) if one_by_one else 0.0
    drawn: dict[str, list[str]] = {"good": [], "bad": []}
    for place, i in enumerate(order):
        outline = f"M{plot.x.start + place * wide:.2f} {n(zero)}V{n(plot.y.at(values[i]))}h{wide - gap:.2f}V{n(zero)}Z"
        sign = "good" if values[i] >= 0 else "bad"
        if titles is not None and one_by_one:
            outline = f'<path class="bar {sign}" d="{outline}"><title>{escape(titles[i])}</title></path>'
        drawn[sign].append(outline)
    body = plot.axes(x_label, y_label)
    for sign, parts in drawn.items():
        body.extend(parts if one_by_one else [f'<path class="bar {sign}" d="{"".join(parts)}"/>'])
    body.append(f'<path class="zero" d="M{n(plot.x.start)} {n(zero)}H{n(plot.x.stop)}"/>')
    return svg(body, size=SIZE, describe=title or y_label)


def whiskers(
    values: Sequence[float],
    reach: Sequence[float],
    *,
    doubtful: Sequence[bool] | None = None,
    titles: Sequence[str] | None = None,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    total: int | None = None,
) -> str:
    """Draw sorted values, each with a whisker of its reach up and down; whiskers that leave the plot are cut off.

    Parameters
    ----------
    values, reach : sequence of float
        Missing values (NaN) are left out; a missing reach has no whisker.
    doubtful : sequence of bool, optional
        Which ones stand out in another colour.
    titles, total
        As for `signed_bars`.
    """
    order = sorted((i for i in range(len(values)) if math.isfinite(values[i])), key=lambda i: values[i])
    ends = sorted(v for i in order if math.isfinite(reach[i]) for v in (values[i] - reach[i], values[i] + reach[i]))
    spare = len(ends) // 50  # a few huge whiskers must not flatten the rest
    seen = [values[i] for i in order] + ends[spare : len(ends) - spare]
    plot = _sorted_plot(len(order), total, seen)
    wide = (plot.x.stop - plot.x.start) / max(len(order), 1)
    radius = min(max(0.45 * wide, 1.5), 3.5)
    strokes: dict[str, list[str]] = {"plain": [], "bad": []}
    marks = []
    for place, i in enumerate(order):
        x = plot.x.start + (place + 0.5) * wide
        tone = "bad" if doubtful is not None and doubtful[i] else "plain"
        if math.isfinite(reach[i]):
            low, high = plot.y.at(values[i] - reach[i]), plot.y.at(values[i] + reach[i])
            strokes[tone].append(f"M{x:.2f} {n(low)}V{n(high)}")
        marks.append(
            marker(x, plot.y.at(values[i]), radius, f"{tone} solid", title=None if titles is None else titles[i])
        )
    body = plot.axes(x_label, y_label)
    body.extend(f'<path class="whisker {tone}" d="{"".join(parts)}"/>' for tone, parts in strokes.items() if parts)
    body.append(f'<path class="zero" d="M{n(plot.x.start)} {n(plot.y.at(0.0))}H{n(plot.x.stop)}"/>')
    return svg(body + marks, size=SIZE, describe=title or y_label)


def above_limit(
    values: Sequence[float],
    limit: float,
    *,
    titles: Sequence[str] | None = None,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    total: int | None = None,
) -> str:
    """Draw sorted values and a limit; those above it stand out, and those far above it are triangles at the edge.

    Parameters
    ----------
    values : sequence of float
        Missing values (NaN, minus infinity) are left out.
    limit : float
        Drawn as a dashed line.
    titles, total
        As for `signed_bars`.
    """
    order = sorted((i for i in range(len(values)) if values[i] > -math.inf), key=lambda i: values[i])
    far = FAR * limit
    plot = _sorted_plot(len(order), total, [limit, *(min(values[i], far) for i in order)])
    wide = (plot.x.stop - plot.x.start) / max(len(order), 1)
    radius = min(max(0.45 * wide, 1.5), 4.0)
    body = plot.axes(x_label, y_label)
    body.append(f'<path class="line plain dashed thin" d="M{n(plot.x.start)} {n(plot.y.at(limit))}H{n(plot.x.stop)}"/>')
    for place, i in enumerate(order):
        x, y = plot.x.start + (place + 0.5) * wide, plot.y.at(min(values[i], far))
        tone, shape = "bad" if values[i] > limit else "plain", 2 if values[i] > far else 0
        body.append(marker(x, y, radius, f"{tone} solid", shape, None if titles is None else titles[i]))
    return svg(body, size=SIZE, describe=title or y_label)


def _sorted_plot(shown: int, total: int | None, values: Sequence[float], y_form: TickFormat = plain_ticks) -> Plot:
    """Lay out axes for sorted values: x counts to the number before thinning, y includes zero."""
    x = [0, max(total or shown, 1)]
    return Plot.fit(x, [0.0, *values], size=SIZE, y_form=y_form, integer=(True, False), anchored=True)
