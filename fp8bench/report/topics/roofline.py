"""Phases under the roofs of what their device does at most: what bounds them, and what a precision could give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.analysis.datasheet import datasheet_of, kind_of_path
from fp8bench.analysis.roofline import Bound, Gain, PhaseRoof, gain_of, phase_roofs, roofs_of
from fp8bench.model import Run
from fp8bench.report.case_status import Standing, emulated, speed_up, standing
from fp8bench.report.columns import Col
from fp8bench.report.elements import Axis, Element, Items, Point, Scatter, Text
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.charts import worth_drawing
from fp8bench.report.page.section import PRECISION, Section, sections, table_of_cases
from fp8bench.report.panels import Panel, Result, ResultGroup, together
from fp8bench.report.words.naming import NamedCase, listed, named_cases, phase_words

# Phases that take less of a step than this are left out of sentences.
_LEAST_SHARE = 0.02
# What moves so much more than memory gives is in a cache.
_CACHED = 1.05
# A roof is drawn so far to both sides of the points, in times.
_BEYOND = 4.0


def bound_words(roof: PhaseRoof) -> str:
    """'memory-bound', or that it moves more than the memory can, which is a cache's doing; '' where nobody knows."""
    if roof.bound is None:
        return ""
    beyond = roof.bound is Bound.MEMORY and (roof.of_ceiling or roof.of_sheet or 0.0) > _CACHED
    return "in cache" if beyond else roof.bound.value


def sentences(panel: Panel) -> Iterator[str]:
    """Of each case what its phases wait for, then of each native precision what it could give."""
    for group in panel.groups:
        place = f" at {panel.place(group)}" if len(panel.groups) > 1 else ""
        for result in group.results:
            if (found := _bounds(result)) and not emulated(result):
                yield f"{result.mode}{place} is {found}."
        for result in group.results:
            if (gain := gain_in(group, result)) is not None:
                yield _gain(group.reference, place, result, gain)


def how_to_know(results: Iterable[Result], run: Run) -> str:
    """What to do where steps were counted and timed and nobody knows what the machine does at most; '' elsewhere."""
    native = [one for one in results if not emulated(one)]
    roofs = [roof for one in native for roof in phase_roofs(one.record, one.finding)]
    known = any(one.record.ceiling is not None and one.record.ceiling.rates for one in native)
    if not roofs or known or any(roof.bound for roof in roofs):
        return ""
    threads = f" --threads {run.request.threads}" if run.request.threads != 1 else ""
    store = ", with the same --store," if "--store" in run.command else ""
    return (
        f"What bounds each phase is not known yet: `fp8bench doctor --ceilings{threads}`{store} measures what this "
        "machine does at most, in less than a minute, and later runs say it."
    )


def gain_in(group: ResultGroup, result: Result) -> Gain | None:
    """What a case's precision could give at most on its group's reference; None of those without speed or ceilings."""
    lead = group.lead
    if lead is None or standing(lead) is not Standing.REFERENCE or lead.finding is None or result.finding is None:
        return None
    if result.record.is_reference or emulated(result):
        return None
    return gain_of(result.record, result.finding, lead.record, lead.finding)


def sources(results: Sequence[Result]) -> Iterator[str]:
    """By what phases are held against the most there is: the rates measured here with their spreads, and the sheet."""
    ceiling = next((one.record.ceiling for one in results if one.record.ceiling is not None), None)
    sheet = datasheet_of(ceiling.device) if ceiling is not None else None
    if ceiling is not None and ceiling.rates:
        told = [
            f"{one.limit.value} {one.precision}".strip() + f" ({units.percent(one.spread)})"
            for one in ceiling.rates
            if one.runs and not one.steady
        ]
        wide = f"; these bound nothing, their runs differ too much: {listed(told)}" if told else ""
        yield f"Ceilings were measured here{wide}."
    if sheet is not None:
        words = sheet.told("dense", "bandwidth")
        yield f"Peaks are those of the {sheet.name}'s {words} ({sheet.source}, {sheet.date})."


