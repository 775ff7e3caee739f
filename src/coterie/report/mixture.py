# SPDX-License-Identifier: Apache-2.0
"""The components of a mixture run: how many and how common they are, why, where they lie, and who has them."""

import math
from typing import Any, NamedTuple

import numpy as np

from coterie.report.component_plots import boxes, candidates, least_shown
from coterie.report.figures import Figure, figure
from coterie.report.frame import Key, chip
from coterie.report.numbers import count, decimals_for, fixed, percent, percent_ticks
from coterie.report.run_folder import Floats, Run, number
from coterie.report.section import Section, section
from coterie.report.tables import Heat, heat_cells, matrix

__all__ = ["Centres", "components"]

MOST_PARAMETERS = 20
_COMMON = "common"  # the word for an infinite c_lambda


class Centres(NamedTuple):
    """The table of the components' parameters, and how to read it."""

    note: str
    table: Heat


def components(run: Run) -> Section | None:
    """Lay the components out; None when the run has none."""
    sentences = [text for text in (_how_many(run), _how_common(run)) if text]
    figures = [f for f in (_choice_of_sharing(run), _choice_of_number(run), _weights(run)) if f]
    centres = _centres(run)
    if not (sentences or figures or centres):
        return None
    return section("components", "Components", sentences=sentences, figures=figures, centres=centres)


# -- choices ----------------------------------------------------------------------------------------------------------
class _Choice(NamedTuple):
    """Candidates, their scores, and which was chosen."""

    values: list[Any]
    scores: list[float]
    chosen: int
    by: str


def _choice(run: Run, name: str) -> _Choice | None:
    """Read how an option was chosen; None when it was given."""
    found = run.results.get(name)
    if not isinstance(found, dict):
        return None
    values, scores, chosen = found.get("values") or [], found.get("scores") or [], number(found.get("chosen"))
    if chosen is None or len(values) != len(scores) or not 0 <= int(chosen) < len(values):
        return None
    numbers = [math.nan if (score := number(v)) is None else score for v in scores]
    return _Choice(values, numbers, int(chosen), str(found.get("by") or "held-out"))


def _how_many(run: Run) -> str:
    """Say how many components there are, and why so many."""
    n = number(run.results.get("n_components"))
    if n is None:
        return ""
    text = f"{count(n)} component{'s' * (n != 1)}"
    choice = _choice(run, "components_choice")
    if choice is None:
        return f"{text}, as asked for."
    among = " to ".join(dict.fromkeys(f"{v:g}" for v in (choice.values[0], choice.values[-1])))
    why = (
        "the smallest BIC"
        if choice.by == "bic"
        else "the fewest within two standard errors of the best on held-out rows"
    )
    return f"{text}: of {among}, {why}."


def _how_common(run: Run) -> str:
    """Say what c_lambda is, and what that means."""
    value = run.results.get("c_lambda")
    if value is None:
        return ""
    chosen = "" if _choice(run, "c_lambda_choice") is None else ", chosen on held-out rows"
    if value == _COMMON:
        return f"c_lambda is infinite{chosen}: all clients have the same components, with their own weights."
    if value == 0:
        return f"c_lambda is 0{chosen}: every client is fitted alone."
    own, mine = run.client_column("own"), ""
    if own is not None:
        share = float(np.nanmean(own))
        words = percent(share, 0) if share >= 0.01 else f"less than {percent(0.01, 0)}"
        mine = f" On average a client keeps {words} of its difference from the centre."
    return f"c_lambda is {value:g}{chosen}: every client's components are shrunk towards a common centre.{mine}"


def _choice_of_sharing(run: Run) -> Figure | None:
    """Draw what each c_lambda scored."""
    choice = _choice(run, "c_lambda_choice")
    if choice is None or len(choice.values) < 2:
        return None
    names = ["∞" if v == _COMMON else f"{v:g}" for v in choice.values]
    ends = ["alone" if v == 0 else _COMMON if v == _COMMON else "" for v in choice.values]
    title = "Choice of c_lambda"
    svg = candidates(
        names, choice.scores, choice.chosen, below=ends, x_label="c_lambda", y_label="held-out log-likelihood per row",
        title=title,
    )  # fmt: skip
    note = "How strongly clients are shrunk to the centre: 0 fits each alone, infinity gives all the same components."
    return figure(title, svg, [Key("chosen", "k0", "dot")], note + _off_scale(choice))


