"""The device memory of each case, its composition, and the largest batches that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

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
from fp8bench.report.case_status import cost_tone
from fp8bench.report.columns import Col, Cols, table, with_figures
from fp8bench.report.elements import ChartAxis, Elements, Stacks, Tables, Text, Tone
from fp8bench.report.page.charts import stack_parts
from fp8bench.report.page.section import Material, mark_emulated, name_tables, section, titled_panels
from fp8bench.report.panels import Cases, CaseValue, NamedCase, Panel, Result, describe_params, join_parts, value_of
from fp8bench.report.topics.own_batch import own_batch_of, own_batches
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import MEMORY_TITLES, MEMORY_WORDS, PHASE_TITLES
from fp8bench.report.words.naming import figure_words

PEAK = "peak_memory"
# The outer ones of nested phases with the same highest point.
_OUTER = (UNATTRIBUTED, Phase.ELEMENTWISE)
_OF_EMULATIONS = (
    "The batch that fits an emulated case does not apply to a device with its formats; 'on a device' is an estimate "
    "for such a device, by a line through the memory of two batches."
)
_Row = CaseValue[MemoryUse]
_SearchRow = CaseValue[Capacity]


def use_of(record: Record) -> MemoryUse | None:
    if record.is_ok:
        return record.memory
    return None


def peak_of(result: Result) -> float | None:
    """Returns a step's peak memory in bytes: the figure of every table, chart and CSV row."""
    figure = value_of(result.record.measurement(PEAK))
    use = use_of(result.record)
    if figure is None and use is not None:
        return use.peak
    return figure


def roles_of(result: Result) -> dict[MemoryRole, int]:
    use = use_of(result.record)
    sizes = dict(use.roles) if use else {}
    return {role: sizes[role] for role in MemoryRole if role in sizes}


def highest_in(use: MemoryUse) -> list[str]:
    most = max((phase.allocated for phase in use.phases), default=0)
    names = [phase.phase for phase in use.phases if phase.allocated == most]
    return sorted(names, key=lambda phase: (phase in _OUTER, PHASES.index(phase) if phase in PHASES else 0))


def share_of(case: NamedCase) -> float | None:
    """Returns a peak over that of the reference; None for the reference, and if either is unknown.

    A native case is not compared with an emulated reference, whose peak is the cost of emulation.
    """
    if case.lead is not None and case.lead.is_emulated and not case.is_emulated:
        return None
    base = _base(case)
    peak = peak_of(case)
    if case.is_reference or peak is None or not 0 < base < math.inf or not 0 <= peak < math.inf:
        return None
    return peak / base


def on_device(result: Result) -> float | None:
    """Returns the bytes on hardware with the formats that this case emulates; None for native cases."""
    if result.is_emulated:
        return value_of(result.record.measurement(DEVICE_PEAK_MEMORY))
    return None


def device_share_of(case: NamedCase) -> float | None:
    """Returns on_device over the reference's peak, or over its on_device if the reference is also emulated."""
    base = _base(case)
    peak = on_device(case)
    if case.lead is not None and case.lead.is_emulated:
        base = on_device(case.lead) or 0.0
    if peak is None or not 0 < base < math.inf:
        return None
    return peak / base


def _device_words(row: _Row) -> str | None:
    """Returns '0.55x (186 KiB)'; None if unknown."""
    share = device_share_of(row.case)
    if share is None:
        return None
    return f"{units.ratio(share)} ({units.size(on_device(row.case))})"


def _base(case: NamedCase) -> float:
    return (peak_of(case.lead) if case.lead else None) or 0.0


def batch_title(search: Capacity) -> str:
    """Returns 'largest batch that fits into 2.00 GiB', with the axis if it is not called batch."""
    axis = "" if search.axis == "batch" else f" ({search.axis})"
    limit = "the device's memory" if search.limit is None else units.size(search.limit)
    return f"largest batch{axis} that fits into {limit}"


def _device_batch(row: _SearchRow) -> str | None:
    """Returns '1203, 3.20x': the batch that would fit on hardware with the formats, over the reference's batch."""
    search = row.value
    reference = row.case.lead
    if search.on_device is None:
        return None
    base = None
    if reference is not None and reference.record.capacity is not None:
        fits = reference.record.capacity
        base = fits.on_device if reference.is_emulated else fits.batch
    return join_parts(str(search.on_device), units.speed_up(search.on_device / base) if base else "")


def tells_memory(panel: Panel) -> bool:
    return any(len(roles_of(case)) > 1 for case in panel.members)


def counters_of(cases: Iterable[NamedCase]) -> list[MetricSpec]:
    names: set[str] = set()
    for case in cases:
        if use_of(case.record) is not None:
            names |= {name for name, metric in case.figures.items() if metric.value is not None}
    return [spec for spec in MEMORY_COUNTERS if spec in names]


