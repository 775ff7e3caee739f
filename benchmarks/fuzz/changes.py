# SPDX-License-Identifier: Apache-2.0
"""Small changes to documents, tensors and bytes that were good: what most malformed files are."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

__all__ = ["changed", "changed_bytes", "edits", "flips"]

_ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "common", "../..", "\ud800", "x" * 2000, -1, 0, 1, 2, 10**9, 2**62, 10**30, 0.5, -0.5,
    1e-320, 1e100, 1e308, float("nan"), float("inf"), [], {}, [[]], [None], ["x"], [0], [1e308, -1e308], [{}], {"a": 1},
    {"": {}},
)  # fmt: skip

_values = st.one_of(
    st.sampled_from(_ODD), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(0, 3), max_size=3)
)
_edit = st.tuples(st.integers(0, 9999), st.integers(0, 5), _values)
edits = st.lists(_edit, min_size=1, max_size=3)
flips = st.lists(st.tuples(st.integers(0, 99_999), st.integers(0, 255)), min_size=1, max_size=4)


def changed(document: Any, how: list[tuple[int, int, Any]]) -> Any:
    """Change places of a document: leave them out, rename them, repeat them, or put something else there."""
    for which, kind, value in how:
        places = list(_places(document))
        parent, key = places[which % len(places)]
        if parent is None:
            document = value if kind == 0 else document
        elif kind == 1:
            del parent[key]
        elif kind == 2 and isinstance(parent, dict):
            parent[f"{key}x"] = parent.pop(key)
        elif kind == 3 and isinstance(parent, list):
            parent.extend([parent[key]] * 3)
        elif kind == 4:
            parent[key] = [parent[key]]
        else:
            parent[key] = value
    return document


def _places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    yield parent, key
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, inner in inside:
        yield from _places(inner, value, name)


def changed_bytes(content: bytes, how: list[tuple[int, int]]) -> bytes:
    """Change single bytes; the last change may cut the rest off."""
    made = bytearray(content)
    for place, value in how:
        made[place % len(made)] = value
    return bytes(made[: how[-1][0] % len(made)]) if how[-1][1] == 0 else bytes(made)


def as_json(document: Any) -> bytes:
    """Write a document, with half surrogate pairs where it has any."""
    return json.dumps(document).encode()
