"""Charts as tables of their numbers."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.report.elements import (
    AnyChart,
    ChartAxis,
    Heat,
    Mark,
    Stacks,
    Strips,
    Table,
    Tone,
    Waterfall,
)
from fp8bench.report.page.charts import numbers_table, stacked, worth_drawing
from tests.counts import for_each
from tests.pages import bars, charts


def texts(table: Table) -> list[list[str]]:
    return [[column.title for column in table.columns], *([field.text for field in row] for row in table.rows)]


@for_each("chart", charts(), ids=lambda chart: type(chart).__name__)
def test_every_kind_has_numbers(chart: AnyChart) -> None:
    """Rows as wide as the head, numbers with their values, units in the columns."""
    table = numbers_table(chart)
    assert table.name == f"{chart.name}-numbers" and chart.title in table.caption and not table.main
    assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    for place, column in enumerate(table.columns):
        known = [row[place] for row in table.rows if row[place].text != "-"]
        assert all((field.value is not None) == column.number for field in known)


def test_strips() -> None:
    """Samples are summed up by their quartiles; those that are not finite count, and sum up to nothing."""
    rows = (
        ("five", (5.0, 1.0, 2.0, 4.0, 3.0), Tone.PLAIN),
        ("one", (7.0,), Tone.PLAIN),
        ("none", (), Tone.PLAIN),
        ("broken", (math.nan, math.inf), Tone.BAD),
    )
    table = numbers_table(Strips("a", "A", "", ChartAxis("time"), rows))
    assert texts(table)[1:] == [
        ["five", "5", "1.00", "2.00", "3.00", "4.00", "5.00"],
        ["one", "1", *["7.00"] * 5],
        ["none", "0", *["-"] * 5],
        ["broken", "2", *["-"] * 5],
    ]


def test_a_part_that_no_row_has_is_no_column() -> None:
    """Nor is it in the legend: whole pages share one order of phases, and with it their colours."""
    chart = Stacks(
        "c",
        "Title",
        "words",
        ChartAxis("time", "s"),
        ("a", "b", "c"),
        (("one", (1.0, 0.0, 0.0)), ("two", (2.0, 0.0, 3.0))),
    )
    assert chart.present == (0, 2)
    assert [column.title for column in numbers_table(chart).columns] == ["case", "a", "c"]


def test_what_is_worth_drawing() -> None:
    """Three points, in more than one column: of the page by hand all charts but the one of two commits."""
    assert [worth_drawing(chart) for chart in charts()] == [True, True, True, True, False, True, True, True]
    two, ratio = bars().groups[0][1][:2], ChartAxis("speed-up", "x")
    assert not worth_drawing(replace(bars(), groups=(("", two),)))
    assert not worth_drawing(Heat("a", "A", "", ("r", "s", "t"), ("c",), ((1.0,), (2.0,), (3.0,)), ratio, ()))
    assert not worth_drawing(Waterfall("a", "A", "", ratio, ("b", 1.0), (Mark("c", 1.0),), ("d", 2.0)))


def test_stacks_far_apart_are_shares() -> None:
    """In seconds the parts of the short one would be a line; labels say how long each is."""
    axis = ChartAxis("time", "s")
    parts, halves = {"p": "p", "q": "q"}, {"p": 1.0, "q": 1.0}
    near = stacked("n", "N", "", axis, "share", parts, (("a", 2.0, halves), ("b", 4.0, {"p": 4.0})))
    assert (near.axis, near.rows) == (axis, (("a", (1.0, 1.0)), ("b", (4.0, 0.0))))
    far = stacked("n", "N", "", axis, "share", parts, (("a", 2.0, halves), ("b", 40.0, {"p": 40.0})))
    assert far.axis == ChartAxis("share", "%")
    assert far.rows == (("a, 2.00 s", (50.0, 50.0)), ("b, 40.0 s", (100.0, 0.0)))
