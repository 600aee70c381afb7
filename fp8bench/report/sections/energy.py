"""What a step of each case takes in joules, and what a lower precision saves of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.analysis.energy import Demand, EnergyFigures
from fp8bench.model import UNATTRIBUTED
from fp8bench.report.blocks import Panel, merge_notes
from fp8bench.report.elements import Axis, Bars, Element, Items, Mark, Part, Stacks, Text, Tone
from fp8bench.report.energies import (
    absences,
    figures_of,
    missing_within,
    named_source,
    ratio_within,
    show_ratio,
    sources_of,
)
from fp8bench.report.energy_sentences import energy_sentences
from fp8bench.report.energy_windows import windows_table
from fp8bench.report.material import Material
from fp8bench.report.naming import NamedCase, listed, named_cases, phase_words
from fp8bench.report.phase_parts import phase_parts
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import emulated, speed_up
from fp8bench.report.tensor_panels import timed_panels

# Where the most is so many times the least, bars of joules would hide the parts of the short ones.
_WIDE = 8.0
# A step of one phase and little else has no parts worth a chart.
_LEAST_PHASES = 2
_PARTS = ("beyond idling", "idling", "not split")
_TONES = {Demand.LESS: Tone.GOOD, Demand.MORE: Tone.BAD, Demand.UNCLEAR: Tone.DOUBT}
_LEAD = (
    "What the device took while steps ran in windows of their own, after the timing; idling is what it takes with the "
    "same states in memory and nothing to do. Ranges are those of windows, and no confidence intervals."
)
_ESTIMATE = (
    "An estimate: the joules of a step, parted by the time of its phases as if all took the same power. Phases are too "
    "short for any counter."
)
_Measured = tuple[NamedCase, EnergyFigures]


@sections.register("energy")
class Energy(Section):
    """Joules of a step, over the reference's, by phase, and the windows they rest on; or why nobody knows."""

    name = "energy"
    summary = "joules of a step, what a lower precision saves of them, and the windows they come from"
    rank = 97

    def build(self, material: Material) -> Part | None:
        panels = list(timed_panels(material))
        parts = phase_parts(one for _, panel in panels for one in panel.results)
        elements = [element for title, panel in panels for element in _panel(title, panel, parts)]
        why = dict.fromkeys(text for entry in material.entries for text in absences(entry.run))
        elements += [Text(f"{text.replace('energy: n', 'N', 1)}.", Tone.DOUBT) for text in why]
        return Part(self.name, "Energy", tuple(elements), _lead(panels)) if elements else None


def _lead(panels: Sequence[tuple[str, Panel]]) -> str:
    """With the sources, whose figures do not compare."""
    sources = list(dict.fromkeys(source for _, panel in panels for source in sources_of(panel.results)))
    if not sources:
        return ""
    named = listed([named_source(source) for source in sources])
    differ = ", whose figures do not compare" if len(sources) > 1 else ""
    return f"{_LEAD} Read from {named}{differ}."


def _panel(title: str, panel: Panel, parts: Sequence[str]) -> Iterator[Element]:
    found = [(case, figures) for case in named_cases(panel) if (figures := figures_of(case.result)) is not None]
    if found:
        yield Items(tuple(Text(f"{one.text}.", one.tone) for one in energy_sentences(panel)))
    for kind, cost, words in (("energy", False, "energy of a step"), ("energy-cost", True, "what emulating costs")):
        members = [one for one in found if emulated(one[0].result) is cost]
        if members:
            yield _joules(kind, f"{title}: {words}", members)
    yield from _ratios(title, panel, found)
    yield from _phases(title, [one for one in found if not emulated(one[0].result)], parts)
    notes = ((modes, doubt, panel.place(group)) for group in panel.groups for modes, doubt in missing_within(group))
    doubts = merge_notes(notes, len(panel.groups))
    if doubts:
        yield Items(tuple(Text(f"{one.removeprefix('- ')}.", Tone.DOUBT) for one in doubts))
    if found:
        yield windows_table(title, found)


