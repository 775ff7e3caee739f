# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them: sensible precision, units, and ticks at round values."""

import math
from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "NONE",
    "TickFormat",
    "byte_ticks",
    "count",
    "decimals_for",
    "fixed",
    "human_bytes",
    "human_seconds",
    "log_ticks",
    "nice_ticks",
    "percent",
    "percent_ticks",
    "plain_ticks",
]

NONE = "\u2013"  # an en dash
_MINUS = "\u2212"
_SPACE = "\u00a0"  # a number and its unit stay on one line
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

TickFormat = Callable[[Sequence[float]], list[str]]


def decimals_for(values: Iterable[float | None], significant: int = 3, most: int = 6) -> int:
    """Choose the decimals that give the typical value so many significant digits and keep unequal values apart.

    Parameters
    ----------
    values : iterable of float or None
        What will be shown side by side; None and NaN do not count.
    significant : int
        Digits that the median magnitude gets.
    most : int
        Never more decimals than this.
    """
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    sizes = sorted(abs(v) for v in finite if v != 0)
    if not sizes:
        return 0
    typical = sizes[len(sizes) // 2]
    decimals = min(max(significant - 1 - math.floor(math.log10(typical)), 0), most)
    if all(v == int(v) for v in finite) and typical >= 10:
        return 0
    # Two methods that differ in the fourth digit must not look equal; a long column of clients may.
    enough = min(decimals + 2, most) if len(finite) <= 8 else decimals
    while decimals < enough and len({round(v, decimals) for v in finite}) < len(set(finite)):
        decimals += 1
    return decimals


def fixed(value: float | None, decimals: int = 3) -> str:
    """Write a number with fixed decimals, a true minus sign, and a dash where there is none."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else _MINUS + "∞"
    # Adding zero turns -0.0 into 0.0.
    text = f"{value:.3g}" if abs(value) >= 1e7 else f"{round(value, decimals) + 0.0:.{decimals}f}"
    return text.replace("-", _MINUS, 1) if text.startswith("-") else text


def percent(share: float | None, decimals: int = 1) -> str:
    """Write a share between 0 and 1 in percent."""
    if share is None or math.isnan(share):
        return NONE
    return f"{fixed(100 * share, decimals)}{_SPACE}%"


def count(value: float | None) -> str:
    """Write a whole number with commas between the thousands."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{int(value):,}" if abs(value) >= 1000 else str(int(value))


def human_bytes(value: float | None) -> str:
    """Write a number of bytes with a decimal unit: 1.25 MB."""
    if value is None or not math.isfinite(value):
        return NONE
    unit = _byte_unit(value)
    scaled = value / 1000**unit
    decimals = 0 if unit == 0 else max(2 - int(math.log10(max(scaled, 1))), 0)
    return f"{scaled:.{decimals}f}{_SPACE}{_BYTE_UNITS[unit]}"


def human_seconds(value: float | None) -> str:
    """Write a duration: 0.42 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if value is None or not math.isfinite(value):
        return NONE
    if value < 59.5:
        return f"{value:.{max(0, 1 - math.floor(math.log10(max(value, 0.01))))}f}{_SPACE}s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min" + (f" {seconds}{_SPACE}s" if seconds else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{_SPACE}h" + (f" {minutes}{_SPACE}min" if minutes else "")


def nice_ticks(low: float, high: float, *, most: int = 6, integer: bool = False) -> list[float]:
    """Place at most so many ticks at round values (1, 2, 2.5 or 5 times a power of ten) within [low, high]."""
    span = high - low
    if not span > 0:
        return [low]
    power = math.floor(math.log10(span / most))
    for exponent in (power, power + 1):
        for factor in (1.0, 2.0, 2.5, 5.0):
            step = factor * 10.0**exponent
            if integer and (step < 1 or step != int(step)):
                continue
            first = math.ceil(low / step - 1e-9)
            last = math.floor(high / step + 1e-9)
            if last - first < most:
                # Rounding clears 0.30000000000000004; two more digits than the step needs, for 2.5.
                return [round(k * step, max(0, 2 - exponent)) for k in range(first, last + 1)]
    return [low, high]


def log_ticks(low: float, high: float, *, most: int = 7) -> list[float]:
    """Place ticks at powers of ten, or at 1, 2, 5 times them when there are too few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**e for e in range(first, last + 1) for f in factors]
        inside = [t for t in ticks if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(inside) <= most:
            break
    stride = math.ceil(len(inside) / most)
    return inside[::stride] or [low, high]


def plain_ticks(ticks: Sequence[float]) -> list[str]:
    """Label ticks with as many decimals as they need, and k or M for large ones."""
    largest = max((abs(t) for t in ticks), default=0.0)
    for size, divisor, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if largest >= size:
            return [label if label == "0" else label + suffix for label in _shortest([t / divisor for t in ticks])]
    return _shortest(ticks)


def percent_ticks(ticks: Sequence[float]) -> list[str]:
    """Label ticks of a share between 0 and 1 in percent."""
    return [f"{label}{_SPACE}%" for label in _shortest([100 * t for t in ticks])]


def byte_ticks(ticks: Sequence[float]) -> list[str]:
    """Label ticks in one common byte unit."""
    unit = _byte_unit(max((abs(t) for t in ticks), default=0.0))
    labels = _shortest([t / 1000**unit for t in ticks])
    return [label if label == "0" else f"{label}{_SPACE}{_BYTE_UNITS[unit]}" for label in labels]


def _byte_unit(value: float) -> int:
    """Choose the largest unit that leaves at least 1."""
    unit = 0
    while abs(value) >= 999.5 * 1000**unit and unit < len(_BYTE_UNITS) - 1:
        unit += 1
    return unit


def _shortest(values: Sequence[float]) -> list[str]:
    """Write all with the fewest common decimals that lose nothing; tiny ones in scientific form."""
    if any(v != 0 and abs(v) < 1e-4 for v in values):
        return [("0" if v == 0 else f"{v:.2g}").replace("e-0", "e-").replace("-", _MINUS) for v in values]
    for decimals in range(7):
        if all(math.isclose(round(v, decimals), v, rel_tol=1e-9, abs_tol=1e-12) for v in values):
            break
    return ["0" if v == 0 else fixed(v, decimals) for v in values]
