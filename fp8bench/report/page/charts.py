"""Decides which charts are worth drawing, builds stacked bars, and lists the numbers of any chart as a table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    ChartMark,
    ChartPoint,
    Lines,
    Scatter,
    Stacks,
    Table,
)

# A chart needs at least this many values. Fewer values are easier to read as numbers.
_MIN_CHART_VALUES = 3
# If the largest total exceeds the smallest by more than this factor, each bar shows shares of its total instead of
# absolute values.
_MAX_RATIO_OF_BARS = 8.0


def is_worth_drawing(chart: AnyChart) -> bool:
    """Returns whether a chart has enough values. A chart of few values would show no more than a table of them."""
    return _count_values(chart) >= _MIN_CHART_VALUES


def _count_values(chart: AnyChart) -> int:
    match chart:
        case Bars():
            group_marks = itertools.chain.from_iterable(marks for _, marks in chart.groups)
            return sum(1 + len(mark.samples) for mark in group_marks)
        case Scatter():
            return len(chart.points)
        case Stacks():
            return sum(len(values) - values.count(0) for _, values in chart.rows)
        case Lines():
            return len(chart.places)


def make_stack_chart(
    name: str,
    title: str,
    description: str,
    axis: ChartAxis,
    share_title: str,
    parts: Mapping[str, str],
    rows: Sequence[tuple[str, float, Mapping[str, float]]],
) -> Stacks:
    """Makes a chart of stacked bars. A row is (label, total, value by part). `parts` has the title of each part of
    a bar, in the order of drawing.

    If the totals differ widely, bars show shares of the total, and the label gives the total.
    """
    row_totals = [total for _, total, _ in rows]
    # On a common axis, one long step would make the parts of short steps too thin to see.
    draws_part_shares = max(row_totals) > _MAX_RATIO_OF_BARS * min(row_totals)
    labelled_stack_bars = []
    for label, total, value_by_part in rows:
        values = [value_by_part.get(part, 0.0) for part in parts]
        stacked_bar_label = label
        if draws_part_shares:
            stacked_bar_label += f", {units.describe(total, axis.unit)}"
            values = [100 * value / (total or 1.0) for value in values]
        labelled_stack_bars.append((stacked_bar_label, tuple(values)))
    bar_axis = ChartAxis(share_title, "%") if draws_part_shares else axis
    return Stacks(name, title, description, bar_axis, tuple(parts.values()), tuple(labelled_stack_bars))


class _ChartNumbersRow(NamedTuple):
    """A row of the table that lists a chart's numbers. It has a mark or a point, and the texts of the two label
    columns.
    """

    first: str
    second: str
    mark: ChartMark | ChartPoint


def numbers_table(chart: AnyChart) -> Table:
    """Returns a table of all numbers in the chart, with the hints of its marks."""
    caption = f"{chart.title}: numbers"
    name = f"{chart.name}-numbers"
    if isinstance(chart, Stacks):
        number_columns: list[Col[Any]] = [Col("case", itemgetter(0))]
        for part in chart.nonzero_part_indices:
            # Bind `part` now. Otherwise all columns would use the last part of the loop.
            get_part_value = partial(lambda part, row: row[1][part], part)
            number_columns.append(Col(chart.parts[part], get_part_value, number=True, unit=chart.axis.unit))
        return table(name, caption, number_columns, chart.rows)
    rows = []
    match chart:
        case Bars():
            headings = ("group", "case")
            for title, marks in chart.groups:
                rows += [_ChartNumbersRow(title, mark.label, mark) for mark in marks]
        case Lines():
            headings = ("at", "series")
            for index, place in enumerate(chart.places):
                series_and_marks_at_index = [(series, marks[index]) for series, marks in chart.series]
                rows += [
                    _ChartNumbersRow(place, series, mark)
                    for series, mark in series_and_marks_at_index
                    if mark is not None
                ]
        case Scatter():
            headings = ("series", "case")
            rows = [_ChartNumbersRow(point.series, point.label, point) for point in chart.points]
    if isinstance(chart, Scatter):
        numbers = [("x", chart.x.title, chart.x), ("y", chart.y.title, chart.y)]
    else:
        numbers = [("value", chart.axis.title, chart.axis), ("low", "low", chart.axis), ("high", "high", chart.axis)]
    columns: ColumnList[_ChartNumbersRow] = [
        # The only group of a bar chart has no heading, so it needs no column.
        Col(headings[0], "first", when=any(row.first for row in rows) or not isinstance(chart, Bars)),
        Col(headings[1], "second", tone=attrgetter("mark.tone")),
    ]
    for attribute, title, axis in numbers:
        columns.append(Col(title, f"mark.{attribute}", number=True, unit=axis.unit, show=axis.show))
    columns.append(Col("notes", "mark.hint", when=any(row.mark.hint for row in rows)))
    return table(name, caption, columns, rows)
