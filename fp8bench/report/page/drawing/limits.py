"""How much of a chart is drawn; what is left over stands in the table beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fp8bench.report.elements import Bars, ChartPoint, Heat, Mark, Scatter, Stacks, Strips
from fp8bench.report.panels import together

BARS = 25
ROWS = 25
CELLS = 40
PLACES = 200
SERIES = 8
DOTS = 40
LABELS = 12
POINTS = 400
# Marks of one drawing that can be pointed at, where lines have more: a page of tab stops helps nobody.
POINTED = {False: 120, True: 60}
# Where a map has more cells than this, they can be pointed at, and not tabbed to.
TABBED = 400

# Beyond these a difference of two values, or a step between ticks, is no number any more.
_SMALLEST, _LARGEST = 1e-300, 1e300


def drawable(value: float | None, log: bool = False) -> bool:
    """Whether a value has a place on an axis: finite, not absurd, and above zero where the axis is logarithmic."""
    if value is None or not math.isfinite(value) or abs(value) > _LARGEST:
        return False
    return value >= _SMALLEST if log else True


def on_ratios(chart: Bars) -> bool:
    """Ratios stand on a logarithmic axis, so that 2x and 0.5x are equally far from 1x."""
    return chart.axis.log or (chart.axis.unit == "x" and chart.start > 0)


def bars_drawn(chart: Bars) -> tuple[tuple[str, tuple[Mark, ...]], ...]:
    """The first bars with a value, under their headings; a group without any has no heading either."""
    marks = [((place, heading), mark) for place, (heading, own) in enumerate(chart.groups) for mark in own]
    groups = together([pair for pair in marks if drawable(pair[1].value, on_ratios(chart))][:BARS])
    return tuple((heading, tuple(own)) for (_, heading), own in groups.items())


def stack_rows(chart: Stacks) -> tuple[tuple[str, tuple[float, ...]], ...]:
    return tuple(row for row in chart.rows if any(map(part_drawable, row[1])))


def part_drawable(value: float) -> bool:
    """Whether a part of a whole can be drawn; one that is negative cannot."""
    return drawable(value, log=True)


def strip_rows(chart: Strips) -> tuple[tuple[str, tuple[float, ...], str], ...]:
    rows = ((label, tuple(filter(drawable, samples)), tone.value) for label, samples, tone in chart.rows)
    return tuple(row for row in rows if row[1])


def cells_drawn(chart: Heat) -> list[list[float | None]]:
    return [[value if drawable(value, log=True) else None for value in row[:CELLS]] for row in chart.values[:CELLS]]


def points_placed(chart: Scatter) -> list[ChartPoint]:
    return [
        point
        for point in chart.points
        if drawable(point.y, chart.y.log) and (point.x is None or drawable(point.x, chart.x.log))
    ]


def points_drawn(placed: list[ChartPoint]) -> list[ChartPoint]:
    """All of them, or of more than can be told apart each one in so many."""
    return placed[:: max(1, -(-len(placed) // POINTS))]


def numbers_of(marks: Iterable[Mark]) -> list[float]:
    return [value for mark in marks for value in (mark.value, mark.low, mark.high) if value is not None]


def placeless(values: Iterable[float], log: bool = False) -> int:
    return sum(not drawable(value, log) for value in values)
