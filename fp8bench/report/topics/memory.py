"""What each case takes of the device's memory, what that is for, and the largest batches that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fp8bench import units
from fp8bench.analysis.metric import capacity_ratio, why_no_larger
from fp8bench.model import PHASES, UNATTRIBUTED, Capacity, MemoryRole, MemoryUse, Phase, Record, Status
from fp8bench.model.specs import (
    DEVICE_MAX_BATCH,
    DEVICE_PEAK_MEMORY,
    MAX_BATCH_MEMORY,
    MAX_BATCH_TOKENS,
    MEMORY_COUNTERS,
    MetricSpec,
    memory_of_role,
)
from fp8bench.report.case_status import cost_tone, emulated
from fp8bench.report.columns import Col, case_cols, figure_col, table, with_figures
from fp8bench.report.elements import Bars, ChartAxis, Element, Field, Items, Mark, Stacks, Table, Text
from fp8bench.report.page.charts import grouped, stacked
from fp8bench.report.page.section import PRECISION, Material, marked_emulated, number, section, titled_panels
from fp8bench.report.panels import Figures, NamedCase, Panel, Result, ResultGroup, show_params, together, value_of
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import MEMORY_TITLES, MEMORY_WORDS, PHASE_TITLES
from fp8bench.report.words.naming import listed, phase_order, phase_words

PEAK = "peak_memory"
# Smaller savings are called none.
_LEAST_SAVING = 0.01
# The least share of all changes, and of the reference's memory, for a change to be named.
_LEAST_OF_CHANGES = 0.1
_LEAST_OF_PEAK = 0.01
_MOST_CHANGES = 4
# The least share of the memory for what stays to be named, and how much it may differ.
_LEAST_STAYING = 0.1
_MOST_EQUAL = 0.005
# Below this share of what it was or becomes, a size counts as nothing.
_NEXT_TO_NOTHING = 0.05
# The outer ones of nested phases with the same highest point.
_OUTER = (UNATTRIBUTED, Phase.ELEMENTWISE)
EMULATED = "emulated"
_NOTHING_BESIDE = "There is nothing beside it to compare with."
# Longer tables are folded.
_MOST_OPEN = 12


def use_of(record: Record) -> MemoryUse | None:
    return record.memory if record.status is Status.OK else None


def peak_of(result: Result) -> float | None:
    """Bytes at the highest point of a step."""
    return value_of(result.record.measurement(PEAK))


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
    if group.lead is not None and emulated(group.lead) and not emulated(result):
        return None
    if result.record.is_reference or peak is None or not (0 < base < math.inf and 0 <= peak < math.inf):
        return None
    return peak / base


def on_device(result: Result) -> float | None:
    """Bytes on hardware that keeps the formats that this case emulates; None for other cases."""
    return value_of(result.record.measurement(DEVICE_PEAK_MEMORY)) if emulated(result) else None


def device_share_of(group: ResultGroup, result: Result) -> float | None:
    """on_device over the peak of the group's reference, on a device as well if that is emulated."""
    lead = group.lead
    base, peak = (on_device(lead) or 0.0) if lead and emulated(lead) else _base(group), on_device(result)
    return None if peak is None or not 0 < base < math.inf else peak / base


def device_words(group: ResultGroup, result: Result) -> str:
    """'0.55x (186 KiB)'; '' if unknown."""
    share, size = device_share_of(group, result), on_device(result)
    return "" if share is None or size is None else f"{units.ratio(share)} ({units.size(size)})"


def _base(group: ResultGroup) -> float:
    return (peak_of(group.lead) if group.lead else None) or 0.0


def sentences(panel: Panel, cases: Iterable[NamedCase]) -> Iterator[str]:
    shares = ((case, share_of(case.group, case.result)) for case in cases)
    by_mode = together((case.result.mode, (case, share)) for case, share in shares if share is not None)
    for mode, shared in by_mode.items():
        none = [(case, share) for case, share in shared if share > 1 - _LEAST_SAVING]
        words = f"{mode} takes {units.span((share for _, share in shared), units.ratio)} of {panel.reference}'s memory"
        if none:
            where = "" if len(none) == len(shared) else f" in {len(none)} of {len(shared)} groups"
            words += f": nothing is saved{where}"
        largest, share = max(none or shared, key=lambda pair: _base(pair[0].group))
        yield f"{words}{_why(largest, share, len(shared) > 1)}."


