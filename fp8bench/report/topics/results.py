"""Shows all cases in one table, which is short on the terminal and complete on the page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from fp8bench import units
from fp8bench.model.specs import DEVICE_PEAK_MEMORY, ENERGY, PEAK_MEMORY, REPLAY
from fp8bench.report.case_status import (
    choose_cost_tone,
    choose_row_cost_tone,
    describe_case_status,
    describe_labels,
    show_speed,
    speed_up,
    status_tone,
)
from fp8bench.report.columns import (
    Col,
    ColumnList,
    add_figure_columns,
    figure_column,
    list_table_metric_specs,
    make_case_figure_column,
    make_metric_tables,
    table,
)
from fp8bench.report.elements import Elements, Field, Table, Text, TextList, Tone, bullet_list
from fp8bench.report.page.section import Material, section
from fp8bench.report.panels import (
    Cases,
    CaseValue,
    NamedCase,
    Panel,
    ResultGroup,
    describe_params,
    join_parts,
    shared_params,
    show_noise_floors,
    together,
)
from fp8bench.report.topics.answers import MAX_REASON_LENGTH, make_precision_answer, verdict_word
from fp8bench.report.topics.memory import device_peak_bytes
from fp8bench.report.words import legend
from fp8bench.report.words.naming import make_figure_heading, shorten_line

# Readers can filter and sort a table on the page if it has more rows than this.
_MAX_UNFILTERED_ROWS = 8
# At most this many cases get a sentence that compares them with earlier runs.
_MAX_COMPARED_CASES = 6
# A row of the page's table: a case with its title, which is unique in the table.
_CaseWithTitle = CaseValue[str]


def cases_table(panel: Panel) -> Table:
    # The noise floor of a panel with one group is in the line of the reference above the table.
    noise_floor_prefix = "  noise floor (A/A): " if len(panel.groups) > 1 else ""
    cols: ColumnList[NamedCase] = [
        Col(
            "group",
            lambda case: (
                noise_floor_prefix and f"{case.setting_name}{noise_floor_prefix}{describe_noise_floor(case.group)}"
            ),
            shared=True,
        ),
        Col("case", "mode"),
        Col("verdict", describe_case_status, tone=status_tone),
        Col("speed-up", lambda case: show_speed(speed_up(case)) or None, tone=status_tone),
        Col("best", "best_seconds", unit="s"),
        Col("replayed", lambda case: case.figures[REPLAY].best, unit="s"),
        Col("error", "error_value", show=units.relative_error),
        Col("spread", "finding.spread", show=units.percent),
        Col("throughput", "figures.rate.shown", number=True),
        Col("labels", _describe_doubts, below=True, tone=lambda _: Tone.DOUBT),
    ]
    required_headings = {"group", "case", "verdict", "best", "spread", "labels"}
    return add_figure_columns(
        table("cases", "", cols, panel.named_cases, required_headings=required_headings), panel.named_cases
    )


def _describe_doubts(case: NamedCase) -> str:
    return join_parts(_format_labels(case), case.finding.why if case.finding.is_judged else "", separator="\n")


def _format_labels(case: NamedCase) -> str:
    labels = ", ".join(describe_labels(case))
    return f"labels: {labels}" if labels and case.is_ok else ""


def describe_noise_floor(group: ResultGroup) -> str:
    """Returns the noise floor (A/A) of a group, as '+-0.6%', and why the group's measurement stopped."""
    reasons = dict.fromkeys(result.record.stopped for result in group.results if result.record.stopped)
    return join_parts(show_noise_floors(group.results) or "not measured", " / ".join(reasons), separator="; ")


@section("results", "Results", 30)
def results_section(material: Material) -> Elements:
    """The table has a line for each case, with the reason for its verdict. A step is the best case: undisturbed, with a
    hot cache unless cache= is set. The time of an emulated case is the cost of emulating.
    """
    panels = [(entry, panel) for entry, panel in material.panels() if panel.is_timed]
    if not panels:
        if not any(entry.panels for entry in material.entries):
            yield Text("This report has no cases.", Tone.DOUBT)
        return
    # 1. Find the parameters that all cases of a suite share, on any device and in any run.
    case_groups = chain.from_iterable(panel.groups for _, panel in panels)
    params_by_suite = together((group.case.workload, group.case.params) for group in case_groups)
    shared_params_by_suite = {suite: shared_params(params) for suite, params in params_by_suite.items()}
    # 2. Make a row for each case. Its name is the precision, with the parameters that differ between rows.
    has_devices = len({panel.device for _, panel in panels}) > 1
    rows = []
    for entry, panel in panels:
        suite = panel.suite if len(shared_params_by_suite) > 1 else ""
        device = panel.device if has_devices else ""
        label = "" if material.is_single_run or entry.label == suite else entry.label
        for case in panel.named_cases:
            differing_params = [
                pair for pair in case.group.case.params if pair not in shared_params_by_suite[panel.suite]
            ]
            setting_text = f"{suite} {describe_params(differing_params)}".strip()
            rows.append(CaseValue(case, join_parts(case.mode, setting_text, device, label)))
    cases = [row.case for row in rows]
    # 3. Show the answers in one table and all other metrics in a second table. A short table cannot be filtered.
    is_main_table = len(rows) > _MAX_UNFILTERED_ROWS
    required_headings = {"case", "verdict"}
    yield table(
        "results-table",
        "All cases",
        _make_answer_columns(),
        rows,
        main=is_main_table,
        required_headings=required_headings,
    )
    yield from _compare_with_earlier(cases, material)
    detail_columns = list(_list_detail_columns(cases))
    yield table("details", "More figures of every case", detail_columns, rows, folded=True, required_headings={"case"})
    shared_params_text = "; ".join(
        f"{suite}: {describe_params(params)}" for suite, params in shared_params_by_suite.items() if params
    )
    if shared_params_text:
        yield Text(f"The same in every row: {shared_params_text}.")
    for _, panel in panels:
        yield from make_metric_tables(panel)


