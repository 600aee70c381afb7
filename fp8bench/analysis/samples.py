"""The samples of a case that a history stores: one per round, so that neighbours do not repeat each other.

A round's figure is the fastest of its calls, cell by cell, so that the phases of a round sum to its step. Calls within
a slot follow each other within microseconds and are therefore alike; as samples they would make every interval of a
median too narrow.

On a busy machine even the fastest call may have waited for a core, which the mean over all calls leaves out: a fastest
call of 21.5 ms had a mean of 3.51 ms. So a round's figure is at most the mean of its calls.

The sustained time of a case is that of steps run for seconds in a row, at the clock that the device then has. A run
without such turns has the time of its energy windows, if the power cap or the clock gave them another speed than slots.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from fp8bench.analysis.compare.interval import mean_with_reach
from fp8bench.analysis.stats import Floats
from fp8bench.analysis.verdicts import FINAL_LEVEL, cells, common_rounds, fewest_calls, means
from fp8bench.model import Finding, Interval, Level, Record, SustainedTurn, Timing
from fp8bench.model.consumed import POWER_CAP

# The rounding error of summing the same numbers in a different order.
_ROUNDING = 1e-9
T = TypeVar("T")


def _remember_last(make: Callable[[Timing], T]) -> Callable[[Timing], T]:
    """Caches the results of the latest timings: several figures use each, and a reference is used for every case."""
    results: deque[tuple[Timing, T]] = deque(maxlen=4)

    def of_timing(timing: Timing) -> T:
        for cached, value in results:
            if cached is timing:
                return value
        value = make(timing)
        results.append((timing, value))
        return value

    return of_timing


def step_samples(timing: Timing) -> tuple[float, ...]:
    return tuple(_rounds(timing).sum(axis=1).tolist()) if timing.slots else ()


def mean_sample(timing: Timing) -> tuple[float, ...]:
    """Returns the mean seconds of a step over all calls: one value, since a median of means would hide rare calls."""
    return (_mean_of(timing, [slot.round for slot in timing.slots]),) if timing.slots else ()


def phase_samples(timing: Timing, phase: str) -> tuple[float, ...]:
    """Returns the seconds of one phase in each round; () if the step has no such phase."""
    places = [place for place, name in enumerate(timing.segments.phases) if name == phase]
    if not timing.slots or not places:
        return ()
    rounds = _rounds(timing)
    return tuple((rounds[:, places].sum(axis=1) if len(places) > 1 else rounds[:, places[0]]).tolist())


def relative_samples(record: Record, reference: Record | None) -> tuple[float, ...]:
    """Returns the time over the reference's in the same round, by both entries of the reference if it has two.

    () for the reference itself, without common rounds, or if either side is emulated, which has no speed.
    """
    entries = [_by_round(entry) for entry in _entries(record, reference)]
    if record.timing is None or not entries:
        return ()
    samples = []
    for number, seconds in _by_round(record.timing).items():
        bases = [entry.get(number) for entry in entries]
        if all(bases):  # a clock may not see a step
            samples.append(seconds / _geometric_mean([base for base in bases if base]))
    return tuple(samples)


def _geometric_mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else math.prod(values) ** (1 / len(values))


def relative_mean_sample(record: Record, reference: Record | None) -> tuple[float, ...]:
    """Like relative_samples, but with the mean over all calls: a single value."""
    entries = _entries(record, reference)
    if record.timing is None or not entries or not (rounds := common_rounds([record.timing, *entries])):
        return ()
    base = _geometric_mean([_mean_of(entry, rounds) for entry in entries])
    return (_mean_of(record.timing, rounds) / base,)


def _entries(record: Record, reference: Record | None) -> list[Timing]:
    """Returns the timings of the reference in the rounds of the case."""
    if reference is None or record.is_reference or not record.paired:
        return []
    if not record.support.level == reference.support.level == Level.NATIVE:
        return []
    base, control = record.paired_with, record.control
    if base is None:
        base, control = reference.timing, reference.control
    return [timing for timing in (base, control) if timing is not None and timing.slots] if base else []


def phase_medians(timing: Timing) -> dict[str, tuple[float, float]]:
    """Returns for each phase the median over all calls of its seconds, and of its share of the call.

    Medians of parts do not sum to the median of the whole, as best cases do.
    """
    calls = np.array(list(chain.from_iterable(slot.calls_ns for slot in timing.slots)), dtype=np.float64)
    if not len(calls):
        return {}
    totals = calls.sum(axis=1)
    phases = np.array(timing.segments.phases)
    medians = {}
    for phase in dict.fromkeys(timing.segments.phases):
        seconds = calls[:, phases == phase].sum(axis=1)
        shares = np.divide(seconds, totals, out=np.zeros_like(totals), where=totals > 0)
        medians[phase] = float(np.median(seconds)) * 1e-9, float(np.median(shares))
    return medians


@_remember_last
def _by_round(timing: Timing) -> dict[int, float]:
    return dict(zip((slot.round for slot in timing.slots), step_samples(timing), strict=True))


@_remember_last
def _means(timing: Timing) -> Floats:
    return means(timing, [slot.round for slot in timing.slots])


@_remember_last
def _mean_of_all(timing: Timing) -> float:
    return float(_means(timing).mean())


def _mean_of(timing: Timing, rounds: Sequence[int]) -> float:
    return _mean_of_all(timing) if len(rounds) == len(timing.slots) else float(means(timing, rounds).mean())


@_remember_last
def _rounds(timing: Timing) -> Floats:
    """Returns seconds by round and cell, using equally many calls of each slot, since a minimum over more is lower.

    They are scaled down to the slot's mean over all calls without waiting, if that is lower.
    """
    fastest = cells(timing, fewest_calls(timing))
    steps, most = fastest.sum(axis=1), _means(timing)
    beyond = steps > most * (1 + _ROUNDING)
    if not beyond.any():
        return fastest
    scale: Floats = np.divide(most, steps, out=np.ones_like(steps), where=beyond)[:, None]
    return np.multiply(fastest, scale, dtype=np.float64)


# Clocks of one device waver by 1% from look to look.
_MOVED = 0.02
# Fewer turns have no interval: two do not show how far turns of the same code differ.
LEAST_TURNS = 3


@dataclass(frozen=True)
class Sustained:
    """Seconds per step in turns of several seconds: median, fastest and slowest; and the clock and power in them.

    `settled` counts the turns until clock and temperature had settled, None if unknown. `change` is the step's time
    over that in slots of a few milliseconds.
    """

    seconds: float
    low: float
    high: float
    turns: int
    settled: int | None = None
    clock: float | None = None
    watts: float | None = None
    change: float | None = None
    by_energy_windows: bool = False


def sustained_samples(record: Record) -> tuple[float, ...]:
    """Returns seconds per step, one value per turn."""
    return tuple(map(_step_seconds, _sound_turns(record)))


def is_at_another_clock(record: Record) -> bool:
    """Whether the power cap held the clock back during a native case's energy windows, or it was not that of slots."""
    windows = record.energy.windows if record.energy is not None else ()
    if record.support.level is not Level.NATIVE or record.timing is None:
        return False
    clock, slots_clock = _median([window.sm_clock for window in windows]), record.timing.clock
    has_moved = bool(clock and slots_clock) and abs(clock / slots_clock - 1) > _MOVED  # type: ignore[operator]
    return has_moved or any((window.throttle or 0) & POWER_CAP for window in windows)


