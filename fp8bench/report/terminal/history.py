"""Shows the history of a store as text. The pages show all series, one series by commit, the runs, or damaged files.

A change has no verdict and no colour here, because asv's interval does not include how much runs differ.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.metric import unit_of_series
from fp8bench.model import Conditions, Ending, Fault, Figure, Run, Status, Trend
from fp8bench.model.specs import spec_of
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import Code, Column, Field, Page, Part, Table, Text
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import count_missing

# How often each name occurs, as the number of skipped runs by reason.
Counts = Mapping[str, int]
_SIGN_OF_ROUGH_FIGURE = "~"
# At most this many reasons for skipped runs are listed, so that they do not hide the runs.
_MAX_REASONS = 20
# The digits of a median next to its interval. With three digits, the median and the ends of the interval would often
# look equal.
_MEDIAN_DIGITS = 4

# The first line counts series whose median changed by more than this.
_COUNTED_CHANGE = 0.02
_NEW_SOURCE_TEXT = "new source"
_CHANGE_LEGEND = "change: against the commit before, without a verdict; less is better"
_ROUGH_LEGEND = f"{_SIGN_OF_ROUGH_FIGURE}: from a --quick run or a few rounds: only a rough number"
_LIST_LEGEND = (
    "median: the last commit's median over the rounds (or energy windows) of all its runs; lower is better everywhere",
    _CHANGE_LEGEND,
    "new version, new source: the work, the method or the source of joules changed, so earlier numbers do not compare",
    _ROUGH_LEGEND,
)
_TREND_LEGEND = (
    "99% interval: of the median over rounds (or energy windows), as in asv; runs may differ by more",
    _CHANGE_LEGEND,
    _ROUGH_LEGEND,
)


def show_trend_value(trend: Trend, number: float | None, digits: int = 3) -> str:
    """Formats a value of a series in the unit of the series. `digits` only applies to times and energies."""
    return spec_of(trend.series.metric).to_text(number, unit_of_series(trend.series), digits)


def trends_page(
    endings: Sequence[Ending], store: str, num_runs: int, num_commits: int, skipped: Counts, store_options: str = ""
) -> Page:
    """Returns the page of all series: a line for each series, grouped by machine and Python interpreter.

    `skipped` counts the runs that were left out, by reason. `store_options` are the options with which another
    command finds the same store.
    """
    series_text = count_noun(len(endings), "series", "series")
    counts = f"{series_text}, {count_noun(num_runs, 'run')} of {count_noun(num_commits, 'commit')}"
    cols: Cols[Ending] = [
        Col("series", "trend.name"),
        Col("points", "points", show=str),
        Col("last", lambda ending: ending.last.commit[:8]),
        Col("median", lambda ending: _show_figure(ending.trend, ending.last), number=True),
        Col("change", lambda ending: _show_change(ending.last, ending.before), number=True),
    ]
    parts = [Part("changed", "", (Text(_summarize_changes(endings)),))] if endings else []
    for machine, endings_of_machine in itertools.groupby(endings, key=lambda ending: describe_machine(ending.trend)):
        parts.append(Part("series", "", (table("series", machine, cols, endings_of_machine),)))
    if endings:
        # Quote the name of the series, because a shell would expand its brackets.
        name = shlex.quote(endings[0].trend.name)
        parts.append(_next_command("show one series, commit by commit", f"fp8bench history show {name}{store_options}"))
    return Page(f"{store}: {counts}", "", (*parts, *_list_skipped_runs(skipped)), _LIST_LEGEND if endings else ())


def _summarize_changes(endings: Sequence[Ending]) -> str:
    """Returns how many series changed from the commit before, and which changed most.

    An example: '1 of 8 series with an earlier commit changed by more than 2%; the largest change:
    gemm.Gemm.track_time(fp32, 512) +7.1%'.
    """
    ratios = {ending.trend.name: _change_ratio(ending.last, ending.before) for ending in endings}
    sizes = {name: abs(math.log(ratio)) for name, ratio in ratios.items() if ratio is not None}
    changed = [name for name, size in sizes.items() if size > math.log1p(_COUNTED_CHANGE)]
    series = f"{count_noun(len(sizes), 'series', 'series')} with an earlier commit"
    largest = max(changed, key=lambda name: sizes[name], default="")
    remark = f"; the largest change: {largest} {units.change(ratios[largest] or 1.0)}" if largest else ""
    return f"{len(changed)} of {series} changed by more than {units.percent(_COUNTED_CHANGE, 0)}{remark}"


def trend_page(trends: Sequence[Trend], description: str) -> Page:
    """Returns the page of one series. For each machine and interpreter, it has a table with a row for each commit."""
    cols: Cols[_FigureRow] = [
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
    parts = list_of("what", "", [f"{description}; lower is better"])
    for trend in trends:
        parts.append(Part("trend", "", (table("trend", describe_machine(trend), cols, _figure_rows(trend)),)))
    return Page(trends[0].name, "", tuple(parts), _TREND_LEGEND)


def run_row(run: Run, is_being_written: bool, store_options: str = "") -> tuple[Field, ...]:
    """Returns the row of a run in the table of runs. The row keeps no reference to the run, so that the caller can
    release the run's memory.
    """
    commit = str(run.environment.get("commit") or "none")[:8]
    # If the run does not show whether files had uncommitted changes, assume that they had.
    if run.environment.get("dirty") is not False and commit != "none":
        commit += "+dirty"
    by_status = Counter(record.status for record in run.records)
    remark = ""
    if not run.finished and is_being_written:
        remark = "being measured now"
    elif not run.finished:
        num_missing, _ = count_missing(run)
        missing_text = f"; {count_noun(num_missing, 'case has', 'cases have')} no record" if num_missing else ""
        remark = f"unfinished{missing_text}: fp8bench suite --resume {run.id}{store_options}"
    texts = (
        run.id,
        run.started[:19].replace("T", " ") or units.NONE,
        commit,
        run.origin,
        run.request.suite,
        *(str(by_status[status]) for status in (Status.OK, Status.SKIPPED, Status.FAILED)),
        str(run.environment.get("machine") or units.NONE),
        remark,
    )
    return tuple(map(Field, texts))


def runs_page(
    rows: Sequence[tuple[Field, ...]],
    store: str,
    skipped: Counts,
    store_options: str = "",
    other_results: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Page:
    """Returns the page of all runs in the given order. Lines for other stored results follow, by kind.

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
    for kind, lines in other_results.items():
        parts += list_of(f"{kind}s", f"{kind}s (UTC), newest first", lines)
    parts += [_next_command("show one run", f"fp8bench show {rows[0][0].text}{store_options}")] if rows else []
    return Page(f"{store}: {count_noun(len(rows), 'run')}, newest first", "", (*parts, *_list_skipped_runs(skipped)))


