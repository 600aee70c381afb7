"""A run as text for a terminal: panels of tables, what they mean, what did not go well, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8bench.model import Finding, Label, Record, Run, Status, Verdict
from fp8bench.report import rank_boards
from fp8bench.report.break_evens import swept, table
from fp8bench.report.case_status import emulated
from fp8bench.report.coverages import elements as coverage
from fp8bench.report.elements import Element, Facts, Items, Page, Part, Text, Tone
from fp8bench.report.energies import absences, doubts_within, figures_of, ratio_against
from fp8bench.report.memories import PEAK
from fp8bench.report.metric_columns import other_tables
from fp8bench.report.panels import Panel, heading, merge_notes, panels_of, together
from fp8bench.report.ranks import ranks
from fp8bench.report.tensor_panels import about_tensors
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.figures import (
    capacity,
    counted,
    data,
    energy,
    energy_of_phases,
    memory,
    sustained,
    tells_memory,
)
from fp8bench.report.terminal.summary import summary
from fp8bench.report.terminal.tables import floor_of, main_error, main_table, noise_floor, phases_table, show_value
from fp8bench.report.terminal.tensors import LEGEND, tensors
from fp8bench.report.words import legend, roofline, speed
from fp8bench.report.words.run_facts import attention_of, cache_of, missing_of, notes_of, replays_of
from fp8bench.report.words.values import over_values

# Where there are several groups of several ranks: hundreds of lines would bury the answer.
_REST = (
    "The report has the rest of every case: interval and noise floor, phases, memory, each rank's times, overlap "
    "(fp8bench report {id}); `--set` for one of these settings prints it here."
)


def render(run: Run, findings: Mapping[str, Finding], width: int = 100, color: bool = False) -> str:
    """The text of a run. Without colour it depends on nothing but its arguments."""
    return layout.render(page_of(run, findings, width), width, color)


def page_of(run: Run, findings: Mapping[str, Finding], width: int, report: str = "") -> Page:
    """A run's page; `findings` by case id, `report` is where its report is. No line shall be wider than `width`."""
    width = max(width, layout.MIN_WIDTH)
    panels = panels_of(run, findings)
    parts = [part for panel in panels for part in _parts(panel, run, width)]
    parts += [] if panels else [Part("nothing", "", (Text("Nothing was measured."),))]
    bounds = roofline.how_to_know((result for panel in panels for result in panel.results), run)
    parts += [Part("roofline", "", (Text(bounds),))] if bounds else []
    parts += [Part("ending", "", tuple(_ending(run))), summary(run, panels, width, report)]
    return Page("", "", tuple(parts), _legend(panels))


def _parts(panel: Panel, run: Run, width: int) -> Iterator[Part]:
    if covered := tuple(coverage(panel)):
        yield Part("coverage", "coverage", covered)
    title = heading(panel.case.workload, panel.shared, panel.case.device, run.devices)
    glance: list[Element] = list(rank_boards.boards(panel))
    if glance and len(panel.groups) > 1:
        told = (*glance, *map(Text, [*rank_boards.remarks(panel), _REST.format(id=run.id)]))
        yield Part("panel", title, told, _reference_line(panel))
        yield from layout.list_of("notes", "notes", merge_notes(_notes(panel, run), len(panel.groups)))
        return
    elements: list[Element] = glance
    of_tensors = about_tensors(panel)
    if of_tensors:
        elements += tensors(panel, width)
    else:
        phases = phases_table(panel)
        elements += [main_table(panel), *([phases] if phases else []), *map(Text, over_values(panel))]
        elements += [*sustained(panel), *energy(panel), *energy_of_phases(panel), *memory(panel)]
        elements += other_tables(panel)
        found = swept(panel)
        elements += [table(panel, found, "from where on it pays")] if found else []
    elements += [*ranks(panel), *capacity(panel), *data(panel)]
    yield Part("panel", title, tuple(elements), "" if of_tensors else _reference_line(panel))
    numbers = [] if of_tensors else _numbers(panel)
    if numbers:
        yield Part("numbers", "numbers", (Facts(tuple(numbers)),))
    bounds = [] if of_tensors else [Text(one) for one in roofline.sentences(panel)]
    bounds += [Text(one) for one in roofline.sources(panel.results)] if bounds else []
    if bounds:
        yield Part("roofline", "what bounds it", (Items(tuple(bounds)),))
    yield from layout.list_of("notes", "notes", merge_notes(_notes(panel, run), len(panel.groups)))


