# SPDX-License-Identifier: Apache-2.0
"""What the report shows of predictions: what probabilities are worth and how calibrated they are; what intervals cover."""

from typing import Any

import numpy as np

from coterie.report.figures import Figure, figure
from coterie.report.frame import Key
from coterie.report.numbers import NONE, count, decimals_for, fixed, percent
from coterie.report.plots import Line, line_chart
from coterie.report.run_folder import Run, number
from coterie.report.section import Section, section

__all__ = ["intervals", "probabilities"]

_SIDES = {"test": "held-out rows", "new": "new clients", "unlabelled": "new clients without labels"}
_MEASURES = {
    "auroc": "AUROC", "average_precision": "average precision", "log_loss": "log loss", "brier": "Brier score",
    "accuracy": "accuracy", "base_rate": "share of the largest class",
}  # fmt: skip
_SHARES = ("accuracy", "base_rate")
_NEW = " New clients are judged by half of their rows, and have a model by the other half where that is labelled."
_HOWS = {"conformal": "conformal", "model": "from the model"}

Rows = list[tuple[str, list[str]]]


# -- classes ----------------------------------------------------------------------------------------------------------
def probabilities(run: Run) -> Section | None:
    """Lay out what predicted probabilities are worth; None when the target has no classes."""
    found = {side: said for side in _SIDES if isinstance(said := _said(run, "probabilities").get(side), dict)}
    if not found:
        return None
    side = next(iter(found))
    return section(
        "probabilities",
        "Probabilities",
        head=[_SIDES[name] for name in found],
        rows=[(name, [_measure(said, key) for said in found.values()]) for key, name in _MEASURES.items()],
        sentences=_sentences(run, found[side]),
        figures=[f for f in (_calibration(found[side], _SIDES[side]),) if f is not None],
    )


def _measure(said: dict[str, Any], key: str) -> str:
    """A value with its interval."""
    one = said.get(key) or {}
    value, low, high = (number(one.get(name)) for name in ("value", "low", "high"))
    if value is None:
        return NONE
    texts = [percent(v) if key in _SHARES else fixed(v, 3) for v in (value, low, high) if v is not None]
    return texts[0] if len(texts) < 3 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def _sentences(run: Run, said: dict[str, Any]) -> list[str]:
    out = [f"In parentheses: 95 % intervals from resampling clients.{_NEW}"]
    within = number((said.get("auroc") or {}).get("within"))
    if within is not None:
        out[0] += f" AUROC comes from counts in bins, and is off by {fixed(within, 4)} at most."
    decided = said.get("decisions")
    if isinstance(decided, dict):
        parts = [
            f"{name} {percent(value)}"
            for name in ("sensitivity", "specificity", "precision")
            if (value := number(decided.get(name))) is not None
        ]
        threshold = number(decided.get("threshold"))
        if parts and threshold is not None:
            out.append(f"From a probability of {threshold:g} on, the second class is predicted: {', '.join(parts)}.")
    values = run.client_column("auroc")
    if values is not None:
        there = np.isfinite(values)
        rows = run.client_column("rows_test")
        lacking = int((~there & (rows > 0)).sum()) if rows is not None else int((~there).sum())
        if there.any():
            middle = fixed(float(np.median(values[there])), 3)
            out.append(f"Within clients the median AUROC is {middle}, over {count(there.sum())} clients.")
        if lacking:
            who = "1 client" if lacking == 1 else f"{count(lacking)} clients"
            out.append(f"It is not defined for {who} whose held-out rows are all of one class.")
    return out


def _calibration(said: dict[str, Any], where: str) -> Figure | None:
    """Draw shares of rows against what was predicted for them."""
    groups = (said.get("calibration") or {}).get("groups") or []
    if len(groups) < 2:
        return None
    x, y, low, high = ([float(g[name]) for g in groups] for name in ("predicted", "observed", "low", "high"))
    most = max(*x, *high)
    lines = [
        Line(x, y, "observed", colour=0, low=low, high=high),
        Line([0.0, most], [0.0, most], "perfect", colour=1, dashed=True),
    ]
    title = f"Calibration on {where}"
    svg = line_chart(lines, x_label="predicted probability", y_label="share of rows", title=title)
    keys = [Key("observed share, with 95 % interval", "k0", "line"), Key("perfectly calibrated", "k1 dashed", "line")]
    error = number((said.get("calibration") or {}).get("error"))
    note = f"Rows in {len(groups)} groups of similar probability."
    if error is not None:
        note += f" Predicted and observed shares differ by {percent(error)} on average."
    return figure(title, svg, keys, note)


# -- numbers ----------------------------------------------------------------------------------------------------------
def intervals(run: Run) -> Section | None:
    """Lay out what prediction intervals cover; None when the target is no number."""
    found = _said(run, "coverage")
    level = number(found.get("level"))
    if level is None:
        return None
    hows = [(how, name) for how, name in _HOWS.items() if isinstance(found.get(how), dict)]
    lengths = [number(said.get("length")) for how, _ in hows for said in found[how].values()]
    decimals = decimals_for([length for length in lengths if length is not None], 3)
    rows: Rows = []
    for how, name in hows:
        for side, where in _SIDES.items():
            said = found[how].get(side)
            if isinstance(said, dict):
                length = number(said.get("length"))
                text = NONE if length is None else fixed(length, decimals)
                rows.append((f"{name}, {where}", [_measure({"accuracy": said}, "accuracy"), text]))
    return section(
        "intervals",
        "Prediction intervals",
        sentences=_interval_sentences(found, level),
        head=[f"rows within intervals (aim: {percent(level)})", "mean length"],
        rows=rows,
    )


def _interval_sentences(found: dict[str, Any], level: float) -> list[str]:
    out = [
        f"Intervals are to contain {percent(level)} of rows. In parentheses: 95 % intervals from resampling clients. "
        f"Clients that are new have the intervals of the population model.{_NEW}"
    ]
    own, pooled = number(found.get("calibrated")), number(found.get("pooled"))
    if own is None or pooled is None:
        return [*out, "No calibration rows were held out, so there are no conformal intervals: fit with --coverage."]
    out.append(
        f"Conformal intervals of {count(own)} clients rest on their own calibration rows; {count(pooled)} have too few, and "
        "share those of all clients."
    )
    return out


def _said(run: Run, name: str) -> dict[str, Any]:
    found = run.results.get(name)
    return found if isinstance(found, dict) else {}
