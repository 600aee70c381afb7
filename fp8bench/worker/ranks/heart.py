"""What ranks say in mapped files: the heartbeat of each, which stays as it was left when the process is killed, and how
often each has come to the line where they begin together.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from fp8bench.model import CELL_PHASES, UNATTRIBUTED
from fp8bench.model.ranks import BEAT, OUTSIDE
from fp8bench.protocols.phases import Markers, TellingMarker

# In the folder of a launch, of the start line.
_FILE = "start-line"
_NUMBER = 8
# Looked at without a break first: whoever sleeps gets up too late to begin with the others.
_AWAKE_SECONDS = 5e-4
_NAP_SECONDS = 1e-4


class Heart:
    """Says how far this rank has come: half a microsecond a beat."""

    def __init__(self, file: Path) -> None:
        self.folder = file.parent
        file.write_bytes(bytes(BEAT.size))
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), BEAT.size)
        self._beats = 0
        self._request = b"start"

    def request(self, name: str) -> None:
        """Another request begins."""
        self._request = name.encode()[:40]
        self.phase(OUTSIDE)

    def phase(self, code: int) -> None:
        """A step goes on in that phase; one that is left because something was raised is the one that it is in."""
        if sys.exception() is not None:
            return
        self._beats += 1
        BEAT.pack_into(self._page, 0, self._beats, code, time.monotonic(), self._request)

    def markers(self) -> Markers[AbstractContextManager[None]]:
        """Phases of a step that nobody times, which beat all the same."""
        stack = [UNATTRIBUTED]
        self.phase(CELL_PHASES.index(UNATTRIBUTED))
        return Markers(lambda name: TellingMarker(name, stack, lambda told: self.phase(CELL_PHASES.index(told))))


class StartLine:
    """Where ranks begin something together: `meet` returns when all have come as often as this one.

    A barrier of gloo or NCCL wakes threads and sends messages, 0.3 ms and more of each slot: ranks of one machine need
    none.
    """

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
