# SPDX-License-Identifier: Apache-2.0
"""Arrays as whole numbers of several 64-bit words, so that sums modulo a power of two are exact and can be masked.

The scale is the same for everybody and every sum, by the precision of an array: double precision takes 256 bits, of which
96 are behind the point, single precision 128 and 48, and whole numbers 64. So what a double of 1e-13 or more says is kept to
the last bit, up to sums of 2e43. A number that is too large, or not finite, is replaced by one beyond all others: the sum
that it is in is then not finite, and no other is touched.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import RunError

__all__ = ["MOST_NODES", "Field", "Layout", "Words", "add", "decode", "encode", "subtract"]

Words = NDArray[np.uint64]

MOST_NODES = 1 << 13  # in a sum: what is beyond the largest sum, from so many, does not wrap around
_SCALES = {"float64": (4, 96), "float32": (2, 48), "int64": (1, 0)}  # words, and bits behind the point
_ROOM = 16  # bits above the largest sum
_MOST_AXES = 12
_MOST_FIELDS = 100_000
_MOST_NUMBERS = 1 << 28  # in a sum


@dataclass(frozen=True)
class Field:
    """One array of a sum."""

    name: str
    kind: str  # "float64", "float32" or "int64"
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def n_words(self) -> int:
        """How many words it takes."""
        return _SCALES[self.kind][0] * self.size


@dataclass(frozen=True)
class Layout:
    """Which arrays a vector of words stands for. Those of one precision lie together, the lowest words first."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> "Layout":
        """Describe arrays."""
        return cls(tuple(Field(name, _kind(array.dtype), array.shape) for name, array in arrays.items()))

    @classmethod
    def read(cls, said: object) -> "Layout":
        """Make a layout of what somebody else has said, within bounds."""
        fields = []
        if not isinstance(said, list | tuple) or len(said) > _MOST_FIELDS:
            raise RunError("a sum does not say of which arrays it is", "use the same version of coterie everywhere")
        for one in said:
            fits = (
                isinstance(one, list | tuple) and len(one) == 3 and isinstance(one[0], str) and one[1] in list(_SCALES)
            )
            shape = one[2] if fits else ()
            fits = fits and isinstance(shape, list | tuple) and len(shape) <= _MOST_AXES
            if not fits or not all(type(n) is int and 0 <= n <= _MOST_NUMBERS for n in shape):
                raise RunError("a sum has an array of another kind", "use the same version of coterie everywhere")
            fields.append(Field(one[0], one[1], tuple(shape)))
        found = cls(tuple(fields))
        if sum(field.size for field in fields) > _MOST_NUMBERS or len({f.name for f in fields}) < len(fields):
            raise RunError(
                f"a sum has more than {_MOST_NUMBERS:,} numbers, or two arrays of one name", "ask for fewer at once"
            )
        return found

    def said(self) -> list[list[Any]]:
        """As plain values."""
        return [[field.name, field.kind, list(field.shape)] for field in self.fields]

    @cached_property
    def digest(self) -> bytes:
        """What tells it from others."""
        return hashlib.sha256(json.dumps(self.said()).encode()).digest()

    @cached_property
    def n_words(self) -> int:
        """Length of the vector."""
        return sum(field.n_words for field in self.fields)

    @cached_property
    def sections(self) -> list[tuple[str, int, int]]:
        """Precision, words of a number, and numbers, in the order of the vector."""
        sizes = {kind: sum(f.size for f in self.fields if f.kind == kind) for kind in _SCALES}
        return [(kind, _SCALES[kind][0], n) for kind, n in sizes.items() if n]


def _kind(dtype: np.dtype[Any]) -> str:
    if dtype == np.float64:
        return "float64"
    return "float32" if np.issubdtype(dtype, np.floating) else "int64"


def encode(arrays: Mapping[str, NDArray[Any]], n_nodes: int) -> tuple[Layout, Words]:
    """Make words of arrays, for a sum over so many nodes."""
    if not 1 <= n_nodes <= MOST_NODES:
        raise RunError(f"a sum is over {n_nodes} nodes; at most {MOST_NODES}", "put several clients on a node")
    layout = Layout.of(arrays)
    made = []
    for kind, words, _ in layout.sections:
        values = np.concatenate([np.asarray(arrays[f.name]).reshape(-1) for f in layout.fields if f.kind == kind])
        made.append(_encoded(values.astype(np.float64 if kind != "int64" else np.int64), words, kind, n_nodes).ravel())
    return layout, np.concatenate(made) if made else np.zeros(0, dtype=np.uint64)


