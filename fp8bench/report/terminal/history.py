"""Shows the history of a store as text. The pages show all series, one series by commit, the runs, or damaged files.

A change has no verdict and no colour here, because asv's interval does not include how much runs differ.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.metric import get_series_unit
from fp8bench.model import Ending, Fault, Figure, Run, Status, Trend
from fp8bench.model.specs import find_metric_spec
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import Code, Column, Field, Page, Part, Table, Text
from fp8bench.report.panels import join_parts
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.words.naming import count_missing_records, environment_fact, many

# How often each name occurs, for example the number of skipped runs for each reason.
CountByName = Mapping[str, int]
_ROUGH_FIGURE_SIGN = "~"
# At most this many reasons for skipped runs are listed, so that they do not hide the runs.
_MAX_REASONS = 20
# The significant digits of a median next to its interval. With three digits, the median and the ends of the interval
# would often look equal.
_SIGNIFICANT_MEDIAN_DIGITS = 4

# The page of all series begins with the number of series whose median changed by more than this.
_MIN_COUNTED_CHANGE = 0.02
_CHANGE_LEGEND = "change: against the commit before, without a verdict; less is better"
_ROUGH_FIGURE_LEGEND = f"{_ROUGH_FIGURE_SIGN}: from a --quick run or a few rounds: only a rough number"
_SERIES_LIST_LEGEND = (
    "median: the last commit's median over the rounds (or energy windows) of all its runs; lower is better everywhere",
    _CHANGE_LEGEND,
    "new version, new source: the work, the method or the source of joules changed, so earlier numbers do not compare",
    _ROUGH_FIGURE_LEGEND,
)
_TREND_LEGEND = (
    "99% interval: of the median over rounds (or energy windows), as in asv; runs may differ by more",
    _CHANGE_LEGEND,
    _ROUGH_FIGURE_LEGEND,
)


def show_trend_value(trend: Trend, number: float | None, digits: int = 3) -> str:
    """Formats a value of a series in the unit of the series. `digits` only applies to times and energies."""
    return find_metric_spec(trend.series.metric).format_value(number, get_series_unit(trend.series), digits)


def trends_page(
    endings: Sequence[Ending],
    store: str,
    num_runs: int,
    num_commits: int,
    skipped: CountByName,
    store_options: str = "",
) -> Page:
    """Returns the page that lists all series, grouped by machine and Python interpreter.

    `endings` are the last two figures of each series. `skipped` has the number of left-out runs by reason.
    `store_options` are the options with which another command finds the same store.
    """
    counts_text = f"{count_series(len(endings))}, {many(num_runs, 'run')} of {many(num_commits, 'commit')}"
    cols: ColumnList[Ending] = [
        Col("series", "trend.name"),
        Col("points", "points", show=str),
        Col("last", lambda ending: ending.last.commit[:8]),
        Col("median", lambda ending: _format_trend_figure(ending.trend, ending.last), number=True),
        Col("change", lambda ending: _show_figure_change(ending.last, ending.before), number=True),
    ]
    page_title = f"{store}: {counts_text}"
    if not endings:
        return Page(page_title, "", tuple(_list_skipped_runs(skipped)))
    parts = [Part("changed", "", (Text(_summarize_changes(endings)),))]
    for machine, endings_of_machine in itertools.groupby(endings, key=lambda ending: describe_machine(ending.trend)):
        parts.append(Part("series", "", (table("series", machine, cols, endings_of_machine),)))
    # Quote the name of the series, because a shell would expand its brackets.
    name = shlex.quote(endings[0].trend.name)
    parts.append(_next_command("show one series, commit by commit", f"fp8bench history show {name}{store_options}"))
    return Page(page_title, "", (*parts, *_list_skipped_runs(skipped)), _SERIES_LIST_LEGEND)


def _summarize_changes(endings: Sequence[Ending]) -> str:
    """Returns how many series changed between their last two commits, and the largest change.

    An example: '1 of 8 series with an earlier commit changed by more than 2%; the largest change:
    gemm.Gemm.track_time(fp32, 512) +7.1%'.
    """
    # Several machines may have a series of the same name, so do not count distinct names.
    changes = []
    for ending in endings:
        ratio = _compute_ratio_to_previous(ending.last, ending.before)
        if ratio is not None:
            changes.append((abs(math.log(ratio)), ending.trend.name, units.change(ratio)))
    num_changed_series = sum(size > math.log1p(_MIN_COUNTED_CHANGE) for size, _, _ in changes)
    series_text = f"{count_series(len(changes))} with an earlier commit"
    summary = f"{num_changed_series} of {series_text} changed by more than {units.percent(_MIN_COUNTED_CHANGE, 0)}"
    if not num_changed_series:
        return summary
    _, largest_name, change = max(changes, key=itemgetter(0))
    return f"{summary}; the largest change: {largest_name} {change}"


def trend_page(trends: Sequence[Trend], description: str) -> Page:
    """Returns the page of one series. For each machine and interpreter, it has a table with a row for each commit."""
    cols: ColumnList[_FigureRow] = [
        Col("conditions", "conditions", shared=True),
        Col("date (UTC)", lambda row: units.moment(row.figure.date)),
        Col("commit", lambda row: row.figure.commit[:8]),
        Col("runs", "figure.runs", show=str),
        Col("samples", "figure.samples", show=str),
        Col("median", "median", number=True),
        Col("99% interval", "interval"),
        Col("change", "change", number=True),
        Col("why", "reason", below=True),
    ]
    parts = make_list_part("what", "", [f"{description}; lower is better"])
    for trend in trends:
        parts.append(Part("trend", "", (table("trend", describe_machine(trend), cols, _figure_rows(trend)),)))
    return Page(trends[0].name, "", tuple(parts), _TREND_LEGEND)


def run_row(run: Run, is_being_written: bool, store_options: str = "") -> tuple[Field, ...]:
    """Returns the row of a run in the table of runs. The row keeps no reference to the run, so that the caller can
    release the run's memory.
    """
    commit = environment_fact(run, "commit")[:8] or "none"
    # If the run does not show whether files had uncommitted changes, assume that they had.
    if run.environment.get("dirty") is not False and commit != "none":
        commit += "+dirty"
    num_records_by_status = Counter(record.status for record in run.records)
    run_progress_remark = ""
    if not run.finished and is_being_written:
        run_progress_remark = "being measured now"
    elif not run.finished:
        num_missing, _ = count_missing_records(run)
        missing_records_text = f"; {many(num_missing, 'case has', 'cases have')} no record" if num_missing else ""
        run_progress_remark = f"unfinished{missing_records_text}: fp8bench suite --resume {run.id}{store_options}"
    start_text = run.started[:19].replace("T", " ")
    count_texts = [str(num_records_by_status[status]) for status in (Status.OK, Status.SKIPPED, Status.FAILED)]
    machine = environment_fact(run, "machine")
    texts = [
        run.id,
        start_text or units.NONE,
        commit,
        run.origin,
        run.request.suite,
        *count_texts,
        machine or units.NONE,
    ]
    return tuple(map(Field, [*texts, run_progress_remark]))


def runs_page(
    rows: Sequence[tuple[Field, ...]],
    store: str,
    skipped: CountByName,
    store_options: str = "",
    other_results: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Page:
    """Returns the page of all runs in the given order, followed by a list for each kind of stored result that is not a
    run.

    `store_options` are the options with which another command finds the same store.
    """
    columns = (
        Column("run"),
        Column("started (UTC)"),
        Column("commit"),
        Column("by"),
        Column("suite"),
        Column("ok", number=True),
        Column("skipped", number=True),
        Column("failed", number=True),
        Column("machine"),
        Column("why", below=True),
    )
    parts = [Part("runs", "", (Table("runs", "", columns, tuple(rows)),))] if rows else []
    for result_kind, lines in other_results.items():
        parts += make_list_part(f"{result_kind}s", f"{result_kind}s (UTC), newest first", lines)
    parts += [_next_command("show one run", f"fp8bench show {rows[0][0].text}{store_options}")] if rows else []
    return Page(f"{store}: {many(len(rows), 'run')}, newest first", "", (*parts, *_list_skipped_runs(skipped)))


def store_faults_page(faults: Sequence[Fault], num_sound: int, num_files: int, store: str) -> Page:
    parts: list[Part] = []
    for title, is_broken in (("broken", True), ("worth knowing", False)):
        faults_in_part = [fault for fault in faults if fault.broken is is_broken]
        parts += make_list_part(
            title, title, (f"{fault.path}: {fault.what}. {fault.remedy}." for fault in faults_in_part)
        )
    parts.append(Part("sound", "", (Text(f"{num_sound} of {num_files} run files are sound"),)))
    num_broken_faults = sum(fault.broken for fault in faults)
    summary = (
        f"{many(num_broken_faults, 'thing is', 'things are')} broken" if num_broken_faults else "nothing is broken"
    )
    return Page(f"{store}: {summary}", "", tuple(parts))


def asv_files_page(store: str, num_files: int, num_series: int, num_runs: int, skipped: CountByName) -> Page:
    counts_text = f"{many(num_files, 'asv file')} with {many(num_series, 'benchmark')}"
    return Page(f"{store}: wrote {counts_text} from {many(num_runs, 'run')}", "", tuple(_list_skipped_runs(skipped)))


def merge_page(title: str, counts: CountByName) -> Page:
    return Page(title, "", (), facts=tuple((name, str(count)) for name, count in counts.items()))


def _next_command(purpose: str, command: str) -> Part:
    return Part("summary", "", (Text(purpose), Code(command)))


def count_series(number: int) -> str:
    return many(number, "series", "series")


def describe_machine(trend: Trend) -> str:
    """Returns the machine and interpreter of a series, as 'on box (AMD EPYC, 2 CPUs), /venv/bin/python'."""
    machine = trend.machine
    cpus_text = f"{machine['num_cpu']} CPUs" if machine.get("num_cpu") else ""
    facts = join_parts(str(machine.get("gpu") or ""), str(machine.get("cpu") or ""), cpus_text)
    return f"on {machine.get('machine')}{f' ({facts})' if facts else ''}, {trend.python}"


def _format_trend_figure(trend: Trend, figure: Figure, digits: int = 3) -> str:
    if figure.value is None:
        return {Status.FAILED: "FAILED", Status.SKIPPED: "skipped"}.get(figure.status, units.NONE)
    return _ROUGH_FIGURE_SIGN * figure.hasty + show_trend_value(trend, figure.value, digits)


def _show_figure_change(figure: Figure, previous: Figure | None) -> str:
    if previous is None or figure.value is None or previous.value is None:
        return units.NONE
    if figure.version != previous.version:
        return "new version"
    if figure.source != previous.source:
        return "new source"
    ratio = _compute_ratio_to_previous(figure, previous)
    is_rough_change = ratio is not None and (figure.hasty or previous.hasty)
    return _ROUGH_FIGURE_SIGN * is_rough_change + units.change(ratio)


def _compute_ratio_to_previous(figure: Figure, previous: Figure | None) -> float | None:
    """Returns the value of a figure divided by that of the previous figure. Returns None if the two are not comparable,
    or if the ratio is not a positive number.
    """
    if previous is None or figure.value is None or previous.value is None or not _is_same_work(figure, previous):
        return None
    # Equal values are unchanged, even if both are 0 or infinite and have no ratio.
    if figure.value == previous.value:
        return 1.0
    is_ratio = 0 < figure.value < math.inf and 0 < previous.value < math.inf
    return figure.value / previous.value if is_ratio else None


def _is_same_work(figure: Figure, previous: Figure) -> bool:
    """Returns whether two figures have the same version (the work and how it is measured) and the same source of
    energies.
    """
    return (figure.version, figure.source) == (previous.version, previous.source)


class _FigureRow(NamedTuple):
    figure: Figure
    conditions: str
    median: str
    interval: str | None
    change: str
    reason: str


def _figure_rows(trend: Trend) -> Iterator[_FigureRow]:
    previous_figure: Figure | None = None
    version = trend.figures[0].version
    conditions = ""
    for figure in trend.figures:
        # 1. Collect the measuring conditions that changed. Rows with the same changes share one line above them.
        changed_condition_texts = []
        if figure.version != version:
            changed_condition_texts.append(f"version {version} -> {figure.version}: earlier numbers do not compare")
        version = figure.version
        if previous_figure is not None and figure.value is not None:
            changed_condition_texts += _describe_changed_conditions(dict(previous_figure.under), dict(figure.under))
        conditions = "; ".join(changed_condition_texts) or conditions
        # 2. Print the figure, and its change if the previous figure measured the same work.
        figure_change_text = units.NONE
        if previous_figure is not None and _is_same_work(figure, previous_figure):
            figure_change_text = _show_figure_change(figure, previous_figure)
        interval = None
        if figure.low is not None:
            interval_end_texts = (
                show_trend_value(trend, bound, _SIGNIFICANT_MEDIAN_DIGITS) for bound in (figure.low, figure.high)
            )
            interval = f"[{', '.join(interval_end_texts)}]"
        median = _format_trend_figure(trend, figure, _SIGNIFICANT_MEDIAN_DIGITS)
        reason = f"{median}: {figure.reason}" if figure.value is None and figure.reason else ""
        yield _FigureRow(figure, conditions, median, interval, figure_change_text, reason)
        # Skip failures: the next figure is compared with the last one that has a value.
        if figure.value is not None:
            previous_figure = figure


def _describe_changed_conditions(previous: Mapping[str, object], current: Mapping[str, object]) -> Iterator[str]:
    changed_condition_names = [name for name in {**previous, **current} if previous.get(name) != current.get(name)]
    for name in changed_condition_names:
        # If the version of torch changed, torch's git hash changed as well and adds nothing.
        if name != "torch_git" or "torch" not in changed_condition_names:
            previous_value = _show_measuring_condition(previous.get(name))
            current_value = _show_measuring_condition(current.get(name))
            yield f"{name} {previous_value:.28} -> {current_value:.28}"


def _show_measuring_condition(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())


def _list_skipped_runs(skipped: CountByName) -> list[Part]:
    reasons = sort_reason_counts(skipped)[:_MAX_REASONS]
    return make_list_part("left", "not in it", (f"{many(count, 'run')}: {reason}" for reason, count in reasons))


def sort_reason_counts(counts: CountByName) -> list[tuple[str, int]]:
    """Returns the reasons with their counts, the largest count first."""
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
