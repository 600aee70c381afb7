"""A run as text for a terminal: panels of tables, what they mean, what did not go well, and what it comes to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.model import Finding, Label, Record, Run, Status, Verdict
from fp8bench.report.case_status import (
    Standing,
    bounds,
    emulated,
    speed_up,
    standing,
    status_words,
    tone_of,
    what_intervals_hold,
)
from fp8bench.report.columns import other_tables
from fp8bench.report.elements import Column, Element, Facts, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.energies import absences, doubts_within, figures_of, ratio_against
from fp8bench.report.panels import (
    Panel,
    Result,
    ResultGroup,
    error_name,
    floor_of,
    heading,
    main_error,
    merge_notes,
    panels_of,
    show_value,
    together,
    value_of,
)
from fp8bench.report.terminal import layout
from fp8bench.report.topics import rank_boards, roofline
from fp8bench.report.topics.break_even import break_even_table, swept
from fp8bench.report.topics.energy import energy, energy_of_phases
from fp8bench.report.topics.memory import PEAK, capacity, counted, memory, share_of, tells_memory
from fp8bench.report.topics.numbers import data
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import ranks
from fp8bench.report.topics.results import main_table, noise_floor
from fp8bench.report.topics.shares import coverage_elements
from fp8bench.report.topics.speedup import sustained
from fp8bench.report.topics.tensors import LEGEND, about_tensors, tensors
from fp8bench.report.words import legend, speed
from fp8bench.report.words.legend import error_word
from fp8bench.report.words.naming import attention_of, cache_of, common_tone, missing_of, notes_of, replays_of
from fp8bench.report.words.speed import over_values, span

# Where there are several groups of several ranks: hundreds of lines would bury the answer.
_REST = (
    "The report has the rest of every case: interval and noise floor, phases, memory, each rank's times, overlap "
    "(fp8bench report {id}); `--set` for one of these settings prints it here."
)
_HOW_MATRIX = "speed-up over the reference, median over a suite's cases; perhaps: some are in doubt or unsure"
_NOT_CLEAR = frozenset({Standing.DOUBTED, Standing.UNSURE})


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
    if covered := tuple(coverage_elements(panel)):
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
        elements += [break_even_table(panel, found, "from where on it pays")] if found else []
    elements += [*ranks(panel), *capacity(panel), *data(panel)]
    yield Part("panel", title, tuple(elements), "" if of_tensors else _reference_line(panel))
    numbers = [] if of_tensors else _numbers(panel)
    if numbers:
        yield Part("numbers", "numbers", (Facts(tuple(numbers)),))
    bounds = [] if of_tensors else [Text(sentence) for sentence in roofline.sentences(panel)]
    bounds += [Text(source) for source in roofline.sources(panel.results)] if bounds else []
    if bounds:
        yield Part("roofline", "what bounds it", (Items(tuple(bounds)),))
    yield from layout.list_of("notes", "notes", merge_notes(_notes(panel, run), len(panel.groups)))


def _reference_line(panel: Panel) -> str:
    """What the others are held against; the noise floor too where one line can say it for all."""
    measured = any(result.record.is_reference for result in panel.results)
    reference = panel.reference if measured else f"none ({panel.reference or 'none planned'} was not measured)"
    intervals = f"; [low, high]: {words}" if (words := what_intervals_hold(panel.results)) else ""
    if len(panel.groups) == 1:
        return f"reference: {reference}; noise floor (A/A): {noise_floor(panel.groups[0])}{intervals}"
    floors = floor_of(panel.results) if any(rank_boards.boards(panel)) else ""  # other tables have each group's
    floor = f"; noise floors (A/A): {floors}" if floors else ""
    return f"reference: {reference}{floor}{intervals}"


def _numbers(panel: Panel) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for group in panel.groups:
        told = [
            (error_name(measurement), f"{result.mode} {show_value(measurement)}{how}")
            for result in group.results
            for measurement in result.record.measurements
            for how in [" (emulated)" if measurement.unit == "B" and emulated(result) else ""]
            if measurement.metric != _told_elsewhere(panel)
            and (measurement.phase or measurement.metric != main_error(panel))
        ]
        told += [
            ("speed-up over all calls", f"{result.mode} {speed.of_all_calls(result.finding)}")
            for result in group.results
            if result.finding and result.finding.typical and not emulated(result)
        ]
        place = f" at {group.place}" if len(panel.groups) > 1 else ""
        lines += [(f"{label}{place}", ", ".join(texts)) for label, texts in together(told).items()]
    return lines


def _conditions(record: Record, run: Run) -> Iterator[str]:
    if kernel := attention_of(record):
        yield f"attention by torch's kernel {kernel}"
    if words := cache_of(record, run.devices):
        yield words
    if words := replays_of(record):
        yield words


def _notes(panel: Panel, run: Run) -> Iterable[tuple[str, str, str]]:
    """(about, text, place) of everything that was skipped, failed or has no clear verdict."""
    for group in panel.groups:
        place = group.place
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
        legend.REPLAYED: any(result.record.replays and result.record.replays.timing for result in results),
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
    levels = together(
        (panel.reference, result.finding.ratio.level)
        for panel in panels
        for result in panel.results
        if result.finding is not None and result.finding.ratio is not None and not emulated(result)
    )
    lines = [legend.speed_up(reference, found) for reference, found in levels.items()]
    return [*lines, legend.VERDICT] if lines else []


def _error_legends(panels: Sequence[Panel]) -> list[str]:
    """What the error column holds; with the suites where it is not the same in all."""
    told = []
    for panel in panels:
        metric = main_error(panel)
        measured = [result.record.measurement(metric) for result in panel.results]
        described = next((one.description for one in measured if one and one.description), "relative, 0 is exact")
        told += [(f"{metric} ({described})", panel.case.workload)] if metric else []
    suites = together(told)
    if len(suites) == 1:
        return [f"error: {next(iter(suites))}"]
    return [f"error of {', '.join(dict.fromkeys(names))}: {words}" for words, names in suites.items()]


def _number_legends(panels: Sequence[Panel]) -> list[str]:
    return sorted({
        f"{measurement.metric}: {measurement.description}"
        for panel in panels
        for shown in [(main_error(panel), _told_elsewhere(panel))]
        for result in panel.results
        for measurement in result.record.measurements
        if measurement.description and measurement.metric not in shown
    })  # fmt: skip


def _told_elsewhere(panel: Panel) -> str:
    """The metric that has a table of its own; '' where it has none."""
    return PEAK if tells_memory(panel) else ""


def _memory_legends(panels: Sequence[Panel]) -> list[str]:
    told = [panel for panel in panels if tells_memory(panel)]
    others = dict.fromkeys(spec for panel in told for spec in counted(panel))
    known = "; ".join(f"{spec.heading}: {spec.description}" for spec in others)
    return list(filter(None, (legend.MEMORY, known))) if told else []


def _energy_legends(panels: Sequence[Panel]) -> list[str]:
    cases = [(panel, group, one) for panel in panels for group, one in panel.members]
    found = [case for case in cases if figures_of(case[2]) is not None]
    compared = dict.fromkeys(panel.reference for panel, group, one in found if ratio_against(one, group.lead))
    cost = [legend.ENERGY_EMULATED] if any(emulated(one) for _, _, one in found) else []
    return [legend.ENERGY, *map(legend.energy_versus, compared), *cost] if found else []


def _ending(run: Run) -> Iterator[Text]:
    yield from (Text(f"note: {note}") for note in notes_of(run))
    yield from map(Text, absences(run))
    yield from (Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles)
    yield from map(Text, filter(None, [missing_of(run)]))


def summary(run: Run, panels: Sequence[Panel], width: int, report: str = "") -> Part:
    """The verdict in a few lines, no line too long, and where the run and its report are."""
    timed = [panel for panel in panels if not about_tensors(panel)]
    elements: list[Element] = []
    if len({panel.case.workload for panel in timed}) > 1:
        elements += [_matrix(timed)]
    elif timed:
        facts = {"verdict": _verdict, "speed-up": _speed_up, "error": _error, "memory": _memory}
        told = {name: _joined(list(tell(timed)), width - len(f"  {name}: ")) for name, tell in facts.items()}
        elements += [Facts(tuple((name, words) for name, words in told.items() if words))]
    stored = f"report: {report}" if report else f"stored in {run.path}" if run.path else "this run was not stored"
    return Part("summary", "summary" if elements else "", (*elements, Text(stored)))


def _cases(panels: Sequence[Panel]) -> Mapping[str, list[tuple[ResultGroup, Result]]]:
    """What is compared, by precision, in the order it was measured, with the groups that it is of."""
    found = (member for panel in panels for member in panel.members)
    return together((result.mode, (group, result)) for group, result in found if not result.record.is_reference)


def _verdict(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 perhaps faster than fp32', 'fp8 FAILED in 1 of 3 cases, emulated in 2'; what was timed first."""
    reference = " or ".join(dict.fromkeys(panel.reference for panel in panels if panel.reference))
    untimed = {mode: not any(speed_up(result) for _, result in cases) for mode, cases in _cases(panels).items()}
    for mode, cases in sorted(_cases(panels).items(), key=lambda pair: untimed[pair[0]]):
        statuses = [status_words(result) for _, result in cases]
        counts = Counter("not timed" if words == units.NONE else words for words in statuses)
        (first, number), *others = sorted(counts.items(), key=lambda pair: (pair[0] != "FAILED", -pair[1]))
        many = f" in {number} of {len(cases)} cases" if others else ""
        word = " than " if first.endswith(("faster", "slower")) else " as " if "same" in first else ""
        than = word + reference if word else ""
        yield f"{mode} {first}{than}{many}" + "".join(f", {word} in {count}" for word, count in others)


