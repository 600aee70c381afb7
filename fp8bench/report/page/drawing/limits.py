"""How much of a chart is drawn; what is left over stands in the table beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fp8bench.report.elements import Bars, Chart, Heat, Lines, Mark, Point, Scatter, Stacks, Strips, Waterfall

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

Drawable = Bars | Scatter | Stacks | Heat | Lines | Strips | Waterfall

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
    room = BARS
    groups = []
    for heading, marks in chart.groups:
        shown = tuple(mark for mark in marks if drawable(mark.value, on_ratios(chart)))[:room]
        room -= len(shown)
        if shown:
            groups.append((heading, shown))
    return tuple(groups)


def stack_rows(chart: Stacks) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """The rows that have a part to draw, with a value for each part at most."""
    rows = tuple((label, values[: len(chart.parts)]) for label, values in chart.rows)
    return tuple((label, values) for label, values in rows if any(part_drawable(value) for value in values))


def part_drawable(value: float) -> bool:
    """Whether a part of a whole can be drawn; one that is negative cannot."""
    return drawable(value, log=True)


def strip_rows(chart: Strips) -> tuple[tuple[str, tuple[float, ...], str], ...]:
    """The rows that have a sample to draw, each with those samples alone."""
    rows = []
    for label, samples, tone in chart.rows:
        kept = tuple(value for value in samples if drawable(value, chart.axis.log))
        if kept:
            rows.append((label, kept, tone.value))
    return tuple(rows)


def _has_place(chart: Scatter, point: Point) -> bool:
    return drawable(point.y, chart.y.log) and (point.x is None or drawable(point.x, chart.x.log))


def points_placed(chart: Scatter) -> list[Point]:
    """The points that have a place on the axes, or in the margin."""
    return [point for point in chart.points if _has_place(chart, point)]


def points_drawn(placed: list[Point]) -> list[Point]:
    """All of them, or of more than can be told apart each one in so many."""
    return placed[:: max(1, -(-len(placed) // POINTS))]


def left_out(chart: Drawable) -> int:
    """How many bars, rows, cells or marks a drawing has no room for; those without a value are not among them."""
    match chart:
        case Bars():
            found = sum(drawable(mark.value, on_ratios(chart)) for _, marks in chart.groups for mark in marks)
            return max(0, found - BARS)
        case Stacks():
            return max(0, len(stack_rows(chart)) - ROWS)
        case Waterfall():
            return max(0, sum(drawable(mark.value) for mark in chart.changes) - ROWS)
        case Strips():
            return max(0, len(strip_rows(chart)) - ROWS)
        case Heat():
            drawn = sum(drawable(value) for row in chart.values[:CELLS] for value in row[:CELLS])
            return sum(drawable(value) for row in chart.values for value in row) - drawn
        case Lines():
            return _marks(chart.series, 0, chart.axis.log) - _marks(chart.series[:SERIES], -PLACES, chart.axis.log)
        case Scatter():
            placed = points_placed(chart)
            return len(placed) - len(points_drawn(placed))


def _marks(series: Iterable[tuple[str, tuple[Mark | None, ...]]], first: int, log: bool) -> int:
    return sum(drawable(mark.value, log) for _, marks in series for mark in marks[first:] if mark is not None)


def described(chart: Chart, missing: int, left: int, *notes: str) -> str:
    """The description of a chart, with what the drawing does not show."""
    sentences = [chart.description.strip(), *notes]
    if missing:
        numbers = "1 number is" if missing == 1 else f"{missing} numbers are"
        sentences.append(f"{numbers} not finite or without a place on the axis, and not drawn.")
    if left:
        sentences.append(f"{left} more {'is' if left == 1 else 'are'} in the table only.")
    return " ".join(sentence for sentence in sentences if sentence)
