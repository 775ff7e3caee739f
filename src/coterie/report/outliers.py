# SPDX-License-Identifier: Apache-2.0
"""Outlier clients of a mixture run: who they are, and the scores of all."""

import numpy as np

from coterie.report.client_plots import FAR, above_limit
from coterie.report.figures import MOST_MARKS, Figure, evenly, figure, thinned
from coterie.report.frame import Key
from coterie.report.numbers import count, decimals_for, fixed
from coterie.report.run_folder import Floats, Run, number
from coterie.report.section import Section, section
from coterie.report.tables import column_texts, column_title

__all__ = ["outliers"]

MOST_NAMED = 50
_COLUMNS = ("client", "outlier_score", "rows_train", "metric", "metric_global")


def outliers(run: Run) -> Section | None:
    """Lay the outlier scores out; None when there are none."""
    score, limit = run.client_column("outlier_score"), number(run.results.get("outlier_threshold"))
    if score is None or limit is None:
        return None
    far = np.flatnonzero(score > limit)
    named = far[np.argsort(-score[far], kind="stable")][:MOST_NAMED]
    columns = [name for name in _COLUMNS if name in run.clients]
    texts = [column_texts(run, name, [run.clients[name][i] for i in named]) for name in columns]
    return section(
        "outliers",
        "Outliers",
        sentence=_who(run, score, limit),
        figure=_scores(run, score, limit),
        head=[column_title(run, name) for name in columns],
        rows=[list(row) for row in zip(*texts, strict=True)],
        n_total=len(far),
    )


def _who(run: Run, score: Floats, limit: float) -> str:
    """Count the outliers, and say what became of them."""
    far, there = int((score > limit).sum()), int((~np.isnan(score)).sum())
    if not far:
        return f"None of {count(there)} clients is an outlier: no score is above {limit:g}."
    are, they_do = ("are outliers", "They do") if far > 1 else ("is an outlier", "It does")
    text = f"{count(far)} of {count(there)} clients {are}: a score above {limit:g}."
    mixture = run.part("config").get("mixture")
    reject = number(mixture.get("reject")) if isinstance(mixture, dict) else None
    return text if reject is None or reject > limit else f"{text} {they_do} not contribute to the centre."


def _scores(run: Run, score: Floats, limit: float) -> Figure:
    """Draw the scores of all clients, with the limit."""
    there = np.flatnonzero(~np.isnan(score))
    order = there[np.argsort(score[there], kind="stable")]
    keep = order[evenly(len(order), MOST_MARKS)]
    names, decimals = run.clients.get("client", list(range(len(score)))), decimals_for(score[there].tolist())
    title = "Outlier score of every client"
    svg = above_limit(
        score[keep].tolist(),
        limit,
        titles=[f"{names[i]}: {fixed(score[i], decimals)}" for i in keep],
        x_label="clients, smallest score first",
        y_label="outlier score",
        title=title,
        total=len(there),
    )
    note = "Distance of a client's components from the centre minus the median, in robust standard deviations."
    if (score > FAR * limit).any():
        note += " Triangles: off the scale."
    keys = [Key("typical", "plain", "dot"), Key(f"outlier, above {limit:g}", "bad", "dot")]
    return figure(title, svg, keys, note + thinned(len(keep), len(there)))
