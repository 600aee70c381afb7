"""What a case sustains: the time of its steps in turns of seconds, at the clock that the device keeps for it then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from fp8bench.analysis.compare.interval import quantile
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.model import Finding, Interval, Level, Record, SustainedTurn

# Fewer turns have no interval: two say nothing of how far turns of the same code lie apart.
LEAST_TURNS = 3


@dataclass(frozen=True)
class Sustained:
    """Seconds of a step: the middle turn, the fastest and the slowest; the clock and the power in them.

    `settled` are the turns before which clock and temperature stood still, None where nobody could tell. `change` is
    its time over that in slots of some milliseconds.
    """

    seconds: float
    low: float
    high: float
    turns: int
    settled: int | None = None
    clock: float | None = None
    watts: float | None = None
    change: float | None = None


def sustained_samples(record: Record) -> tuple[float, ...]:
    """Seconds of a step, one figure a turn."""
    return tuple(_step_seconds(turn) for turn in _sound(record))


def sustained_figures(record: Record, finding: Finding | None) -> Sustained | None:
    """What its turns say; None without any."""
    turns, seconds = _sound(record), sustained_samples(record)
    if not turns:
        return None
    slots = finding.median_seconds if finding is not None else None
    courses = [turn.settling for turn in turns if turn.settling is not None]
    return Sustained(
        median(seconds), min(seconds), max(seconds), len(turns),
        sum(course.settled for course in courses) if courses else None,
        _middle([turn.clock for turn in turns]), _middle([turn.watts for turn in turns]),
        median(seconds) / slots if slots else None,
    )  # fmt: skip


def sustained_ratio(record: Record, reference: Record | None) -> Interval | None:
    """Its time over the reference's, paired by rounds of turns; with fewer than three the range that they lie in.

    None for the reference, for emulations, whose time is no speed, and for what ran at another time.
    """
    if reference is None or record.is_reference or {record.support.level, reference.support.level} != {Level.NATIVE}:
        return None
    if not record.paired or record.paired_with is not None:
        return None
    pairs = zip(sustained_samples(record), sustained_samples(reference), strict=False)
    logs = [math.log(own / base) for own, base in pairs]
    if not logs:
        return None
    point = fmean(logs)
    if len(logs) < LEAST_TURNS:
        return Interval(math.exp(point), math.exp(min(logs)), math.exp(max(logs)), 0.0)
    reach = quantile(FINAL_LEVEL, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(point), math.exp(point - reach), math.exp(point + reach), FINAL_LEVEL)


def _sound(record: Record) -> list[SustainedTurn]:
    """Those that are numbers: runs are read from files, too."""
    return [one for one in record.sustained if one.steps > 0 and one.seconds and 1e-12 < _step_seconds(one) < 1e9]


def _step_seconds(turn: SustainedTurn) -> float:
    return sum(turn.seconds) / (turn.steps * len(turn.seconds))


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