def _joules(kind: str, title: str, found: Sequence[_Measured]) -> Stacks:
    """A bar for each case, parted into idling and what comes on top."""
    joules = [figures.gross.middle for _, figures in found]
    wide = max(joules) > _WIDE * min(joules)
    rows = []
    for case, figures in found:
        gross = figures.gross.middle
        values = (figures.net.middle, gross - figures.net.middle, 0.0) if figures.net else (0.0, 0.0, gross)
        label = f"{case.name}, {units.joules(gross)}" if wide else case.name
        rows.append((label, tuple(100 * one / gross for one in values) if wide else values))
    axis = Axis("share of the energy", "%") if wide else Axis("energy of a step", "J")
    name = f"{kind}-{found[0][0].result.record.case.workload}"
    return Stacks(name, title, _described(found), axis, _PARTS, tuple(rows))


def _described(found: Sequence[_Measured]) -> str:
    """The least and the most, how much of it is idling, and the power it took."""
    least, most = (choose(found, key=lambda one: one[1].gross.middle) for choose in (min, max))
    words = f"{_named(*least)} a step" if len(found) == 1 else f"From {_named(*least)} to {_named(*most)} a step"
    shares = sorted(1 - one.net.middle / one.gross.middle for _, one in found if one.net is not None)
    watts = sorted(one.watts for _, one in found)
    power = _ends(units.count(watts[0], "W"), units.count(watts[-1], "W"))
    if not shares:
        return f"{words}, at {power}."
    return f"{words}, at {power}; idling is {_ends(units.percent(shares[0], 0), units.percent(shares[-1], 0))} of it."


def _named(case: NamedCase, figures: EnergyFigures) -> str:
    return f"{units.joules(figures.gross.middle)} ({case.name})"


def _ends(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _ratios(title: str, panel: Panel, found: Sequence[_Measured]) -> Iterator[Bars]:
    """Bars from 1x: to the left of it a case takes less than the reference."""
    marks = [(case, mark) for case, _ in found if (mark := _mark(case)) is not None]
    if not marks:
        return
    words = (
        "Below 1x is less. Whiskers are the ends of all pairs of windows, with the uncertainty of both; grey ones "
        "lie too close to the reference's, or are in doubt."
    )
    name = f"energy-ratio-{panel.case.workload}"
    heading = f"{title}: energy over that of {panel.reference}"
    yield Bars(name, heading, words, Axis("energy vs reference", "x"), tuple(_groups(panel, marks)), 1.0)


def _groups(panel: Panel, marks: Sequence[tuple[NamedCase, Mark]]) -> Iterator[tuple[str, tuple[Mark, ...]]]:
    """A heading a setting; one for all, where each setting has one bar."""
    modes = {mark.label for _, mark in marks}
    by_place: dict[str, list[Mark]] = {}
    for case, mark in marks:
        by_place.setdefault(case.place, []).append(mark)
    if len(modes) == 1 and len(by_place) > 1:
        yield f"{modes.pop()} over {panel.reference}", tuple(replace(mark, label=case.place) for case, mark in marks)
    else:
        yield from ((place, tuple(members)) for place, members in by_place.items())


def _mark(case: NamedCase) -> Mark | None:
    ratio = ratio_within(case.group, case.result)
    if ratio is None:
        return None
    speed = speed_up(case.result)
    of_time = f", {units.ratio(1 / speed.point)} of its time" if speed else ""
    why = f"; not clear: {ratio.why}" if ratio.why else ""
    hint = f"{case.result.mode} {show_ratio(ratio)} of {case.group.reference}'s energy{of_time}{why}"
    return Mark(case.result.mode, ratio.point, ratio.low, ratio.high, _TONES[ratio.demand], hint)


def _phases(title: str, found: Sequence[_Measured], parts: Sequence[str]) -> Iterator[Stacks]:
    """What each phase takes of a step's joules by its share of the time."""
    whole = [figures.gross.middle for _, figures in found]
    kinds = {phase for _, figures in found for phase, _ in figures.phases} - {UNATTRIBUTED}
    if len(kinds) < _LEAST_PHASES:
        return
    wide = max(whole) > _WIDE * min(whole)
    rows = []
    for (case, figures), joules in zip(found, whole, strict=True):
        scale = 100 / joules if wide else 1.0
        by_phase = dict(figures.phases)
        label = f"{case.name}, {units.joules(joules)}" if wide else case.name
        rows.append((label, tuple(scale * by_phase.get(part, 0.0) for part in parts)))
    axis = Axis("share of the energy", "%") if wide else Axis("energy of a step, estimated by phase", "J")
    name = f"energy-phases-{found[0][0].result.record.case.workload}"
    heading = f"{title}: energy by phase (estimated)"
    yield Stacks(name, heading, _ESTIMATE, axis, tuple(map(phase_words, parts)), tuple(rows))
