"""Charts as tables of their numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    Heat,
    Mark,
    Scatter,
    Stacks,
    Strips,
    Table,
    Tone,
    Waterfall,
)
from fp8bench.report.page.charts import numbers_table, stacked, worth_drawing
from tests.pages import bars, charts

S = ChartAxis("time", "s")


def texts(table: Table) -> list[list[str]]:
    return [[column.title for column in table.columns], *([field.text for field in row] for row in table.rows)]


@pytest.mark.parametrize("chart", charts(), ids=lambda chart: type(chart).__name__)
def test_every_kind_has_numbers(chart: AnyChart) -> None:
    """Rows as wide as the head, numbers with their values, units in the columns."""
    table = numbers_table(chart)
    assert table.name == f"{chart.name}-numbers" and chart.title in table.caption and not table.main
    assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    for place, column in enumerate(table.columns):
        known = [row[place] for row in table.rows if row[place].text != "-"]
        assert all((field.value is not None) == column.number for field in known)


def test_bars() -> None:
    """Groups where they have names, intervals, the words of the hints; the tone stays with the case."""
    rows = texts(numbers_table(bars()))
    assert rows[0] == ["group", "case", "speed-up over bf16", "low", "high", "notes"]
    assert rows[1] == [
        "transformer width=256", "fp8", "1.900x", "1.850x", "1.950x", "fp8: 1.90x, 99% interval [1.85, 1.95]",
    ]  # fmt: skip
    plain = numbers_table(Bars("a", "A", "", S, (("", (Mark("x", 0.5, tone=Tone.DOUBT),)),)))
    assert texts(plain) == [["case", "time", "low", "high"], ["x", "500 ms", "-", "-"]]
    assert plain.rows[0][0].tone is Tone.DOUBT and plain.columns[1].unit == "s"


def test_scatter() -> None:
    """A point without x has none here either."""
    scatter = next(chart for chart in charts() if isinstance(chart, Scatter))
    rows = texts(numbers_table(scatter))
    assert rows[1] == ["fp8", "fp8 small", "1.600x", "0.0300", ""]
    assert rows[-1] == ["mxfp4", "mxfp4", "-", "0.160", "emulated"]


def test_stacks_and_heat() -> None:
    """Rows and columns as they are drawn; what there is none of is a dash; hints stay with their fields."""
    stacks = Stacks("a", "A", "", ChartAxis("share"), ("one", "two"), (("x", (1.0, math.inf)),))
    assert texts(numbers_table(stacks)) == [["case", "one", "two"], ["x", "1.00", "inf"]]
    heat = Heat("a", "A", "", ("r",), ("c", "d"), ((1.5, None),), ChartAxis("ratio", "x"), hints=(("why", ""),))
    table = numbers_table(heat)
    assert texts(table) == [["", "c", "d"], ["r", "1.500x", "-"]] and table.rows[0][1].hint == "why"


def test_lines() -> None:
    """A row for each place and series that has a mark there, in the order of places."""
    lines = charts()[4]
    assert texts(numbers_table(lines)) == [
        ["at", "series", "time of a step", "low", "high"],
        ["a1b2c3d4", "fp8", "12.0 ms", "11.0 ms", "13.0 ms"],
        ["b2c3d4e5", "bf16", "24.0 ms", "-", "-"],
    ]


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


def test_a_waterfall() -> None:
    """Both wholes, and between them every change."""
    rows = texts(numbers_table(charts()[7]))
    assert rows == [
        ["step", "time of a step"], ["bf16", "24.0 ms"], ["cast", "1.00 ms"], ["gemm", "-8.00 ms"],
        ["the rest", "0 s"], ["fp8", "17.0 ms"],
    ]  # fmt: skip


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
