"""The peaks of a device, and phases relative to them: what limits each phase, and the possible gain of a precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from fp8bench.report.columns import Col, Cols
from fp8bench.report.elements import Elements, Sentences, Text, items_of
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import CaseValue, NamedCase, Panel, Result
from fp8bench.report.words.naming import join_words, phase_words

# Phases with a smaller share of the step are left out of sentences.
_LEAST_SHARE = 0.02
# Phases that move more than this share of the memory's rate run from a cache.
_CACHED = 1.05


def bound_words(roof: PhaseRoof) -> str:
    """'memory-bound', or 'in cache' if it moves more than the memory can; '' if unknown."""
    if roof.bound is None:
        return ""
    beyond = roof.bound is Bound.MEMORY and (roof.of_ceiling or roof.of_sheet or 0.0) > _CACHED
    if beyond:
        return "in cache"
    return roof.bound.value


def describe_bounds(panel: Panel) -> Sentences:
    for case in panel.members:
        words = _bounds(case)
        if words and not case.is_emulated:
            yield f"{case.mode}{_locate(panel, case)} is {words}."


def describe_gains(panel: Panel) -> Sentences:
    for case in panel.members:
        gain = _find_gain(case)
        if gain is not None:
            yield _gain(case, _locate(panel, case), gain)


def _locate(panel: Panel, case: NamedCase) -> str:
    return f" at {case.place}" if len(panel.groups) > 1 else ""


def how_to_know(panels: Iterable[Panel], run: Run) -> str:
    """Returns what to do if steps were counted and timed but the device has no ceilings; else ''."""
    roofs: list[PhaseRoof] = []
    for case in chain.from_iterable(panel.members for panel in panels):
        if case.is_emulated:
            continue
        if case.record.ceiling is not None and case.record.ceiling.rates:
            return ""
        roofs += phase_roofs(case.record, case.finding)
    if not roofs or any(roof.bound for roof in roofs):
        return ""
    threads = f" --threads {run.request.threads}" if run.request.threads != 1 else ""
    store = ", with the same --store," if "--store" in run.command else ""
    return (
        f"The limits of phases are unknown: `fp8bench suite ceilings{threads}`{store} measures this machine's peaks "
        "in less than a minute, and later runs compare with them."
    )


def _find_gain(case: NamedCase) -> Gain | None:
    reference = case.lead
    if reference is None or reference.finding is None or standing(reference) is not Standing.REFERENCE:
        return None
    if case.finding is None or case.is_reference or case.is_emulated:
        return None
    return gain_of(case.record, case.finding, reference.record, reference.finding)


def sources(results: Sequence[Result]) -> Sentences:
    ceiling = next((result.record.ceiling for result in results if result.record.ceiling is not None), None)
    if ceiling is None:
        return
    if ceiling.rates:
        # A peak may be higher than what was measured if repetitions differ.
        uncertain = [rate for rate in ceiling.rates if rate.runs and not rate.steady]
        words = join_words(f"{rate_words(rate)} ({units.percent(rate.spread)})" for rate in uncertain)
        wide = f"; not upper bounds, because repeated measurements differ too much: {words}" if uncertain else ""
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
    """Returns ', at 71% of its ceiling'; '' if no peak is known."""
    if roof.of_ceiling is not None:
        return f", at {units.percent(roof.of_ceiling, 0)} of its ceiling"
    if roof.of_sheet is not None:
        return f", at {units.percent(roof.of_sheet, 0)} of the datasheet's"
    return ""


def _gain(case: NamedCase, place: str, gain: Gain) -> str:
    """'products are 54% of the step and at 71% of their ceiling: fp8 at its own ceiling would give at most 1.38x'."""
    speed = speed_up(case)
    status = standing(case)
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
        f"{case.group.reference}'s products{place} are {units.percent(gain.share, 0)} of the step and at "
        f"{units.percent(gain.of_ceiling, 0)} of their ceiling: {case.mode} at its own ceiling would give "
        f"{most}; {gives}."
    )


@section("roofline", "Roofline", 76)
def roofline_section(material: Material) -> Elements:
    """FLOPs, bytes and launches, as the tape counted them, over the best case's seconds; next to the peaks measured on
    this device and those of its datasheet. Emulated cases are left out: their time is not that of the format.
    """
    for title, panel in titled_panels(material):
        cases = []
        for case in panel.members:
            roofs = () if case.is_emulated else phase_roofs(case.record, case.finding)
            if any(roof.bound for roof in roofs):
                cases.append((case, roofs))
        if cases:
            yield from _panel(title, panel, cases)
        elif any(case.record.ceiling and case.record.ceiling.rates for case in panel.members):
            yield from (Text(f"{title}: {source}") for source in sources(panel.members))
    hints = [how_to_know(entry.panels, entry.run) for entry in material.entries]
    yield from map(Text, filter(None, dict.fromkeys(hints)))


def _panel(title: str, panel: Panel, cases: Sequence[tuple[NamedCase, Sequence[PhaseRoof]]]) -> Elements:
    # The table has the bounds of all phases.
    yield from items_of(describe_gains(panel))
    yield from map(Text, sources([case for case, _ in cases]))

    whole_percent = partial(units.percent, decimals=0)
    moved = "counted bytes over the time: a cache may give more than memory"
    cols: Cols[CaseValue[PhaseRoof]] = [
        PRECISION,
        Col("phase", lambda row: phase_words(row.value.count.phase)),
        Col("time", "value.seconds", unit="s", hint="best case"),
        Col("FLOP/s", "value.flop_rate", show=partial(units.count, unit="FLOP/s"), hint="counted FLOPs over the time"),
        Col("B/s", lambda row: row.value.byte_rate or None, show=partial(units.count, unit="B/s"), hint=moved),
        Col("FLOP/B", "value.intensity", show=units.count, hint="FLOPs for each byte"),
        Col("of ceiling", "value.of_ceiling", show=whole_percent, hint="least time by the peaks measured here / time"),
        Col("of datasheet", "value.of_sheet", show=whole_percent, hint="the same by the datasheet's peaks"),
        Col("limit", lambda row: bound_words(row.value) or None, hint="takes at least half of the time at the peaks"),
    ]
    yield from table_of_cases(f"roofline-{panel.suite}", f"{title}: each phase against the ceilings", cols, cases)


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
