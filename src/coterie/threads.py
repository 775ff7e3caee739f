# SPDX-License-Identifier: Apache-2.0
"""Threads on a machine that is shared with others.

Torch computes with OpenMP threads, which by default wait for each other by spinning for milliseconds. Alone that is fast.
Where other processes want the cores, a thread spins while the one that it waits for is not even running, and a fit takes ten
times as long. So waiting is bounded before torch is imported, and small work is done by one thread. What the environment
says already stays.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["bound_waiting", "for_work", "side_by_side"]

_Made = TypeVar("_Made")

_SPINS = "2000"  # tens of microseconds: longer than from one product to the next, far shorter than a time slice
_SMALL = 1 << 18  # numbers in the rows of a question: over fewer, threads spend more time agreeing than computing
_divided = False  # whether work that goes on side by side has divided the threads


def bound_waiting() -> None:
    """Let threads wait a short time by spinning, then sleep; without effect once torch is there."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@contextmanager
def for_work(numbers: int) -> Iterator[None]:
    """Work with one thread where few numbers are read, unless the user has said how many threads there are."""
    import torch

    threads = torch.get_num_threads()
    if numbers >= _SMALL or threads == 1 or _divided or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def side_by_side(work: Sequence[Callable[[], _Made]]) -> list[_Made]:
    """Do pieces of work that share nothing at the same time, each with its part of the threads.

    Many small products are done no faster by several threads. What comes of each does not depend on the others.
    """
    import torch

    global _divided  # noqa: PLW0603
    threads = torch.get_num_threads()
    at_once = min(threads, len(work))
    if at_once < 2 or _divided:
        return [one() for one in work]
    torch.set_num_threads(threads // at_once)
    _divided = True
    try:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda one: one(), work))
    finally:
        _divided = False
        torch.set_num_threads(threads)


bound_waiting()
