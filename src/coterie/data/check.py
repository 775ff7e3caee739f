# SPDX-License-Identifier: Apache-2.0
"""Look a table over before learning from it: what is in it, and what would go wrong."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from coterie.data.clients import check_options
from coterie.data.doubts import Doubts, codes
from coterie.data.faults import counted, faults
from coterie.data.frames import is_frame, opened
from coterie.data.gather import batch_rows
from coterie.data.roles import Roles, assign_roles
from coterie.data.scan import ColumnFacts, Scan, guess_task
from coterie.data.schema import Missing, Task
from coterie.data.sources import Csv, known_types, listed
from coterie.data.values import in_order
from coterie.errors import DataError

__all__ = ["Findings", "FoundFeature", "FoundTarget", "Problem", "check"]

_TINY = 5  # rows: fewer cannot be split into something to learn from and something to test on
_UNEQUAL = 10  # times the median
_USABLE = ("numeric", "categorical")
_KINDS = {
    "number": "numeric",
    "truth": "numeric",
    "text": "categorical",
    "date": "date",
    "other": "other",
    None: "empty",
}


class Problem(BaseModel):
    """Something to know about a table, and what to do about it."""

    model_config = ConfigDict(frozen=True)

    severity: Literal["error", "warning", "note"]
    sentence: str
    hint: str = ""


class FoundFeature(BaseModel):
    """A feature column as it was found."""

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    missing: int
    levels: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    constant: bool = False
    constant_within_clients: bool = False


class FoundTarget(BaseModel):
    """The target column as it was found: classes with their rows, or mean and standard deviation."""

    model_config = ConfigDict(frozen=True)

    name: str
    task: Task
    missing: int
    classes: dict[str, int] = {}
    mean: float | None = None
    std: float | None = None


class Findings(BaseModel):
    """What `check` found.

    Attributes
    ----------
    path : str
        What was looked at.
    rows, complete_rows : int
        All rows, and those without a missing value.
    clients : int
        How many clients there are.
    rows_per_client : dict
        Minimum, median and maximum.
    features, target
        The columns.
    n_features : int
        Numbers in a row once categories are indicators.
    memory : int
        Bytes that the rows take in memory, in double precision.
    problems : tuple of Problem
        Errors first, then warnings, then notes.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    rows: int = 0
    complete_rows: int = 0
    clients: int = 0
    rows_per_client: dict[str, float] = {}
    features: tuple[FoundFeature, ...] = ()
    target: FoundTarget | None = None
    n_features: int = 0
    memory: int = 0
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way of reading the table."""
        return not any(problem.severity == "error" for problem in self.problems)


def check(
    path: Any,
    *,
    client: str | None = None,
    target: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    categorical: Collection[str] = (),
    missing: Missing = "error",
    task: Task | Literal["auto"] = "auto",
    min_rows: int = 1,
    sep: str = "",
    decimal: str = ".",
    thousands: str = "",
    encoding: str = "utf-8",
) -> Findings:
    """Look a table over, in one pass; problems with the data are reported and not raised.

    Parameters
    ----------
    path, client, target, features, exclude, categorical, missing, task, min_rows, sep, decimal, thousands, encoding
        As for `read`.

    Returns
    -------
    Findings
        Can be written as JSON with ``model_dump_json()``.
    """
    check_options(missing=missing, task=task)
    try:
        source = opened(path, client, Csv(sep, decimal, thousands, encoding))
        roles = assign_roles(
            source,
            target=target,
            features=features,
            exclude=exclude,
            categorical=categorical,
            missing=missing,
            task=task,
        )
        look = _Look(roles)
        with known_types(source):
            for batch, spelled in source.batches(roles.used, rows=batch_rows(len(roles.used))):
                look.add(batch, spelled=spelled)
    except DataError as error:
        problem = Problem(severity="error", sentence=error.message, hint=error.hint)
        return Findings(path=_called(path), problems=(problem,))
    return look.findings(_called(path), min_rows)


def _called(path: Any) -> str:
    return "the data frame" if is_frame(path) else str(path)


class _Same:
    """Tells which clients have different values in a column."""

    def __init__(self) -> None:
        self.first = np.zeros(0, dtype=np.int64)  # [M] each client's first value
        self.seen = np.zeros(0, dtype=bool)
        self.mixed = np.zeros(0, dtype=bool)

    def add(self, values: pa.Array, owner: np.ndarray, n_clients: int) -> None:
        more = n_clients - len(self.first)
        self.first, self.seen, self.mixed = (np.pad(part, (0, more)) for part in (self.first, self.seen, self.mixed))
        found = codes(values)
        clients, at = np.unique(owner, return_index=True)
        new = ~self.seen[clients]
        self.first[clients[new]] = found[at[new]]
        self.seen[clients] = True
        self.mixed[owner[found != self.first[owner]]] = True


class _Look:
    """One pass over a table, with an eye on each client."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.scan = Scan(replace(roles, missing="error"))  # so that no row is left out of the facts
        self.complete_rows = 0
        self.same = {name: _Same() for name in roles.features}
        self.target = _Same()
        self.doubts = Doubts(roles)

    def add(self, batch: pa.RecordBatch, *, spelled: bool) -> None:
        owner = self.scan.add(batch, spelled=spelled)
        self.complete_rows += replace(self.roles, missing="drop").kept(batch).num_rows
        named_rows = owner >= 0
        batch, owner = batch.filter(pa.array(named_rows)), owner[named_rows]
        self.doubts.add(batch, owner, spelled=spelled)
        for name in list(self.same):
            if self.scan.features[name].kind == "other":
                del self.same[name]
                continue
            self.same[name].add(batch.column(name), owner, len(self.scan.clients))
            if self.same[name].mixed.any():
                del self.same[name]  # one such client settles it
        if self.scan.target is not None and self.scan.target.kind != "other":
            self.target.add(batch.column(self.roles.target), owner, len(self.scan.clients))

    def findings(self, path: str, min_rows: int) -> Findings:
        """Sum up."""
        scan, counts = self.scan, self.scan.counts
        features = tuple(self._feature(name, facts) for name, facts in scan.features.items())
        d = sum(len(feature.levels) if feature.kind == "categorical" else 1 for feature in features)
        scan.roles = self.roles  # from here on, what was asked for counts
        spread = {"min": counts.min(), "median": np.median(counts), "max": counts.max()} if len(counts) else {}
        order = ("error", "warning", "note")
        problems = sorted(self._problems(features, min_rows), key=lambda problem: order.index(problem.severity))
        return Findings(
            path=path,
            rows=scan.rows,
            complete_rows=self.complete_rows,
            clients=len(counts),
            rows_per_client={name: float(value) for name, value in spread.items()},
            features=features,
            target=_found_target(self.roles, scan.target),
            n_features=d,
            memory=scan.rows * 8 * (d + (scan.target is not None)),
            problems=tuple(problems),
        )

    def _feature(self, name: str, facts: ColumnFacts) -> FoundFeature:
        kind = "categorical" if name in self.roles.categorical and facts.kind is not None else _KINDS[facts.kind]
        repeats = len(self.scan.counts) > 1 and bool((self.scan.counts > 1).any())
        return FoundFeature(
            name=name,
            kind=kind,
            missing=facts.missing,
            levels=in_order(facts.levels or ()) if kind == "categorical" else (),
            low=facts.low if kind == "numeric" and facts.finite else None,
            high=facts.high if kind == "numeric" and facts.finite else None,
            constant=facts.constant,
            constant_within_clients=repeats and name in self.same,
        )

    def _problems(self, features: Sequence[FoundFeature], min_rows: int) -> Iterator[Problem]:
        for fault in faults(self.scan):
            yield Problem(severity="error", sentence=fault.message, hint=fault.hint)
        for doubt in self.doubts.found(self.scan.features, self.scan.target):
            yield Problem(severity=doubt.severity, sentence=doubt.sentence, hint=doubt.hint)
        yield from _constant_problems(features)
        yield from _missing_problems(features, self.roles.missing)
        if len(self.scan.counts):
            yield from _client_problems(self.scan.counts, min_rows)
            yield from self._one_class_problems()

    def _one_class_problems(self) -> Iterator[Problem]:
        single = int((~self.target.mixed).sum())
        if guess_task(self.roles, self.scan.target) == "classification" and single:
            yield Problem(
                severity="warning",
                sentence=f"{single} of {counted(len(self.scan.counts), 'client')} have rows of one class only",
                hint="a separate model learns nothing from one class; prefer shared models",
            )


