"""Bars: one value a row with its interval, from a common start."""

from __future__ import annotations

import math

from fp8bench.report.drawing.figure import Sheet, nothing
from fp8bench.report.drawing.limits import bars_drawn, described, drawable, left_out, on_ratios
from fp8bench.report.drawing.marks import ends, hint
from fp8bench.report.drawing.rows import Row, Rows, arranged, foot
from fp8bench.report.drawing.scale import Scale, limits, shown
from fp8bench.report.elements import Bars, Mark

_THICK = 14.0
_CAP = 3.5
_GAP = 8.0
# A bar that ends where it starts is still seen.
_THINNEST = 2.0


def draw_bars(chart: Bars, narrow: bool) -> str:
    groups = bars_drawn(chart)
    marks = [mark for _, group in groups for mark in group]
    description = described(chart, _missing(chart), left_out(chart))
    if not marks:
        return nothing(chart, description, narrow)
    sheet = Sheet(chart, narrow)
    labels = [(heading, [mark.label for mark in group]) for heading, group in groups]
    rows = arranged(sheet, labels, 22.0 if narrow else 28.0)
    scale = _scale(chart, marks, sheet, rows.left)
    end = foot(sheet, scale, chart.axis, rows)
    start = scale.at(_start(chart, scale.low))
    for mark, row in zip(marks, rows.rows, strict=True):
        _bar(sheet, chart, mark, row, scale, start)
    sheet.lines("axis", [[(start, above), (start, below)] for above, below in _start_lines(rows, narrow)])
    return sheet.svg(end, description)


def _missing(chart: Bars) -> int:
    """Values, and ends of intervals, without a place on the axis."""
    log = on_ratios(chart)
    values = [
        value
        for _, marks in chart.groups
        for mark in marks
        for value in (mark.value, mark.low, mark.high)
        if value is not None
    ]
    return sum(not drawable(value, log) for value in values)


def _scale(chart: Bars, marks: list[Mark], sheet: Sheet, left: float) -> Scale:
    """An axis with room for the values at the ends of the bars, on the side to which these point."""
    log = on_ratios(chart)
    values = [value for mark in marks for value in (mark.value, *ends(mark, log))]
    values.append(_start(chart, min(values)))
    low, high = limits(values, log, chart.axis.unit)
    room = {True: 0.0, False: 0.0}
    for mark in marks:
        side = mark.value < chart.start
        room[side] = max(room[side], sheet.measure(shown(mark.value, chart.axis.unit)) + _GAP + 2)
    return Scale(low, high, left + room[True] + 2, sheet.width - room[False] - 2, log, chart.axis.unit)


def _start(chart: Bars, least: float) -> float:
    """Where bars begin; without a start on the axis at the power of ten below the least value, so that all are seen."""
    log = on_ratios(chart)
    if drawable(chart.start, log):
        return chart.start
    return 10.0 ** (math.ceil(math.log10(least)) - 1) if log else min(0.0, least)


def _start_lines(rows: Rows, narrow: bool) -> list[tuple[float, float]]:
    """From where to where the start is marked: along rows, not through the labels and headings above them."""
    if narrow:
        return [(row.y - 12, row.y + 12) for row in rows.rows]
    spans: list[tuple[float, float]] = []
    for row in rows.rows:
        together = bool(spans) and spans[-1][1] == row.top
        spans[-1 if together else len(spans) :] = [(spans[-1][0] if together else row.top, row.top + row.height)]
    return spans


def _bar(sheet: Sheet, chart: Bars, mark: Mark, row: Row, scale: Scale, start: float) -> None:
    """One row: a band to point at, the bar, its interval, its value."""
    unit, style = chart.axis.unit, mark.tone.value
    sheet.box("mark band", 0, row.top, sheet.width, row.height, layer=1, hint=hint(mark, unit))
    end = scale.at(mark.value)
    back = end < start or (end == start and mark.value < chart.start)
    thick = max(_THINNEST, abs(end - start))
    sheet.box(f"bar {style}", start - thick if back else start, row.y - _THICK / 2, thick, _THICK)
    reach = [end] + [scale.at(value) for value in ends(mark, scale.log)]
    if len(reach) == 3:
        low, high = reach[1:]
        caps = [[(x, row.y - _CAP), (x, row.y + _CAP)] for x in (low, high)]
        sheet.lines("whisker", [[(low, row.y), (high, row.y)], *caps])
    x = min(reach) - _GAP if back else max(*reach, start) + _GAP
    sheet.text(x, row.y, shown(mark.value, unit), f"value {style}", anchor="end" if back else "start")
