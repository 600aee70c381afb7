"""Where ranks begin something together: numbers in a file that all of them have mapped.

A barrier of gloo or NCCL wakes threads and sends messages, 0.3 ms and more of each slot. Ranks of one machine
need none.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

# In the folder of a launch.
_FILE = "start-line"
_NUMBER = 8
# Looked at without a break first: whoever sleeps gets up too late to begin with the others.
_AWAKE_SECONDS = 5e-4
_NAP_SECONDS = 1e-4


class StartLine:
    """One of several ranks at it: `meet` returns when all have come as often as this one."""

    def __init__(self, folder: Path, rank: int, ranks: int, wait_seconds: float) -> None:
        with (folder / _FILE).open("ab") as opened:
            os.ftruncate(opened.fileno(), ranks * _NUMBER)  # the same on all ranks: what is there stays
        with (folder / _FILE).open("r+b") as opened:
            self._times = memoryview(mmap.mmap(opened.fileno(), ranks * _NUMBER)).cast("q")
        self._rank = rank
        self._wait_seconds = wait_seconds

    def meet(self) -> None:
        """Come, and wait for the others."""
        times = self._times
        here = times[self._rank] = times[self._rank] + 1
        begun = time.monotonic()
        while min(times) < here:
            waited = time.monotonic() - begun
            if waited > self._wait_seconds:
                late = ", ".join(f"rank {rank}" for rank, count in enumerate(times) if count < here)
                raise TimeoutError(f"{late} did not come to the start line within {self._wait_seconds:g} s")
            if waited < _AWAKE_SECONDS:
                os.sched_yield()  # whoever is late may need this core
            else:
                time.sleep(_NAP_SECONDS)
