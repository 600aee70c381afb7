"""Shows a run as text for a terminal: its answer, its details with a legend, and the plan of --dry-run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby

from fp8bench.model import DeviceFacts, Group, Label, Level, Plan, Run, Status, Verdict
from fp8bench.model.planned import PlannedCase
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, PEAK_MEMORIES
from fp8bench.report.case_status import describe_intervals
from fp8bench.report.columns import Col, ColumnList, make_metric_tables, table
from fp8bench.report.elements import Element, NameValuePairs, Page, Part, Table, Text, Tone
from fp8bench.report.page.section import LabelledRun
from fp8bench.report.panels import (
    FindingsById,
    Panel,
    Result,
    error_name,
    format_case_params,
    join_parts,
    list_cases,
    merge_notes,
    panel_heading,
    shared_params,
    show_measurement,
)
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.answer import describe_device_state, describe_storage, make_answer_parts, next_commands
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.topics import roofline
from fp8bench.report.topics.break_even import break_even_table
from fp8bench.report.topics.energy import energy_table, explain_missing_energy, list_energy_doubts, phase_energy_table
from fp8bench.report.topics.memory import capacity_tables, has_memory_by_role, memory_table
from fp8bench.report.topics.numbers import is_step_error_metric, make_tensor_range_tables, sampler_elements
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import make_rank_elements
from fp8bench.report.topics.results import cases_table, describe_noise_floor
from fp8bench.report.topics.shares import render_coverage
from fp8bench.report.topics.speedup import sustained_table
from fp8bench.report.topics.tensors import TENSORS_LEGEND, tensor_tables
from fp8bench.report.topics.verdict import warn_of_false_verdicts, warn_of_load
from fp8bench.report.words import legend
from fp8bench.report.words.legend import explain_label
from fp8bench.report.words.naming import (
    describe_attention,
    describe_cache,
    describe_graph_replays,
    describe_missing_records,
    join_words,
    list_run_notes,
)


def render(run: Run, findings: FindingsById, width: int = 100, color: bool = False, with_details: bool = False) -> str:
    page = detail_page("all", run, findings, width) if with_details else answer_page(run, findings, width)
    return layout.render(page, width, color)


def answer_page(run: Run, findings: FindingsById, width: int, page_path: str = "", store_options: str = "") -> Page:
    """Returns the page with the answer of a run, at most `width` columns wide. `findings` are by case id.

    `page_path` is the path of the HTML page. `store_options` are the options with which other commands find the run.
    """
    width = max(width, layout.MIN_TERMINAL_WIDTH)
    entry = LabelledRun(run, findings)
    parts = make_answer_parts(entry, width, page_path, store_options)
    return Page("", "", tuple(parts), _legend_lines(entry.panels))


def detail_page(
    detail: str, run: Run, findings: FindingsById, width: int, page_path: str = "", store_options: str = ""
) -> Page:
    """Returns the page with one kind of detail of a run, such as 'memory', or with all details for 'all'. The page
    is at most `width` columns wide.
    """
    width = max(width, layout.MIN_TERMINAL_WIDTH)
    entry = LabelledRun(run, findings)
    panels = entry.panels
    parts = []
    if not panels:
        parts.append(Part("nothing", "", (Text("Nothing was measured."),)))
    # Doubts about the whole run come first, because they apply to every table below.
    if detail == "all" and (cautions := (*warn_of_load(entry), *warn_of_false_verdicts(entry))):
        parts.append(Part("cautions", "", cautions))
    for panel in panels:
        parts += _make_detail_parts(detail, panel, run, width)
    if closing_texts := _make_closing_texts(detail, run, panels):
        parts.append(Part("ending", "", tuple(closing_texts)))
    if not parts:
        parts.append(Part("nothing", "", (Text(f"This run has no {detail}."),)))
    if detail == "all":
        parts += make_list_part("next", "next", next_commands(entry, store_options))
        parts.append(Part("stored", "", (Text(describe_storage(run.path, page_path)),)))
    return Page("", "", tuple(parts), _legend_lines(panels, detail))


def _make_panel_part(panel: Panel, run: Run, elements: Iterable[Element], lead: str = "") -> Iterator[Part]:
    if panel_elements := tuple(elements):
        yield Part(
            "panel", panel_heading(panel.suite, panel.common_params, panel.device, run.devices), panel_elements, lead
        )


def _make_detail_parts(detail: str, panel: Panel, run: Run, width: int) -> Iterator[Part]:
    if detail == "all":
        if coverage := tuple(render_coverage(panel)):
            yield Part("coverage", "coverage", coverage)
        if panel.is_timed:
            yield from _make_timed_panel_parts(panel, run)
        else:
            yield from _make_panel_part(panel, run, [*tensor_tables(panel, width), *make_tensor_range_tables(panel)])
    if detail in ("notes", "all"):
        yield from make_list_part("notes", "notes", merge_notes(_list_panel_notes(panel, run), len(panel.groups)))
    elif detail == "data" or panel.is_timed:
        elements: list[Element] = []
        for list_elements in _ELEMENT_MAKERS_BY_DETAIL[detail]:
            elements += list_elements(panel)
        yield from _make_panel_part(panel, run, elements)


def _make_timed_panel_parts(panel: Panel, run: Run) -> Iterator[Part]:
    elements: list[Element] = [*describe_device_state(panel, run), cases_table(panel), *phases_table(panel)]
    elements += [*sustained_table(panel), *energy_table(panel), *phase_energy_table(panel), *memory_table(panel)]
    elements += [*make_metric_tables(panel), *break_even_table(panel)]
    elements += [*make_rank_elements(panel), *capacity_tables(panel), *make_tensor_range_tables(panel)]
    yield from _make_panel_part(panel, run, elements, _reference_line(panel))
    if measurements := _list_other_measurements(panel):
        yield Part("numbers", "numbers", tuple(measurements))
    if limit_sentences := [*roofline.describe_speed_limits_of_phases(panel), *roofline.describe_possible_gains(panel)]:
        yield from make_list_part(
            "roofline", "what limits it", [*limit_sentences, *roofline.cite_peak_rates(panel.named_cases)]
        )


def _reference_line(panel: Panel) -> str:
    reference = panel.reference
    if not any(case.is_reference for case in panel.named_cases):
        reference = f"none ({reference or 'none planned'} was not measured)"
    noise_floor_text = f"noise floor (A/A): {describe_noise_floor(panel.groups[0])}" if len(panel.groups) == 1 else ""
    intervals = describe_intervals(panel.named_cases)
    return join_parts(
        f"reference: {reference}", noise_floor_text, f"[low, high]: {intervals}" if intervals else "", separator="; "
    )


def _list_other_measurements(panel: Panel) -> list[Element]:
    """Returns the measurements of a panel that no other table shows, as a list of metrics with their values. The table
    of sampling steps follows if the model is sampled by diffusion.
    """
    name_value_pairs: list[tuple[str, str]] = []
    metrics_of_other_tables = _list_metrics_in_other_tables(panel)
    for group in panel.groups:
        texts: dict[str, list[str]] = {}
        for result in group.results:
            for measurement in result.record.measurements:
                metric = measurement.metric
                is_main_error_metric = metric == panel.error_metric and not measurement.phase
                if metric in metrics_of_other_tables or is_main_error_metric or is_step_error_metric(metric):
                    continue
                # The memory of an emulated case is that of the emulation, not of the precision.
                is_emulation_cost = measurement.unit == "B" and result.is_emulated
                text = f"{result.mode} {show_measurement(measurement)}{' (emulated)' * is_emulation_cost}"
                texts.setdefault(error_name(measurement), []).append(text)
        setting_text = f" at {group.setting_name}" if len(panel.groups) > 1 else ""
        name_value_pairs += [(f"{name}{setting_text}", ", ".join(values)) for name, values in texts.items()]
    if name_value_pairs:
        return [NameValuePairs(tuple(name_value_pairs)), *sampler_elements(panel)]
    return []


_ELEMENT_MAKERS_BY_DETAIL: dict[str, Sequence[Callable[[Panel], Iterable[Element]]]] = {
    "data": [make_tensor_range_tables],
    "memory": [memory_table, capacity_tables],
    "numbers": [_list_other_measurements],
    "energy": [energy_table, phase_energy_table],
}


def _list_panel_notes(panel: Panel, run: Run) -> Iterator[tuple[str, str, str]]:
    """Yields notes on the cases of a panel as (subject, text, setting). The subject begins with the precisions that the
    note is about.
    """
    for group in panel.groups:
        for result in group.results:
            for subject, text in _case_notes(result, panel.is_timed):
                yield f"{result.mode} {subject}".rstrip(), text, group.setting_name
        if panel.is_timed:
            yield from ((modes, doubt, group.setting_name) for modes, doubt in list_energy_doubts(group))
        modes_by_condition: dict[str, list[str]] = {}
        for result in group.results:
            for condition in _describe_conditions(result, run):
                modes_by_condition.setdefault(condition, []).append(result.mode)
        for condition, modes in modes_by_condition.items():
            yield ", ".join(modes), condition, group.setting_name


def _describe_conditions(result: Result, run: Run) -> Iterable[str]:
    kernel = describe_attention(result.record)
    attention = f"attention by torch's kernel {kernel}" if kernel else ""
    cache = describe_cache(result.record, run.devices)
    return filter(None, (attention, cache, describe_graph_replays(result.record)))


def _case_notes(result: Result, is_timed: bool) -> Iterator[tuple[str, str]]:
    record = result.record
    finding = result.finding
    if not record.is_ok:
        yield "FAILED" if record.status is Status.FAILED else record.status.value, record.reason
        return
    if finding.why and not finding.is_judged:
        yield "no verdict" if finding.verdict is Verdict.NONE else finding.verdict.value, finding.why
    if is_timed and Label.EAGER_QUANTISER in result.labels:
        yield Label.EAGER_QUANTISER, result.reason(Label.EAGER_QUANTISER)
    if record.detail:
        yield "", record.detail


# Each line of the legend, after the names of the outputs that print it.
_LEGEND_LINES_BY_OUTPUT = (
    ("answer all", legend.BEST_TIME_LEGEND), ("all", legend.CACHE_LEGEND), ("answer all", legend.SPEED_UP_LEGEND),
    ("answer all", legend.VERDICT_LEGEND), ("answer all", legend.PHASES_LEGEND),
    ("answer all", legend.BELOW_FLOOR_LEGEND), ("answer all", legend.NO_VERDICT_LEGEND),
    ("all", legend.REPLAYED_LEGEND), ("answer all", legend.EMULATED_LEGEND),
    ("all", f"pays: {legend.BREAK_EVEN_LEGEND}"), ("energy all", legend.ENERGY_LEGEND),
    ("energy all", legend.ENERGY_RATIO_LEGEND), ("memory all", legend.MEMORY_LEGEND), ("data all", legend.DATA_LEGEND),
)  # fmt: skip


def _legend_lines(panels: Sequence[Panel], output: str = "answer") -> list[str]:
    """Returns the lines that explain how to read an output. An output is 'answer', 'all', or a single detail as
    'memory'.
    """
    timed_panels_of_run = [panel for panel in panels if panel.is_timed]
    lines = list(_LEGEND_LINES_BY_OUTPUT) if timed_panels_of_run else []
    lines += [("numbers all", line) for line in _describe_measurements(timed_panels_of_run)]
    if len(timed_panels_of_run) < len(panels):
        lines.append(("answer all", TENSORS_LEGEND))
    used_labels = set(chain.from_iterable(case.labels for case in list_cases(timed_panels_of_run)))
    lines += [("answer notes all", explain_label(label)) for label in Label if label in used_labels]
    return [line for outputs, line in lines if output in outputs.split()]


def _describe_measurements(panels: Sequence[Panel]) -> list[str]:
    lines = set()
    for panel in panels:
        separately_shown_metrics = _list_metrics_in_other_tables(panel)
        for measurement in panel.measurements:
            if measurement.description and measurement.metric not in separately_shown_metrics:
                lines.add(f"{measurement.metric}: {measurement.description}")
    return sorted(lines)


def _list_metrics_in_other_tables(panel: Panel) -> tuple[str, ...]:
    return PEAK_MEMORIES if has_memory_by_role(panel) else (DEVICE_PEAK_MEMORY,)


def _make_closing_texts(detail: str, run: Run, panels: Sequence[Panel]) -> list[Text]:
    missing_energy = [*map(Text, explain_missing_energy(run))]
    if detail == "energy":
        return missing_energy
    if detail not in ("notes", "all"):
        return []
    notes = [f"note: {note}" for note in list_run_notes(run)]
    if limits_hint := roofline.explain_unknown_limits(panels, run):
        notes.insert(0, limits_hint)
    troubles = [Text(f"trouble: {trouble}", Tone.DOUBT) for trouble in run.troubles]
    return [*map(Text, notes), *missing_energy, *troubles, *map(Text, filter(None, [describe_missing_records(run)]))]


# A panel is a suite on a device. If a plan has more panels than this, one table summarizes them.
_MAX_DETAILED_PLAN_PANELS = 2


def plan_page(plan: Plan, facts: Sequence[DeviceFacts], expected_time: str = "") -> Page:
    groups_by_panel = groupby(plan, key=lambda group: (group.cases[0].case.workload, group.cases[0].case.device))
    panels = [tuple(groups) for _, groups in groups_by_panel]
    # The full plan of all suites would fill several screens.
    parts = [_plan_overview(panels)]
    if len(panels) <= _MAX_DETAILED_PLAN_PANELS:
        parts = list(chain.from_iterable(_render_planned_panel(groups, facts) for groups in panels))
    num_measured = sum(case.runs for case in _planned_cases(plan))
    counts_text = (
        f"groups: {len(plan.groups)}; cases: {num_measured} to measure, {plan.num_cases - num_measured} skipped"
    )
    lines = filter(None, (*(f"note: {note}" for note in plan.notes), counts_text, expected_time))
    return Page("", "", (*parts, Part("ending", "", tuple(map(Text, lines)))))


def _plan_overview(panels: Sequence[Sequence[Group]]) -> Part:
    def count_cases(groups: Sequence[Group], runs: bool) -> int:
        return sum(case.runs is runs for case in _planned_cases(groups))

    def join_modes(groups: Sequence[Group], level: Level) -> str:
        cases = [case for case in _planned_cases(groups) if case.runs and case.support.level is level]
        return join_words(case.case.mode for case in cases)

    cols: ColumnList[Sequence[Group]] = [
        Col("suite", lambda groups: groups[0].cases[0].case.workload),
        Col("on", lambda groups: groups[0].cases[0].case.device),
        Col("groups", len, show=str),
        Col("cases", partial(count_cases, runs=True), show=str),
        Col("skipped", lambda groups: count_cases(groups, False) or None, show=str),
        Col("native", partial(join_modes, level=Level.NATIVE)),
        Col("emulated", partial(join_modes, level=Level.EMULATED)),
    ]
    hint = Text("Name one suite to see its groups, and why cases are skipped.")
    return Part("overview", "what would be measured", (table("overview", "", cols, panels), hint))


def _planned_cases(groups: Iterable[Group]) -> list[PlannedCase]:
    return list(chain.from_iterable(group.cases for group in groups))


def _render_planned_panel(groups: Sequence[Group], facts: Sequence[DeviceFacts]) -> Iterator[Part]:
    case = groups[0].cases[0].case
    common_params = shared_params([group.cases[0].case.params for group in groups])
    # Make one line per group, such as 'one group: fp32 (reference), bf16; skip nvfp4'.
    lines = []
    skip_notes = []
    for group in groups:
        setting_text = format_case_params(pair for pair in group.cases[0].case.params if pair not in common_params)
        measured_modes = []
        skipped_modes = []
        for index, planned_case in enumerate(group.cases):
            if planned_case.runs:
                measured_modes.append(f"{planned_case.case.mode}{' (reference)' * (index == group.reference)}")
            else:
                skipped_modes.append(planned_case.case.mode)
                skip_notes.append((f"{planned_case.case.mode} skipped", planned_case.skip, setting_text))
        skips_text = f"skip {', '.join(skipped_modes)}" if skipped_modes else ""
        lines.append(
            f"{setting_text or 'one group'}: {join_parts(', '.join(measured_modes), skips_text, separator='; ')}"
        )
    lines += merge_notes(skip_notes, len(groups))
    title = panel_heading(case.workload, common_params, case.device, facts)
    yield Part("panel", title, (_support_table(groups),))
    yield from make_list_part("groups", "", lines)


def _support_table(groups: Sequence[Group]) -> Table:
    """Returns a table of how the device supports each precision (natively or emulated), and why. If some group measures
    a precision, its skipped cases are only in the list of groups.
    """
    cases = _planned_cases(groups)
    measured_modes = {case.case.mode for case in cases if case.runs}
    support_table_cases = [case for case in cases if case.runs or case.case.mode not in measured_modes]
    # Keep the first case of each precision and support: in reversed order, it overwrites later ones.
    case_by_support = {(case.case.mode, case.support): case for case in reversed(support_table_cases)}
    cols: ColumnList[PlannedCase] = [
        Col("case", "case.mode"),
        Col("how", "support.level.value"),
        Col("why", "support.reason"),
    ]
    return table("support", "", cols, list(case_by_support.values())[::-1])
