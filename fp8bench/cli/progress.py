"""Shows the progress of a job: sentences in a log, or lines on a terminal that are updated in place.

The line on a terminal is drawn when an observer is called, which happens between timed slots. It is drawn at most five
times per second, unless the activity changes. In a log, a thread also prints lines, because a single call of a compiler
may take minutes.
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
from fp8bench.cli.streams import terminal_width, write_sentence_to_stderr
from fp8bench.jobs.observer import JobObserver, ReportProgress
from fp8bench.model import Case, Plan, Record
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.report.elements import printable
from fp8bench.report.panels import format_case_params, shared_params, together

REDRAW_SECONDS = 0.2
# The remaining time is estimated only after this time and this share of the job, because an earlier estimate would
# jump.
_MIN_ELAPSED_SECONDS = 3.0
_MIN_FINISHED_WORK_SHARE = 0.05
# A run that prints nothing for 30 seconds seems to hang. So a thread checks every _CHECK_SECONDS whether a line is due.
_MAX_SILENT_SECONDS, _CHECK_SECONDS = 26.0, 2.0
_ERASE_LINE_CODE = "\r\x1b[2K"
_CLEAR_SCREEN = "\x1b[2J\x1b[H"
# With wrapping disabled, the terminal itself cuts long lines: it knows how wide letters are.
_DISABLE_WRAP, _ENABLE_WRAP = "\x1b[?7l", "\x1b[?7h"
_FALLBACK_COLUMNS, _FALLBACK_LINES = 80, 24
_UNKNOWN_SIZE = (0, 0)


class _TerminalWriter:
    """Writes to a terminal that is updated in place. Ignores errors of a terminal that was closed, so that the job
    continues.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def _write(self, text: str) -> None:
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None


class LiveLine(_TerminalWriter):
    """A line that is updated in place, on a terminal that a person watches. Prints nothing in pipes, in CI and on
    terminals without cursor control.
    """

    def __init__(self, stream: TextIO | None, environ: Mapping[str, str]) -> None:
        super().__init__(stream if is_watched(stream, environ) else None)
        self._is_drawn = False

    @property
    def num_columns(self) -> int:
        """The number of usable columns of the terminal: one less than its width, because some terminals wrap after the
        last column.
        """
        return (terminal_width(self._stream) or _FALLBACK_COLUMNS) - 1 if self._stream is not None else 0

    def show(self, text: str) -> None:
        self._write(_ERASE_LINE_CODE + printable(text)[: self.num_columns])
        self._is_drawn = True

    def close(self) -> None:
        """Erases the line. A second call does nothing."""
        if self._is_drawn:
            self._write(_ERASE_LINE_CODE)
            self._is_drawn = False


