# SPDX-License-Identifier: Apache-2.0
"""What tasks of a study gave, one JSON file each, so that a study that was stopped goes on with the others.

The environment variable COTERIE_CHECKPOINT names the folder; without it nothing is kept. A file says which function did
what task, and is used for that task alone. How many processes there are has no part in it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter

from coterie.files import clear_temporaries, replace_file
from coterie.lock import LOCK, held
from coterie.studies.choices import VARIABLE

__all__ = ["VARIABLE", "Ledger"]

_OF_NO_MATTER = {"jobs"}  # fields of settings that change no result

Task = TypeVar("Task")
Result = TypeVar("Result")


class Ledger(Generic[Task, Result]):
    """Keep what a function gave for each task, in a folder that the environment names.

    Parameters
    ----------
    work : callable
        The function, perhaps with some arguments bound. Its annotation says what files are turned back into.
    """

    def __init__(self, work: Callable[[Task], Result]) -> None:
        named = os.environ.get(VARIABLE)
        self.folder = Path(named) / "tasks" if named else None
        self._work = work

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the folder alone; what killed processes have left in it is removed."""
        if self.folder is None:
            yield
            return
        with held(self.folder / LOCK, self.folder) as first:
            if first:
                clear_temporaries(self.folder)
            yield

    def known(self, tasks: Sequence[Task]) -> dict[int, Result]:
        """Read what there is: place of the task -> result."""
        if self.folder is None:
            return {}
        self.folder.mkdir(parents=True, exist_ok=True)
        found: dict[int, Result] = {}
        for i, task in enumerate(tasks):
            said, path = self._entry(task)
            if path.is_file():
                entry = json.loads(path.read_text(encoding="utf-8"))
                if entry["task"] == said:
                    found[i] = self._decoded(entry["result"])
        return found

    def keep(self, task: Task, result: Result) -> Result:
        """Write a result down, and give it as it will be read."""
        if self.folder is None:
            return result
        said, path = self._entry(task)
        text = json.dumps({"task": said, "result": encoded(result)})
        replace_file(path, text.encode())
        return self._decoded(json.loads(text)["result"])

    def _entry(self, task: Task) -> tuple[Any, Path]:
        """Say in JSON what is done, and in which file it is kept."""
        assert self.folder is not None
        text = json.dumps([described(self._work), described(task)], sort_keys=True)
        return json.loads(text), self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def _decoded(self, value: Any) -> Result:
        work: Any = self._work
        while isinstance(work, partial):
            work = work.func
        made: Result = TypeAdapter(get_type_hints(work)["return"]).validate_python(value)
        return made


def described(value: Any) -> Any:
    """Say in JSON what a task is: settings by their fields, functions by their names."""
    if isinstance(value, partial):
        return [described(value.func), described(value.args), described(value.keywords)]
    if isinstance(value, AbstractSet):
        return sorted(described(inner) for inner in value)
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return _taken_apart(value, described, skip=_OF_NO_MATTER)


def encoded(value: Any) -> Any:
    """Turn a result into what JSON has; numbers that are not finite stay what they are."""
    return _taken_apart(value, encoded)


def _taken_apart(value: Any, inside: Callable[[Any], Any], skip: AbstractSet[str] = frozenset()) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.name not in skip}
    if isinstance(value, Mapping):
        return {str(key): inside(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [inside(inner) for inner in value]
    raise TypeError(f"a {type(value).__name__} of a study has no form in JSON")
