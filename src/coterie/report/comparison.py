# SPDX-License-Identifier: Apache-2.0
"""The report page of a comparison: the answer, the table with intervals, gains by client, groups and their models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.documents import checked, read_json
from coterie.errors import RunError
from coterie.files import check_files, check_seal
from coterie.registry import METHODS
from coterie.report import figures, tables
from coterie.report.client_plots import signed_bars
from coterie.report.coefficients import coefficient_table
from coterie.report.figures import Figure, figure, thinned
from coterie.report.intervals import intervals
from coterie.report.numbers import NONE, count, decimals_for, fixed, human_seconds, percent_ticks
from coterie.report.page import page, write_page
from coterie.report.plots import Line, line_chart
from coterie.report.run_document import ComparisonDocument
from coterie.report.run_folder import Metric, Run, number, read_table
from coterie.report.summary import Fact, started
from coterie.report.words import NATS, SETTING

__all__ = ["is_comparison", "read_comparison", "render_comparison", "write_comparison_report"]

_HIDDEN = ("score_", "map_")
_NATS = "nats per held-out row"


class Row(NamedTuple):
    """A line of the table: structure, setting, whether it was chosen, whether it is as good, and cells."""

    structure: str
    label: str
    chosen: bool
    as_good: bool
    cells: list[str]


def is_comparison(folder: Path) -> bool:
    """Whether a folder holds a comparison."""
    return (folder / "compare.json").is_file()


def write_comparison_report(folder: Path, *, name: str | None = None) -> Path:
    """Write `report.html` from the folder's `compare.json` and `clients.parquet`, and return its path.

    Parameters
    ----------
    folder : Path
        What `coterie compare --out` wrote.
    name : str, optional
        What the folder is called on the page, when it is about to be renamed.
    """
    return write_page(folder, render_comparison(folder, name=name))


def render_comparison(folder: Path, *, name: str | None = None) -> str:
    """Lay a comparison out as HTML."""
    return page("comparison.html.j2", **_context(_read(folder, name)))


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read `compare.json`.

    Raises
    ------
    RunError
        There is none, it cannot be read, or it is no comparison's; or what it has written beside it is damaged.
    """
    path, way_out = folder / "compare.json", "give the folder that `coterie compare --out` wrote"
    try:
        said: dict[str, Any] = read_json(path, "compare again with another --out")
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} is not a comparison: it has no compare.json", way_out) from None
    if not isinstance(said, dict) or not {"chosen", "rows", "answer"} <= said.keys():
        raise RunError(f"'{path}' is not the document of a comparison", way_out)
    check_seal(path, said)
    checked(ComparisonDocument, said, f"'{path}'", "compare again with another --out")
    check_files(folder, said)
    return said


def _read(folder: Path, name: str | None) -> Run:
    """Read a comparison as the run that the parts of the report know."""
    said = read_comparison(folder)
    groups, metric = said.get("grouping") or {}, str(said.get("metric"))
    data = {**(said.get("data") or {}), "metric": metric, "metric_better": "lower" if metric == "rmse" else "higher"}
    results = {"n_clusters": len(groups.get("sizes") or []), "profiles": _profiles(groups)}
    clients = _as_in_runs(read_table(folder / "clients.parquet"), str(said["chosen"]))
    if said.get("task") == "none":
        said["method"] = "mixture"  # that is what the page speaks of
    return Run(name or folder.resolve().name, {**said, "data": data, "results": results}, {}, clients)


def _as_in_runs(clients: dict[str, list[Any]], chosen: str) -> dict[str, list[Any]]:
    """Give columns the names that they have in a run: rows, and the metric of what was chosen."""
    kept = {name: v for name, v in clients.items() if not name.startswith("metric_")}
    own = {name: clients[f"metric_{name}"] for name in (chosen, "global", "local") if f"metric_{name}" in clients}
    named = {"metric" if name == chosen else f"metric_{name}": values for name, values in own.items()}
    return {("rows_train" if name == "rows" else name): values for name, values in kept.items()} | named