class LiveBlock(_TerminalWriter):
    """Lines that are updated in place on a terminal. The cursor stays visible.

    A resized terminal may fold or scroll old lines in unknown ways, so the whole screen is cleared and drawn again.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._height = 0
        self._size = _UNKNOWN_SIZE

    @property
    def num_columns(self) -> int:
        return _terminal_size(self._stream)[0] - 1

    def show(self, text: str) -> None:
        """Shows the lines of a text, cut at the edges of the terminal. The text may contain colour codes."""
        old_size, self._size = self._size, _terminal_size(self._stream)
        # An unknown old size means that nothing was drawn yet.
        is_terminal_resized = old_size not in (self._size, _UNKNOWN_SIZE)
        erase_codes = _CLEAR_SCREEN if is_terminal_resized else self._make_erase_codes()
        # Write no line break after the last line, because it would scroll a full screen.
        lines = text.rstrip("\n").split("\n")[: self._size[1]]
        self._write(erase_codes + _DISABLE_WRAP + "\n".join(lines) + _ENABLE_WRAP)
        self._height = len(lines)

    def close(self) -> None:
        """Erases the lines. A second call does nothing."""
        if self._height:
            self._write(self._make_erase_codes())
        self._height, self._size = 0, _UNKNOWN_SIZE

    def _make_erase_codes(self) -> str:
        """Returns the control codes that move the cursor to the first line and erase everything from there."""
        cursor_up_code = f"\x1b[{self._height - 1}A" if self._height > 1 else ""
        return f"\r{cursor_up_code}\x1b[J"


def _terminal_size(stream: TextIO | None) -> tuple[int, int]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        size = os.get_terminal_size(stream.fileno() if stream is not None else -1)
        return size.columns or _FALLBACK_COLUMNS, size.lines or _FALLBACK_LINES
    return _FALLBACK_COLUMNS, _FALLBACK_LINES


def describe_time_left(seconds: float, share: float) -> str:
    """Returns the remaining time as ', about 42 s left', estimated from the elapsed seconds and the finished share.
    Returns '' if it is too early for an estimate.
    """
    if seconds < _MIN_ELAPSED_SECONDS or not _MIN_FINISHED_WORK_SHARE <= share <= 1:
        return ""
    return f", about {units.clock(seconds * (1 - share) / share)} left"


def is_watched(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Returns whether the stream is a terminal that can redraw a line and that a person probably watches."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    return not environ.get("CI") and environ.get("TERM") != "dumb"


class _PlanProgress:
    """Predicts the remaining time of a planned run, and gives the settings of the plan short names."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_time = clock()
        self._start_plan(Plan(()))

    def _start_plan(self, plan: Plan) -> None:
        self._names = _name_plan_settings(plan)
        # Groups whose cases are all skipped are not measured.
        num_groups = sum(any(planned.runs for planned in group.cases) for group in plan)
        planning_seconds = self._clock() - self._start_time
        self._remaining = RemainingTime(num_groups, planning_seconds)
        self._start_time = self._clock()

    def _describe_case(self, case: Case) -> str:
        return f"{case.mode} of {self._names.get(case.setting, case.workload)}"

    def _describe_time_left(self, now: float) -> str:
        """Returns the remaining time as ', about 42 s left', or '' if it is too early for an estimate."""
        is_early_for_estimate = now - self._start_time < _MIN_ELAPSED_SECONDS
        return "" if is_early_for_estimate else f", about {units.clock(self._remaining.predict(now))} left"


def _name_plan_settings(plan: Plan) -> dict[str, str]:
    """Returns a short name for each setting of a plan, such as 'gemm m=256': its workload, and the parameters in which
    it differs from other settings.
    """
    cases = [group.cases[0].case for group in plan]
    setting_names = {}
    cases_by_suite = together((case.workload, case) for case in cases)
    for suite, suite_cases in cases_by_suite.items():
        suite_case_params = [(*case.params, ("device", case.device)) for case in suite_cases]
        common_params = shared_params(suite_case_params)
        for case, params in zip(suite_cases, suite_case_params, strict=True):
            setting_names[case.setting] = (
                f"{suite} {format_case_params(pair for pair in params if pair not in common_params)}".rstrip()
            )
    return setting_names


