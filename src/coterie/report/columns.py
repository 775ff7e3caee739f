# SPDX-License-Identifier: Apache-2.0
"""Upright bars in groups: a few series of values side by side."""

import math
from collections.abc import Iterable, Mapping, Sequence

from coterie.report.frame import Key, Plot, escape, n, svg
from coterie.report.numbers import decimals_for, fixed
from coterie.report.plots import SIZE

__all__ = ["column_keys", "columns"]


def columns(
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
) -> str:
    """Draw the first values of all series side by side, then the second ones, and so on, counted from 1 below.

    Parameters
    ----------
    series : mapping
        Values by name; a missing one (NaN) has no bar. Series may differ in length.
    """
    longest = max((len(values) for values in series.values()), default=0)
    every = [v for values in series.values() for v in values]
    plot = Plot.fit([0.5, longest + 0.5], [0.0, *every], size=SIZE, integer=(True, False), anchored=True)
    body = plot.axes(x_label, y_label)
    slot = (plot.x.stop - plot.x.start) / max(longest, 1)
    wide = 0.76 * slot / max(len(series), 1)
    zero = plot.y.at(0.0)
    for s, (key, values) in enumerate(zip(column_keys(series), series.values(), strict=True)):
        decimals = decimals_for(values)
        for i, value in enumerate(values):
            if not math.isfinite(value):
                continue
            x, y = plot.x.start + (i + 0.12) * slot + s * wide, plot.y.at(value)
            name = f"<title>{escape(f'{key.name}, {i + 1}: {fixed(value, decimals)}')}</title>"
            body.append(
                f'<rect class="{key.classes}" x="{n(x)}" y="{n(min(y, zero))}" width="{n(wide)}" '
                f'height="{n(abs(zero - y))}">{name}</rect>'
            )
    return svg(body, size=SIZE, describe=title or y_label)


def column_keys(names: Iterable[str]) -> list[Key]:
    """Give the legend of the series: the last one is the subject, those before it are grey."""
    shown = list(names)
    return [Key(name, "bar k0" if name == shown[-1] else "bar plain faint") for name in shown]
