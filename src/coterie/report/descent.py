# SPDX-License-Identifier: Apache-2.0
"""Phase 1 of moment descent: how its anchors moved, what they saw, and what became of them."""

import math

from coterie.report.columns import column_keys, columns
from coterie.report.figures import Figure, figure
from coterie.report.frame import Key
from coterie.report.plots import Line, cluster_keys, line_chart
from coterie.report.run_folder import Run
from coterie.report.section import Section, section

__all__ = ["descent"]


def descent(run: Run) -> Section | None:
    """Lay Phase 1 out; None when the run has none."""
    if not run.descents:
        return None
    figures = [f for f in (_movement(run), _spectrum(run)) if f]
    return section("descent", "Moment descent", figures=figures, events=_events(run))


def _movement(run: Run) -> Figure | None:
    """Draw how far every anchor moved, iteration by iteration, in the colour of the cluster that it is in now."""
    lines, done, before = [], 0, 0
    labels = _anchor_labels(run)
    for group in run.descents:  # a second group are further anchors, which begin when the first have ended
        moves = [run.rounds["movement"][i] for i in group]
        x = [float(done + t + 1) for t in range(len(moves))]
        for a in range(max(map(len, moves))):
            y = [_positive(move[a]) if a < len(move) else math.nan for move in moves]
            label = labels[before + a] if before + a < len(labels) else None
            lines.append(Line(x, y, colour=label, thin=True, faint=label is None))
        done, before = done + len(moves), before + max(map(len, moves))
    if all(math.isnan(v) for line in lines for v in line.y):
        return None
    svg = line_chart(
        lines, x_label="iteration", y_label="movement (log scale)", title="Movement of the anchors", log_y=True,
        integer_x=True,
    )  # fmt: skip
    note = "One line per anchor: how far its model moved. A gap means that it did not move."
    return figure("Movement of the anchors", svg, _cluster_keys(labels), note)


def _positive(value: float | None) -> float:
    """A log scale has no place for an anchor that stood still."""
    return value if value is not None and math.isfinite(value) and value > 0 else math.nan


def _anchor_labels(run: Run) -> list[int]:
    """The cluster of each anchor, as far as it is known."""
    label = dict(zip(run.clients.get("client", []), run.labels, strict=False))
    found = [label.get(name, -1) for name in run.results.get("anchors") or []]
    return found if -1 not in found else []


def _cluster_keys(labels: list[int]) -> list[Key]:
    counts = [labels.count(j) for j in range(max(labels, default=-1) + 1)]
    names = [f"{j} ({n} anchor{'s' * (n != 1)})" for j, n in enumerate(counts)]
    return cluster_keys(len(names), "line", names) if len(names) > 1 else []


def _spectrum(run: Run) -> Figure | None:
    """Draw the singular values at the first and the last iteration."""
    rows = [i for group in run.descents for i in group]
    spectra = run.rounds.get("spectrum", [None] * (max(rows) + 1))
    found = [(t + 1, spectra[i]) for t, i in enumerate(rows) if spectra[i]]
    if not found:
        return None
    shown = [*found[: len(found) > 1], found[-1]]
    series = {f"iteration {t}": [math.nan if v is None else v for v in values] for t, values in shown}
    svg = columns(series, x_label="number", y_label="singular value", title="Spectrum of the moments")
    note = (
        "Mean over anchors. With clear clusters, as many values stand out as there are clusters; at the end one"
        " fewer, since the moments of a converged anchor no longer show its own cluster."
    )
    return figure("Spectrum of the moments", svg, column_keys(series), note)


def _events(run: Run) -> list[str]:
    """What happened before Phase 2 began."""
    last = max(run.rounds["round"][i] for group in run.descents for i in group)
    counted = run.results.get("counted")
    found = [e for e in run.results.get("events") or [] if isinstance(e, dict)]
    return ([counted] if isinstance(counted, str) else []) + [
        str(e["text"]) for e in found if isinstance(e.get("round"), int) and e["round"] <= last + 1 and "text" in e
    ]
