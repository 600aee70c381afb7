"""What each case takes of the device's memory, what that is for, and the largest batches that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fp8bench import units
from fp8bench.analysis.metric import capacity_ratio, why_no_larger
from fp8bench.model import PHASES, UNATTRIBUTED, Capacity, MemoryRole, MemoryUse, Phase, Record
from fp8bench.model.specs import (
    DEVICE_MAX_BATCH,
    DEVICE_PEAK_MEMORY,
    MAX_BATCH_MEMORY,
    MAX_BATCH_TOKENS,
    MEMORY_COUNTERS,
    MetricSpec,
    memory_of_role,
)
from fp8bench.report.case_status import cost_tone, is_emulated
from fp8bench.report.columns import Col, figure_col, table, with_figures
from fp8bench.report.elements import ChartAxis, Element, Field, Stacks, Table, Text
from fp8bench.report.page.charts import stack_parts
from fp8bench.report.page.section import Material, mark_emulated, section, titled_panels
from fp8bench.report.panels import NamedCase, Panel, Result, ResultGroup, show_params, value_of
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import MEMORY_TITLES, MEMORY_WORDS, PHASE_TITLES

PEAK = "peak_memory"
# The outer ones of nested phases with the same highest point.
_OUTER = (UNATTRIBUTED, Phase.ELEMENTWISE)
_OF_EMULATIONS = (
    "What fits of an emulated case says nothing of a device with its formats; 'on a device' is derived by a line "
    "through what two batches would take there."
)
_Row = tuple[NamedCase, MemoryUse]


def use_of(record: Record) -> MemoryUse | None:
    return record.memory if record.is_ok else None


def peak_of(result: Result) -> float | None:
    """Bytes at the highest point of a step: the figure of every table, chart and row for programs."""
    figure, use = value_of(result.record.measurement(PEAK)), use_of(result.record)
    return use.peak if figure is None and use is not None else figure


def roles_of(result: Result) -> dict[MemoryRole, int]:
    use = use_of(result.record)
    known = dict(use.roles) if use else {}
    return {role: known[role] for role in MemoryRole if role in known}


def highest_in(use: MemoryUse) -> list[str]:
    most = max((phase.allocated for phase in use.phases), default=0)
    names = [phase.phase for phase in use.phases if phase.allocated == most]
    return sorted(names, key=lambda phase: (phase in _OUTER, PHASES.index(phase) if phase in PHASES else 0))


def share_of(group: ResultGroup, result: Result) -> float | None:
    """A peak over that of the group's reference; None for the reference and if either is unknown. The peak of an
    emulated reference is the cost of emulation: a native case is not compared with it."""
    base, peak = _base(group), peak_of(result)
    if group.lead is not None and is_emulated(group.lead) and not is_emulated(result):
        return None
    if result.record.is_reference or peak is None or not (0 < base < math.inf and 0 <= peak < math.inf):
        return None
    return peak / base


def on_device(result: Result) -> float | None:
    """Bytes on hardware that keeps the formats that this case emulates; None for other cases."""
    return value_of(result.record.measurement(DEVICE_PEAK_MEMORY)) if is_emulated(result) else None


def device_share_of(group: ResultGroup, result: Result) -> float | None:
    """on_device over the peak of the group's reference, on a device as well if that is emulated."""
    lead = group.lead
    base, peak = (on_device(lead) or 0.0) if lead and is_emulated(lead) else _base(group), on_device(result)
    return None if peak is None or not 0 < base < math.inf else peak / base


def device_words(group: ResultGroup, result: Result) -> str:
    """'0.55x (186 KiB)'; '' if unknown."""
    share, size = device_share_of(group, result), on_device(result)
    return "" if share is None or size is None else f"{units.ratio(share)} ({units.size(size)})"


def _base(group: ResultGroup) -> float:
    return (peak_of(group.lead) if group.lead else None) or 0.0


def batch_title(search: Capacity) -> str:
    """'largest batch that fits into 2.00 GiB', with the axis if it has another name."""
    axis = "" if search.axis == "batch" else f" ({search.axis})"
    limit = "the device's memory" if search.limit is None else units.size(search.limit)
    return f"largest batch{axis} that fits into {limit}"


def show_batch(search: Capacity) -> str:
    """'376', 'none' if not even the smallest fits, '-' if the search had no answer."""
    if search.batch is None:
        return units.NONE
    return str(search.batch) if search.batch else "none"


def device_batch(group: ResultGroup, result: Result) -> str:
    """'1203, 3.20x': what would fit on hardware with the formats, over what fits of the reference."""
    search = result.record.capacity
    if search is None or search.on_device is None:
        return ""
    lead = group.lead
    known = lead.record.capacity if lead is not None else None
    base = None if lead is None or known is None else known.on_device if is_emulated(lead) else known.batch
    share = f", {units.speed_up(search.on_device / base)}" if base else ""
    return f"{search.on_device}{share}"


def tells_memory(panel: Panel) -> bool:
    return any(len(roles_of(result)) > 1 for result in panel.results)


def counters_of(cases: Iterable[NamedCase]) -> list[MetricSpec]:
    known = [case.figures for case in cases if use_of(case.result.record) is not None]
    return [spec for spec in MEMORY_COUNTERS if any(figures[spec].value is not None for figures in known)]


