# SPDX-License-Identifier: Apache-2.0
"""How results are shown on the command line: tables of scores, and a few sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from coterie.data.check import Findings
from coterie.engines.drive import Traffic
from coterie.methods.base import Fitted, Score
from coterie.report.numbers import decimals_for, human_bytes
from coterie.report.privacy import said as spent
from coterie.report.words import NATS, SETTING
from coterie.runs.screen import out
from coterie.selection.display import setting_cell
from coterie.selection.result import Comparison, Structure
from coterie.selection.text import answer, metric_name, one_for_all, plus_minus

__all__ = ["show", "show_comparison", "show_findings"]

_METRICS = {
    "accuracy": "accuracy",
    "concordance": "concordance",
    "rmse": "root mean squared error",
    "log_likelihood": "mean log-likelihood of a row",
}

Cells = list[tuple[float | None, str]]  # value and format


def show(fitted: Fitted, more: Mapping[str, Any]) -> None:
    """Show how models do, beside baselines, and what else there is to say."""
    scores = fitted.scores
    form = {"accuracy": ".1%", "concordance": ".3f", "log_likelihood": ".4f", "rmse": None}[fitted.metric]
    plain = fitted.metric == "rmse" and fitted.schema.outcome is None  # targets of other outcomes are not scaled
    scale = float(fitted.models.scaling.y_scale) if plain else math.nan
    columns: dict[str, Cells] = {
        "training rows": _cells([s.train for s in scores], form),
        "held-out rows": _cells([s.test for s in scores], form),
        "in std. dev.": _cells([None if math.isnan(scale) or s.test is None else s.test / scale for s in scores]),
        "R²": _cells([s.test_r2 for s in scores], ".3f"),
        "RMSE": _cells([getattr(s, "test_rmse", None) for s in scores]),
        "new clients": _cells([s.new_clients for s in scores], form),
    }
    out.print(f"{_METRICS[fitted.metric]}, seed {fitted.options.seed}")
    out.print(_score_table(scores, columns), soft_wrap=False)
    for said in (*fitted.models.remarks(fitted), *_worth(fitted.extra)):
        out.print(said)
    if fitted.traffic is not None:
        out.print(_sent(fitted.traffic))
    if "privacy" in fitted.extra:
        out.print(spent(fitted.extra["privacy"]))
    if "adjusted_rand" in more:
        out.print(f"adjusted Rand index against the true groups: {more['adjusted_rand']:.3f}")


def _worth(extra: Mapping[str, Any]) -> list[str]:
    """What predictions of held-out rows are worth: probabilities of classes, or intervals of numbers."""
    said = []
    if (found := extra.get("probabilities", {}).get("test")) is not None:
        names = {
            "auroc": "AUROC",
            "average_precision": "average precision",
            "log_loss": "log loss",
            "brier": "Brier score",
        }
        values = ", ".join(f"{name} {found[key]['value']:.3f}" for key, name in names.items())
        said.append(f"held-out rows: {values}; {found['base_rate']['value']:.1%} are of the largest class")
    covered = extra.get("coverage", {})
    shares = [
        f"{covered[how]['test']['value']:.1%} ({how})"
        for how in ("conformal", "model")
        if "test" in covered.get(how, {})
    ]
    if shares:
        said.append(f"{covered['level']:.0%} prediction intervals contain {', '.join(shares)} of held-out rows")
    return said


def _sent(traffic: Traffic) -> str:
    up, down = human_bytes(traffic.bytes_up), human_bytes(traffic.bytes_down)
    return f"{traffic.messages} messages to every client, together {up} up and {down} down"


def show_comparison(found: Comparison, fit: str | None) -> None:
    """Show the answer, its evidence, the table, and what to run next."""
    said = answer(found)
    for text in (said.headline, *said.evidence):
        out.print(text)
    what = f"{metric_name(found.metric)}, mean over clients ± standard error"
    out.print(f"{what}; gain over {one_for_all(found)} in nats per row: {NATS}")
    out.print(f"setting: {SETTING}")
    out.print(_comparison_table(found), soft_wrap=False)
    out.print(_sent(found.traffic))
    for text in said.doubts:
        out.print(f"note: {text}")
    out.print("next: " + (fit or f"there is no `coterie fit` for {found[found.chosen].label} yet"))


def _comparison_table(found: Comparison) -> Table:
    """A row for each structure; a star at the chosen one, and how often it is chosen again. Fits 80 columns."""
    tested, met = (any(getattr(s, f"{name}_metric") is not None for s in found.structures) for name in ("test", "new"))
    told = any(one.chosen_share is not None for one in found.structures)
    heads = ["test\nrows" if tested else "held-out\nrows", "gain", "95 %\ninterval"]
    heads += (["chosen\nagain"] if told else []) + (["new\nclients"] if met else [])
    numbers = [Column(head, no_wrap=True) for head in heads]
    table = Table(Column("structure", no_wrap=True), "setting", *numbers, padding=0)
    for one in found.structures:
        mean, error = (one.test_metric, one.test_stderr) if tested else (one.metric, one.metric_stderr)
        setting = setting_cell(one)
        cells = [plus_minus(found.metric, mean, error).replace(" ", ""), *_gain(one)]
        cells += [f"{100 * (one.chosen_share or 0):.0f}%"] if told else []
        cells += [plus_minus(found.metric, one.new_metric, one.new_stderr).partition(" ")[0]] if met else []
        table.add_row(("*" if one.name == found.chosen else " ") + one.name, setting, *cells)
    return table


def _gain(one: Structure) -> list[str]:
    gain = one.versus_global
    return ["-", "-"] if gain is None else [f"{gain.mean:+.3f}", f"{gain.low:.3f}, {gain.high:.3f}"]


def _cells(values: Sequence[float | None], form: str | None = None) -> Cells:
    """Values of one column; by default with as many decimals as give the typical one four digits."""
    form = form or f".{decimals_for(values, 4, most=9)}f"
    return [(value, form) for value in values]


def _score_table(scores: Sequence[Score], columns: Mapping[str, Cells]) -> Table:
    """A row for each method; columns without a value are left out."""
    shown = {name: cells for name, cells in columns.items() if any(value is not None for value, _ in cells)}
    table = Table(Column(no_wrap=True), *("\n".join(name.rsplit(" ", 1)) for name in shown))  # fits 80 columns
    for i, score in enumerate(scores):
        cells = [column[i] for column in shown.values()]
        table.add_row(score.label, *("-" if value is None else format(value, how) for value, how in cells))
    return table


def show_findings(found: Findings) -> None:
    """Show what is in the data."""
    if found.features:
        per = ", ".join(f"{name} {value:g}" for name, value in found.rows_per_client.items())
        out.print(f"{found.rows} rows, {found.clients} clients; rows per client: {per}")
        out.print(_feature_table(found), soft_wrap=False)
    if found.target is not None:
        classes = f" of {', '.join(found.target.classes)}" if found.target.classes else ""
        out.print(f"target {found.target.name}: {found.target.task}{classes}")
    for problem in found.problems:
        out.print(f"{problem.severity}: {problem.sentence}")
        if problem.hint:
            out.print(f"hint: {problem.hint}")
    if found.ok:
        out.print("ready to fit")


def _feature_table(found: Findings) -> Table:
    table = Table("column", "kind", "missing", "levels", "")
    for f in found.features:
        levels = str(len(f.levels)) if f.levels else "-"
        table.add_row(f.name, f.kind or "-", str(f.missing), levels, "constant" if f.constant else "")
    return table
