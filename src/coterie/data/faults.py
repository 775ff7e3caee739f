# SPDX-License-Identifier: Apache-2.0
"""What stands in the way of using a table: `read` raises the first fault, `check` reports them all."""

import math
import re
from collections.abc import Iterator, Sequence

from coterie.data.roles import Roles
from coterie.data.scan import ColumnFacts, Scan, guess_task
from coterie.data.schema import Schema, Task
from coterie.errors import DataError
from coterie.limits import LARGEST_NUMBER, MOST_CLASSES, MOST_FEATURES, MOST_LEVELS

__all__ = ["counted", "faults", "spelling"]

_ELSEWHERE = "choose another --target"
_MOST = 0.9  # of the texts
_PLAIN = r"[-+]?\d+(\.\d+)?"
_SPELLINGS = {  # of numbers -> options that read them
    r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?": "--thousands ,",
    r"[-+]?\d{1,3}(\.\d{3})+,\d+": "--decimal , --thousands .",
    r"[-+]?\d*,\d+": "--decimal ,",
    r"[-+]?\d{1,3}( \d{3})+(\.\d+)?": "--thousands ' '",
    r"[-+]?\d{1,3}('\d{3})+(\.\d+)?": '--thousands "\'"',
}


def faults(scan: Scan, *, largest: float = math.inf, known: Schema | None = None) -> Iterator[DataError]:
    """Name everything in a table that stands in the way of using it.

    Parameters
    ----------
    scan : Scan
        Of the table.
    largest : float
        Values beyond do not fit the precision.
    known : Schema, optional
        The schema that the table is to be read with. New levels and a constant target are no faults then.
    """
    roles = scan.roles
    if not scan.rows:
        yield _no_rows(scan)
        return
    if scan.nameless and roles.missing == "error":
        gaps = counted(scan.nameless, "missing value")
        yield DataError(f"client column '{roles.client}' has {gaps}", "leave those rows out with --missing drop")
    for name, facts in scan.features.items():
        if known is None:
            yield from _feature_faults(name, facts, name in roles.categorical, largest)
        elif name not in roles.categorical:
            yield from _misfits(name, facts, largest)
    yield from _missing_faults(scan)
    if known is None:
        yield from _width_faults(scan)
    if roles.target is not None and scan.target is not None:
        yield from _target_faults(roles, roles.target, scan.target, largest, new=known is None)


def spelling(texts: Sequence[str]) -> str:
    """Options that read texts as numbers, if most of them are numbers in one spelling; else nothing."""
    for pattern, options in _SPELLINGS.items():
        ours = [bool(re.fullmatch(pattern, text.strip())) for text in texts]
        known = [mine or bool(re.fullmatch(_PLAIN, text.strip())) for mine, text in zip(ours, texts, strict=True)]
        if any(ours) and sum(known) >= _MOST * len(texts):
            return options
    return ""


