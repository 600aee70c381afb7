"""What bounds the phases of a case, and what its precision could give at most, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.datasheet import datasheet_of
from fp8bench.analysis.roofline import Bound, Gain, PhaseRoof, gain_of, phase_roofs
from fp8bench.model import Run
from fp8bench.report.case_status import Standing, emulated, speed_up, standing
from fp8bench.report.panels import Panel, Result, ResultGroup, together
from fp8bench.report.words.naming import listed, phase_words

# Phases that take less of a step than this are left out of sentences.
_LEAST_SHARE = 0.02
# What moves so much more than memory gives is in a cache.
_CACHED = 1.05


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
