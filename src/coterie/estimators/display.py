# SPDX-License-Identifier: Apache-2.0
"""How a fitted estimator shows itself in Python and in notebooks: what it was fitted to, and a table of scores."""

from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["fitted_html", "fitted_text"]

_COLUMNS = {"train": "training rows", "test": "test rows", "new_clients": "new clients"}
_METRICS = {"regression": "root mean squared error", "classification": "accuracy", "none": "log density of a row"}


def fitted_text(model: Any) -> str:
    """What was fitted, and how it does."""
    head, *rows = _cells(model.scores_, model.schema_.task)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([_headline(model), *(line.rstrip() for line in lines)])


def fitted_html(model: Any, made: str) -> str:
    """The same for notebooks; `made` is how the estimator was made, and all names are only text."""
    head, *rows = _cells(model.scores_, model.schema_.task)
    told = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div><p><strong>{escape(_headline(model))}</strong></p><p><code>{escape(made)}</code></p>"
        f"<table><thead><tr>{told}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _headline(model: Any) -> str:
    schema, n = model.schema_, len(model.client_names_)
    what = f", {schema.task} of '{schema.target}'" if schema.task != "none" else ""
    return f"fitted to {n} client{'s' * (n != 1)}, {schema.n_features} features{what}"


def _cells(scores: Mapping[str, Any], task: str) -> list[list[str]]:
    """Head and rows; columns without a value are left out."""
    there = [name for name in _COLUMNS if any(getattr(score, name) is not None for score in scores.values())]
    rows = [[_METRICS[task], *(_COLUMNS[name] for name in there)]]
    return rows + [[score.label, *(_number(getattr(score, name)) for name in there)] for score in scores.values()]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
