"""Charts as tables of their numbers."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.report.elements import AnyChart, ChartAxis, Stacks
from fp8bench.report.page.charts import is_worth_drawing, make_stack_chart, numbers_table
from tests.counts import for_each
from tests.pages import bars, charts
from tests.told_before import Told, as_before


@for_each("chart", charts(), ids=lambda chart: type(chart).__name__)
def test_every_kind_has_numbers(chart: AnyChart) -> None:
    table = numbers_table(chart)
    assert table.name == f"{chart.name}-numbers" and chart.title in table.caption and not table.main
    assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    for place, column in enumerate(table.columns):
        known = [row[place] for row in table.rows if row[place].text != "-"]
        assert all((field.value is not None) == column.number for field in known)


@as_before
def test_numbers_of_charts() -> Told:
    stacks = (("one", (1.0, 0.0, 0.0)), ("two", (2.0, 0.0, 3.0)))
    yield (
        "a part that no row has is no column",
        Stacks("c", "C", "", ChartAxis("time", "s"), ("a", "b", "c"), stacks),
    )
    parts, halves = {"p": "p", "q": "q"}, {"p": 1.0, "q": 1.0}
    for claim, long in (("near each other are seconds", 4.0), ("far apart are shares, with their length", 40.0)):
        wholes = (("a", 2.0, halves), ("b", long, {"p": long}))
        yield f"stacks {claim}", make_stack_chart("n", "N", "", ChartAxis("time", "s"), "share", parts, wholes)


def test_what_is_worth_drawing() -> None:
    """Three points, in more than one column."""
    assert [is_worth_drawing(chart) for chart in charts()] == [True, True, True, False]
    two = bars().groups[0][1][:2]
    assert not is_worth_drawing(replace(bars(), groups=(("", two),)))
