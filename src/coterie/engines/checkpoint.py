# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: tensors and a JSON document in one safetensors file, replaced atomically, never pickled, with a checksum."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coterie.documents import parsed
from coterie.errors import RunError
from coterie.files import replace_file
from coterie.limits import MOST_STATE_VALUES

__all__ = ["from_record", "load_tensors", "save_tensors", "to_record"]

T = TypeVar("T")

_AGAIN = "start the run again with `coterie fit`"
_OTHER = {"run": "another run", "data": "other data", "phase": "another phase of the run"}


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any], of: Mapping[str, str] | None = None
) -> None:
    """Write named tensors and a JSON document to one file, and `of` which run and data, for checkpoints."""
    plain = {"memory_format": torch.contiguous_format}  # no two share memory, and none has strides of its own
    own = {name: value.detach().clone(**plain) for name, value in tensors.items()}
    said = json.dumps({**document, **({"of": {**of, "coterie": _version()}} if of else {})})
    # One entry: several come in any order, and equal files would differ.
    replace_file(path, save(own, metadata={"coterie": f"{said}\n{_checksum(own, said)}"}))


def load_tensors(
    path: Path, of: Mapping[str, str] | None = None, hint: str = _AGAIN
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote.

    Parameters
    ----------
    of : mapping, optional
        Which run and data the file must be of; other files, and those that do not say, are refused.
    hint : str
        What to do about a file that cannot be used.

    Raises
    ------
    RunError
        There is no such file, it is damaged, or it belongs to something else. Files of earlier versions have no checksum.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            said, sealed, checksum = (file.metadata() or {})["coterie"].partition("\n")
        if sealed and checksum != _checksum(tensors, said):
            raise RunError(f"the checkpoint {path} is damaged: its checksum is wrong", hint)
        document = parsed(said, f"the checkpoint {path}", hint, most=MOST_STATE_VALUES, finite=False)
    except FileNotFoundError:
        raise RunError(f"there is no checkpoint at {path}", hint) from None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RunError(f"the checkpoint {path} cannot be read: {error}", hint) from None
    if not isinstance(document, dict):
        raise RunError(f"the checkpoint {path} cannot be read: it does not say what it holds", hint)
    owner = document.pop("of", {})
    for what, wanted in (of or {}).items():
        if not isinstance(owner, dict) or owner.get(what) != wanted:
            raise RunError(f"the checkpoint {path} is of {_OTHER[what]}", hint)
    return tensors, document


@cache
def _version() -> str:
    return version("coterie")


def _checksum(tensors: Mapping[str, Tensor], said: str) -> str:
    """SHA-256 of all that a file says: names, types, shapes and numbers of tensors, and the document."""
    made = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        value = tensors[name]
        made.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        made.update(
            value.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().data
        )
    return made.hexdigest()


def to_record(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take a state (a dataclass of tensors, numbers and at most one further state) apart: its tensors, the rest for JSON."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for each in dataclasses.fields(state):
        value = getattr(state, each.name)
        if isinstance(value, Tensor):
            tensors[each.name] = value
        elif dataclasses.is_dataclass(value):
            own, rest[each.name] = to_record(value)
            tensors |= {f"{each.name}/{name}": inner for name, inner in own.items()}
        else:
            rest[each.name] = value
    return tensors, rest


def from_record(kind: type[T], tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> T:
    """Put a state together again; one that holds another is given as `Outer[Inner]`."""
    values: dict[str, Any] = {name: value for name, value in tensors.items() if "/" not in name} | dict(rest)
    try:
        for name, value in rest.items():
            if isinstance(value, dict):
                own = {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}
                (inner,) = get_args(kind)
                values[name] = from_record(inner, own, value)
        hints = _hints(get_origin(kind) or kind)
        if odd := [name for name, value in values.items() if not _fits(value, hints.get(name))]:
            raise TypeError(f"'{odd[0]}' is of another type")
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"the checkpoint holds another kind of state: {error}", "continue with the options that it was begun with"
        ) from None


def _hints(kind: Any) -> dict[str, Any]:
    """The types of a state's fields, as far as their names mean something here."""
    try:
        return get_type_hints(kind)
    except NameError:  # of a class within a function
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a field may have a value, as far as that can be told: tensors are tensors, and numbers numbers."""
    if hint is Tensor or isinstance(value, Tensor):
        return isinstance(value, Tensor) and (hint is Tensor or Tensor in get_args(hint))
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return hint is not bool or isinstance(value, bool)
