# SPDX-License-Identifier: Apache-2.0
"""Repetitions side by side in processes of one thread each.

Small federations are made of many short operations, which threads hardly speed up, and slow down many times over where
cores are shared with others. So repetitions run side by side instead, each on one core. What ledger.py knows already is
not done again.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

from coterie.studies.ledger import Ledger

__all__ = ["side_by_side"]

Task = TypeVar("Task")
Result = TypeVar("Result")


def side_by_side(
    work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int | None, done: Callable[[int], None]
) -> list[Result]:
    """Do all tasks, in processes of one thread.

    Parameters
    ----------
    work : callable
        What is done; a function of a module, so that other processes find it.
    tasks : sequence
        What it is given.
    jobs : int or None
        Processes; 1 stays in this one. None takes as many as there are tasks, or cores if tasks are many.
    done : callable
        Told how many tasks have ended.

    Returns
    -------
    list
        Results in the order of the tasks.
    """
    ledger = Ledger(work)
    with ledger.held():
        return _done(ledger, work, tasks, jobs, done)


def _done(
    ledger: Ledger[Task, Result], work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int | None,
    done: Callable[[int], None],
) -> list[Result]:  # fmt: skip
    """Do those that the ledger does not know; see `side_by_side`."""
    results = ledger.known(tasks)
    left = [i for i in range(len(tasks)) if i not in results]
    jobs = _processes(len(left)) if jobs is None else min(jobs, len(left))
    if results:
        done(len(results))
    if jobs <= 1:
        with _one_thread():
            for i in left:
                results[i] = ledger.keep(tasks[i], work(tasks[i]))
                done(len(results))
        return [results[i] for i in range(len(tasks))]
    # A copy of this process has everything imported; where there are no copies, each imports for itself.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        places = {pool.submit(work, tasks[i]): i for i in left}
        try:
            for future in as_completed(places):
                i = places[future]
                results[i] = ledger.keep(tasks[i], future.result())
                done(len(results))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[i] for i in range(len(tasks))]


def _processes(tasks: int) -> int:
    """As many as there are tasks, so that three share two cores evenly; one for each core if there are many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return tasks if tasks <= 2 * cores and cores > 1 else min(tasks, cores)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
