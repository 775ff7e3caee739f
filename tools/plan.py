# SPDX-License-Identifier: Apache-2.0
"""What stands in results/: the plan of all results, and those that are there."""

import json
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "ROOT", "Entry", "plan", "read"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Entry:
    """One result of the plan.

    Attributes
    ----------
    name, command : str
        results/NAME.json is what the command prints, which ends in --json.
    minutes : float
        What it takes of one core, roughly.
    paper : str
        What it is in the paper; empty if it is not there.
    short : str
        In what it is smaller than the paper's; empty if in nothing.
    reduce : str
        How rows are made smaller before they are kept (tools/reduce.py); empty if they are kept as they are.
    """

    name: str
    command: str
    minutes: float
    paper: str = ""
    short: str = ""
    reduce: str = ""

    @property
    def words(self) -> list[str]:
        """The command, word by word."""
        return shlex.split(self.command)

    @property
    def cost(self) -> str:
        """Say the minutes in words."""
        if self.minutes < 90:
            return f"{self.minutes:g} minutes" if self.minutes != 1 else "a minute"
        return f"{self.minutes / 60:.0f} hours"


def plan(path: Path = RESULTS / "plan.toml") -> dict[str, Entry]:
    """Read the plan: name -> entry, in its order."""
    entries = [Entry(**each) for each in tomllib.loads(path.read_text(encoding="utf-8"))["result"]]
    return {entry.name: entry for entry in entries}


def read(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Read a result; None if it is not there."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