def _reference_line(panel: Panel) -> str:
    """What the others are held against; the noise floor too where one line can say it for all."""
    measured = any(result.record.is_reference for result in panel.results)
    reference = panel.reference if measured else f"none ({panel.reference or 'none planned'} was not measured)"
    if len(panel.groups) == 1:
        return f"reference: {reference}; noise floor (A/A): {noise_floor(panel.groups[0])}"
    floors = floor_of(panel.results) if any(rank_boards.boards(panel)) else ""  # other tables have each group's
    floor = f"; noise floors (A/A): {floors}" if floors else ""
    return f"reference: {reference}{floor}"


def _numbers(panel: Panel) -> list[tuple[str, str]]:
    """Measurements beside the main error, and speed-ups by medians, a line for each metric and group."""
    lines: list[tuple[str, str]] = []
    for group in panel.groups:
        told = [
            (f"{one.metric} ({one.phase})" if one.phase else one.metric, f"{result.mode} {show_value(one)}{how}")
            for result in group.results
            for one in result.record.measurements
            for how in [" (emulated)" if one.unit == "B" and emulated(result) else ""]
            if one.metric != _told_elsewhere(panel)
        ]
        told += [
            ("speed-up over all calls", f"{one.mode} {speed.of_all_calls(one.finding)}")
            for one in group.results
            if one.finding and one.finding.typical and not emulated(one)
        ]
        place = f" at {panel.place(group)}" if len(panel.groups) > 1 else ""
        others = {label: texts for label, texts in together(told).items() if label != main_error(panel)}
        lines += [(f"{label}{place}", ", ".join(texts)) for label, texts in others.items()]
    return lines


def _conditions(record: Record, run: Run) -> Iterator[str]:
    """What a case was measured with, and what nobody could."""
    if kernel := attention_of(record):
        yield f"attention by torch's kernel {kernel}"
    if words := cache_of(record, run.devices):
        yield words
    if words := replays_of(record):
        yield words


def _notes(panel: Panel, run: Run) -> Iterable[tuple[str, str, str]]:
    """(about, text, place) of everything that was skipped, failed or has no clear verdict."""
    for group in panel.groups:
        place = panel.place(group)
        for result in group.results:
            record, finding = result.record, result.finding
            if record.status is not Status.OK:
                word = "FAILED" if record.status is Status.FAILED else record.status.value
                yield f"{result.mode} {word}", record.reason, place
                continue
            if finding is not None and finding.why and not finding.judged:
                word = "no verdict" if finding.verdict is Verdict.NONE else finding.verdict.value
                yield f"{result.mode} {word}", finding.why, place
            if Label.EAGER_QUANTISER in result.labels and not about_tensors(panel):
                yield f"{result.mode} {Label.EAGER_QUANTISER}", result.reason(Label.EAGER_QUANTISER), place
            if record.detail:  # it was timed, but something else about it could not be had
                yield result.mode, record.detail, place
        for modes, doubt in [] if about_tensors(panel) else doubts_within(group):
            yield modes, doubt, place
        told = [(words, one.mode) for one in group.results for words in _conditions(one.record, run)]
        for words, names in together(told).items():
            yield ", ".join(names), words, place