def _why(case: NamedCase, share: float, several: bool) -> str:
    before, after = (roles_of(result) if result else {} for result in (case.group.lead, case.result))
    parts = (_staying(before, after), *_changes(before, after)) if before and after else ()
    words = ", ".join(filter(None, parts))
    place = f" at {case.place}" if several and case.place else ""
    text = f"{place} {words}".strip() if words else ""
    if share <= 1 - _LEAST_SAVING:
        return f": {text}" if text else ""
    reason = case.result.record.support.reason
    if emulated(case.result) and reason:
        because = f", because it is emulated ({reason}): its peak is the cost of emulation{_derived(case, place)}"
        return f"{because}; {text}" if text else because
    return f"; {text}" if text else ""


def _derived(case: NamedCase, place: str) -> str:
    """What it would take on a device, or why that is unknown."""
    if words := device_words(case.group, case.result):
        return f", and on hardware with its formats it would be {words}{place}, derived"
    use = use_of(case.result.record)
    return f" (on a device{place}: unknown, {use.off_device})" if use is not None and use.off_device else ""


def _staying(before: Mapping[MemoryRole, int], after: Mapping[MemoryRole, int]) -> str:
    """What lower precision leaves as it is, if that is much."""
    total = sum(after.values())
    same = {
        role: size
        for role, size in after.items()
        if size >= _LEAST_STAYING * total and abs(size - before.get(role, 0)) <= _MOST_EQUAL * size
    }
    if not same:
        return ""
    word = "stays" if len(same) == 1 and not _plural(*same) else "stay"
    return f"{listed([MEMORY_WORDS[role] for role in same])} {word} ({units.size(sum(same.values()))})"


def _changes(before: Mapping[MemoryRole, int], after: Mapping[MemoryRole, int]) -> Iterator[str]:
    changes = {role: after.get(role, 0) - before.get(role, 0) for role in MemoryRole}
    moved, total = sum(map(abs, changes.values())), sum(before.values())
    least = max(_LEAST_OF_CHANGES * moved, _LEAST_OF_PEAK * total, 1)
    for role in sorted(changes, key=lambda role: -abs(changes[role]))[:_MOST_CHANGES]:
        if abs(changes[role]) >= least:
            yield _change(role, before.get(role, 0), after.get(role, 0))


def _change(role: MemoryRole, before: int, after: int) -> str:
    words, ending = MEMORY_WORDS[role], "" if _plural(role) else "s"
    if before <= _NEXT_TO_NOTHING * after:
        return f"{words} add{ending} {units.size(after - before)}"
    if after <= _NEXT_TO_NOTHING * before:
        return f"{words} {'go' if _plural(role) else 'goes'} ({units.size(before)})"
    return f"{words} {'are' if _plural(role) else 'is'} {units.ratio(after / before)} ({units.size(after)})"


def _plural(role: MemoryRole) -> bool:
    return role not in (MemoryRole.OPTIMIZER, MemoryRole.DATA, MemoryRole.WORKSPACE, MemoryRole.OTHER)


def searched_cases(panel: Panel) -> list[tuple[ResultGroup, Result, Capacity]]:
    """The cases whose largest batch was searched."""
    return panel.known(lambda result: result.record.capacity)


def batch_title(search: Capacity) -> str:
    """'largest batch that fits into 2.00 GiB', with the axis if it has another name."""
    axis = "" if search.axis == "batch" else f" ({search.axis})"
    return f"largest batch{axis} that fits into {limit_words(search)}"


def limit_words(search: Capacity) -> str:
    return "the device's memory" if search.limit is None else units.size(search.limit)


def place_of(panel: Panel, group: ResultGroup, search: Capacity) -> str:
    return show_params(pair for pair in group.case.params if pair not in panel.shared and pair[0] != search.axis)


def show_batch(search: Capacity) -> str:
    """'376', 'none' if not even the smallest fits, '-' if the search had no answer."""
    if search.batch is None:
        return units.NONE
    return str(search.batch) if search.batch else "none"


def share_within(group: ResultGroup, result: Result) -> float | None:
    return capacity_ratio(result.record, group.lead.record if group.lead is not None else None)


def device_batch(group: ResultGroup, result: Result) -> str:
    """'1203, 3.20x': what would fit on hardware with the formats, over what fits of the reference."""
    search = result.record.capacity
    if search is None or search.on_device is None:
        return ""
    lead = group.lead
    known = lead.record.capacity if lead is not None else None
    base = None if lead is None or known is None else known.on_device if emulated(lead) else known.batch
    share = f", {units.speed_up(search.on_device / base)}" if base else ""
    return f"{search.on_device}{share}"


