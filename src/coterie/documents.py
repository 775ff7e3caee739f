# SPDX-License-Identifier: Apache-2.0
"""JSON that anybody may have written: read within bounds, and checked against a model of what it should be.

`parsed` bounds what any document may be: bytes, values, depth, the length of texts and the size of numbers. `checked` then
compares it with a pydantic model. Whoever reads a document afterwards may trust it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from coterie.errors import CoterieError, RunError
from coterie.limits import LARGEST_RESULT, MOST_COUNT, MOST_DEPTH, MOST_DOCUMENT_BYTES, MOST_TEXT, MOST_VALUES

__all__ = ["FirstFault", "Said", "checked", "complaint_of", "parsed", "read_json"]

_M = TypeVar("_M", bound=BaseModel)
_SHOWN = 80  # characters of a place within a document
_NO_JSON = "it is not JSON, is cut short, or has a number that is out of range"
_DIGITS = 20  # of a whole number: 64 bits have no more


class FirstFault(FailFast):
    """The first fault of a list is enough: there may be millions. Unlike pydantic's own, this can stand in a union."""

    __hash__ = object.__hash__


class Said(BaseModel):
    """A part of a document: what is known of it has the right type; what later versions add is let be."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


def read_json(path: Path, hint: str) -> Any:
    """Read a JSON document within bounds.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is none.
    RunError
        It cannot be read, or is beyond the bounds.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_DOCUMENT_BYTES + 1)  # whatever the folder says of its size
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    return parsed(content, str(path), hint)


def parsed(
    content: bytes | str,
    where: str,
    hint: str,
    *,
    error: type[CoterieError] = RunError,
    most: int = MOST_VALUES,
    finite: bool = True,
) -> Any:
    """Parse JSON within bounds, or refuse it in one sentence about `where` it is.

    Parameters
    ----------
    content : bytes or str
        The document.
    where, hint : str
        What is complained about, and the way out.
    error : type
        Of the complaint.
    most : int
        Values in it.
    finite : bool
        Whether NaN and infinity are refused, which JSON does not have but Python writes.
    """
    if len(content) > MOST_DOCUMENT_BYTES:
        raise error(f"{where} is larger than {MOST_DOCUMENT_BYTES // 10**6} MB", hint)
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        if text.count(",") > most:
            raise error(f"{where} has more than {most:,} values", hint)
        numbers: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
        found = json.loads(text, parse_int=_whole, **numbers)
    except (ValueError, RecursionError):
        raise error(f"{where} cannot be read: {_NO_JSON}", hint) from None
    if (fault := _beyond(found, most)) is not None:
        raise error(f"{where} {fault}", hint)
    return found


def checked(kind: type[_M], document: Any, where: str, hint: str, error: type[CoterieError] = RunError) -> _M:
    """Check a document against a model, or refuse it in one sentence about `where` it is."""
    try:
        return kind.model_validate(document)
    except ValidationError as found:
        raise error(f"{where} is not as it should be {complaint_of(found)}", hint) from None


def complaint_of(error: ValidationError) -> str:
    """Say where the first fault is, and what it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    at, said = ".".join(map(str, first["loc"]))[:_SHOWN], str(first["msg"]).removeprefix("Value error, ")
    return f"at {at or 'its beginning'}: {said[:1].lower()}{said[1:]}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) > LARGEST_RESULT:
        raise ValueError("a number that is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > _DIGITS or abs(value := int(text)) > MOST_COUNT:
        raise ValueError("a whole number that is too large")
    return value


def _beyond(document: Any, most: int) -> str | None:
    """Say what is beyond the bounds: looked at level by level, as nobody knows how deep a document is."""
    level, depth, values = [document], 0, 0
    while level:
        if depth > MOST_DEPTH:
            return f"has more than {MOST_DEPTH} lists and groups within each other"
        values += len(level)
        if values > most:
            return f"has more than {most:,} values"
        inside: list[Any] = []
        for value in level:
            if isinstance(value, str) and len(value) > MOST_TEXT:
                return f"has a text of {len(value):,} characters; the limit is {MOST_TEXT:,}"
            if isinstance(value, Mapping):
                inside += value.keys()
                inside += value.values()
            elif isinstance(value, list):
                inside += value
        level, depth = inside, depth + 1
    return None
