# SPDX-License-Identifier: Apache-2.0
"""What all studies share: their outcome, its table, progress, looking at runs, and reading lists of options."""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.protocol import Lockstep, Save

__all__ = [
    "Column",
    "Outcome",
    "Tell",
    "at_least",
    "console",
    "json_safe",
    "named",
    "numbers",
    "one_of",
    "progress",
    "seen",
    "show",
    "silent",
]

N = TypeVar("N", int, float)

_PIPED_WIDTH = 140  # columns of a table that goes to a file: nothing is cut off


@dataclass(frozen=True)
class Outcome:
    """What a study found.

    Attributes
    ----------
    study : str
        Its name on the command line.
    settings : mapping
        Everything that is needed to run it again.
    rows : sequence of mapping
        One for each line of the table, unless there is a summary.
    summary : sequence of mapping, optional
        One for each line of the table, where there are too many rows to read.
    """

    study: str
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    summary: Sequence[Mapping[str, Any]] | None = None

    def json(self) -> str:
        """Write one JSON document; numbers that are not finite become null."""
        document: dict[str, Any] = {"study": self.study, "settings": self.settings, "rows": self.rows}
        if self.summary is not None:
            document["summary"] = self.summary
        return json.dumps(json_safe(document), indent=2, allow_nan=False)


def json_safe(value: Any) -> Any:
    """Turn tuples into lists and numbers that JSON does not know (NaN, infinity) into None, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seen(algorithm: "Lockstep", see: "Callable[[Save], tuple[Save, bool]]") -> "Lockstep":
    """Pass an algorithm's questions on; `see` may change what it saves, and says whether to go on after that."""
    from coterie.protocol import Save

    replies = None
    while True:
        try:
            wanted = algorithm.send(replies)
        except StopIteration as end:
            return end.value
        if not isinstance(wanted, Save):
            replies = yield wanted
            continue
        saved, go_on = see(wanted)
        replies = yield saved
        if not go_on:
            return saved.state


# -- on the screen ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Column:
    """A column of the table: which field of the rows, its title, and how a value is written: a format, or a function."""

    field: str
    title: str
    form: str | Callable[[Any], str] = ""

    def write(self, value: Any) -> str:
        """Write a value; one that is missing is a dash."""
        if value is None:
            return "-"
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


def show(outcome: Outcome, columns: Sequence[Column], *, caption: str, as_json: bool) -> None:
    """Print the outcome to stdout: a JSON document and nothing else, or a table."""
    if as_json:
        print(outcome.json())
        return
    table = Table(title=outcome.study, caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column.title, justify="right")
    for row in outcome.rows if outcome.summary is None else outcome.summary:
        table.add_row(*(column.write(row.get(column.field)) for column in columns))
    console().print(table)


def console() -> Console:
    """Write to stdout, wide enough for a table where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)


class Tell(Protocol):
    """Take news of how far something is."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None: ...


def silent(what: str, done: int, total: int, note: str = "") -> None:
    """Keep the news to oneself."""


@contextmanager
def progress() -> Iterator[Tell]:
    """Show bars on stderr while a study runs, if a person is there to see them."""
    if not sys.stderr.isatty():
        yield silent
        return
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as shown:

        def tell(what: str, done: int, total: int, note: str = "") -> None:
            if what not in bars:
                bars[what] = shown.add_task(what, total=total, note=note)
            shown.update(bars[what], completed=done, note=note)

        yield tell


# -- options ----------------------------------------------------------------------------------------------------------
def numbers(option: str, text: str | None, kind: Callable[[str], N]) -> tuple[N, ...] | None:
    """Read a comma-separated list of numbers, where one was given."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of numbers", f"write {option} 1,2,3") from None


def named(option: str, text: str | None, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """Read a comma-separated list of names, where one was given."""
    if text is None:
        return None
    given = tuple(part.strip() for part in text.split(","))
    for name in given:
        one_of(option, name, allowed)
    return tuple(dict.fromkeys(given))


def one_of(option: str, name: str, allowed: Sequence[str]) -> None:
    """Refuse a name that is not allowed."""
    if name not in allowed:
        raise ConfigError(f"{option} does not know {name!r}", f"choose among {', '.join(allowed)}")


def at_least(least: float, **values: float | None) -> None:
    """Refuse numbers that are too small, or no numbers; None stands for an option that was not given."""
    for name, value in values.items():
        if value is not None and not value >= least:  # NaN is refused as well
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {value}", f"give {option} at least {least:g}")
