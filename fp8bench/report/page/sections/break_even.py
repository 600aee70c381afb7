"""From which size on a precision pays: what is done in a second over the size, with the crossings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from fp8bench import units
from fp8bench.report.break_evens import Swept, pays, swept, table
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Element, Point, Scatter, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Figures, Panel, show_params
from fp8bench.report.words.legend import BREAK_EVEN
from fp8bench.report.words.naming import titled_panels

_MARKED = "break-even"


@sections.register("break-even")
class BreakEvens(Section):
    """Sizes below which a precision does not pay."""

    name = "break-even"
    title = "From which size on it pays"
    lead = BREAK_EVEN
    rank = 75

    def elements(self, material: Material) -> Iterator[Element]:
        number = 0
        for title, panel in titled_panels(material):
            found = swept(panel)
            if not found:
                continue
            yield table(panel, found, f"{title}: from where on it pays")
            for one in found:
                number += 1
                yield from _chart(number, title, panel, one)


def _chart(number: int, title: str, panel: Panel, found: Swept) -> Iterator[Scatter]:
    """What is done in a second, a line for each precision, and a mark where one begins or ends to pay."""
    sweep, modes = found
    curves: dict[str, list[Point]] = {}
    unit = ""
    for size, place in sweep.places:
        group = panel.groups[place]
        for result in group.results:
            figures = Figures(group, result)
            rate = figures[figures.rate]
            if not emulated(result) and rate.best:
                unit = unit or rate.unit
                point = Point(result.mode, "", float(size), rate.best, hint=units.shown(rate.best, rate.unit))
                curves.setdefault(result.mode, []).append(point)
    if not curves:
        return
    marks = [
        Point(_MARKED, f"{one.mode}: {sweep.axis} = {units.whole(round(crossing.size))}", crossing.size,
              _height(curves[one.mode], crossing.size), Tone.STRONG, f"{one.mode} pays {pays(sweep.axis, one.found)}")
        for one in modes if one.found is not None and one.mode in curves
        for crossing in one.found.crossings
    ]  # fmt: skip
    held = show_params(pair for pair in sweep.held if pair not in panel.shared)
    described = "; ".join(
        f"{one.mode} against {one.against} pays {pays(sweep.axis, one.found)}" for one in modes if one.found is not None
    )
    yield Scatter(
        f"break-even-{number}", ", ".join(filter(None, (f"{title}: {unit} over {sweep.axis}", held))),
        f"{described or 'No precision has enough sizes to tell from where on it pays'}.",
        Axis(sweep.axis, "", log=True), Axis(unit, "", log=True),
        (*(point for points in curves.values() for point in points), *marks), joined=tuple(curves), folded=number > 1,
    )  # fmt: skip


def _height(curve: list[Point], size: float) -> float:
    """Where a line stands at a size, on logarithmic axes; at its end beyond it."""
    for one, other in pairwise(curve):
        if one.x is not None and other.x is not None and one.x <= size <= other.x:
            return float(one.y * (other.y / one.y) ** (math.log(size / one.x) / math.log(other.x / one.x)))
    return curve[-1].y
