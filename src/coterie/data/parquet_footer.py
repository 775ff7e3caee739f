# SPDX-License-Identifier: Apache-2.0
"""How many values a Parquet file says it holds, read from its footer (Thrift's compact protocol).

pyarrow tells it too, but ends the whole process where a footer's statistics do not fit its columns.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

__all__ = ["values_inside"]

_ROW_GROUPS, _COLUMNS, _ABOUT, _VALUES = 4, 1, 3, 5  # fields of FileMetaData, RowGroup, ColumnChunk, ColumnMetaData
_DEEPEST = 32
_FIXED = {3: 1, 7: 8, 13: 16}  # bytes of a byte, a double, a UUID


def values_inside(footer: bytes) -> int:
    """Sum what all columns hold in all row groups, entries of lists counted one by one.

    Raises
    ------
    pa.ArrowInvalid
        This is no footer.
    """
    try:
        groups = _Compact(footer).struct()[_ROW_GROUPS]
        found = [column[_ABOUT][_VALUES] for group in groups for column in group[_COLUMNS]]
        if not all(type(many) is int and many >= 0 for many in found):
            raise ValueError
    except (KeyError, IndexError, TypeError, ValueError):
        raise pa.ArrowInvalid("the footer of this Parquet file cannot be read") from None
    return sum(found)


@dataclass
class _Compact:
    """A reader of values: structures are {field: value}, and texts are left out."""

    content: bytes
    at: int = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth + 1)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError
        if kind in (4, 5, 6):
            return self._signed()
        if kind == 8:
            return self._skip(self._number())
        if kind in (9, 10):
            return self._list(depth)
        if kind == 11:
            return self._map(depth)
        if kind == 12:
            return self.struct(depth)
        return self._skip(_FIXED[kind])

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        size = head >> 4 if head >> 4 < 15 else self._number()
        return [self._entry(head & 15, depth) for _ in range(self._within(size))]

    def _map(self, depth: int) -> None:
        size = self._within(self._number())
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._entry(kinds >> 4, depth)
            self._entry(kinds & 15, depth)

    def _entry(self, kind: int, depth: int) -> Any:
        return self._byte() == 1 if kind in (1, 2) else self._value(kind, depth + 1)

    def _within(self, size: int) -> int:
        """Every entry takes a byte at least."""
        if size > len(self.content) - self.at:
            raise ValueError
        return size

    def _byte(self) -> int:
        self.at += 1
        return self.content[self.at - 1]

    def _skip(self, size: int) -> None:
        self.at += self._within(size)

    def _number(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError
        return value | byte << shift

    def _signed(self) -> int:
        value = self._number()
        return value >> 1 ^ -(value & 1)
