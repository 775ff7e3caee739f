# SPDX-License-Identifier: Apache-2.0
"""What the run found, in words and a few numbers: headline, facts, comparison of methods."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from coterie.registry import METHODS
from coterie.report.numbers import count, fixed, human_bytes, human_seconds
from coterie.report.run_folder import Run, number

__all__ = ["Comparison", "Fact", "comparison", "facts", "headline", "method_name", "secured", "started"]

_SCORES = {
    "test": "held-out rows", "train": "training rows", "new_clients": "new clients",
    "new_clients_unlabelled": "new clients without labels",
}  # fmt: skip
_R2 = {"test_r2": "held-out R²", "train_r2": "training R²"}  # the first that there is


class Fact(NamedTuple):
    """A number with its name and a word on it."""

    name: str
    value: str
    note: str = ""


class Comparison(NamedTuple):
    """The table of methods: a head, and rows of (name, is this run's method, cells as (text, is the best)).

    `columns` are the values of the run's metric alone, to be drawn on one axis.
    """

    head: list[str]
    rows: list[tuple[str, bool, list[tuple[str, bool]]]]
    columns: dict[str, list[float]]
    own: int | None


def method_name(run: Run) -> str:
    """Name the method as its paper does."""
    key = str(run.info.get("method") or "")
    name = _name(key) or "Run"
    personal = run.part("config").get("personal")
    staged = isinstance(personal, dict) and personal.get("stragglers") == "srpfl"
    return f"{name} in stages (SRPFL)" if staged else name


def _name(method: str) -> str:
    if method == "global":  # what all others are compared with
        return "One model for all"
    return METHODS[method].title if method in METHODS else method.replace("_", " ")


def started(run: Run) -> str:
    """Write when the run began, to the minute."""
    text = run.info.get("started")
    if not isinstance(text, str):
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment:%Y-%m-%d %H:%M} {moment.tzname() or ''}".strip()


def headline(run: Run) -> str:
    """Say in one plain sentence what came out."""
    who = f"{_plural(run.n_clients, 'client')}" if run.n_clients else ""
    components = number(run.results.get("n_components"))
    if who and components is not None:
        who = f"{_plural(int(components), 'component')} in the rows of {who}"
    elif who and run.n_clusters and run.n_clusters > 1:
        who = f"{run.n_clusters} groups among {who}"
    scores = _score_sentence(run)
    if not scores and run.info.get("status") != "finished":
        scores = "not finished yet"
    return "; ".join(part for part in (who, scores) if part)


def _score_sentence(run: Run) -> str:
    """Compare the run with one model for all, and mixtures with one each, on held-out rows when there are any."""
    methods = _methods(run)
    own = _own(run, methods)
    if own is None:
        return ""
    rivals = {"global": f"with one {run.noun} for all"}
    if run.noun == "mixture":
        rivals["local"] = "with one each"
    others = [m for i, m in enumerate(methods) if i != own]
    for key in ("test", "train"):
        ours = number(methods[own].get(key))
        if ours is None:
            continue
        scores = {str(m.get("method")): found for m in others if (found := number(m.get(key))) is not None}
        met = {name: words for name, words in rivals.items() if name in scores}
        first, *texts = run.metric.texts([ours, *(scores[name] for name in met)])
        against = " and ".join(f"{text} {words}" for text, words in zip(texts, met.values(), strict=True))
        return f"on {_SCORES[key]} {run.metric.name} {first}" + (f" against {against}" if against else "")
    return ""


def comparison(run: Run) -> Comparison | None:
    """Lay out the methods side by side; None when there is nothing to lay out."""
    methods = _methods(run)
    columns = {
        name: values
        for key, name in _SCORES.items()
        if not all(np.isnan(values := [_or_nan(m.get(key)) for m in methods]))
    }
    if not columns:
        return None
    good = _without_outliers(run, methods)
    if good is not None:
        columns["held-out rows, no outliers"] = good
    texts = {name: run.metric.texts(values) for name, values in columns.items()}
    pick = np.nanmax if run.metric.higher else np.nanmin
    rivals = {name: values for name, values in columns.items() if np.isfinite(values).sum() > 1}
    best = {name: texts[name][values.index(pick(values))] for name, values in rivals.items()}
    explained = next((name for name in _R2 if any(number(m.get(name)) is not None for m in methods)), None)
    if explained is not None:
        shares = [_or_nan(m.get(explained)) for m in methods]
        texts[_R2[explained]] = [fixed(v, 3) for v in shares]
        if len(methods) > 1:
            best[_R2[explained]] = fixed(max(v for v in shares if not np.isnan(v)), 3)
    own = _own(run, methods)
    rows = []
    for i, entry in enumerate(methods):
        cells = [(column[i], column[i] == best.get(name)) for name, column in texts.items()]
        rows.append((_label(entry), i == own, cells))
    return Comparison(list(texts), rows, columns, own)


def _without_outliers(run: Run, methods: list[Mapping[str, Any]]) -> list[float] | None:
    """Score the methods on the held-out rows of clients that are no outliers; None when everybody is none."""
    rows, outlier = run.client_column("rows_test"), run.clients.get("outlier") or []
    if rows is None or True not in outlier:
        return None
    scores = []
    for entry in methods:
        own = "metric" if entry.get("method") == run.info.get("method") else f"metric_{entry.get('method')}"
        values = run.client_column(own)
        values = np.full(len(rows), np.nan) if values is None else values
        counts = (rows > 0) & np.isfinite(values) & [v is not True for v in outlier]
        scores.append(float(np.average(values[counts], weights=rows[counts])) if counts.any() else float("nan"))
    return scores if np.isfinite(scores).any() else None


def facts(run: Run) -> list[Fact]:
    """List the numbers that describe the run; those that are not known are left out."""
    data, results = run.part("data"), run.results
    sizes = results.get("cluster_sizes") or []
    out = [
        Fact("clients", count(run.n_clients)) if run.n_clients else None,
        _count_fact("rows", data.get("n_rows"), _rows_note(run)),
        _count_fact("features", data.get("n_features")),
        _count_fact("clusters", run.n_clusters, _sizes_note(sizes)),
        _count_fact("components", results.get("n_components")),
        _sharing_fact(run),
        _outliers_fact(run),
        _count_fact("anchors", len(results.get("anchors") or []) or None, "clients that moment descent began with"),
        _rounds_fact(run),
        _clock_fact(run),
        _worst_fact(run),
        _uncertain_fact(run),
    ]
    agreement = number(results.get("adjusted_rand"))
    if agreement is not None:
        out.append(Fact("agreement", fixed(agreement, 2), "with the known groups (adjusted Rand index; 1 is perfect)"))
    seconds = number(run.info.get("seconds"))
    if seconds is not None:
        out.append(Fact("time", human_seconds(seconds)))
    out.extend(traffic(run))
    return [fact for fact in out if fact is not None]


def traffic(run: Run) -> list[Fact]:
    """Messages and bytes of the whole run; of earlier versions, the bytes of all rounds."""
    messages = number(run.results.get("messages"))
    out = [] if messages is None else [Fact("messages", count(int(messages)), "in each, every client is asked once")]
    for column, name, note in (("bytes_up", "sent up", "from clients"), ("bytes_down", "sent down", "to clients")):
        values = [v for v in run.rounds.get(column, []) if v is not None]
        total = number(run.results.get(column))
        if values or total is not None:
            out.append(Fact(name, human_bytes(sum(values) if total is None else total), note))
    return out


def secured(run: Run) -> str | None:
    """What secure sums have cost, and who dropped out of them, in words."""
    cost = run.results.get("secure")
    if not cost:
        return None
    said = (
        f"Nodes added up securely: {_plural(cost['sums'], 'sum')} over up to {_plural(cost['nodes'], 'node')}, of which "
        f"{count(cost['threshold'])} had to stay to the end, with {_plural(cost['exchanges'], 'exchange')} of keys. It took "
        f"{human_bytes(cost['bytes_up'])} up and {human_bytes(cost['bytes_down'])} down, and "
        f"{human_seconds(cost['seconds'])}."
    )
    gone = [f"{name} ({_plural(n, 'sum')})" for name, n in cost["dropped"].items()]
    return said + (f" Dropped out: {', '.join(gone)}." if gone else " Nobody dropped out.")


def _methods(run: Run) -> list[Mapping[str, Any]]:
    """The entries of the comparison."""
    return [m for m in run.results.get("methods") or [] if isinstance(m, dict)]


def _own(run: Run, methods: list[Mapping[str, Any]]) -> int | None:
    """Find this run's own entry: by its method, else the first."""
    matching = [i for i, m in enumerate(methods) if m.get("method") == run.info.get("method")]
    return next(iter(matching), 0 if methods else None)


def _label(entry: Mapping[str, Any]) -> str:
    """Name an entry."""
    key = str(entry.get("method") or "")
    return str(entry.get("label") or _name(key))


def _or_nan(value: object) -> float:
    found = number(value)
    return float("nan") if found is None else found


def _plural(n: int, noun: str) -> str:
    return f"{count(n)} {noun}" + ("" if n == 1 else "s")


def _count_fact(name: str, value: object, note: str = "") -> Fact | None:
    found = number(value)
    return None if found is None else Fact(name, count(found), note)


def _rows_note(run: Run) -> str:
    train, test = run.client_column("rows_train"), run.client_column("rows_test")
    if train is None or test is None or not np.nansum(test):
        return ""
    apart = run.client_column("rows_calibration")
    more = "" if apart is None else f", {count(np.nansum(apart))} to calibrate"
    return f"{count(np.nansum(train))} to train{more}, {count(np.nansum(test))} held out"


def _sizes_note(sizes: list[int]) -> str:
    """Write the sizes out when they are few."""
    if not sizes:
        return ""
    if len(sizes) <= 6:
        return "with " + ", ".join(count(s) for s in sizes) + " clients"
    if min(sizes) == max(sizes):
        return f"with {_plural(sizes[0], 'client')} each"
    return f"with {count(min(sizes))} to {count(max(sizes))} clients"


def _rounds_fact(run: Run) -> Fact | None:
    if run.chosen is None:
        return None
    note = f"best of {len(run.restarts)} restarts (number {run.chosen})" if len(run.restarts) > 1 else ""
    if run.results.get("settled") is False:
        note = "not converged: estimates still moved in the last round"
    if run.descents:
        note = f"after {sum(map(len, run.descents))} iterations of moment descent"
    return Fact("rounds", count(len(run.restarts[run.chosen])), note)


def _clock_fact(run: Run) -> Fact | None:
    """What the clock showed in the end."""
    seconds = number(run.results.get("virtual_time"))
    return None if seconds is None else Fact("virtual time", human_seconds(seconds), "of all rounds, simulated")


def _worst_fact(run: Run) -> Fact | None:
    """How the clients fare who fare worst."""
    spread = run.results.get("spread")
    own = spread.get(run.info.get("method")) if isinstance(spread, dict) else None
    worst = number(own.get("worst_decile")) if isinstance(own, dict) else None
    if worst is None:
        return None
    return Fact(
        "worst tenth", run.metric.texts([worst])[0], f"mean {run.metric.name} of the worst tenth of the clients"
    )


def _sharing_fact(run: Run) -> Fact | None:
    """How much the clients of a mixture share."""
    value = run.results.get("c_lambda")
    if value == "common":
        return Fact("c_lambda", "∞", "all clients have the same components")
    found = number(value)
    if found is None:
        return None
    return Fact("c_lambda", f"{found:g}", "components are shrunk to a centre" if found else "each client fitted alone")


def _outliers_fact(run: Run) -> Fact | None:
    outliers = run.results.get("outliers")
    if not isinstance(outliers, list) or not run.n_clients:
        return None
    return Fact("outliers", count(len(outliers)), f"of {_plural(run.n_clients, 'client')}")


def _uncertain_fact(run: Run) -> Fact | None:
    uncertain = number(run.results.get("uncertain_clients"))
    if uncertain is None or not run.n_clients:
        return None
    return Fact("too close to call", count(uncertain), f"of {_plural(run.n_clients, 'client')}")
