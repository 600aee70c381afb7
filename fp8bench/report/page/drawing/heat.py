"""Heat: a value for each row and column, in colours that part at `even`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.report.elements import Heat
from fp8bench.report.page.drawing.labels import shortened, worded
from fp8bench.report.page.drawing.limits import CELLS, TABBED, described, drawable, left_out
from fp8bench.report.page.drawing.scale import shown, tick
from fp8bench.report.page.drawing.sheet import WIDE, Sheet, nothing

_HEIGHT = 30.0
_WIDEST = 96.0
_GAP = 10.0
# Shades on either side of even.
_SHADES = 4
# Closer to even than this, in logarithms for ratios and as a share for others, is even.
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


def alone(chart: Heat) -> bool:
    """Whether the drawing for a window is too wide for one, and scrolls: then it serves telephones too."""
    cells = _cells(chart)
    return any(drawable(value) for row in cells for value in row) and _needed(Sheet(chart, False), chart, cells) > WIDE


def draw_heat(chart: Heat, narrow: bool) -> str:
    cells = _cells(chart)
    values = [value for row in cells for value in row if value is not None]
    missing = sum(value is not None and not drawable(value) for row in chart.values for value in row)
    description = described(chart, missing, left_out(chart))
    if not values:
        return nothing(chart, description, narrow)
    sheet = Sheet(chart, narrow)
    top = _key(sheet, chart, values)
    grid = _grid(sheet, chart, cells, top)
    shades = _Shades(chart.even, values)
    for row, line in enumerate(cells):
        label = shortened(chart.rows[row], grid.left - _GAP, sheet.size)
        sheet.text(grid.left - _GAP, grid.top + (row + 0.5) * _HEIGHT, label, "label", anchor="end")
        for column, value in enumerate(line):
            _cell(sheet, chart, grid, row, column, value, shades)
    border = _border(cells, chart.even, grid)
    if border:
        sheet.lines("even", border)
    return sheet.svg(_columns(sheet, chart, grid, len(cells)), description)


def _cells(chart: Heat) -> list[list[float | None]]:
    """The values that are drawn; None where there is none, as many in each row as there are columns."""
    rows = []
    for row in chart.values[: min(CELLS, len(chart.rows))]:
        line = [value if drawable(value) else None for value in row[:CELLS]]
        rows.append((line + [None] * len(chart.columns))[: min(CELLS, len(chart.columns))])
    return rows


def _written(value: float, unit: str) -> str:
    """A value in three digits, its unit left to the key."""
    return units.significant(value) if unit in ("x", "") and 1e-3 <= abs(value) < 1e4 else shown(value, unit)


def _needed(sheet: Sheet, chart: Heat, cells: list[list[float | None]]) -> float:
    """How wide a sheet has to be, for cells as wide as their texts."""
    left, least = _widths(sheet, chart, cells)
    return left + len(cells[0]) * least + 2


def _widths(sheet: Sheet, chart: Heat, cells: list[list[float | None]]) -> tuple[float, float]:
    """The width of the rows' names, and the least one of a cell."""
    room = 0.3 * sheet.width
    left = max(sheet.measure(shortened(label, room, sheet.size)) for label in chart.rows[: len(cells)]) + _GAP
    texts = [_written(value, chart.axis.unit) for line in cells for value in line if value is not None]
    return left, max(sheet.measure(text) for text in texts) + 8


def _grid(sheet: Sheet, chart: Heat, cells: list[list[float | None]], top: float) -> _Grid:
    """Cells as wide as their texts at least; a sheet too narrow for them grows."""
    left, least = _widths(sheet, chart, cells)
    columns = len(cells[0])
    wide = max(least, min(_WIDEST, (sheet.width - left - 2) / columns))
    sheet.width = max(sheet.width, left + columns * wide + 2)
    return _Grid(left, top, wide)


class _Shades:
    """How far from even values go, in logarithms where all are above zero; all are even where even is no number."""

    def __init__(self, even: float, values: Sequence[float]) -> None:
        self._even = even
        self._logs = all(drawable(value, log=True) for value in (even, *values))
        farthest = max(abs(self._far(value)) for value in values) if drawable(even) else math.inf
        self._least = _EVEN if self._logs else farthest * 0.02
        self._farthest = max(farthest, _LEAST) if self._logs else farthest

    def of(self, value: float) -> str:
        """The class of a value: 'level', 'low-1' to 'low-4', 'high-1' to 'high-4'."""
        far = self._far(value)
        if self._farthest == math.inf or abs(far) <= self._least:
            return "level"
        shade = min(_SHADES, max(1, math.ceil(abs(far) / self._farthest * _SHADES - 1e-9)))
        return f"{'low' if far < 0 else 'high'}-{shade}"

    def _far(self, value: float) -> float:
        return math.log(value) - math.log(self._even) if self._logs else value - self._even


def _cell(sheet: Sheet, chart: Heat, grid: _Grid, row: int, column: int, value: float | None, shades: _Shades) -> None:
    x, y = grid.corner(row, column)
    name = f"{chart.rows[row]}, {chart.columns[column]}"
    stop = len(chart.rows) * len(chart.columns) <= TABBED
    words = chart.hints[row][column] if row < len(chart.hints) and column < len(chart.hints[row]) else ""
    hint = worded(name, "no value" if value is None else shown(value, chart.axis.unit), words, stop)
    style = "none" if value is None else shades.of(value)
    sheet.box(f"mark cell {style}", x + 1, y + 1, grid.wide - 2, _HEIGHT - 2, hint=hint)
    if value is None:
        sheet.hatch("hatch", x + 1, y + 1, grid.wide - 2, _HEIGHT - 2)
    else:
        sheet.text(x + grid.wide / 2, y + _HEIGHT / 2, _written(value, chart.axis.unit), "value", anchor="middle")


def _border(cells: list[list[float | None]], even: float, grid: _Grid) -> list[list[tuple[float, float]]]:
    """The line between cells on either side of even: where it begins to pay."""
    lines = []
    for row, line in enumerate(cells):
        for column, value in enumerate(line):
            x, y = grid.corner(row, column)
            right = line[column + 1] if column + 1 < len(line) else None
            below = cells[row + 1][column] if row + 1 < len(cells) else None
            if value is not None and right is not None and (value < even) != (right < even):
                lines.append([(x + grid.wide, y), (x + grid.wide, y + _HEIGHT)])
            if value is not None and below is not None and (value < even) != (below < even):
                lines.append([(x, y + _HEIGHT), (x + grid.wide, y + _HEIGHT)])
    return lines


def _key(sheet: Sheet, chart: Heat, values: Sequence[float]) -> float:
    """What the colours say: below even, even, above it."""
    if chart.axis.title:
        sheet.text(0, 8, shortened(chart.axis.title, sheet.width, sheet.size), "quiet")
    y = 24.0 if chart.axis.title else 0.0
    if not drawable(chart.even):
        return y
    even, x = tick(chart.even, chart.axis.unit), 0.0
    for styles, text in (
        (["low-4", "low-2"], f"below {even}"),
        (["level"], "even"),
        (["high-2", "high-4"], f"above {even}"),
    ):
        for style in styles:
            sheet.box(f"cell {style}", x, y + 2, 13, 13)
            x += 13
        sheet.text(x + 6, y + 8.5, text)
        x += 6 + sheet.measure(text) + 18
    return y + 30


def _columns(sheet: Sheet, chart: Heat, grid: _Grid, rows: int) -> float:
    """The columns' names under them, turned where they are wider than a cell; returns where they end."""
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
