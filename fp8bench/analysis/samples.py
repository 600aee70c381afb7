"""The samples of a case that a history stores, one per round.

A round's sample is computed from the fastest of its calls, separately for each part of a step. So the phases of a round
sum to its step. Calls in one slot (a timed turn of the case) follow each other within microseconds, so they are
correlated. If each call were a sample, intervals of medians would be too narrow.

On a busy machine, even the fastest call may have waited for a core, while the mean over all calls is corrected for
waiting. In one slot, the fastest call took 21.5 ms and the corrected mean was 3.51 ms. So a round's sample is at most
the mean of its calls.

The sustained time of a case is the time of a step when steps run for several seconds without a pause. If this was not
measured, the time in energy windows is used, if they ran under a power cap or at another clock than slots.
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

from fp8bench.analysis.compare.interval import mean_with_half_width
from fp8bench.analysis.stats import FloatArray
from fp8bench.analysis.verdicts import FINAL_LEVEL, cell_seconds, count_common_calls, find_common_rounds, mean_seconds
from fp8bench.model import Finding, Interval, Level, Record, SustainedTurn, Timing
from fp8bench.model.consumed import POWER_CAP_BIT

# The relative rounding error between sums of the same numbers in different orders.
_SUM_TOLERANCE = 1e-9
T = TypeVar("T")


def _cache_latest_timings(make: Callable[[Timing], T]) -> Callable[[Timing], T]:
    """Caches the results of a function for the last four timings, because several figures use the same timing, and all
    cases use the timing of the reference.
    """
    results: deque[tuple[Timing, T]] = deque(maxlen=4)

    def get_result(timing: Timing) -> T:
        for cached_timing, value in results:
            # Compare identities: comparing or hashing all samples of a timing would be slow.
            if cached_timing is timing:
                return value
        value = make(timing)
        results.append((timing, value))
        return value

    return get_result


def list_step_samples(timing: Timing) -> tuple[float, ...]:
    return tuple(_compute_cell_seconds_by_round(timing).sum(axis=1).tolist()) if timing.slots else ()


def make_mean_sample(timing: Timing) -> tuple[float, ...]:
    """Returns the mean seconds of a step over all calls as a single sample. A median over rounds would hide rare slow
    calls.
    """
    return (_mean_seconds_of_rounds(timing, [slot.round for slot in timing.slots]),) if timing.slots else ()


def phase_samples(timing: Timing, phase: str) -> tuple[float, ...]:
    """Returns the seconds of one phase in each round, or () if the step does not have the phase."""
    segment_indices = [index for index, name in enumerate(timing.segments.phases) if name == phase]
    if not timing.slots or not segment_indices:
        return ()
    return tuple(_compute_cell_seconds_by_round(timing)[:, segment_indices].sum(axis=1).tolist())


def relative_samples(record: Record, reference: Record | None) -> tuple[float, ...]:
    """Returns the case's time divided by the reference's time in each round. If the reference has a control, the times
    of both are averaged. Returns () for the reference itself, and if case and reference share no rounds. Emulated cases
    have no speed, so a comparison with one also returns ().
    """
    reference_seconds = [_step_seconds_by_round(entry) for entry in _list_reference_timings(record, reference)]
    if record.timing is None or not reference_seconds:
        return ()
    samples = []
    for round_number, seconds in _step_seconds_by_round(record.timing).items():
        reference_seconds_of_round = [entry.get(round_number) for entry in reference_seconds]
        if all(reference_seconds_of_round):  # with a coarse clock, a time may be 0
            samples.append(seconds / _geometric_mean([base for base in reference_seconds_of_round if base]))
    return tuple(samples)


def _geometric_mean(values: Sequence[float]) -> float:
    return values[0] if len(values) == 1 else math.prod(values) ** (1 / len(values))


def relative_mean_sample(record: Record, reference: Record | None) -> tuple[float, ...]:
    """Returns the case's mean over all calls, divided by the reference's, as a single value."""
    reference_timings = _list_reference_timings(record, reference)
    if (
        record.timing is None
        or not reference_timings
        or not (rounds := find_common_rounds([record.timing, *reference_timings]))
    ):
        return ()
    reference_mean = _geometric_mean([_mean_seconds_of_rounds(entry, rounds) for entry in reference_timings])
    return (_mean_seconds_of_rounds(record.timing, rounds) / reference_mean,)


def _list_reference_timings(record: Record, reference: Record | None) -> list[Timing]:
    """Returns the timings of the reference and its control in the rounds of the case."""
    if reference is None or record.is_reference or not record.paired:
        return []
    if not record.support.level == reference.support.level == Level.NATIVE:
        return []
    base, control = record.paired_with, record.control
    if base is None:
        base, control = reference.timing, reference.control
    return [timing for timing in (base, control) if timing is not None and timing.slots] if base else []


def phase_medians(timing: Timing) -> dict[str, tuple[float, float]]:
    """Returns for each phase two medians over all calls: of its seconds, and of its share of the call.

    Unlike best cases, the medians of phases do not sum to the median of the step.
    """
    calls = np.array(list(chain.from_iterable(slot.calls_ns for slot in timing.slots)), dtype=np.float64)
    if not len(calls):
        return {}
    step_ns = calls.sum(axis=1)
    phases = np.array(timing.segments.phases)
    medians_by_phase = {}
    for phase in dict.fromkeys(timing.segments.phases):
        seconds = calls[:, phases == phase].sum(axis=1)
        shares = np.divide(seconds, step_ns, out=np.zeros_like(step_ns), where=step_ns > 0)
        medians_by_phase[phase] = float(np.median(seconds)) * 1e-9, float(np.median(shares))
    return medians_by_phase


@_cache_latest_timings
def _step_seconds_by_round(timing: Timing) -> dict[int, float]:
    return dict(zip((slot.round for slot in timing.slots), list_step_samples(timing), strict=True))


@_cache_latest_timings
def _mean_seconds_by_round(timing: Timing) -> FloatArray:
    return mean_seconds(timing, [slot.round for slot in timing.slots])


def _mean_seconds_of_rounds(timing: Timing, rounds: Sequence[int]) -> float:
    has_all_rounds = len(rounds) == len(timing.slots)
    seconds = _mean_seconds_by_round(timing) if has_all_rounds else mean_seconds(timing, rounds)
    return float(seconds.mean())


@_cache_latest_timings
def _compute_cell_seconds_by_round(timing: Timing) -> FloatArray:
    """Returns the seconds of each part of a step (column) in each round (row), from the fastest calls. Every slot
    contributes equally many calls, because a minimum over more calls is lower. Parts that sum to more than the round's
    mean step without waiting are scaled down to it.
    """
    fastest_cells = cell_seconds(timing, count_common_calls(timing))
    fastest_steps, mean_steps = fastest_cells.sum(axis=1), _mean_seconds_by_round(timing)
    exceeds_mean = fastest_steps > mean_steps * (1 + _SUM_TOLERANCE)
    if not exceeds_mean.any():
        return fastest_cells
    scale: FloatArray = np.divide(mean_steps, fastest_steps, out=np.ones_like(fastest_steps), where=exceeds_mean)
    return np.multiply(fastest_cells, scale[:, None], dtype=np.float64)


# Two clocks count as different if they differ by more than this share. Readings of one device's clock vary by 1%.
_CLOCK_TOLERANCE = 0.02
# An interval needs this many sustained measurements. Two do not show how much measurements of the same code differ.
MIN_SUSTAINED_TURNS = 3


@dataclass(frozen=True)
class Sustained:
    """The median, the lowest and the highest seconds per step in measurements of several seconds, with clock and power.

    `turns` is the number of measurements. `settled_turn_count` counts those before which clock and temperature had
    settled; None if unknown. `ratio_to_slots` is the step's sustained time divided by its time in slots of a few
    milliseconds.
    """

    seconds: float
    low: float
    high: float
    turns: int
    settled_turn_count: int | None = None
    clock: float | None = None
    watts: float | None = None
    ratio_to_slots: float | None = None
    is_from_energy_windows: bool = False


def get_sustained_samples(record: Record) -> tuple[float, ...]:
    """Returns seconds per step, one value for each measurement of several seconds."""
    return tuple(map(_step_seconds, _list_valid_sustained_turns(record)))


def is_energy_clock_different(record: Record) -> bool:
    """Returns whether a native case's energy was measured under a power cap, or at another clock than its times."""
    windows = record.energy.windows if record.energy is not None else ()
    if record.support.level is not Level.NATIVE or record.timing is None:
        return False
    clock, slots_clock = _median_of_known_values([window.sm_clock for window in windows]), record.timing.clock
    is_clock_different = bool(clock and slots_clock) and abs(clock / slots_clock - 1) > _CLOCK_TOLERANCE  # type: ignore[operator]
    return is_clock_different or any((window.throttle or 0) & POWER_CAP_BIT for window in windows)


