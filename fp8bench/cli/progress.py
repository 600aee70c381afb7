"""Progress for the user while a job runs: sentences and, on a terminal, lines that update in place.

A terminal's line is drawn when an observer is called, between slots, so observers do almost nothing most of the time,
and a run's line is drawn at most five times per second within one activity. A log also gets lines from a thread,
because one call of a compiler or of a long pass may take minutes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import TextIO

from fp8bench import units
from fp8bench.cli.remaining_time import RemainingTime
from fp8bench.cli.streams import columns_of, complain
from fp8bench.jobs.observer import JobObserver, Tell
from fp8bench.model import Case, Plan, Record, Scalar
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.report.elements import printable

REDRAW_SECONDS = 0.2
# An estimate from less time would fluctuate.
_LEAST_SECONDS = 3.0
_LEAST_SHARE = 0.05
# Without a new line for 30 s a log looks as if the run hung. The thread checks this often.
_SILENT_SECONDS, _BEAT_SECONDS = 26.0, 2.0
_ERASE = "\r\x1b[2K"
_CLEAR_SCREEN = "\x1b[2J\x1b[H"
# Without wrapping the terminal itself cuts long lines, and knows how wide letters are.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_FALLBACK_COLUMNS, _FALLBACK_LINES = 80, 24
_NOT_DRAWN = (0, 0)


class _Terminal:
    """What updates in place on a terminal; None once that is closed, which must not end a job."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def _write(self, text: str) -> None:
        """Writes to the terminal; a closed terminal is ignored."""
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None


class LiveLine(_Terminal):
    """A line that updates in place on a terminal that a person watches; silent in pipes, CI and dumb terminals."""

    def __init__(self, stream: TextIO | None, environ: Mapping[str, str]) -> None:
        super().__init__(stream if is_watched(stream, environ) else None)
        self._drawn = False

    @property
    def room(self) -> int:
        """The usable columns: some terminals wrap after the last one."""
        # One column less than the width.
        return (columns_of(self._stream) or _FALLBACK_COLUMNS) - 1 if self._stream is not None else 0

    def show(self, text: str) -> None:
        self._write(_ERASE + printable(text)[: self.room])
        self._drawn = True

    def close(self) -> None:
        """Erases the line. May be called twice."""
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False


class LiveBlock(_Terminal):
    """Lines that update in place on a terminal, whose cursor stays visible.

    When a terminal is resized, it may fold or scroll old lines in unknown ways, so the screen is cleared and redrawn.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._height = 0
        self._size = _NOT_DRAWN

    @property
    def room(self) -> int:
        return _size(self._stream)[0] - 1

    def show(self, text: str) -> None:
        """Shows these lines, cut at the edges of the terminal. They may be coloured."""
        old_size, self._size = self._size, _size(self._stream)
        if old_size in (self._size, _NOT_DRAWN):
            erased = self._erase()
        else:
            erased = _CLEAR_SCREEN
        # The cursor stays in the last line: a line break there would scroll a full screen.
        lines = text.rstrip("\n").split("\n")[: self._size[1]]
        self._write(erased + _NO_WRAP + "\n".join(lines) + _WRAP)
        self._height = len(lines)

    def close(self) -> None:
        """Erases the lines. May be called twice."""
        if self._height:
            self._write(self._erase())
        self._height, self._size = 0, _NOT_DRAWN

    def _erase(self) -> str:
        """Returns what moves the cursor to the first line and erases everything from there on."""
        up = f"\x1b[{self._height - 1}A" if self._height > 1 else ""
        return f"\r{up}\x1b[J"


def _size(stream: TextIO | None) -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = os.get_terminal_size(stream.fileno() if stream is not None else -1)
        return size.columns or _FALLBACK_COLUMNS, size.lines or _FALLBACK_LINES
    return _FALLBACK_COLUMNS, _FALLBACK_LINES


def time_left(spent: float, share: float) -> str:
    """Returns ', about 42 s left', from the time spent and the share of the work done; '' while it is too early to
    estimate."""
    if spent < _LEAST_SECONDS or not _LEAST_SHARE <= share <= 1:
        return ""
    return f", about {units.clock(spent * (1 - share) / share)} left"


def is_watched(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether a person watches the stream, on a terminal that can redraw a line."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    return not environ.get("CI") and environ.get("TERM") != "dumb"


class _FollowedPlan:
    """The progress of a run, and the names of its settings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._begun = clock, clock()
        self._begin(Plan(()))

    def _begin(self, plan: Plan) -> None:
        self._names = _short_names(plan)
        groups = sum(any(planned.runs for planned in group.cases) for group in plan)
        self._remaining = RemainingTime(groups, self._clock() - self._begun)
        self._begun = self._clock()

    def _name(self, case: Case) -> str:
        return f"{case.mode} of {self._names.get(case.setting, case.workload)}"

    def _left(self, now: float) -> str:
        """Returns ', about 42 s left'; '' while it is too early to estimate."""
        early = now - self._begun < _LEAST_SECONDS
        return "" if early else f", about {units.clock(self._remaining.predict(now))} left"