def sustained_figures(record: Record, finding: Finding | None) -> Sustained | None:
    turns, seconds = _sound_turns(record), sustained_samples(record)
    if not turns or not (record.sustained or is_at_another_clock(record)):
        return None
    slots = finding.median_seconds if finding is not None else None
    courses = [turn.settling for turn in turns if turn.settling is not None]
    return Sustained(
        median(seconds),
        min(seconds),
        max(seconds),
        len(turns),
        sum(course.settled for course in courses) if courses else None,
        _median([turn.clock for turn in turns]),
        _median([turn.watts for turn in turns]),
        median(seconds) / slots if slots else None,
        not record.sustained,
    )


def sustained_ratio(record: Record, reference: Record | None) -> Interval | None:
    """Returns its time over the reference's, paired by rounds of turns; with fewer than three, their range.

    None for the reference, for emulations, which have no speed, and for cases run at another time.
    """
    if reference is None or record.is_reference or {record.support.level, reference.support.level} != {Level.NATIVE}:
        return None
    if not record.paired or record.paired_with is not None:
        return None
    pairs = zip(sustained_samples(record), sustained_samples(reference), strict=False)
    logs = [math.log(seconds / base) for seconds, base in pairs]
    if not logs:
        return None
    if len(logs) < LEAST_TURNS:
        return Interval(math.exp(fmean(logs)), math.exp(min(logs)), math.exp(max(logs)), 0.0)
    point, reach = mean_with_reach(logs)
    return Interval(math.exp(point), math.exp(point - reach), math.exp(point + reach), FINAL_LEVEL)


def _sound_turns(record: Record) -> list[SustainedTurn]:
    """Returns turns, or else energy windows, without impossible numbers, which an edited file may contain."""
    turns: Sequence[SustainedTurn] = record.sustained
    if not turns and record.energy is not None and not record.support.is_emulated:
        turns = [
            SustainedTurn(
                window.steps, (window.seconds,), None, window.sm_clock, window.joules / max(window.seconds, 1e-12)
            )
            for window in record.energy.windows
        ]
    return [turn for turn in turns if turn.steps > 0 and turn.seconds and 1e-12 < _step_seconds(turn) < 1e9]


def _step_seconds(turn: SustainedTurn) -> float:
    return sum(turn.seconds) / (turn.steps * len(turn.seconds))


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None
