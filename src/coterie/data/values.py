# SPDX-License-Identifier: Apache-2.0
"""One Arrow column at a time: what is missing, what is a number, and what a value is called.

Names (of clients, classes and category levels) must agree between CSV, Parquet and arrays, so every value has one
spelling: integers without ``.0``, truth values as ``true`` and ``false``, text as it stands, and nothing for what is
missing.
"""

import math
import re
from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "MISSING",
    "UNKNOWN",
    "coded",
    "in_order",
    "instants",
    "is_date",
    "is_missing",
    "is_text",
    "name_of",
    "named",
    "numbers",
    "plain",
]

MISSING, UNKNOWN = -1, -2  # what `coded` gives where there is no place to give

_WHOLE = re.compile(r"-?\d+\.0+")
_TRUTH = ["true", "false", "True", "False", "TRUE", "FALSE"]


def name_of(value: object) -> str:
    """Spell a single value; a missing one is the empty string."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    if _WHOLE.fullmatch(text):
        return text.split(".", maxsplit=1)[0]
    if not text or text.isspace():
        return ""
    return text.lower() if text in _TRUTH else text


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Sort names: by value when they all are numbers, else by letters."""
    try:
        numeric = all(math.isfinite(float(name)) for name in names)
    except ValueError:
        numeric = False
    return tuple(sorted(names, key=lambda name: (float(name), name)) if numeric else sorted(names))


def plain(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Undo chunks and dictionaries, which are ways of storing and not of meaning."""
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values.cast(pa.string()) if str(values.type) == "string_view" else values  # few functions know views


def is_text(kind: pa.DataType) -> bool:
    """Tell whether an Arrow type holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_date(values: pa.Array) -> bool:
    """Tell whether a column holds points in time, also when it spells them."""
    if not is_text(values.type):
        return bool(pa.types.is_temporal(values.type))
    zoned = pa.timestamp("us", "UTC")
    return _cast(values, pa.timestamp("us")) is not None or _cast(values, zoned) is not None


def instants(values: pa.Array) -> np.ndarray:
    """[n] points in time as numbers that grow with it, with NaN where they are missing; of a column that `is_date`."""
    values = plain(values)
    if is_text(values.type):
        found = _cast(values, pa.timestamp("us"))
        values = _cast(values, pa.timestamp("us", "UTC")) if found is None else found
    if pa.types.is_date32(values.type) or pa.types.is_time32(values.type):
        values = values.cast(pa.int32())
    return np.asarray(values.cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def is_missing(values: pa.Array) -> np.ndarray:
    """[n] true where a value is null, NaN, or text of nothing but blanks."""
    values = plain(values)
    gaps = values.is_null(nan_is_null=True)
    if is_text(values.type):
        blank = pc.or_(pc.equal(values, ""), pc.utf8_is_space(values))
        gaps = pc.or_(gaps, blank.fill_null(True))
    return np.asarray(gaps.to_numpy(zero_copy_only=False), dtype=bool)


def numbers(values: pa.Array) -> np.ndarray | None:
    """[n] the column as float64, with NaN where it is missing; None when some values are no numbers."""
    values = plain(values)
    kind = values.type
    if is_text(kind):
        parsed = _parsed(values)
    elif pa.types.is_null(kind) or pa.types.is_boolean(kind):
        parsed = values.cast(pa.float64())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        parsed = values.cast(pa.float64(), safe=False)  # integers beyond 2^53 are rounded, as in any other float
    else:
        return None
    return None if parsed is None else np.asarray(parsed.to_numpy(zero_copy_only=False), dtype=np.float64)


def coded(values: pa.Array, places: Mapping[str, int]) -> np.ndarray:
    """[n] the place of every value's name, `MISSING` where there is no value and `UNKNOWN` where it has no place."""
    names, which = named(values)
    place = [places.get(name, UNKNOWN) if name else MISSING for name in names]
    return np.asarray(np.array([*place, MISSING], dtype=np.int64)[which])


def named(values: pa.Array) -> tuple[list[str], np.ndarray]:
    """Spell the different values of a column: (names, [n] which name; a null is one past the last)."""
    values = plain(values)
    if pa.types.is_temporal(values.type):
        values = values.cast(pa.string())
    encoded = values.dictionary_encode()
    which = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    return [name_of(value) for value in encoded.dictionary.to_pylist()], np.asarray(which)


def _parsed(text: pa.Array) -> pa.Array | None:
    """Numbers that are spelled out, with blanks around them perhaps, or truth values."""
    found = _cast(text, pa.float64())
    if found is None:
        text = pc.utf8_trim_whitespace(text)
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)
        found = _cast(text, pa.float64())
    if found is None and pc.all(pc.is_in(text.drop_null(), pa.array(_TRUTH, text.type)), min_count=0).as_py():
        found = pc.equal(pc.utf8_lower(text), "true").cast(pa.float64())
    spelled_nan = found is not None and pc.any(pc.is_nan(found)).as_py()
    return None if spelled_nan else found  # what is missing is null by now, so this is a word


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return values.cast(kind)
    except pa.ArrowInvalid:
        return None
