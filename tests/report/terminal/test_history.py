"""The history as text, line by line, from values made by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from fp8bench.model import Fault, Figure, Series, Status, Trend
from fp8bench.report.elements import Page
from fp8bench.report.terminal.history import (
    faults_page,
    joined_page,
    rebuilt_page,
    run_row,
    runs_page,
    trend_page,
    trends_page,
    value,
)
from fp8bench.report.terminal.layout import render
from tests.counts import for_each
from tests.histories import MACHINE, PYTHON, commit, run_at

NAME = "gemm.Gemm.track_time"
TIME = Series(NAME, "gemm", "time", "seconds", ("dtype", "shape"), (("bf16", "fp8"), ("512",)), "1.1")
DAY = 86_400_000
DATE = 1767614400000  # 2026-01-05 12:00 UTC


def figure(number: int, milliseconds: float | None, **changes: object) -> Figure:
    """What commit `number` came to, a day after the one before, with an interval of 1%."""
    seconds = None if milliseconds is None else milliseconds / 1e3
    low, high = (None, None) if seconds is None else (seconds * 0.995, seconds * 1.005)
    one = Figure(commit(number), DATE + number * DAY, "1.1", 1, 24, seconds, low, high)
    return replace(one, **changes)  # type: ignore[arg-type]


def trend(*figures: Figure, **changes: object) -> Trend:
    return replace(Trend(TIME, ("bf16", "512"), MACHINE, PYTHON, figures), **changes)  # type: ignore[arg-type]


def test_what_else_changed_stands_between_the_commits() -> None:
    """A step that came with another torch or another GPU is not taken for the commit's."""
    old = (("torch", "2.12.0"), ("torch_git", "1"), ("device", "NVIDIA A100"))
    new = (("torch", "2.13.0"), ("torch_git", "2"), ("device", "NVIDIA H200"), ("env_NVIDIA_TF32_OVERRIDE", "0"))
    figures = (figure(1, 4, under=old), figure(2, 2, under=new), figure(3, 2, under=new))
    lines = render(trend_page([trend(*figures)], "x", ())).splitlines()
    place = next(number for number, line in enumerate(lines) if "00000002" in line)
    assert lines[place - 1] == (
        "torch 2.12.0 -> 2.13.0; device NVIDIA A100 -> NVIDIA H200; env_NVIDIA_TF32_OVERRIDE none -> 0"
    )
    assert "00000003" in lines[place + 1]


def test_one_commit_needs_no_word_on_changes() -> None:
    """The legend has what occurs, and nothing else."""
    shown = render(trend_page([trend(figure(1, 1.0, low=None, high=None))], "words", ()))
    assert "how to read this" not in shown and "change:" not in shown
    assert shown.splitlines()[-1].split() == ["2026-01-06", "12:00", "00000001", "1", "24", "1.000", "ms", "-", "-"]


def test_machines_and_interpreters_have_sections() -> None:
    """A GPU is part of the machine; what a machine does not say is not invented."""
    other = trend(figure(1, 1.0), machine={"machine": "h200", "gpu": "NVIDIA H200", "cpu": ""}, python="/b/python")
    lines = render(trend_page([trend(figure(1, 2.0)), other], "words", ())).splitlines()
    assert "on box (AMD EPYC, 2 CPUs), /venv/bin/python3" in lines
    assert "on h200 (NVIDIA H200), /b/python" in lines


def test_hasty_figures_are_marked_in_the_list() -> None:
    """The value, and the change on either side of it."""
    shown = render(trends_page([trend(figure(1, 1.0, hasty=True), figure(2, 2.0)).ending], "s", 2, 2, {}))
    assert "2.00 ms  ~+100.0%" in shown and "~: of a --quick run" in shown


@for_each(
    ("unit", "metric", "number", "shown"),
    [
        ("seconds", "time_gemm", 2.4e-6, "2.40 us"),
        ("bytes", "peak_memory", 1.5 * (1 << 30), "1.50 GiB"),
        ("joules", "energy", 0.0191, "19.1 mJ"),
        ("ratio", "relative_time", 0.4512, "0.451x"),
        ("ratio", "product_error", 3.7e-2, "3.7e-02"),
        ("ratio", "gradient_vanished", 0.0, "0%"),
        ("ratio", "gradient_vanished", 0.123, "12.3%"),
        ("ratio", "gradient_vanished", None, "-"),
        ("%", "underflow_percent", 0.6412, "0.64%"),
    ],
)
def test_numbers_have_their_units(unit: str, metric: str, number: float | None, shown: str) -> None:
    """As everywhere else in fp8bench."""
    assert value(trend(series=replace(TIME, unit=unit, metric=metric)), number) == shown


