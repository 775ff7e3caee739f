# SPDX-License-Identifier: Apache-2.0
"""What every plot stands on: axes with round ticks, markers, legends, and the SVG element around them.

Text sizes may grow by a third on narrow screens (the page's style does that), so the layout leaves room for it.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from coterie.report.numbers import TickFormat, log_ticks, nice_ticks, plain_ticks

__all__ = [
    "N_COLOURS",
    "Axis",
    "Key",
    "Plot",
    "axis",
    "chip",
    "colour",
    "escape",
    "marker",
    "n",
    "style",
    "svg",
    "swatch",
]

N_COLOURS = 8
N_SHAPES = 4
_CHARACTER = 6.7  # a digit's width at 12 units, with some air


def escape(text: object) -> str:
    """Make text safe inside SVG and HTML; control characters are not allowed in XML and become a visible mark."""
    return html.escape("".join(c if c >= " " or c in "\t\n" else "\ufffd" for c in str(text)))


def n(value: float) -> str:
    """Write a coordinate briefly."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


def style() -> str:
    """Read the style sheet of the charts."""
    return files("coterie.report").joinpath("chart.css").read_text(encoding="utf-8")


def colour(k: int) -> str:
    """Give the CSS class of cluster k: eight colours, then again."""
    return f"k{k % N_COLOURS}"


def chip(k: int) -> str:
    """Give the CSS classes of a cluster's chip in a table: round, and square from the ninth on, as on the map."""
    return "plain" if k < 0 else colour(k) + " again" * (k >= N_COLOURS)


@dataclass(frozen=True)
class Key:
    """One line of a legend: its name, the CSS classes of its mark, and what the mark is.

    `kind` is "line", "area" or "dot"; `shape` counts through circle, square, triangle and diamond.
    """

    name: str
    classes: str
    kind: str = "area"
    shape: int = 0


@dataclass(frozen=True)
class Axis:
    """Values from low to high on pixels from start to stop, with ticks and their labels."""

    low: float
    high: float
    start: float
    stop: float
    ticks: list[float]
    labels: list[str]
    log: bool = False

    def at(self, value: float) -> float:
        """Place a value; what lies outside sits on the edge."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def axis(
    values: Iterable[float],
    start: float,
    stop: float,
    *,
    form: TickFormat = plain_ticks,
    log: bool = False,
    integer: bool = False,
    pad: float = 0.05,
    anchored: bool = False,
    most: int = 6,
) -> Axis:
    """Fit an axis to values: round ticks inside, and a little air at the ends.

    `pad` is the air as a share of the range; an anchored axis that begins at zero has none below it.
    """
    finite = [float(v) for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    if log:
        low, high = low / (high / low) ** pad, high * (high / low) ** pad
        if high / low < 1.001:
            low, high = low / 2, high * 2
        ticks = log_ticks(low, high, most=most)
        # Each label alone: common decimals would write 0.001 and 100.000.
        return Axis(low, high, start, stop, ticks, [form([t])[0] for t in ticks], log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        air = 0.5 if integer or low == 0 else abs(low) * 0.1
        low, high = low - air, high + air
    air = pad * (high - low)
    low, high = low - (0.0 if anchored and low == 0 else air), high + air
    ticks = nice_ticks(low, high, most=most, integer=integer)
    return Axis(low, high, start, stop, ticks, form(ticks))


def marker(x: float, y: float, size: float, classes: str, shape: int = 0, title: str | None = None) -> str:
    """Draw one mark, with a name to show when the pointer rests on it."""
    if shape % N_SHAPES == 0:
        tag, where = "circle", f'cx="{n(x)}" cy="{n(y)}" r="{n(size)}"'
    else:
        s = size * (0.9, 1.25, 1.3)[shape % N_SHAPES - 1]
        corners = (
            [(-s, -s), (s, -s), (s, s), (-s, s)],
            [(0, -s), (s, 0.8 * s), (-s, 0.8 * s)],
            [(0, -s), (s, 0), (0, s), (-s, 0)],
        )[shape % N_SHAPES - 1]
        tag, where = "path", f'd="M{"L".join(f"{n(x + a)} {n(y + b)}" for a, b in corners)}Z"'
    inside = "" if title is None else f"<title>{escape(title)}</title>"
    return f'<{tag} class="mark {classes}" {where}>{inside}</{tag}>'


def swatch(key: Key, x: float = 0.0, y: float = 0.0) -> str:
    """Draw the mark of a legend line in a box of 14 by 14."""
    if key.kind == "line":
        return f'<path class="line {key.classes}" d="M{n(x)} {n(y + 7)}h14"/>'
    if key.kind == "dot":
        return marker(x + 7, y + 7, 4.5, key.classes, key.shape)
    return f'<rect class="{key.classes}" x="{n(x + 1)}" y="{n(y + 1)}" width="12" height="12"/>'


@dataclass(frozen=True)
class Plot:
    """The axes of one plot, in a space of width by height units."""

    x: Axis
    y: Axis
    width: float
    height: float

    @classmethod
    def fit(
        cls,
        x: Iterable[float],
        y: Iterable[float],
        *,
        size: tuple[float, float],
        x_form: TickFormat = plain_ticks,
        y_form: TickFormat = plain_ticks,
        log: tuple[bool, bool] = (False, False),
        integer: tuple[bool, bool] = (False, False),
        pad: tuple[float, float] = (0.0, 0.05),
        anchored: bool = False,
    ) -> "Plot":
        """Lay both axes out: the left margin is as wide as the labels of y need."""
        width, height = size
        up = axis(y, height - 42, 30, form=y_form, log=log[1], integer=integer[1], pad=pad[1], anchored=anchored)
        left = 12 + 1.25 * _CHARACTER * max(len(label) for label in up.labels)
        across = axis(x, left, width - 14, form=x_form, log=log[0], integer=integer[0], pad=pad[0])
        return cls(across, up, width, height)

    def axes(self, x_label: str = "", y_label: str = "") -> list[str]:
        """Draw grid lines, tick labels and the names of the axes."""
        left, right, bottom = self.x.start, self.x.stop, self.y.start
        out = [f'<path class="grid" d="{"".join(f"M{n(left)} {n(self.y.at(t))}H{n(right)}" for t in self.y.ticks)}"/>']
        out.append(f'<path class="base" d="M{n(left)} {n(bottom)}H{n(right)}"/>')
        for tick, label in zip(self.y.ticks, self.y.labels, strict=True):
            out.append(f'<text class="end" x="{n(left - 7)}" y="{n(self.y.at(tick) + 4)}">{escape(label)}</text>')
        out.extend(ticks_below(self.x, bottom))
        if x_label:
            out.append(f'<text class="end" x="{n(right)}" y="{n(bottom + 36)}">{escape(x_label)}</text>')
        if y_label:
            out.append(f'<text x="0" y="13">{escape(y_label)}</text>')
        return out

    def points(self, x: Sequence[float], y: Sequence[float]) -> list[list[tuple[float, float]]]:
        """Place a line's points, broken where a value is missing."""
        pieces: list[list[tuple[float, float]]] = [[]]
        for a, b in zip(x, y, strict=True):
            if math.isfinite(a) and math.isfinite(b):
                pieces[-1].append((self.x.at(a), self.y.at(b)))
            elif pieces[-1]:
                pieces.append([])
        return [piece for piece in pieces if piece]


