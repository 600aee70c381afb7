"""What reports say of energy: figures of results, names of sources, sentences, and why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8bench import units
from fp8bench.analysis.energy import (
    NO_SOURCE,
    Demand,
    EnergyFigures,
    EnergyRatio,
    PhaseEnergies,
    energy_figures,
    energy_ratio,
    other_pace,
    phase_energies,
    why_no_energy,
)
from fp8bench.analysis.metrics import EnergyValidity, energy_validity
from fp8bench.model import UNATTRIBUTED, Label, Run, Status
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Tone
from fp8bench.report.panels import Result, ResultGroup, together
from fp8bench.report.words.naming import many

# docs/energy.md explains the sources.
SOURCES = {
    "counter": "the driver's energy counter",
    "rapl": "the CPU's energy counters (RAPL)",
    "instant": "the driver's power readings, summed up",
    "average": "the driver's mean power, summed up",
}
DEMANDS = {Demand.LESS: Tone.GOOD, Demand.MORE: Tone.BAD, Demand.UNCLEAR: Tone.DOUBT}


def figures_of(result: Result) -> EnergyFigures | None:
    return energy_figures(result.record) if result.record.status is Status.OK else None


def phases_of(result: Result) -> PhaseEnergies | None:
    return phase_energies(result.record, result.finding) if result.record.status is Status.OK else None


def validity_of(result: Result) -> str:
    """'certified', or why its energy is not; '-' without energy."""
    validity = energy_validity(result.record)
    return units.NONE if validity is None else validity.value


def power_limits_of(result: Result) -> str:
    """'650 W'; several if it was changed within the run, '' if unknown."""
    limits = result.record.energy.power_limits if result.record.energy else ()
    return ", ".join(units.count(watts, "W") for watts in limits)


def ratio_against(result: Result, reference: Result | None) -> EnergyRatio | None:
    """Its energy over that of its reference, in doubt under a label of either; None for the reference."""
    if reference is None or reference is result:
        return None
    return energy_ratio(result.record, reference.record, (*result.labels, *reference.labels))


def sources_of(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(figures.source for result in results if (figures := figures_of(result)) is not None))


def show_ratio(ratio: EnergyRatio) -> str:
    """'0.613x [0.607, 0.619]', three digits like times."""
    low, high = (units.ratio(value).removesuffix("x") for value in (ratio.low, ratio.high))
    return f"{units.ratio(ratio.point)} [{low}, {high}]"


def missing_within(group: ResultGroup) -> list[tuple[str, str]]:
    """What is missing of a group's energies, and why: modes, and the words that hold for all of them.

    Also if steps took another time in the energy windows than in slots, whose energy is then unknown.
    """
    return _by_doubt(
        (result, words)
        for result in group.results
        for words in (*_missing(result), *_at_another_pace(result), *_of_phases(result))
    )


def doubts_within(group: ResultGroup) -> list[tuple[str, str]]:
    unclear = (
        (result, f"energy unclear: {ratio.why}")
        for result in group.results
        if (ratio := ratio_against(result, group.lead)) is not None and ratio.demand is Demand.UNCLEAR
    )
    return [*missing_within(group), *_by_doubt(unclear)]


def _by_doubt(doubts: Iterable[tuple[Result, str]]) -> list[tuple[str, str]]:
    modes = together((words, result.mode) for result, words in doubts)
    return [(", ".join(names), words) for words, names in modes.items()]


def _missing(result: Result) -> Iterator[str]:
    """Nothing if the device cannot measure energy at all: that is said of the run."""
    figures, unresolved = figures_of(result), result.reason(Label.ENERGY_UNRESOLVED)
    use = result.record.energy if result.record.status is Status.OK else None
    if unresolved:
        yield f"{Label.ENERGY_UNRESOLVED if figures else 'no energy'}: {unresolved}"
    elif figures is None and use is not None and use.source != NO_SOURCE:
        yield f"no energy: {why_no_energy(result.record)}"
    if figures is None or use is None:
        return
    validity = energy_validity(result.record)
    if validity not in (None, EnergyValidity.CERTIFIED) and not unresolved:
        yield f"its energy is not certified: {validity}"
    if figures.net_why:
        yield f"no net energy: {figures.net_why}"
    if use.why and not unresolved and use.why != figures.net_why:
        yield f"energy of {many(len(figures.windows), 'window')} only: {use.why}"


def _at_another_pace(result: Result) -> Iterator[str]:
    figures, finding = figures_of(result), result.finding
    if figures is None or finding is None or emulated(result) or result.record.sustained:  # which has a table
        return
    if (pace := other_pace(figures, finding)) is not None:
        took, slots = units.seconds(figures.seconds.middle), units.seconds(figures.seconds.middle / pace)
        yield f"a step took {took} ({units.change(pace)}) in the seconds of its energy windows, and {slots} in slots"


def _of_phases(result: Result) -> Iterator[str]:
    phases, figures = phases_of(result), figures_of(result)
    are_measured = result.record.energy is not None and bool(result.record.energy.phases)
    if phases is None or figures is None or not are_measured:
        return
    left = phases.residual
    if left is not None:
        ends = f"[{units.joules(left.low)}, {units.joules(left.high)}]"
        told = f"{units.joules(left.middle)} {ends} of a step's {units.joules(figures.gross.middle)}"
        yield f"energy of phases: they leave over {told}, and {units.seconds(phases.residual_seconds)} of its time"
    if phases.void:
        yield f"energy of phases is void: {phases.void}"
        return
    for phase in phases.phases:
        if phase.why and phase.phase != UNATTRIBUTED:
            yield f"energy of {phase.phase} is an estimate: {phase.why}"


def absences(run: Run) -> list[str]:
    """'energy: not measured on cpu: <why>' for each device that has no source of energy."""
    by_device = together(
        (record.case.device, (record.energy.source, why_no_energy(record))) for record in run.records if record.energy
    )
    return [
        f"energy: not measured on {device}: {'; '.join(dict.fromkeys(why for _, why in known))}"
        for device, known in by_device.items()
        if {source for source, _ in known} == {NO_SOURCE}
    ]
