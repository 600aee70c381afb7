"""The door to all drawings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib import rc_context

from fp8bench.report.elements import Bars, Chart, Heat, Lines, Scatter, Stacks, Strips, Waterfall
from fp8bench.report.page.drawing.heat import alone, draw_heat
from fp8bench.report.page.drawing.plots import draw_lines, draw_scatter
from fp8bench.report.page.drawing.rows import draw_bars, draw_stacks, draw_strips, draw_waterfall
from fp8bench.report.page.drawing.sheet import PARAMETERS

# A chart's class -> what draws it; each takes the chart, and whether it is for a telephone.
_DRAWN_BY: dict[type[Chart], Callable[[Any, bool], str]] = {
    Bars: draw_bars,
    Scatter: draw_scatter,
    Stacks: draw_stacks,
    Heat: draw_heat,
    Lines: draw_lines,
    Strips: draw_strips,
    Waterfall: draw_waterfall,
}


def draw(chart: Chart) -> str:
    """A chart as two SVGs, one for a window and one for a telephone; charts.css shows the one that fits.

    A map too large for a window is one that scrolls in either.
    """
    drawn_by = _DRAWN_BY[type(chart)]
    with rc_context(PARAMETERS):
        sheets = (False,) if isinstance(chart, Heat) and alone(chart) else (False, True)
        return "\n".join(drawn_by(chart, narrow) for narrow in sheets)