def ticks_below(x: Axis, bottom: float) -> list[str]:
    """Draw the tick labels under a horizontal axis."""
    return [
        f'<text class="mid" x="{n(x.at(t))}" y="{n(bottom + 17)}">{escape(label)}</text>'
        for t, label in zip(x.ticks, x.labels, strict=True)
    ]


def svg(
    body: Sequence[str],
    *,
    size: tuple[float, float],
    describe: str,
    title: str = "",
    keys: Sequence[Key] = (),
    standalone: bool = False,
) -> str:
    """Wrap drawn parts into an SVG element.

    Inside the page a plot has neither title, legend nor style: the page gives them as HTML, which wraps on a narrow
    screen. Standalone, the file carries all three and a background.
    """
    width, height = size
    label = f'class="chart" role="img" aria-label="{escape(describe or title)}"'
    if not standalone:
        return f'<svg {label} viewBox="0 0 {n(width)} {n(height)}">{"".join(body)}</svg>'
    head, top = _head(title, keys, width)
    outer = (width + 32, height + top + 28)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {label} viewBox="0 0 {n(outer[0])} {n(outer[1])}" '
        f'width="{n(outer[0])}" height="{n(outer[1])}"><style>{style()}</style>'
        f'<rect class="back" width="{n(outer[0])}" height="{n(outer[1])}" rx="6"/>'
        f'<g transform="translate(16 16)">{head}<g transform="translate(0 {n(top)})">{"".join(body)}</g></g></svg>\n'
    )


def _head(title: str, keys: Sequence[Key], width: float) -> tuple[str, float]:
    """Draw title and legend above a standalone plot; also say how high they are."""
    out, top = [], 0.0
    if title:
        out.append(f'<text class="title" x="0" y="12">{escape(title)}</text>')
        top = 26.0
    x = 0.0
    for key in keys:
        wide = 20 + _CHARACTER * len(key.name) + 20
        if x > 0 and x + wide > width:
            x, top = 0.0, top + 20
        out.append(swatch(key, x, top))
        out.append(f'<text class="name" x="{n(x + 20)}" y="{n(top + 11)}">{escape(key.name)}</text>')
        x += wide
    return "".join(out), top + (26 if keys else 0)
