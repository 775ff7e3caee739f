# SPDX-License-Identifier: Apache-2.0
"""What the report shows of linear models: their coefficients in the data's own units, and how clients differ in them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.report.frame import chip
from coterie.report.numbers import count, decimals_for, fixed, percent
from coterie.report.run_folder import Run, number
from coterie.report.section import Section, section

__all__ = ["Coefficients", "coefficient_table", "coefficients"]

_DIGITS = 4  # of the largest number in a row
_ABOUT = {
    "one": "All clients have one model.",
    "clusters": "Every cluster has a column.",
    "spread": "Beside the common model stands the standard deviation of clients' coefficients; 0: the same for all.",
    "directions": (
        "Beside the common model stand the directions in which clients differ from it: a direction's numbers are added to "
        "the coefficients of a client that lies one standard deviation along it. Percentages are shares of the variance "
        "between clients, of coefficients of scaled features."
    ),
}


class Coefficients(NamedTuple):
    """The table: what is said of it; columns as (name, classes of its chip); rows of a name and cells."""

    sentences: list[str]
    head: list[tuple[str, str]]
    rows: list[tuple[str, list[str]]]


def coefficients(run: Run) -> Section | None:
    """Show coefficients; None where models are not linear."""
    found = coefficient_table(run.results.get("coefficients"))
    return None if found is None else section("coefficients", "Coefficients", table=found)


def coefficient_table(found: Any) -> Coefficients | None:
    """Lay coefficients out, as `run.json` and `compare.json` have them."""
    if not isinstance(found, dict) or not found.get("names"):
        return None
    rows = [_row(name, values) for name, values in zip(found["names"], found["values"], strict=True)]
    return Coefficients(_sentences(found), _head(found), rows)


def _row(name: str, values: list[float | None]) -> tuple[str, list[str]]:
    """Rows have decimals of their own, since features have units of their own."""
    there = [number(value) for value in values]
    digits = decimals_for(
        [max((value for value in there if value is not None), key=abs, default=None)], _DIGITS, most=9
    )
    return name, ["0" if value == 0 else fixed(value, digits) for value in there]


def _head(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    kind = found["kind"]
    if kind == "clusters":
        return [(f"cluster {k}", chip(k)) for k in range(len(found["values"][0]))]
    if kind == "one":
        return [("coefficient", "")]
    if kind == "spread":
        return [("common model", ""), ("std. dev. between clients", "")]
    shares = enumerate(found.get("shares") or (), start=1)
    return [("common model", ""), *((f"direction {r} ({percent(number(share))})", "") for r, share in shares)]


def _sentences(found: Mapping[str, Any]) -> list[str]:
    said = [
        f"A coefficient is what a unit of the feature, as the data has it, adds to {found['of']}. {_ABOUT[found['kind']]}"
    ]
    if found["baselines"]:
        said.append(f"Levels are compared with the first of their column: {', '.join(found['baselines'])}.")
    shown, total = len(found["names"]), found["total"]
    if shown < total:
        said.append(
            f"{count(shown)} of {count(total)} rows: the largest coefficients per standard deviation of a feature."
        )
    return said