def memory(panel: Panel) -> Iterator[Table]:
    if not tells_memory(panel):
        return
    uses = [(case, use) for case in panel.members if (use := use_of(case.result.record)) is not None]
    present = {role for case, _ in uses for role in roles_of(case.result)}
    derived = any(on_device(case.result) for case, _ in uses)
    scale, unit = units.binary_unit(max(peak_of(case.result) or 0.0 for case, _ in uses))

    def shown(size: float) -> str:
        if not size:
            return units.NONE
        return units.significant(size / scale) if size / scale >= 0.01 else "<0.01"

    cols: list[Col[_Row]] = [
        Col("group", lambda row: row[0].place, shared=True),
        Col(
            "case",
            lambda row: mark_emulated(row[0].result, row[0].result.mode)[0],
            tone=lambda row: cost_tone(row[0].result),
        ),
        Col("peak", lambda row: peak_of(row[0].result), number=True, show=shown),
        Col(f"vs {panel.reference or 'reference'}", lambda row: share_of(*row[0]), number=True, unit="x"),
        Col(
            "on a device",
            lambda row: device_words(*row[0]) or None,
            number=True,
            hint=DEVICE_PEAK_MEMORY.description,
            when=derived,
        ),
        *(
            Col(MEMORY_TITLES[role], partial(_figure, name=memory_of_role(role)), number=True, show=shown)
            for role in MemoryRole
            if role in present
        ),
        Col(
            "in",
            lambda row: PHASE_TITLES.get(phase := next(iter(highest_in(row[1])), units.NONE), phase),
            hint="the phase of the highest point",
        ),
        *(replace(figure_col(spec, partial(_figure, name=spec)), show=shown) for spec in counters_of(panel.members)),
    ]
    yield table("memory", f"memory at the highest point of a step, in {unit}", cols, uses)


def _figure(row: _Row, name: str) -> float | None:
    return row[0].figures[name].value


def capacity(panel: Panel) -> Iterator[Element]:
    searches = panel.known(lambda result: result.record.capacity)
    if not searches:
        return

    def against(row: tuple[ResultGroup, Result, Capacity]) -> Field:
        own, lead = row[1], row[0].lead
        share = capacity_ratio(own.record, lead.record if lead is not None else None)
        word = "emulated" if is_emulated(own) else "reference" if own.record.is_reference else units.NONE
        return Field(word if share is None else units.speed_up(share), share, cost_tone(own))

    cols: list[Col[tuple[ResultGroup, Result, Capacity]]] = [
        Col(
            "group",
            lambda row: show_params(
                pair for pair in row[0].case.params if pair not in panel.shared and pair[0] != row[2].axis
            ),
            shared=True,
        ),
        Col("case", lambda row: row[1].mode, tone=lambda row: cost_tone(row[1])),
        Col("largest", lambda row: Field(show_batch(row[2]), row[2].batch, cost_tone(row[1])), number=True),
        Col(f"vs {panel.reference or 'reference'}", against),
        Col(
            DEVICE_MAX_BATCH.heading,
            lambda row: device_batch(*row[:2]) or None,
            number=True,
            hint=DEVICE_MAX_BATCH.description,
            when=any(row[2].on_device for row in searches),
        ),
        Col(MAX_BATCH_TOKENS.heading, lambda row: row[2].tokens or None, number=True, show=MAX_BATCH_TOKENS.shown),
        Col(MAX_BATCH_MEMORY.heading, lambda row: row[2].peak, number=True, unit="B"),
        Col("does not fit", lambda row: why_no_larger(row[2])),
    ]
    shown = table(
        "capacity", batch_title(searches[0][2]), cols, searches, kept={col.heading for col in cols} - {"group"}
    )
    yield with_figures(shown, (case[:2] for case in searches))
    if any(is_emulated(result) for _, result, _ in searches):
        yield Text(_OF_EMULATIONS)


def _lead(material: Material) -> str:
    results = (result for _, panel in timed_panels(material) for result in panel.results)
    measured = (result.record.measurement(PEAK) for result in results)
    described = next(
        (measurement.description for measurement in measured if measurement and measurement.description), ""
    )
    words = described or "memory at the highest point of a step"
    return f"{words[:1].upper()}{words[1:]}; from a pass of its own, which is not timed."


@section("memory", "Memory", 90, lead=_lead)
def memory_section(material: Material) -> Iterator[Element]:
    panels = [
        (title, panel, [case for case in panel.members if peak_of(case.result) is not None])
        for title, panel in timed_panels(material)
    ]
    known = {role for _, _, cases in panels for case in cases for role in _parts(case)}
    # The same parts everywhere, so that a role has one colour on the whole page.
    parts = {role.value: MEMORY_WORDS[role].replace(" copies of", "") for role in MemoryRole if role in known}
    for title, panel, cases in panels:
        if any(roles_of(case.result) for case in cases):
            yield _chart(title, cases, parts)
        for made in memory(panel):
            yield replace(made, name=f"memory-of-{panel.case.workload}", caption=f"{title}: {made.caption}")
    for place, (title, panel) in enumerate(titled_panels(material)):
        for element in capacity(panel):
            yield (
                replace(element, name=f"capacity-{panel.case.workload}-{place}", caption=f"{title}: {element.caption}")
                if isinstance(element, Table)
                else element
            )


def _parts(case: NamedCase) -> dict[str, float]:
    """Bytes by role; all of them are the rest if roles are unknown."""
    known = {role.value: float(size) for role, size in roles_of(case.result).items()}
    return known or {MemoryRole.OTHER.value: peak_of(case.result) or 0.0}


def _chart(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Stacks:
    rows = [(mark_emulated(case.result, case.name)[0], peak_of(case.result) or 0.0, _parts(case)) for case in cases]
    name, words = f"memory-{cases[0].result.record.case.workload}", "What each case takes, by what it is for."
    axis = ChartAxis("memory at the highest point of a step", "B")
    return stack_parts(name, f"{title}: peak memory by what it is for", words, axis, "share of the peak", parts, rows)
