# SPDX-License-Identifier: Apache-2.0
"""CPU seconds in which the command line answers, against those of importing what it is made of.

`coterie --help` over `python -c "import typer, rich"`, each in a process of its own: the least over interleaved repetitions,
and CPU seconds in place of seconds, so that other processes hardly matter.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Sequence

REPETITIONS = 5
ANSWERS = ("--help", "--version", "fit --help", "fit --misspelt", "study --help", "flower --help")
LIMIT = 4.0  # of `--help`


def run() -> list[dict]:
    lines = {words: ["-m", "coterie", *words.split()] for words in ANSWERS}
    seconds = _least({"import": ["-c", "import typer, rich"], **lines})
    bare = seconds.pop("import")
    return [
        {
            "bench": "the command line answers, in CPU seconds",
            **{f"coterie {words}": value for words, value in seconds.items()},
            "import typer, rich": bare,
            "--help over import": seconds["--help"] / bare,
            "limit": LIMIT,
        }
    ]


def _least(lines: dict[str, list[str]]) -> dict[str, float]:
    """CPU seconds of each, after a first round that writes bytecode."""
    seconds = dict.fromkeys(lines, float("inf"))
    for repetition in range(REPETITIONS + 1):
        for name, words in lines.items():
            spent = _cpu_seconds(words)
            if repetition:
                seconds[name] = min(seconds[name], spent)
    return seconds


def _cpu_seconds(words: Sequence[str]) -> float:
    around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], env=around, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
