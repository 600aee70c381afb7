"""Reports the peak memory of each case, what uses it, and the largest batches that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fp8bench import units
from fp8bench.analysis.metric import capacity_ratio, explain_batch_limit
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
from fp8bench.report.columns import Col, Cols, add_figure_columns, table
from fp8bench.report.elements import ChartAxis, Elements, Stacks, Tables, Text, Tone
from fp8bench.report.page.charts import stack_chart
from fp8bench.report.page.section import Material, mark_emulation, panels_with_titles, rename_tables, section
from fp8bench.report.panels import Cases, CaseValue, NamedCase, Panel, Result, describe_params, join_parts, median_value
from fp8bench.report.topics.own_batch import make_own_batch, own_batch_table
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import MEMORY_TITLES, MEMORY_WORDS, PHASE_TITLES
from fp8bench.report.words.naming import figure_words

PEAK_METRIC = "peak_memory"
# These phases may contain other phases. If an outer and an inner phase reach the same peak, the inner one is named.
_OUTER_PHASES = (UNATTRIBUTED, Phase.ELEMENTWISE)
_EMULATIONS_LEGEND = (
    "The batch that fits an emulated case does not apply to a device with its formats; 'on a device' is an estimate "
    "for such a device, by a line through the memory of two batches."
)
_CaseMemory = CaseValue[MemoryUse]
_CaseCapacity = CaseValue[Capacity]


def memory_use(record: Record) -> MemoryUse | None:
    if record.is_ok:
        return record.memory
    return None


def peak_bytes(result: Result) -> float | None:
    """Returns the peak memory of a step in bytes. All tables, charts and CSV rows use this number."""
    measured_peak = median_value(result.record.measurement(PEAK_METRIC))
    recorded_memory = memory_use(result.record)
    if measured_peak is None and recorded_memory is not None:
        return recorded_memory.peak
    return measured_peak


def bytes_by_role(result: Result) -> dict[MemoryRole, int]:
    recorded_memory = memory_use(result.record)
    sizes = dict(recorded_memory.roles) if recorded_memory else {}
    return {role: sizes[role] for role in MemoryRole if role in sizes}


def phases_at_peak(use: MemoryUse) -> list[str]:
    """Returns the phases in which memory reached its peak, inner phases first."""
    peak = max((phase.allocated for phase in use.phases), default=0)
    names = [phase.phase for phase in use.phases if phase.allocated == peak]
    return sorted(names, key=lambda phase: (phase in _OUTER_PHASES, PHASES.index(phase) if phase in PHASES else 0))


def peak_ratio(case: NamedCase) -> float | None:
    """Returns the peak memory divided by that of the reference. Returns None for the reference, or if a peak is
    unknown.

    A native case is not compared with an emulated reference, because that peak is the cost of emulation.
    """
    if case.reference_result is not None and case.reference_result.is_emulated and not case.is_emulated:
        return None
    reference_peak = _reference_peak(case)
    peak = peak_bytes(case)
    if case.is_reference or peak is None or not 0 < reference_peak < math.inf or not 0 <= peak < math.inf:
        return None
    return peak / reference_peak


def device_peak_bytes(result: Result) -> float | None:
    """Returns the peak memory that an emulated case would have on hardware with its formats, by an estimate. Returns
    None for a native case.
    """
    if result.is_emulated:
        return median_value(result.record.measurement(DEVICE_PEAK_MEMORY))
    return None


def device_peak_ratio(case: NamedCase) -> float | None:
    """Returns the estimated peak memory on hardware with the formats, divided by the reference's peak. Returns None
    if unknown. If the reference is emulated, its estimated peak is used.
    """
    reference_peak = _reference_peak(case)
    peak = device_peak_bytes(case)
    if case.reference_result is not None and case.reference_result.is_emulated:
        reference_peak = device_peak_bytes(case.reference_result) or 0.0
    if peak is None or not 0 < reference_peak < math.inf:
        return None
    return peak / reference_peak


def _show_device_peak(row: _CaseMemory) -> str | None:
    """Returns the estimated peak memory on hardware with the formats, as '0.55x (186 KiB)', or None if unknown."""
    ratio = device_peak_ratio(row.case)
    if ratio is None:
        return None
    return f"{units.ratio(ratio)} ({units.size(device_peak_bytes(row.case))})"


def _reference_peak(case: NamedCase) -> float:
    return (peak_bytes(case.reference_result) if case.reference_result else None) or 0.0


def batch_title(search: Capacity) -> str:
    """Returns the title of a search, as 'largest batch that fits into 2.00 GiB'. If the axis is not called batch, the
    title names it.
    """
    axis_text = "" if search.axis == "batch" else f" ({search.axis})"
    limit_text = "the device's memory" if search.limit is None else units.size(search.limit)
    return f"largest batch{axis_text} that fits into {limit_text}"


def _show_device_batch(row: _CaseCapacity) -> str | None:
    """Returns the largest batch that would fit on hardware with the formats, as '1203, 3.20x'. The ratio is to the
    reference's batch.
    """
    search = row.value
    reference = row.case.reference_result
    if search.on_device is None:
        return None
    reference_batch = None
    if reference is not None and reference.record.capacity is not None:
        reference_search = reference.record.capacity
        reference_batch = reference_search.on_device if reference.is_emulated else reference_search.batch
    return join_parts(
        str(search.on_device), units.speed_up(search.on_device / reference_batch) if reference_batch else ""
    )


def has_memory_by_role(panel: Panel) -> bool:
    return any(len(bytes_by_role(case)) > 1 for case in panel.members)


def list_counters(cases: Iterable[NamedCase]) -> list[MetricSpec]:
    names: set[str] = set()
    for case in cases:
        if memory_use(case.record) is not None:
            names |= {name for name, metric in case.figures.items() if metric.value is not None}
    return [spec for spec in MEMORY_COUNTERS if spec in names]


def memory_table(panel: Panel) -> Tables:
    if not has_memory_by_role(panel):
        return
    uses = panel.find_values(lambda result: memory_use(result.record))
    # All columns have the same unit, so that readers can compare them at a glance.
    scale, unit = units.binary_unit(max(peak_bytes(use.case) or 0.0 for use in uses))

    def show_size(size: float) -> str:
        if not size:
            return units.NONE
        if size / scale >= 0.01:
            return units.significant(size / scale)
        return "<0.01"

    def metric_column(heading: str, name: str, unit: str = "", hint: str = "") -> Col[_CaseMemory]:
        return Col(heading, lambda row: row.case.figures[name].value, show=show_size, unit=unit, hint=hint)

    def phase_at_peak(row: _CaseMemory) -> str:
        phase = next(iter(phases_at_peak(row.value)), units.NONE)
        return PHASE_TITLES.get(phase, phase)

    cols: Cols[_CaseMemory] = [
        Col("group", "case.setting_name", shared=True),
        Col("case", lambda row: mark_emulation(row.case, row.case.mode), tone=lambda row: cost_tone(row.case)),
        Col("peak", lambda row: peak_bytes(row.case), show=show_size),
        Col(f"vs {panel.reference or 'reference'}", lambda row: peak_ratio(row.case), unit="x"),
    ]
    if any(device_peak_bytes(use.case) for use in uses):
        cols.append(Col("on a device", _show_device_peak, number=True, hint=DEVICE_PEAK_MEMORY.description))
    measured_roles = set().union(*(bytes_by_role(use.case) for use in uses))
    cols += [metric_column(MEMORY_TITLES[role], memory_of_role(role)) for role in MemoryRole if role in measured_roles]
    cols.append(Col("in", phase_at_peak, hint="the phase of the highest point"))
    cols += [
        metric_column(figure_words(spec), spec, spec.unit, spec.description) for spec in list_counters(panel.members)
    ]
    yield table("memory", f"memory at the highest point of a step, in {unit}", cols, uses)


def capacity_tables(panel: Panel) -> Elements:
    searches = panel.find_values(lambda result: result.record.capacity)
    if not searches:
        return

    def describe_setting(row: _CaseCapacity) -> str:
        shared = dict(panel.common_params)
        return describe_params(
            (name, value) for name, value in row.case.group.case.params if name not in shared and name != row.value.axis
        )

    def row_tone(row: _CaseCapacity) -> Tone:
        return cost_tone(row.case)

    cols: Cols[_CaseCapacity] = [
        Col("group", describe_setting, shared=True),
        Col("case", "case.mode", tone=row_tone),
        Col("largest", "value.batch", show=lambda batch: str(batch or "none"), tone=row_tone),
        Col(f"vs {panel.reference or 'reference'}", _show_batch_ratio, tone=row_tone),
        Col(MAX_BATCH_TOKENS.heading, lambda row: row.value.tokens or None, show=MAX_BATCH_TOKENS.to_text),
        Col(MAX_BATCH_MEMORY.heading, "value.peak", unit="B"),
        Col("does not fit", lambda row: explain_batch_limit(row.value)),
    ]
    if any(search.value.on_device for search in searches):
        device_batch_column = Col(
            DEVICE_MAX_BATCH.heading, _show_device_batch, number=True, hint=DEVICE_MAX_BATCH.description
        )
        cols.insert(4, device_batch_column)
    capacity_table = table("capacity", batch_title(searches[0].value), cols, searches)
    yield add_figure_columns(capacity_table, [search.case for search in searches])
    yield from own_batch_table(make_own_batch(case, search) for case, search in searches)
    if any(search.case.is_emulated for search in searches):
        yield Text(_EMULATIONS_LEGEND)


def _show_batch_ratio(row: _CaseCapacity) -> str:
    case = row.case
    ratio = capacity_ratio(case.record, case.reference_result.record if case.reference_result is not None else None)
    if ratio is not None:
        return units.speed_up(ratio)
    if case.is_emulated:
        return "emulated"
    return "reference" if case.is_reference else units.NONE


def _memory_lead(material: Material) -> str:
    description = ""
    for _, panel in timed_panels(material):
        descriptions = [
            measurement.description for measurement in panel.measurements if measurement.metric == PEAK_METRIC
        ]
        description = description or next(filter(None, descriptions), "")
    description = description or "memory at the highest point of a step"
    return f"{description[:1].upper()}{description[1:]}; from a separate pass, which is not timed."


@section("memory", "Memory", 90, lead=_memory_lead)
def memory_section(material: Material) -> Elements:
    panels = []
    measured_roles: set[str] = set()
    for title, panel in timed_panels(material):
        cases = [case for case in panel.members if peak_bytes(case) is not None]
        measured_roles.update(*map(_bytes_by_use, cases))
        panels.append((title, panel, cases))
    # All charts of the page have the same parts, so that each use of memory has one colour.
    role_words = {
        role.value: MEMORY_WORDS[role].replace(" copies of", "") for role in MemoryRole if role in measured_roles
    }
    for title, panel, cases in panels:
        if any(bytes_by_role(case) for case in cases):
            yield _memory_chart(title, cases, role_words)
        yield from rename_tables(memory_table(panel), f"of-{panel.suite}", title)
    for number, (title, panel) in enumerate(panels_with_titles(material)):
        yield from rename_tables(capacity_tables(panel), f"{panel.suite}-{number}", title)


def _bytes_by_use(case: NamedCase) -> dict[str, float]:
    """Returns the peak memory, divided by its uses. If the uses are unknown, the whole peak counts as the rest."""
    sizes = {role.value: float(size) for role, size in bytes_by_role(case).items()}
    return sizes or {MemoryRole.OTHER.value: peak_bytes(case) or 0.0}


def _memory_chart(title: str, cases: Cases, parts: Mapping[str, str]) -> Stacks:
    bars = [(mark_emulation(case, case.name), peak_bytes(case) or 0.0, _bytes_by_use(case)) for case in cases]
    return stack_chart(
        f"memory-{cases[0].suite}",
        f"{title}: peak memory by use",
        "The memory of each case at the highest point of a step, by use.",
        ChartAxis("memory at the highest point of a step", "B"),
        "share of the peak",
        parts,
        bars,
    )