def _profiles(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Every group's coefficients; of several classes, a line for every feature and class."""
    profile, features = np.array(groups.get("profile") or [], dtype=np.float64), list(groups.get("features") or [])
    if profile.ndim == 3:
        features = [f"{name}, class {c}" for c in range(profile.shape[1]) for name in features]
        profile = profile.reshape(len(profile), -1)
    return {"features": features, "coefficients": profile.tolist()}


def _context(run: Run) -> dict[str, Any]:
    """Everything that the template shows."""
    info, rows = run.info, run.info["rows"]
    shown = Run(run.name, info, {}, {name: v for name, v in run.clients.items() if not name.startswith(_HIDDEN)})
    return {
        "run": run,
        "started": started(run),
        "answer": info["answer"],
        "methods": [method for method in METHODS.values() if method.structure == info["chosen"]],
        "facts": _facts(run),
        "head": _head(run),
        "rows": [_row(run, one) for one in rows],
        "differences": _differences(rows, run.noun),
        "gains": _gains(run),
        "trials": [found for one in rows if (found := _trials(one)) is not None],
        "placing": [found for found in (figures.client_map(run), _agreement(run)) if found is not None],
        "repetitions": (info.get("protocol") or {}).get("repetitions"),
        "stability": (info.get("grouping") or {}).get("stability"),
        "clusters": tables.cluster_table(shown),
        "profiles": tables.profiles(run),
        "coefficients": coefficient_table(info.get("coefficients")),
        "clients": tables.client_table(shown),
        "nats": NATS,
        "setting": SETTING,
        "settings": tables.settings(info.get("protocol") or {}),
        "data": tables.settings(info.get("data") or {}),
        "versions": tables.settings({"coterie": info.get("coterie"), **(info.get("versions") or {})}),
    }


def _facts(run: Run) -> list[Fact]:
    info, groups = run.info, run.info.get("grouping") or {}
    facts = [Fact("clients", count(info.get("n_clients")), f"{count(info.get('n_judged'))} scored")]
    if groups.get("stability") is not None:
        facts.append(Fact("stability of groups", fixed(groups["stability"], 2), "adjusted Rand index; 1 is perfect"))
    told = (
        ("outliers", "no shared model fits"),
        ("too_small", "too few rows to be scored"),
        ("absent", "did not answer"),
    )
    for name, words in told:
        if info.get(name):
            facts.append(Fact(name.replace("_", " "), count(len(info[name])), words))
    messages = number(info.get("messages"))
    if messages:
        facts.append(Fact("messages", count(int(messages)), "in each, every client is asked once"))
    return [*facts, Fact("took", human_seconds(number(info.get("seconds"))))]


# -- the table --------------------------------------------------------------------------------------------------------
def _head(run: Run) -> list[str]:
    rows, name = run.info["rows"], run.metric.name
    where = "test rows" if rows[0].get("rows") == "test" else "cross-validated"
    head = [f"{name}, {where}", f"gain over one {run.noun} for all", "95 % confidence interval"]
    head += ["chosen, of repetitions"] if _any(rows, "chosen_share") else []
    return [*head, f"{name}, new clients"] if _any(rows, "new_metric") else head


def _any(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(one.get(name) is not None for one in rows)


def _row(run: Run, one: Mapping[str, Any]) -> Row:
    gain = one.get("versus_global")
    decimals = decimals_for([gain["stderr"]], significant=2) if gain else 0
    span = f"{fixed(gain['low'], decimals)} to {fixed(gain['high'], decimals)}" if gain else NONE
    cells = [
        _error(run.metric, one.get("mean"), one.get("stderr")),
        fixed(gain["mean"], decimals) if gain else NONE,
        span,
    ]
    if _any(run.info["rows"], "chosen_share"):
        cells.append(f"{100 * float(one.get('chosen_share') or 0):.0f}\u00a0%")
    if _any(run.info["rows"], "new_metric"):
        cells.append(_error(run.metric, one.get("new_metric"), one.get("new_stderr")))
    return Row(str(one["structure"]), str(one["label"]), bool(one["chosen"]), bool(one.get("as_good")), cells)


def _error(metric: Metric, mean: float | None, stderr: float | None) -> str:
    """A mean with its standard error."""
    if mean is None:
        return NONE
    scale, unit = (100.0, "\u00a0%") if metric.share else (1.0, "")
    if not stderr:
        return f"{fixed(scale * mean, 3)}{unit}"
    decimals = decimals_for([scale * stderr], significant=2)
    return f"{fixed(scale * mean, decimals)} ± {fixed(scale * stderr, decimals)}{unit}"


# -- plots ------------------------------------------------------------------------------------------------------------
def _differences(rows: Sequence[Mapping[str, Any]], noun: str) -> Figure | None:
    """Draw what every structure brings over one model for all."""
    there = [one for one in rows if one.get("versus_global")]
    if not there:
        return None
    parts = {key: [float(one["versus_global"][key]) for one in there] for key in ("mean", "low", "high")}
    title = f"Gain over one {noun} for all"
    svg = intervals(
        [str(one["label"]) for one in there],
        parts["mean"],
        parts["low"],
        parts["high"],
        strong=next((i for i, one in enumerate(there) if one["chosen"]), -1),
        x_label=f"{_NATS}, right is better",
        title=title,
    )
    note = "Cross-validated, paired over scored clients without outliers; 95 % confidence intervals. Blue: chosen."
    return figure(title, svg, (), note)


def _gains(run: Run) -> Figure | None:
    """Draw what the chosen structure brings every client, sorted."""
    gain = run.client_column("gain")
    if gain is None or run.info["chosen"] == "global":
        return None
    there = gain[np.isfinite(gain)]
    better, worse = (count((sign * there > 1e-9).sum()) for sign in (1, -1))
    note = (
        f"On their own held-out rows, better for {better} of {count(len(there))} scored clients and worse for {worse}."
    )
    return figures.gain_bars(run, gain, _NATS, note)


def _trials(one: Mapping[str, Any]) -> Figure | None:
    """Draw the score over settings that are numbers in a row: clusters, rank, components, penalties."""
    trials = [t for t in one.get("trials") or [] if len(t["setting"]) == 1]
    trials = [t for t in trials if t["setting"].keys() == trials[0]["setting"].keys()]  # FedProx's have another axis
    points = [(next(iter(t["setting"].values())), t["score"], t["stderr"]) for t in trials]
    points = [point for point in points if all(number(v) is not None for v in point)]
    if len(points) < 2:
        return None
    name = next(iter(trials[0]["setting"]))
    words = name.replace("n_", "number of ")
    x, score, error = (list(column) for column in zip(*sorted(points), strict=True))
    whole = all(float(v).is_integer() for v in x)
    title = f"{str(one['structure']).capitalize()}: score by {words}"
    svg = line_chart(
        [Line(x, score, low=[s - e for s, e in zip(score, error, strict=True)],
              high=[s + e for s, e in zip(score, error, strict=True)])],
        x_label=words,
        y_label="mean log-likelihood of a held-out row",
        title=title,
        integer_x=whole,
        log_x=not whole and min(x) > 0,
    )  # fmt: skip
    return figure(title, svg, (), f"Cross-validated, with one standard error. Chosen: {one['label']}.")


def _agreement(run: Run) -> Figure | None:
    """Draw how often each client comes into its group again."""
    share = run.client_column("agreement")
    if share is None:
        return None
    keep, there = figures.ranked(-share)
    names = run.clients["client"]
    title = "How often each client is in the same group"
    svg = signed_bars(
        share[keep].tolist(),
        titles=[f"{names[i]}: {100 * share[i]:.0f} %" for i in keep],
        x_label="clients, most often first",
        y_label="share of the folds",
        title=title,
        y_form=percent_ticks,
        total=there,
    )
    always = count((share > 1 - 1e-9).sum())
    note = f"Every fold finds groups again. Always in the same group: {always} of {count(there)} clients."
    return figure(title, svg, (), note + thinned(len(keep), there))
