# SPDX-License-Identifier: Apache-2.0
"""Time functions side by side: interleaved repetitions, the best of each, so that a passing load hits all alike."""

import time
from collections.abc import Callable


def best(repetitions: int, **functions: Callable[[], object]) -> dict[str, float]:
    """Seconds of each function: the least over interleaved repetitions, after one warm-up round."""
    seconds = dict.fromkeys(functions, float("inf"))
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if repetition:
                seconds[name] = min(seconds[name], time.perf_counter() - begin)
    return seconds
