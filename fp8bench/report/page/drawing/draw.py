"""Draws any chart; here also maps, where the colours of ratios part at 1, and small charts in rows and columns."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from fp8bench import units
from fp8bench.report.elements import AnyChart, Bars, Heat, Lines, Scatter, Sparks, Stacks
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import arranged, draw_bars, draw_stacks, legend
from fp8bench.report.page.drawing.scale import CELLS, ROWS, TABBED, Scale, drawable, placeless, shortened, shown, worded
from fp8bench.report.page.drawing.sheet import SHAPES, Sheet

_HEIGHT = 30.0
_WIDEST = 120.0
_GAP = 10.0
# Shades above and below 1.
_SHADES = 4
# Ratios closer to 1 count as even.
_EVEN = math.log(1.01)
# Smaller ratios do not take the strongest shade.
_LEAST = math.log(1.2)


@dataclass(frozen=True)
class _Cells:
    """Cells of one size, from a corner on."""

    left: float
    top: float
    wide: float

    def corner(self, row: int, column: int) -> tuple[float, float]:
        return self.left + column * self.wide, self.top + row * _HEIGHT


def draw_heat(sheet: Sheet, chart: Heat) -> float:
    ratios = chart.axis.unit == "x"
    cells = [[value if drawable(value, ratios) else None for value in row[:CELLS]] for row in chart.values[:CELLS]]
    values = [value for row in cells for value in row if value is not None]
    every = [value for row in chart.values for value in row if value is not None]
    missing = placeless(every, ratios)
    sheet.omit(missing, len(every) - missing - len(values))
    if not values:
        return 0.0
    shade, keys = _by_ratio(values) if ratios else _by_size(values, chart.axis.unit)
    grid = _grid(sheet, chart, values, _key(sheet, chart, keys))
    for row, line in enumerate(cells):
        label = shortened(chart.rows[row], grid.left - _GAP, sheet.size)
        sheet.text(grid.left - _GAP, grid.top + (row + 0.5) * _HEIGHT, label, "label", anchor="end")
        for column, value in enumerate(line):
            _cell(sheet, chart, grid, row, column, value, "none" if value is None else shade(value))
    if ratios and (border := _border(cells, grid)):
        sheet.lines("even", border)
    return _columns(sheet, chart, grid, len(cells))


def _written(value: float, unit: str) -> str:
    """The value as in a cell; ratios have three digits and no unit, which is in the key."""
    if unit == "x" and 1e-3 <= value < 1e4:
        return units.significant(value)
    return shown(value, unit).removesuffix(f" {unit}")


def _grid(sheet: Sheet, chart: Heat, values: Sequence[float], top: float) -> _Cells:
    room, columns = 0.3 * sheet.width, len(chart.columns[:CELLS])
    left = max(sheet.measure(shortened(label, room, sheet.size)) for label in chart.rows[:CELLS]) + _GAP
    least = max(sheet.measure(_written(value, chart.axis.unit)) for value in values) + 8
    wide = max(least, min(_WIDEST, (sheet.width - left - 2) / columns))
    sheet.width = max(sheet.width, left + columns * wide + 2)
    return _Cells(left, top, wide)


# A value's class, and the key: classes with their words.
_Shading = tuple[Callable[[float], str], Sequence[tuple[Sequence[str], str]]]


def _by_ratio(values: Sequence[float]) -> _Shading:
    """'level', 'low-1' to 'low-4', 'high-1' to 'high-4'; 2x and 0.5x are equally far from 1."""
    farthest = max(_LEAST, *(abs(math.log(value)) for value in values))

    def shade(value: float) -> str:
        far = math.log(value)
        if abs(far) <= _EVEN:
            return "level"
        number = min(_SHADES, max(1, math.ceil(abs(far) / farthest * _SHADES - 1e-9)))
        return f"{'low' if far < 0 else 'high'}-{number}"

    return shade, ((("low-4", "low-2"), "below 1x"), (("level",), "even"), (("high-2", "high-4"), "above 1x"))


def _by_size(values: Sequence[float], unit: str) -> _Shading:
    """Each shade has equally many values, so that an outlier does not make all others alike."""
    ordered, shades = sorted(values), ("level", *(f"high-{number}" for number in range(1, _SHADES + 1)))

    def shade(value: float) -> str:
        return shades[bisect_left(ordered, value) * len(shades) // len(ordered)]

    return shade, ((shades[:1], shown(ordered[0], unit)), (shades[2:], shown(ordered[-1], unit)))


def _cell(sheet: Sheet, chart: Heat, grid: _Cells, row: int, column: int, value: float | None, style: str) -> None:
    x, y = grid.corner(row, column)
    name = f"{chart.rows[row]}, {chart.columns[column]}"
    stop = len(chart.rows) * len(chart.columns) <= TABBED
    hint = worded(name, "no value" if value is None else shown(value, chart.axis.unit), chart.hints[row][column], stop)
    sheet.box(f"mark cell {style}", x + 1, y + 1, grid.wide - 2, _HEIGHT - 2, hint=hint)
    if value is None:
        sheet.hatch("hatch", x + 1, y + 1, grid.wide - 2, _HEIGHT - 2)
    else:
        sheet.text(x + grid.wide / 2, y + _HEIGHT / 2, _written(value, chart.axis.unit), "value", anchor="middle")


def _border(cells: list[list[float | None]], grid: _Cells) -> list[list[tuple[float, float]]]:
    places = ((row, column, value) for row, line in enumerate(cells) for column, value in enumerate(line))
    known = {(row, column): value for row, column, value in places if value is not None}
    return [
        [grid.corner(row + down, column + 1 - down), grid.corner(row + 1, column + 1)]
        for (row, column), value in known.items()
        for down in (0, 1)
        if (value < 1) != (known.get((row + down, column + 1 - down), value) < 1)
    ]


def _key(sheet: Sheet, chart: Heat, keys: Sequence[tuple[Sequence[str], str]]) -> float:
    sheet.text(0, 8, shortened(chart.axis.title, sheet.width, sheet.size), "quiet")
    x, y = 0.0, 24.0
    for styles, text in keys:
        for style in styles:
            sheet.box(f"cell {style}", x, y + 2, 13, 13)
            x += 13
        sheet.text(x + 6, y + 8.5, text)
        x += 6 + sheet.measure(text) + 18
    return y + 30


def _columns(sheet: Sheet, chart: Heat, grid: _Cells, rows: int) -> float:
    bottom = grid.top + rows * _HEIGHT
    names = [shortened(name, 150.0, sheet.size) for name in chart.columns[:CELLS]]
    widest = max(sheet.measure(name) for name in names)
    turned = widest + 6 > grid.wide
    for column, name in enumerate(names):
        x = grid.left + (column + 0.5) * grid.wide
        if turned:
            sheet.text(x + 4, bottom + 14, name, "label", anchor="end", turn=40)
        else:
            sheet.text(x, bottom + 12, name, "label", anchor="middle")
    return bottom + (widest * math.sin(math.radians(40)) + 26 if turned else 24)


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
    text = f"a row: {reach:.2g} octaves up and down, from {chart.places[0]} to {chart.places[-1]}"
    sheet.text(0, top + 8, shortened(text, sheet.width, sheet.size), "quiet")
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
    Heat: draw_heat,
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
    """A chart as two SVGs, for a window and for a telephone; charts.css shows the one that fits.

    A map too large for a window is one SVG that scrolls in both.
    """
    drawn: list[str] = []
    for narrow in (False, True):
        sheet = Sheet(chart, narrow)
        drawn.append(sheet.svg(draw_on(sheet, chart)))
        if sheet.grown:
            break
    return "\n".join(drawn)
