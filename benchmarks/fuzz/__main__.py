# SPDX-License-Identifier: Apache-2.0
"""Run all targets of this package: count what was read, what was refused, and what escaped; print seconds and memory."""

import argparse
import pkgutil
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from benchmarks import fuzz
from coterie.errors import CoterieError

EXAMPLES = 100_000
MOST_BYTES = 1 << 30  # of memory, at any time

Target = tuple[SearchStrategy[Any], Callable[[Any], None]]


def targets(only: Sequence[str] = ("",)) -> dict[str, Target]:
    """All targets of all modules whose names contain one of some words."""
    found: dict[str, Target] = {}
    for module in pkgutil.iter_modules(fuzz.__path__):
        if module.name != "__main__":
            found |= getattr(import_module(f"{fuzz.__name__}.{module.name}"), "TARGETS", {})
    return {name: target for name, target in found.items() if any(word in name for word in only)}


def run(target: Target, examples: int, number: int) -> tuple[Counter[str], dict[str, str]]:
    """Feed a target.  -> how inputs ended, and for every place that something escaped from, the first time it did"""
    strategy, call = target
    counts: Counter[str] = Counter()
    escaped: dict[str, str] = {}

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def once(value: Any) -> None:
        try:
            call(value)
            counts["read"] += 1
        except CoterieError as error:
            counts["refused"] += 1
            if not error.hint or "\n" in error.message:
                counts["refused badly"] += 1
                escaped.setdefault("no hint, or several lines", repr(str(error)[:300]))
        except Exception as error:
            counts["escaped"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            escaped.setdefault(place, f"{repr(value)[:300]}\n{traceback.format_exc()}")

    once()
    return counts, escaped


def main() -> int:
    """Run the targets; 1 if something escaped, or memory ran over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=fuzz.__doc__)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="inputs for each target")
    parser.add_argument("--only", nargs="*", default=[""], help="targets whose names contain one of these")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # of what a stranger's numbers make numpy say
    print(f"seed {asked.seed}, {asked.examples:,} inputs for each target")
    good = True
    for name, target in targets(asked.only).items():
        begun = time.perf_counter()
        counts, escaped = run(target, asked.examples, asked.seed)
        took, most = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        print(
            f"{name}: {counts['read'] + counts['refused'] + counts['escaped']:,} inputs, {counts['read']:,} read, "
            f"{counts['refused']:,} refused, {counts['escaped']:,} escaped; {took:.0f} s; peak memory {most >> 20} MB",
            flush=True,
        )
        for place, first in escaped.items():
            print(f"  {place}\n    {first}", flush=True)
        good = good and not escaped and most < MOST_BYTES
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
