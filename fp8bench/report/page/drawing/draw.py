"""The door to all drawings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.report.elements import AnyChart, Bars, Heat, Lines, Scatter, Stacks, Strips, Waterfall
from fp8bench.report.page.drawing.heat import draw_heat
from fp8bench.report.page.drawing.limits import described
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import draw_bars, draw_stacks, draw_strips, draw_waterfall
from fp8bench.report.page.drawing.sheet import Sheet

# A chart's class -> what draws it on a sheet, and returns where it ends; 0 if there is nothing to draw.
_DRAWN_BY: dict[type[AnyChart], Callable[[Sheet, Any], float]] = {
    Bars: draw_bars,
    Scatter: draw_scatter,
    Stacks: draw_stacks,
    Heat: draw_heat,
    Lines: draw_lines,
    Strips: draw_strips,
    Waterfall: draw_waterfall,
}


def draw(chart: AnyChart) -> str:
    """A chart as two SVGs, one for a window and one for a telephone; charts.css shows the one that fits.

    A map too large for a window is one that scrolls in either.
    """
    drawn: list[str] = []
    for narrow in (False, True):
        sheet = Sheet(chart, narrow)
        end = _DRAWN_BY[type(chart)](sheet, chart)
        if not end:
            sheet.text(0, 14, "Nothing to draw: no value here has a place on the axis.", "quiet")
        drawn.append(sheet.svg(end or 28, described(chart)))
        if sheet.grown:
            break
    return "\n".join(drawn)
