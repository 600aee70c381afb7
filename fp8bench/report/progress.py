"""One live line on a terminal while a run goes along.

It is called between slots, so it does next to nothing most of the time: no threads, at most five redraws a second as
long as the same is being done.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from fp8bench import units
from fp8bench.model import Case, Plan, Record, Status
from fp8bench.protocols import Observer, SilentObserver

REDRAW_SECONDS = 0.2
# An estimate from less than this would jump about.
_LEAST_SECONDS = 3.0
_LEAST_SHARE = 0.05
_ERASE = "\r\x1b[2K"
_FALLBACK_COLUMNS = 80


class TerminalProgress:
    """An observer that keeps one line up to date. `close` erases it."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, columns: Callable[[], int] | None = None
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._columns = columns or (lambda: columns_of(stream))
        self._begun = clock()
        self._drawn = -REDRAW_SECONDS
        self._doing = ""
        self._visible = False
        self._running: dict[str, int] = {}
        self._total = 0
        self._done = 0
        self._measured: dict[str, int] = {}

    def planned(self, plan: Plan) -> None:
        self._running = {group.setting: sum(one.runs for one in group.cases) for group in plan}
        self._total = plan.num_cases
        self._begun = self._clock()

    def working(self, case: Case, doing: str, share: float) -> None:
        now = self._clock()
        # What begins may take long: that another thing is done is told at once.
        if now - self._drawn >= REDRAW_SECONDS or doing != self._doing:
            self._doing = doing
            self._draw(self._line(case.id, doing, self._seconds_left(case.setting, share, now)), now)

    def finished(self, record: Record) -> None:
        self._done += 1
        if record.status is not Status.SKIPPED:  # a skip takes no time: it says nothing about the time left
            setting = record.case.setting
            self._measured[setting] = self._measured.get(setting, 0) + 1

    def close(self) -> None:
        """Erase the line. May be called twice."""
        if self._visible:
            self._write(_ERASE)
            self._visible = False

    def _seconds_left(self, setting: str, share: float, now: float) -> float | None:
        """From the share of the work done so far; None while it is too early to tell."""
        all_running = sum(self._running.values())
        done = sum(self._measured.values())
        here = self._running.get(setting, 0) - self._measured.get(setting, 0)
        part = (done + max(0, here) * min(max(share, 0.0), 1.0)) / all_running if all_running else 0.0
        spent = now - self._begun
        if spent < _LEAST_SECONDS or not _LEAST_SHARE <= part <= 1:
            return None
        return spent * (1 - part) / part

    def _line(self, case_id: str, doing: str, left: float | None) -> str:
        """'3/18 cases, about 42 s left, measuring gemm[...]@cpu/bf16', no wider than the terminal."""
        about = f", about {units.clock(left)} left" if left is not None else ""
        head = f"{self._done}/{self._total} cases{about}, {doing} "
        room = max(0, self._columns() - 1)  # a full last column would wrap on some terminals
        return (head + _shorten(case_id, room - len(head)))[:room]

    def _draw(self, line: str, now: float) -> None:
        self._drawn = now
        self._visible = True
        self._write(_ERASE + line)

    def _write(self, text: str) -> None:
        """A terminal that has gone away must not end a measurement."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._drawn = math.inf  # never again


def _shorten(text: str, room: int) -> str:
    """The text with its middle left out, since both ends tell: the workload and the precision."""
    if len(text) <= room:
        return text
    kept = max(0, room - 3)
    tail = kept // 2
    return f"{text[: kept - tail]}...{text[len(text) - tail :]}"


def columns_of(stream: TextIO) -> int:
    """How wide a terminal is, as far as it says so."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _FALLBACK_COLUMNS
    except (OSError, ValueError, AttributeError):
        return _FALLBACK_COLUMNS


def observer_for(stream: TextIO | None, environ: Mapping[str, str]) -> Observer:
    """A live line where a person watches; silence in pipes, CI and dumb terminals."""
    return TerminalProgress(stream) if stream is not None and is_watched(stream, environ) else SilentObserver()


def is_watched(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether a person looks at a stream, on a terminal that can redraw a line."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    return not environ.get("CI") and environ.get("TERM") != "dumb"


@contextmanager
def progress(stream: TextIO | None, environ: Mapping[str, str]) -> Iterator[Observer]:
    """The observer for a stream, its line erased at the end, whatever happens."""
    observer = observer_for(stream, environ)
    try:
        yield observer
    finally:
        if isinstance(observer, TerminalProgress):
            observer.close()
