"""A run as text for a terminal: its details, how to read them, and problems; and the plan of --dry-run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby

from fp8bench.model import DeviceFacts, Group, Label, Level, Plan, Run, Status, Verdict
from fp8bench.model.planned import PlannedCase
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, PEAKS
from fp8bench.report.case_status import describe_intervals
from fp8bench.report.columns import Col, Cols, other_tables, table
from fp8bench.report.elements import Element, Facts, Page, Part, Table, Text, Tone
from fp8bench.report.page.section import Entry
from fp8bench.report.panels import (
    FindingsById,
    Panel,
    Result,
    error_name,
    heading,
    join_parts,
    merge_notes,
    shared_params,
    show_params,
    show_value,
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
from fp8bench.report.topics.verdict import by_chance, cases_of, sitting
from fp8bench.report.words import legend
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import attention_of, cache_of, join_words, missing_of, notes_of, replays_of


def render(run: Run, findings: FindingsById, width: int = 100, color: bool = False, whole: bool = False) -> str:
    page = detail_of("all", run, findings, width) if whole else page_of(run, findings, width)
    return layout.render(page, width, color)


def page_of(run: Run, findings: FindingsById, width: int, report: str = "", options: str = "") -> Page:
    """Returns the answer, at most `width` wide. `findings` are by case id, `report` is the path of its page.

    `options` are those with which other commands find the run.
    """
    width = max(width, layout.MIN_WIDTH)
    entry = Entry(run, findings)
    parts = answer(entry, width, report, options)
    return Page("", "", tuple(parts), _legend(entry.panels))


def detail_of(name: str, run: Run, findings: FindingsById, width: int, report: str = "", options: str = "") -> Page:
    """Returns a part of all that is known of a run, or 'all'; the parameters are those of `page_of`."""
    width = max(width, layout.MIN_WIDTH)
    entry = Entry(run, findings)
    panels = entry.panels
    parts = []
    if not panels:
        parts.append(Part("nothing", "", (Text("Nothing was measured."),)))
    # Doubts about the whole run come first: they apply to every table below.
    if name == "all" and (cautions := (*sitting(entry), *by_chance(entry))):
        parts.append(Part("cautions", "", cautions))
    for panel in panels:
        parts += _describe_panel(name, panel, run, width)
    if ending := _ending(name, run, panels):
        parts.append(Part("ending", "", tuple(ending)))
    if not parts:
        parts.append(Part("nothing", "", (Text(f"This run has no {name}."),)))
    if name == "all":
        parts += list_of("next", "next", next_commands(entry, options))
        parts.append(Part("stored", "", (Text(describe_storage(run.path, report)),)))
    return Page("", "", tuple(parts), _legend(panels, name))


def _panel_part(panel: Panel, run: Run, elements: Iterable[Element], lead: str = "") -> Iterator[Part]:
    if content := tuple(elements):
        yield Part("panel", heading(panel.suite, panel.shared, panel.device, run.devices), content, lead)


def _describe_panel(name: str, panel: Panel, run: Run, width: int) -> Iterator[Part]:
    is_timed = not about_tensors(panel)
    if name == "all":
        if covered := tuple(coverage_elements(panel)):
            yield Part("coverage", "coverage", covered)
        if is_timed:
            yield from _timed_parts(panel, run)
        else:
            yield from _panel_part(panel, run, [*tensors(panel, width), *data(panel)])
    if name in ("notes", "all"):
        yield from list_of("notes", "notes", merge_notes(_notes(panel, run), len(panel.groups)))
    elif name == "data":
        yield from _panel_part(panel, run, data(panel))
    elif name == "memory" and is_timed:
        yield from _panel_part(panel, run, [*memory(panel), *capacity(panel)])
    elif name == "numbers" and is_timed:
        yield from _panel_part(panel, run, _numbers(panel))
    elif name == "energy" and is_timed:
        yield from _panel_part(panel, run, [*energy(panel), *energy_of_phases(panel)])


def _timed_parts(panel: Panel, run: Run) -> Iterator[Part]:
    elements: list[Element] = [*device_state(panel, run), main_table(panel), *phases_table(panel)]
    elements += [*sustained_table(panel), *energy(panel), *energy_of_phases(panel), *memory(panel)]
    elements += [*other_tables(panel), *break_even_table(panel, swept(panel))]
    elements += [*ranks(panel), *capacity(panel), *data(panel)]
    yield from _panel_part(panel, run, elements, _reference_line(panel))
    if numbers := _numbers(panel):
        yield Part("numbers", "numbers", tuple(numbers))
    if bounds := [*roofline.describe_bounds(panel), *roofline.describe_gains(panel)]:
        yield from list_of("roofline", "what limits it", [*bounds, *roofline.sources(panel.members)])


def _reference_line(panel: Panel) -> str:
    reference = panel.reference
    if not any(case.is_reference for case in panel.members):
        reference = f"none ({reference or 'none planned'} was not measured)"
    floor = f"noise floor (A/A): {noise_floor(panel.groups[0])}" if len(panel.groups) == 1 else ""
    words = describe_intervals(panel.members)
    return join_parts(f"reference: {reference}", floor, f"[low, high]: {words}" if words else "", by="; ")


def _numbers(panel: Panel) -> list[Element]:
    """Returns a line for each measurement that no table shows, and the steps of a sampler."""
    pairs: list[tuple[str, str]] = []
    elsewhere = _in_other_tables(panel)
    for group in panel.groups:
        texts: dict[str, list[str]] = {}
        for result in group.results:
            for measurement in result.record.measurements:
                metric = measurement.metric
                in_main_table = metric == panel.error and not measurement.phase
                if metric in elsewhere or in_main_table or is_of_step(metric):
                    continue
                # The memory of an emulated case is the emulation's, not the precision's.
                is_cost = measurement.unit == "B" and result.is_emulated
                text = f"{result.mode} {show_value(measurement)}{' (emulated)' * is_cost}"
                texts.setdefault(error_name(measurement), []).append(text)
        place = f" at {group.place}" if len(panel.groups) > 1 else ""
        pairs += [(f"{name}{place}", ", ".join(values)) for name, values in texts.items()]
    if pairs:
        return [Facts(tuple(pairs)), *by_step(panel)]
    return []


def _notes(panel: Panel, run: Run) -> Iterator[tuple[str, str, str]]:
    """Yields the subject of a note, its text, and the place."""
    is_timed = not about_tensors(panel)
    for group in panel.groups:
        for result in group.results:
            for about, text in _notes_of_case(result, is_timed):
                yield f"{result.mode} {about}".rstrip(), text, group.place
        if is_timed:
            yield from ((modes, doubt, group.place) for modes, doubt in doubts_within(group))
        conditions: dict[str, list[str]] = {}
        for result in group.results:
            kernel = attention_of(result.record)
            attention = f"attention by torch's kernel {kernel}" if kernel else ""
            for words in (attention, cache_of(result.record, run.devices), replays_of(result.record)):
                conditions.setdefault(words, []).append(result.mode)
        yield from ((", ".join(modes), words, group.place) for words, modes in conditions.items() if words)


def _notes_of_case(result: Result, is_timed: bool) -> Iterator[tuple[str, str]]:
    record = result.record
    finding = result.finding
    if not record.is_ok:
        yield "FAILED" if record.status is Status.FAILED else record.status.value, record.reason
        return
    if finding is not None and finding.why and not finding.is_judged:
        yield "no verdict" if finding.verdict is Verdict.NONE else finding.verdict.value, finding.why
    if is_timed and Label.EAGER_QUANTISER in result.labels:
        yield Label.EAGER_QUANTISER, result.reason(Label.EAGER_QUANTISER)
    if record.detail:
        yield "", record.detail


# The outputs that include a line, and the line.
_LEGEND = (
    ("answer all", legend.BEST), ("all", legend.CACHE), ("answer all", legend.SPEED_UP),
    ("answer all", legend.VERDICT), ("answer all", legend.PHASES), ("answer all", legend.BELOW_FLOOR),
    ("answer all", legend.HARD), ("all", legend.REPLAYED), ("answer all", legend.EMULATED),
    ("all", f"pays: {legend.BREAK_EVEN}"), ("energy all", legend.ENERGY), ("energy all", legend.ENERGY_VERSUS),
    ("memory all", legend.MEMORY), ("data all", legend.DATA),
)  # fmt: skip


def _legend(panels: Sequence[Panel], name: str = "answer") -> list[str]:
    """Returns how to read the answer, all of a run, or one of its details."""
    timed = [panel for panel in panels if not about_tensors(panel)]
    lines = list(_LEGEND) if timed else []
    lines += [("numbers all", line) for line in _of_numbers(timed)]
    if len(timed) < len(panels):
        lines.append(("answer all", LEGEND))
    used = set(chain.from_iterable(case.labels for case in cases_of(timed)))
    lines += [("notes all", explain_label(label)) for label in Label if label in used]
    return [line for names, line in lines if name in names.split()]


def _of_numbers(panels: Sequence[Panel]) -> list[str]:
    lines = set()
    for panel in panels:
        elsewhere = _in_other_tables(panel)
        for measurement in panel.measurements:
            if measurement.description and measurement.metric not in elsewhere:
                lines.add(f"{measurement.metric}: {measurement.description}")
    return sorted(lines)


def _in_other_tables(panel: Panel) -> tuple[str, ...]:
    if tells_memory(panel):
        return PEAKS
    return (DEVICE_PEAK_MEMORY,)


def _ending(name: str, run: Run, panels: Sequence[Panel]) -> list[Text]:
    absent = [*map(Text, absences(run))]
    if name == "energy":
        return absent
    if name not in ("notes", "all"):
        return []
    notes = [f"note: {note}" for note in notes_of(run)]
    if words := roofline.how_to_know(panels, run):
        notes.insert(0, words)
    troubles = [Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles]
    return [*map(Text, notes), *absent, *troubles, *map(Text, filter(None, [missing_of(run)]))]


# More suites and devices are summarized in a table.
_MOST_IN_FULL = 2


def page_of_plan(plan: Plan, facts: Sequence[DeviceFacts], expected: str = "") -> Page:
    by_panel = groupby(plan, key=lambda group: (group.cases[0].case.workload, group.cases[0].case.device))
    panels = [tuple(members) for _, members in by_panel]
    parts = []
    # `--dry-run` of all suites would fill several screens.
    if len(panels) > _MOST_IN_FULL:
        parts.append(_overview(panels))
    else:
        for members in panels:
            parts += _panel(members, facts)
    running = sum(case.runs for case in _planned_cases(plan))
    lines = [f"note: {note}" for note in plan.notes]
    lines.append(f"groups: {len(plan.groups)}; cases: {running} to measure, {plan.num_cases - running} skipped")
    if expected:
        lines.append(expected)
    return Page("", "", (*parts, Part("ending", "", tuple(map(Text, lines)))))


def _overview(panels: Sequence[Sequence[Group]]) -> Part:
    def count(groups: Sequence[Group], runs: bool) -> int:
        return sum(case.runs is runs for case in _planned_cases(groups))

    def modes(groups: Sequence[Group], level: Level) -> str:
        cases = [case for case in _planned_cases(groups) if case.runs and case.support.level is level]
        return join_words(case.case.mode for case in cases)

    cols: Cols[Sequence[Group]] = [
        Col("suite", lambda groups: groups[0].cases[0].case.workload),
        Col("on", lambda groups: groups[0].cases[0].case.device),
        Col("groups", len, show=str),
        Col("cases", partial(count, runs=True), show=str),
        Col("skipped", lambda groups: count(groups, False) or None, show=str),
        Col("native", partial(modes, level=Level.NATIVE)),
        Col("emulated", partial(modes, level=Level.EMULATED)),
    ]
    hint = Text("Name one suite to see its groups, and why cases are skipped.")
    return Part("overview", "what would be measured", (table("overview", "", cols, panels), hint))


def _planned_cases(groups: Iterable[Group]) -> list[PlannedCase]:
    return list(chain.from_iterable(group.cases for group in groups))


def _panel(groups: Sequence[Group], facts: Sequence[DeviceFacts]) -> Iterator[Part]:
    case = groups[0].cases[0].case
    shared = shared_params([group.cases[0].case.params for group in groups])
    lines = []  # 'one group: fp32 (reference), bf16; skip nvfp4'
    skipped = []
    for group in groups:
        place = show_params(pair for pair in group.cases[0].case.params if pair not in shared)
        names = []
        skips = []
        for number, planned in enumerate(group.cases):
            if planned.runs:
                names.append(f"{planned.case.mode}{' (reference)' * (number == group.reference)}")
            else:
                skips.append(planned.case.mode)
                skipped.append((f"{planned.case.mode} skipped", planned.skip, place))
        words = join_parts(", ".join(names), f"skip {', '.join(skips)}" if skips else "", by="; ")
        lines.append(f"{place or 'one group'}: {words}")
    lines += merge_notes(skipped, len(groups))
    title = heading(case.workload, shared, case.device, facts)
    yield Part("panel", title, (_support_table(groups),))
    yield from list_of("groups", "", lines)


def _support_table(groups: Sequence[Group]) -> Table:
    """Returns how the device supports each precision; refusals in only some groups are listed below the table."""
    cases = _planned_cases(groups)
    running = {case.case.mode for case in cases if case.runs}
    shown = [case for case in cases if case.runs or case.case.mode not in running]
    rows = {(case.case.mode, case.support): case for case in reversed(shown)}
    cols: Cols[PlannedCase] = [
        Col("case", "case.mode"),
        Col("how", "support.level.value"),
        Col("why", "support.reason"),
    ]
    return table("support", "", cols, list(rows.values())[::-1])
