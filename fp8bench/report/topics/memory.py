"""Reports the peak memory of each case, what uses it, and the largest batches that fit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from fp8bench import units
from fp8bench.analysis.metric import capacity_ratio, explain_batch_limit
from fp8bench.model import PHASES, UNATTRIBUTED, Capacity, MemoryRole, MemoryUse, Phase
from fp8bench.model.specs import (
    DEVICE_MAX_BATCH,
    DEVICE_PEAK_MEMORY,
    MAX_BATCH_MEMORY,
    MAX_BATCH_TOKENS,
    MEMORY_COUNTERS,
    memory_of_role,
)
from fp8bench.report.case_status import choose_row_cost_tone
from fp8bench.report.columns import Col, ColumnList, add_figure_columns, table
from fp8bench.report.elements import ChartAxis, Elements, Stacks, Tables, Text
from fp8bench.report.page.charts import make_stack_chart
from fp8bench.report.page.section import (
    Material,
    iterate_titled_panels,
    make_table_names_unique,
    mark_emulation,
    section,
    timed_panels,
)
from fp8bench.report.panels import (
    Cases,
    CaseValue,
    NamedCase,
    Panel,
    Result,
    describe_params,
    explain_missing_ratio,
    join_parts,
)
from fp8bench.report.topics.own_batch import make_own_batch, own_batch_table
from fp8bench.report.words.legend import MEMORY_ROLE_DESCRIPTIONS, MEMORY_ROLE_TITLES, PHASE_TITLES
from fp8bench.report.words.naming import make_figure_heading

PEAK_MEMORY_METRIC = "peak_memory"
# These phases may contain other phases. If an outer and an inner phase reach the same peak, the inner one is named.
_ENCLOSING_PHASES = (UNATTRIBUTED, Phase.ELEMENTWISE)
_EMULATION_MEMORY_LEGEND = (
    "The batch that fits an emulated case does not apply to a device with its formats; 'on a device' is an estimate "
    "for such a device, by a line through the memory of two batches."
)
_CaseMemory = CaseValue[MemoryUse]
_CaseCapacity = CaseValue[Capacity]


def memory_use(result: Result) -> MemoryUse | None:
    return result.record.memory if result.is_ok else None


def peak_bytes(result: Result) -> float | None:
    """Returns the peak memory of a step in bytes. All tables, charts and CSV rows use this number."""
    measured_peak = result.median(PEAK_MEMORY_METRIC)
    use = memory_use(result)
    return use.peak if measured_peak is None and use is not None else measured_peak


def bytes_by_role(result: Result) -> dict[MemoryRole, int]:
    use = memory_use(result)
    sizes = dict(use.roles) if use else {}
    return {role: sizes[role] for role in MemoryRole if role in sizes}


def list_phases_at_peak(use: MemoryUse) -> list[str]:
    """Returns the phases in which memory reached its peak, inner phases first."""
    peak = max((phase.allocated for phase in use.phases), default=0)
    names = [phase.phase for phase in use.phases if phase.allocated == peak]
    return sorted(names, key=lambda phase: (phase in _ENCLOSING_PHASES, PHASES.index(phase) if phase in PHASES else 0))


def peak_ratio(case: NamedCase) -> float | None:
    """Returns the peak memory of a case divided by that of its reference. Returns None for the reference, or if a peak
    is unknown.

    Also returns None for a native case with an emulated reference, whose peak includes the cost of emulation.
    """
    reference = case.reference_result
    if reference is None or case.is_reference or (reference.is_emulated and not case.is_emulated):
        return None
    return _compute_peak_memory_ratio(peak_bytes(case), peak_bytes(reference))


def _compute_peak_memory_ratio(peak: float | None, reference_peak: float | None) -> float | None:
    """Returns the ratio of two peaks, or None if one of them is unknown or the second one is 0."""
    return peak / reference_peak if peak is not None and reference_peak else None


def device_peak_bytes(result: Result) -> float | None:
    """Returns the estimated peak memory of an emulated case on hardware with its formats. Returns None for a native
    case.
    """
    return result.median(DEVICE_PEAK_MEMORY) if result.is_emulated else None


def device_peak_ratio(case: NamedCase) -> float | None:
    """Returns the estimated peak memory of an emulated case on hardware that has its formats, divided by the
    reference's peak. Returns None if unknown. The peak of an emulated reference is estimated as well.
    """
    reference = case.reference_result
    if reference is None:
        return None
    reference_peak = device_peak_bytes(reference) if reference.is_emulated else peak_bytes(reference)
    return _compute_peak_memory_ratio(device_peak_bytes(case), reference_peak)


def _show_device_peak(row: _CaseMemory) -> str | None:
    """Returns the estimated peak memory of an emulated case on hardware that has its formats, and its ratio to the
    reference's peak, as '0.55x (186 KiB)'. Returns None if unknown.
    """
    ratio = device_peak_ratio(row.case)
    return None if ratio is None else f"{units.ratio(ratio)} ({units.size(device_peak_bytes(row.case))})"


def batch_title(search: Capacity) -> str:
    """Returns the title of a search, as 'largest batch that fits into 2.00 GiB'. If the axis is not called batch, the
    title names it.
    """
    axis_text = "" if search.axis == "batch" else f" ({search.axis})"
    limit_text = "the device's memory" if search.limit is None else units.size(search.limit)
    return f"largest batch{axis_text} that fits into {limit_text}"


def _show_device_batch(row: _CaseCapacity) -> str | None:
    """Returns the estimated largest batch of an emulated case on hardware that has its formats, and its ratio to the
    reference's largest batch, as '1203, 3.20x'. Returns None if unknown.
    """
    largest_batch = row.value.on_device
    if largest_batch is None:
        return None
    reference = row.case.reference_result
    reference_batch = None
    if reference is not None and reference.record.capacity is not None:
        reference_batch_search = reference.record.capacity
        reference_batch = reference_batch_search.on_device if reference.is_emulated else reference_batch_search.batch
    return join_parts(str(largest_batch), units.speed_up(largest_batch / reference_batch) if reference_batch else "")


def has_memory_by_role(panel: Panel) -> bool:
    return any(len(bytes_by_role(case)) > 1 for case in panel.named_cases)


def memory_table(panel: Panel) -> Tables:
    if not has_memory_by_role(panel):
        return
    memory_of_cases = panel.find_case_values(memory_use)
    # All columns have the same unit, so that readers can compare them at a glance.
    scale, unit = units.binary_unit(max(peak_bytes(use.case) or 0.0 for use in memory_of_cases))

    def show_size(size: float) -> str:
        if not size:
            return units.NONE
        if size / scale >= 0.01:
            return units.format_significant_digits(size / scale)
        return "<0.01"

    def metric_column(heading: str, name: str, unit: str = "", hint: str = "") -> Col[_CaseMemory]:
        return Col(heading, lambda row: row.case.figures[name].value, show=show_size, unit=unit, hint=hint)

    def phase_at_peak(row: _CaseMemory) -> str:
        phase = next(iter(list_phases_at_peak(row.value)), units.NONE)
        return PHASE_TITLES.get(phase, phase)

    cols: ColumnList[_CaseMemory] = [
        Col("group", "case.setting_name", shared=True),
        Col("case", lambda row: mark_emulation(row.case, row.case.mode), tone=choose_row_cost_tone),
        Col("peak", lambda row: peak_bytes(row.case), show=show_size),
        Col(f"vs {panel.reference or 'reference'}", lambda row: peak_ratio(row.case), unit="x"),
    ]
    if any(device_peak_bytes(use.case) for use in memory_of_cases):
        cols.append(Col("on a device", _show_device_peak, number=True, hint=DEVICE_PEAK_MEMORY.description))
    memory_role_names = set().union(*(bytes_by_role(use.case) for use in memory_of_cases))
    cols += [
        metric_column(MEMORY_ROLE_TITLES[role], memory_of_role(role))
        for role in MemoryRole
        if role in memory_role_names
    ]
    cols.append(Col("in", phase_at_peak, hint="the phase of the highest point"))
    for spec in MEMORY_COUNTERS:
        if any(use.case.figures[spec].value is not None for use in memory_of_cases):
            cols.append(metric_column(make_figure_heading(spec), spec, spec.unit, spec.description))
    yield table("memory", f"memory at the highest point of a step, in {unit}", cols, memory_of_cases)


def capacity_tables(panel: Panel) -> Elements:
    case_capacities = panel.find_case_values(lambda result: result.record.capacity)
    if not case_capacities:
        return

    def describe_setting(row: _CaseCapacity) -> str:
        shared = dict(panel.common_params)
        # The search changes the batch, so it is not part of the setting.
        return describe_params(
            (name, value) for name, value in row.case.group.case.params if name not in shared and name != row.value.axis
        )

    cols: ColumnList[_CaseCapacity] = [
        Col("group", describe_setting, shared=True),
        Col("case", "case.mode", tone=choose_row_cost_tone),
        Col("largest", "value.batch", show=lambda batch: str(batch or "none"), tone=choose_row_cost_tone),
        Col(f"vs {panel.reference or 'reference'}", _show_batch_ratio, tone=choose_row_cost_tone),
        Col(MAX_BATCH_TOKENS.heading, lambda row: row.value.tokens or None, show=MAX_BATCH_TOKENS.format_value),
        Col(MAX_BATCH_MEMORY.heading, "value.peak", unit="B"),
        Col("does not fit", lambda row: explain_batch_limit(row.value)),
    ]
    if any(search.value.on_device for search in case_capacities):
        device_batch_column = Col(
            DEVICE_MAX_BATCH.heading, _show_device_batch, number=True, hint=DEVICE_MAX_BATCH.description
        )
        # Show the estimate next to the measured batch and its ratio.
        cols.insert(4, device_batch_column)
    capacity_table = table("capacity", batch_title(case_capacities[0].value), cols, case_capacities)
    yield add_figure_columns(capacity_table, [search.case for search in case_capacities])
    yield from own_batch_table(make_own_batch(case, search) for case, search in case_capacities)
    if any(search.case.is_emulated for search in case_capacities):
        yield Text(_EMULATION_MEMORY_LEGEND)


def _show_batch_ratio(row: _CaseCapacity) -> str:
    reference = row.case.reference_result
    ratio = capacity_ratio(row.case.record, reference.record if reference is not None else None)
    return units.speed_up(ratio) if ratio is not None else explain_missing_ratio(row.case)


def _memory_lead_paragraph(material: Material) -> str:
    measurements = chain.from_iterable(panel.measurements for _, panel in timed_panels(material))
    descriptions = [measurement.description for measurement in measurements if measurement.metric == PEAK_MEMORY_METRIC]
    description = next(filter(None, descriptions), "memory at the highest point of a step")
    return f"{description[:1].upper()}{description[1:]}; from a separate pass, which is not timed."


@section("memory", "Memory", 90, lead=_memory_lead_paragraph)
def memory_section(material: Material) -> Elements:
    panels = []
    memory_role_names: set[str] = set()
    for title, panel in timed_panels(material):
        cases = [case for case in panel.named_cases if peak_bytes(case) is not None]
        memory_role_names.update(*map(_find_peak_bytes_by_use, cases))
        panels.append((title, panel, cases))
    # All charts of the page have the same parts, so that each use of memory has one colour.
    memory_role_words = {
        role.value: MEMORY_ROLE_DESCRIPTIONS[role].replace(" copies of", "")
        for role in MemoryRole
        if role in memory_role_names
    }
    for title, panel, cases in panels:
        if any(bytes_by_role(case) for case in cases):
            yield _memory_chart(title, cases, memory_role_words)
        yield from make_table_names_unique(memory_table(panel), f"of-{panel.suite}", title)
    for panel_number, (title, panel) in enumerate(iterate_titled_panels(material)):
        yield from make_table_names_unique(capacity_tables(panel), f"{panel.suite}-{panel_number}", title)


def _find_peak_bytes_by_use(case: NamedCase) -> dict[str, float]:
    """Returns the bytes of each use of memory, such as weights, at the peak. If the uses are unknown, all bytes count
    as 'other'.
    """
    sizes = {role.value: float(size) for role, size in bytes_by_role(case).items()}
    return sizes or {MemoryRole.OTHER.value: peak_bytes(case) or 0.0}


def _memory_chart(title: str, cases: Cases, parts: Mapping[str, str]) -> Stacks:
    stack_rows = [
        (mark_emulation(case, case.name), peak_bytes(case) or 0.0, _find_peak_bytes_by_use(case)) for case in cases
    ]
    return make_stack_chart(
        f"memory-{cases[0].suite}",
        f"{title}: peak memory by use",
        "The memory of each case at the highest point of a step, by use.",
        ChartAxis("memory at the highest point of a step", "B"),
        "share of the peak",
        parts,
        stack_rows,
    )
