"""Strips: the samples of each row as dots, so that two humps are seen as two humps.

A row with many samples shows some of them, chosen evenly over their sorted order: as many dots on either side of any
value as there are samples, in proportion, with the smallest and the largest among them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fp8bench.report.drawing.figure import Sheet, nothing
from fp8bench.report.drawing.finish import Hint
from fp8bench.report.drawing.limits import DOTS, ROWS, described, drawable, left_out, strip_rows
from fp8bench.report.drawing.marks import worded
from fp8bench.report.drawing.rows import Row, arranged, foot
from fp8bench.report.drawing.scale import Scale, limits, shown
from fp8bench.report.elements import Strips

# Dots this close stand above each other, in so many places around the row's middle.
_APART = 4.5
_PLACES = (0.0, -4.5, 4.5, -9.0, 9.0)


def draw_strips(chart: Strips, narrow: bool) -> str:
    rows = strip_rows(chart)[:ROWS]
    missing = sum(not drawable(value, chart.axis.log) for _, samples, _ in chart.rows for value in samples)
    note = f"Of more than {DOTS} samples {DOTS} are drawn, chosen evenly over their sorted order."
    many = any(len(samples) > DOTS for _, samples, _ in rows)
    description = described(chart, missing, left_out(chart), note if many else "")
    if not rows:
        return nothing(chart, description, narrow)
    sheet = Sheet(chart, narrow)
    places = arranged(sheet, [("", [label for label, _, _ in rows])], 32.0)
    unit = chart.axis.unit
    low, high = limits((value for _, samples, _ in rows for value in samples), chart.axis.log, unit, pad=0.01)
    scale = Scale(low, high, places.left + 4, sheet.width - 4, chart.axis.log, unit)
    end = foot(sheet, scale, chart.axis, places)
    for (label, samples, tone), place in zip(rows, places.rows, strict=True):
        sheet.box("mark band", 0, place.top, sheet.width, place.height, hint=_hint(label, samples, unit))
        _dots(sheet, tone, [scale.at(value) for value in chosen(samples)], place)
        middle = scale.at(statistics.median(samples))
        sheet.lines("median", [[(middle, place.y - 12), (middle, place.y + 12)]])
    return sheet.svg(end, description)


def chosen(samples: Sequence[float]) -> list[float]:
    """At most DOTS of the samples, evenly over their sorted order, the ends among them."""
    ordered = sorted(samples)
    if len(ordered) <= DOTS:
        return ordered
    return [ordered[round(number * (len(ordered) - 1) / (DOTS - 1))] for number in range(DOTS)]


def _dots(sheet: Sheet, tone: str, places: list[float], row: Row) -> None:
    """All dots of a row as one path of points, which round ends make dots; close ones stand above each other."""
    last: dict[float, float] = {}
    points = []
    for x in places:
        free = [offset for offset in _PLACES if x - last.get(offset, -1e9) >= _APART]
        offset = free[0] if free else min(_PLACES, key=lambda one: last[one])
        last[offset] = x
        points.append([(x, row.y + offset), (x, row.y + offset)])
    sheet.lines(f"dots {tone}", points)


def _hint(label: str, samples: Sequence[float], unit: str) -> Hint:
    """What a row says of its samples."""
    middle = shown(statistics.median(samples), unit)
    low, high = shown(min(samples), unit), shown(max(samples), unit)
    count = "1 sample" if len(samples) == 1 else f"{len(samples)} samples from {low} to {high}"
    return worded(label, f"median {middle}", count)
