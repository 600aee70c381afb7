"""What a step of each case takes in joules, and what a lower precision saves of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8bench import units
from fp8bench.analysis.energy import Demand, EnergyFigures
from fp8bench.model import UNATTRIBUTED, EnergyWindow
from fp8bench.report.case_status import emulated, speed_up
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Items, Mark, Part, Stacks, Table, Text, Tone
from fp8bench.report.energies import (
    absences,
    figures_of,
    missing_within,
    named_source,
    ratio_within,
    show_ratio,
    sources_of,
)
from fp8bench.report.material import Material
from fp8bench.report.page.charts import grouped, phase_parts, stacked
from fp8bench.report.page.section import PRECISION, Section, case_field, sections
from fp8bench.report.panels import Panel, merge_notes
from fp8bench.report.tensor_panels import timed_panels
from fp8bench.report.words.energy import energy_sentences
from fp8bench.report.words.naming import NamedCase, listed, named_cases, phase_words

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
_MOST_ROWS = 300
_WINDOW = {
    "case": PRECISION,
    "source": Column("source", hint="figures of different ones do not compare"),
    "steps": Column("steps", number=True),
    "length": Column("length", number=True, unit="s"),
    "energy": Column("energy", number=True, unit="J", hint="of the whole window, idling included"),
    "step": Column("a step", number=True, unit="J"),
    "power": Column("power", number=True, unit="W"),
    "before": Column("idle before", number=True, unit="W"),
    "after": Column("idle after", number=True, unit="W"),
    "intervals": Column("intervals", number=True, hint="how often the source changed, or was read, in it"),
    "uncertainty": Column("uncertainty", number=True, hint="by how much its energy can be off; -: unknown"),
    "clock": Column("SM clock", number=True, unit="Hz", hint="the median one"),
    "temperature": Column("temperature", number=True, hint="the highest, in degrees Celsius"),
}


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
        yield _windows(title, found)


def _joules(kind: str, title: str, found: Sequence[_Measured]) -> Stacks:
    """A bar for each case, parted into idling and what comes on top."""
    rows = []
    for case, figures in found:
        gross = figures.gross.middle
        net = figures.net.middle if figures.net else None
        rows.append((case.name, gross, (0.0, 0.0, gross) if net is None else (net, gross - net, 0.0)))
    name, axis = f"{kind}-{found[0][0].result.record.case.workload}", Axis("energy of a step", "J")
    folded = emulated(found[0][0].result)
    return stacked(name, title, _described(found), axis, "share of the energy", _PARTS, rows, folded)


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
    groups = grouped((case.place, mark) for case, mark in marks)
    if len({case.result.mode for case, _ in marks}) == 1 < len(groups):  # a heading for all, as each has one bar
        bars = tuple(replace(mark, label=case.place) for case, mark in marks)
        groups = ((f"{marks[0][1].label} over {panel.reference}", bars),)
    yield Bars(name, heading, words, Axis("energy vs reference", "x"), groups, 1.0)


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
    kinds = {phase for _, figures in found for phase, _ in figures.phases} - {UNATTRIBUTED}
    if len(kinds) < _LEAST_PHASES:
        return
    rows = [
        (case.name, figures.gross.middle, [dict(figures.phases).get(part, 0.0) for part in parts])
        for case, figures in found
    ]
    name, axis = f"energy-phases-{found[0][0].result.record.case.workload}", Axis("energy of a step by phase", "J")
    heading, words = f"{title}: energy by phase (estimated)", [*map(phase_words, parts)]
    yield stacked(name, heading, _ESTIMATE, axis, "share of the energy", words, rows)


def _windows(title: str, found: Sequence[tuple[NamedCase, EnergyFigures]]) -> Table:
    """A row for each window, the first 300; columns in which none has anything to say are left out."""
    windows = [(case, figures, window) for case, figures in found for window in figures.windows]
    rows = [_window_fields(*one) for one in windows[:_MOST_ROWS]]
    shown = [name for name in _WINDOW if any(row[name].text != units.NONE for row in rows)]
    more = f" (the first {_MOST_ROWS} of {len(windows)}; the run has all)" if len(windows) > _MOST_ROWS else ""
    return Table(
        f"energy-windows-{found[0][0].result.record.case.workload}",
        f"{title}: the windows{more}",
        tuple(_WINDOW[name] for name in shown),
        tuple(tuple(row[name] for name in shown) for row in rows),
        folded=True,
    )


def _window_fields(case: NamedCase, figures: EnergyFigures, window: EnergyWindow) -> dict[str, Field]:
    use = case.result.record.energy
    step, watts = window.joules / window.steps, window.joules / window.seconds
    before, after = (use.idle_before, use.idle_after) if use is not None else (None, None)
    return {
        "case": case_field(case),
        "source": Field(figures.source, hint=named_source(figures.source)),
        "steps": Field(units.whole(window.steps), float(window.steps)),
        "length": Field(units.seconds(window.seconds), window.seconds),
        "energy": Field(units.joules(window.joules), window.joules),
        "step": Field(units.joules(step, 4), step),
        "power": Field(units.count(watts, "W"), watts),
        "before": Field(units.count(before, "W"), before),
        "after": Field(units.count(after, "W"), after),
        "intervals": Field(units.whole(window.intervals), float(window.intervals)),
        "uncertainty": Field(_uncertainty(window.uncertainty), window.uncertainty),
        "clock": Field(units.count(window.sm_clock, "Hz"), window.sm_clock),
        "temperature": Field(
            units.NONE if window.temperature is None else f"{window.temperature:.0f}", window.temperature
        ),
    }


def _uncertainty(share: float | None) -> str:
    return units.NONE if share is None else f"+-{units.percent(share, 2)}"
