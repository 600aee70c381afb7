"""The peaks of a device, and phases relative to them: what limits each phase, and the possible gain of a precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

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
from fp8bench.report.case_status import Standing, speed_up, standing
from fp8bench.report.columns import Col
from fp8bench.report.elements import Elements, Sentences, Text, items_of
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import NamedCase, Panel, Result, ResultGroup
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
    if beyond:
        return "in cache"
    return roof.bound.value


def sentences(panel: Panel) -> Sentences:
    for group in panel.groups:
        place = f" at {group.place}" if len(panel.groups) > 1 else ""
        for result in group.results:
            words = _bounds(result)
            if words and not result.is_emulated:
                yield f"{result.mode}{place} is {words}."
        for result in group.results:
            gain = gain_in(group, result)
            if gain is not None:
                yield _gain(group.reference, place, result, gain)


def how_to_know(panels: Iterable[Panel], run: Run) -> str:
    """What to do if steps were counted and timed but the device's ceilings are unknown; else ''."""
    roofs: list[PhaseRoof] = []
    for result in chain.from_iterable(panel.results for panel in panels):
        if result.is_emulated:
            continue
        if result.record.ceiling is not None and result.record.ceiling.rates:
            return ""
        roofs += phase_roofs(result.record, result.finding)
    if not roofs or any(roof.bound for roof in roofs):
        return ""
    threads = f" --threads {run.request.threads}" if run.request.threads != 1 else ""
    store = ", with the same --store," if "--store" in run.command else ""
    return (
        f"What bounds each phase is not known yet: `fp8bench suite ceilings{threads}`{store} measures what this "
        "machine does at most, in less than a minute, and later runs say it."
    )


def gain_in(group: ResultGroup, result: Result) -> Gain | None:
    reference = group.lead
    if reference is None or reference.finding is None or standing(reference) is not Standing.REFERENCE:
        return None
    if result.finding is None or result.is_reference or result.is_emulated:
        return None
    return gain_of(result.record, result.finding, reference.record, reference.finding)


def sources(results: Sequence[Result]) -> Sentences:
    ceiling = next((result.record.ceiling for result in results if result.record.ceiling is not None), None)
    if ceiling is None:
        return
    if ceiling.rates:
        # A ceiling whose runs differ may be too low: it bounds nothing.
        uncertain = [rate for rate in ceiling.rates if rate.runs and not rate.steady]
        words = join_words(f"{rate_words(rate)} ({units.percent(rate.spread)})" for rate in uncertain)
        wide = f"; these are no upper bounds, their runs differ too much: {words}" if uncertain else ""
        yield f"Ceilings were measured here{wide}."
    sheet = datasheet_of(ceiling.device)
    if sheet is not None:
        words = sheet.cite("dense", "bandwidth")
        yield f"Peaks are those of the {sheet.name}'s {words} ({sheet.source}, {sheet.date})."


def _bounds(result: Result) -> str:
    """'compute-bound in products (54% of the step, at 71% of its ceiling), memory-bound in elementwise (..)'."""
    step = result.best or 0.0
    phases_by_bound: dict[str, list[str]] = {}
    for roof in sorted(phase_roofs(result.record, result.finding), key=lambda roof: -roof.seconds):
        words = bound_words(roof)
        if words and step and roof.seconds >= _LEAST_SHARE * step:
            share = units.percent(roof.seconds / step, 0)
            phase = f"{phase_words(roof.count.phase)} ({share} of the step{_near(roof)})"
            phases_by_bound.setdefault(words, []).append(phase)
    return join_words([f"{words} in {join_words(phases, 20)}" for words, phases in phases_by_bound.items()], 20)


def _near(roof: PhaseRoof) -> str:
    """', at 71% of its ceiling': of what the nearest one explains."""
    if roof.of_ceiling is not None:
        return f", at {units.percent(roof.of_ceiling, 0)} of its ceiling"
    if roof.of_sheet is not None:
        return f", at {units.percent(roof.of_sheet, 0)} of the datasheet's"
    return ""


