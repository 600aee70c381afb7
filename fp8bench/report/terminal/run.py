"""A run as text for a terminal: its details, how to read them, and what did not go well; and the plan of --dry-run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from fp8bench.model import DeviceFacts, Finding, Group, Label, Level, Plan, Record, Run, Status, Support, Verdict
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, PEAKS
from fp8bench.report.case_status import is_emulated, what_intervals_hold
from fp8bench.report.columns import Col, other_tables, table
from fp8bench.report.elements import Element, Facts, Items, Page, Part, Table, Text, Tone
from fp8bench.report.page.section import Entry
from fp8bench.report.panels import (
    Panel,
    error_name,
    heading,
    merge_notes,
    panels_of,
    shared_params,
    show_params,
    show_value,
    together,
)
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.answer import answer, describe_storage, device_state, next_commands
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.topics import roofline
from fp8bench.report.topics.break_even import break_even_table, swept
from fp8bench.report.topics.energy import absences, doubts_within, energy, energy_of_phases
from fp8bench.report.topics.memory import capacity, memory, tells_memory
from fp8bench.report.topics.numbers import by_step, data, is_of_step
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import ranks
from fp8bench.report.topics.results import main_table, noise_floor
from fp8bench.report.topics.shares import coverage_elements
from fp8bench.report.topics.speedup import sustained_table
from fp8bench.report.topics.tensors import LEGEND, about_tensors, tensors
from fp8bench.report.topics.verdict import by_chance, sitting
from fp8bench.report.words import legend
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import attention_of, cache_of, join_words, missing_of, notes_of, replays_of


def render(
    run: Run, findings: Mapping[str, Finding], width: int = 100, color: bool = False, whole: bool = False
) -> str:
    page = detail_of("all", run, findings, width) if whole else page_of(run, findings, width)
    return layout.render(page, width, color)


def page_of(run: Run, findings: Mapping[str, Finding], width: int, report: str = "", options: str = "") -> Page:
    """The answer, at most `width` wide. `findings` are by case id, `report` is where its page is.

    `options` are those with which other commands find the run.
    """
    width, entry = max(width, layout.MIN_WIDTH), Entry(run, findings)
    parts = answer(entry, width, report, options)
    return Page("", "", tuple(parts), _legend(entry.panels))


def detail_of(
    name: str, run: Run, findings: Mapping[str, Finding], width: int, report: str = "", options: str = ""
) -> Page:
    width, panels = max(width, layout.MIN_WIDTH), panels_of(run, findings)
    parts = [part for panel in panels for part in _DETAILS[name](panel, run, width)]
    entry = Entry(run, findings)
    if name == "all" and (cautions := (*sitting(entry), *by_chance(entry))):
        parts.insert(0, Part("cautions", "", cautions))
    parts += [Part("ending", "", tuple(ending))] if (ending := _ending(name, run, panels)) else []
    if not panels:
        parts.insert(0, Part("nothing", "", (Text("Nothing was measured."),)))
    parts += [] if parts else [Part("nothing", "", (Text(f"This run has no {name}."),))]
    if name == "all":
        parts += (
            [Part("next", "next", (Items(commands),))] if (commands := tuple(next_commands(entry, options))) else []
        )
        parts.append(Part("stored", "", (Text(describe_storage(run.path, report)),)))
    return Page("", "", tuple(parts), _legend(panels, name))


def _panel_part(panel: Panel, run: Run, elements: Iterable[Element], lead: str = "") -> Iterator[Part]:
    if content := tuple(elements):
        yield Part("panel", heading(panel.case.workload, panel.shared, panel.case.device, run.devices), content, lead)


def _of_notes(panel: Panel, run: Run, width: int) -> Iterator[Part]:
    yield from layout.list_of("notes", "notes", merge_notes(_notes(panel, run), len(panel.groups)))


def _whole(panel: Panel, run: Run, width: int) -> Iterator[Part]:
    if covered := tuple(coverage_elements(panel)):
        yield Part("coverage", "coverage", covered)
    if about_tensors(panel):
        yield from _panel_part(panel, run, [*tensors(panel, width), *data(panel)])
    else:
        yield from _timed_parts(panel, run)
    yield from _of_notes(panel, run, width)


def _timed_parts(panel: Panel, run: Run) -> Iterator[Part]:
    elements: list[Element] = [*device_state(panel, run)]
    elements += [main_table(panel), *phases_table(panel)]
    elements += [*sustained_table(panel), *energy(panel), *energy_of_phases(panel), *memory(panel)]
    elements += [*other_tables(panel), *break_even_table(panel, swept(panel))]
    elements += [*ranks(panel), *capacity(panel), *data(panel)]
    yield from _panel_part(panel, run, elements, _reference_line(panel))
    if numbers := _numbers(panel):
        yield Part("numbers", "numbers", (Facts(tuple(numbers)), *by_step(panel)))
    bounds = [Text(sentence) for sentence in roofline.sentences(panel)]
    bounds += [Text(source) for source in roofline.sources(panel.results)] if bounds else []
    if bounds:
        yield Part("roofline", "what bounds it", (Items(tuple(bounds)),))


def _for_timed_panels(elements: Callable[[Panel], Iterable[Element]]) -> Callable[[Panel, Run, int], Iterator[Part]]:
    return lambda panel, run, width: _panel_part(panel, run, () if about_tensors(panel) else elements(panel))


_DETAILS: dict[str, Callable[[Panel, Run, int], Iterator[Part]]] = {
    "memory": _for_timed_panels(lambda panel: (*memory(panel), *capacity(panel))),
    "data": lambda panel, run, width: _panel_part(panel, run, data(panel)),
    "numbers": _for_timed_panels(
        lambda panel: [Facts(tuple(found)), *by_step(panel)] if (found := _numbers(panel)) else ()
    ),
    "energy": _for_timed_panels(lambda panel: (*energy(panel), *energy_of_phases(panel))),
    "notes": _of_notes,
    "all": _whole,
}


def _reference_line(panel: Panel) -> str:
    measured = any(result.record.is_reference for result in panel.results)
    reference = panel.reference if measured else f"none ({panel.reference or 'none planned'} was not measured)"
    intervals = f"; [low, high]: {words}" if (words := what_intervals_hold(panel.results)) else ""
    if len(panel.groups) == 1:
        return f"reference: {reference}; noise floor (A/A): {noise_floor(panel.groups[0])}{intervals}"
    return f"reference: {reference}{intervals}"


def _numbers(panel: Panel) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for group in panel.groups:
        told = [
            (error_name(measurement), f"{result.mode} {show_value(measurement)}{how}")
            for result in group.results
            for measurement in result.record.measurements
            for how in [" (emulated)" if measurement.unit == "B" and is_emulated(result) else ""]
            if measurement.metric not in _told_elsewhere(panel)
            and not is_of_step(measurement.metric)
            and (measurement.phase or measurement.metric != panel.error)
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
    for group in panel.groups:
        place = group.place
        for result in group.results:
            record, finding = result.record, result.finding
            if not record.is_ok:
                word = "FAILED" if record.status is Status.FAILED else record.status.value
                yield f"{result.mode} {word}", record.reason, place
                continue
            if finding is not None and finding.why and not finding.judged:
                word = "no verdict" if finding.verdict is Verdict.NONE else finding.verdict.value
                yield f"{result.mode} {word}", finding.why, place
            if Label.EAGER_QUANTISER in result.labels and not about_tensors(panel):
                yield f"{result.mode} {Label.EAGER_QUANTISER}", result.reason(Label.EAGER_QUANTISER), place
            if record.detail:
                yield result.mode, record.detail, place
        for modes, doubt in [] if about_tensors(panel) else doubts_within(group):
            yield modes, doubt, place
        told = [(words, result.mode) for result in group.results for words in _conditions(result.record, run)]
        for words, names in together(told).items():
            yield ", ".join(names), words, place


# Where a line is wanted, and the line.
_LEGEND = (
    ("answer all", legend.BEST), ("all", legend.CACHE), ("answer all", legend.SPEED_UP),
    ("answer all", legend.VERDICT), ("answer all", legend.PHASES), ("answer all", legend.BELOW_FLOOR),
    ("answer all", legend.HARD), ("all", legend.REPLAYED), ("answer all", legend.EMULATED),
    ("all", f"pays: {legend.BREAK_EVEN}"), ("energy all", legend.ENERGY), ("energy all", legend.ENERGY_VERSUS),
    ("memory all", legend.MEMORY), ("data all", legend.DATA),
)  # fmt: skip


def _legend(panels: Sequence[Panel], name: str = "answer") -> list[str]:
    """How to read the answer, all of a run, or one of its details."""
    timed = [panel for panel in panels if not about_tensors(panel)]
    lines = list(_LEGEND) if timed else []
    lines += [("numbers all", line) for line in _of_numbers(timed)]
    lines += [("answer all", LEGEND)] if len(timed) < len(panels) else []
    for label in Label:
        if any(label in result.labels for panel in timed for result in panel.results):
            lines.append(("notes all", explain_label(label)))
    return [line for where, line in lines if name in where.split()]


def _of_numbers(panels: Sequence[Panel]) -> list[str]:
    return sorted(
        {
            f"{measurement.metric}: {measurement.description}"
            for panel in panels
            for result in panel.results
            for measurement in result.record.measurements
            if measurement.description and measurement.metric not in _told_elsewhere(panel)
        }
    )


def _told_elsewhere(panel: Panel) -> tuple[str, ...]:
    return PEAKS if tells_memory(panel) else (DEVICE_PEAK_MEMORY,)


def _ending(name: str, run: Run, panels: Sequence[Panel]) -> list[Text]:
    if name not in ("energy", "notes", "all"):
        return []
    absent = [*map(Text, absences(run))]
    if name == "energy":
        return absent
    notes = [*map(Text, filter(None, [roofline.how_to_know(panels, run)]))]
    notes += [Text(f"note: {note}") for note in notes_of(run)]
    notes += [*absent, *(Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles)]
    return [*notes, *map(Text, filter(None, [missing_of(run)]))]


# More suites and devices are summed up in a table.
_MOST_IN_FULL = 2


def page_of_plan(plan: Plan, facts: Sequence[DeviceFacts], expected: str = "") -> Page:
    by_panel = groupby(plan, key=lambda group: (group.cases[0].case.workload, group.cases[0].case.device))
    panels = [tuple(members) for _, members in by_panel]
    if len(panels) > _MOST_IN_FULL:
        parts = [_overview(panels)]
    else:
        parts = [part for members in panels for part in _panel(members, facts)]
    running = sum(planned.runs for group in plan for planned in group.cases)
    total = f"groups: {len(plan.groups)}; cases: {running} to measure, {plan.num_cases - running} skipped"
    words = filter(None, (*(f"note: {note}" for note in plan.notes), total, expected))
    ending = Part("ending", "", tuple(map(Text, words)))
    return Page("", "", (*parts, ending))


def _overview(panels: Sequence[Sequence[Group]]) -> Part:
    cols: list[Col[Sequence[Group]]] = [
        Col("suite", lambda groups: groups[0].cases[0].case.workload),
        Col("on", lambda groups: groups[0].cases[0].case.device),
        Col("groups", len, number=True, show=str),
        Col("cases", lambda groups: sum(case.runs for group in groups for case in group.cases), number=True, show=str),
        Col(
            "skipped",
            lambda groups: sum(not case.runs for group in groups for case in group.cases) or None,
            number=True,
            show=str,
        ),
        Col("native", lambda groups: _modes(groups, Level.NATIVE)),
        Col("emulated", lambda groups: _modes(groups, Level.EMULATED)),
    ]
    return Part(
        "overview",
        "what would be measured",
        (
            table("overview", "", cols, panels),
            Text("Name one suite to see its groups, and why what is skipped is skipped."),
        ),
    )


def _modes(groups: Sequence[Group], level: Level) -> str:
    cases = (case for group in groups for case in group.cases if case.runs and case.support.level is level)
    return join_words(list(dict.fromkeys(case.case.mode for case in cases)))


def _panel(groups: Sequence[Group], facts: Sequence[DeviceFacts]) -> Iterator[Part]:
    case = groups[0].cases[0].case
    shared = shared_params([group.cases[0].case.params for group in groups])
    places = [show_params(pair for pair in group.cases[0].case.params if pair not in shared) for group in groups]
    lines = []  # 'one group: fp32 (reference), bf16; skip nvfp4'
    for group, place in zip(groups, places, strict=True):
        names = [
            case.case.mode + " (reference)" * (number == group.reference)
            for number, case in enumerate(group.cases)
            if case.runs
        ]
        skips = ", ".join(case.case.mode for case in group.cases if not case.runs)
        said = "; ".join(filter(None, (", ".join(names), f"skip {skips}" if skips else "")))
        lines.append(f"{place or 'one group'}: {said}")
    skipped = [
        (f"{planned_case.case.mode} skipped", planned_case.skip, place)
        for group, place in zip(groups, places, strict=True)
        for planned_case in group.cases
        if not planned_case.runs
    ]
    lines += merge_notes(skipped, len(groups))
    title = heading(case.workload, shared, case.device, facts)
    yield Part("panel", title, (_support_table(groups),))
    yield from list_of("groups", "", lines)


def _support_table(groups: Sequence[Group]) -> Table:
    """A row for each precision: how the device supports it, and why. Refusals of some groups are told below."""
    cases = [case for group in groups for case in group.cases]
    running = {case.case.mode for case in cases if case.runs}
    modes = dict.fromkeys(
        (case.case.mode, case.support) for case in cases if case.runs or case.case.mode not in running
    )
    cols: list[Col[tuple[str, Support]]] = [
        Col("case", lambda row: row[0]),
        Col("how", lambda row: row[1].level.value),
        Col("why", lambda row: row[1].reason),
    ]
    return table("support", "", cols, modes)
