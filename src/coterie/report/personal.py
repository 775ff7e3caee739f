# SPDX-License-Identifier: Apache-2.0
"""What the report shows of personal models: how clients fare with them, the worst off too, and who took part how often."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.registry import METHODS
from coterie.report.client_plots import signed_bars
from coterie.report.figures import MOST_MARKS, MOST_POINTS, Figure, evenly, figure, thinned
from coterie.report.frame import Key
from coterie.report.numbers import count, fixed
from coterie.report.plots import Line, line_chart, scatter
from coterie.report.run_folder import Run, number
from coterie.report.section import Section, section

__all__ = ["personal"]

_FIGURES = {"mean": "mean", "median": "median", "worst_decile": "worst tenth", "best_decile": "best tenth"}
_OTHERS = {"metric_global": "one model for all", "metric_local": "one model each"}


def personal(run: Run) -> Section | None:
    """Lay out how clients fare, and who took part; None when models are not personal."""
    spread = run.results.get("spread")
    if not isinstance(spread, dict):
        return None
    figures = [found for found in (_fares(run), _participation(run)) if found is not None]
    return section(
        "personal",
        "Personal models",
        run=run,
        sentences=_sentences(run),
        head=list(_FIGURES.values()),
        rows=_rows(run, spread),
        figures=figures,
    )


def _sentences(run: Run) -> list[str]:
    layers, never = run.results.get("layers") or [], number(run.results.get("never_visited"))
    method = METHODS.get(str(run.info.get("method")))
    kept = f"{method.about[0].upper()}{method.about[1:]}." if method else "Each client has a model of its own."
    if layers:
        word = f"Layer {layers[0]} is" if len(layers) == 1 else f"Layers {', '.join(map(str, layers))} are"
        kept = f"{word} personal; all clients share the others."
    out = [f"{kept} All clients have equal weight here, whatever their number of rows."]
    if never:
        who = "1 client" if never == 1 else f"{count(never)} clients"
        out.append(f"{who} never took part in training, and fitted personal parameters afterwards.")
    return out


def _rows(run: Run, spread: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    labels = {str(m.get("method")): str(m.get("label")) for m in run.results.get("methods") or []}
    found = {name: said for name, said in spread.items() if isinstance(said, dict)}
    texts = run.metric.texts([number(said.get(key)) for said in found.values() for key in _FIGURES])
    width = len(_FIGURES)
    return [(labels.get(name, name), texts[i * width : (i + 1) * width]) for i, name in enumerate(found)]


def _fares(run: Run) -> Figure | None:
    """Draw the metric of all clients, the worst off first, beside the baselines."""
    ours = run.client_column("metric")
    if ours is None:
        return None
    named = {"this run": ours} | {
        name: values for column, name in _OTHERS.items() if (values := run.client_column(column)) is not None
    }
    lines = []
    for i, (name, values) in enumerate(named.items()):
        there = np.sort(values[np.isfinite(values)])
        there = there if run.metric.higher else there[::-1]
        keep = evenly(len(there), MOST_POINTS)
        share = [100 * (k + 0.5) / len(there) for k in keep]
        lines.append(Line(share, there[keep].tolist(), name, colour=i, dashed=i > 0))
    title = f"Held-out {run.metric.name} of all clients"
    svg = line_chart(
        lines,
        x_label="clients, worst first (%)",
        y_label=run.metric.name,
        title=title,
        y_form=run.metric.form,
    )
    keys = [Key(name, f"k{i}" + " dashed" * (i > 0), "line") for i, name in enumerate(named)]
    note = "Each line sorts the clients separately, with the worst at the left."
    return figure(title, svg, keys if len(named) > 1 else (), note)


def _participation(run: Run) -> Figure | None:
    """Draw how often each client took part, against the time that a round takes it where there is a clock."""
    rounds, seconds = run.client_column("rounds"), run.client_column("seconds")
    if rounds is None:
        return None
    names = run.clients.get("client", list(range(len(rounds))))
    order = np.argsort(-rounds if seconds is None else seconds, kind="stable")
    keep = order[evenly(len(order), MOST_MARKS)]
    title, y_label = "How often each client took part", "rounds"
    if seconds is None:
        svg = signed_bars(
            rounds[keep].tolist(),
            titles=[f"{names[i]}: {count(rounds[i])}" for i in keep],
            x_label="clients, most often first",
            y_label=y_label,
            title=title,
            total=len(order),
        )
        note = f"From {count(rounds.min())} to {count(rounds.max())} rounds."
    else:
        svg = scatter(
            seconds[keep].tolist(),
            rounds[keep].tolist(),
            titles=[f"{names[i]}: {count(rounds[i])} rounds, {fixed(seconds[i], 2)} s" for i in keep],
            x_label="mean seconds of the client per round",
            y_label=y_label,
            title=title,
            integer_y=True,
        )
        note = f"From {count(rounds.min())} to {count(rounds.max())} rounds; the slowest are at the right."
    return figure(title, svg, (), note + thinned(len(keep), len(order)))
