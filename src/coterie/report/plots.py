# SPDX-License-Identifier: Apache-2.0
"""Small plots as SVG text, without a plotting library: lines, points, areas.

Every function returns one SVG element, which takes its colours from the report. Lines and dots with ``standalone=True``
carry title, legend and style, and can be saved as .svg files that follow the reader's light or dark mode.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coterie.report.frame import N_COLOURS, Axis, Key, Plot, axis, colour, escape, marker, n, svg, ticks_below
from coterie.report.numbers import TickFormat, plain_ticks

__all__ = [
    "SIZE", "WIDTH", "Line", "cluster_keys", "dot_keys", "dots", "drawn_line", "line_chart", "rows_frame", "scatter",
    "stacked_area",
]  # fmt: skip

SIZE = WIDTH, HEIGHT = 480.0, 280.0
LONGEST_NAME = 46


@dataclass(frozen=True)
class Line:
    """One line of a line chart; `low` and `high` draw a band around it.

    Missing values (NaN) break the line. `colour` counts through the palette; None takes the line's position. Faint
    lines are grey; thin ones keep their colour.
    """

    x: Sequence[float]
    y: Sequence[float]
    name: str = ""
    colour: int | None = None
    faint: bool = False
    dashed: bool = False
    thin: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def cluster_keys(n_clusters: int, kind: str = "area", names: Sequence[str] | None = None) -> list[Key]:
    """Give the legend of so many clusters, in the colours and shapes that the plots use."""
    again = [" again" if kind == "area" and k >= N_COLOURS else "" for k in range(n_clusters)]
    mark = "area " if kind == "area" else ""
    shown = names if names is not None else [f"cluster {k}" for k in range(n_clusters)]
    return [Key(shown[k], mark + colour(k) + again[k], kind, k // N_COLOURS) for k in range(n_clusters)]


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    y_form: TickFormat = plain_ticks,
    log_x: bool = False,
    log_y: bool = False,
    integer_x: bool = False,
    from_zero: bool = False,
    size: tuple[float, float] = SIZE,
    standalone: bool = False,
) -> str:
    """Draw lines over a common x.

    Parameters
    ----------
    lines : sequence of Line
        Faint ones are drawn first, the others on top of them.
    x_label, y_label, title : str
        Names of the axes; the title shows standalone only and is read aloud otherwise.
    y_form : callable
        How the ticks of y are written: `plain_ticks`, `percent_ticks`, `byte_ticks`.
    log_x, log_y, integer_x, from_zero : bool
        Logarithmic axes; ticks of x at whole numbers only; y begins at zero.
    size : tuple of float
        Width and height of the drawing space.
    standalone : bool
        Carry title, legend and style.
    """
    ys = [v for line in lines for part in (line.y, line.low, line.high) if part is not None for v in part]
    if from_zero:
        ys.append(0.0)
    plot = Plot.fit(
        [v for line in lines for v in line.x],
        ys,
        size=size,
        y_form=y_form,
        log=(log_x, log_y),
        integer=(integer_x, False),
        anchored=from_zero,
    )
    body = plot.axes(x_label, y_label)
    keys = []
    for i, line in sorted(enumerate(lines), key=lambda pair: not pair[1].faint):
        classes = "plain" if line.faint else colour(i if line.colour is None else line.colour)
        body.extend(drawn_line(plot, line, classes))
        if line.name:
            keys.append((i, Key(line.name, f"{classes}{' dashed' * line.dashed}{' faint' * line.faint}", "line")))
    legend = [key for _, key in sorted(keys, key=lambda pair: pair[0])]
    return svg(body, size=size, describe=title or y_label, title=title, keys=legend, standalone=standalone)


def drawn_line(plot: Plot, line: Line, classes: str) -> list[str]:
    """Draw a line and its band."""
    out = []
    if line.low is not None and line.high is not None:
        both = [math.isfinite(a) and math.isfinite(b) for a, b in zip(line.low, line.high, strict=True)]
        edges = ([v if ok else math.nan for v, ok in zip(edge, both, strict=True)] for edge in (line.low, line.high))
        for below, above in zip(*(plot.points(line.x, edge) for edge in edges), strict=True):
            out.append(f'<path class="band {classes}" d="{_path(below + above[::-1])}Z"/>')
    style = f"{classes}{' faint' * line.faint}{' dashed' * line.dashed}{' thin' * line.thin}"
    pieces = plot.points(line.x, line.y)
    out.append(f'<path class="line {style}" d="{"".join(_path(piece) for piece in pieces if len(piece) > 1)}"/>')
    out.extend(marker(*piece[0], 2.5, style) for piece in pieces if len(piece) == 1)
    return out


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Write points as path commands."""
    return "M" + "L".join(f"{n(x)} {n(y)}" for x, y in points)


