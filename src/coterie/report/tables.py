# SPDX-License-Identifier: Apache-2.0
"""The tables of the report: clients, clusters, profiles, events, settings."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from coterie.report.frame import chip
from coterie.report.numbers import NONE, count, decimals_for, fixed, percent
from coterie.report.run_folder import Floats, Run

__all__ = [
    "ClientTable",
    "Heat",
    "client_table",
    "cluster_table",
    "column_texts",
    "column_title",
    "events",
    "heat_cells",
    "how_to_load",
    "matrix",
    "profiles",
    "settings",
]

MOST_CLIENTS = 2000
MOST_EVENTS = 200
MOST_FEATURES = 12
MOST_WEIGHTS = 6

Cell = tuple[str, str, str]  # text, sign, strength

_TITLES = {
    "label": "cluster",
    "certain": "clear?",
    "rows_train": "rows",
    "rows_test": "held out",
    "train_loss": "train loss",
    "test_loss": "test loss",
    "train_log_likelihood": "train log-likelihood",
    "own": "own share",
    "rmse": "RMSE",
    "rounds": "rounds taken part in",
    "seconds": "seconds a round",
}
_METRICS = ("metric", "metric_global", "metric_local")
_FIRST = ("client", "label", "certain", "margin", "outlier_score", "outlier", "rows_train", "rows_test", *_METRICS)
_HIDDEN = ("map_x", "map_y", "margin_error")  # drawn, or written beside the margin


class ClientTable(NamedTuple):
    """The table of clients: (title, is a number) per column, rows of text, and what was left out."""

    head: list[tuple[str, bool]]
    rows: list[list[str]]
    n_total: int
    cluster_column: int | None
    colours: list[str]
    clusters: list[int]
    first: str  # what the first rows have, as "smallest margin"; "" when clients are in the order of their names
    without_weights: bool


class Heat(NamedTuple):
    """A table in colours: columns as (name, classes of its chip), rows of a name and cells, and how many rows there are."""

    head: list[tuple[str, str]]
    rows: list[tuple[str, list[Cell]]]
    n_total: int


def client_table(run: Run) -> ClientTable | None:
    """Lay the clients out, the least certain first, or those that are farthest out."""
    names = run.clients.get("client")
    if not names:
        return None
    first, order = _order(run, len(names))
    keep = order[:MOST_CLIENTS]
    columns = {name: run.clients[name] for name in _columns(run)}
    texts = {name: column_texts(run, name, [column[i] for i in keep]) for name, column in columns.items()}
    if "margin" in columns and "margin_error" in run.clients:
        texts["margin"] = _with_errors(*([run.clients[c][i] for i in keep] for c in ("margin", "margin_error")))
    labels = [run.labels[i] for i in keep] if run.labels else []
    head = [(column_title(run, name), _is_number(columns[name])) for name in columns]
    return ClientTable(
        head,
        [list(row) for row in zip(*texts.values(), strict=True)],
        len(names),
        list(columns).index("label") if "label" in columns else None,
        [chip(k) for k in labels],
        sorted(set(labels) - {-1}),
        first,
        len(run.weight_columns) > MOST_WEIGHTS,
    )


def _order(run: Run, n: int) -> tuple[str, list[int]]:
    """Sort the clients: those that need a look first.  -> what those have, and the order"""
    for name, words, sign in (("margin", "smallest margin", 1), ("outlier_score", "largest outlier score", -1)):
        column = run.client_column(name)
        if column is not None:
            return words, np.argsort(sign * column, kind="stable").tolist()
    return "", list(range(n))


def _columns(run: Run) -> list[str]:
    """The columns to show, known ones first; those with nothing in them, and lists, are left out."""
    known = [name for name in _FIRST if name in run.clients]
    hidden = (*_HIDDEN, *(run.weight_columns if len(run.weight_columns) > MOST_WEIGHTS else ()))
    others = [name for name in run.clients if name not in known and name not in hidden]
    return [name for name in known + others if _has_values(run.clients[name])]


def _has_values(column: list[Any]) -> bool:
    there = [v for v in column if v is not None and not (isinstance(v, float) and math.isnan(v))]
    return bool(there) and not any(isinstance(v, list | dict) for v in there)


def _is_number(column: list[Any]) -> bool:
    return all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in column)


def column_title(run: Run, name: str) -> str:
    """Name a column of the clients as the report does."""
    if name in _METRICS:
        whose = {"metric": "", "metric_global": ", one for all", "metric_local": f", one {run.noun} each"}
        return run.metric.name + whose[name]
    return _TITLES.get(name, name.replace("_", " "))


def column_texts(run: Run, name: str, column: list[Any]) -> list[str]:
    """Write a column with common decimals."""
    if name in _METRICS:
        return run.metric.texts(column)
    if name in run.weight_columns:
        return [percent(v) for v in column]
    if all(v is None or isinstance(v, bool) for v in column):
        return [NONE if v is None else "yes" if v else "no" for v in column]
    if not _is_number(column):
        return [NONE if v is None else str(v) for v in column]
    decimals = 0 if all(v is None or isinstance(v, int) for v in column) else decimals_for(column)
    return [fixed(v, decimals) for v in column]


def _with_errors(values: list[Any], errors: list[Any]) -> list[str]:
    """Write values with their errors: sorting by the first number of the text still sorts by value."""
    decimals = decimals_for(values)
    pairs = zip(values, errors, strict=True)
    return [fixed(v, decimals) + ("" if e is None else f" ± {fixed(e, decimals)}") for v, e in pairs]


def cluster_table(run: Run) -> tuple[list[str], list[tuple[int, str, list[str]]]] | None:
    """Sum the clients up by cluster: a head, and rows of (cluster, colour, cells)."""
    if not run.labels or (run.n_clusters or 0) < 2:
        return None
    labels = np.array(run.labels)
    members = {k: labels == k for k in range(max(run.n_clusters or 0, int(labels.max()) + 1))}
    columns = {"clients": [count(mine.sum()) for mine in members.values()]}
    rows = run.client_column("rows_train")
    if rows is not None:
        columns["rows"] = [count(np.nansum(rows[mine])) for mine in members.values()]
    certain = run.clients.get("certain")
    if certain is not None:
        unsure = np.array([v is False for v in certain])
        columns["too close to call"] = [count(unsure[mine].sum()) for mine in members.values()]
    for name in _METRICS:
        values = run.client_column(name)
        if values is not None:
            means = [_mean(values[mine]) for mine in members.values()]
            columns[f"mean {column_title(run, name)}"] = run.metric.texts(means)
    cells = zip(*columns.values(), strict=True)
    return list(columns), [(k, chip(k), list(row)) for k, row in zip(members, cells, strict=True)]


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def profiles(run: Run) -> Heat | None:
    """Show the features in which the clusters' models differ most, coloured by the distance from the clusters' mean."""
    found = run.results.get("profiles")
    if not isinstance(found, dict):
        return None
    names, table = found.get("features") or [], matrix(found.get("coefficients"))
    if table is None or len(table) < 2 or table.shape[1] != len(names):
        return None
    away = table - table.mean(0)  # [K, D]
    shown = np.argsort(-np.ptp(table, axis=0), kind="stable")[:MOST_FEATURES]
    away /= np.abs(away[:, shown]).max() or 1.0
    decimals = decimals_for(table[:, shown].ravel().tolist(), significant=2)
    rows = [(str(names[d]), heat_cells(table[:, d], away[:, d], decimals)) for d in shown]
    return Heat([(str(k), chip(k)) for k in range(len(table))], rows, len(names))


def matrix(rows: Any) -> Floats | None:
    """Read a table of numbers from JSON; None when any is missing."""
    table = np.array([[math.nan if v is None else v for v in row] for row in rows or []], dtype=np.float64)
    return table if table.ndim == 2 and np.isfinite(table).all() else None


def heat_cells(values: Floats, away: Floats, decimals: int) -> list[Cell]:
    """Write a row of numbers, coloured by the sign of `away` (between -1 and 1), the stronger the larger it is."""
    return [
        (fixed(v, decimals), "good" if a >= 0 else "bad", f"{0.55 * abs(a):.2f}")
        for v, a in zip(values.tolist(), away.tolist(), strict=True)
    ]


def events(run: Run) -> tuple[list[tuple[str, str, str]], int]:
    """List what happened on the way as (restart, round, text), and how many events there were."""
    found = [e for e in run.results.get("events") or [] if isinstance(e, dict)]
    rows = [tuple(str(e.get(key, NONE)) for key in ("run", "round", "text")) for e in found[:MOST_EVENTS]]
    return [(a, b, c) for a, b, c in rows], len(found)


def settings(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Flatten nested options to dotted names, as `--set` takes them."""
    return list(_flat(options, ""))


def _flat(options: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{name}", text


def how_to_load(run: Run) -> tuple[str, str]:
    """Write the lines that use the run's models, in Python and in the shell."""
    path = run.path or run.name
    shell = shlex.quote(path)
    python = f"import coterie\n\nmodel = coterie.load({json.dumps(path, ensure_ascii=False)})"
    return python, f"coterie predict {shell} DATA\ncoterie assign {shell} DATA"