def _compare_with_earlier(cases: Cases, material: Material) -> Iterator[TextList]:
    """Yields a sentence for each case with earlier runs, as 'fp8: the last 5 runs took 31.9 ms to 33.0 ms, this one
    32.5 ms'.
    """
    sentences = []
    for case in cases:
        earlier_step_seconds = material.earlier.get(case.record.case.id)
        if earlier_step_seconds and case.best_seconds is not None and not case.is_emulated:
            num_earlier_runs = len(earlier_step_seconds)
            runs_text = (
                f"the last {num_earlier_runs} runs of this case took" if num_earlier_runs > 1 else "the run before took"
            )
            earlier_step_seconds_text = units.span(earlier_step_seconds, units.seconds)
            seconds_text = units.seconds(case.best_seconds)
            sentences.append(f"{case.name}: {runs_text} {earlier_step_seconds_text} a step, this one {seconds_text}")
    yield from bullet_list(sentences[:_MAX_COMPARED_CASES])


def _make_answer_columns() -> list[Col[_CaseWithTitle]]:
    """Returns the columns for the verdict, speed-up, step time and reason of a case, in the same words as on the
    terminal.
    """
    return [
        Col("case", "value"),
        Col("verdict", _make_verdict_field, hint=legend.VERDICT_LEGEND.removeprefix("verdict: ")),
        Col("speed-up", _make_speed_field, unit="x"),
        Col("a step", "case.best_seconds", unit="s", tone=choose_row_cost_tone),
        Col("why, and at what cost", lambda row: _explain_case(row.case), below=True),
    ]


def _make_verdict_field(row: _CaseWithTitle) -> Field:
    describe_verdict = describe_case_status if row.case.is_reference else verdict_word
    return Field(describe_verdict(row.case), tone=status_tone(row.case))


def _make_speed_field(row: _CaseWithTitle) -> Field | None:
    speed = speed_up(row.case)
    return Field(show_speed(speed), speed.point, status_tone(row.case)) if speed is not None else None


def _explain_case(case: NamedCase) -> str:
    """Returns the reason for a case's speed, its costs, and doubts about its verdict, as one text. A reference has only
    doubts.
    """
    phrases = [case.finding.why]
    if not case.is_reference or not case.is_ok:
        answer = make_precision_answer([case])
        # Without a speed, the answer's figure is the reason why the case is emulated.
        emulation_reason = "" if speed_up(case) is not None else answer.figure
        phrases = [answer.reason, emulation_reason, *phrases, *answer.costs]
    phrases += [_format_labels(case), case.record.detail if case.is_ok else ""]
    return join_parts(*(shorten_line(phrase, MAX_REASON_LENGTH) for phrase in phrases), separator="; ")


def _list_detail_columns(cases: Cases) -> Iterator[Col[_CaseWithTitle]]:
    yield Col("case", "value")
    errors = {case.group.error_metric for case in cases if case.error_value is not None}
    error_heading = make_figure_heading(errors.pop()) if len(errors) == 1 else "error"
    yield Col(
        error_heading, "case.error_value", show=units.relative_error, hint="against the reference that the suite names"
    )
    yield make_case_figure_column(PEAK_MEMORY, choose_row_cost_tone)
    yield figure_column(DEVICE_PEAK_MEMORY, lambda row: device_peak_bytes(row.case), choose_row_cost_tone)
    yield make_case_figure_column(ENERGY, choose_row_cost_tone)
    yield figure_column(REPLAY, lambda row: row.case.figures[REPLAY].best, choose_row_cost_tone)
    hint = "distance of the quartiles / median, over all calls"
    yield Col("spread", "case.finding.spread", show=units.percent, hint=hint)
    # If all cases count the same kind of work, the column has one unit.
    rate_units = {rate.unit for case in cases if (rate := case.figures.rate).value is not None}
    unit = rate_units.pop() if len(rate_units) == 1 else ""
    yield Col("throughput", _make_throughput_field, number=True, unit=unit, hint="of the best case")
    hint = "native: by the hardware; emulated: the error is real, ignore time and memory; refused: not possible here"
    yield Col("how", "case.record.support.level.value", tone=choose_row_cost_tone, hint=hint)
    yield from (make_case_figure_column(spec, choose_row_cost_tone) for spec in list_table_metric_specs("cases"))


def _make_throughput_field(row: _CaseWithTitle) -> Field | None:
    rate = row.case.figures.rate
    return Field(rate.shown, rate.value, choose_cost_tone(row.case)) if rate.value is not None else None
