"""Draws any chart; here also small charts in rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from fp8bench import units
from fp8bench.report.elements import AnyChart, Bars, Lines, Scatter, Sparks, Stacks
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import arranged, draw_bars, draw_stacks, legend
from fp8bench.report.page.drawing.scale import ROWS, Scale, drawable, placeless, shortened, worded
from fp8bench.report.page.drawing.sheet import SHAPES, Sheet

_ROW, _BETWEEN_COLUMNS = 36.0, 14.0
# A row shows at least this many octaves above and below the median; early values beyond its range stand at its edge.
_LEAST_OCTAVES = 1.0


def draw_sparks(sheet: Sheet, chart: Sparks) -> float:
    every = [value for _, cells in chart.rows for lines in cells for values in lines for value in values]
    sheet.omit(placeless((value for value in every if value is not None), log=True), len(chart.rows) - ROWS)
    rows = chart.rows[:ROWS]
    moved = [_octaves(values) for _, cells in rows for lines in cells for values in lines]
    if not any(octave is not None for octaves in moved for octave in octaves):
        return 0.0
    late = (octaves[len(octaves) // 3 :] for octaves in moved)  # the first steps would flatten the others
    reach = max([_LEAST_OCTAVES, *(abs(octave) for octaves in late for octave in octaves if octave is not None)])
    named = [(SHAPES[number], f"point s{number + 1}", name) for number, name in enumerate(chart.series)]
    top = legend(sheet, named, 0.0)
    sheet.text(
        0,
        top + 8,
        shortened(
            f"a row: {reach:.2g} octaves up and down, from {chart.places[0]} to {chart.places[-1]}",
            sheet.width,
            sheet.size,
        ),
        "quiet",
    )
    placed = arranged(sheet, [("", [name for name, _ in rows])], _ROW, top + 44)
    wide = (sheet.width - placed.left + _BETWEEN_COLUMNS) / len(chart.columns)
    for column, title in enumerate(chart.columns):
        sheet.text(
            placed.left + column * wide, top + 34, shortened(title, wide - _BETWEEN_COLUMNS, sheet.size), "heading"
        )
    for (name, cells), row in zip(rows, placed.rows, strict=True):
        for column, lines in enumerate(cells):
            left = placed.left + column * wide
            x = Scale(0.0, max(1.0, len(chart.places) - 1.0), left, left + wide - _BETWEEN_COLUMNS)
            y = Scale(-reach, reach, row.y + _ROW / 2 - 4, row.y - _ROW / 2 + 4)
            _draw_cell(sheet, chart, (name, chart.columns[column]), lines, x, y)
    return placed.bottom + 4


def _octaves(values: Sequence[float | None]) -> list[float | None]:
    """How far each lies from their median; None for what has no logarithm."""
    logs = [math.log2(value) if value is not None and drawable(value, log=True) else None for value in values]
    middle = median([log for log in logs if log is not None] or [0.0])
    return [None if log is None else log - middle for log in logs]


def _draw_cell(
    sheet: Sheet, chart: Sparks, names: tuple[str, str], lines: Sequence[Sequence[float | None]], x: Scale, y: Scale
) -> None:
    if not any(value is not None for values in lines for value in values):
        return
    sheet.lines("grid", [[(x.start, y.at(0.0)), (x.end, y.at(0.0))]], layer=0)
    said = []
    for number, values in enumerate(lines):
        places = enumerate(_octaves(values))
        runs = [[(x.at(place), y.at(octave)) for place, octave in run if octave is not None]
                for known, run in groupby(places, key=lambda pair: pair[1] is not None) if known]  # fmt: skip
        for run in runs:
            start, end = run[0], run[-1] if len(run) > 1 else (run[0][0] + 2, run[0][1])
            sheet.lines(f"line s{number + 1}", [run if len(run) > 1 else [start, end]])
        known = [value for value in values if value is not None and drawable(value, log=True)]
        if known:
            least, most, last = map(units.significant, (min(known), max(known), known[-1]))
            said.append(f"{chart.series[number]} from {least} to {most}, last {last}")
    hint = worded(", ".join(names), "; ".join(said))
    sheet.box("band mark", x.start, y.end, x.end - x.start, y.start - y.end, hint=hint)


# Functions that draw a class of charts and return the height; 0 if there is nothing to draw.
_DRAWN_BY: dict[type[AnyChart], Callable[[Sheet, Any], float]] = {
    Bars: draw_bars,
    Scatter: draw_scatter,
    Stacks: draw_stacks,
    Lines: draw_lines,
    Sparks: draw_sparks,
}


def draw_on(sheet: Sheet, chart: AnyChart) -> float:
    """Draws the chart, and returns its height."""
    end = _DRAWN_BY[type(chart)](sheet, chart)
    if not end:
        sheet.text(0, 14, "Nothing to draw: no value here has a place on the axis.", "quiet")
    return end or 28.0


def draw(chart: AnyChart) -> str:
    """A chart as two SVGs, for a window and for a telephone; charts.css shows the one that fits."""
    sheets = (Sheet(chart, narrow) for narrow in (False, True))
    return "\n".join(sheet.svg(draw_on(sheet, chart)) for sheet in sheets)
