# SPDX-License-Identifier: Apache-2.0
"""How a comparison shows itself in Python and in notebooks: the headline, and a table of structures."""

from html import escape

from coterie.report.words import NATS, SETTING
from coterie.selection.result import Comparison, Structure
from coterie.selection.text import answer, metric_name, plus_minus

__all__ = ["comparison_html", "comparison_text", "setting_cell"]

_HEAD = ("structure", "setting", "held-out rows", "gain", "95 % interval", "new clients")


def setting_cell(one: Structure) -> str:
    """The setting as tables have it: intercepts are called as in the text, the others by their number or word."""
    if one.setting.get("prior") == "intercept":
        return one.label
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in one.setting.values()) or "-"


def comparison_text(found: Comparison) -> str:
    """Headline and table, for `repr`."""
    head, *rows = _cells(found)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([answer(found).headline, *(line.rstrip() for line in lines), *_notes(found)])


def comparison_html(found: Comparison) -> str:
    """Headline and table, for notebooks; names of all kinds are only text."""
    head, *rows = _cells(found)
    told = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in _notes(found))
    return (
        f"<div><p><strong>{escape(answer(found).headline)}</strong></p>"
        f"<table><thead><tr>{told}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"
    )


def _cells(found: Comparison) -> list[list[str]]:
    """Head and rows; columns without a value are left out."""
    rows = [list(_HEAD), *(_row(found, one) for one in found.structures)]
    there = [any(row[column] != "-" for row in rows[1:]) for column in range(len(_HEAD))]
    return [[cell for cell, keep in zip(row, there, strict=True) if keep] for row in rows]


def _row(found: Comparison, one: Structure) -> list[str]:
    tested = one.test_metric is not None
    mean, error = (one.test_metric, one.test_stderr) if tested else (one.metric, one.metric_stderr)
    gain = one.versus_global
    new = "-" if one.new_metric is None else plus_minus(found.metric, one.new_metric, one.new_stderr)
    shown = ["-", "-"] if gain is None else [f"{gain.mean:+.3f}", f"{gain.low:.3f}, {gain.high:.3f}"]
    star = "* " if one.name == found.chosen else ""
    return [f"{star}{one.name}", setting_cell(one), plus_minus(found.metric, mean, error), *shown, new]


def _notes(found: Comparison) -> list[str]:
    about = f"of {found.target}, " if found.target else ""
    return [
        f"*: chosen. Rows: {metric_name(found.metric)} {about}mean over clients ± standard error. Gain: in nats, {NATS}.",
        f"Setting: {SETTING}.",
    ]