def test_joules_of_another_source_do_not_compare() -> None:
    """In neither list; what has changed stands between the commits, and within one source they do."""
    energy = replace(TIME, name="gemm.Gemm.track_energy", metric="energy", unit="joules")
    read = ((1000, "counter"), (2000, "counter"), (1700, "instant"))
    three = [figure(n, number, under=(("energy_source", name),)) for n, (number, name) in enumerate(read, 1)]
    shown = render(trend_page([trend(*three, series=energy)], "x", ())).splitlines()
    assert [line.split()[-1] for line in shown if line.endswith(("%", " -"))] == ["-", "+100.0%", "-"]
    assert "energy_source counter -> instant" in shown
    listed = render(trends_page([trend(*three, series=energy).ending], "s", 3, 3, {}))
    assert "1.70 J" in listed and "new source\n" in listed
    assert "new source: joules were read elsewhere" in listed
    assert "median over windows" in listed and "the median over windows" in "\n".join(shown)
    both = render(trends_page([trend(*three, series=energy).ending, trend(*three).ending], "s", 3, 3, {}))
    assert "median over rounds (of energy: windows)" in both


def test_changes_of_nothing() -> None:
    """An error of 0 has no ratio; 0 after 0 is the same."""
    errors = replace(TIME, unit="ratio", metric="product_error")
    three = [replace(figure(number, None), value=one) for number, one in enumerate((0.0, 0.0, 0.1))]
    lines = render(trend_page([trend(*three, series=errors)], "words", ())).splitlines()
    assert [line.split()[-1] for line in lines if "0000000" in line] == ["-", "0%", "-"]


def test_runs() -> None:
    """What each came to, through which door, and what became of those that have no end."""
    rows = [
        run_row(run_at(1, origin="asv"), False),
        run_row(run_at(2, finished=False, records=(), facts={"dirty": True}), True),
        run_row(run_at(3, finished=False, records=(), facts={"commit": None, "dirty": None}), False),
    ]
    assert render(runs_page(rows, ".fp8bench", {})) == (
        """\
.fp8bench: 3 runs, newest first

  run       started (UTC)        commit          by     suite  ok  skipped  failed  machine
  000000c8  2026-01-05 14:00:00  00000001        asv    gemm    2        0       0  box
  0000012c  2026-01-05 15:00:00  00000002+dirty  suite  gemm    0        0       0  box
      being measured now
  00000190  2026-01-05 16:00:00  none            suite  gemm    0        0       0  box
      unfinished; 2 cases have no record: fp8bench suite --resume 00000190

one of them
  fp8bench show 000000c8
"""
    )


def test_faults() -> None:
    """What is broken stands first; each is where, what, and what to do."""
    faults = [
        Fault("a.partial", "it is left over", "Delete it", broken=False),
        Fault("runs/b.jsonl", "line 7 is broken", "Resume it"),
    ]
    assert render(faults_page(faults, {"run files": (3, 4), "asv's files": (2, 2)}, ".fp8bench")) == (
        """\
.fp8bench: 1 thing is broken

broken
  runs/b.jsonl: line 7 is broken. Resume it.

worth knowing
  a.partial: it is left over. Delete it.

sound: 3 of 4 run files, 2 of 2 asv's files
"""
    )


@for_each(
    ("page", "text"),
    [
        (runs_page([], "s", {"not read": 2}), "s: 0 runs, newest first\n\nnot in it\n  2 runs: not read\n"),
        (faults_page([], {"run files": (1, 1)}, "s"), "s: nothing is broken\n\nsound: 1 of 1 run files\n"),
        (
            rebuilt_page("s", 1, 7, 2, {"dirty": 1}),
            "s: made 1 file of asv's, 7 benchmarks, from 2 runs\n\nnot in it\n  1 run: dirty\n",
        ),
        (
            joined_page("s: took in t", {"runs that are new here": 2}),
            "s: took in t\n  runs that are new here: 2\n",
        ),
    ],
)
def test_pages_of_a_few_lines(page: Page, text: str) -> None:
    """What there is none of, what was made and taken, and what is left out."""
    assert render(page) == text


WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=150)


@example("x" * 130, "y z" * 50, [1.0], 0)
@given(WORDS, WORDS, st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=4), st.integers(-(10**18), 10**18))
def test_no_line_is_too_long(name: str, reason: str, numbers: list[float], date: int) -> None:
    """Whatever suites of one's own, machines and reasons are called. A command to copy stays whole."""
    figures = [figure(1, number, date=date) for number in numbers]
    figures.append(figure(2, None, status=Status.FAILED, reason=reason, version=name[:60]))
    one = trend(*figures, cell=(name, reason), machine={"machine": name, "cpu": reason}, python=name)
    texts = [
        render(trend_page([one], reason, {commit(1)})),
        render(trends_page([one.ending], "s", 1, 1, {reason: 1})),
        render(faults_page([Fault(name, reason, name)], {name: (1, 1)}, "s")),
    ]
    lines = [line for text in texts for line in text.splitlines() if "history show" not in line]
    assert max(map(len, lines)) <= 100
