# SPDX-License-Identifier: Apache-2.0
"""Kill, damage and crowd run folders, and count what was lost.

`python -m benchmarks.soak [--kills 1000] [--flips 1000] [--pairs 100] [--folder .soak]`

Every attempt is noted in the folder when it has ended; the same command goes on from there.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # copies of a process have none of its threads

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.soak.attempts import GOOD, Place
from benchmarks.soak.cases import CASES

HOW = ("random", "at a file operation")
FITS = [name for name in CASES if name not in ("compare", "report")]
FLIPS = [(name, what) for name in FITS for what in ("resume", "predict", "report")] + [("compare", "report")]
PAIRS = [(name, what) for name in FITS for what in ("same", "resume", "report")] + [("compare", "same")] * 4
_PARTS = 50


class Notes:
    """What came of attempts, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.all: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]

    def note(self, **said: Any) -> None:
        self.all.append(said)
        with self._path.open("a") as file:
            file.write(json.dumps(said) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [said for said in self.all if said["kind"] == kind]


def left(notes: Notes, kind: str, wanted: int, counted: str | None = None) -> Iterator[tuple[int, random.Random]]:
    """Numbers of the attempts that are still to be made, with what each draws from."""
    number = len(notes.of(kind))
    while (sum(said[counted] for said in notes.of(kind)) if counted else number) < wanted:
        yield number, random.Random(f"{kind} {number}")
        number += 1


def soak(place: Place, notes: Notes, names: list[str], *, kills: int, flips: int, pairs: int) -> None:
    """Make all attempts that have not been made."""
    for number, draw in left(notes, "kill", kills, "kills"):
        name, how = names[number % len(names)], HOW[number // len(names) % 2]
        came, killed = place.kill(name, how.split()[0], draw)
        notes.note(kind="kill", number=number, case=name, how=how, kills=killed, came=came)
    some = [(name, what) for name, what in FLIPS if name in names]
    for number, draw in left(notes, "flip", flips):
        name, what = some[number % len(some)]
        notes.note(kind="flip", number=number, case=name, how=what, came=place.flip(name, what, draw))
    two = [(name, what) for name, what in PAIRS if name in names]
    for number, draw in left(notes, "pair", pairs):
        name, what = two[number % len(two)]
        notes.note(kind="pair", number=number, case=name, how=what, came=place.pair(name, what, draw))


def summary(notes: Notes) -> bool:
    """Print what came of everything.  -> whether nothing was lost"""
    console = Console()
    for kind, title in (("kill", "kills"), ("flip", "flipped bits"), ("pair", "two processes on one folder")):
        table = Table("case", "how", *(["kills"] if kind == "kill" else []), "attempts", *GOOD, "faults", title=title)
        found = notes.of(kind)
        for case, how in [*dict.fromkeys((said["case"], said["how"]) for said in found), ("all", "")]:
            mine = [said for said in found if case == "all" or (said["case"], said["how"]) == (case, how)]
            came = Counter(said["came"] if said["came"] in GOOD else "fault" for said in mine)
            cells = [len(mine), *(came[one] for one in GOOD), came["fault"]]
            cells = [sum(said["kills"] for said in mine), *cells] if kind == "kill" else cells
            table.add_row(case, how, *map(str, cells))
        console.print(table)
    bad = [said for said in notes.all if said["came"] not in GOOD]
    for said in bad:
        print(said)
    kills = sum(said["kills"] for said in notes.of("kill"))
    lost = Counter(said["kind"] for said in bad)
    print(f"{kills} kills: {lost['kill']} differences or leftovers")
    print(f"{len(notes.of('flip'))} flipped bits: {lost['flip']} silent or crashed")
    print(f"{len(notes.of('pair'))} pairs: {lost['pair']} destroyed or crashed")
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    for what, default in (("kills", 1000), ("flips", 1000), ("pairs", 100)):
        parser.add_argument(f"--{what}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=Path(".soak"))
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), help="all by default")
    given = parser.parse_args()
    place = Place(given.folder.absolute())
    notes = Notes(place.folder / "attempts.jsonl")
    try:
        for part in range(1, _PARTS + 1):  # of everything a little, so that one that is stopped tells of everything
            wanted = {what: -(-getattr(given, what) * part // _PARTS) for what in ("kills", "flips", "pairs")}
            soak(place, notes, given.cases, **wanted)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
    finally:
        fine = summary(notes)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
