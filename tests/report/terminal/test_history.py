"""The history as text, line by line, from values made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fp8bench.analysis.steps.changes import ChangeSearchResult
from fp8bench.model import Fault, Figure, Series, Trend
from fp8bench.report.terminal.changes import make_changes_page
from fp8bench.report.terminal.history import (
    asv_files_page,
    merge_page,
    run_row,
    runs_page,
    show_trend_value,
    store_faults_page,
    trend_page,
    trends_page,
)
from fp8bench.report.terminal.layout import render
from tests.histories import MACHINE, PYTHON, commit, run_at
from tests.told_before import Told, as_before

NAME = "gemm.Gemm.track_time"
TIME = Series(NAME, "gemm", "time", "seconds", ("dtype", "shape"), (("bf16", "fp8"), ("512",)), "1.1")
DAY = 86_400_000
DATE = 1767614400000  # 2026-01-05 12:00 UTC


def figure(number: int, milliseconds: float | None, **changes: object) -> Figure:
    """The figure of commit `number`, a day after the previous one, with an interval of 1%."""
    seconds = None if milliseconds is None else milliseconds / 1e3
    low, high = (None, None) if seconds is None else (seconds * 0.995, seconds * 1.005)
    made = Figure(commit(number), DATE + number * DAY, "1.1", 1, 24, seconds, low, high)
    return replace(made, **changes)  # type: ignore[arg-type]


def trend(*figures: Figure, **changes: object) -> Trend:
    return replace(Trend(TIME, ("bf16", "512"), MACHINE, PYTHON, figures), **changes)  # type: ignore[arg-type]


def rebased(unit: str, metric: str) -> Trend:
    return trend(series=replace(TIME, unit=unit, metric=metric))


@as_before
def test_trends() -> Told:
    old = (("torch", "2.12.0"), ("torch_git", "1"), ("device", "NVIDIA A100"))
    new = (("torch", "2.13.0"), ("torch_git", "2"), ("device", "NVIDIA H200"), ("env_NVIDIA_TF32_OVERRIDE", "0"))
    changed = trend(figure(1, 4, under=old), figure(2, 2, under=new), figure(3, 2, under=new))
    yield "what else changed stands between the commits", render(trend_page([changed], "words"))
    alone = trend(figure(1, 1.0, low=None, high=None))
    yield "one commit needs no word on changes", render(trend_page([alone], "words"))
    other = trend(figure(1, 1.0), machine={"machine": "h200", "gpu": "NVIDIA H200", "cpu": ""}, python="/b/python")
    yield "machines and interpreters have sections", render(trend_page([trend(figure(1, 2.0)), other], "words"))
    hasty = trend(figure(1, 1.0, hasty=True), figure(2, 2.0)).ending
    yield "hasty figures are marked, and changes on either side of them", render(trends_page([hasty], "s", 2, 2, {}))
    for unit, metric, number in (
        ("seconds", "time_gemm", 2.4e-6),
        ("bytes", "peak_memory", 1.5 * (1 << 30)),
        ("joules", "energy", 0.0191),
        ("ratio", "relative_time", 0.4512),
        ("ratio", "product_error", 3.7e-2),
        ("ratio", "gradient_vanished", 0.0),
        ("ratio", "gradient_vanished", 0.123),
        ("ratio", "gradient_vanished", None),
        ("%", "underflow_percent", 0.6412),
    ):
        yield f"{metric} of {number} {unit}", show_trend_value(rebased(unit, metric), number)
    errors = replace(TIME, unit="ratio", metric="product_error")
    zeros = [replace(figure(number, None), value=error) for number, error in enumerate((0.0, 0.0, 0.1))]
    yield (
        "an error of 0 has no ratio; 0 after 0 is the same",
        render(trend_page([trend(*zeros, series=errors)], "words")),
    )


def test_equal_names_on_two_machines_are_two_series() -> None:
    changed, new = trend(figure(1, 1.0), figure(2, 2.0)), trend(figure(2, 1.0), machine={"machine": "h200"})
    (summary, *_) = trends_page([changed.ending, new.ending], "s", 2, 2, {}).parts
    assert summary.elements[0].text.startswith("1 of 1 series with an earlier commit changed by more than 2%; the lar")


@as_before
def test_pages_of_stores() -> Told:
    rows = [
        run_row(run_at(1, origin="asv"), False),
        run_row(run_at(2, finished=False, records=(), facts={"dirty": True}), True),
        run_row(run_at(3, finished=False, records=(), facts={"commit": None, "dirty": None}), False),
    ]
    yield (
        "what runs came to, through which door, and what became of those without an end",
        render(runs_page(rows, ".fp8bench", {})),
    )
    yield "no runs, and what was not read", render(runs_page([], "s", {"not read": 2}))
    faults = [
        Fault("a.partial", "it is left over", "Delete it", broken=False),
        Fault("runs/b.jsonl", "line 7 is broken", "Resume it"),
    ]
    yield (
        "what is broken stands first; each is where, what, and what to do",
        render(store_faults_page(faults, 3, 4, "s")),
    )
    yield "nothing broken", render(store_faults_page([], 1, 1, "s"))
    yield "what was made", render(asv_files_page("s", 1, 7, 2, {"dirty": 1}))
    yield "what was taken in", render(merge_page("s: imported t", {"new runs": 2}))


def test_the_headline_counts_series_that_were_not_looked_at() -> None:
    regressions = ChangeSearchResult((), 3, Counter({"fewer than 11 commits": 105}), exact_count_trends=3)
    assert make_changes_page(regressions, ".fp8bench").title == (
        ".fp8bench: 0 regressions and 0 improvements in 6 series; 105 series not looked at"
    )
