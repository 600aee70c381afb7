"""Charts without their drawings: which are worth drawing, stacked bars, and each chart as the table of its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.model import UNATTRIBUTED
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    ChartPoint,
    Lines,
    Mark,
    Scatter,
    Stacks,
    Table,
)
from fp8bench.report.panels import Result, phases_of
from fp8bench.report.words.naming import phase_order, phase_words

# Fewer points are easier to read as numbers.
_LEAST_POINTS = 3
# If the largest whole exceeds the smallest by this factor, bars of one unit would hide the parts of the small ones.
_WIDE = 8.0


def worth_drawing(chart: AnyChart) -> bool:
    """Whether a chart shows more than a table would: at least three points, in more than one column."""
    return _points(chart) >= _LEAST_POINTS


def _points(chart: AnyChart) -> int:
    match chart:
        case Bars():
            marks = itertools.chain.from_iterable(marks for _, marks in chart.groups)
            return sum(1 + len(mark.samples) for mark in marks)
        case Scatter():
            return len(chart.points)
        case Stacks():
            return sum(len(values) - values.count(0) for _, values in chart.rows)
        case Lines():
            return len(chart.places)


def stack_parts(
    name: str,
    title: str,
    description: str,
    axis: ChartAxis,
    share: str,
    parts: Mapping[str, str],
    rows: Sequence[tuple[str, float, Mapping[str, float]]],
) -> Stacks:
    """Makes bars of (label, whole, its parts); `parts` are all possible ones, in order, with their words.

    If wholes differ widely, bars are shares, with the whole in the label.
    """
    totals = [total for _, total, _ in rows]
    # One long step would make the parts of the others too thin to see.
    as_shares = max(totals) > _WIDE * min(totals)
    bars = []
    for label, total, sizes in rows:
        values = [sizes.get(part, 0.0) for part in parts]
        words = label
        if as_shares:
            words += f", {units.describe(total, axis.unit)}"
            values = [100 * value / (total or 1.0) for value in values]
        bars.append((words, tuple(values)))
    bar_axis = ChartAxis(share, "%") if as_shares else axis
    return Stacks(name, title, description, bar_axis, tuple(parts.values()), tuple(bars))


def has_time(result: Result) -> bool:
    return result.best is not None and 0 < result.best < math.inf


def phase_parts(results: Iterable[Result]) -> dict[str, str]:
    """Returns the phases of these results in order, with words; the same everywhere, so that each has one colour."""
    # Every step has unattributed time.
    names = {UNATTRIBUTED}
    for result in filter(has_time, results):
        names |= {name for name, seconds in phases_of(result) if 0 < seconds < math.inf}
    return {name: phase_words(name) for name in sorted(names, key=phase_order)}


class _NumbersRow(NamedTuple):
    """A mark or point with its labels."""

    first: str
    second: str
    mark: Mark | ChartPoint


def numbers_table(chart: AnyChart) -> Table:
    """Returns a table with every number of the chart, and its marks' hints."""
    caption = f"{chart.title}: numbers"
    name = f"{chart.name}-numbers"
    if isinstance(chart, Stacks):
        parts: list[Col[Any]] = [Col("case", itemgetter(0))]
        for part in chart.present:
            values = partial(lambda part, row: row[1][part], part)
            parts.append(Col(chart.parts[part], values, number=True, unit=chart.axis.unit))
        return table(name, caption, parts, chart.rows)
    rows = []
    headings = ("group", "case")
    match chart:
        case Bars():
            for title, marks in chart.groups:
                rows += [_NumbersRow(title, mark.label, mark) for mark in marks]
            numbers = _number_cols(chart.axis)
        case Lines():
            headings = ("at", "series")
            for index, place in enumerate(chart.places):
                at_place = [(series, marks[index]) for series, marks in chart.series]
                rows += [_NumbersRow(place, series, mark) for series, mark in at_place if mark is not None]
            numbers = _number_cols(chart.axis)
        case Scatter():
            headings = ("series", "case")
            rows = [_NumbersRow(point.series, point.label, point) for point in chart.points]
            numbers = [_number_col(chart.x.title, "x", chart.x), _number_col(chart.y.title, "y", chart.y)]
    cols: Cols[_NumbersRow] = [
        # A single group has no heading.
        Col(headings[0], "first", when=any(row.first for row in rows) or not isinstance(chart, Bars)),
        Col(headings[1], "second", tone=lambda row: row.mark.tone),
        *numbers,
        Col("notes", "mark.hint", when=any(row.mark.hint for row in rows)),
    ]
    return table(name, caption, cols, rows)


def _number_col(title: str, name: str, axis: ChartAxis) -> Col[_NumbersRow]:
    return Col(title, f"mark.{name}", number=True, unit=axis.unit, show=axis.show)


def _number_cols(axis: ChartAxis) -> list[Col[_NumbersRow]]:
    return [_number_col(axis.title, "value", axis), _number_col("low", "low", axis), _number_col("high", "high", axis)]