def _gain(reference: str, place: str, result: Result, gain: Gain) -> str:
    """'products are 54% of the step and at 71% of their ceiling: fp8 at its own ceiling would give at most 1.38x'."""
    speed = speed_up(result)
    status = standing(result)
    gives = "what it gives is not clear"
    if speed is not None and status is not Standing.UNSURE:
        perhaps = "perhaps " if status is Standing.DOUBTED else ""
        gives = f"it {perhaps}gives {units.speed_up(speed.point)}"
    if gain.cast_bytes:
        paces = f"{units.speed_up(gain.kernels)} as fast, with the casts {units.speed_up(gain.with_casts)}"
        moved = f"casts move {units.size(gain.cast_bytes)}, products {units.size(gain.product_bytes)}"
        gives += f"; its products alone are {paces} ({moved})"
    most = f"{'at most' if gain.binds else 'about'} {units.speed_up(gain.most)}"
    return (
        f"{reference}'s products{place} are {units.percent(gain.share, 0)} of the step and at "
        f"{units.percent(gain.of_ceiling, 0)} of their ceiling: {result.mode} at its own ceiling would give "
        f"{most}; {gives}."
    )


@section("roofline", "Roofline", 76)
def roofline_section(material: Material) -> Elements:
    """FLOPs, bytes and launches as the tape counted them, over best-case seconds, beside the most that the device was
    seen to do here and what its datasheet says. Emulated cases are left out: their time says nothing of a device's
    formats.
    """
    for title, panel in titled_panels(material):
        cases = [(case, _roofs(case)) for case in panel.members]
        cases = [(case, roofs) for case, roofs in cases if any(roof.bound for roof in roofs)]
        if cases:
            yield from _panel(title, panel, cases)
        elif any(result.record.ceiling and result.record.ceiling.rates for result in panel.results):
            yield from (Text(f"{title}: {source}") for source in sources(panel.results))
    hints = [how_to_know(entry.panels, entry.run) for entry in material.entries]
    yield from map(Text, filter(None, dict.fromkeys(hints)))


def _roofs(case: NamedCase) -> tuple[PhaseRoof, ...]:
    if case.is_emulated:
        return ()
    return phase_roofs(case.record, case.finding)


def _panel(title: str, panel: Panel, cases: Sequence[tuple[NamedCase, tuple[PhaseRoof, ...]]]) -> Elements:
    yield from items_of(sentences(panel))
    yield from map(Text, sources([case.result for case, _ in cases]))

    def share(heading: str, of: Callable[[PhaseRoof], float | None], hint: str) -> Col[tuple[NamedCase, PhaseRoof]]:
        return Col(heading, lambda row: of(row[1]), show=partial(units.percent, decimals=0), hint=hint)

    def rate(heading: str, of: Callable[[PhaseRoof], float | None], hint: str) -> Col[tuple[NamedCase, PhaseRoof]]:
        return Col(heading, lambda row: of(row[1]), show=partial(units.count, unit=heading), hint=hint)

    moved = "counted bytes over the time: a cache may give more than memory"
    cols: list[Col[tuple[NamedCase, PhaseRoof]]] = [
        PRECISION,
        Col("phase", lambda row: phase_words(row[1].count.phase)),
        Col("time", lambda row: row[1].seconds, unit="s", hint="best case"),
        rate("FLOP/s", lambda roof: roof.flop_rate, "counted FLOPs over the time"),
        rate("B/s", lambda roof: roof.byte_rate or None, moved),
        Col("FLOP/B", lambda row: row[1].intensity, show=units.count, hint="FLOPs for each byte"),
        share("of ceiling", lambda roof: roof.of_ceiling, "the least time by what was measured here, over the time"),
        share("of datasheet", lambda roof: roof.of_sheet, "the same by the datasheet"),
        Col(
            "is",
            lambda row: bound_words(row[1]) or None,
            hint="what takes longest of it at the ceilings, if that is half of its time",
        ),
    ]
    rows = ((case.name, [(case, roof) for roof in roofs]) for case, roofs in cases)
    yield from table_of_cases(
        f"roofline-{panel.suite}", title, "each phase against the ceilings", cols, rows, "The CSV has them."
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
