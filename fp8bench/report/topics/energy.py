"""The joules of a step of each case, what a lower precision saves, and why energy is missing or unclear."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.energy import (
    NO_SOURCE,
    Demand,
    EnergyFigures,
    EnergyRatio,
    PhaseEnergies,
    PhaseJoules,
    energy_figures,
    energy_ratio,
    other_pace,
    phase_energies,
    why_no_energy,
)
from fp8bench.analysis.metrics import EnergyValidity, energy_validity
from fp8bench.analysis.samples import sustained_figures
from fp8bench.model import Label, Run, specs
from fp8bench.model.specs import ENERGY, ENERGY_PER
from fp8bench.report.columns import Col, Cols, case_cols, table, with_figures
from fp8bench.report.elements import Elements, Field, Sentences, Tables, Text, Tone, items_of
from fp8bench.report.page.section import Material, name_tables, section
from fp8bench.report.panels import CaseValue, NamedCase, Panel, Result, ResultGroup, merge_notes, together
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words.legend import PHASE_TITLES
from fp8bench.report.words.naming import join_words, many

_PhaseRow = CaseValue[dict[str, PhaseJoules]]


class _EnergyRow(NamedTuple):
    case: NamedCase
    energy: EnergyFigures
    ratio: EnergyRatio | None


# docs/energy.md explains the sources.
SOURCES = {
    "counter": "the driver's energy counter",
    "rapl": "the CPU's energy counters (RAPL)",
    "instant": "the driver's power readings, summed up",
    "average": "the driver's mean power, summed up",
}
DEMANDS = {Demand.LESS: Tone.GOOD, Demand.MORE: Tone.BAD, Demand.UNCLEAR: Tone.DOUBT}


def figures_of(result: Result) -> EnergyFigures | None:
    if result.is_ok:
        return energy_figures(result.record)
    return None


def phases_of(result: Result) -> PhaseEnergies | None:
    if result.is_ok:
        return phase_energies(result.record, result.finding)
    return None


def power_limits_of(result: Result) -> str:
    """'650 W'; several if it was changed within the run, '' if unknown."""
    limits = result.record.energy.power_limits if result.record.energy else ()
    return ", ".join(units.count(watts, "W") for watts in limits)


def ratio_of(case: NamedCase) -> EnergyRatio | None:
    """Returns its energy over that of its reference, in doubt under a label of either; None for the reference."""
    reference = case.lead
    if reference is None or reference.record is case.record:
        return None
    return energy_ratio(case.record, reference.record, (*case.labels, *reference.labels))


def sources_of(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(figures.source for result in results if (figures := figures_of(result)) is not None))


def show_ratio(ratio: EnergyRatio) -> str:
    """'0.613x [0.607, 0.619]', three digits like times."""
    low, high = (units.ratio(value).removesuffix("x") for value in (ratio.low, ratio.high))
    return f"{units.ratio(ratio.point)} [{low}, {high}]"


def doubts_within(group: ResultGroup) -> list[tuple[str, str]]:
    """Returns which energies of a group are missing or unclear, and why, as pairs of modes and words."""
    doubts: list[tuple[str, str]] = []
    for case in group.members:
        words = [*_describe_missing(case), *_describe_pace(case)]
        phases = phases_of(case)
        if phases is not None and phases.void:
            words.append(f"energy of phases is void: {phases.void}")
        doubts += [(doubt, case.mode) for doubt in words]
    for case in group.members:
        ratio = ratio_of(case)
        if ratio is not None and ratio.demand is Demand.UNCLEAR:
            doubts.append((f"energy unclear: {ratio.why}", case.mode))
    return [(", ".join(modes), words) for words, modes in together(doubts).items()]


def _describe_missing(result: Result) -> Sentences:
    """Yields nothing if the device cannot measure energy at all: `absences` mentions that once for the run."""
    figures = figures_of(result)
    unresolved = result.reason(Label.ENERGY_UNRESOLVED)
    use = result.record.energy if result.is_ok else None
    # The label's reason has more detail.
    if unresolved:
        yield f"{Label.ENERGY_UNRESOLVED if figures else 'no energy'}: {unresolved}"
    elif figures is None and use is not None and use.source != NO_SOURCE:
        yield f"no energy: {why_no_energy(result.record)}"
    if figures is None or use is None:
        return
    # Certified energies need no remark.
    validity = energy_validity(result.record)
    if validity not in (None, EnergyValidity.CERTIFIED) and not unresolved:
        yield f"its energy is not certified: {validity}"
    if figures.net_why:
        yield f"no net energy: {figures.net_why}"
    if use.why and not unresolved and use.why != figures.net_why:
        yield f"energy of {many(len(figures.windows), 'window')} only: {use.why}"


def _describe_pace(result: Result) -> Sentences:
    """Yields a sentence if a step took a different time in the energy windows than in slots."""
    figures = figures_of(result)
    finding = result.finding
    if figures is None or finding is None or result.is_emulated:
        return
    if sustained_figures(result.record, finding) is not None:  # which has a table
        return
    pace = other_pace(figures, finding)
    if pace is not None:
        seconds = figures.seconds.middle
        in_windows = f"{units.seconds(seconds)} ({units.change(pace)}) in the seconds of its energy windows"
        yield f"a step took {in_windows}, and {units.seconds(seconds / pace)} in slots"


def absences(run: Run) -> list[str]:
    """Returns 'energy: not measured on cpu: <reason>' for each device that has no source of energy."""
    by_device = together((record.case.device, record) for record in run.records if record.energy)
    lines = []
    for device, records in by_device.items():
        if {record.energy and record.energy.source for record in records} == {NO_SOURCE}:
            reasons = dict.fromkeys(map(why_no_energy, records))
            lines.append(f"energy: not measured on {device}: {'; '.join(reasons)}")
    return lines


def _show_demand(row: _EnergyRow) -> str:
    if row.ratio:
        return row.ratio.demand.value
    if row.case.is_reference:
        return "reference"
    return "emulated" if row.case.is_emulated else units.NONE


def _show_windows(row: _EnergyRow) -> str:
    width = row.energy.uncertainty
    spread = "" if width is None else f" (+-{units.percent(width)})"
    return f"{len(row.energy.windows)}{spread}"


def energy(panel: Panel) -> Tables:
    sources = sources_of(panel.members)
    if not sources:
        return
    caption = f"energy of a step, by {SOURCES.get(sources[0], sources[0])}"
    if len(sources) > 1:
        caption = f"energy of a step; sources differ, and their figures do not compare ({', '.join(sources)})"
    rows = []
    counts: set[str] = set()
    for case in panel.members:
        if (figures := figures_of(case)) is not None:
            rows.append(_EnergyRow(case, figures, ratio_of(case)))
            # A step has one kind of work; its first count is the one that readers know.
            counts.update(name for name, _ in figures.per[:1])

    def of(spec: str, heading: str) -> Col[_EnergyRow]:
        return Col(heading, lambda row: row.case.figures[spec].shown, number=True)

    def tone(row: _EnergyRow) -> Tone:
        if row.ratio:
            return DEMANDS[row.ratio.demand]
        return Tone.PLAIN

    def power(row: _EnergyRow) -> str:
        limits = power_limits_of(row.case)
        return row.case.figures[specs.POWER].shown + f" of {limits}" * bool(limits)

    cols: Cols[_EnergyRow] = [
        *case_cols(),
        of(ENERGY, "per step"),
        Col(f"vs {panel.reference or 'reference'}", _show_demand, tone=tone),
        Col("", lambda row: show_ratio(row.ratio) if row.ratio else "", tone=tone),
        of(specs.ENERGY_NET, "net/step"),
        *(of(spec, spec.heading) for spec, _ in ENERGY_PER.values() if spec in counts),
        Col("power", power, number=True),
        of(specs.IDLE_POWER, "idle"),
        Col("windows", _show_windows),
        Col("clock", "energy.sm_clock", show=partial(units.count, unit="Hz")),
        Col("source", "energy.source", when=len(sources) > 1),
    ]
    yield with_figures(table("energy", caption, cols, rows), [row.case for row in rows])


def energy_of_phases(panel: Panel) -> Tables:
    """Yields the joules of each phase, estimates in brackets; nothing unless `--energy phases` was requested."""
    rows = []
    present: set[str] = set()
    for case, energies in panel.find_values(phases_of):
        if case.record.energy and case.record.energy.phases:
            by_phase = {phase.phase: phase for phase in energies.phases}
            rows.append(CaseValue(case, by_phase))
            present |= by_phase.keys()
    names = [name for name in PHASE_TITLES if name in present]
    if not names:
        return
    cols: Cols[_PhaseRow] = [*case_cols()]
    cols += [Col(PHASE_TITLES[name], partial(_of_phase, name=name), number=True) for name in names]
    caption = "joules of each phase run by itself; (in brackets): estimated by its share of time, or as the rest"
    yield table("phase-energy", caption, cols, rows)


def _of_phase(row: _PhaseRow, name: str) -> Field | None:
    phase = row.value.get(name)
    if phase is None:
        return None
    if phase.range is None:
        return Field(f"({units.joules(phase.joules)})", tone=Tone.DOUBT)
    return Field(f"{units.joules(phase.joules)} +-{units.percent(phase.range.width / 2 / phase.joules)}")


def _lead(material: Material) -> str:
    cases: list[NamedCase] = []
    for _, panel in timed_panels(material):
        cases += panel.members
    sources = sources_of(cases)
    if not sources:
        return ""
    differ = ", whose figures do not compare" if len(sources) > 1 else ""
    return (
        "The energy of steps that ran in separate windows after the timing; idle: with the same states in memory and "
        "nothing to do. Ranges are those of the windows, not confidence intervals. "
        f"Read from {join_words([SOURCES.get(source, source) for source in sources])}{differ}."
    )


@section("energy", "Energy", 97, lead=_lead)
def energy_section(material: Material) -> Elements:
    for title, panel in timed_panels(material):
        yield from _panel(title, panel)
    lines: list[str] = []
    for entry in material.entries:
        lines += absences(entry.run)
    for line in dict.fromkeys(lines):
        yield Text(f"{line.replace('energy: n', 'N', 1)}.", Tone.DOUBT)


def _panel(title: str, panel: Panel) -> Elements:
    yield from name_tables((*energy(panel), *energy_of_phases(panel)), panel.suite, title)
    notes: list[tuple[str, str, str]] = []
    for group in panel.groups:
        notes += [(modes, doubt, group.place) for modes, doubt in doubts_within(group)]
    doubts = [f"{doubt.removeprefix('- ')}." for doubt in merge_notes(notes, len(panel.groups))]
    yield from items_of(doubts, Tone.DOUBT)