def _found_target(roles: Roles, facts: ColumnFacts | None) -> FoundTarget | None:
    if facts is None or roles.target is None:
        return None
    task = guess_task(roles, facts)
    if task == "classification":
        levels = facts.levels or {}
        classes = {name: levels[name] for name in in_order(levels)}
        return FoundTarget(name=roles.target, task=task, missing=facts.missing, classes=classes)
    mean, std = (facts.mean, facts.std) if facts.finite else (None, None)
    return FoundTarget(name=roles.target, task=task, missing=facts.missing, mean=mean, std=std)


def _constant_problems(features: Sequence[FoundFeature]) -> Iterator[Problem]:
    constant = [feature.name for feature in features if feature.constant]
    if constant:
        yield Problem(
            severity="warning",
            sentence=f"{counted(len(constant), 'column')} with the same value in every row: {listed(constant)}",
            hint=f"nothing can be learned from that; --exclude {constant[0]}",
        )
    within = [f.name for f in features if f.constant_within_clients and not f.constant and f.kind in _USABLE]
    if within:
        yield Problem(
            severity="warning",
            sentence=f"{counted(len(within), 'column')} with the same value in all rows of a client: {listed(within)}",
            hint=f"such a column describes clients and may identify them; --exclude {within[0]}",
        )


