# SPDX-License-Identifier: Apache-2.0
"""What the report shows of a mixed model: estimates with intervals, variances, tests, and a forest plot of the clients."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.report.figures import Figure, figure
from coterie.report.forest import forest
from coterie.report.numbers import NONE, count, decimals_for, fixed
from coterie.report.run_folder import Run, number
from coterie.report.section import Section, section

__all__ = ["mixed"]

MOST_CLIENTS = 60  # in a forest plot
MOST_EFFECTS = 4  # that have one
_WIDE = 1.96
_INTERCEPT = "(intercept)"


def mixed(run: Run) -> Section | None:
    """Lay out the mixed model; None when there is none."""
    found = run.results.get("mixed")
    if not isinstance(found, dict) or not found.get("fixed"):
        return None
    return section(
        "mixed",
        "Mixed model",
        sentences=_sentences(found),
        fixed=_fixed(found),
        random=_random(found),
        facts=_facts(found),
        heterogeneity=_heterogeneity(found),
        figures=_forests(run, found),
        stays=not any(name.startswith("effect ") for name in run.clients),
    )


def _sentences(found: Mapping[str, Any]) -> list[str]:
    how = "restricted maximum likelihood (REML)" if found.get("reml") else "maximum likelihood"
    odds = found.get("residual_sd") is None
    if odds:
        how = "Laplace's approximation to the likelihood; effects are in log odds"
    out = [
        f"Fitted to {count(found.get('rows') or 0)} training rows of {count(found.get('clients') or 0)} clients by {how}. "
        "Estimates are in the data's own units."
    ]
    if found.get("left_out"):
        names = ", ".join(map(str, found["left_out"]))
        out.append(f"Without a coefficient of their own, since other columns tell the same: {names}.")
    if found.get("boundary"):
        out.append("A variance is zero, or a correlation is 1: there are more random effects than the rows tell apart.")
    return out


def _fixed(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for one in found["fixed"]:
        values = [number(one.get(name)) for name in ("estimate", "error", "low", "high")]
        digits = decimals_for([values[1]], 3)
        estimate, error, low, high = (fixed(v, digits) for v in values)
        rows.append([str(one.get("name")), estimate, error, f"{low} to {high}"])
    return rows


def _random(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A head, and a row for each random effect, with its correlations with those before it, and for the rows."""
    effects, pairs = found.get("random") or [], found.get("correlations") or []
    names = [str(one.get("name")) for one in effects]
    head = ["between clients", "variance", "std. dev.", *(f"corr. with {name}" for name in names[:-1])]
    rows = []
    for i, one in enumerate(effects):
        cells = [f"{value:.4g}" if value is not None else NONE for value in map(number, (one["variance"], one["sd"]))]
        mine = [fixed(number(pairs[i][j]), 3) if j < i else "" for j in range(len(names) - 1)]
        rows.append([names[i], *cells, *mine])
    noise = number(found.get("residual_sd"))
    if noise is not None:
        rows.append(["rows of a client (residual)", f"{noise**2:.4g}", f"{noise:.4g}", *[""] * (len(names) - 1)])
    return head, rows


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    test = found.get("test") or {}
    share, statistic = number(found.get("icc")), number(test.get("statistic"))
    out = []
    if share is not None:
        out.append(
            ("intraclass correlation", fixed(share, 3), "share of the variance around fixed effects between clients")
        )
    if statistic is not None:
        law = "half a chi-square" if test.get("mixture") else f"chi-square with {test.get('freedom')} degrees, cautious"
        note = f"{law}; against the model without random effects"
        out.append(("likelihood ratio", f"{statistic:.2f}, p {_p(test.get('p'))}", note))
    for name, text in (("log_likelihood", "log-likelihood"), ("aic", "AIC"), ("bic", "BIC")):
        value = number(found.get(name))
        if value is not None:
            note = f"{count(found['parameters'])} parameters" if name == "aic" else ""
            out.append((text, fixed(value, 2), note))
    for name, text in (("new_client", "mean of a new client"), ("new_row", "a row of a new client")):
        one = found.get(name)
        if isinstance(one, dict):
            values = [number(one.get(part)) for part in ("estimate", "low", "high")]
            digits = decimals_for([None if None in values else (values[2] or 0) - (values[1] or 0)], 3)
            estimate, low, high = (fixed(v, digits) for v in values)
            out.append(
                (text, f"{low} to {high}", f"95 % prediction interval around {estimate}, for columns at their means")
            )
    return out


def _heterogeneity(found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for one in found.get("heterogeneity") or []:
        q, i2, tau2 = (number(one.get(name)) for name in ("q", "i2", "tau2"))
        rows.append([
            str(one.get("name")), count(one.get("clients") or 0), count(one.get("left_out")), fixed(q, 1),
            str(one.get("freedom")), _p(one.get("p")),
            NONE if i2 is None else f"{100 * i2:.1f}\u00a0%", NONE if tau2 is None else f"{tau2:.4g}",
        ])  # fmt: skip
    return rows


def _p(value: object) -> str:
    p = number(value)
    return NONE if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _forests(run: Run, found: Mapping[str, Any]) -> list[Figure]:
    """Draw what clients' coefficients are, one by one: fixed and random effect together, with its interval."""
    common = {str(one.get("name")): number(one.get("estimate")) or 0.0 for one in found["fixed"]}
    out = []
    for one in (found.get("random") or [])[:MOST_EFFECTS]:
        name = str(one.get("name"))
        effect, deviation = run.client_column(f"effect {name}"), run.client_column(f"deviation {name}")
        if effect is None or deviation is None:
            continue
        centre = common.get(name, 0.0)
        order = np.argsort(-effect, kind="stable")
        names = [str(run.clients["client"][i]) for i in order]
        shown = _ends(len(order))
        mean = [centre + float(effect[order[i]]) for i in shown]
        reach = [_WIDE * float(deviation[order[i]]) for i in shown]
        what = "intercept" if name == _INTERCEPT else f"coefficient of {name}"
        title = f"Each client's {what}"
        drawn = forest(
            [names[i] for i in shown],
            mean,
            [m - r for m, r in zip(mean, reach, strict=True)],
            [m + r for m, r in zip(mean, reach, strict=True)],
            centre=centre,
            x_label=what,
            title=title,
        )
        note = f"The largest first, with 95 % intervals; the line is the fixed effect, {_short(centre)}."
        if len(shown) < len(order):
            rest = centre + np.delete(effect[order], shown)
            low, high = _short(float(rest.min())), _short(float(rest.max()))
            note += (
                f" {count(len(rest))} clients between {low} and {high} are left out: the middle of {count(len(order))}."
            )
        out.append(figure(title, drawn, (), note))
    return out


def _ends(n: int) -> list[int]:
    """All clients, or the first and the last of many."""
    half = MOST_CLIENTS // 2
    return list(range(n)) if n <= MOST_CLIENTS else [*range(half), *range(n - half, n)]


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else NONE
