"""What a device does at most, and phases under these roofs: what bounds them, and what a precision could give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.analysis.roofline import (
    Bound,
    Gain,
    PhaseRoof,
    datasheet_of,
    gain_of,
    phase_roofs,
)
from fp8bench.model import Limit, Rate, Run
from fp8bench.report.case_status import Standing, is_emulated, speed_up, standing
from fp8bench.report.columns import Col
from fp8bench.report.elements import Element, Items, Text
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import NamedCase, Panel, Result, ResultGroup, together
from fp8bench.report.words.naming import join_words, phase_words

# Phases with a smaller share of the step are left out of sentences.
_LEAST_SHARE = 0.02
# What moves more than this share of the memory's rate is in a cache.
_CACHED = 1.05


def bound_words(roof: PhaseRoof) -> str:
    """'memory-bound', or 'in cache' if it moves more than the memory can; '' if unknown."""
    if roof.bound is None:
        return ""
    beyond = roof.bound is Bound.MEMORY and (roof.of_ceiling or roof.of_sheet or 0.0) > _CACHED
    return "in cache" if beyond else roof.bound.value


def sentences(panel: Panel) -> Iterator[str]:
    for group in panel.groups:
        place = f" at {group.place}" if len(panel.groups) > 1 else ""
        for result in group.results:
            if (words := _bounds(result)) and not is_emulated(result):
                yield f"{result.mode}{place} is {words}."
        for result in group.results:
            if (gain := gain_in(group, result)) is not None:
                yield _gain(group.reference, place, result, gain)


def how_to_know(panels: Iterable[Panel], run: Run) -> str:
    """What to do if steps were counted and timed but the device's ceilings are unknown; else ''."""
    native = [result for panel in panels for result in panel.results if not is_emulated(result)]
    roofs = [roof for result in native for roof in phase_roofs(result.record, result.finding)]
    known = any(result.record.ceiling is not None and result.record.ceiling.rates for result in native)
    if not roofs or known or any(roof.bound for roof in roofs):
        return ""
    threads = f" --threads {run.request.threads}" if run.request.threads != 1 else ""
    store = ", with the same --store," if "--store" in run.command else ""
    return (
        f"What bounds each phase is not known yet: `fp8bench suite ceilings{threads}`{store} measures what this "
        "machine does at most, in less than a minute, and later runs say it."
    )


def gain_in(group: ResultGroup, result: Result) -> Gain | None:
    lead = group.lead
    if lead is None or standing(lead) is not Standing.REFERENCE or lead.finding is None or result.finding is None:
        return None
    if result.record.is_reference or is_emulated(result):
        return None
    return gain_of(result.record, result.finding, lead.record, lead.finding)


def sources(results: Sequence[Result]) -> Iterator[str]:
    ceiling = next((result.record.ceiling for result in results if result.record.ceiling is not None), None)
    sheet = datasheet_of(ceiling.device) if ceiling is not None else None
    if ceiling is not None and ceiling.rates:
        told = [
            f"{rate_words(rate)} ({units.percent(rate.spread)})"
            for rate in ceiling.rates
            if rate.runs and not rate.steady
        ]
        wide = f"; these are no upper bounds, their runs differ too much: {join_words(told)}" if told else ""
        yield f"Ceilings were measured here{wide}."
    if sheet is not None:
        words = sheet.told("dense", "bandwidth")
        yield f"Peaks are those of the {sheet.name}'s {words} ({sheet.source}, {sheet.date})."


def _bounds(result: Result) -> str:
    """'compute-bound in products (54% of the step, at 71% of its ceiling), memory-bound in elementwise (..)'."""
    step = result.best or 0.0
    roofs = sorted(phase_roofs(result.record, result.finding), key=lambda roof: -roof.seconds)
    by_words = together(
        (words, f"{phase_words(roof.count.phase)} ({units.percent(roof.seconds / step, 0)} of the step{_near(roof)})")
        for roof in roofs
        if step and roof.seconds >= _LEAST_SHARE * step and (words := bound_words(roof))
    )
    return join_words([f"{words} in {join_words(phases, 20)}" for words, phases in by_words.items()], 20)


def _near(roof: PhaseRoof) -> str:
    """', at 71% of its ceiling': of what the nearest one explains."""
    if roof.of_ceiling is not None:
        return f", at {units.percent(roof.of_ceiling, 0)} of its ceiling"
    return f", at {units.percent(roof.of_sheet, 0)} of the datasheet's" if roof.of_sheet is not None else ""