def memory(panel: Panel) -> Tables:
    if not tells_memory(panel):
        return
    uses = panel.find_values(lambda result: use_of(result.record))
    # One unit for the whole table: columns must compare at a glance.
    scale, unit = units.binary_unit(max(peak_of(use.case) or 0.0 for use in uses))

    def show(size: float) -> str:
        if not size:
            return units.NONE
        if size / scale >= 0.01:
            return units.significant(size / scale)
        return "<0.01"

    def figure(heading: str, name: str, unit: str = "", hint: str = "") -> Col[_Row]:
        return Col(heading, lambda row: row.case.figures[name].value, show=show, unit=unit, hint=hint)

    def highest_phase(row: _Row) -> str:
        phase = next(iter(highest_in(row.value)), units.NONE)
        return PHASE_TITLES.get(phase, phase)

    cols: Cols[_Row] = [
        Col("group", "case.place", shared=True),
        Col("case", lambda row: mark_emulated(row.case, row.case.mode), tone=lambda row: cost_tone(row.case)),
        Col("peak", lambda row: peak_of(row.case), show=show),
        Col(f"vs {panel.reference or 'reference'}", lambda row: share_of(row.case), unit="x"),
    ]
    if any(on_device(use.case) for use in uses):
        cols.append(Col("on a device", _device_words, number=True, hint=DEVICE_PEAK_MEMORY.description))
    present = set().union(*(roles_of(use.case) for use in uses))
    cols += [figure(MEMORY_TITLES[role], memory_of_role(role)) for role in MemoryRole if role in present]
    cols.append(Col("in", highest_phase, hint="the phase of the highest point"))
    cols += [figure(figure_words(spec), spec, spec.unit, spec.description) for spec in counters_of(panel.members)]
    yield table("memory", f"memory at the highest point of a step, in {unit}", cols, uses)


def capacity(panel: Panel) -> Elements:
    searches = panel.find_values(lambda result: result.record.capacity)
    if not searches:
        return

    def setting(row: _SearchRow) -> str:
        shared = dict(panel.shared)
        return describe_params(
            (name, value) for name, value in row.case.group.case.params if name not in shared and name != row.value.axis
        )

    def tone(row: _SearchRow) -> Tone:
        return cost_tone(row.case)

    cols: Cols[_SearchRow] = [
        Col("group", setting, shared=True),
        Col("case", "case.mode", tone=tone),
        Col("largest", "value.batch", show=lambda batch: str(batch or "none"), tone=tone),
        Col(f"vs {panel.reference or 'reference'}", _against_reference, tone=tone),
        Col(MAX_BATCH_TOKENS.heading, lambda row: row.value.tokens or None, show=MAX_BATCH_TOKENS.to_text),
        Col(MAX_BATCH_MEMORY.heading, "value.peak", unit="B"),
        Col("does not fit", lambda row: why_no_larger(row.value)),
    ]
    if any(search.value.on_device for search in searches):
        derived = Col(DEVICE_MAX_BATCH.heading, _device_batch, number=True, hint=DEVICE_MAX_BATCH.description)
        cols.insert(4, derived)
    # The group is left out if there is only one setting.
    required = {col.heading for col in cols} - {"group"}
    batches = table("capacity", batch_title(searches[0].value), cols, searches, required=required)
    yield with_figures(batches, [search.case for search in searches])
    yield from own_batches(own_batch_of(case, search) for case, search in searches)
    if any(search.case.is_emulated for search in searches):
        yield Text(_OF_EMULATIONS)


def _against_reference(row: _SearchRow) -> str:
    case = row.case
    share = capacity_ratio(case.record, case.lead.record if case.lead is not None else None)
    if share is not None:
        return units.speed_up(share)
    if case.is_emulated:
        return "emulated"
    return "reference" if case.is_reference else units.NONE


def _lead(material: Material) -> str:
    words = ""
    for _, panel in timed_panels(material):
        described = [measurement.description for measurement in panel.measurements if measurement.metric == PEAK]
        words = words or next(filter(None, described), "")
    words = words or "memory at the highest point of a step"
    return f"{words[:1].upper()}{words[1:]}; from a separate pass, which is not timed."


@section("memory", "Memory", 90, lead=_lead)
def memory_section(material: Material) -> Elements:
    panels = []
    present: set[str] = set()
    for title, panel in timed_panels(material):
        cases = [case for case in panel.members if peak_of(case) is not None]
        present.update(*map(_parts, cases))
        panels.append((title, panel, cases))
    # The same parts everywhere, so that a role has one colour on the whole page.
    parts = {role.value: MEMORY_WORDS[role].replace(" copies of", "") for role in MemoryRole if role in present}
    for title, panel, cases in panels:
        if any(roles_of(case) for case in cases):
            yield _chart(title, cases, parts)
        yield from name_tables(memory(panel), f"of-{panel.suite}", title)
    for place, (title, panel) in enumerate(titled_panels(material)):
        yield from name_tables(capacity(panel), f"{panel.suite}-{place}", title)


def _parts(case: NamedCase) -> dict[str, float]:
    """Returns bytes by role; if roles are unknown, all bytes as the rest."""
    sizes = {role.value: float(size) for role, size in roles_of(case).items()}
    return sizes or {MemoryRole.OTHER.value: peak_of(case) or 0.0}


def _chart(title: str, cases: Cases, parts: Mapping[str, str]) -> Stacks:
    bars = [(mark_emulated(case, case.name), peak_of(case) or 0.0, _parts(case)) for case in cases]
    return stack_parts(
        f"memory-{cases[0].suite}",
        f"{title}: peak memory by use",
        "The memory of each case at the highest point of a step, by use.",
        ChartAxis("memory at the highest point of a step", "B"),
        "share of the peak",
        parts,
        bars,
    )
