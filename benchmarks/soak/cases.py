# SPDX-License-Identifier: Apache-2.0
"""What is killed: a small run of every method, a comparison, and the report."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.registry import METHODS

__all__ = ["CASES", "Case", "write_data"]

DATA = "data.csv"
RUN = "run"
_WHERE = [f"../{DATA}", "--client", "site", "--target", "y", "--out", RUN]
_OFTEN = ["--checkpoint-seconds", "0"]
_NETWORK = ["--hidden", "4", "--rounds", "4"]
_SETTINGS = {
    "ifca": ["--clusters", "2", "--starts", "2", "--rounds", "5", "--set", "training.participation=0.7"],
    "moment-descent": ["--clusters", "2", "--rounds", "3", "--set", "moments.iterations=8"],
    "mixture": ["--components", "2", "--rounds", "6", "--set", "mixture.restarts=2", "--set", "mixture.c_lambda=1"],
    "fedrep": [*_NETWORK, "--stragglers", "srpfl", "--clock", "dynamic", "--set", "personal.n0=3"],
    "fedper": _NETWORK,
    "lg-fedavg": ["--hidden", "4,3", "--rounds", "4"],
    "local": [],
    "mixed": [],
    "shrunk": [],
    "representation": ["--rank", "1"],
    "auto": [],
}


@dataclass(frozen=True)
class Case:
    """A command that is killed, and those that continue it.

    Attributes
    ----------
    words : list of str
        The command, called beside the data in a folder of its own.
    again : list of list of str
        Ways to go on.
    before : list of str
        What is called first, and left alone.
    """

    words: list[str]
    again: list[list[str]]
    before: list[str] | None = None


def _fit(method: str) -> Case:
    words = ["fit", *_WHERE, "--method", method, *_SETTINGS.get(method, ["--rounds", "4"]), *_OFTEN]
    return Case(words, [words, ["resume", RUN, *_OFTEN]])


CASES = {method: _fit(method) for method in [*METHODS, "auto"]}
CASES["compare"] = Case(words := ["compare", *_WHERE, "--quick"], [words])
CASES["report"] = Case(["report", RUN], [["report", RUN]], before=CASES["fedavg"].words)


def write_data(path: Path, *, clients: int = 12, rows: int = 14, features: int = 3) -> None:
    """Write clients of three kinds of lines."""
    draw = np.random.default_rng(0)
    theta = draw.normal(size=(3, features))
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["site", *(f"x{i}" for i in range(features)), "y"])
        for c in range(clients):
            x = draw.normal(size=(rows, features))
            y = x @ theta[c % 3] + 0.1 * draw.normal(size=rows)
            out.writerows([f"site-{c}", *map(repr, row.tolist()), repr(float(t))] for row, t in zip(x, y, strict=True))
