# SPDX-License-Identifier: Apache-2.0
"""Messages and seconds of whole commands: `python -m benchmarks.messages [--before SRC] [--nodes]`, on a quiet machine.

IFCA, FedRep, moment descent and a mixture with 10 rounds, and a comparison, of 48 invented hospitals: each as a command of
its own in one process, the least of three repetitions; with `--before` also by another version, whose `src` is named, in
turn with this one; with `--nodes` also on 4 SuperNodes of this machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coterie.engines.flower.federation import down, up
from coterie.studies.stays_demo import write_stays

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results") / "messages.json"
REPETITIONS = 3
COLUMNS = ("--client", "hospital", "--target", "days")
WORDS: dict[str, tuple[str, ...]] = {
    "ifca": ("--method", "ifca", "--clusters", "3", "--rounds", "10"),
    "fedrep": ("--method", "fedrep", "--hidden", "8", "--rounds", "10"),
    "moment-descent": ("--method", "moment-descent", "--clusters", "3", "--rounds", "10"),
    "mixture": ("--method", "mixture", "--components", "3", "--rounds", "10"),
    "compare": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the src folder of another version")
    parser.add_argument("--nodes", action="store_true", help="on SuperNodes too")
    parser.add_argument("--only", choices=WORDS, action="append", help="only this; may be given several times")
    asked = parser.parse_args()
    versions = {"now": ROOT / "src", **({} if asked.before is None else {"before": asked.before.resolve()})}
    with tempfile.TemporaryDirectory(prefix="coterie-messages-") as place:
        rows = Path(place) / "stays.parquet"
        write_stays(rows, 0)
        found = {name: in_process(name, rows, versions, Path(place)) for name in asked.only or WORDS}
        if asked.nodes:
            try:
                up(nodes=4, data=rows, client="hospital", target="days", folder=Path(place) / "federation")
                found = {name: row | on_nodes(name, Path(place)) for name, row in found.items()}
            finally:
                down(Path(place) / "federation")
    show(found)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


def in_process(name: str, rows: Path, versions: dict[str, Path], place: Path) -> dict[str, Any]:
    """Seconds of every version, the least of several, and the messages that it counts."""
    row: dict[str, Any] = {}
    for repetition in range(REPETITIONS):
        for version, source in versions.items():
            out = place / f"{name}-{version}-{repetition}"
            command = "compare" if name == "compare" else "fit"
            seconds = run(source, out, command, str(rows), *COLUMNS, *WORDS[name])
            row[f"seconds {version}"] = min(seconds, row.get(f"seconds {version}", float("inf")))
            row[f"messages {version}"] = messages(out)
    return row


def on_nodes(name: str, place: Path) -> dict[str, Any]:
    out = place / f"{name}-nodes"
    command = ("flower", "compare") if name == "compare" else ("flower", "run")
    seconds = run(ROOT / "src", out, *command, *WORDS[name], "--folder", str(place / "federation"))
    return {"seconds on nodes": seconds, "messages on nodes": messages(out)}


def run(source: Path, out: Path, *words: str) -> float:
    """Run a command of the version whose source this is.  -> seconds"""
    around = {**os.environ, "PYTHONPATH": str(source)}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *words, "--out", str(out)],
        env=around, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - begin


def messages(out: Path) -> int | None:
    """How many messages it took; None where the version does not count them."""
    for document in ("run.json", "compare.json"):
        if (out / document).exists():
            found = json.loads((out / document).read_text(encoding="utf-8"))
            counted: int | None = found.get("results", found).get("messages")
            return counted
    return None


def show(found: dict[str, dict[str, Any]]) -> None:
    columns = list(next(iter(found.values())))
    table = Table("", *columns)
    for name, row in found.items():
        table.add_row(name, *("-" if row[c] is None else f"{row[c]:.4g}" for c in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
