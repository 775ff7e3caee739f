# SPDX-License-Identifier: Apache-2.0
"""A forest plot: one narrow row for each client, an estimate on its interval, and a line at what is common to all."""

from collections.abc import Sequence

from coterie.report.frame import axis, escape, marker, n, svg, ticks_below
from coterie.report.numbers import plain_ticks
from coterie.report.plots import WIDTH

__all__ = ["forest"]

_ROW = 15.0  # pixels of height
_NAMES = 120.0  # pixels of width
_LONGEST = 18  # characters of a name


def forest(
    names: Sequence[str],
    means: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    centre: float,
    x_label: str = "",
    title: str = "",
) -> str:
    """Draw one row per name: a dot at the mean on a line from low to high.

    Parameters
    ----------
    names, means, low, high : sequence
        One row each.
    centre : float
        Where a line goes through all rows; rows whose interval does not reach it stand out.
    """
    bottom = _ROW * len(names) + 6
    size = (WIDTH, bottom + 42)
    across = axis([centre, *means, *low, *high], _NAMES + 10, WIDTH - 14, form=plain_ticks, pad=0.03)
    body = [f'<path class="grid" d="{"".join(f"M{n(across.at(t))} 0V{n(bottom)}" for t in across.ticks)}"/>']
    body.append(f'<path class="zero" d="M{n(across.at(centre))} 0V{n(bottom)}"/>')
    for i, name in enumerate(names):
        y = _ROW * (i + 0.5) + 3
        short = name if len(name) <= _LONGEST else name[: _LONGEST - 1].rstrip() + "…"
        whole = "" if short == name else f"<title>{escape(name)}</title>"
        body.append(f'<text class="name" x="0" y="{n(y + 4)}">{escape(short)}{whole}</text>')
        tone = "k0" if low[i] > centre or high[i] < centre else "plain"
        body.append(f'<path class="line {tone}" d="M{n(across.at(low[i]))} {n(y)}H{n(across.at(high[i]))}"/>')
        said = f"{name}: {means[i]:.4g}, {low[i]:.4g} to {high[i]:.4g}"
        body.append(marker(across.at(means[i]), y, 3.5, f"{tone} solid", title=said))
    body.extend(ticks_below(across, bottom))
    body.append(f'<text class="end" x="{n(WIDTH - 14)}" y="{n(bottom + 36)}">{escape(x_label)}</text>')
    return svg(body, size=size, describe=title or x_label)