def _missing_problems(features: Sequence[FoundFeature], missing: Missing) -> Iterator[Problem]:
    gaps = [
        f"{feature.name} ({feature.missing})" for feature in features if feature.missing and feature.kind in _USABLE
    ]
    if gaps and missing != "error":
        done = (
            "rows with missing values are left out" if missing == "drop" else "they are filled with the federated mean"
        )
        columns = counted(len(gaps), "column")
        yield Problem(severity="note", sentence=f"{columns} with missing values: {listed(gaps)}", hint=done)


def _client_problems(counts: np.ndarray, min_rows: int) -> Iterator[Problem]:
    n, small, most = len(counts), int((counts < min_rows).sum()), int(counts.max())
    if small == n:
        yield Problem(
            severity="error",
            sentence=f"none of the {n} clients has {min_rows} rows or more; the largest has {most}",
            hint=f"lower it with --min-rows {most}",
        )
    elif small:
        yield Problem(
            severity="note", sentence=f"{small} of {n} clients have fewer than {min_rows} rows and are left out"
        )
    if n == 1:
        yield Problem(severity="warning", sentence="there is only one client", hint="is --client the right column?")
    tiny = int(((counts < _TINY) & (counts >= min_rows)).sum())
    if tiny:
        yield Problem(
            severity="warning",
            sentence=f"{tiny} of {counted(n, 'client')} have fewer than {_TINY} rows",
            hint=f"leave them out with --min-rows {_TINY}",
        )
    if most > _UNEQUAL * np.median(counts):
        yield Problem(
            severity="note",
            sentence=f"clients are very unequal: {most} rows in the largest, {np.median(counts):g} in the median one",
            hint="look at metrics by client, not only over all rows",
        )