def compute_sustained_figures(record: Record, finding: Finding | None) -> Sustained | None:
    turns, seconds = _list_valid_sustained_turns(record), get_sustained_samples(record)
    if not turns or not (record.sustained or is_energy_clock_different(record)):
        return None
    slot_seconds = finding.median_seconds if finding is not None else None
    turn_settlings = [turn.settling for turn in turns if turn.settling is not None]
    return Sustained(
        median(seconds),
        min(seconds),
        max(seconds),
        len(turns),
        sum(settling.settled for settling in turn_settlings) if turn_settlings else None,
        _median_of_known_values([turn.clock for turn in turns]),
        _median_of_known_values([turn.watts for turn in turns]),
        median(seconds) / slot_seconds if slot_seconds else None,
        not record.sustained,
    )


def sustained_ratio(record: Record, reference: Record | None) -> Interval | None:
    """Returns the case's sustained time divided by its reference's, paired by round. With fewer than three pairs, the
    interval is only their range.

    Returns None for the reference and for cases of a different session. Emulated cases have no speed, so they also
    give None.
    """
    if reference is None or record.is_reference or {record.support.level, reference.support.level} != {Level.NATIVE}:
        return None
    if not record.paired or record.paired_with is not None:
        return None
    paired_seconds = zip(get_sustained_samples(record), get_sustained_samples(reference), strict=False)
    log_time_ratios = [math.log(seconds / base) for seconds, base in paired_seconds]
    if not log_time_ratios:
        return None
    if len(log_time_ratios) < MIN_SUSTAINED_TURNS:
        return Interval(
            math.exp(fmean(log_time_ratios)), math.exp(min(log_time_ratios)), math.exp(max(log_time_ratios)), 0.0
        )
    mean_log_ratio, log_half_width = mean_with_half_width(log_time_ratios)
    return Interval(
        math.exp(mean_log_ratio),
        math.exp(mean_log_ratio - log_half_width),
        math.exp(mean_log_ratio + log_half_width),
        FINAL_LEVEL,
    )


def _list_valid_sustained_turns(record: Record) -> list[SustainedTurn]:
    """Returns the sustained measurements of a case, or its energy windows if it has none. Drops impossible numbers,
    which an edited file may contain.
    """
    measurements: Sequence[SustainedTurn] = record.sustained
    if not measurements and record.energy is not None and not record.support.is_emulated:
        measurements = [
            # A window without seconds is dropped below, so only prevent the division by zero.
            SustainedTurn(
                window.steps, (window.seconds,), None, window.sm_clock, window.joules / max(window.seconds, 1e-12)
            )
            for window in record.energy.windows
        ]
    return [turn for turn in measurements if turn.steps > 0 and turn.seconds and 1e-12 < _step_seconds(turn) < 1e9]


def _step_seconds(turn: SustainedTurn) -> float:
    return sum(turn.seconds) / (turn.steps * len(turn.seconds))


def _median_of_known_values(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return median(known_values) if known_values else None
