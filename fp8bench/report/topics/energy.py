"""Reports the energy of a step of each case, the energy that a lower precision saves, and why energies are missing or
unclear.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.energy import (
    NO_SOURCE,
    EnergyDemand,
    EnergyFigures,
    EnergyRatio,
    PhaseEnergies,
    PhaseJoules,
    compare_window_step_time,
    energy_figures,
    energy_ratio,
    phase_energies,
    why_no_energy,
)
from fp8bench.analysis.metrics import EnergyValidity, classify_energy_validity
from fp8bench.analysis.samples import compute_sustained_figures
from fp8bench.model import Label, Run, specs
from fp8bench.model.specs import ENERGY, ENERGY_SPEC_BY_WORK_KIND
from fp8bench.report.columns import Col, ColumnList, add_figure_columns, case_columns, table
from fp8bench.report.elements import Elements, Field, Sentences, Tables, Text, Tone, bullet_list
from fp8bench.report.page.section import Material, make_table_names_unique, section, timed_panels
from fp8bench.report.panels import (
    CaseValue,
    NamedCase,
    Panel,
    Result,
    ResultGroup,
    explain_missing_ratio,
    list_cases,
    merge_notes,
    together,
)
from fp8bench.report.words.legend import PHASE_TITLES
from fp8bench.report.words.naming import join_words, many

_CasePhaseJoules = CaseValue[dict[str, PhaseJoules]]


class _EnergyRow(NamedTuple):
    case: NamedCase
    energy: EnergyFigures
    ratio: EnergyRatio | None


# The names of the sources of energy figures, which docs/energy.md explains.
SOURCE_NAMES = {
    "counter": "the driver's energy counter",
    "rapl": "the CPU's energy counters (RAPL)",
    "instant": "the driver's power readings, summed up",
    "average": "the driver's mean power, summed up",
}
TONE_BY_ENERGY_DEMAND = {EnergyDemand.LESS: Tone.GOOD, EnergyDemand.MORE: Tone.BAD, EnergyDemand.UNCLEAR: Tone.DOUBT}


def get_case_phase_energies(result: Result) -> PhaseEnergies | None:
    return phase_energies(result.record, result.finding)


def ratio_to_reference(case: NamedCase) -> EnergyRatio | None:
    """Returns the energy of a case divided by that of its reference. Returns None for the reference itself, for
    emulated cases, and if an energy is unknown.

    If a label of the case or its reference makes energies unreliable, the ratio is marked as unclear.
    """
    reference = case.reference_result
    if reference is None or reference.record is case.record:
        return None
    return energy_ratio(case.record, reference.record, (*case.labels, *reference.labels))


def list_energy_sources(results: Iterable[Result]) -> list[str]:
    sources = (figures.source for result in results if (figures := energy_figures(result.record)) is not None)
    return list(dict.fromkeys(sources))


def show_ratio(ratio: EnergyRatio) -> str:
    """Returns a ratio with its range, as '0.613x [0.607, 0.619]'."""
    point, low, high = map(units.ratio, (ratio.point, ratio.low, ratio.high))
    return f"{point} [{low.removesuffix('x')}, {high.removesuffix('x')}]"


def list_energy_doubts(group: ResultGroup) -> list[tuple[str, str]]:
    """Returns why energies of a group are missing or unclear, as (precisions, reason)."""
    doubts: list[tuple[str, str]] = []
    unclear_energies = []
    for case in group.named_cases:
        sentences = [*_describe_missing(case), *_describe_window_pace(case)]
        phases = get_case_phase_energies(case)
        if phases is not None and phases.void_reason:
            sentences.append(f"energy of phases is void: {phases.void_reason}")
        doubts += [(doubt, case.mode) for doubt in sentences]
        ratio = ratio_to_reference(case)
        if ratio is not None and ratio.demand is EnergyDemand.UNCLEAR:
            unclear_energies.append((f"energy unclear: {ratio.why}", case.mode))
    return [(", ".join(modes), doubt) for doubt, modes in together(doubts + unclear_energies).items()]


def _describe_missing(result: Result) -> Sentences:
    """Yields why the energy of a case is missing or uncertain.

    Yields nothing if the device cannot measure energy at all, because `explain_missing_energy` reports that once per
    run.
    """
    figures = energy_figures(result.record)
    label_reason = result.reason(Label.ENERGY_UNRESOLVED)
    energy_use = result.record.energy
    # Prefer the reason in the label ENERGY_UNRESOLVED, because it has more details than `why_no_energy`.
    if label_reason:
        yield f"{Label.ENERGY_UNRESOLVED if figures else 'no energy'}: {label_reason}"
    elif figures is None and energy_use is not None and energy_use.source != NO_SOURCE:
        yield f"no energy: {why_no_energy(result.record)}"
    if figures is None or energy_use is None:
        return
    energy_validity = classify_energy_validity(result.record)
    if energy_validity not in (None, EnergyValidity.CERTIFIED) and not label_reason:
        yield f"its energy is not certified: {energy_validity}"
    if figures.net_why:
        yield f"no net energy: {figures.net_why}"
    if energy_use.why and not label_reason and energy_use.why != figures.net_why:
        yield f"energy of {many(len(figures.windows), 'window')} only: {energy_use.why}"


def _describe_window_pace(result: Result) -> Sentences:
    """Yields a sentence if a step's time in the long energy measurements differs from its time in the short timed
    slots.
    """
    figures = energy_figures(result.record)
    # A table of sustained speeds already compares the long energy windows with the short timing slots, so do not repeat
    # it here.
    if figures is None or result.is_emulated or compute_sustained_figures(result.record, result.finding) is not None:
        return
    pace_ratio = compare_window_step_time(figures, result.finding)
    if pace_ratio is not None:
        seconds = figures.seconds.middle
        windows_text = f"{units.seconds(seconds)} ({units.change(pace_ratio)}) in its long energy windows"
        yield f"a step took {windows_text}, and {units.seconds(seconds / pace_ratio)} in short slots"


def explain_missing_energy(run: Run) -> list[str]:
    """Returns a sentence for each device that has no source of energy figures, as 'energy: not measured on cpu:
    <reason>'.
    """
    records_by_device = together((record.case.device, record) for record in run.records if record.energy)
    lines = []
    for device, records in records_by_device.items():
        if {record.energy and record.energy.source for record in records} == {NO_SOURCE}:
            reasons = dict.fromkeys(map(why_no_energy, records))
            lines.append(f"energy: not measured on {device}: {'; '.join(reasons)}")
    return lines


def _show_window_count(row: _EnergyRow) -> str:
    uncertainty = row.energy.uncertainty
    uncertainty_text = "" if uncertainty is None else f" (+-{units.percent(uncertainty)})"
    return f"{len(row.energy.windows)}{uncertainty_text}"


def energy_table(panel: Panel) -> Tables:
    sources = list_energy_sources(panel.named_cases)
    if not sources:
        return
    caption = f"energy of a step, by {SOURCE_NAMES.get(sources[0], sources[0])}"
    if len(sources) > 1:
        caption = f"energy of a step; sources differ, and their figures do not compare ({', '.join(sources)})"
    measured_cases = panel.find_case_values(lambda result: energy_figures(result.record))
    rows = [_EnergyRow(case, figures, ratio_to_reference(case)) for case, figures in measured_cases]
    # Show energy per unit of the first kind of work only (such as tokens), because it is the suite's usual one.
    counted_work_kinds = {row.energy.per[0][0] for row in rows if row.energy.per}

    def metric_column(spec: str, heading: str) -> Col[_EnergyRow]:
        return Col(heading, lambda row: row.case.figures[spec].shown, number=True)

    def demand_field(row: _EnergyRow) -> Field:
        if row.ratio:
            return Field(row.ratio.demand.value, tone=TONE_BY_ENERGY_DEMAND[row.ratio.demand])
        return Field(explain_missing_ratio(row.case))

    def ratio_field(row: _EnergyRow) -> Field:
        return Field(show_ratio(row.ratio), tone=TONE_BY_ENERGY_DEMAND[row.ratio.demand]) if row.ratio else Field("")

    def show_power(row: _EnergyRow) -> str:
        shown_power = row.case.figures[specs.POWER].shown
        limits = row.case.record.energy.power_limits if row.case.record.energy else ()
        return f"{shown_power} of {', '.join(units.count(watts, 'W') for watts in limits)}" if limits else shown_power

    cols: ColumnList[_EnergyRow] = [
        *case_columns(),
        metric_column(ENERGY, "per step"),
        Col(f"vs {panel.reference or 'reference'}", demand_field),
        Col("", ratio_field),
        metric_column(specs.ENERGY_NET, "net/step"),
        *(
            metric_column(spec, spec.heading)
            for spec, _ in ENERGY_SPEC_BY_WORK_KIND.values()
            if spec in counted_work_kinds
        ),
        Col("power", show_power, number=True),
        metric_column(specs.IDLE_POWER, "idle"),
        Col("windows", _show_window_count),
        Col("clock", "energy.sm_clock", show=partial(units.count, unit="Hz")),
        Col("source", "energy.source", when=len(sources) > 1),
    ]
    yield add_figure_columns(table("energy", caption, cols, rows), [row.case for row in rows])


def phase_energy_table(panel: Panel) -> Tables:
    """Yields a table of the joules of each phase, with estimates in brackets. Yields nothing unless phases were
    measured (`--energy phases`).
    """
    rows = []
    measured_phases: set[str] = set()
    for case, energies in panel.find_case_values(get_case_phase_energies):
        if case.record.energy and case.record.energy.phases:
            energy_by_phase = {phase.phase: phase for phase in energies.phases}
            rows.append(CaseValue(case, energy_by_phase))
            measured_phases |= energy_by_phase.keys()
    phases = [name for name in PHASE_TITLES if name in measured_phases]
    if not phases:
        return
    cols: ColumnList[_CasePhaseJoules] = [*case_columns()]
    cols += [Col(PHASE_TITLES[name], partial(_phase_energy_field, name=name), number=True) for name in phases]
    caption = "joules of each phase, measured alone; (in brackets): estimated by its share of time, or as the rest"
    yield table("phase-energy", caption, cols, rows)


def _phase_energy_field(row: _CasePhaseJoules, name: str) -> Field | None:
    phase = row.value.get(name)
    if phase is None:
        return None
    # Only a phase that was measured alone has a range. Other joules are estimates.
    if phase.range is None:
        return Field(f"({units.joules(phase.joules)})", tone=Tone.DOUBT)
    return Field(f"{units.joules(phase.joules)} +-{units.percent(phase.range.width / 2 / phase.joules)}")


def _energy_lead_paragraph(material: Material) -> str:
    sources = list_energy_sources(list_cases(panel for _, panel in timed_panels(material)))
    if not sources:
        return ""
    source_warning = ", whose figures do not compare" if len(sources) > 1 else ""
    return (
        "The energy of steps that ran in separate windows after the timing; idle: with the same states in memory and "
        "nothing to do. Ranges are those of the windows, not confidence intervals. "
        f"Read from {join_words([SOURCE_NAMES.get(source, source) for source in sources])}{source_warning}."
    )


@section("energy", "Energy", 97, lead=_energy_lead_paragraph)
def energy_section(material: Material) -> Elements:
    for title, panel in timed_panels(material):
        yield from _panel_energy(title, panel)
    lines = chain.from_iterable(explain_missing_energy(entry.run) for entry in material.entries)
    for line in dict.fromkeys(lines):
        # The section's title already names the subject, energy.
        yield Text(f"{line.replace('energy: n', 'N', 1)}.", Tone.DOUBT)


def _panel_energy(title: str, panel: Panel) -> Elements:
    yield from make_table_names_unique((*energy_table(panel), *phase_energy_table(panel)), panel.suite, title)
    notes = []
    for group in panel.groups:
        notes += [(modes, doubt, group.setting_name) for modes, doubt in list_energy_doubts(group)]
    doubt_sentences = [f"{doubt.removeprefix('- ')}." for doubt in merge_notes(notes, len(panel.groups))]
    yield from bullet_list(doubt_sentences, Tone.DOUBT)
