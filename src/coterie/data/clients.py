# SPDX-License-Identifier: Apache-2.0
"""A data set by client, with what is held out of it: what `read` returns and estimators take."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from coterie.data.ragged import Ragged
from coterie.data.schema import Missing, Schema, Task
from coterie.data.targets import check_target
from coterie.errors import ConfigError, DataError
from coterie.outcome_names import NAMES, TIMES, OutcomeName

__all__ = ["Clients", "check_options", "check_outcome", "held_out", "left_out"]


@dataclass(frozen=True, eq=False, repr=False)
class Clients:
    """Rows of many clients, with rows and clients held out.

    Attributes
    ----------
    schema : Schema
        The columns and their use.
    train : Ragged
        Rows to learn from.
    test : Ragged or None
        Held-out rows of the same clients; None when none were held out.
    newcomers : Ragged or None
        All rows of the clients that were held out.
    dropped_rows : int
        Rows left out because of missing values.
    dropped_clients : int
        Clients left out because they have too few rows.
    unknown_levels : int
        Cells with a category level that the schema does not have.
    """

    schema: Schema
    train: Ragged
    test: Ragged | None = None
    newcomers: Ragged | None = None
    dropped_rows: int = 0
    dropped_clients: int = 0
    unknown_levels: int = 0

    @property
    def n_clients(self) -> int:
        """How many clients there are to learn from."""
        return self.train.n_clients

    @property
    def names(self) -> np.ndarray:
        """[M] names of the clients to learn from, ascending."""
        return self.train.names

    def left_out(self) -> list[str]:
        """Say what was not used."""
        return left_out(self.dropped_rows, self.dropped_clients)

    def with_outcome(self, outcome: OutcomeName) -> "Clients":
        """The same clients, with a target that is something else; refused where it cannot be that."""
        check_outcome(outcome)
        schema = self.schema.model_copy(update={"outcome": outcome})
        parts: dict[str, Any] = {"train": self.train, "test": self.test, "newcomers": self.newcomers}
        for name, rows in parts.items():
            if rows is not None:
                check_target(rows, schema)
            if type(rows) is Ragged:
                parts[name] = replace(rows, schema=schema)
        return replace(self, schema=schema, **parts)

    def fingerprint(self) -> str:
        """What tells one data set from another: its columns, its clients, and every value."""
        later = {"outcome", "event"} if self.schema.outcome is None else None  # which earlier versions did not have
        seen = hashlib.blake2b(self.schema.model_dump_json(exclude=later).encode(), digest_size=16)
        for rows in (self.train, self.test, self.newcomers):
            if rows is not None:
                seen.update("\0".join(rows.names.tolist()).encode() + rows.layout.counts.tobytes())
                for value in rows.values():
                    seen.update(value)
        return seen.hexdigest()

    def __repr__(self) -> str:
        parts = [f"{self.n_clients} clients", f"{self.train.layout.n_rows} rows"]
        if self.test is not None:
            parts.append(f"{self.test.layout.n_rows} test rows")
        if self.newcomers is not None:
            parts.append(f"{self.newcomers.n_clients} new clients")
        parts.append(f"{self.schema.n_features} features")
        if self.schema.task != "none":
            parts.append(f"{self.schema.outcome or self.schema.task} of '{self.schema.target}'")
        return f"Clients({', '.join(parts)})"


def left_out(rows: int, clients: int) -> list[str]:
    """Say how many rows, and how many clients, were not used."""
    said = [f"{rows} rows with missing values are left out"] if rows else []
    return said + ([f"{clients} clients with too few rows are left out"] if clients else [])


def check_outcome(outcome: str | None, event: str | None = None) -> None:
    """Refuse an outcome that there is not, and an event where none is looked at."""
    if outcome is not None and outcome not in NAMES:
        raise ConfigError(f"outcome is '{outcome}'", f"choose from {', '.join(NAMES)}")
    if event is not None and outcome not in TIMES:
        raise ConfigError(
            f"event is '{event}', and outcome is {outcome or 'not given'}", "events are for --outcome cox"
        )


def check_options(*, missing: str, task: str, test_size: float = 0.0, new_clients: float = 0.0) -> None:
    """Refuse options that make no sense, before anything is read."""
    for option, value, known in (("missing", missing, get_args(Missing)), ("task", task, ("auto", *get_args(Task)))):
        if value not in known:
            raise ConfigError(f"{option} is '{value}'", f"choose from {', '.join(known)}")
    for option, share in (("test_size", test_size), ("new_clients", new_clients)):
        if not 0 <= share < 1:
            raise ConfigError(f"{option} is {share}, and must be at least 0 and less than 1", "0.2 holds out a fifth")


def held_out(
    rows: Ragged, schema: Schema, *, test_size: float, new_clients: float, seed: int, **left_out: Any
) -> Clients:
    """Hold out clients first, then rows of the others."""
    check_target(rows, schema)
    rows = replace(rows, schema=schema)
    test = newcomers = None
    if new_clients:
        rows, newcomers = rows.split_clients(new_clients, seed=seed)
        if not rows.n_clients:
            raise DataError(
                f"holding out {new_clients:g} of the clients leaves no clients to train on", "lower --new-clients"
            )
    if test_size:
        rows, test = rows.split(test_size, seed=seed)
    return Clients(
        schema,
        rows,
        test if test is not None and test.layout.n_rows else None,
        newcomers if newcomers is not None and newcomers.n_clients else None,
        **left_out,
    )