def _bounds(result: Result) -> str:
    """'compute-bound in products (54% of the step, at 71% of its ceiling), memory-bound in elementwise (..)'."""
    step = result.best or 0.0
    roofs = sorted(phase_roofs(result.record, result.finding), key=lambda one: -one.seconds)
    found = together(
        (words, f"{phase_words(roof.count.phase)} ({units.percent(roof.seconds / step, 0)} of the step{_near(roof)})")
        for roof in roofs
        if step and roof.seconds >= _LEAST_SHARE * step and (words := bound_words(roof))
    )
    return listed([f"{words} in {listed(phases, 20)}" for words, phases in found.items()], 20)


def _near(roof: PhaseRoof) -> str:
    """', at 71% of its ceiling', or how little of the time the nearest one explains."""
    if roof.of_ceiling is not None:
        least = units.percent(roof.of_ceiling, 0)
        far = roof.bound in (Bound.OVERHEAD, Bound.NONE)
        each = roof.seconds / max(roof.count.launches, 1)
        return (
            f", {units.seconds(each)} an operator, at {least} of the nearest" if far else f", at {least} of its ceiling"
        )
    return f", at {units.percent(roof.of_sheet, 0)} of the datasheet's" if roof.of_sheet is not None else ""


def _gain(reference: str, place: str, result: Result, gain: Gain) -> str:
    """'products are 54% of the step and at 71% of their ceiling: fp8 at its own ceiling would give at most 1.38x'."""
    mode, given, stands = result.mode, speed_up(result), standing(result)
    perhaps = "perhaps " if stands is Standing.DOUBTED else ""
    clear = given is not None and stands is not Standing.UNSURE
    gives = f"it {perhaps}gives {units.speed_up(given.point)}" if given and clear else "what it gives is not clear"
    tax = (
        f"; its products alone are {units.speed_up(gain.kernels)} as fast, with the casts "
        f"{units.speed_up(gain.with_casts)} (casts move {units.size(gain.cast_bytes)}, products "
        f"{units.size(gain.product_bytes)})"
        if gain.cast_bytes
        else ""
    )
    return (
        f"{reference}'s products{place} are {units.percent(gain.share, 0)} of the step and at "
        f"{units.percent(gain.of_ceiling, 0)} of their ceiling: {mode} at its own ceiling would give "
        f"{'at most' if gain.binds else 'about'} {units.speed_up(gain.most)}; {gives}{tax}."
    )


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
    cols: list[Col[tuple[NamedCase, PhaseRoof]]] = [
        PRECISION,
        Col("phase", lambda row: phase_words(row[1].count.phase)),
        Col("time", lambda row: row[1].seconds, number=True, unit="s", hint="best case"),
        Col("FLOP/s", lambda row: row[1].flop_rate or None, number=True, show=partial(units.count, unit="FLOP/s"),
            hint="counted FLOPs over the time"),
        Col("B/s", lambda row: row[1].byte_rate or None, number=True, show=partial(units.count, unit="B/s"),
            hint="counted bytes over the time: a cache may give more than memory"),
        Col("FLOP/B", lambda row: row[1].intensity, number=True, show=units.count, hint="FLOPs for each byte"),
        Col("of ceiling", lambda row: row[1].of_ceiling, number=True, show=partial(units.percent, decimals=0),
            hint="the least time by what was measured here, over the time"),
        Col("of datasheet", lambda row: row[1].of_sheet, number=True, show=partial(units.percent, decimals=0),
            hint="the same by the datasheet"),
        Col("is", lambda row: bound_words(row[1]) or None,
            hint="what takes longest of it at the ceilings, if that is half of its time"),
    ]  # fmt: skip
    rows = ((case.name, [(case, roof) for roof in _roofs(case)]) for case in cases)
    name = f"roofline-{panel.case.workload}"
    yield from table_of_cases(name, title, "each phase against the ceilings", cols, rows, "The CSV has them.")


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
