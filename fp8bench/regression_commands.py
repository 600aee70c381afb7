"""`fp8bench history regressions` and `ack`: which changes are open, and that one of them is known and stays."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.errors import EXIT_OK, EXIT_REGRESSION, UsageError
from fp8bench.history.acks import Ack, Undo, acks_of, append_acks, load_acks
from fp8bench.history.environments import load_renamings
from fp8bench.index.memory import Memory
from fp8bench.index.opening import History
from fp8bench.model import Course
from fp8bench.outputs import in_color
from fp8bench.regressions.acknowledging import ack_of, acknowledged
from fp8bench.regressions.changes import Change, Found, State, find_all_changes, find_changes
from fp8bench.regressions.text import changes_json, listed, render_changes
from fp8bench.stores import announce, existing_store, opened, options_of, series_meant
from fp8bench.streams import complain, say

_ANY = "*"


def regressions(arguments: argparse.Namespace) -> int:
    """Tell the open changes; the exit code says whether one of them is worse."""
    store = existing_store(arguments.store)
    announce(store, reading=False)
    found = all_changes(opened(store), store)
    if arguments.json:
        say(changes_json(found))
    else:
        say(render_changes(found, str(store), arguments.all, options_of(arguments), in_color()))
    return EXIT_REGRESSION if any(change.alarms for change in found.changes) else EXIT_OK


def all_changes(history: History, store: Path) -> Found:
    """What has changed over a store's history, and what of it was acknowledged."""
    memory = Memory(store)
    changes = find_all_changes(history, memory.steps_of_many)
    for trouble in memory.troubles:
        complain(trouble)
    return acknowledged(changes, _acks(store))


def acknowledge(arguments: argparse.Namespace) -> int:
    """Write down that changes of a series are known and stay, or that they are not any more."""
    store = existing_store(arguments.store)
    announce(store, reading=False)
    history = opened(store)
    courses = _courses(history, arguments.series, store)
    acks = _acks(store)
    found = acknowledged(find_changes(courses), acks)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if arguments.undo:
        return _undo(arguments, store, courses, acks, now)
    chosen = _chosen(arguments, found)
    append_acks(store, [ack_of(change, now, arguments.because or "") for change in chosen])
    _tell(store, "acknowledged", [(one.course.name, one.comparison.since, one.comparison.until) for one in chosen])
    return EXIT_OK


def _undo(arguments: argparse.Namespace, store: Path, courses: Sequence[Course], acks: Sequence[Ack], now: str) -> int:
    if arguments.because is not None:
        raise UsageError("--because says why a change is acknowledged, and --undo was given too. Leave one out.")
    series = {(course.series.name, course.cell) for course in courses}
    wanted = [
        one for one in acks
        if (one.series, one.cell) in series and (arguments.until is None or one.until.startswith(arguments.until))
    ]  # fmt: skip
    if not wanted:
        until = f" up to {arguments.until}" if arguments.until is not None else ""
        raise UsageError(f"nothing{until} is acknowledged of {arguments.series!r:.80}.")
    append_acks(store, [Undo(one.id, now) for one in wanted])
    names = {(course.series.name, course.cell): course.name for course in courses}
    _tell(store, "not acknowledged any more", [(names[one.series, one.cell], one.since, one.until) for one in wanted])
    return EXIT_OK


def _chosen(arguments: argparse.Namespace, found: Found) -> list[Change]:
    """The open changes that are meant: those up to a commit, or the only ones that there are."""
    still = [change for change in found.changes if change.state is State.OPEN]
    if arguments.until is not None:
        chosen = [change for change in still if change.comparison.until.startswith(arguments.until)]
        if not chosen:
            there = f" Open are:{listed(still)}" if still else " It has no open changes."
            raise UsageError(
                f"no open change of {arguments.series!r:.80} is up to the commit {arguments.until!r:.80}.{there}"
            )
    elif still:
        chosen = [change for change in still if change.is_worse] or still
    else:
        known = [change for change in found.changes if change.state is State.ACKNOWLEDGED]
        why = " What it has is acknowledged already." if known else _why_none(found)
        raise UsageError(f"{arguments.series!r:.80} has no open changes.{why}")
    if len({change.comparison.until for change in chosen}) > 1:
        raise UsageError(f"{arguments.series!r:.80} has several open changes. Give one of:{listed(chosen)}")
    return chosen


def _why_none(found: Found) -> str:
    return "" if found.looked_at or not found.left else f" Not looked at: {'; '.join(found.left)}."


def _courses(history: History, word: str, store: Path) -> Sequence[Course]:
    """The courses of the one series that a word fits, or of all that a pattern with stars fits."""
    wanted: Callable[[str], bool]
    if _ANY in word:
        pattern = re.compile(".*".join(map(re.escape, word.lower().split(_ANY))))
        wanted = lambda name: pattern.fullmatch(name.lower()) is not None  # noqa: E731
    else:
        meant = series_meant(word, history, store)
        wanted = meant.__eq__
    courses = history.courses(wanted).courses
    if not courses:
        raise UsageError(f"no series is called {word!r:.80}. `fp8bench history list` names them all.")
    return courses


def _acks(store: Path) -> list[Ack]:
    """What was acknowledged, with interpreters under the names that they have now."""
    found = load_acks(store)
    for trouble in found.troubles:
        complain(f"{acks_of(store)}: {trouble}")
    renamings = load_renamings(store)
    return [replace(one, python=renamings.name(one.python)) for one in found.acks]


def _tell(store: Path, done: str, changes: Sequence[tuple[str, str, str]]) -> None:
    lines = [f"{store}: {done}"]
    lines += [f"  {name}, after {since[:8]} and up to {until[:8]}" for name, since, until in changes]
    say("\n".join(lines) + "\n")
