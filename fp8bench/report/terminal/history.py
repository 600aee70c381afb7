"""The history as text: its series, one series commit by commit, the runs, and problems of a store.

Changes have neither verdict nor colour: asv's interval ignores how much runs differ.
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

# Counts of things, by their name.
Counts = Mapping[str, int]
_HASTY = "~"
# More reasons would hide the runs themselves.
_MOST_WORDS = 20
# Digits of a median next to its interval: with three, all would often look the same.
_CLOSE = 4

_NEW_SOURCE = "new source"
_VERSUS = "change: against the commit before, without a verdict; less is better"
_ROUGH = f"{_HASTY}: from a --quick run or a few rounds: only a rough number"
_OF_LIST = (
    "value: the last commit's median over the rounds (or energy windows) of all its runs; lower is better everywhere",
    _VERSUS,
    "new version, new source: the work, the method or the source of joules changed, so earlier numbers do not compare",
    _ROUGH,
)
_OF_TREND = (
    "99% interval: of the median over rounds (or energy windows), as in asv; runs may differ by more",
    _VERSUS,
    _ROUGH,
)


def value(trend: Trend, number: float | None, digits: int = 3) -> str:
    """Formats a number of a trend in its unit; `digits` apply to times and energies."""
    return spec_of(trend.series.metric).to_text(number, unit_of_series(trend.series), digits)


def trends_page(
    endings: Sequence[Ending], store: str, runs: int, commits: int, skipped: Counts, options: str = ""
) -> Page:
    """Makes a line for each series and cell, by machine and interpreter.

    `skipped` counts the runs left out, by reason; `options` are those with which a command finds the same store.
    """
    counts = f"{count_of(len(endings), 'series', 'series')}, {count_of(runs, 'run')} of {count_of(commits, 'commit')}"
    cols: Cols[Ending] = [
        Col("series", "trend.name"),
        Col("points", "points", show=str),
        Col("last", lambda ending: ending.last.commit[:8]),
        Col("value", lambda ending: _show_figure(ending.trend, ending.last), number=True),
        Col("change", lambda ending: _change(ending.last, ending.before), number=True),
    ]
    parts = []
    for place, neighbours in itertools.groupby(endings, key=lambda ending: where(ending.trend)):
        parts.append(Part("series", "", (table("series", place, cols, neighbours),)))
    if endings:
        # Names have brackets, which shells expand.
        name = shlex.quote(endings[0].trend.name)
        parts.append(_next("one of them, commit by commit", f"fp8bench history show {name}{options}"))
    return Page(f"{store}: {counts}", "", (*parts, *_left_out(skipped)), _OF_LIST if endings else ())


def trend_page(trends: Sequence[Trend], description: str) -> Page:
    """Shows one series, commit by commit, on every machine and interpreter."""
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
        parts.append(Part("trend", "", (table("trend", where(trend), cols, _figure_rows(trend)),)))
    return Page(trends[0].name, "", tuple(parts), _OF_TREND)


def run_row(run: Run, being_written: bool, options: str = "") -> tuple[Field, ...]:
    """Returns a run as a row of the table of runs, so that the run need not stay in memory."""
    commit = str(run.environment.get("commit") or "none")[:8]
    # An unknown state counts as changed.
    if run.environment.get("dirty") is not False and commit != "none":
        commit += "+dirty"
    by_status = Counter(record.status for record in run.records)
    remark = ""
    if not run.finished and being_written:
        remark = "being measured now"
    elif not run.finished:
        missing, _ = count_missing(run)
        lacking = f"; {count_of(missing, 'case has', 'cases have')} no record" if missing else ""
        remark = f"unfinished{lacking}: fp8bench suite --resume {run.id}{options}"
    words = (
        run.id,
        run.started[:19].replace("T", " ") or units.NONE,
        commit,
        run.origin,
        run.request.suite,
        *(str(by_status[status]) for status in (Status.OK, Status.SKIPPED, Status.FAILED)),
        str(run.environment.get("machine") or units.NONE),
        remark,
    )
    return tuple(map(Field, words))


def runs_page(
    rows: Sequence[tuple[Field, ...]],
    store: str,
    skipped: Counts,
    options: str = "",
    kept: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Page:
    """Shows the runs in the order given, and lines on other stored results, by kind.

    `options` are those with which a command finds the same store.
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
    for kind, lines in kept.items():
        parts += list_of(f"{kind}s", f"{kind}s (UTC), newest first", lines)
    parts += [_next("one of them", f"fp8bench show {rows[0][0].text}{options}")] if rows else []
    return Page(f"{store}: {count_of(len(rows), 'run')}, newest first", "", (*parts, *_left_out(skipped)))