def _choice_of_number(run: Run) -> Figure | None:
    """Draw what each number of components scored."""
    choice = _choice(run, "components_choice")
    if choice is None or len(choice.values) < 2:
        return None
    title = "Choice of the number of components"
    y_label = "minus BIC" if choice.by == "bic" else "held-out log-likelihood per row"
    names = [f"{v:g}" for v in choice.values]
    svg = candidates(names, choice.scores, choice.chosen, x_label="components", y_label=y_label, title=title)
    return figure(title, svg, [Key("chosen", "k0", "dot")], _off_scale(choice).strip())


def _off_scale(choice: _Choice) -> str:
    floor = least_shown(choice.scores, choice.chosen)
    return " Triangles: off the scale." if any(score < floor for score in choice.scores) else ""


def _weights(run: Run) -> Figure | None:
    """Draw how the weights of each component spread over the clients."""
    columns = [run.client_column(name) for name in run.weight_columns]
    groups = [[] if column is None else column.tolist() for column in columns]
    if len(groups) < 2 or not any(len(group) > 1 for group in groups):
        return None
    title = "Weights across clients"
    svg = boxes(groups, x_label="component", y_label="share of a client's rows", title=title, y_form=percent_ticks)
    note = "Line: from the smallest to the largest. Box: the middle half of the clients. Bar: the median."
    return figure(title, svg, (), note)


# -- parameters -------------------------------------------------------------------------------------------------------
def _centres(run: Run) -> Centres | None:
    """Show the components' parameters at the centre, in the units of the data."""
    found = run.results.get("components")
    if not isinstance(found, dict):
        return None
    names, table = found.get("parameters") or [], matrix(found.get("centre"))
    if table is None or table.shape[1] != len(names):
        return None
    spread = _vector(found.get("deviation"), len(names))
    away = (table - table.mean(0)) / _sizes(np.abs(table).max(0) if spread is None else spread)
    shown = np.sort(np.argsort(-np.ptp(away, axis=0), kind="stable")[:MOST_PARAMETERS])
    away /= np.abs(away[:, shown]).max() or 1.0
    columns = [(str(r), chip(r)) for r in range(len(table))]
    rows = [(str(names[p]), heat_cells(table[:, p], away[:, p], decimals_for(table[:, p].tolist()))) for p in shown]
    if spread is not None:
        columns.append(("spread", ""))
        for (_, cells), p in zip(rows, shown, strict=True):
            cells.append((fixed(spread[p], decimals_for([spread[p]])), "", ""))
    weights = _vector(found.get("weights"), len(table))
    if weights is not None and len(table) > 1:
        blank = [""] * (len(columns) - len(table))
        rows.insert(0, ("mean weight", [(text, "", "") for text in (*map(percent, weights.tolist()), *blank)]))
    return Centres(_reading(run, found, len(shown)), Heat(columns, rows, len(names)))


def _vector(values: Any, length: int) -> Floats | None:
    """Read so many numbers from JSON; None when any is missing."""
    found = matrix([values or []])
    return None if found is None or found.shape[1] != length else found[0]


def _sizes(values: Floats) -> Floats:
    """What parameters are measured by: a size of zero counts as one."""
    return np.where(values > 0, values, 1.0)


def _reading(run: Run, found: dict[str, Any], shown: int) -> str:
    """Say what the table holds."""
    names = found["parameters"]
    few = f": the {shown} of {len(names)} that differ most" if shown < len(names) else ""
    if run.results.get("family") == "regression":
        text = f"Coefficients at the centre, in the units of the data{few}."
        noise = number(found.get("noise"))
        text += "" if noise is None else f" Standard deviation of the noise: {fixed(noise, decimals_for([noise]))}."
    else:
        text = f"Means at the centre, in the units of the data{few}."
        text += " Spread: standard deviation within a component." if found.get("deviation") else ""
    return f"{text} Blue: above the mean of the components; orange: below." if len(found["centre"]) > 1 else text
