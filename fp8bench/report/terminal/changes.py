"""Changes over a history as text, the worst first, and as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.steps.change_points import BY_CHANCE
from fp8bench.analysis.steps.changes import Change, ChangeState, Found
from fp8bench.model import Label
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import show_change
from fp8bench.report.elements import Code, Elements, Page, Part, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.history import count_of, value, where
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import join_words

_COLS: tuple[Col[tuple[str, Change]], ...] = (
    Col("commits", lambda row: row[0], shared=True), Col("series", lambda row: row[1].trend.name),
    Col("before", lambda row: value(row[1].trend, row[1].comparison.before), number=True),
    Col("after", lambda row: value(row[1].trend, row[1].comparison.after), number=True),
    Col("change", lambda row: show_change(row[1].comparison.ratio),
        tone=lambda row: Tone.BAD if row[1].is_worse else Tone.GOOD),
    # A chance is never shown as none.
    Col("chance", lambda row: row[1].comparison.p_value,
        show=lambda chance: units.share(max(chance, sys.float_info.min))),
    Col("notes", lambda row: "\n".join(_notes(row[1])), below=True),
)  # fmt: skip
_RATIO = "change: from the level before the step to the level after it, with a 99% interval; less is better everywhere"
_RANGE = "after, up to: the step lies after the one commit, and not after the other"
_WORTH = (
    "these figures were measured at different times: before you blame a commit, measure it and the one before it "
    "again, or duel them"
)
_COUNTED = (
    "FLOPs, bytes and launches are counted, not timed: any change raises an alarm, because the step does different work"
)
_CONTRADICTED = "contradicted: the mean over all calls changed the opposite way, so the fastest calls prove nothing"
_REVERTED = "reverted: a later step took at least half of it back"
_OLD = "old version: the work or the method has changed since, and numbers of today do not compare"


def page_of(search: Found, store: str, everything: bool = False, options: str = "") -> Page:
    """Returns the open changes in both directions; with `everything` all other changes as well.

    `options` are those with which a command finds the same store.
    """
    # The machine is only named where there is more than one.
    several = len({(change.trend.machine.get("machine"), change.trend.python) for change in search.changes}) > 1
    parts = []
    for title, changes in _sections(search, everything):
        # Changes between the same commits are grouped.
        rows: list[tuple[str, Change]] = []
        for place, members in together((_describe_place(change, several), change) for change in changes).items():
            rows += [(place, change) for change in members]
        if rows:
            parts.append(Part("changes", title, (table(title, "", _COLS, rows),)))
    reasons = sorted(search.left.items(), key=lambda pair: (-pair[1], pair[0]))
    ignored = (f"{count_of(count, 'series', 'series')}: {reason}" for reason, count in reasons)
    parts += list_of("left", "not looked at", ignored)
    # One example is enough to show the commands.
    alarming = next((change for change in search.changes if change.alarms), None)
    if alarming is not None:
        parts.append(Part("summary", "", tuple(_what_to_do(alarming, options))))
    return Page(f"{store}: {_summarize(search)}", "", tuple(parts), _legend(search, everything))


def _describe_place(change: Change, with_machine: bool) -> str:
    """Returns the commits between which it lies: 'after 00000018 and up to 0000001a, one of 2 commits, most likely
    0000001a'."""
    words = f"after {change.comparison.since[:8]} and up to {change.comparison.until[:8]}"
    if change.commits > 1:
        lacking = f" ({change.unmeasured} of them without a figure that compares)" if change.unmeasured else ""
        words += f", one of {change.commits} commits{lacking}, most likely {change.first[:8]}"
    if with_machine:
        return f"{words}, {where(change.trend)}"
    return words


def _what_to_do(change: Change, options: str) -> Elements:
    name = shlex.quote(change.trend.name)
    comparison = change.comparison
    yield Text("the first of them, commit by commit")
    yield Code(f"fp8bench history show {name}{options}")
    # Counts are exact, so measuring again would add nothing.
    if change.is_counted:
        yield Text("all figures of both commits, judged with what is stored")
        yield Code(f"fp8bench gate {comparison.since[:8]} {comparison.until[:8]} --no-rerun{options}")
    else:
        yield Text(
            f"{comparison.until[:8]}, when it is checked out, against {comparison.since[:8]}, in the same rounds"
        )
        yield Code(f"fp8bench duel suite {comparison.suite} --against {comparison.since[:8]}{options}")
    yield Text("it is known, and stays")
    yield Code(f"fp8bench history ack {name}{options}")


def value_of(search: Found) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "looked_at": search.looked_at,
        "counted": search.counted,
        "left": dict(search.left),
        "changes": [_change_value(change) for change in search.changes],
    }


def _change_value(change: Change) -> dict[str, object]:
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


def _summarize(search: Found) -> str:
    series = search.looked_at + search.counted
    if not series:
        return "no series was long enough to look for changes"
    worse = fewer = better = acknowledged = 0
    for change in search.changes:
        is_open = change.state is ChangeState.OPEN
        worse += is_open and change.is_worse
        fewer += is_open and _is_fewer(change)
        better += is_open and not change.is_worse and not _is_fewer(change)
        acknowledged += change.state is ChangeState.ACKNOWLEDGED
    parts = [count_of(worse, "regression")]
    if fewer:
        parts.append(f"{count_of(fewer, 'count')} that went down")
    parts.append(count_of(better, "improvement"))
    remark = f"; {count_of(acknowledged, 'change')} acknowledged" if acknowledged else ""
    return f"{join_words(parts)} in {count_of(series, 'series', 'series')}{remark}"


def _is_fewer(change: Change) -> bool:
    """Whether a count decreased: an improvement perhaps, or different work."""
    return change.is_counted and not change.is_worse


def _sections(search: Found, everything: bool) -> Iterator[tuple[str, list[Change]]]:
    by_state = together((change.state, change) for change in search.changes)
    current = by_state.get(ChangeState.OPEN, [])
    yield "regressions", [change for change in current if change.is_worse]
    yield "counts that went down", [change for change in current if _is_fewer(change)]
    yield "improvements", [change for change in current if not change.is_worse and not _is_fewer(change)]
    for state in ChangeState:
        if state is ChangeState.CONTRADICTED or (everything and state is not ChangeState.OPEN):
            yield state.value, by_state.get(state, [])


def _notes(change: Change) -> Iterator[str]:
    if change.is_counted and change.comparison.why:
        yield change.comparison.why
    if Label.UNEVEN in change.comparison.labels:
        yield f"{Label.UNEVEN}: {change.comparison.why}"
    if not change.current:
        yield "the last commits were measured under different conditions, which may explain the change"
    if change.ack is not None:
        because = f": {change.ack.because}" if change.ack.because else ""
        yield f"acknowledged {change.ack.when[:10]}{because}"


def _legend(search: Found, everything: bool) -> list[str]:
    states = {change.state for change in search.changes}
    if ChangeState.OPEN not in states and not (everything and states):
        return []
    by_chance = round(search.looked_at * BY_CHANCE)
    among = f"; of {search.looked_at} flat series about {by_chance} would show one" if by_chance else ""
    words = [_RATIO, f"chance: that a flat series shows such a step or a clearer one{among}", _RANGE]
    return [*words, _WORTH, _COUNTED, _CONTRADICTED, _REVERTED, _OLD]
