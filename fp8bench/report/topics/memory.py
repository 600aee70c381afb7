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
from fp8bench.report.columns import Col, table, with_figures
from fp8bench.report.elements import ChartAxis, Elements, Field, Stacks, Tables, Text
from fp8bench.report.page.charts import stack_parts
from fp8bench.report.page.section import Material, mark_emulated, name_tables, section, titled_panels
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, ResultGroup, describe_params, join_parts, value_of
from fp8bench.report.topics.own_batch import own_batch_of, own_batches
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import MEMORY_TITLES, MEMORY_WORDS, PHASE_TITLES
from fp8bench.report.words.naming import figure_words

PEAK = "peak_memory"
# The outer ones of nested phases with the same highest point.
_OUTER = (UNATTRIBUTED, Phase.ELEMENTWISE)
_OF_EMULATIONS = (
    "What fits of an emulated case says nothing of a device with its formats; 'on a device' is derived by a line "
    "through what two batches would take there."
)
_Row = tuple[NamedCase, MemoryUse]
_SearchRow = tuple[ResultGroup, Result, Capacity]


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


def share_of(group: ResultGroup, result: Result) -> float | None:
    """A peak over that of the group's reference; None for the reference and if either is unknown. The peak of an
    emulated reference is the cost of emulation: a native case is not compared with it."""
    if group.lead is not None and group.lead.is_emulated and not result.is_emulated:
        return None
    base = _base(group)
    peak = peak_of(result)
    if result.is_reference or peak is None or not 0 < base < math.inf or not 0 <= peak < math.inf:
        return None
    return peak / base


def on_device(result: Result) -> float | None:
    """Bytes on hardware that keeps the formats that this case emulates; None for other cases."""
    if result.is_emulated:
        return value_of(result.record.measurement(DEVICE_PEAK_MEMORY))
    return None


def device_share_of(group: ResultGroup, result: Result) -> float | None:
    """on_device over the peak of the group's reference, on a device as well if that is emulated."""
    base = _base(group)
    peak = on_device(result)
    if group.lead is not None and group.lead.is_emulated:
        base = on_device(group.lead) or 0.0
    if peak is None or not 0 < base < math.inf:
        return None
    return peak / base


def device_words(group: ResultGroup, result: Result) -> str:
    """'0.55x (186 KiB)'; '' if unknown."""
    share = device_share_of(group, result)
    size = on_device(result)
    if share is None or size is None:
        return ""
    return f"{units.ratio(share)} ({units.size(size)})"


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
    if search.batch:
        return str(search.batch)
    return "none"


def device_batch(group: ResultGroup, result: Result) -> str:
    """'1203, 3.20x': what would fit on hardware with the formats, over what fits of the reference."""
    search = result.record.capacity
    reference = group.lead
    if search is None or search.on_device is None:
        return ""
    base = None
    if reference is not None and reference.record.capacity is not None:
        fits = reference.record.capacity
        base = fits.on_device if reference.is_emulated else fits.batch
    return join_parts(str(search.on_device), units.speed_up(search.on_device / base) if base else "")


def tells_memory(panel: Panel) -> bool:
    return any(len(roles_of(result)) > 1 for result in panel.results)


def counters_of(cases: Iterable[NamedCase]) -> list[MetricSpec]:
    measured = [case for case in cases if use_of(case.record) is not None]
    return [spec for spec in MEMORY_COUNTERS if _is_in_any(spec, measured)]


def _is_in_any(spec: MetricSpec, cases: Iterable[NamedCase]) -> bool:
    return any(case.figures[spec].value is not None for case in cases)


def memory(panel: Panel) -> Tables:
    if not tells_memory(panel):
        return
    uses = [(case, use) for case in panel.members if (use := use_of(case.record)) is not None]
    # Only emulated cases have this figure.
    has_derived = any(on_device(case.result) for case, _ in uses)
    # One unit for the whole table: columns must compare at a glance.
    scale, unit = units.binary_unit(max(peak_of(case.result) or 0.0 for case, _ in uses))

    def show(size: float) -> str:
        if not size:
            return units.NONE
        if size / scale >= 0.01:
            return units.significant(size / scale)
        return "<0.01"

    def figure(heading: str, name: str, unit: str = "", hint: str = "") -> Col[_Row]:
        return Col(heading, lambda row: row[0].figures[name].value, show=show, unit=unit, hint=hint)

    def highest_phase(row: _Row) -> str:
        phase = next(iter(highest_in(row[1])), units.NONE)
        return PHASE_TITLES.get(phase, phase)

    cols: list[Col[_Row]] = [
        Col("group", lambda row: row[0].place, shared=True),
        Col(
            "case",
            lambda row: mark_emulated(row[0].result, row[0].mode)[0],
            tone=lambda row: cost_tone(row[0].result),
        ),
        Col("peak", lambda row: peak_of(row[0].result), show=show),
        Col(f"vs {panel.reference or 'reference'}", lambda row: share_of(*row[0]), unit="x"),
        Col(
            "on a device",
            lambda row: device_words(*row[0]) or None,
            number=True,
            hint=DEVICE_PEAK_MEMORY.description,
            when=has_derived,
        ),
    ]
    present = set().union(*(roles_of(case.result) for case, _ in uses))
    cols += [figure(MEMORY_TITLES[role], memory_of_role(role)) for role in MemoryRole if role in present]
    cols.append(Col("in", highest_phase, hint="the phase of the highest point"))
    cols += [figure(figure_words(spec), spec, spec.unit, spec.description) for spec in counters_of(panel.members)]
    yield table("memory", f"memory at the highest point of a step, in {unit}", cols, uses)


