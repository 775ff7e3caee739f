# SPDX-License-Identifier: Apache-2.0
"""Means with their intervals, one under another, against a line at zero."""

import math
from collections.abc import Sequence

from coterie.report.frame import marker, n, svg
from coterie.report.numbers import plain_ticks
from coterie.report.plots import WIDTH, rows_frame

__all__ = ["intervals"]


def intervals(
    names: Sequence[str],
    means: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    strong: int | None = None,
    x_label: str = "",
    title: str = "",
) -> str:
    """Draw one row per name: a dot at the mean on a line from low to high, and zero as a line through all rows.

    Parameters
    ----------
    names, means, low, high : sequence
        One row each; a missing mean (NaN) has a name only.
    strong : int, optional
        The row that is the subject; the others are grey.
    """
    every = [0.0, *means, *low, *high]
    across, heights, body, size = rows_frame(names, every, form=plain_ticks, x_label=x_label, width=WIDTH)
    named = next((i for i, part in enumerate(body) if 'class="name"' in part), len(body))  # the line lies under names
    body.insert(named, f'<path class="zero" d="M{n(across.at(0.0))} 0V{n(size[1] - 42)}"/>')
    for i, y in enumerate(heights):
        if not math.isfinite(means[i]):
            continue
        tone = "k0" if strong in (None, i) else "plain"
        if math.isfinite(low[i]) and math.isfinite(high[i]):
            body.append(f'<path class="line {tone}" d="M{n(across.at(low[i]))} {n(y)}H{n(across.at(high[i]))}"/>')
        body.append(marker(across.at(means[i]), y, 5, tone))
    return svg(body, size=size, describe=title or x_label)
