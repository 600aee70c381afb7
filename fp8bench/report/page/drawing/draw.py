"""Draws any chart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.report.elements import AnyChart, Bars, Lines, Scatter, Stacks
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import draw_bars, draw_stacks
from fp8bench.report.page.drawing.sheet import Sheet

# The drawing function of each class of charts; it returns the height, or 0 if there is nothing to draw.
_DRAWN_BY: dict[type[AnyChart], Callable[[Sheet, Any], float]] = {
    Bars: draw_bars,
    Scatter: draw_scatter,
    Stacks: draw_stacks,
    Lines: draw_lines,
}


def draw_on(sheet: Sheet, chart: AnyChart) -> float:
    """Draws the chart, and returns its height."""
    end = _DRAWN_BY[type(chart)](sheet, chart)
    if not end:
        sheet.text(0, 14, "Nothing to draw: no value here has a place on the axis.", "quiet")
    return end or 28.0


def draw(chart: AnyChart) -> str:
    sheet = Sheet(chart)
    return sheet.svg(draw_on(sheet, chart))
