"""From which size on each precision pays: for the terminal, for the page with what is done in a second over the size,
and for other programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.break_even import BreakEven, Crossing, Stretch
from fp8bench.analysis.sweeps import Sweep, SweptMode, sweeps_of, swept_modes
from fp8bench.model import Finding, Params, Run
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Column, Element, Field, Point, Scatter, Table, Tone
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Figures, Panel, panels_of, show_params, together
from fp8bench.report.words.legend import BREAK_EVEN
from fp8bench.report.words.naming import listed

Swept = tuple[Sweep, Sequence[SweptMode]]
_MARKED = "break-even"


def swept(panel: Panel) -> list[Swept]:
    """Every number that varies alone in a panel, with what each precision comes to over it."""
    groups = [[(one.record, one.finding) for one in group.results] for group in panel.groups]
    sweeps = sweeps_of([group.case.params for group in panel.groups])
    found = ((sweep, tuple(swept_modes(sweep, groups))) for sweep in sweeps)
    return [(sweep, modes) for sweep, modes in found if modes]


def break_even_table(panel: Panel, found: Sequence[Swept], caption: str) -> Table:
    columns = (
        Column("", shared=True), Column("case"), Column("against"), Column("pays"), Column("measured"),
        Column("remarks", below=True),
    )  # fmt: skip
    rows = []
    for sweep, modes in found:
        held = show_params(pair for pair in sweep.held if pair not in panel.shared)
        sizes = [size for size, _ in sweep.places]
        measured = f"{sweep.axis} = {units.whole(sizes[0])} to {units.whole(sizes[-1])}, {len(sizes)} sizes"
        for one in modes:
            doubtful = one.found is None or bool(one.doubted)
            tone = Tone.DOUBT if doubtful else Tone.PLAIN
            words = Field(pays(sweep.axis, one.found) if one.found else units.NONE, tone=tone)
            place = Field(f"over {sweep.axis}{' at ' * bool(held)}{held}")
            rest = Field("; ".join(remarks(one)))
            rows.append((place, Field(one.mode), Field(one.against), words, Field(measured), rest))
    return Table("break-even", caption, columns, tuple(rows))


def pays(axis: str, found: BreakEven) -> str:
    """'from m = 900 (700 to 1100) on', 'at every size', 'nowhere', 'cannot be told'."""
    told = [stretch.pays for stretch in found.stretches if stretch.pays is not None]
    if not found.crossings:
        if not told:
            return "cannot be told: every size is within the noise"
        if len(found.stretches) == 1:
            return "at every size" if told[0] else "nowhere"
        return "wherever it can be told" if told[0] else "nowhere that can be told"
    parts, beginning = [], ""
    for one in found.crossings:
        if one.begins:
            beginning = f"from {axis} = {_place(one)}"
        else:
            parts.append(f"{beginning} to {_place(one)}" if beginning else f"up to {axis} = {_place(one)}")
            beginning = ""
    return " and ".join([*parts, *([f"{beginning} on"] if beginning else [])])


def _place(one: Crossing) -> str:
    """'900 (700 to 1100)'."""
    size, low, high = (units.whole(round(value)) for value in (one.size, one.low, one.high))
    return f"{size} ({low} to {high})"


def remarks(one: SweptMode) -> Iterator[str]:
    """What else is to know: stretches that cannot be told, sizes within noise, without a ratio, or in doubt."""
    if one.found is None and one.points:
        yield "too few sizes with a ratio"
    if one.found is not None:
        unknown = [(stretch.first, stretch.last) for stretch in one.found.stretches if _open(stretch, one.found)]
        if unknown:
            ends = [" to ".join(units.whole(round(size)) for size in pair) for pair in unknown]
            yield f"too close to tell from {listed(ends)}"
        if one.found.within_noise:
            yield f"within the noise: {_sizes(one.found.within_noise)}"
        if not one.found.level:
            yield "a quick look: in brackets is the range of the rounds, without a confidence"
    for why, sizes in together((why, size) for size, why in one.refused).items():
        yield f"no ratio at {_sizes(sizes)}: {why}"
    if one.doubted:
        yield f"labels cast doubt on {_sizes(one.doubted)}"


def _open(stretch: Stretch, found: BreakEven) -> bool:
    """Whether it cannot be told there, and that is not a crossing's own interval."""
    return stretch.pays is None and not any(one.low <= stretch.first <= one.high for one in found.crossings)


def _sizes(sizes: Sequence[int]) -> str:
    return listed([units.whole(size) for size in sizes], 6)


class BreakEvenRow(NamedTuple):
    """A size between `low` and `high` at which a precision begins to pay (`begins`) or ends to.

    Where there is none, `pays` says all there is ('at every size', 'nowhere'), '' where too few sizes have a ratio. The
    sizes are values of `axis`, from `smallest` to `largest`; `held` is what all cases of the sweep have in common.
    """

    suite: str
    device: str
    axis: str
    held: Params
    mode: str
    against: str
    pays: str
    size: float | None
    low: float | None
    high: float | None
    begins: bool | None
    confidence: float | None
    smallest: int
    largest: int
    remarks: str


def break_even_rows(run: Run, findings: Mapping[str, Finding]) -> Iterator[BreakEvenRow]:
    for panel in panels_of(run, findings):
        for sweep, modes in swept(panel):
            sizes = [size for size, _ in sweep.places]
            for one in modes:
                about = (panel.case.workload, panel.case.device, sweep.axis, sweep.held, one.mode, one.against)
                found = one.found
                words = pays(sweep.axis, found) if found else ""
                level = found.level or None if found else None
                for crossing in (found.crossings if found else ()) or (None,):
                    size, low, high, begins = crossing or (None, None, None, None)
                    yield BreakEvenRow(
                        *about, words, size, low, high, begins, level, sizes[0], sizes[-1], "; ".join(remarks(one))
                    )


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
            yield break_even_table(panel, found, f"{title}: from where on it pays")
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