def batch_sentences(panel: Panel) -> Iterator[str]:
    """'bf16 fits 1.61x of fp32's batch into 1.00 GiB.'; and why emulated cases say nothing."""
    several = len({group.case.setting for group, _, _ in searched_cases(panel)}) > 1
    for group, result, search in searched_cases(panel):
        share = share_within(group, result)
        if share is not None:
            place = place_of(panel, group, search) if several else ""
            where = f" at {place}" if place else ""
            word = "batch" if search.axis == "batch" else search.axis
            fits = f"{result.mode} fits {units.speed_up(share)} of {group.reference}'s {word}"
            yield f"{fits} into {limit_words(search)}{where}."
    wide = dict.fromkeys(result.mode for _, result, _ in searched_cases(panel) if emulated(result))
    if wide:
        verb = "is" if len(wide) == 1 else "are"
        derived = any(search.on_device for _, _, search in searched_cases(panel))
        yield (
            f"{listed(list(wide))} {verb} emulated, with values of a small format kept in wider ones: what fits here "
            "says nothing about a device that has the format."
            + " Of that 'on a device' tells, derived by a line through what two batches would take there."
            * derived
        )


def tells_memory(panel: Panel) -> bool:
    return any(len(roles_of(result)) > 1 for result in panel.results)


def counters_of(panel: Panel) -> list[MetricSpec]:
    known = [Figures(group, result) for group, result in panel.members if use_of(result.record) is not None]
    return [spec for spec in MEMORY_COUNTERS if any(figures[spec].value is not None for figures in known)]


def memory(panel: Panel) -> Iterator[Element]:
    if not tells_memory(panel):
        return
    present, others = {role for result in panel.results for role in roles_of(result)}, counters_of(panel)
    roles = [role for role in MemoryRole if role in present]
    known = panel.known(lambda result: use_of(result.record))
    scale, unit = units.binary_unit(max(use.peak for _, _, use in known))

    def shown(size: float) -> str:
        if not size:
            return units.NONE
        return units.significant(size / scale) if size / scale >= 0.01 else "<0.01"

    cols: list[Col[tuple[ResultGroup, Result, MemoryUse, Figures]]] = [
        *case_cols(), Col("peak", lambda row: row[2].peak, number=True, show=shown),
        Col(f"vs {panel.reference or 'reference'}", lambda row: share_of(*row[:2]), number=True, unit="x"),
        Col("on a device", lambda row: device_words(*row[:2]) or None, number=True,
            when=any(on_device(result) for _, result, _ in known)),
        *(Col(MEMORY_TITLES[role], partial(_figure, name=memory_of_role(role)), number=True, show=shown)
          for role in roles),
        Col("in", lambda row: PHASE_TITLES.get(phase := next(iter(highest_in(row[2])), units.NONE), phase)),
        *(Col(spec.heading, partial(_figure, name=spec), number=True, show=shown) for spec in others),
    ]  # fmt: skip
    rows = [(*case, Figures(*case[:2])) for case in known]
    yield table("memory", f"memory at the highest point of a step, in {unit}", cols, rows)
    yield from map(Text, sentences(panel, panel.members))


def _figure(row: tuple[ResultGroup, Result, MemoryUse, Figures], name: str) -> float | None:
    return row[3][name].value


def capacity(panel: Panel) -> Iterator[Element]:
    searches = searched_cases(panel)
    if not searches:
        return

    def against(row: tuple[ResultGroup, Result, Capacity]) -> Field:
        share, own = share_within(*row[:2]), row[1]
        word = EMULATED if emulated(own) else "reference" if own.record.is_reference else units.NONE
        return Field(word if share is None else units.speed_up(share), share, cost_tone(own))

    cols: list[Col[tuple[ResultGroup, Result, Capacity]]] = [
        Col("group", lambda row: place_of(panel, row[0], row[2]), shared=True),
        Col("case", lambda row: row[1].mode, tone=lambda row: cost_tone(row[1])),
        Col("largest", lambda row: Field(show_batch(row[2]), row[2].batch, cost_tone(row[1])), number=True),
        Col(f"vs {panel.reference or 'reference'}", against),
        Col(DEVICE_MAX_BATCH.heading, lambda row: device_batch(*row[:2]) or None, number=True,
            hint=DEVICE_MAX_BATCH.description, when=any(row[2].on_device for row in searches)),
        Col(MAX_BATCH_TOKENS.heading, lambda row: row[2].tokens or None, number=True, show=MAX_BATCH_TOKENS.shown),
        Col(MAX_BATCH_MEMORY.heading, lambda row: row[2].peak, number=True, unit="B"),
        Col("does not fit", lambda row: why_no_larger(row[2])),
    ]  # fmt: skip
    shown = table(
        "capacity", batch_title(searches[0][2]), cols, searches, kept={col.heading for col in cols} - {"group"}
    )
    yield with_figures(shown, (case[:2] for case in searches))
    yield from map(Text, batch_sentences(panel))


