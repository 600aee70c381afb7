"""What reports say of energy: figures of results, names of sources, sentences, and why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
from fp8bench.report.case_status import emulated, speed_up
from fp8bench.report.elements import Text, Tone
from fp8bench.report.panels import Panel, Result, ResultGroup, together
from fp8bench.report.words.naming import common_tone, many

# docs/energy.md explains the sources.
SOURCES = {
    "counter": "the driver's energy counter",
    "rapl": "the CPU's energy counters (RAPL)",
    "instant": "the driver's power readings, summed up",
    "average": "the driver's mean power, summed up",
}
DEMANDS = {Demand.LESS: Tone.GOOD, Demand.MORE: Tone.BAD, Demand.UNCLEAR: Tone.DOUBT}
_DEMANDED = {Demand.LESS: "less", Demand.MORE: "more", Demand.UNCLEAR: "not clear"}


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


def energy_clause(pairs: Sequence[tuple[Result, Result | None]]) -> str:
    """'; it takes 0.613x of the energy', for the end of a sentence on speed; '' if no case is clear.

    Each pair is a case and its reference.
    """
    ratios = [ratio for own, base in pairs if (ratio := ratio_against(own, base)) is not None]
    clear = [ratio for ratio in ratios if ratio.demand is not Demand.UNCLEAR]
    if not clear:
        return ""
    where = "" if len(clear) == len(pairs) else f" in {len(clear)} of {len(pairs)}"
    return f"; it takes {units.span((ratio.point for ratio in clear), units.ratio)} of the energy{where}"


def energy_sentences(panel: Panel) -> list[Text]:
    modes = dict.fromkeys(result.mode for result in panel.results if figures_of(result) is not None)
    return [text for mode in modes for text in _of_mode(panel, mode)]


def _of_mode(panel: Panel, mode: str) -> Iterator[Text]:
    cases = [
        (group, result, ratio)
        for group, result in panel.members
        if result.mode == mode and (ratio := ratio_against(result, group.lead)) is not None
    ]
    if len(cases) > 1:  # 'bf16 takes 0.55x to 0.61x of fp32's energy in 4 cases: less in 3, not clear in 1'
        ratios = [ratio for _, _, ratio in cases]
        counts = {words: sum(ratio.demand is demand for ratio in ratios) for demand, words in _DEMANDED.items()}
        told = ", ".join(f"{words} in {number}" for words, number in counts.items() if number)
        points = units.span((ratio.point for ratio in ratios), units.ratio)
        words = f"{mode} takes {points} of {panel.reference}'s energy in {len(ratios)} cases: {told}"
        yield Text(words, common_tone(DEMANDS[ratio.demand] for ratio in ratios))
    elif cases:
        group, alone, ratio = cases[0]
        yield Text(_single(panel, group, alone, ratio), DEMANDS[ratio.demand])
    else:  # an emulation, or the reference alone
        known = [(result, figures) for result in panel.results if (figures := figures_of(result)) is not None]
        shown = units.span((figures.gross.middle for result, figures in known if result.mode == mode), units.joules)
        if any(emulated(result) for result, _ in known if result.mode == mode):
            yield Text(f"{mode} is emulated: the {shown} of its steps are the cost of emulation", Tone.DOUBT)
        elif len({result.mode for result, _ in known}) == 1:
            yield Text(f"{mode} takes {shown} a step: there is nothing to compare it with")


def _single(panel: Panel, group: ResultGroup, result: Result, ratio: EnergyRatio) -> str:
    """'bf16 takes 0.613x [0.599, 0.625] of fp32's energy on gemm m=512 (1.90 J a step against 3.10 J, ...)'."""
    own, other = figures_of(result), figures_of(group.lead) if group.lead else None
    subject = f"{panel.case.workload} {group.place}".rstrip()
    against = ""
    if own is not None and other is not None:
        against = f"{units.joules(own.gross.middle)} a step against {units.joules(other.gross.middle)}"
        if own.net is not None and other.net is not None:
            beyond = f"{units.joules(own.net.middle)} against {units.joules(other.net.middle)}"
            against = f"{against}; beyond idling {beyond}"
        against = f" ({against})"
    speed = speed_up(result)
    alone = f"; at the same power its speed would give {units.ratio(1 / speed.point)}" if speed else ""
    shown = f"{show_ratio(ratio)} of {panel.reference}'s energy"
    if ratio.demand is Demand.UNCLEAR:
        return f"{result.mode} takes perhaps {shown} on {subject}{against}{alone}. It is not clear: {ratio.why}"
    return f"{result.mode} takes {shown} on {subject}{against}{alone}"
