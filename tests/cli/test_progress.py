"""The progress line: when it appears, its text, that it disappears, and that it costs no time."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable

import pytest

from fp8bench.cli import progress as live
from fp8bench.cli.progress import (
    REDRAW_SECONDS,
    TERMINAL_JOB_OBSERVER,
    CountedProgressLines,
    GroupProgressLines,
    LiveBlock,
    LiveLine,
    RunProgress,
)
from fp8bench.model import Case, Group, Level, Plan, PlannedCase, Record, Status, Support, Work
from tests.counts import for_each
from tests.told_before import Told, as_before

NATIVE = Support(Level.NATIVE, "")
CASES = [Case("gemm", (("m", size),), name, "cpu") for size in (256, 512) for name in ("fp32", "bf16", "nvfp4")]
REFUSED = "no backend"
PLAN = Plan(
    tuple(
        Group(tuple(PlannedCase(case, NATIVE, Work(), REFUSED * (case.precision == "nvfp4")) for case in cases), 0)
        for cases in (CASES[:3], CASES[3:])
    )
)


class Screen(io.StringIO):
    """A stream that may be a terminal."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal
        self.columns = 120

    def isatty(self) -> bool:
        return self._terminal

    def shown(self) -> str:
        return re.split(r"\r\x1b\[2K", self.getvalue())[-1]

    def draws(self) -> int:
        return self.getvalue().count("\x1b[2K")


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(case: Case) -> Record:
    skipped = case.precision == "nvfp4"
    return Record(case, NATIVE, Status.SKIPPED if skipped else Status.OK, reason=REFUSED * skipped)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setattr(live, "terminal_width", lambda stream: stream.columns)
    return Screen()


def line(screen: Screen, clock: Callable[[], float], columns: int = 120) -> RunProgress:
    screen.columns = columns
    observer = RunProgress(screen, {}, clock)
    observer.planned(PLAN)
    return observer


@as_before
def test_progress_of_a_run(screen: Screen, clock: Clock) -> Told:
    """Two groups, each with rounds followed by passes."""

    def working(case: Case, what: str, share: float = 0.0, after: float = 0.0) -> str:
        clock.now += after
        observer.working(case, what, share)
        return screen.shown()

    observer = line(screen, clock)
    yield "what is being done", working(CASES[0], "preparing")
    yield "another thing is told at once: a compiler may run for long", working(CASES[1], "compiling 2 quantisers")
    yield "the time left comes from the share of the work", working(CASES[0], "measuring", 0.5, 20)
    for case in CASES[:3]:
        observer.finished(record(case))
    yield "what is done", working(CASES[4], "measuring", after=10)
    observer.close()
    observer.close()
    yield "the line is erased, once, and has no colour", [screen.shown(), repr(screen.getvalue()[-12:])]
    observer = line(screen, clock)
    yield "no guess from too little time", working(CASES[0], "measuring", 0.9, 0.5)
    yield "nor from too small a share", working(CASES[0], "measuring", 0.001, 20)
    odd = (-1.0, 0.0, 1.0, 7.0, float("nan"))
    yield "no harm of odd shares", [working(CASES[0], "measuring", share, 60) for share in odd]
    lines: list[str] = []
    groups = GroupProgressLines(lines.append, clock)
    groups.planned(Plan(PLAN.groups, ("memory: the largest case takes 3 GiB", "another note")))
    for case in CASES:
        groups.working(case, "measuring", 0.5)
        clock.now += 5
        groups.finished(record(case))
    groups.planned(Plan(PLAN.groups[:1]))
    for case in CASES[:3]:
        groups.finished(record(case))
    yield "unwatched: what memory it takes, and a line a group where there are several", lines


def test_draws_at_most_five_times_a_second(screen: Screen, clock: Clock) -> None:
    observer = line(screen, clock)
    for _ in range(1000):
        clock.now += 0.002
        observer.working(CASES[0], "measuring", 0.5)
    assert screen.draws() <= 1 + 2 / REDRAW_SECONDS


def test_never_wider_than_the_terminal(screen: Screen, clock: Clock) -> None:
    """The last column stays empty."""
    for columns in range(1, 60):
        observer = line(screen, clock, columns)
        clock.now += 1
        observer.working(CASES[0], "measuring", 0.5)
        assert len(screen.shown()) <= columns - 1


def test_a_closed_terminal_and_none_end_no_measurement(screen: Screen, clock: Clock) -> None:
    observer = line(screen, clock)
    screen.close()
    observer.working(CASES[0], "measuring", 0.5)
    observer.working(CASES[1], "measuring", 0.5)
    observer.close()
    assert screen.closed
    for stream in (None, screen):
        shown = LiveLine(stream, {})
        shown.show("one")
        shown.close()


