"""A step in time: the middle one that was timed, its phases in the order of the run, or that their order is unknown."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.analysis.findings import findings
from fp8bench.model import Level, Record, Segments, SlotSample, Timing
from fp8bench.report.elements import Stacks, Text
from tests.fakes import record
from tests.materials import of_kind, part
from tests.runs import run_of

PHASES = ("cast", "gemm", "gemm", "attention", "unattributed", "gemm")
# Three calls of 93, 21 and 48 us; neighbours of one phase are one piece.
CALLS = ((1, 20, 3, 4, 5, 60), (1, 2, 3, 4, 5, 6)), ((5, 7, 3, 20, 1, 12),)
IN_ORDER = [("cast", 5), ("matmul", 10), ("attention", 20), ("other", 1), ("matmul", 12)]


def timed(varying: bool = False) -> Timing:
    slots = []
    for number, calls in enumerate(CALLS):
        cells = tuple(tuple(1000 * cell for cell in call) for call in calls)
        slots.append(SlotSample(number, cells, 1e-3, 1e-3))
    return Timing(Segments(PHASES, (0, 0, 1, 1, 1, 2)), tuple(slots), varying=varying)


def timelines(*others: Record) -> list[Stacks]:
    """The timelines of fp32 and of some other records."""
    run = run_of([record(timed(), "fp32", is_reference=True, control=timed()), *others])
    return [chart for chart in of_kind(part("phases", (run, findings(run))), Stacks) if chart.pieces]


def test_pieces_follow_each_other_as_they_ran() -> None:
    (chart,) = timelines(record(timed(), "bf16"))
    for row in chart.pieces:
        assert [(chart.parts[number], round(1e6 * seconds, 6)) for number, seconds in row] == IN_ORDER
    assert [label for label, _ in chart.rows] == ["fp32, 48.0 us", "bf16, 48.0 us"]
    assert "in which they ran" in chart.description


def test_no_order_is_invented() -> None:
    (chart,) = timelines(record(timed(varying=True), "bf16"))
    assert "not the order of a step" in chart.description and "as they ran" not in chart.description


def test_what_is_emulated_or_was_not_timed_has_no_row() -> None:
    emulated, untimed = record(timed(), "fp8", Level.EMULATED), record(None, "fp16")
    (chart,) = timelines(record(timed(), "bf16"), emulated, untimed)
    assert [label.partition(",")[0] for label, _ in chart.rows] == ["fp32", "bf16"]


def test_of_many_settings_two_are_drawn_and_the_others_are_counted() -> None:
    records: list[Record] = []
    for size in (1, 2, 3, 4):
        pair = record(timed(), "fp32", is_reference=True, control=timed()), record(timed(), "bf16")
        records += [replace(made, case=replace(made.case, params=(("m", size),))) for made in pair]
    run = run_of(records)
    elements = part("phases", (run, findings(run)))
    assert [chart.folded for chart in of_kind(elements, Stacks) if chart.pieces] == [False, True]
    assert "timelines of 2 more settings are left out" in " ".join(text.text for text in of_kind(elements, Text))
