"""Spreads work over forked processes."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_all_start_methods, get_context
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
_MOST = 16  # processes: more would wait for one disk
_LEAST_JOBS = 20  # for a process: fewer are done before it has started
_MOST_AT_ONCE = 25  # jobs that a process is given at a time


def spread(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Yields what `work` makes of each job, in order, in forked processes if there are many jobs.

    Forks know the suites that were imported here. A process that has loaded torch is not forked, because its threads
    may hold locks; then, or if a fork fails, the work is done here.
    """
    processes = min(_processors(), _MOST, 2 * len(jobs) // _LEAST_JOBS)
    done = 0
    if processes > 1 and "torch" not in sys.modules and "fork" in get_all_start_methods():
        try:
            for result in _forked(work, jobs, processes):
                done += 1
                yield result
        except (BrokenProcessPool, OSError):  # not enough memory, for example
            pass
    yield from map(work, jobs[done:])


def _forked(work: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    with warnings.catch_warnings():
        # It warns of the threads of numpy's linear algebra, which the forks do not use.
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = ProcessPoolExecutor(processes, get_context("fork"), _start_fork, (os.getpid(),))
        try:
            yield from pool.map(work, jobs, chunksize=min(_MOST_AT_ONCE, len(jobs) // _LEAST_JOBS))
        finally:
            pool.shutdown(cancel_futures=True)


def _start_fork(parent: int) -> None:
    """Ignores Ctrl-C, since the parent ends its forks, and has the system kill this fork with the parent: each fork
    holds the pipe open on which the others would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
