# SPDX-License-Identifier: Apache-2.0
"""Small changes to documents, tensors and bytes that were good: what most malformed files are."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

__all__ = ["changed", "changed_bytes", "edits", "flips"]

_ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "common", "../..", "\ud800", "x" * 2000, -1, 0, 1, 2, 10**9, 2**62, 10**30, 0.5, -0.5,
    1e-320, 1e100, 1e308, float("nan"), float("inf"), [], {}, [[]], [None], ["x"], [0], [1e308, -1e308], [{}], {"a": 1},
    {"": {}},
)  # fmt: skip

_values = st.sampled_from(_ODD) | st.integers() | st.floats() | st.text(max_size=8)
# Few draws, since drawing takes longer than reading: bytes say where something is changed, and how.
edits = st.tuples(st.binary(min_size=6, max_size=6), _values, _values)
flips = st.binary(min_size=3, max_size=12)


def changed(document: Any, how: tuple[bytes, Any, Any]) -> Any:
    """Change one place of a document, or two: leave it out, rename it, repeat it, or put something else there."""
    where, *values = how
    for number, value in enumerate(map(deepcopy, values[: 1 + where[0] % 2])):
        high, low, kind = where[3 * number : 3 * number + 3]
        places = list(_places(document))
        parent, key = places[(high << 8 | low) % len(places)]
        if parent is None:
            document = value if kind < 8 else document
        elif kind < 30:
            del parent[key]
        elif kind < 60 and isinstance(parent, dict):
            parent[f"{key}x"] = parent.pop(key)
        elif kind < 60 and isinstance(parent, list):
            parent.extend([parent[key]] * 3)
        elif kind < 80:
            parent[key] = [parent[key]]
        else:
            parent[key] = value
    return document


def _places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    yield parent, key
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, inner in inside:
        yield from _places(inner, value, name)


def changed_bytes(content: bytes, how: bytes) -> bytes:
    """Change up to four bytes; the last change may cut the rest off."""
    made, place = bytearray(content), 0
    for at in range(0, len(how) - 2, 3):
        place = (how[at] << 8 | how[at + 1]) % len(made)
        made[place] = how[at + 2]
    return bytes(made[:place]) if how[-1] < 8 else bytes(made)


def as_json(document: Any) -> bytes:
    """Write a document, with half surrogate pairs where it has any."""
    return json.dumps(document).encode()