def faults_page(faults: Sequence[Fault], num_sound: int, num_files: int, store: str) -> Page:
    num_broken = sum(fault.broken for fault in faults)
    page_title = (
        f"{store}: {count_noun(num_broken, 'thing is', 'things are')} broken"
        if num_broken
        else f"{store}: nothing is broken"
    )
    parts: list[Part] = []
    for title, is_broken in (("broken", True), ("worth knowing", False)):
        lines = (f"{fault.path}: {fault.what}. {fault.remedy}." for fault in faults if fault.broken is is_broken)
        parts += list_of(title, title, lines)
    return Page(page_title, "", (*parts, Part("sound", "", (Text(f"sound: {num_sound} of {num_files} run files"),))))


def asv_files_page(store: str, num_files: int, num_series: int, num_runs: int, skipped: Counts) -> Page:
    counts = f"{count_noun(num_files, 'file')} of asv's, {count_noun(num_series, 'benchmark')}"
    return Page(f"{store}: made {counts}, from {count_noun(num_runs, 'run')}", "", tuple(_list_skipped_runs(skipped)))


def merge_page(title: str, counts: Counts) -> Page:
    return Page(title, "", (), facts=tuple((name, str(count)) for name, count in counts.items()))


def _next_command(purpose: str, command: str) -> Part:
    return Part("summary", "", (Text(purpose), Code(command)))