def _gain(reference: str, place: str, result: Result, gain: Gain) -> str:
    """'products are 54% of the step and at 71% of their ceiling: fp8 at its own ceiling would give at most 1.38x'."""
    mode, given, stands = result.mode, speed_up(result), standing(result)
    perhaps = "perhaps " if stands is Standing.DOUBTED else ""
    clear = given is not None and stands is not Standing.UNSURE
    gives = f"it {perhaps}gives {units.speed_up(given.point)}" if given and clear else "what it gives is not clear"
    casts = f"casts move {units.size(gain.cast_bytes)}, products {units.size(gain.product_bytes)}"
    paces = f"{units.speed_up(gain.kernels)} as fast, with the casts {units.speed_up(gain.with_casts)}"
    tax = f"; its products alone are {paces} ({casts})" if gain.cast_bytes else ""
    return (
        f"{reference}'s products{place} are {units.percent(gain.share, 0)} of the step and at "
        f"{units.percent(gain.of_ceiling, 0)} of their ceiling: {mode} at its own ceiling would give "
        f"{'at most' if gain.binds else 'about'} {units.speed_up(gain.most)}; {gives}{tax}."
    )


@section("roofline", "Roofline", 76)
def roofline_section(material: Material) -> Iterator[Element]:
    """FLOPs, bytes and launches as the tape counted them, over best-case seconds, beside the most that the device was
    seen to do here and what its datasheet says. Emulated cases are left out: their time says nothing of a device's
    formats.
    """
    for title, panel in titled_panels(material):
        cases = [case for case in panel.members if any(roof.bound for roof in _roofs(case))]
        if cases:
            yield from _panel(title, panel, cases)
        elif any(result.record.ceiling and result.record.ceiling.rates for result in panel.results):
            yield from (Text(f"{title}: {source}") for source in sources(panel.results))
    told = (how_to_know(entry.panels, entry.run) for entry in material.entries)
    yield from map(Text, dict.fromkeys(filter(None, told)))


def _roofs(case: NamedCase) -> tuple[PhaseRoof, ...]:
    return () if is_emulated(case.result) else phase_roofs(case.result.record, case.result.finding)


def _panel(title: str, panel: Panel, cases: Sequence[NamedCase]) -> Iterator[Element]:
    said = list(sentences(panel))
    if said:
        yield Items(tuple(map(Text, said)))
    yield from (Text(source) for source in sources([case.result for case in cases]))
    cols: list[Col[tuple[NamedCase, PhaseRoof]]] = [
        PRECISION,
        Col("phase", lambda row: phase_words(row[1].count.phase)),
        Col("time", lambda row: row[1].seconds, number=True, unit="s", hint="best case"),
        Col(
            "FLOP/s",
            lambda row: row[1].flop_rate,
            number=True,
            show=partial(units.count, unit="FLOP/s"),
            hint="counted FLOPs over the time",
        ),
        Col(
            "B/s",
            lambda row: row[1].byte_rate or None,
            number=True,
            show=partial(units.count, unit="B/s"),
            hint="counted bytes over the time: a cache may give more than memory",
        ),
        Col("FLOP/B", lambda row: row[1].intensity, number=True, show=units.count, hint="FLOPs for each byte"),
        Col(
            "of ceiling",
            lambda row: row[1].of_ceiling,
            number=True,
            show=partial(units.percent, decimals=0),
            hint="the least time by what was measured here, over the time",
        ),
        Col(
            "of datasheet",
            lambda row: row[1].of_sheet,
            number=True,
            show=partial(units.percent, decimals=0),
            hint="the same by the datasheet",
        ),
        Col(
            "is",
            lambda row: bound_words(row[1]) or None,
            hint="what takes longest of it at the ceilings, if that is half of its time",
        ),
    ]
    rows = ((case.name, [(case, roof) for roof in _roofs(case)]) for case in cases)
    yield from table_of_cases(
        f"roofline-{panel.case.workload}", title, "each phase against the ceilings", cols, rows, "The CSV has them."
    )


UNITS = {**dict.fromkeys(Limit, "B/s"), Limit.PRODUCT: "FLOP/s", Limit.LAUNCH: "launches/s"}


def spread_words(rate: Rate) -> str:
    """'spread 1.5% over 5 runs', with a note if that is too wide for a bound."""
    bound = "" if rate.steady else ": no bound"
    return f"spread {units.percent(rate.spread)} over {len(rate.runs)} runs{bound}"


def shape_words(rate: Rate) -> str:
    if rate.limit is Limit.LAUNCH:
        return "one element"
    size = "x".join(map(str, rate.shape)) if rate.limit is Limit.PRODUCT else f"arrays of {units.size(rate.shape[0])}"
    return f"{size}, the best of {rate.searched} searched"


def rate_words(rate: Rate) -> str:
    """'product bf16'."""
    return f"{rate.limit.value} {rate.precision}".strip()
