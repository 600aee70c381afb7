"""Charts without their drawings: which are worth drawing, stacked bars, and each chart as the table of its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from fp8bench import units
from fp8bench.model import UNATTRIBUTED
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import (
    AnyChart,
    Bars,
    ChartAxis,
    Field,
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


def numbers_table(chart: AnyChart) -> Table:
    """Returns a table with every number of the chart, and its marks' hints."""
    return table(f"{chart.name}-numbers", f"{chart.title}: numbers", *_content(chart))


def _content(chart: AnyChart) -> tuple[Sequence[Col[Any]], Sequence[Any]]:
    """Returns columns and rows; rows of marks and points end with them."""
    match chart:
        case Bars():
            # A single group has no heading.
            named = any(title for title, _ in chart.groups)
            bars: list[tuple[str, Mark]] = []
            for title, marks in chart.groups:
                bars += [(title, mark) for mark in marks]
            group = Col("group", itemgetter(0), when=named)
            return [group, Col("case", _name), *_ends(chart.axis), _notes(bars)], bars
        case Lines():
            lines: list[tuple[str, str, Mark]] = []
            for index, place in enumerate(chart.places):
                at_place = [(name, marks[index]) for name, marks in chart.series]
                lines += [(place, name, mark) for name, mark in at_place if mark is not None]
            series = Col("series", itemgetter(1), tone=lambda row: row[-1].tone)
            return [Col("at", itemgetter(0)), series, *_ends(chart.axis), _notes(lines)], lines
        case Scatter():
            points = [(point.series, point) for point in chart.points]
            axes = [_number(axis.title, attrgetter(name), axis) for name, axis in (("x", chart.x), ("y", chart.y))]
            return [Col("series", itemgetter(0)), Col("case", _name), *axes, _notes(points)], points
        case Stacks():
            parts = [_at(chart.parts[part], part, chart.axis.unit) for part in chart.present]
            return [Col("case", itemgetter(0)), *parts], chart.rows


def _name(row: Sequence[Any]) -> Field:
    return Field(row[-1].label, tone=row[-1].tone)


def _number(title: str, of: Callable[[Any], float | None], axis: ChartAxis) -> Col[Any]:
    return Col(title, lambda row: of(row[-1]), number=True, unit=axis.unit, show=axis.show)


def _at(title: str, place: int, unit: str = "") -> Col[Any]:
    """Returns a column for rows that end with their values."""
    return Col(title, lambda row: row[-1][place], number=True, unit=unit)


def _ends(axis: ChartAxis) -> Sequence[Col[Any]]:
    names = {axis.title: "value", "low": "low", "high": "high"}
    return [_number(title, attrgetter(name), axis) for title, name in names.items()]


def _notes(rows: Sequence[Sequence[Any]]) -> Col[Any]:
    return Col("notes", lambda row: row[-1].hint, when=any(row[-1].hint for row in rows))
