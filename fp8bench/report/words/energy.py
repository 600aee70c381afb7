"""What is to be said of the energy of a panel's cases, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.energy import Demand, EnergyFigures, EnergyRatio
from fp8bench.report.case_status import emulated, speed_up
from fp8bench.report.elements import Text, Tone
from fp8bench.report.energies import figures_of, ratio_against, show_ratio
from fp8bench.report.panels import Panel, Result, ResultGroup
from fp8bench.report.words.naming import common_tone

DEMANDS = {Demand.LESS: Tone.GOOD, Demand.MORE: Tone.BAD, Demand.UNCLEAR: Tone.DOUBT}


def energy_clause(pairs: Sequence[tuple[Result, Result | None]]) -> str:
    """'; it takes 0.613x of the energy', for the end of a sentence on speed; '' where no case is clear.

    Each pair is a case and its reference.
    """
    ratios = [ratio for own, base in pairs if (ratio := ratio_against(own, base)) is not None]
    clear = [ratio for ratio in ratios if ratio.demand is not Demand.UNCLEAR]
    if not clear:
        return ""
    where = "" if len(clear) == len(pairs) else f" in {len(clear)} of {len(pairs)}"
    return f"; it takes {units.span((one.point for one in clear), units.ratio)} of the energy{where}"


def energy_sentences(panel: Panel) -> list[Text]:
    """One for each precision: what it takes of the reference's energy, and what its speed alone would give."""
    modes = dict.fromkeys(one.mode for one in panel.results if figures_of(one) is not None)
    return [text for mode in modes for text in _of_mode(panel, mode)]


def _of_mode(panel: Panel, mode: str) -> Iterator[Text]:
    found = [
        (group, one, ratio)
        for group, one in panel.members
        if one.mode == mode and (ratio := ratio_against(one, group.lead)) is not None
    ]
    if len(found) > 1:
        ratios = [ratio for _, _, ratio in found]
        yield Text(_several(mode, panel.reference, ratios), common_tone(DEMANDS[ratio.demand] for ratio in ratios))
    elif found:
        group, one, ratio = found[0]
        yield Text(_single(panel, group, one, ratio), DEMANDS[ratio.demand])
    else:
        yield from _alone(panel, mode)


def _alone(panel: Panel, mode: str) -> Iterator[Text]:
    """A mode that is compared with nothing: an emulation; or the reference, where it is alone."""
    known = [(one, figures) for one in panel.results if (figures := figures_of(one)) is not None]
    joules = [figures.gross.middle for one, figures in known if one.mode == mode]
    shown = units.span(joules, units.joules)
    if any(emulated(one) for one, _ in known if one.mode == mode):
        yield Text(f"{mode} is emulated: the {shown} of its steps are the cost of emulation", Tone.DOUBT)
    elif len({one.mode for one, _ in known}) == 1:
        yield Text(f"{mode} takes {shown} a step: there is nothing to compare it with")


def _single(panel: Panel, group: ResultGroup, result: Result, ratio: EnergyRatio) -> str:
    """'bf16 takes 0.613x [0.599, 0.625] of fp32's energy on gemm m=512 (1.90 J a step against 3.10 J, ...)'."""
    own, other = figures_of(result), figures_of(group.lead) if group.lead else None
    subject = f"{panel.case.workload} {panel.place(group)}".rstrip()
    against = f" ({_against(own, other)})" if own is not None and other is not None else ""
    speed = speed_up(result)
    alone = f"; at the same power its speed would give {units.ratio(1 / speed.point)}" if speed else ""
    shown = f"{show_ratio(ratio)} of {panel.reference}'s energy"
    if ratio.demand is Demand.UNCLEAR:
        return f"{result.mode} takes perhaps {shown} on {subject}{against}{alone}. It is not clear: {ratio.why}"
    return f"{result.mode} takes {shown} on {subject}{against}{alone}"


def _against(own: EnergyFigures, base: EnergyFigures) -> str:
    """'1.90 J a step against 3.10 J; beyond idling, 1.39 J against 2.28 J'."""
    words = f"{units.joules(own.gross.middle)} a step against {units.joules(base.gross.middle)}"
    if own.net is None or base.net is None:
        return words
    return f"{words}; beyond idling {units.joules(own.net.middle)} against {units.joules(base.net.middle)}"


def _several(mode: str, reference: str, ratios: Sequence[EnergyRatio]) -> str:
    """'bf16 takes 0.55x to 0.61x of fp32's energy in 4 cases: less in 3, not clear in 1'."""
    counts = {demand: sum(one.demand is demand for one in ratios) for demand in Demand}
    words = {Demand.LESS: "less", Demand.MORE: "more", Demand.UNCLEAR: "not clear"}
    told = ", ".join(f"{words[demand]} in {number}" for demand, number in counts.items() if number)
    points = units.span((one.point for one in ratios), units.ratio)
    return f"{mode} takes {points} of {reference}'s energy in {len(ratios)} cases: {told}"