def capacity(panel: Panel) -> Elements:
    searches = panel.known(lambda result: result.record.capacity)
    if not searches:
        return

    def setting(row: _SearchRow) -> str:
        group, _, search = row
        return describe_params(
            pair for pair in group.case.params if pair not in panel.shared and pair[0] != search.axis
        )

    def against_reference(row: _SearchRow) -> Field:
        group, result, _ = row
        share = capacity_ratio(result.record, group.lead.record if group.lead is not None else None)
        if share is not None:
            return Field(units.speed_up(share), share, cost_tone(result))
        word = "reference" if result.is_reference else units.NONE
        return Field("emulated" if result.is_emulated else word, tone=cost_tone(result))

    cols: list[Col[_SearchRow]] = [
        Col("group", setting, shared=True),
        Col("case", lambda row: row[1].mode, tone=lambda row: cost_tone(row[1])),
        Col("largest", lambda row: Field(show_batch(row[2]), row[2].batch, cost_tone(row[1])), number=True),
        Col(f"vs {panel.reference or 'reference'}", against_reference),
        Col(
            DEVICE_MAX_BATCH.heading,
            lambda row: device_batch(*row[:2]) or None,
            number=True,
            hint=DEVICE_MAX_BATCH.description,
            when=any(search.on_device for _, _, search in searches),
        ),
        Col(MAX_BATCH_TOKENS.heading, lambda row: row[2].tokens or None, show=MAX_BATCH_TOKENS.to_text),
        Col(MAX_BATCH_MEMORY.heading, lambda row: row[2].peak, unit="B"),
        Col("does not fit", lambda row: why_no_larger(row[2])),
    ]
    # The group is left out if there is one setting alone.
    required = {col.heading for col in cols} - {"group"}
    batches = table("capacity", batch_title(searches[0][2]), cols, searches, required=required)
    yield with_figures(batches, (row[:2] for row in searches))
    yield from own_batches(own_batch_of(result, search) for _, result, search in searches)
    if any(result.is_emulated for _, result, _ in searches):
        yield Text(_OF_EMULATIONS)


def _lead(material: Material) -> str:
    words = ""
    for _, panel in timed_panels(material):
        described = [measurement.description for measurement in panel.measurements if measurement.metric == PEAK]
        words = words or next(filter(None, described), "")
    words = words or "memory at the highest point of a step"
    return f"{words[:1].upper()}{words[1:]}; from a pass of its own, which is not timed."


@section("memory", "Memory", 90, lead=_lead)
def memory_section(material: Material) -> Elements:
    panels = []
    present: set[str] = set()
    for title, panel in timed_panels(material):
        cases = [case for case in panel.members if peak_of(case.result) is not None]
        present.update(*map(_parts, cases))
        panels.append((title, panel, cases))
    # The same parts everywhere, so that a role has one colour on the whole page.
    parts = {role.value: MEMORY_WORDS[role].replace(" copies of", "") for role in MemoryRole if role in present}
    for title, panel, cases in panels:
        if any(roles_of(case.result) for case in cases):
            yield _chart(title, cases, parts)
        yield from name_tables(memory(panel), f"of-{panel.suite}", title)
    for place, (title, panel) in enumerate(titled_panels(material)):
        yield from name_tables(capacity(panel), f"{panel.suite}-{place}", title)


def _parts(case: NamedCase) -> dict[str, float]:
    """Bytes by role; all of them are the rest if roles are unknown."""
    sizes = {role.value: float(size) for role, size in roles_of(case.result).items()}
    return sizes or {MemoryRole.OTHER.value: peak_of(case.result) or 0.0}


def _chart(title: str, cases: Cases, parts: Mapping[str, str]) -> Stacks:
    bars = []
    for case in cases:
        label, _ = mark_emulated(case.result, case.name)
        bars.append((label, peak_of(case.result) or 0.0, _parts(case)))
    axis = ChartAxis("memory at the highest point of a step", "B")
    return stack_parts(
        f"memory-{cases[0].suite}",
        f"{title}: peak memory by what it is for",
        "What each case takes, by what it is for.",
        axis,
        "share of the peak",
        parts,
        bars,
    )