def _legend(panels: Sequence[Panel]) -> list[str]:
    """A line for every word of the report that needs one, and only for those that occur."""
    timed = [panel for panel in panels if not about_tensors(panel)]
    results = [result for panel in timed for result in panel.results]
    of_tensors = [LEGEND] if len(timed) < len(panels) else []
    looked_at = any(result.record.statistics for panel in panels for result in panel.results)
    of_data = [legend.DATA] if looked_at else []
    if not any(result.best for result in results):
        return [*of_tensors, *of_data] if of_tensors else []
    found = [result.finding for result in results if result.finding]
    occurs = {
        legend.BELOW_FLOOR: any(finding.below_floor for finding in found),
        legend.HARD: any(finding.hard for finding in found),
        legend.REPLAYED: any(one.record.replays and one.record.replays.timing for one in results),
        legend.EMULATED: any(emulated(result) and result.best for result in results),
    }
    lines = [
        legend.BEST,
        legend.CACHE,
        *_ratio_legends(timed),
        legend.PHASES,
        *filter(occurs.get, occurs),
        *_error_legends(timed),
    ]
    lines += [rank_boards.LEGEND] if any(any(rank_boards.boards(panel)) for panel in timed) else []
    lines += [f"pays: {legend.BREAK_EVEN}"] if any(map(swept, timed)) else []
    lines += [legend.ERRORS, *_number_legends(timed), *_energy_legends(timed), *_memory_legends(timed)]
    seen = {label for result in results for label in result.labels}
    return [*lines, *of_tensors, *of_data, *(f"{label}: {legend.LABELS[label]}" for label in Label if label in seen)]


def _ratio_legends(panels: Sequence[Panel]) -> list[str]:
    """The ratio's meaning by reference, and the rule of verdicts, if there is a ratio."""
    levels = together(
        (panel.reference, one.finding.ratio.level)
        for panel in panels
        for one in panel.results
        if one.finding is not None and one.finding.ratio is not None and not emulated(one)
    )
    lines = [legend.speed_up(reference, found) for reference, found in levels.items()]
    return [*lines, legend.VERDICT] if lines else []


def _error_legends(panels: Sequence[Panel]) -> list[str]:
    """What the error column holds; with the suites where it is not the same in all."""
    told = []
    for panel in panels:
        metric = main_error(panel)
        measured = [one.record.measurement(metric) for one in panel.results]
        described = next((one.description for one in measured if one and one.description), "relative, 0 is exact")
        told += [(f"{metric} ({described})", panel.case.workload)] if metric else []
    suites = together(told)
    if len(suites) == 1:
        return [f"error: {next(iter(suites))}"]
    return [f"error of {', '.join(dict.fromkeys(names))}: {words}" for words, names in suites.items()]


def _number_legends(panels: Sequence[Panel]) -> list[str]:
    """What stands under 'numbers', where a measurement says so itself."""
    return sorted({
        f"{one.metric}: {one.description}"
        for panel in panels
        for shown in [(main_error(panel), _told_elsewhere(panel))]
        for result in panel.results
        for one in result.record.measurements
        if one.description and one.metric not in shown
    })  # fmt: skip


def _told_elsewhere(panel: Panel) -> str:
    """The metric that has a table of its own; '' where it has none."""
    return PEAK if tells_memory(panel) else ""


def _memory_legends(panels: Sequence[Panel]) -> list[str]:
    """What the memory tables hold, where there are any."""
    told = [panel for panel in panels if tells_memory(panel)]
    others = dict.fromkeys(spec for panel in told for spec in counted(panel))
    known = "; ".join(f"{spec.heading}: {spec.description}" for spec in others)
    return list(filter(None, (legend.MEMORY, known))) if told else []


def _energy_legends(panels: Sequence[Panel]) -> list[str]:
    """What the energy tables hold, where there are any."""
    cases = [(panel, group, one) for panel in panels for group, one in panel.members]
    found = [case for case in cases if figures_of(case[2]) is not None]
    compared = dict.fromkeys(panel.reference for panel, group, one in found if ratio_against(one, group.lead))
    cost = [legend.ENERGY_EMULATED] if any(emulated(one) for _, _, one in found) else []
    return [legend.ENERGY, *map(legend.energy_versus, compared), *cost] if found else []


def _ending(run: Run) -> Iterator[Text]:
    """Plan notes, troubles, and how much of the plan has a record."""
    yield from (Text(f"note: {note}") for note in notes_of(run))
    yield from map(Text, absences(run))
    yield from (Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles)
    yield from map(Text, filter(None, [missing_of(run)]))
