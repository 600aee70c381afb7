"""Shows where figures changed over a history of commits: as text with the worst changes first, and as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.steps.change_points import FALSE_STEP_SHARE
from fp8bench.analysis.steps.changes import Change, ChangeState, Found
from fp8bench.model import Label
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import show_change
from fp8bench.report.elements import Code, Elements, Page, Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.history import count_noun, describe_machine, show_trend_value
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import join_words

_CHANGE_COLUMNS: tuple[Col[tuple[str, Change]], ...] = (
    Col("commits", lambda row: row[0], shared=True), Col("series", lambda row: row[1].trend.name),
    Col("before", lambda row: show_trend_value(row[1].trend, row[1].comparison.before), number=True),
    Col("after", lambda row: show_trend_value(row[1].trend, row[1].comparison.after), number=True),
    Col("change", lambda row: show_change(row[1].comparison.ratio),
        tone=lambda row: Tone.BAD if row[1].is_worse else Tone.GOOD),
    # If this probability rounds to zero, it is still shown as a positive number.
    Col("chance", lambda row: row[1].comparison.p_value,
        show=lambda chance: units.share(max(chance, sys.float_info.min))),
    Col("notes", lambda row: "\n".join(_change_notes(row[1])), below=True),
)  # fmt: skip
_CHANGE_LEGEND = (
    "change: from the level before the step to the level after it, with a 99% interval; less is better everywhere"
)
_COMMITS_LEGEND = "after, up to: the step lies after the one commit, and not after the other"
_REPEAT_LEGEND = (
    "these figures were measured at different times: before you blame a commit, measure it and the one before it "
    "again, or duel them"
)
_COUNTS_LEGEND = (
    "FLOPs, bytes and launches are counted, not timed: any change raises an alarm, because the step does different work"
)
_CONTRADICTED_LEGEND = (
    "contradicted: the mean over all calls changed the opposite way, so the fastest calls prove nothing"
)
_REVERTED_LEGEND = "reverted: a later step took at least half of it back"
_OLD_VERSION_LEGEND = "old version: the work or the method has changed since, and numbers of today do not compare"


def changes_page(search_result: Found, store: str, with_closed: bool = False, store_options: str = "") -> Page:
    """Returns the page of all open and contradicted changes. `with_closed` adds acknowledged, reverted and outdated
    changes. `store_options` are the options with which another command finds the same store.
    """
    # Name the machine only if the history has several machines.
    has_machines = (
        len({(change.trend.machine.get("machine"), change.trend.python) for change in search_result.changes}) > 1
    )
    parts = []
    for title, changes in _group_changes(search_result, with_closed):
        # List changes between the same two commits next to each other.
        rows: list[tuple[str, Change]] = []
        for commits, members in together(
            (_describe_commits(change, has_machines), change) for change in changes
        ).items():
            rows += [(commits, change) for change in members]
        if rows:
            parts.append(Part("changes", title, (table(title, "", _CHANGE_COLUMNS, rows),)))
    reasons = sorted(search_result.left.items(), key=lambda pair: (-pair[1], pair[0]))
    ignored_series = (f"{count_noun(count, 'series', 'series')}: {reason}" for reason, count in reasons)
    parts += list_of("left", "not looked at", ignored_series)
    # Show the commands for the first alarm only, because readers can adapt them to other changes.
    first_alarm = next((change for change in search_result.changes if change.alarms), None)
    if first_alarm is not None:
        parts.append(Part("summary", "", tuple(_next_steps(first_alarm, store_options))))
    return Page(f"{store}: {_summarize(search_result)}", "", tuple(parts), _legend(search_result, with_closed))


def _describe_commits(change: Change, with_machine: bool) -> str:
    """Returns the commits between which a figure changed.

    An example: 'after 00000018 and up to 0000001a, one of 2 commits, most likely 0000001a'.
    """
    commit_range = f"after {change.comparison.since[:8]} and up to {change.comparison.until[:8]}"
    if change.commits > 1:
        unmeasured = f" ({change.unmeasured} of them without a figure that compares)" if change.unmeasured else ""
        commit_range += f", one of {change.commits} commits{unmeasured}, most likely {change.first[:8]}"
    if with_machine:
        return f"{commit_range}, {describe_machine(change.trend)}"
    return commit_range


def _next_steps(change: Change, store_options: str) -> Elements:
    series_name = shlex.quote(change.trend.name)
    comparison = change.comparison
    yield Text("show the first of these changes, commit by commit")
    yield Code(f"fp8bench history show {series_name}{store_options}")
    # A count is exact, so measuring it again would give the same number.
    if change.is_counted:
        yield Text("judge all figures of both commits, from stored runs")
        yield Code(f"fp8bench gate {comparison.since[:8]} {comparison.until[:8]} --no-rerun{store_options}")
    else:
        yield Text(
            f"{comparison.until[:8]}, when it is checked out, against {comparison.since[:8]}, in the same rounds"
        )
        yield Code(f"fp8bench duel suite {comparison.suite} --against {comparison.since[:8]}{store_options}")
    yield Text("acknowledge a change that is meant to stay")
    yield Code(f"fp8bench history ack {series_name}{store_options}")


def changes_document(search_result: Found) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "looked_at": search_result.looked_at,
        "counted": search_result.counted,
        "left": dict(search_result.left),
        "changes": [_change_document(change) for change in search_result.changes],
    }


def _change_document(change: Change) -> dict[str, object]:
    return {
        "series": change.trend.name,
        "machine": change.trend.machine["machine"],
        "python": change.trend.python,
        "version": change.version,
        **encode(change.comparison),
        "first": change.first,
        "commits": change.commits,
        "unmeasured": change.unmeasured,
        "state": change.state.value,
        "ack": encode(change.ack),
    }


def _summarize(search_result: Found) -> str:
    num_series = search_result.looked_at + search_result.counted
    num_ignored = sum(search_result.left.values())
    if not num_series:
        return "no series was long enough to look for changes"
    worse = fewer = better = acknowledged = 0
    for change in search_result.changes:
        is_open = change.state is ChangeState.OPEN
        worse += is_open and change.is_worse
        fewer += is_open and _is_lower_count(change)
        better += is_open and not change.is_worse and not _is_lower_count(change)
        acknowledged += change.state is ChangeState.ACKNOWLEDGED
    counts = [count_noun(worse, "regression")]
    if fewer:
        counts.append(f"{count_noun(fewer, 'count')} that went down")
    counts.append(count_noun(better, "improvement"))
    remark = f"; {count_noun(acknowledged, 'change')} acknowledged" if acknowledged else ""
    if num_ignored:
        remark += f"; {count_noun(num_ignored, 'series', 'series')} not looked at"
    return f"{join_words(counts)} in {count_noun(num_series, 'series', 'series')}{remark}"


def _is_lower_count(change: Change) -> bool:
    """Returns whether a count of operations went down. The step may have improved, or may do different work."""
    return change.is_counted and not change.is_worse


def _group_changes(search_result: Found, with_closed: bool) -> Iterator[tuple[str, list[Change]]]:
    by_state = together((change.state, change) for change in search_result.changes)
    open_changes = by_state.get(ChangeState.OPEN, [])
    yield "regressions", [change for change in open_changes if change.is_worse]
    yield "counts that went down", [change for change in open_changes if _is_lower_count(change)]
    yield "improvements", [change for change in open_changes if not change.is_worse and not _is_lower_count(change)]
    for state in ChangeState:
        if state is ChangeState.CONTRADICTED or (with_closed and state is not ChangeState.OPEN):
            yield state.value, by_state.get(state, [])


def _change_notes(change: Change) -> Iterator[str]:
    if change.is_counted and change.comparison.why:
        yield change.comparison.why
    if Label.UNEVEN in change.comparison.labels:
        yield f"{Label.UNEVEN}: {change.comparison.why}"
    if not change.current:
        yield "the last commits were measured under different conditions, which may explain the change"
    if change.ack is not None:
        because = f": {change.ack.because}" if change.ack.because else ""
        yield f"acknowledged {change.ack.when[:10]}{because}"


def _legend(search_result: Found, with_closed: bool) -> list[str]:
    states = {change.state for change in search_result.changes}
    if ChangeState.OPEN not in states and not (with_closed and states):
        return []
    expected_false_alarms = round(search_result.looked_at * FALSE_STEP_SHARE)
    false_alarms_text = (
        f"; of {search_result.looked_at} flat series about {expected_false_alarms} would show one"
        if expected_false_alarms
        else ""
    )
    lines = [
        _CHANGE_LEGEND,
        f"chance: that a flat series shows such a step or a clearer one{false_alarms_text}",
        _COMMITS_LEGEND,
    ]
    return [*lines, _REPEAT_LEGEND, _COUNTS_LEGEND, _CONTRADICTED_LEGEND, _REVERTED_LEGEND, _OLD_VERSION_LEGEND]
