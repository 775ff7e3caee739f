# SPDX-License-Identifier: Apache-2.0
"""Means with their intervals, one under another, against a line at zero."""

import math
from collections.abc import Sequence

from coterie.report.frame import axis, escape, marker, n, svg, ticks_below
from coterie.report.numbers import TickFormat, plain_ticks
from coterie.report.plots import WIDTH, row_name

__all__ = ["intervals"]


def intervals(
    names: Sequence[str],
    means: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    strong: int | None = None,
    titles: Sequence[str] | None = None,
    form: TickFormat = plain_ticks,
    x_label: str = "",
    title: str = "",
    width: float = WIDTH,
    standalone: bool = False,
) -> str:
    """Draw one row per name: a dot at the mean on a line from low to high, and zero as a line through all rows.

    Parameters
    ----------
    names, means, low, high : sequence
        One row each; a missing mean (NaN) has a name only.
    strong : int, optional
        The row that is the subject; the others are grey.
    titles : sequence of str, optional
        What shows when the pointer rests on a row's dot.
    """
    size = (width, 38.0 * len(names) + 50)
    bottom = size[1] - 42
    across = axis((0.0, *means, *low, *high), 10, width - 14, form=form, pad=0.06)
    body = [f'<path class="grid" d="{"".join(f"M{n(across.at(t))} 0V{n(bottom)}" for t in across.ticks)}"/>']
    body.append(f'<path class="zero" d="M{n(across.at(0.0))} 0V{n(bottom)}"/>')
    for i, name in enumerate(names):
        y = 38.0 * i
        body.append(row_name(name, y + 13))
        if not math.isfinite(means[i]):
            continue
        tone = "k0" if strong in (None, i) else "plain"
        if math.isfinite(low[i]) and math.isfinite(high[i]):
            body.append(f'<path class="line {tone}" d="M{n(across.at(low[i]))} {n(y + 25)}H{n(across.at(high[i]))}"/>')
        body.append(marker(across.at(means[i]), y + 25, 5, tone, title=None if titles is None else titles[i]))
    body.extend(ticks_below(across, bottom))
    body.append(f'<text class="end" x="{n(width - 14)}" y="{n(bottom + 36)}">{escape(x_label)}</text>')
    return svg(body, size=size, describe=title or x_label, title=title, standalone=standalone)
