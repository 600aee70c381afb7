"""Shows where figures changed over a history of commits: as text with the worst changes first, and as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.steps.change_points import FALSE_POSITIVE_STEP_SHARE
from fp8bench.analysis.steps.changes import ChangeSearchResult, ChangeState, TrendChange
from fp8bench.model import Label
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import show_change
from fp8bench.report.elements import Code, Elements, Page, Part, Text, Tone
from fp8bench.report.panels import join_parts, together
from fp8bench.report.terminal.history import count_series, describe_machine, show_trend_value, sort_reason_counts
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.words.naming import join_words, many

_CHANGE_COLUMNS: tuple[Col[tuple[str, TrendChange]], ...] = (
    Col("commits", lambda row: row[0], shared=True), Col("series", lambda row: row[1].trend.name),
    Col("before", lambda row: show_trend_value(row[1].trend, row[1].comparison.before), number=True),
    Col("after", lambda row: show_trend_value(row[1].trend, row[1].comparison.after), number=True),
    Col("change", lambda row: show_change(row[1].comparison.ratio),
        tone=lambda row: Tone.BAD if row[1].is_worse else Tone.GOOD),
    # A probability that is so small that the float is 0 is shown as '<0.01%', not as missing.
    Col("chance", lambda row: row[1].comparison.p_value,
        show=lambda chance: units.share(max(chance, sys.float_info.min))),
    Col("notes", lambda row: "\n".join(_list_change_notes(row[1])), below=True),
)  # fmt: skip
_CHANGE_COLUMN_LEGEND = (
    "change: from the level before the step to the level after it, with a 99% interval; less is better everywhere"
)
_MEASUREMENT_TIMES_LEGEND = (
    "these figures were measured at different times: before you blame a commit, measure it and the one before it "
    "again, or duel them"
)
_EXACT_COUNTS_LEGEND = (
    "FLOPs, bytes and launches are counted, not timed: any change raises an alarm, because the step does different work"
)
_CHANGE_TERMS_LEGEND = (
    "after A and up to B: the step lies after commit A, and at or before commit B",
    _MEASUREMENT_TIMES_LEGEND,
    _EXACT_COUNTS_LEGEND,
    "contradicted: the mean over all calls changed the opposite way, so the fastest calls prove nothing",
    "reverted: a later step took at least half of it back",
    "old version: the work or the method has changed since, and numbers of today do not compare",
)


def make_changes_page(
    search_result: ChangeSearchResult, store: str, with_closed: bool = False, store_options: str = ""
) -> Page:
    """Returns the page of changes: open ones, and those that the mean over all calls contradicts. `with_closed` adds
    acknowledged, reverted and outdated changes. `store_options` are the options with which another command finds the
    same store.
    """
    # Name the machine only if the history has several machines.
    machines = {(change.trend.machine.get("machine"), change.trend.python) for change in search_result.changes}
    parts = []
    groups = _group_changes_by_title(search_result)
    for title in _SECTION_TITLES if with_closed else _SECTION_TITLES[:4]:
        # List changes between the same two commits next to each other.
        changes_by_commits = together(
            (_describe_commits(change, len(machines) > 1), change) for change in groups[title]
        )
        rows = []
        for commits, changes in changes_by_commits.items():
            rows += [(commits, change) for change in changes]
        if rows:
            parts.append(Part("changes", title, (table(title, "", _CHANGE_COLUMNS, rows),)))
    skipped_series_texts = (
        f"{count_series(count)}: {reason}" for reason, count in sort_reason_counts(search_result.skip_count_by_reason)
    )
    parts += make_list_part("left", "not looked at", skipped_series_texts)
    # Print commands for the first change with an alarm only. Readers can adapt them to other changes.
    first_alarming_change = next((change for change in search_result.changes if change.alarms), None)
    if first_alarming_change is not None:
        parts.append(Part("summary", "", tuple(_suggest_next_commands(first_alarming_change, store_options))))
    return Page(
        f"{store}: {_summarize_search(search_result)}", "", tuple(parts), _legend_lines(search_result, with_closed)
    )


def _describe_commits(change: TrendChange, with_machine: bool) -> str:
    """Returns the commits between which a figure changed.

    An example: 'after 00000018 and up to 0000001a, one of 2 commits, most likely 0000001a'.
    """
    commit_range_text = f"after {change.comparison.since[:8]} and up to {change.comparison.until[:8]}"
    if change.commit_count > 1:
        unmeasured_text = (
            f" ({change.unmeasured_count} of them without a comparable figure)" if change.unmeasured_count else ""
        )
        commit_range_text += (
            f", one of {change.commit_count} commits{unmeasured_text}, most likely {change.first_commit[:8]}"
        )
    return f"{commit_range_text}, {describe_machine(change.trend)}" if with_machine else commit_range_text


def _suggest_next_commands(change: TrendChange, store_options: str) -> Elements:
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


def changes_document(search_result: ChangeSearchResult) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "looked_at": search_result.searched_trend_count,
        "counted": search_result.exact_count_trends,
        "left": dict(search_result.skip_count_by_reason),
        "changes": [_make_change_document(change) for change in search_result.changes],
    }


def _make_change_document(change: TrendChange) -> dict[str, object]:
    return {
        "series": change.trend.name,
        "machine": change.trend.machine["machine"],
        "python": change.trend.python,
        "version": change.version,
        **encode(change.comparison),
        "first": change.first_commit,
        "commits": change.commit_count,
        "unmeasured": change.unmeasured_count,
        "state": change.state.value,
        "ack": encode(change.ack),
    }


def _summarize_search(search_result: ChangeSearchResult) -> str:
    num_series = search_result.searched_trend_count + search_result.exact_count_trends
    if not num_series:
        return "no series was long enough to look for changes"
    groups = _group_changes_by_title(search_result)
    count_texts = [
        many(len(groups[_REGRESSIONS_TITLE]), "regression"),
        many(len(groups[_IMPROVEMENTS_TITLE]), "improvement"),
    ]
    if groups[_DECREASED_COUNTS_TITLE]:
        count_texts.insert(1, f"{many(len(groups[_DECREASED_COUNTS_TITLE]), 'count')} that went down")
    num_acknowledged_changes = len(groups[ChangeState.ACKNOWLEDGED])
    num_ignored_series = sum(search_result.skip_count_by_reason.values())
    return join_parts(
        f"{join_words(count_texts)} in {count_series(num_series)}",
        f"{many(num_acknowledged_changes, 'change')} acknowledged" if num_acknowledged_changes else "",
        f"{count_series(num_ignored_series)} not looked at" if num_ignored_series else "",
        separator="; ",
    )


_REGRESSIONS_TITLE = "regressions"
# If a step runs fewer operations, this may be an improvement, or the step may do different work.
_DECREASED_COUNTS_TITLE = "counts that went down"
_IMPROVEMENTS_TITLE = "improvements"
# The titles of the sections of changes. Unless closed changes are requested, only the first four are printed.
_SECTION_TITLES = (
    _REGRESSIONS_TITLE,
    _DECREASED_COUNTS_TITLE,
    _IMPROVEMENTS_TITLE,
    ChangeState.CONTRADICTED,
    ChangeState.ACKNOWLEDGED,
    ChangeState.REVERTED,
    ChangeState.OLD_VERSION,
)


def _group_changes_by_title(search_result: ChangeSearchResult) -> dict[str, list[TrendChange]]:
    """Groups changes by the title of the report section that lists them. An open change is in the section for its
    direction, any other change in the section for its state.
    """
    groups: dict[str, list[TrendChange]] = {title: [] for title in _SECTION_TITLES}
    for change in search_result.changes:
        direction = (
            _REGRESSIONS_TITLE
            if change.is_worse
            else _DECREASED_COUNTS_TITLE
            if change.is_counted
            else _IMPROVEMENTS_TITLE
        )
        groups[direction if change.state is ChangeState.OPEN else change.state].append(change)
    return groups


def _list_change_notes(change: TrendChange) -> Iterator[str]:
    comparison = change.comparison
    if change.is_counted and comparison.why:
        yield comparison.why
    if Label.UNEVEN in comparison.labels:
        yield f"{Label.UNEVEN}: {comparison.why}"
    if not change.current:
        yield "the last commits were measured under different conditions, which may explain the change"
    if change.ack is not None:
        ack_reason_suffix = f": {change.ack.because}" if change.ack.because else ""
        yield f"acknowledged {change.ack.when[:10]}{ack_reason_suffix}"


def _legend_lines(search_result: ChangeSearchResult, with_closed: bool) -> list[str]:
    change_states = {change.state for change in search_result.changes}
    if ChangeState.OPEN not in change_states and not (with_closed and change_states):
        return []
    chance_legend = "chance: that a flat series shows such a step or a clearer one"
    if expected_false_alarms := round(search_result.searched_trend_count * FALSE_POSITIVE_STEP_SHARE):
        flat_series = f"of {search_result.searched_trend_count} flat series"
        chance_legend += f"; {flat_series} about {expected_false_alarms} would show such a step"
    return [_CHANGE_COLUMN_LEGEND, chance_legend, *_CHANGE_TERMS_LEGEND]
