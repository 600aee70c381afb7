"""The live line: when it shows, what it says, that it goes away and that it costs nothing."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable

import pytest

from fp8bench import units
from fp8bench.cli import progress as live
from fp8bench.cli.progress import REDRAW_SECONDS, TERMINAL, CountedLines, GroupLines, LiveLine, RunProgress
from fp8bench.model import Case, Group, Level, Plan, PlannedCase, Record, Status, Support, Work
from tests.counts import for_each

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
    """A clock that goes on when told."""

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
    monkeypatch.setattr(live, "columns_of", lambda stream: stream.columns)
    return Screen()


def line(screen: Screen, clock: Callable[[], float], columns: int = 120) -> RunProgress:
    screen.columns = columns
    observer = RunProgress(screen, {}, clock)
    observer.planned(PLAN)
    return observer


def test_says_what_is_done_and_what_is_being_done(screen: Screen, clock: Clock) -> None:
    observer = line(screen, clock)
    observer.working(CASES[0], "preparing", 0.0)
    assert screen.shown() == "0/6 cases, preparing gemm[m=256]@cpu/fp32"
    for case in CASES[:3]:
        observer.finished(record(case))
    clock.now += 1
    observer.working(CASES[4], "measuring", 0.0)
    assert screen.shown() == "3/6 cases, measuring gemm[m=512]@cpu/bf16"


def test_time_left_comes_from_the_share_of_the_work(screen: Screen, clock: Clock) -> None:
    """Skips take no time, so four cases make the whole; a half of the first group is a quarter of it."""
    observer = line(screen, clock)
    clock.now += 20
    observer.working(CASES[0], "measuring", 0.5)
    assert ", about 1 min 00 s left, measuring" in screen.shown()
    for case in CASES[:3]:
        observer.finished(record(case))
    clock.now += 10
    observer.working(CASES[3], "measuring", 0.0)
    assert ", about 30 s left, measuring" in screen.shown()


def test_no_guess_from_too_little_and_no_harm_of_odd_shares(screen: Screen, clock: Clock) -> None:
    observer = line(screen, clock)
    clock.now += 0.5
    observer.working(CASES[0], "measuring", 0.9)
    clock.now += 20
    observer.working(CASES[0], "measuring", 0.001)
    assert "left" not in screen.getvalue()
    for share in (-1.0, 0.0, 1.0, 7.0, float("nan")):
        clock.now += 60
        observer.working(CASES[0], "measuring", share)
        assert "nan" not in screen.shown() and " -" not in screen.shown()


def test_draws_at_most_five_times_a_second(screen: Screen, clock: Clock) -> None:
    observer = line(screen, clock)
    for _ in range(1000):
        clock.now += 0.002
        observer.working(CASES[0], "measuring", 0.5)
    assert screen.draws() <= 1 + 2 / REDRAW_SECONDS


def test_that_another_thing_is_done_is_told_at_once(screen: Screen, clock: Clock) -> None:
    """It may take long: nobody shall read 'preparing' for as long as a compiler runs."""
    observer = line(screen, clock, 200)
    observer.working(CASES[0], "preparing", 0.0)
    observer.working(CASES[1], "compiling 2 quantisers", 0.0)
    assert "compiling 2 quantisers" in screen.shown()


def test_never_wider_than_the_terminal(screen: Screen, clock: Clock) -> None:
    """The last column stays free, and both ends of a long id stay visible."""
    for columns in range(1, 60):
        observer = line(screen, clock, columns)
        clock.now += 1
        observer.working(CASES[0], "measuring", 0.5)
        assert len(screen.shown()) <= columns - 1
    assert "gemm" in screen.shown() and "..." not in screen.shown()
    observer = line(screen, clock, 41)
    observer.working(CASES[0], "measuring", 0.5)
    assert re.search(r"measuring gemm.*\.\.\..*/fp32$", screen.shown())


def test_close_erases_the_line_once_which_has_no_colour(screen: Screen, clock: Clock) -> None:
    observer = line(screen, clock)
    observer.close()
    assert screen.getvalue() == ""
    observer.working(CASES[0], "measuring", 0.5)
    observer.close()
    observer.close()
    assert screen.shown() == "" and screen.draws() == 2
    assert not re.search(r"\n|\x1b\[[0-9;]*m", screen.getvalue())


def test_a_closed_terminal_and_none_end_no_measurement(screen: Screen, clock: Clock) -> None:
    """Every call returns, and nothing opens the stream again."""
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


def test_a_throttled_call_is_cheap(screen: Screen) -> None:
    """It runs between slots of 8 ms: a few microseconds at most."""
    observer = line(screen, time.monotonic)
    observer.working(CASES[0], "measuring", 0.5)
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            observer.working(CASES[0], "measuring", 0.5)
        best = min(best, (time.perf_counter() - begun) / 100)
    assert best < 20e-6


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
    """Nothing at all is written elsewhere."""
    screen = Screen(terminal)
    shown = LiveLine(screen, environ)
    shown.show("one")
    shown.close()
    assert bool(screen.getvalue()) is shows


def test_a_line_replaces_the_one_before_and_is_erased(screen: Screen) -> None:
    """No wider than the terminal less a column."""
    screen.columns = 12
    shown = LiveLine(screen, {})
    for text in ("one", "a long line of words"):
        shown.show(text)
    shown.close()
    shown.close()
    assert screen.getvalue() == "\r\x1b[2Kone\r\x1b[2Ka long line\r\x1b[2K"


def test_progress_erases_its_line_also_after_an_error(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with TERMINAL.measuring() as observer:
            observer.planned(PLAN)
            observer.working(CASES[0], "measuring", 0.5)
            raise KeyError("inside")

    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(KeyError):
        fail()
    assert screen.draws() == 2 and screen.shown() == ""


def test_a_run_that_nobody_watches_has_a_line_a_group(clock: Clock) -> None:
    """Where there are several groups; skips are done, too."""
    lines: list[str] = []
    observer = GroupLines(lines.append, clock)
    observer.planned(PLAN)
    for case in CASES:
        observer.working(case, "measuring", 0.5)
        clock.now += 5
        observer.finished(record(case))
    assert lines == ["1/2 groups after 15 s: gemm[m=256]@cpu", "2/2 groups after 30 s: gemm[m=512]@cpu"]
    observer.planned(Plan(PLAN.groups[:1]))
    for case in CASES[:3]:
        observer.finished(record(case))
    assert len(lines) == 2


def test_what_cases_take_of_memory_is_said_before_the_first(clock: Clock) -> None:
    """On a terminal and elsewhere; other notes stand with the answer."""
    lines: list[str] = []
    plan = Plan(PLAN.groups, ("memory: the largest case takes 3 GiB", "another note"))
    GroupLines(lines.append, clock).planned(plan)
    assert lines == ["memory: the largest case takes 3 GiB"]
    screen = Screen()
    line(screen, clock).planned(plan)
    assert "3 GiB" in screen.getvalue() and "another" not in screen.getvalue()


def test_many_things_that_nobody_watches_have_a_line_now_and_then(clock: Clock) -> None:
    """A tenth further each, and 20 s apart at least; a job of some seconds is silent."""
    lines: list[str] = []
    observer = CountedLines(lines.append, clock)
    for place in range(40):
        observer.tell(place, 40, "trainings", f"layer {place}")
        clock.now += 6
    assert [line.partition(",")[0] for line in lines] == [
        f"{place}/40 trainings after {units.clock(6 * place)}" for place in range(4, 40, 4)
    ]
    assert lines[0].endswith(" left, layer 4")
    quick = CountedLines(lines.append, clock)
    for place in range(19):
        quick.tell(place, 19, "checks", "checking")
        clock.now += 1
    assert len(lines) == 9


def test_counting_says_lines_where_stderr_is_no_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live.time, "monotonic", clock)
    monkeypatch.setattr(CountedLines.__init__, "__defaults__", (clock,))
    with TERMINAL.counting() as tell:
        clock.now += 30
        tell(1, 4, "trainings", "training with fp8")
    assert "fp8bench: 1/4 trainings after 30 s, about" in capsys.readouterr().err