def _encoded(values: NDArray[Any], words: int, kind: str, n_nodes: int) -> Words:
    """[n] -> [words, n]"""
    fraction, bits = _SCALES[kind][1], 64 * words
    most = 2.0 ** (bits - _ROOM - fraction) / n_nodes  # so much is everybody's share of the largest sum
    if kind == "int64":
        if len(values) and bool((np.abs(values.astype(np.float64)) >= most).any()):
            raise RunError(f"a count is not below {most:.0f}, the most that a sum over {n_nodes} nodes can hold")
        return values.astype(np.int64).view(np.uint64)[None]
    beyond = ~(np.abs(values) < most)  # also what is not a number
    left = np.rint(np.ldexp(np.abs(np.where(beyond, 0.0, values)), fraction))
    out = np.empty((words, len(values)), dtype=np.uint64)
    for i in reversed(range(words)):
        head = np.floor(np.ldexp(left, -64 * i))  # exact: the leading bits of at most 53
        out[i] = head.astype(np.uint64)
        left -= np.ldexp(head, 64 * i)
    negative = np.signbit(values) & ~beyond
    out[:, negative] = _negated(out[:, negative])
    out[:, beyond] = 0
    out[-1, beyond] = np.uint64(1 << (64 - _ROOM + 1))
    return out


def decode(layout: Layout, vector: Words) -> dict[str, NDArray[Any]]:
    """Make arrays of the words of a sum."""
    numbers = {}
    for kind, words, part in _cut(layout, vector):
        numbers[kind] = _decoded(part, words, kind)
    taken = dict.fromkeys(numbers, 0)
    out = {}
    for field in layout.fields:
        at = taken.get(field.kind, 0)
        found = numbers[field.kind][at : at + field.size] if field.size else np.zeros(0)
        out[field.name] = found.reshape(field.shape).astype(field.kind)
        if field.size:
            taken[field.kind] = at + field.size
    return out


def _decoded(part: Words, words: int, kind: str) -> NDArray[Any]:
    """[words, n] -> [n]"""
    if kind == "int64":
        values: NDArray[Any] = part[0].view(np.int64)
        if len(values) and bool((np.abs(values.astype(np.float64)) >= 2.0 ** (64 - _ROOM)).any()):
            raise RunError(
                "a sum of counts is larger than it can be", "see that all nodes run the same version of coterie"
            )
        return values
    negative = part[-1] >= np.uint64(1 << 63)
    size = part.copy()
    size[:, negative] = _negated(size[:, negative])
    fraction = _SCALES[kind][1]
    value = np.zeros(part.shape[1])
    for i in reversed(range(words)):
        value += np.ldexp(size[i].astype(np.float64), 64 * i - fraction)
    value = np.where(size[-1] >= np.uint64(1 << (64 - _ROOM)), np.nan, value)
    return np.where(negative, -value, value)


def add(layout: Layout, total: Words, other: Words) -> None:
    """Add to a total, in place."""
    for (_, words, a), (_, _, b) in zip(_cut(layout, total), _cut(layout, other), strict=True):
        carry = np.zeros(a.shape[1], dtype=np.bool_)
        for i in range(words):
            first = a[i] + b[i]
            second = first + carry
            carry = (first < b[i]) | (second < first)
            a[i] = second


def subtract(layout: Layout, total: Words, other: Words) -> None:
    """Subtract from a total, in place."""
    for (_, words, a), (_, _, b) in zip(_cut(layout, total), _cut(layout, other), strict=True):
        borrow = np.zeros(a.shape[1], dtype=np.bool_)
        for i in range(words):
            first = a[i] - b[i]
            second = first - borrow
            borrow = (a[i] < b[i]) | (first < borrow)
            a[i] = second


def _negated(part: Words) -> Words:
    """Two's complement.  [words, n]"""
    out = ~part
    carry = np.ones(part.shape[1], dtype=np.bool_)
    for i in range(len(out)):
        out[i] = out[i] + carry
        carry = carry & (out[i] == 0)
    return out


def _cut(layout: Layout, vector: Words) -> Sequence[tuple[str, int, Words]]:
    """Views of a vector, for each precision.  [words, n]"""
    if vector.dtype != np.uint64 or vector.shape != (layout.n_words,):
        raise RunError(
            f"a sum has {vector.size} words where {layout.n_words} were agreed", "use the same version everywhere"
        )
    out, at = [], 0
    for kind, words, n in layout.sections:
        out.append((kind, words, vector[at : at + words * n].reshape(words, n)))
        at += words * n
    return out
