"""Reports on several ranks: differences between their times, the bytes and errors of their messages, and the speed-up
over one rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from fp8bench import units
from fp8bench.analysis.ranks import (
    PIPELINE_WAITING,
    TIME_SUM_MISMATCH,
    Efficiency,
    MedianInterval,
    MissingFigure,
    OverlapFigures,
    RankTimes,
    compute_efficiency,
    find_pareto_points,
    measure_overlap,
    measure_pipeline_bubble,
    rank_times,
)
from fp8bench.model import specs
from fp8bench.model.ranks import Sent, Transfer
from fp8bench.report.case_status import choose_cost_tone, choose_row_cost_tone
from fp8bench.report.columns import Col, ColumnList, case_columns, figure_column, make_case_figure_column, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Texts, Tone
from fp8bench.report.page.section import Material, iterate_titled_panels, make_table_names_unique, section
from fp8bench.report.panels import CaseValue, NamedCase, Panel, join_parts, together

_BANDWIDTH_SPECS = (specs.ALGBW, specs.BUSBW, specs.EFFECTIVE_BUSBW)
CPU_REMARK = (
    "On a CPU this is a functional test: ranks share its cores and send through its memory, so rates, skew and overlap "
    "do not apply to a cluster."
)
_COLLECTIVE_PARAM = "collective"
_SQNR_METRIC = "sqnr_db"
_SATURATED_PPM_METRIC = "saturated_ppm"
_FLUSHED_PERCENT_METRIC = "flushed_percent"
# parameters that apply only to FP8 collectives
_FP8_PARAMS = ("fp8", "scaling")
# A smaller percentage of values that became zero is not mentioned, because every format flushes some values to zero.
_MIN_FLUSHED_PERCENT = 0.01


def _median_range_field(
    figure: MedianInterval | MissingFigure,
    show_value: Callable[[float | None], str],
    factor: float = 1.0,
    tone: Tone = Tone.PLAIN,
) -> Field:
    """Returns a field with a median and its range, as '50.0% (45.0% to 55.0%)'. If the figure is unknown, the field has
    a short reason or a dash.
    """
    if isinstance(figure, MissingFigure):
        return Field(figure.substitute_text, tone=Tone.DOUBT if figure.substitute_text != units.NONE else Tone.PLAIN)
    return Field(f"{show_value(figure.value)} ({units.span(figure[1:], show_value)})", figure.value * factor, tone)


def _explain_missing_rank_figures(
    subject: str, rows: Iterable[CaseValue[Efficiency] | CaseValue[OverlapFigures]]
) -> Texts:
    """Explains why figures in a table are unknown. Each reason for a dash gets a sentence. One sentence explains all
    words that the table shows instead of figures.
    """
    modes_by_reason: dict[MissingFigure, list[str]] = {}
    for case, figures in rows:
        for figure in figures:
            if isinstance(figure, MissingFigure):
                modes_by_reason.setdefault(figure, []).append(case.mode)
    # Leave out pipeline parallelism: the remark on the pipeline's bubble explains how long ranks wait.
    modes_by_reason.pop(PIPELINE_WAITING, None)
    explanations = []
    for reason, modes in modes_by_reason.items():
        if reason.substitute_text == units.NONE:
            yield Text(f"No {subject} of {', '.join(dict.fromkeys(modes))}: {reason.why}.")
        else:
            explanations.append(f"{reason.substitute_text}: {reason.why}")
    if explanations:
        yield Text(f"{subject.capitalize()} is unknown where the table has a word: {'; '.join(explanations)}.")


def make_rank_elements(panel: Panel) -> Iterator[Table | Text]:
    """Yields the tables and remarks on several ranks, or nothing for cases of a single process."""
    if panel.case.ranks < 2:
        return
    # 1. Show the times of ranks, and the bytes that they send.
    yield from filter_nonempty_tables(_times_table(panel), make_transfer_table(panel))
    yield from map(Text, best_trade_offs(panel))
    # 2. Show the speed-up over one rank.
    efficiency_of_cases = panel.find_case_values(lambda result: compute_efficiency(result.record))
    yield from filter_nonempty_tables(_efficiency_table(panel, efficiency_of_cases))
    yield from _explain_missing_rank_figures("efficiency", efficiency_of_cases)
    # 3. Show how communication overlaps with products.
    overlap_of_cases = panel.find_case_values(lambda result: measure_overlap(result.record))
    yield from filter_nonempty_tables(_sent_bytes_table(panel), _make_overlap_table(overlap_of_cases))
    yield from _explain_missing_rank_figures("overlap", overlap_of_cases)
    yield from _describe_bubbles(panel)
    # Warn on a CPU, because readers could take its times and rates for those of a cluster.
    if panel.device == "cpu":
        yield Text(CPU_REMARK)


def filter_nonempty_tables(*tables: Table) -> Tables:
    return (table for table in tables if table.rows)


def _median_column(heading: str, path: str, hint: str = "") -> Col[CaseValue[Any]]:
    """Returns a column with the median of a list of seconds in each case's record. `path` is the path to this list, as
    'scaling.whole'.
    """
    get_record_seconds = attrgetter(f"case.record.{path}")

    def median_seconds(row: CaseValue[Any]) -> float | None:
        seconds = get_record_seconds(row)
        return statistics.median(seconds) if seconds else None

    return Col(heading, median_seconds, unit="s", hint=hint)


def _efficiency_table(panel: Panel, rows: Sequence[CaseValue[Efficiency]]) -> Table:
    def share_column(name: str, hint: str) -> Col[CaseValue[Efficiency]]:
        get_scaling_share = attrgetter(f"value.{name}_scaling")

        def share_field(row: CaseValue[Efficiency]) -> Field:
            return _median_range_field(get_scaling_share(row), units.percent, 100, choose_cost_tone(row.case))

        return Col(name, share_field, unit="%", hint=f"{hint}; in brackets: the range of rounds")

    cols: ColumnList[CaseValue[Efficiency]] = [
        *case_columns(""),
        _median_column("one rank", "scaling.whole", "the whole batch, by one rank while the others wait"),
        _median_column("its share", "scaling.share", "one rank's share of the batch"),
        _median_column("together", "scaling.together", "the whole batch, by all ranks"),
        share_column("strong", "one rank / (ranks x together)"),
        share_column("weak", "one rank's share / together"),
    ]
    return table("scaling", f"scaling efficiency of {panel.case.ranks} ranks", cols, rows)


# A case with the bytes of one operation and dtype that each rank sends.
_CaseMessages = CaseValue[Sequence[Sent]]


def _sent_bytes_table(panel: Panel) -> Table:
    """Returns a table of the bytes that the ranks send in a step, by operation and dtype."""
    rows: list[_CaseMessages] = []
    for case in panel.named_cases:
        messages_by_operation_and_dtype = together(
            ((message.operation, message.dtype), message) for message in case.record.sent
        )
        rows += [CaseValue(case, messages) for messages in messages_by_operation_and_dtype.values()]

    def min_bytes(row: _CaseMessages) -> float:
        # Only ranks that send have a message. If one has none, the least is 0 bytes.
        all_ranks_send = len(row.value) == panel.case.ranks
        return min(message.bytes for message in row.value) if all_ranks_send else 0.0

    def largest_message(row: _CaseMessages) -> Sent:
        return max(row.value, key=attrgetter("bytes"))

    cols: ColumnList[_CaseMessages] = [
        *case_columns(""),
        Col("operation", lambda row: row.value[0].operation.replace("_", "-")),
        Col("dtype", lambda row: row.value[0].dtype),
        Col("calls", lambda row: largest_message(row).calls, show=str, hint="of the rank that sends most"),
        Col("most", lambda row: largest_message(row).bytes, unit="B", hint="by the rank that sends most"),
        Col("least", min_bytes, unit="B", hint="by the rank that sends least"),
    ]
    return table("sent", "bytes that a rank sends in a step", cols, rows)


# A case with the times of its ranks.
_RankTimesOfCase = CaseValue[Sequence[RankTimes]]


def _times_table(panel: Panel) -> Table:
    timed_cases = panel.find_case_values(lambda result: result.record.timing)
    rows: list[_RankTimesOfCase] = [
        CaseValue(case, times) for case, timing in timed_cases if (times := rank_times(timing))
    ]

    def longest_wait(row: _RankTimesOfCase) -> float | None:
        # Ranks wait for each other only while they communicate.
        has_communication = row.case.figures[specs.COMMUNICATION].value is not None
        return max(rank.waiting_seconds for rank in row.value) if has_communication else None

    cols: ColumnList[_RankTimesOfCase] = [
        *case_columns(""),
        Col(
            "slowest",
            lambda row: max(rank.step_seconds for rank in row.value),
            unit="s",
            hint="median of the slowest rank",
        ),
        Col("fastest", lambda row: min(rank.step_seconds for rank in row.value), unit="s"),
        make_case_figure_column(specs.RANK_SKEW),
        make_case_figure_column(specs.COMMUNICATION),
        Col("waiting", longest_wait, unit="s", hint="of the rank that waits most"),
    ]
    return table("ranks", f"{panel.case.ranks} ranks", cols, rows)


def make_transfer_table(panel: Panel) -> Table:
    def error_column(heading: str, name: str, unit: str) -> Col[CaseValue[Transfer]]:
        return Col(heading, lambda row: row.case.figures[name].value, unit=unit)

    cols: ColumnList[CaseValue[Transfer]] = [
        *case_columns(""),
        figure_column(specs.WIRE_BYTES, "value.wire"),
        figure_column(specs.LOGICAL_BYTES, "value.logical"),
        *(make_case_figure_column(spec, choose_row_cost_tone) for spec in _BANDWIDTH_SPECS),
        error_column("SQNR", _SQNR_METRIC, "dB"),
        error_column("saturated", _SATURATED_PPM_METRIC, "ppm"),
        error_column("flushed", _FLUSHED_PERCENT_METRIC, "%"),
    ]
    rows = panel.find_case_values(lambda result: result.record.transfer)
    return table("wire", "bytes on the wire, and the error", cols, rows)


def _name_wire_format(case: NamedCase, is_counted: bool) -> str:
    """Returns how the values that ranks send are encoded, as 'bf16'. If the sent bytes were counted (`is_counted`), the
    parameters of FP8 collectives follow. They replace the name 'fp8', as 'two-shot rowwise'.
    """
    params = dict(case.group.case.params)
    name_parts = [str(params[name]).replace("_", "-") for name in _FP8_PARAMS if is_counted and name in params]
    return " ".join(name_parts if name_parts and case.mode == "fp8" else [case.mode, *name_parts])


def _describe_transfer(case: NamedCase, wire_bytes: float, sqnr: float) -> str:
    saturated_ppm = case.figures[_SATURATED_PPM_METRIC].value or 0.0
    flushed_percent = case.figures[_FLUSHED_PERCENT_METRIC].value or 0.0
    return join_parts(
        units.size(wire_bytes),
        units.decibels(sqnr),
        f"saturated {units.describe(saturated_ppm, 'ppm')}" if saturated_ppm else "",
        f"flushed {units.percentage(flushed_percent)}" if flushed_percent >= _MIN_FLUSHED_PERCENT else "",
    )


def best_trade_offs(panel: Panel) -> Iterator[str]:
    """Yields a sentence for each collective. The sentence names the formats that no other format beats both in bytes
    and in error. Only messages of the largest size are compared.
    """
    transfer_rows = panel.find_case_values(lambda result: result.record.transfer)
    rows_by_collective = together(
        (dict(row.case.group.case.params).get(_COLLECTIVE_PARAM, panel.suite), row) for row in transfer_rows
    )
    for collective, rows in rows_by_collective.items():
        sizes = {row.value.logical for row in rows}
        cost_by_text: dict[str, tuple[float, float]] = {}
        for case, transfer in rows:
            sqnr = case.figures[_SQNR_METRIC].value
            # Compare only the largest messages: the time of smaller ones depends on latency and not on the format.
            if sqnr is not None and transfer.logical == max(sizes):
                name = _name_wire_format(case, transfer.counted)
                cost_by_text[f"{name} ({_describe_transfer(case, transfer.wire, sqnr)})"] = (transfer.wire, sqnr)
        texts = sorted(cost_by_text, key=cost_by_text.__getitem__)
        pareto_point_indices = find_pareto_points([cost_by_text[text] for text in texts])
        # If no format beats another one, the sentence would not help to choose.
        if len(pareto_point_indices) < len(texts):
            size_text = f" of {units.size(max(sizes))}" if len(sizes) > 1 else ""
            trade_offs = "; ".join(texts[number] for number in pareto_point_indices)
            yield f"{str(collective).replace('_', '-')}{size_text}: best trade-offs of bytes and error: {trade_offs}."


def _make_overlap_table(rows: Sequence[CaseValue[OverlapFigures]]) -> Table:
    cols: ColumnList[CaseValue[OverlapFigures]] = [
        *case_columns(""),
        _median_column("products", "overlap.compute"),
        _median_column("communication", "overlap.communication"),
        _median_column("both at once", "overlap.both"),
        Col(
            "check sum",
            "value.check_sum",
            show="{:.3f}".format,
            tone=lambda row: Tone.DOUBT if row.value.exposed_seconds is TIME_SUM_MISMATCH else Tone.PLAIN,
            hint="time of both one after the other / sum of both measured alone",
        ),
        figure_column(
            specs.EXPOSED_COMMUNICATION_TIME, lambda row: _median_range_field(row.value.exposed_seconds, units.seconds)
        ),
        figure_column(
            specs.HIDDEN_COMMUNICATION,
            lambda row: _median_range_field(row.value.hidden_communication_share, units.percent, 100),
        ),
    ]
    return table("overlap", "communication during products", cols, rows)


def _describe_bubbles(panel: Panel) -> Texts:
    for case, bubble in panel.find_case_values(lambda result: measure_pipeline_bubble(result.record)):
        name = join_parts(case.mode, case.setting_name, separator=" at ")
        yield Text(
            f"{name}: ranks wait or send for {bubble.measured_ratio:.0%} of the time for which they compute; with "
            f"equal stages and free communication this would be {bubble.ideal_ratio:.0%}."
        )


@section("ranks", "Ranks", 98)
def ranks_section(material: Material) -> Elements:
    """A step ends when its slowest rank has finished. A collective's time is the shortest time that any rank spent in
    it: the other ranks also waited for the last one.
    """
    for panel_number, (title, panel) in enumerate(iterate_titled_panels(material), 1):
        yield from make_table_names_unique(make_rank_elements(panel), panel_number, title)
