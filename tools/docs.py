# SPDX-License-Identifier: Apache-2.0
"""Write docs/api.md and docs/limits.md from the code, and docs/studies.md from results/: `python -m tools.docs`.

A block stands between ``<!-- table: KIND NAME ... -->`` (or ``figure``) and ``<!-- end -->``: the kind says how results are
shown (tools/tables.py, tools/figures.py), names are those of results. What has not been run is said, with its cost.
"""

import re
from collections.abc import Mapping
from typing import Any

from tools import limits, reference
from tools.figures import FIGURES
from tools.plan import ROOT, Entry, plan, read
from tools.tables import TABLES

__all__ = ["BLOCK", "main", "written"]

PAGE = ROOT / "docs" / "studies.md"
REFERENCE = ROOT / "docs" / "api.md"
LIMITS = ROOT / "docs" / "limits.md"
FIGURE_FOLDER = ROOT / "docs" / "figures"
BLOCK = re.compile(r"^<!-- (table|figure): (\S+)((?: \S+)+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)

Results = Mapping[str, dict[str, Any]]


def main() -> None:
    """Write the pages and their figures."""
    REFERENCE.write_text(reference.page(), encoding="utf-8")
    LIMITS.write_text(limits.page(), encoding="utf-8")
    entries = plan()
    found = {name: result for name in entries if (result := read(name)) is not None}
    text, figures = written(PAGE.read_text(encoding="utf-8"), entries, found)
    PAGE.write_text(text, encoding="utf-8")
    FIGURE_FOLDER.mkdir(exist_ok=True)
    for name, drawn in figures.items():
        (FIGURE_FOLDER / name).write_text(drawn, encoding="utf-8")


def written(page: str, entries: Mapping[str, Entry], found: Results) -> tuple[str, dict[str, str]]:
    """Fill all blocks of a page: its text, and the figures that it shows by the names of their files."""
    figures: dict[str, str] = {}
    told: set[str] = set()

    def origin(name: str) -> str:
        before, there = name in told, name in found
        told.add(name)
        if before:
            return "From the same run." if there else "Not run yet: see above."
        return _origin(entries[name], found.get(name))

    def filled(block: re.Match[str]) -> str:
        what, kind, names = block[1], block[2], block[3].split()
        there = {name: found[name] for name in names if name in found}
        lines = []
        if what == "table" and there:
            lines = TABLES[kind](there)
        for name, result in there.items() if what == "figure" else ():
            drawn = FIGURES[kind](result)
            figures.update(drawn)
            lines += [f"![{entries[name].paper or name}](figures/{file})" for file in drawn]
        parts = ["\n".join(lines), *dict.fromkeys(map(origin, names))]
        inside = "\n\n".join(part for part in parts if part)
        return f"<!-- {what}: {kind} {' '.join(names)} -->\n\n{inside}\n\n<!-- end -->"

    return BLOCK.sub(filled, page), figures


def _origin(entry: Entry, result: Mapping[str, Any] | None) -> str:
    """Say where figures come from, or that there are none yet."""
    if result is None:
        return f"Not run yet: `{entry.command}` takes about {entry.cost} of one core."
    processor, threads = result["processor"], result["threads"]
    commit = result["commit"] + (" with changes" if result["dirty"] else "")
    said = [f"commit {commit}", f"{processor['model']} with {processor['vectors']}",
            f"{threads} thread{'s' * (threads != 1)}", _time(result["seconds"]["cpu"]) + " of CPU"]  # fmt: skip
    short = f" Smaller than the paper's: {entry.short}." if entry.short else ""
    return f"From [`{result['command']}`](../results/{entry.name}.json): {', '.join(said)}.{short}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
