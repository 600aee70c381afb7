"""The heartbeat of a rank: in a mapped file, which stays as it was left when the process is killed."""

from __future__ import annotations

import mmap
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from fp8bench.model import CELL_PHASES, UNATTRIBUTED
from fp8bench.model.ranks import BEAT, OUTSIDE
from fp8bench.protocols.phases import Markers, TellingMarker


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