def _speed_up(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 1.90x [1.88, 1.93]', of several cases the range."""
    for mode, cases in _cases(panels).items():
        speeds = [speed for _, result in cases if (speed := speed_up(result)) is not None]
        if len(speeds) == 1:
            yield f"{mode} {units.speed_up(speeds[0].point)} {bounds(speeds[0])}"
        elif speeds:
            yield f"{mode} {span([speed.point for speed in speeds])}"


def _error(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 small (2.9e-03)', the largest of several cases."""
    for mode in _cases(panels):
        values = [
            value for panel in panels for result in panel.results
            if result.mode == mode and (value := value_of(result.record.measurement(main_error(panel)))) is not None
        ]  # fmt: skip
        if values:
            worst = max(values, key=lambda value: (value != value, abs(value)))
            yield f"{mode} {error_word(values)} ({units.relative_error(worst)})"


def _memory(panels: Sequence[Panel]) -> Iterator[str]:
    """'bf16 0.626x of fp32's', the largest of several cases; that of an emulation is its cost."""
    for mode, cases in _cases(panels).items():
        known = ((share_of(group, result), group.reference) for group, result in cases)
        shares = [(share, reference) for share, reference in known if share is not None]
        if shares:
            share, reference = max(shares)
            cost = " (emulated)" if any(emulated(result) for _, result in cases) else ""
            yield f"{mode} {units.ratio(share)} of {reference}'s{cost}"


def _joined(words: Sequence[str], room: int) -> str:
    """As many as fit into one line, and how many more there are."""
    for count in range(len(words), 0, -1):
        text = "; ".join(words[:count]) + (f"; {len(words) - count} more" if count < len(words) else "")
        if len(text) <= room or count == 1:
            return text if len(text) <= room else f"{text[: room - 3]}..."
    return ""


def _matrix(panels: Sequence[Panel]) -> Table:
    several = len({panel.case.device for panel in panels}) > 1
    modes = list(dict.fromkeys(result.mode for panel in panels for result in panel.results))
    by_suite = together(
        (f"{panel.case.workload}{f' on {panel.case.device}' if several else ''}", result)
        for panel in panels
        for result in panel.results
    )
    rows = [
        (Field(suite), *(_cell([result for result in results if result.mode == mode]) for mode in modes))
        for suite, results in by_suite.items()
    ]
    return Table("matrix", _HOW_MATRIX, (Column("suite"), *(Column(mode) for mode in modes)), tuple(rows))


def _cell(results: Sequence[Result]) -> Field:
    """'1.90x', 'perhaps 1.90x', 'unsure 1.01x', 'reference', 'emulated', 'FAILED'."""
    if not results:
        return Field(units.NONE)
    speeds = [speed.point for result in results if (speed := speed_up(result)) is not None]
    if not speeds or any(standing(result) is Standing.FAILED for result in results):
        worst = min(results, key=lambda result: standing(result) is not Standing.FAILED)
        return Field(status_words(worst), tone=tone_of(worst))
    stands = {standing(result) for result in results}
    word = "unsure " if stands == {Standing.UNSURE} else "perhaps " if stands & _NOT_CLEAR else ""
    shown = units.speed_up(statistics.median(speeds))
    return Field(f"{word}{shown}", tone=common_tone(map(tone_of, results)))