def counted(n: int, thing: str) -> str:
    """Say how many there are of a thing."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _no_rows(scan: Scan) -> DataError:
    if scan.dropped_rows:
        return DataError(
            f"every one of the {scan.dropped_rows} rows has a missing value",
            "fill them with --missing mean, or leave out the worst columns with --exclude COLUMN",
        )
    return DataError("there are no rows", "at least one row for each client is needed")


def _feature_faults(name: str, facts: ColumnFacts, categorical: bool, largest: float) -> Iterator[DataError]:
    away = f"leave it out with --exclude {name}"
    if facts.kind == "other" or (facts.kind == "date" and not categorical):
        yield DataError(f"column '{name}' holds {_held(facts)}", f"{away}, or turn it into numbers first")
    elif facts.kind is None:
        yield DataError(f"column '{name}' has no values", away)
    elif (categorical or facts.kind == "text") and facts.levels is None:
        such = f", such as '{facts.example[:40]}'" if facts.example else ""
        options = spelling([facts.example])
        numeric = f"read numbers like that with {options}" if options else "correct the cells that are not numbers"
        yield DataError(
            f"column '{name}' has more than {MOST_LEVELS} different levels{such}",
            f"{away}; if it should be numeric, {numeric}",
        )
    if facts.kind == "number":
        yield from _range_faults(f"column '{name}'", facts, largest, f"correct the cells, or {away}")


def _width_faults(scan: Scan) -> Iterator[DataError]:
    """Refuse rows that become too many numbers, once categories are indicators."""
    indicators = (facts.kind == "text" or name in scan.roles.categorical for name, facts in scan.features.items())
    levels = (len(facts.levels or ()) for facts in scan.features.values())
    wide = sum(n if several else 1 for several, n in zip(indicators, levels, strict=True))
    if wide > MOST_FEATURES:
        yield DataError(
            f"a row becomes {wide:,} numbers, with one for every category; the limit is {MOST_FEATURES:,}",
            "leave columns with many categories out with --exclude COLUMN",
        )


def _misfits(name: str, facts: ColumnFacts, largest: float) -> Iterator[DataError]:
    """Tell why a column cannot stand where a schema has numbers."""
    if facts.kind in ("text", "date", "other"):
        held = f"text such as '{facts.example[:40]}'" if facts.example else _held(facts)
        yield DataError(
            f"column '{name}' holds {held} where numbers are expected", "correct the cells, or leave them empty"
        )
    else:
        yield from _range_faults(f"column '{name}'", facts, largest, "correct the cells, or leave them empty")


def _held(facts: ColumnFacts) -> str:
    return "dates or times" if facts.kind == "date" else f"{facts.stored}, which is neither numbers nor text"


def _range_faults(what: str, facts: ColumnFacts, largest: float, hint: str) -> Iterator[DataError]:
    if facts.infinite:
        yield DataError(f"{what} has {counted(facts.infinite, 'infinite value')}", hint)
    limit = min(largest, LARGEST_NUMBER)
    if facts.finite and facts.reach > limit:
        whose = f" of client '{facts.whose}'" if facts.whose else ""
        yield DataError(
            f"{what} has a number{whose} that is too large: {facts.reach:.3g}; the limit is {limit:.3g}", hint
        )


def _missing_faults(scan: Scan) -> Iterator[DataError]:
    gaps = {name: facts.missing for name, facts in scan.features.items() if facts.missing}
    if scan.roles.missing != "error" or not gaps:
        return
    name = max(gaps, key=lambda one: gaps[one])
    others = f" (also missing values in {counted(len(gaps) - 1, 'other column')})" if len(gaps) > 1 else ""
    yield DataError(
        f"column '{name}' has {counted(gaps[name], 'missing value')}{others}",
        "--missing mean (fill with the federated mean) or --missing drop (leave those rows out)",
    )


def _target_faults(roles: Roles, name: str, facts: ColumnFacts, largest: float, *, new: bool) -> Iterator[DataError]:
    what, task = f"target '{name}'", guess_task(roles, facts)
    if facts.missing and roles.missing == "error":
        gaps = counted(facts.missing, "missing value")
        yield DataError(f"{what} has {gaps}", "leave those rows out with --missing drop")
    if facts.kind in ("date", "other"):
        yield DataError(f"{what} holds {_held(facts)}", _ELSEWHERE)
    elif facts.kind == "text" and task == "regression":
        such = f" such as '{facts.example[:40]}'" if facts.example else ""
        options = spelling([facts.example])
        hint = f"read numbers like that with {options}" if options else "--task classification"
        yield DataError(f"{what} holds text{such} and regression needs numbers", hint)
    elif facts.kind == "number":
        yield from _range_faults(what, facts, largest, "correct the cells, or leave those rows out")
    if new and facts.kind in ("number", "truth", "text"):
        yield from _useless_target(what, task, facts)


def _useless_target(what: str, task: Task, facts: ColumnFacts) -> Iterator[DataError]:
    if task == "regression":
        if facts.finite and facts.low == facts.high:
            yield DataError(f"{what} is {facts.low:g} in every row, so there is nothing to predict", _ELSEWHERE)
    elif facts.levels is None:
        yield DataError(f"{what} has more than {MOST_CLASSES} classes", f"--task regression, or {_ELSEWHERE}")
    elif len(facts.levels) == 1:
        yield DataError(f"{what} has only one class, '{next(iter(facts.levels))}'", _ELSEWHERE)