def scatter(
    x: Sequence[float],
    y: Sequence[float],
    *,
    groups: Sequence[int] | None = None,
    hollow: Sequence[bool] | None = None,
    titles: Sequence[str] | None = None,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    axes: bool = True,
    integer_y: bool = False,
    size: tuple[float, float] = SIZE,
) -> str:
    """Draw points, coloured and shaped by group, hollow where they are uncertain.

    Parameters
    ----------
    x, y : sequence of float
        Coordinates; points with a missing one are left out.
    groups : sequence of int, optional
        The group of each point, from 0.
    hollow : sequence of bool, optional
        Points that are drawn as outlines, on top of the others.
    titles : sequence of str, optional
        What shows when the pointer rests on a point.
    axes : bool
        Without axes there is only a frame: for maps whose coordinates have no meaning of their own.
    integer_y : bool
        Ticks of y at whole numbers only.
    """
    pad = (0.04, 0.05)
    plot = Plot.fit(x, y, size=size, pad=pad, integer=(False, integer_y))
    if axes:
        body = plot.axes(x_label, y_label)
    else:
        body = [f'<rect class="frame" x=".5" y=".5" width="{n(size[0] - 1)}" height="{n(size[1] - 1)}" rx="4"/>']
        plot = Plot(axis(x, 0, size[0], pad=pad[0]), axis(y, size[1], 0, pad=pad[1]), *size)
    shown = [i for i in range(len(x)) if math.isfinite(x[i]) and math.isfinite(y[i])]
    radius = 4.5 if len(shown) <= 200 else 3.2 if len(shown) <= 1000 else 2.3
    for i in sorted(shown, key=lambda i: hollow is not None and hollow[i]):
        k = 0 if groups is None else groups[i]
        classes = ("plain" if k < 0 else colour(k)) + (" hollow" if hollow is not None and hollow[i] else "")
        name = None if titles is None else titles[i]
        body.append(marker(plot.x.at(x[i]), plot.y.at(y[i]), radius, classes, max(k, 0) // N_COLOURS, name))
    return svg(body, size=size, describe=title)


def stacked_area(
    x: Sequence[float],
    layers: Sequence[Sequence[float]],
    *,
    names: Sequence[str] | None = None,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    integer_x: bool = False,
) -> str:
    """Draw layers on top of each other over a common x, the first at the bottom."""
    tops = [[0.0] * len(x)]
    for layer in layers:
        tops.append([below + value for below, value in zip(tops[-1], layer, strict=True)])
    plot = Plot.fit(x, [0.0, max(tops[-1])], size=SIZE, integer=(integer_x, True), pad=(0.0, 0.0))
    body = plot.axes(x_label, y_label)
    keys = cluster_keys(len(layers), names=names)
    for key, below, above in zip(keys, tops, tops[1:], strict=False):
        edge = [(plot.x.at(a), plot.y.at(b)) for a, b in zip(x, above, strict=True)]
        base = [(plot.x.at(a), plot.y.at(b)) for a, b in zip(x, below, strict=True)]
        name = f"<title>{escape(key.name)}</title>"
        body.append(f'<path class="{key.classes}" d="{_path(edge + base[::-1])}Z">{name}</path>')
    return svg(body, size=SIZE, describe=title or y_label)


def rows_frame(
    names: Sequence[str], values: Iterable[float], *, form: TickFormat, x_label: str, width: float
) -> tuple[Axis, list[float], list[str], tuple[float, float]]:
    """Lay out one row per name over a common axis: that axis, the heights of the marks, what is drawn, and the size."""
    size = (width, 38.0 * len(names) + 50)
    bottom = size[1] - 42
    across = axis(values, 10, width - 14, form=form, pad=0.06)
    body = [f'<path class="grid" d="{"".join(f"M{n(across.at(t))} 0V{n(bottom)}" for t in across.ticks)}"/>']
    body.extend(_row_name(name, 38.0 * i + 13) for i, name in enumerate(names))
    body.extend(ticks_below(across, bottom))
    body.append(f'<text class="end" x="{n(width - 14)}" y="{n(bottom + 36)}">{escape(x_label)}</text>')
    return across, [38.0 * i + 25 for i in range(len(names))], body, size


def _row_name(name: str, y: float) -> str:
    """Write the name of a row; a long one is cut, and whole when the pointer rests on it."""
    if len(name) <= LONGEST_NAME:
        return f'<text class="name" x="0" y="{n(y)}">{escape(name)}</text>'
    short = name[: LONGEST_NAME - 1].rstrip() + "…"
    return f'<text class="name" x="0" y="{n(y)}">{escape(short)}<title>{escape(name)}</title></text>'


def dots(
    names: Sequence[str],
    columns: Mapping[str, Sequence[float]],
    *,
    strong: int | None = None,
    form: TickFormat = plain_ticks,
    x_label: str = "",
    title: str = "",
    width: float = WIDTH,
    standalone: bool = False,
) -> str:
    """Draw one row per name with one dot per column on a common axis, which need not begin at zero.

    The first column's dots are filled; the second's hollow, the third's diamonds.
    """
    every = [v for column in columns.values() for v in column]
    across, heights, body, size = rows_frame(names, every, form=form, x_label=x_label, width=width)
    for i, y in enumerate(heights):
        values = {c: column[i] for c, column in columns.items() if math.isfinite(column[i])}
        if len(values) > 1:
            ends = [across.at(v) for v in values.values()]
            body.append(f'<path class="span" d="M{n(min(ends))} {n(y)}H{n(max(ends))}"/>')
        for key in reversed(dot_keys([c for c in columns if c in values], list(columns), strong in (None, i))):
            body.append(marker(across.at(values[key.name]), y, 5, key.classes, key.shape, key.name))
    keys = dot_keys(list(columns), list(columns), True)
    return svg(body, size=size, describe=title or x_label, title=title, keys=keys, standalone=standalone)


def dot_keys(shown: Sequence[str], columns: Sequence[str], strong: bool) -> list[Key]:
    """Give the marks of a dot plot's columns."""
    tone = "k0" if strong else "plain"
    marks = [(tone, 0), (f"{tone} hollow", 0), (tone, 3), (f"{tone} hollow", 3)]
    return [Key(c, marks[columns.index(c) % 4][0], "dot", marks[columns.index(c) % 4][1]) for c in shown]
