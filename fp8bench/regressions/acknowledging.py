"""Which acks cover which changes: a change that was accepted stops alarming, and one that goes further alarms again."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.history.acks import Ack
from fp8bench.identity import same_interpreter
from fp8bench.regressions.changes import Change, Found, State, worst_first

# A level may turn out to be so much further off than it looked when it was acknowledged, or so many standard errors.
_BAND = 0.02
_ERRORS = 3.0
# Nothing at all is less than any figure.
_NOTHING = 1e-300


def acknowledged(found: Found, acks: Sequence[Ack]) -> Found:
    """The same with the acks that cover open changes."""
    changes = sorted((_with_ack(change, acks) for change in found.changes), key=worst_first)
    return replace(found, changes=tuple(changes))


def ack_of(change: Change, when: str, because: str) -> Ack:
    """A new ack that covers a change."""
    course, one = change.course, change.comparison
    assert one.before is not None and one.after is not None
    return Ack(
        secrets.token_hex(4), course.series.name, course.cell, str(course.machine["machine"]), course.python,
        change.version, one.direction, one.since, one.until, one.before, one.after, when, because,
    )  # fmt: skip


def _with_ack(change: Change, acks: Sequence[Ack]) -> Change:
    if change.state is not State.OPEN:
        return change
    ack = next((one for one in reversed(acks) if covers(one, change)), None)
    return change if ack is None else replace(change, state=State.ACKNOWLEDGED, ack=ack)


def covers(ack: Ack, change: Change) -> bool:
    """Whether an ack is of that change: the same course, ranges that overlap, and a level that is not further off."""
    course, comparison = change.course, change.comparison
    assert comparison.before is not None and comparison.after is not None
    here = (course.series.name, course.cell, course.machine["machine"], change.version, comparison.direction)
    alike = ack.python == course.python or same_interpreter(ack.python, course.python)
    if (ack.series, ack.cell, ack.machine, ack.version, ack.direction) != here or not alike:
        return False
    sign = 1 if change.is_worse else -1
    if sign * (_log(comparison.after) - _log(ack.after)) > max(_BAND, _ERRORS * change.error):
        return False
    if sign * (_log(comparison.before) - (_log(ack.before) + _log(ack.after)) / 2) > 0:
        return False  # it begins where the other one ended
    places = {figure.commit: place for place, figure in enumerate(course.figures)}
    ends = [places.get(commit) for commit in (ack.since, ack.until)]
    low, high = places[comparison.since], places[comparison.until]
    since, until = (end if end is not None else other for end, other in zip(ends, (low, high), strict=True))
    return ends != [None, None] and max(since, low) < min(until, high)


def _log(level: float) -> float:
    return math.log(max(level, _NOTHING))
