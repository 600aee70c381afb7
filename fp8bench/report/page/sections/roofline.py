"""Phases under the roofs of what their device does at most, and what a precision could give at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.datasheet import kind_of_path
from fp8bench.analysis.roofline import PhaseRoof, phase_roofs, roofs_of
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Axis, Column, Element, Field, Items, Point, Scatter, Text
from fp8bench.report.material import Material
from fp8bench.report.page.charts import worth_drawing
from fp8bench.report.page.section import PRECISION, Row, Section, case_field, number, sections, table_of_cases
from fp8bench.report.panels import Panel
from fp8bench.report.words.naming import NamedCase, named_cases, phase_words, titled_panels
from fp8bench.report.words.roofline import bound_words, how_to_know, sentences, sources

# A roof is drawn so far to both sides of the points, in times.
_BEYOND = 4.0


@sections.register("roofline")
class Roofline(Section):
    """For each panel the phases that multiply under both roofs, what bounds them all in words, and a table."""

    name = "roofline"
    title = "Roofline"
    lead = (
        "FLOPs, bytes and launches as the tape counted them, over best-case seconds, beside the most that the device "
        "was seen to do here and what its datasheet says. Emulated cases are left out: their time says nothing of a "
        "device's formats."
    )
    rank = 76

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in titled_panels(material):
            cases = [case for case in named_cases(panel) if _known(case)]
            if cases:
                yield from _panel(title, panel, cases)
            elif any(one.record.ceiling and one.record.ceiling.rates for one in panel.results):
                yield from (Text(f"{title}: {one}") for one in sources(panel.results))
        told = [
            how_to_know((one for panel in entry.panels for one in panel.results), entry.run)
            for entry in material.entries
        ]
        yield from map(Text, dict.fromkeys(filter(None, told)))


def _known(case: NamedCase) -> bool:
    """Whether something is known to hold it against."""
    return not emulated(case.result) and any(one.bound for one in _roofs(case))


def _roofs(case: NamedCase) -> tuple[PhaseRoof, ...]:
    return phase_roofs(case.result.record, case.result.finding)


def _panel(title: str, panel: Panel, cases: Sequence[NamedCase]) -> Iterator[Element]:
    said = list(sentences(panel))
    chart = _chart(title, cases)
    if worth_drawing(chart):
        yield chart
    if said:
        yield Items(tuple(map(Text, said)))
    yield from (Text(one) for one in sources([case.result for case in cases]))
    columns = (
        PRECISION,
        Column("phase"),
        Column("time", number=True, unit="s", hint="best case"),
        Column("FLOP/s", number=True, hint="counted FLOPs over the time"),
        Column("B/s", number=True, hint="counted bytes over the time: a cache may give more than memory"),
        Column("FLOP/B", number=True, hint="FLOPs for each byte"),
        Column("of ceiling", number=True, hint="the least time by what was measured here, over the time"),
        Column("of datasheet", number=True, hint="the same by the datasheet"),
        Column("is", hint="what takes longest of it at the ceilings, if that is half of its time"),
    )
    rows = ((case.name, [_row(case, roof) for roof in _roofs(case)]) for case in cases)
    name = f"roofline-{panel.case.workload}"
    yield from table_of_cases(name, title, "each phase against the ceilings", columns, rows, "The CSV has them.")


def _row(case: NamedCase, roof: PhaseRoof) -> Row:
    return (
        case_field(case),
        Field(phase_words(roof.count.phase)),
        number(roof.seconds, units.seconds),
        number(roof.flop_rate or None, lambda value: units.count(value, "FLOP/s")),
        number(roof.byte_rate or None, lambda value: units.count(value, "B/s")),
        number(roof.intensity, units.count),
        number(roof.of_ceiling, lambda value: units.percent(value, 0)),
        number(roof.of_sheet, lambda value: units.percent(value, 0)),
        Field(bound_words(roof) or units.NONE),
    )


def _chart(title: str, cases: Sequence[NamedCase]) -> Scatter:
    """Phases that multiply, by precision; and over their intensities the roofs of each kind of products."""
    points = [
        Point(case.result.mode, _label(case, roof), roof.intensity, roof.flop_rate, hint=bound_words(roof))
        for case in cases
        for roof in _roofs(case)
        if roof.intensity is not None
    ]
    kinds = dict.fromkeys(
        kind_of_path(path) for case in cases for roof in _roofs(case) for path, _ in roof.count.by_path
    )
    found = {roofs.words: roofs for case in cases for roofs in roofs_of(case.result.record.ceiling) if roofs}
    drawn = [(f"{kind} {words}", roofs.products[kind], roofs.memory) for words, roofs in found.items()
             for kind in kinds if kind in roofs.products and roofs.memory]  # fmt: skip
    places = [point.x for point in points if point.x] + [rate / memory for _, rate, memory in drawn]
    span = (min(places) / _BEYOND, max(places) * _BEYOND) if places else (1.0, 1.0)
    lines = [(name, corner) for name, rate, memory in drawn for corner in _roof(rate, memory, span)]
    points += [Point(name, "", x, y) for name, (x, y) in lines]
    return Scatter(
        f"roofline-{cases[0].result.record.case.workload}", f"{title}: roofline",
        "Each phase that multiplies by its FLOPs for a byte and its FLOPs a second; lines are the most there is.",
        Axis("FLOPs for each byte", log=True), Axis("FLOP/s", log=True), tuple(points),
        joined=tuple(dict.fromkeys(name for name, _ in lines)),
    )  # fmt: skip


def _label(case: NamedCase, roof: PhaseRoof) -> str:
    """'gemm, m=256'."""
    return ", ".join(filter(None, (phase_words(roof.count.phase), case.place)))


def _roof(rate: float, memory: float, span: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """The corners of a roof: memory's slope up to the ridge, then the rate of products."""
    return (span[0], span[0] * memory), (rate / memory, rate), (span[1], rate)