def faults_page(faults: Sequence[Fault], sound: int, files: int, store: str) -> Page:
    broken = sum(fault.broken for fault in faults)
    head = f"{store}: {count_of(broken, 'thing is', 'things are')} broken" if broken else f"{store}: nothing is broken"
    parts: list[Part] = []
    for title, is_broken in (("broken", True), ("worth knowing", False)):
        lines = (f"{fault.path}: {fault.what}. {fault.remedy}." for fault in faults if fault.broken is is_broken)
        parts += list_of(title, title, lines)
    return Page(head, "", (*parts, Part("sound", "", (Text(f"sound: {sound} of {files} run files"),))))


def rebuilt_page(store: str, files: int, series: int, runs: int, skipped: Counts) -> Page:
    counts = f"{count_of(files, 'file')} of asv's, {count_of(series, 'benchmark')}, from {count_of(runs, 'run')}"
    return Page(f"{store}: made {counts}", "", tuple(_left_out(skipped)))


def joined_page(title: str, counts: Counts) -> Page:
    return Page(title, "", (), facts=tuple((name, str(count)) for name, count in counts.items()))


def _next(words: str, command: str) -> Part:
    return Part("summary", "", (Text(words), Code(command)))


def count_of(count: int, word: str, words: str = "") -> str:
    """Returns '1 run', '2 runs'; `words` is an irregular plural."""
    return f"{count} {word if count == 1 else words or word + 's'}"


def where(trend: Trend) -> str:
    """Returns 'on box (AMD EPYC, 2 CPUs), /venv/bin/python'."""
    machine = trend.machine
    cpus = f"{machine['num_cpu']} CPUs" if machine.get("num_cpu") else ""
    facts = ", ".join(str(fact) for fact in (machine.get("gpu"), machine.get("cpu"), cpus) if fact)
    return f"on {machine.get('machine')}{f' ({facts})' if facts else ''}, {trend.python}"


def _show_figure(trend: Trend, figure: Figure, digits: int = 3) -> str:
    if figure.value is None:
        return {Status.FAILED: "FAILED", Status.SKIPPED: "skipped"}.get(figure.status, units.NONE)
    return (_HASTY if figure.hasty else "") + value(trend, figure.value, digits)


def _change(figure: Figure, previous: Figure | None) -> str:
    if previous is None or figure.value is None or previous.value is None:
        return units.NONE
    if figure.version != previous.version:
        return "new version"
    if figure.source != previous.source:
        return _NEW_SOURCE
    # These have no ratio.
    if previous.value == 0 or not (math.isfinite(previous.value) and math.isfinite(figure.value)):
        if figure.value == previous.value:
            return units.change(1.0)
        return units.NONE
    return (_HASTY if figure.hasty or previous.hasty else "") + units.change(figure.value / previous.value)


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
        # 1. Put the conditions that rows share on a line above them.
        news = []
        if figure.version != version:
            news.append(f"version {version} -> {figure.version}: earlier numbers do not compare")
        version = figure.version
        if previous is not None and figure.value is not None and previous.under != figure.under:
            news += _new_conditions(previous.under, figure.under)
        conditions = "; ".join(news) or conditions
        # 2. Show the figure, and the change if it compares with the previous one.
        change = units.NONE
        if previous is not None and (previous.version, previous.source) == (figure.version, figure.source):
            change = _change(figure, previous)
        interval = None
        if figure.low is not None:
            interval = f"[{value(trend, figure.low, _CLOSE)}, {value(trend, figure.high, _CLOSE)}]"
        median = _show_figure(trend, figure, _CLOSE)
        reason = f"{median}: {figure.reason}" if figure.value is None and figure.reason else ""
        yield _FigureRow(figure, conditions, median, interval, change, reason)
        if figure.value is not None:
            previous = figure


def _new_conditions(previous: Conditions, current: Conditions) -> Iterator[str]:
    old = dict(previous)
    new = dict(current)
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    for name in changed:
        # The hash of torch follows from its version.
        if name != "torch_git" or "torch" not in changed:
            yield f"{name} {_condition(old.get(name)):.28} -> {_condition(new.get(name)):.28}"


def _condition(value: object) -> str:
    return "none" if value is None else " ".join(str(value).split())


def _left_out(skipped: Counts) -> list[Part]:
    reasons = sorted(skipped.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST_WORDS]
    return list_of("left", "not in it", (f"{count_of(count, 'run')}: {reason}" for reason, count in reasons))
