"""How much of a chart is drawn; what is left over stands in the table beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fp8bench.report.elements import AnyChart, Bars, Heat, Lines, Mark, Point, Scatter, Stacks, Strips, Waterfall
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
    """The rows that have a part to draw."""
    return tuple(row for row in chart.rows if any(map(part_drawable, row[1])))


def part_drawable(value: float) -> bool:
    """Whether a part of a whole can be drawn; one that is negative cannot."""
    return drawable(value, log=True)


def strip_rows(chart: Strips) -> tuple[tuple[str, tuple[float, ...], str], ...]:
    """The rows that have a sample to draw, each with those samples alone."""
    rows = ((label, tuple(filter(drawable, samples)), tone.value) for label, samples, tone in chart.rows)
    return tuple(row for row in rows if row[1])


def cells_drawn(chart: Heat) -> list[list[float | None]]:
    """The values of a map that find room; None where there is none with a place."""
    return [[value if drawable(value, log=True) else None for value in row[:CELLS]] for row in chart.values[:CELLS]]


def points_placed(chart: Scatter) -> list[Point]:
    """The points that have a place on the axes, or in the margin."""
    return [
        point
        for point in chart.points
        if drawable(point.y, chart.y.log) and (point.x is None or drawable(point.x, chart.x.log))
    ]


def points_drawn(placed: list[Point]) -> list[Point]:
    """All of them, or of more than can be told apart each one in so many."""
    return placed[:: max(1, -(-len(placed) // POINTS))]


def described(chart: AnyChart) -> str:
    """The description of a chart, with what the drawing does not show."""
    sentences = [chart.description.strip()]
    if isinstance(chart, Strips) and any(len(samples) > DOTS for _, samples, _ in strip_rows(chart)[:ROWS]):
        sentences.append(f"Of more than {DOTS} samples {DOTS} are drawn, chosen evenly over their sorted order.")
    missing, left = _undrawn(chart)
    if missing:
        numbers = "1 number is" if missing == 1 else f"{missing} numbers are"
        sentences.append(f"{numbers} not finite or without a place on the axis, and not drawn.")
    if left > 0:
        sentences.append(f"{left} more {'is' if left == 1 else 'are'} in the table only.")
    return " ".join(filter(None, sentences))


def _undrawn(chart: AnyChart) -> tuple[int, int]:
    """How many numbers have no place on an axis, and how many bars, rows, cells or marks with one find no room."""
    match chart:
        case Bars():
            log, marks = on_ratios(chart), [mark for _, own in chart.groups for mark in own]
            return _placeless(_numbers(marks), log), sum(drawable(mark.value, log) for mark in marks) - BARS
        case Stacks():
            parts = [value for _, values in chart.rows for value in values if value]
            return _placeless(parts, log=True), len(stack_rows(chart)) - ROWS
        case Waterfall():
            missing = _placeless(mark.value for mark in chart.changes)
            return missing, len(chart.changes) - missing - ROWS
        case Strips():
            samples = (value for _, samples, _ in chart.rows for value in samples)
            return _placeless(samples), len(strip_rows(chart)) - ROWS
        case Heat():
            cells = [value for row in chart.values for value in row if value is not None]
            missing = _placeless(cells, log=True)
            return missing, len(cells) - missing - sum(value is not None for row in cells_drawn(chart) for value in row)
        case Lines():
            marks = [mark for _, own in chart.series for mark in own if mark is not None]
            seen = [mark for _, own in chart.series[:SERIES] for mark in own[-PLACES:] if mark is not None]
            placed, drawn = (sum(drawable(mark.value) for mark in own) for own in (marks, seen))
            return _placeless(_numbers(marks)), placed - drawn
        case Scatter():
            points = points_placed(chart)
            return len(chart.points) - len(points), len(points) - len(points_drawn(points))


def _numbers(marks: Iterable[Mark]) -> list[float]:
    return [value for mark in marks for value in (mark.value, mark.low, mark.high) if value is not None]


def _placeless(values: Iterable[float], log: bool = False) -> int:
    return sum(not drawable(value, log) for value in values)
