"""Changes that somebody has acknowledged: which ack is of which change, and when one goes further and alarms again."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace

from fp8bench.analysis.steps.changes import Change, Found, State, worst_first
from fp8bench.model import Ack

# A level may turn out to be so much further off than it looked when it was acknowledged, or so many standard errors.
_FURTHER = 0.02
_ERRORS = 3.0
# Nothing at all is less than any figure.
_LEAST = 1e-300


def acknowledged(found: Found, acks: Sequence[Ack]) -> Found:
    """The same with the acks that cover open changes."""
    changes = []
    for change in found.changes:
        ack = next((one for one in reversed(acks) if covers(one, change)), None) if change.state is State.OPEN else None
        changes.append(change if ack is None else replace(change, state=State.ACKNOWLEDGED, ack=ack))
    return replace(found, changes=tuple(sorted(changes, key=worst_first)))


def ack_of(change: Change, when: str, because: str) -> Ack:
    trend, one = change.trend, change.comparison
    assert one.before is not None and one.after is not None
    return Ack(
        secrets.token_hex(4), trend.series.name, trend.cell, str(trend.machine["machine"]), trend.python,
        change.version, one.direction, one.since, one.until, one.before, one.after, when, because,
    )  # fmt: skip


def covers(ack: Ack, change: Change) -> bool:
    """Whether an ack is of that change: the same trend, ranges that overlap, and a level that is not further off."""
    trend, comparison = change.trend, change.comparison
    assert comparison.before is not None and comparison.after is not None
    here = (
        trend.series.name, trend.cell, trend.machine["machine"], trend.python, change.version, comparison.direction,
    )  # fmt: skip
    if (ack.series, ack.cell, ack.machine, ack.python, ack.version, ack.direction) != here:
        return False
    sign = 1 if change.is_worse else -1
    if sign * (_log(comparison.after) - _log(ack.after)) > (
        0 if change.is_counted else max(_FURTHER, _ERRORS * change.error)
    ):
        return False
    if sign * (_log(comparison.before) - (_log(ack.before) + _log(ack.after)) / 2) > 0:
        return False  # it begins where the other one ended
    places = {figure.commit: place for place, figure in enumerate(trend.figures)}
    ends = [places.get(commit) for commit in (ack.since, ack.until)]
    low, high = places[comparison.since], places[comparison.until]
    since, until = (end if end is not None else other for end, other in zip(ends, (low, high), strict=True))
    return ends != [None, None] and max(since, low) < min(until, high)


def _log(level: float) -> float:
    return math.log(max(level, _LEAST))
