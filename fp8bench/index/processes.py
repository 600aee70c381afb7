"""Work that only reads, spread over the processors of the machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
# More would wait for one disk.
_MOST = 16
# Less is done sooner than other processes are there.
_LEAST_JOBS = 20


def spread(work: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """What `work` makes of each job, in order; in this process where the jobs are few, or others cannot be had.

    The others are forks, which know the suites that were imported here. A process that has loaded torch is not forked:
    its threads may hold locks.
    """
    processes = min(_processors(), _MOST, 2 * len(jobs) // _LEAST_JOBS)
    if processes < 2 or "torch" in sys.modules or "fork" not in multiprocessing.get_all_start_methods():
        return list(map(work, jobs))
    try:
        with warnings.catch_warnings():
            # Of threads in a process that is forked: those of numpy's linear algebra, which is not called for this.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _forked(work, jobs, processes)
    except (BrokenProcessPool, OSError):  # no memory for so many, say
        return list(map(work, jobs))


def _forked(work: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> list[Result]:
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _leave_interrupts)
    try:
        return list(pool.map(work, jobs))
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C goes to all processes of a terminal, and this one's parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