def _short_names(plan: Plan) -> dict[str, str]:
    """Returns for each setting its workload and what distinguishes it from others of that workload: 'gemm m=256'."""
    cases = [group.cases[0].case for group in plan]
    values: dict[tuple[str, str], set[Scalar]] = {}
    # Collect the values of each parameter, then keep parameters that vary.
    for case in cases:
        for name, value in (*case.params, ("device", case.device)):
            values.setdefault((case.workload, name), set()).add(value)
    names = {}
    for case in cases:
        pairs = (*case.params, ("device", case.device))
        telling = [f"{name}={value}" for name, value in pairs if len(values[case.workload, name]) > 1]
        names[case.setting] = " ".join([case.workload, *telling])
    return names


class RunProgress(_FollowedPlan, LiveLine):
    """Observes a run and updates one line."""

    def __init__(
        self, stream: TextIO | None, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        _FollowedPlan.__init__(self, clock)
        LiveLine.__init__(self, stream, environ)
        self._shown_at = -REDRAW_SECONDS
        self._doing = ""
        self._total = self._done = 0

    def planned(self, plan: Plan) -> None:
        self._total, self._done = plan.num_cases, 0
        # Notes scroll away above the updating line.
        for note in plan.what_fits:
            self._write(f"{_ERASE}{printable(note)}\n")
        self._begin(plan)

    def working(self, case: Case, doing: str, share: float) -> None:
        now = self._clock()
        self._remaining.follow(case.setting, doing, share, now)
        # A new activity may take long, so it is shown at once.
        if now - self._shown_at >= REDRAW_SECONDS or doing != self._doing:
            self._doing, self._shown_at = doing, now
            self.show(f"{self._done}/{self._total} cases{self._left(now)}, {doing} {self._name(case)}")

    def finished(self, record: Record) -> None:
        self._done += 1


class _Lines:
    """Prints the current activity, at least every 30 s if `beat` is called often enough."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._begun = self._said_at = clock()
        self._doing = "starting"

    def beat(self) -> None:
        now = self._clock()
        if now - self._said_at >= _SILENT_SECONDS:
            self._said_at = now
            self._say(f"after {units.clock(now - self._begun)}{self._left(now)}: {self._doing}")

    def _left(self, now: float) -> str:
        """Returns ', about 42 s left'; '' while it is too early to estimate."""
        return ""


class GroupLines(_FollowedPlan, _Lines, SilentObserver):
    """Observes a run without a terminal: prints a line after each of several groups, and at least every 30 s."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        _Lines.__init__(self, say, clock)
        _FollowedPlan.__init__(self, clock)
        self._cases: dict[str, int] = {}

    def planned(self, plan: Plan) -> None:
        self._begin(plan)
        self._said_at = self._begun
        self._cases = {group.setting: len(group.cases) for group in plan}
        for note in plan.what_fits:
            self._say(note)

    def working(self, case: Case, doing: str, share: float) -> None:
        self._remaining.follow(case.setting, doing, share, self._clock())
        self._doing = f"{doing}, {self._name(case)}"
        self.beat()

    def finished(self, record: Record) -> None:
        setting = record.case.setting
        self._cases[setting] -= 1
        groups = len(self._cases)
        if self._cases[setting] == 0 and groups > 1:
            done = sum(not cases for cases in self._cases.values())
            self._said_at = now = self._clock()
            time_words = self._left(now) if done < groups else ""
            self._say(
                f"{done}/{groups} groups after {units.clock(now - self._begun)}{time_words}: {self._names[setting]}"
            )


@contextmanager
def call_regularly(beat: Callable[[], None]) -> Iterator[None]:
    """Calls `beat` regularly from a thread until the block ends."""
    ended = threading.Event()

    def call_repeatedly() -> None:
        while not ended.wait(_BEAT_SECONDS):
            beat()

    # A daemon thread does not keep an interrupted process alive.
    thread = threading.Thread(target=call_repeatedly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class CountedLines(_Lines):
    """Prints counted progress without a terminal."""

    _share = 0.0

    def tell(self, done: int, total: int, things: str, doing: str) -> None:
        self._share, self._doing = done / total, f"{done}/{total} {things}, {doing}"
        self.beat()

    def _left(self, now: float) -> str:
        return time_left(now - self._begun, self._share)


class TerminalJob:
    """Reports a job's progress to the user of the command line."""

    def note(self, sentence: str) -> None:
        complain(sentence)

    @contextmanager
    def measuring(self) -> Iterator[Observer]:
        if not is_watched(sys.stderr, os.environ):
            lines = GroupLines(complain)
            with call_regularly(lines.beat):
                yield lines
            return
        with closing(RunProgress(sys.stderr, os.environ)) as observer:
            yield observer

    @contextmanager
    def counting(self) -> Iterator[Tell]:
        if not is_watched(sys.stderr, os.environ):
            lines = CountedLines(complain)
            with call_regularly(lines.beat):
                yield lines.tell
            return
        line, begun = LiveLine(sys.stderr, os.environ), time.monotonic()

        def tell(done: int, total: int, things: str, doing: str) -> None:
            line.show(f"{done}/{total} {things}{time_left(time.monotonic() - begun, done / total)}, {doing}")

        with closing(line):
            yield tell


class SilentJob:
    """Reports no progress."""

    def note(self, sentence: str) -> None: ...

    def measuring(self) -> AbstractContextManager[Observer]:
        return nullcontext(SilentObserver())

    def counting(self) -> AbstractContextManager[Tell]:
        return nullcontext(lambda *_: None)


TERMINAL: JobObserver = TerminalJob()
SILENT: JobObserver = SilentJob()