def count_noun(count: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun, as '1 run' or '2 runs'. `plural` is only needed for a noun with an irregular
    plural.
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def describe_machine(trend: Trend) -> str:
    """Returns the machine and interpreter of a series, as 'on box (AMD EPYC, 2 CPUs), /venv/bin/python'."""
    machine = trend.machine
    cpus = f"{machine['num_cpu']} CPUs" if machine.get("num_cpu") else ""
    facts = ", ".join(str(fact) for fact in (machine.get("gpu"), machine.get("cpu"), cpus) if fact)
    return f"on {machine.get('machine')}{f' ({facts})' if facts else ''}, {trend.python}"


def _show_figure(trend: Trend, figure: Figure, digits: int = 3) -> str:
    if figure.value is None:
        return {Status.FAILED: "FAILED", Status.SKIPPED: "skipped"}.get(figure.status, units.NONE)
    return (_SIGN_OF_ROUGH_FIGURE if figure.hasty else "") + show_trend_value(trend, figure.value, digits)


def _show_change(figure: Figure, previous: Figure | None) -> str:
    if previous is None or figure.value is None or previous.value is None:
        return units.NONE
    if figure.version != previous.version:
        return "new version"
    if figure.source != previous.source:
        return _NEW_SOURCE_TEXT
    ratio = _change_ratio(figure, previous)
    if ratio is None:
        return units.NONE
    return (_SIGN_OF_ROUGH_FIGURE if figure.hasty or previous.hasty else "") + units.change(ratio)


def _change_ratio(figure: Figure, previous: Figure | None) -> float | None:
    """Returns a value divided by the previous one, or None if they do not compare, or if the ratio is not a positive
    number.
    """
    if previous is None or figure.value is None or previous.value is None:
        return None
    if (figure.version, figure.source) != (previous.version, previous.source):
        return None
    if figure.value == previous.value:
        return 1.0
    if not (math.isfinite(previous.value) and math.isfinite(figure.value)) or min(figure.value, previous.value) <= 0:
        return None
    return figure.value / previous.value


class _FigureRow(NamedTuple):
    figure: Figure
    conditions: str
    median: str
    interval: str | None
    change: str
    reason: str


def _figure_rows(trend: Trend) -> Iterator[_FigureRow]:
    previous: Figure | None = None
    version = trend.figures[0].version
    conditions = ""
    for figure in trend.figures:
        # 1. Collect the measuring conditions that changed. Rows with the same changes share one line above them.
        new_conditions = []
        if figure.version != version:
            new_conditions.append(f"version {version} -> {figure.version}: earlier numbers do not compare")
        version = figure.version
        if previous is not None and figure.value is not None and previous.under != figure.under:
            new_conditions += _new_conditions(previous.under, figure.under)
        conditions = "; ".join(new_conditions) or conditions
        # 2. Show the figure. Show its change only if it is comparable with the previous figure.
        change = units.NONE
        if previous is not None and (previous.version, previous.source) == (figure.version, figure.source):
            change = _show_change(figure, previous)
        interval = None
        if figure.low is not None:
            low = show_trend_value(trend, figure.low, _MEDIAN_DIGITS)
            high = show_trend_value(trend, figure.high, _MEDIAN_DIGITS)
            interval = f"[{low}, {high}]"
        median = _show_figure(trend, figure, _MEDIAN_DIGITS)
        reason = f"{median}: {figure.reason}" if figure.value is None and figure.reason else ""
        yield _FigureRow(figure, conditions, median, interval, change, reason)
        if figure.value is not None:
            previous = figure


def _new_conditions(previous: Conditions, current: Conditions) -> Iterator[str]:
    old_measuring_conditions = dict(previous)
    new_measuring_conditions = dict(current)
    changed_names = [
        name
        for name in old_measuring_conditions | new_measuring_conditions
        if old_measuring_conditions.get(name) != new_measuring_conditions.get(name)
    ]
    for name in changed_names:
        # If the version of torch changed, torch's git hash changed as well and adds nothing.
        if name != "torch_git" or "torch" not in changed_names:
            old = _show_condition(old_measuring_conditions.get(name))
            new = _show_condition(new_measuring_conditions.get(name))
            yield f"{name} {old:.28} -> {new:.28}"


def _show_condition(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())


def _list_skipped_runs(skipped: Counts) -> list[Part]:
    reasons = sorted(skipped.items(), key=lambda pair: (-pair[1], pair[0]))[:_MAX_REASONS]
    return list_of("left", "not in it", (f"{count_noun(count, 'run')}: {reason}" for reason, count in reasons))
