# SPDX-License-Identifier: Apache-2.0
"""Small words that the answer of a comparison is made of."""

from collections.abc import Sequence

import numpy as np

from coterie.report.numbers import count
from coterie.selection.result import Comparison

__all__ = ["capital", "listed", "noun", "number", "one_for_all", "some"]

_NAMED = 5  # clients that are named in a sentence


def one_for_all(found: Comparison) -> str:
    """What all structures are compared with."""
    return f"one {noun(found)} for all"


def noun(found: Comparison) -> str:
    """What clients have: a model, or without a target a mixture."""
    return "mixture" if found.task == "none" else "model"


def number(value: object, what: str) -> str:
    """A count with its noun."""
    n = int(value) if isinstance(value, int | float | np.integer) else 0
    return f"{count(n)} {what}{'s' * (n != 1)}"


def listed(words: Sequence[str]) -> str:
    """Words in a list, with "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def some(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:_NAMED]) + more


def capital(text: str) -> str:
    """Begin a sentence."""
    return text[:1].upper() + text[1:]
