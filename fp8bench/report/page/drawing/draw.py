"""Draws a chart of any class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.report.elements import AnyChart, Bars, Lines, Scatter, Stacks
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import draw_bars, draw_stacks
from fp8bench.report.page.drawing.sheet import ChartSheet

# For each class of charts, the function that draws it. The function returns the height of the chart, or 0 if there is
# nothing to draw.
_DRAW_FUNCTIONS: dict[type[AnyChart], Callable[[ChartSheet, Any], float]] = {
    Bars: draw_bars,
    Scatter: draw_scatter,
    Stacks: draw_stacks,
    Lines: draw_lines,
}


def draw_chart_on_sheet(sheet: ChartSheet, chart: AnyChart) -> float:
    """Draws the chart, and returns its height."""
    height = _DRAW_FUNCTIONS[type(chart)](sheet, chart)
    if not height:
        sheet.add_text(0, 14, "Nothing to draw: the axis can show none of the values.", "quiet")
    # 28 pixels are the height of the sentence.
    return height or 28.0


def draw_chart_as_svg(chart: AnyChart) -> str:
    sheet = ChartSheet(chart)
    return sheet.to_svg(draw_chart_on_sheet(sheet, chart))