class RunProgress(_PlanProgress, LiveLine):
    """Receives the progress of a run, and shows it on one line of a terminal."""

    def __init__(
        self, stream: TextIO | None, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        _PlanProgress.__init__(self, clock)
        LiveLine.__init__(self, stream, environ)
        # An earlier time than any reading of the clock, so that the first activity is shown at once.
        self._shown_at = -REDRAW_SECONDS
        self._activity = ""
        self._num_cases = self._num_done = 0

    def planned(self, plan: Plan) -> None:
        self._num_cases, self._num_done = plan.num_cases, 0
        # Print notes above the line that is updated in place, so that they are not overwritten.
        for note in plan.memory_notes:
            self._write(f"{_ERASE_LINE_CODE}{printable(note)}\n")
        self._start_plan(plan)

    def working(self, case: Case, doing: str, share: float) -> None:
        now = self._clock()
        self._remaining.record_activity(case.setting, doing, share, now)
        # Show a new activity at once, because it may take long.
        if now - self._shown_at >= REDRAW_SECONDS or doing != self._activity:
            self._activity, self._shown_at = doing, now
            self.show(
                f"{self._num_done}/{self._num_cases} cases{self._describe_time_left(now)}, "
                f"{doing} {self._describe_case(case)}"
            )

    def finished(self, record: Record) -> None:
        self._num_done += 1


class _LogLines:
    """Prints the current activity at least every 30 seconds, if `print_if_due` is called often enough."""

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print, self._clock = print_line, clock
        self._start_time = self._printed_at = clock()
        self._activity = "starting"

    def print_if_due(self) -> None:
        now = self._clock()
        if now - self._printed_at >= _MAX_SILENT_SECONDS:
            self._printed_at = now
            self._print(f"after {units.clock(now - self._start_time)}{self._describe_time_left(now)}: {self._activity}")

    def _describe_time_left(self, now: float) -> str:
        """Returns the remaining time as ', about 42 s left', or '' if it is too early for an estimate."""
        return ""


class GroupProgressLines(_PlanProgress, _LogLines, SilentObserver):
    """Receives the progress of a run that has no terminal. Prints a line after each group if there are several groups,
    and at least every 30 seconds.
    """

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        _LogLines.__init__(self, print_line, clock)
        _PlanProgress.__init__(self, clock)
        self._cases: dict[str, int] = {}

    def planned(self, plan: Plan) -> None:
        self._start_plan(plan)
        self._printed_at = self._start_time
        self._cases = {group.setting: len(group.cases) for group in plan}
        for note in plan.memory_notes:
            self._print(note)

    def working(self, case: Case, doing: str, share: float) -> None:
        self._remaining.record_activity(case.setting, doing, share, self._clock())
        self._activity = f"{doing}, {self._describe_case(case)}"
        self.print_if_due()

    def finished(self, record: Record) -> None:
        setting = record.case.setting
        self._cases[setting] -= 1
        num_groups = len(self._cases)
        if self._cases[setting] == 0 and num_groups > 1:
            num_done = sum(not cases for cases in self._cases.values())
            self._printed_at = now = self._clock()
            time_left_text = self._describe_time_left(now) if num_done < num_groups else ""
            elapsed_text = units.clock(now - self._start_time)
            self._print(f"{num_done}/{num_groups} groups after {elapsed_text}{time_left_text}: {self._names[setting]}")


@contextmanager
def call_in_thread(function: Callable[[], None]) -> Iterator[None]:
    """A context in which a second thread calls the function every few seconds."""
    stop_event = threading.Event()

    def call_repeatedly() -> None:
        while not stop_event.wait(_CHECK_SECONDS):
            function()

    # A daemon thread does not keep the process alive after an interrupt.
    thread = threading.Thread(target=call_repeatedly, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


class CountedProgressLines(_LogLines):
    """Prints the progress of a job without a terminal, in separate lines. The job counts its finished parts."""

    _share = 0.0

    def tell(self, done: int, total: int, things: str, doing: str) -> None:
        self._share, self._activity = done / total, f"{done}/{total} {things}, {doing}"
        self.print_if_due()

    def _describe_time_left(self, now: float) -> str:
        return describe_time_left(now - self._start_time, self._share)


class TerminalJobObserver:
    """Reports the progress of a job on the command line."""

    def note(self, sentence: str) -> None:
        write_sentence_to_stderr(sentence)

    @contextmanager
    def measuring(self) -> Iterator[Observer]:
        if not is_watched(sys.stderr, os.environ):
            lines = GroupProgressLines(write_sentence_to_stderr)
            with call_in_thread(lines.print_if_due):
                yield lines
            return
        with closing(RunProgress(sys.stderr, os.environ)) as observer:
            yield observer

    @contextmanager
    def counting(self) -> Iterator[ReportProgress]:
        if not is_watched(sys.stderr, os.environ):
            lines = CountedProgressLines(write_sentence_to_stderr)
            with call_in_thread(lines.print_if_due):
                yield lines.tell
            return
        line, start_time = LiveLine(sys.stderr, os.environ), time.monotonic()

        def tell(done: int, total: int, things: str, doing: str) -> None:
            line.show(
                f"{done}/{total} {things}{describe_time_left(time.monotonic() - start_time, done / total)}, {doing}"
            )

        with closing(line):
            yield tell


class SilentJobProgress:
    """Reports no progress."""

    def note(self, sentence: str) -> None: ...

    def measuring(self) -> AbstractContextManager[Observer]:
        return nullcontext(SilentObserver())

    def counting(self) -> AbstractContextManager[ReportProgress]:
        return nullcontext(lambda *_: None)


TERMINAL_JOB_OBSERVER: JobObserver = TerminalJobObserver()
SILENT: JobObserver = SilentJobProgress()
