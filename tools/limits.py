# SPDX-License-Identifier: Apache-2.0
"""Write docs/limits.md from the constants of `coterie.limits`, which say what they limit."""

import inspect
import re

from coterie import limits
from tools.reference import table

__all__ = ["page"]

HEAD = """\
# Limits

`make docs` writes this page from `src/coterie/limits.py`.

A table, a run folder, a site summary or a configuration may come from somebody else. What is beyond a limit is refused with
one sentence, a hint and exit code 2, before anything is computed or written. Whatever is read is checked against a model of
what it should be: a document with a missing key, a wrong type or a number that is not finite, and stored models whose
tensors do not have the shapes that they should have, are refused in the same way.

Numbers in a table have a limit because squares, and squares of squares, of larger ones cannot be summed. If a column has
such numbers on purpose, choose a larger unit for it.
"""
TAIL = """\
`python -m benchmarks.fuzz` hands 100,000 changed files of every kind to what reads them, and fails if anything but such a
sentence comes out, or if memory exceeds 1 GB.
"""
_LINE = re.compile(r"^(?:# -- (?P<title>.*?) -+|(?P<name>[A-Z_]+) = .*?  #: (?P<about>.*))$", re.MULTILINE)


def page() -> str:
    """The whole page."""
    parts, rows = [HEAD], list[list[str]]()
    for found in _LINE.finditer(inspect.getsource(limits)):
        if found["title"]:
            parts += [table(_COLUMNS, rows)] if rows else []
            parts.append(f"## {found['title'][0].upper()}{found['title'][1:]}")
            rows = []
        else:
            rows.append([_shown(getattr(limits, found["name"])), found["about"], f"`{found['name']}`"])
    return "\n\n".join(part.strip() for part in (*parts, table(_COLUMNS, rows), TAIL)) + "\n"


_COLUMNS = ["At most", "", "Constant"]


def _shown(value: float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    for power, unit in ((20, "Mi"),):
        if value >= 1 << power and value % (1 << power) == 0 and value < 1 << 40:
            return f"{value >> power} {unit}"
    return "2⁶³ - 1" if value == (1 << 63) - 1 else f"{value:,}"
