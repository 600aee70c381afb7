"""Small charts in rows and columns: of each line how it moves, on one scale for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from fp8bench import units
from fp8bench.report.elements import Sparks
from fp8bench.report.page.drawing.rows import arranged, legend
from fp8bench.report.page.drawing.scale import ROWS, Scale, drawable, placeless, shortened, worded
from fp8bench.report.page.drawing.sheet import SHAPES, Sheet

_HEIGHT, _BETWEEN = 36.0, 14.0
# Octaves on either side of the middle that a row shows at least. What moves further in first places stands at its edge.
_LEAST = 1.0


def draw_sparks(sheet: Sheet, chart: Sparks) -> float:
    every = [value for _, cells in chart.rows for lines in cells for values in lines for value in values]
    sheet.omit(placeless((value for value in every if value is not None), log=True), len(chart.rows) - ROWS)
    rows = chart.rows[:ROWS]
    moved = [_octaves(values) for _, cells in rows for lines in cells for values in lines]
    if not any(octave is not None for octaves in moved for octave in octaves):
        return 0.0
    late = (octaves[len(octaves) // 3 :] for octaves in moved)  # first steps move most, and would flatten the others
    reach = max([_LEAST, *(abs(octave) for octaves in late for octave in octaves if octave is not None)])
    named = [(SHAPES[number], f"point s{number + 1}", name) for number, name in enumerate(chart.series)]
    top = legend(sheet, named, 0.0)
    text = f"a row: {reach:.2g} octaves up and down, from {chart.places[0]} to {chart.places[-1]}"
    sheet.text(0, top + 8, shortened(text, sheet.width, sheet.size), "quiet")
    found = arranged(sheet, [("", [name for name, _ in rows])], _HEIGHT, top + 44)
    wide = (sheet.width - found.left + _BETWEEN) / len(chart.columns)
    for column, title in enumerate(chart.columns):
        sheet.text(found.left + column * wide, top + 34, shortened(title, wide - _BETWEEN, sheet.size), "heading")
    for (name, cells), row in zip(rows, found.rows, strict=True):
        for column, lines in enumerate(cells):
            left = found.left + column * wide
            x = Scale(0.0, max(1.0, len(chart.places) - 1.0), left, left + wide - _BETWEEN)
            y = Scale(-reach, reach, row.y + _HEIGHT / 2 - 4, row.y - _HEIGHT / 2 + 4)
            _draw_cell(sheet, chart, (name, chart.columns[column]), lines, x, y)
    return found.bottom + 4


def _octaves(values: Sequence[float | None]) -> list[float | None]:
    """How far each lies from their middle; None for what has no logarithm."""
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