_Row = tuple[NamedCase, MemoryUse, Figures]


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
    known = {role for _, _, cases in panels if _known(cases) for case in cases for role in _parts(case)}
    # The same parts everywhere, so that a role has one colour on the whole page.
    parts = {role.value: MEMORY_WORDS[role].replace(" copies of", "") for role in MemoryRole if role in known}
    for title, panel, cases in panels:
        yield from _panel(title, panel, cases, parts) if cases else ()
    for place, (title, panel) in enumerate(titled_panels(material)):
        for element in capacity(panel):
            yield replace(element, name=f"capacity-{panel.case.workload}-{place}", caption=f"{title}: {element.caption}"
                          ) if isinstance(element, Table) else element  # fmt: skip


def _panel(title: str, panel: Panel, cases: Sequence[NamedCase], parts: Mapping[str, str]) -> Iterator[Element]:
    said = list(sentences(panel, cases))
    known = _known(cases)
    text = "What each case takes, by what it is for." if known and said else " ".join(said) or _NOTHING_BESIDE
    yield _chart(title, cases, parts, text)
    if known and said:
        yield Items(tuple(Text(sentence) for sentence in said))
    if any(use_of(case.result.record) for case in cases):
        yield _table(title, cases)


def _known(cases: Sequence[NamedCase]) -> bool:
    return any(roles_of(case.result) for case in cases)


def _parts(case: NamedCase) -> dict[str, float]:
    """Bytes by role; all of them are the rest if roles are unknown."""
    known = {role.value: float(size) for role, size in roles_of(case.result).items()}
    return known or {MemoryRole.OTHER.value: peak_of(case.result) or 0.0}


def _chart(title: str, cases: Sequence[NamedCase], parts: Mapping[str, str], description: str) -> Stacks | Bars:
    name = f"memory-{cases[0].result.record.case.workload}"
    if not _known(cases):
        marks = []
        for case in cases:
            label, tone = marked_emulated(case.result, case.result.mode)
            peak, share = peak_of(case.result), share_of(case.group, case.result)
            beside = "" if share is None else f", {units.ratio(share)} of {case.group.reference}'s"
            marks.append((case.place, Mark(label, peak or 0.0, tone=tone, hint=f"{units.size(peak)}{beside}")))
        groups = grouped(marks)
        return Bars(name, f"{title}: peak memory", description, ChartAxis("peak memory", "B"), groups)
    rows = [(marked_emulated(case.result, case.name)[0], peak_of(case.result) or 0.0, _parts(case)) for case in cases]
    axis = ChartAxis("memory at the highest point of a step", "B")
    return stacked(name, f"{title}: peak memory by what it is for", description, axis, "share of the peak", parts, rows)


def _table(title: str, cases: Sequence[NamedCase]) -> Table:
    uses = [(case, use) for case in cases if (use := use_of(case.result.record)) is not None]
    phases = sorted({phase.phase for _, use in uses for phase in use.phases}, key=phase_order)
    figures = [Figures(case.group, case.result) for case, _ in uses]

    def in_phase(phase: str, row: _Row) -> int | None:
        return {phase_memory.phase: phase_memory.allocated for phase_memory in row[1].phases}.get(phase)

    def of_spec(spec: MetricSpec, row: _Row) -> Field:
        value = row[2][spec].value
        return Field(units.NONE, hint=row[1].why) if value is None else number(value, spec.shown)

    counters = [spec for spec in MEMORY_COUNTERS if any(figure[spec].value is not None for figure in figures)]
    cols: list[Col[_Row]] = [
        PRECISION,
        Col("peak", lambda row: row[1].peak, number=True, unit="B"),
        Col("of the reference's", lambda row: share_of(row[0].group, row[0].result), number=True, unit="x"),
        Col("on a device", lambda row: _on_a_device(row[0]), number=True, hint=DEVICE_PEAK_MEMORY.description,
            when=any(on_device(case.result) or use.off_device for case, use in uses)),
        Col("highest in", lambda row: phase_words(next(iter(highest_in(row[1])), units.NONE)),
            hint="the phase of the highest point"),
        *(Col(phase_words(phase), partial(in_phase, phase), number=True, unit="B",
              hint="the most that was held at once in this phase") for phase in phases),
        *(figure_col(spec, partial(of_spec, spec)) for spec in counters),
    ]  # fmt: skip
    rows = [(case, use, own) for (case, use), own in zip(uses, figures, strict=True)]
    name = f"memory-phases-{cases[0].result.record.case.workload}"
    caption = f"{title}: the most that was held in each phase"
    return table(name, caption, cols, rows, folded=len(rows) > _MOST_OPEN)


def _on_a_device(case: NamedCase) -> Field | None:
    use = use_of(case.result.record)
    if words := device_words(case.group, case.result):
        return Field(words, on_device(case.result), hint="derived")
    return Field(units.NONE, hint=use.off_device) if use is not None and use.off_device else None
