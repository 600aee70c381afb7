"""What whoever started a command sees while a job is done: sentences, and what is live on a terminal.

Observers are called between slots, so they do next to nothing most of the time: no threads, and a run's line is drawn
at most five times a second as long as the same is being done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TextIO

from fp8bench import units
from fp8bench.cli.live import REDRAW_SECONDS, LiveLine, is_watched, time_left
from fp8bench.cli.streams import complain
from fp8bench.jobs.observer import JobObserver, Tell
from fp8bench.model import Case, Plan, Record, Status
from fp8bench.protocols import Observer, SilentObserver


class RunProgress(LiveLine):
    """An observer of a run that keeps one line up to date."""

    def __init__(
        self, stream: TextIO | None, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream, environ)
        self._clock = clock
        self._begun = clock()
        self._shown_at = -REDRAW_SECONDS
        self._doing = ""
        # Cases of each group that are still to run: a skip takes no time, and says nothing about the time left.
        self._left: dict[str, int] = {}
        self._running = self._total = self._done = 0

    def planned(self, plan: Plan) -> None:
        self._left = {group.setting: sum(planned.runs for planned in group.cases) for group in plan}
        self._running, self._total = sum(self._left.values()), plan.num_cases
        self._begun = self._clock()

    def working(self, case: Case, doing: str, share: float) -> None:
        now = self._clock()
        # What begins may take long: that another thing is done is told at once.
        if now - self._shown_at >= REDRAW_SECONDS or doing != self._doing:
            self._doing, self._shown_at = doing, now
            left = time_left(now - self._begun, self._share(case.setting, share))
            head = f"{self._done}/{self._total} cases{left}, {doing} "
            self.show(head + _shorten(case.id, self.room - len(head)))

    def finished(self, record: Record) -> None:
        self._done += 1
        if record.status is not Status.SKIPPED:  # a skip takes no time: it says nothing about the time left
            self._left[record.case.setting] = self._left.get(record.case.setting, 0) - 1

    def _share(self, setting: str, share: float) -> float:
        """How much of all the work is done."""
        done, here = self._running - sum(self._left.values()), max(0, self._left.get(setting, 0))
        return (done + here * min(max(share, 0.0), 1.0)) / self._running if self._running else 0.0


class GroupLines(SilentObserver):
    """An observer of a run that nobody watches: a line when a group is done, where there are several."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._begun = clock()
        self._left: dict[str, int] = {}

    def planned(self, plan: Plan) -> None:
        self._left = {group.setting: len(group.cases) for group in plan}
        self._begun = self._clock()

    def finished(self, record: Record) -> None:
        setting = record.case.setting
        self._left[setting] -= 1
        groups = len(self._left)
        if self._left[setting] == 0 and groups > 1:
            done = sum(not cases for cases in self._left.values())
            spent = units.clock(self._clock() - self._begun)
            self._say(f"{done}/{groups} groups after {spent}: {setting}")


class TerminalJob:
    """An observer of jobs that tells whoever started the command."""

    def note(self, sentence: str) -> None:
        complain(sentence)

    @contextmanager
    def measuring(self) -> Iterator[Observer]:
        if not is_watched(sys.stderr, os.environ):
            yield GroupLines(complain)
            return
        with closing(RunProgress(sys.stderr, os.environ)) as observer:
            yield observer

    @contextmanager
    def counting(self) -> Iterator[Tell]:
        line, begun = LiveLine(sys.stderr, os.environ), time.monotonic()

        def tell(done: int, total: int, things: str, doing: str) -> None:
            line.show(f"{done}/{total} {things}{time_left(time.monotonic() - begun, done / total)}, {doing}")

        with closing(line):
            yield tell


TERMINAL: JobObserver = TerminalJob()


def _shorten(text: str, room: int) -> str:
    """The text with its middle left out, since both ends tell: the workload and the precision."""
    if len(text) <= room:
        return text
    kept = max(0, room - 3)
    tail = kept // 2
    return f"{text[: kept - tail]}...{text[len(text) - tail :]}"
