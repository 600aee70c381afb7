"""The door to all drawings, and maps: a figure for each row and column; the colours of ratios part at 1."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8bench import units
from fp8bench.report.elements import AnyChart, Bars, Heat, Lines, Scatter, Sparks, Stacks, Strips, Waterfall
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import draw_bars, draw_stacks, draw_strips, draw_waterfall
from fp8bench.report.page.drawing.scale import CELLS, TABBED, drawable, placeless, shortened, shown, worded
from fp8bench.report.page.drawing.sheet import Sheet
from fp8bench.report.page.drawing.sparks import draw_sparks

_HEIGHT = 30.0
_WIDEST = 120.0
_GAP = 10.0
# Shades on either side of 1.
_SHADES = 4
# Closer to 1 than this is even, in logarithms.
_EVEN = math.log(1.01)
# Differences smaller than this do not take the strongest shade.
_LEAST = math.log(1.2)


@dataclass(frozen=True)
class _Grid:
    """Cells of one size from a corner."""

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
    """Ratios in three digits, without their unit, which is in the key."""
    if unit == "x" and 1e-3 <= value < 1e4:
        return units.significant(value)
    return shown(value, unit).removesuffix(f" {unit}")


def _grid(sheet: Sheet, chart: Heat, values: Sequence[float], top: float) -> _Grid:
    room, columns = 0.3 * sheet.width, len(chart.columns[:CELLS])
    left = max(sheet.measure(shortened(label, room, sheet.size)) for label in chart.rows[:CELLS]) + _GAP
    least = max(sheet.measure(_written(value, chart.axis.unit)) for value in values) + 8
    wide = max(least, min(_WIDEST, (sheet.width - left - 2) / columns))
    sheet.width = max(sheet.width, left + columns * wide + 2)
    return _Grid(left, top, wide)


# What gives a value its class, and the classes of the key with their words.
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
    """Each shade has as many values: one far from all others leaves these apart."""
    ordered, shades = sorted(values), ("level", *(f"high-{number}" for number in range(1, _SHADES + 1)))

    def shade(value: float) -> str:
        return shades[bisect_left(ordered, value) * len(shades) // len(ordered)]

    return shade, ((shades[:1], shown(ordered[0], unit)), (shades[2:], shown(ordered[-1], unit)))


def _cell(sheet: Sheet, chart: Heat, grid: _Grid, row: int, column: int, value: float | None, style: str) -> None:
    x, y = grid.corner(row, column)
    name = f"{chart.rows[row]}, {chart.columns[column]}"
    stop = len(chart.rows) * len(chart.columns) <= TABBED
    hint = worded(name, "no value" if value is None else shown(value, chart.axis.unit), chart.hints[row][column], stop)
    sheet.box(f"mark cell {style}", x + 1, y + 1, grid.wide - 2, _HEIGHT - 2, hint=hint)
    if value is None:
        sheet.hatch("hatch", x + 1, y + 1, grid.wide - 2, _HEIGHT - 2)
    else:
        sheet.text(x + grid.wide / 2, y + _HEIGHT / 2, _written(value, chart.axis.unit), "value", anchor="middle")


def _border(cells: list[list[float | None]], grid: _Grid) -> list[list[tuple[float, float]]]:
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


def _columns(sheet: Sheet, chart: Heat, grid: _Grid, rows: int) -> float:
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


# A chart's class -> what draws it on a sheet, and returns where it ends; 0 if there is nothing to draw.
_DRAWN_BY: dict[type[AnyChart], Callable[[Sheet, Any], float]] = {
    Bars: draw_bars,
    Scatter: draw_scatter,
    Stacks: draw_stacks,
    Heat: draw_heat,
    Lines: draw_lines,
    Sparks: draw_sparks,
    Strips: draw_strips,
    Waterfall: draw_waterfall,
}


def draw_on(sheet: Sheet, chart: AnyChart) -> float:
    """Returns the height that it takes."""
    end = _DRAWN_BY[type(chart)](sheet, chart)
    if not end:
        sheet.text(0, 14, "Nothing to draw: no value here has a place on the axis.", "quiet")
    return end or 28.0


def draw(chart: AnyChart) -> str:
    """A chart as two SVGs, one for a window and one for a telephone; charts.css shows the one that fits.

    A map too large for a window is one that scrolls in either.
    """
    drawn: list[str] = []
    for narrow in (False, True):
        sheet = Sheet(chart, narrow)
        drawn.append(sheet.svg(draw_on(sheet, chart)))
        if sheet.grown:
            break
    return "\n".join(drawn)