def test_a_throttled_call_looks_at_the_clock_alone(
    screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs between slots of 8 ms, which must not wait for formatting or the terminal."""
    observer = line(screen, clock)
    observer.working(CASES[0], "measuring", 0.5)
    for name in ("describe_time_left", "terminal_width", "printable"):
        monkeypatch.setattr(live, name, lambda *_: pytest.fail("it draws"))
    before = screen.getvalue()
    for _ in range(100):
        observer.working(CASES[0], "measuring", 0.5)
    assert screen.getvalue() == before


@for_each(
    ("terminal", "environ", "shows"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, True),
        (True, {}, True),
        (True, {"TERM": "xterm", "CI": ""}, True),
        (True, {"TERM": "xterm", "CI": "true"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_only_where_a_person_watches(terminal: bool, environ: dict[str, str], shows: bool) -> None:
    screen = Screen(terminal)
    shown = LiveLine(screen, environ)
    shown.show("one")
    shown.close()
    assert bool(screen.getvalue()) is shows


def test_a_line_replaces_the_one_before_and_is_erased(screen: Screen) -> None:
    screen.columns = 12
    shown = LiveLine(screen, {})
    for text in ("one", "a long line of words"):
        shown.show(text)
    shown.close()
    shown.close()
    assert screen.getvalue() == "\r\x1b[2Kone\r\x1b[2Ka long line\r\x1b[2K"


def test_progress_erases_its_line_also_after_an_error(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with TERMINAL_JOB_OBSERVER.measuring() as observer:
            observer.planned(PLAN)
            observer.working(CASES[0], "measuring", 0.5)
            raise KeyError("inside")

    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(KeyError):
        fail()
    assert screen.draws() == 2 and screen.shown() == ""


def test_counting_says_lines_where_stderr_is_no_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live.time, "monotonic", clock)
    monkeypatch.setattr(CountedProgressLines.__init__, "__defaults__", (clock,))
    with TERMINAL_JOB_OBSERVER.counting() as tell:
        for done in range(2):  # a job of a few seconds prints nothing
            clock.now += 15
            tell(done, 4, "trainings", "training with fp8")
    assert capsys.readouterr().err.split(" trainings")[0] == "fp8bench: after 30 s, about 1 min 30 s left: 1/4"


def test_a_log_gets_a_line_at_least_every_30_seconds(clock: Clock) -> None:
    lines: list[str] = []
    groups = GroupProgressLines(lines.append, clock)
    groups.planned(PLAN)
    for _ in range(95):
        clock.now += 1
        groups.working(CASES[1], "measuring", 0.5)
    times = [re.fullmatch(r"after (.*), about .* left: measuring, bf16 of gemm.*", line) for line in lines]
    assert [found and found[1] for found in times] == ["26 s", "52 s", "1 min 18 s"]


@for_each("kind", [GroupProgressLines, CountedProgressLines])
def test_a_long_call_is_told_by_a_thread_that_ends_with_the_job(
    kind: type[GroupProgressLines | CountedProgressLines], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_CHECK_SECONDS", 0.001)
    lines: list[str] = []
    threads, told = threading.active_count(), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        told.set()

    observer = kind(say, clock)
    with live.call_in_thread(observer.print_if_due):
        clock.now += 30
        assert told.wait(60)
    assert lines[0].startswith("after 30 s") and lines[0].endswith(": starting")
    assert threading.active_count() == threads


def lines_on_terminal(written: str) -> list[str]:
    """The visible lines after a terminal processes these bytes; fails on sequences that LiveBlock may not use."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif up := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(up[1])
            assert row >= 0, "the cursor left the block"
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif part == "\x1b[2J":
            lines = [""] * len(lines)
        elif part == "\x1b[H":
            row = column = 0
        elif not re.fullmatch(r"\x1b\[(\?7[lh]|\d*m)", part):
            assert not part.startswith("\x1b"), part
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def test_a_block_is_redrawn_in_place_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    size = (40, 4)
    monkeypatch.setattr(live, "_terminal_size", lambda stream: size)
    screen = Screen()
    screen.write("before\n")
    block = LiveBlock(screen)
    block.show("one\n\x1b[32mtwo\x1b[0m\nthree\n")
    block.show("1\n2\n3\n4\n5")
    assert lines_on_terminal(screen.getvalue()) == ["before", "1", "2", "3", "4"], "cut at the lowest line"
    block.show("x\ny")
    assert lines_on_terminal(screen.getvalue()) == ["before", "x", "y"]
    size = (30, 4)
    block.show("new size")
    assert "".join(lines_on_terminal(screen.getvalue())) == "new size", "old lines may lie anywhere: all are erased"
    block.close()
    written = screen.getvalue()
    block.close()
    assert "".join(lines_on_terminal(written)) == "" and screen.getvalue() == written
    screen.close()
    block.show("a closed terminal ends no job")
