"""Labels cases whose times look doubtful when several cases are compared. There are three reasons: the time of a case
does not grow with its declared work, its clock differs from the reference's, or slots are slower at one position in
their round.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, permutations
from statistics import NormalDist, fmean
from typing import NamedTuple, TypeGuard

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.compare.interval import mean_with_half_width
from fp8bench.analysis.labels import HOST_MAY_LIMIT_SHARE, LabelWithReason, compute_host_share
from fp8bench.analysis.stats import FloatArray
from fp8bench.analysis.verdicts import FINAL_LEVEL, MIN_ROUNDS_FOR_VERDICT, mean_seconds
from fp8bench.model import DeviceWatch, Interval, Label, Record, Scalar, SlotSample, Timing, Work
from fp8bench.model.stopping import EMULATED_ROUNDS, fit_device_slopes

# A case counts as larger than another if it does at least this many times as much work.
_LARGER_WORK_RATIO = 2.0
# A larger case takes no longer than a smaller one if the interval of its time, divided by that of the smaller case,
# begins at or below 1 and ends at or below _MAX_FLAT_TIME_RATIO. The interval's half-width is _ADDED_STANDARD_ERRORS
# standard errors of the ratio's logarithm.
_ADDED_STANDARD_ERRORS, _MAX_FLAT_TIME_RATIO = 3.0, 1.1
# The seconds that the host may need for each operator, with autograd and Python. This is twice the 14 us of a
# convolution with 8 channels on an AMD EPYC (Zen 5). If a step takes less time per operator, the host may set the
# step's time, which then need not grow with the work.
_OPERATOR_SECONDS = 30e-6


def label_size_independent_times(records: Iterable[Record], threads: int) -> dict[str, LabelWithReason]:
    """Returns labels by case id. If a case takes no longer than a smaller case, the larger case is labelled.

    These labels do not remove a verdict, because both cases may share work that the counts do not show. A GPU or
    several threads may be half idle in the smaller case, so there the declared work of the larger case must need more
    than half of the device's peak. Cases with fewer rounds than an emulated case gets (EMULATED_ROUNDS) are left out.
    """
    records_by_mode: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        case = record.case
        if record.timing and record.timing.num_rounds >= EMULATED_ROUNDS:
            records_by_mode.setdefault((case.workload, case.version, case.mode, case.device), []).append(record)
    labels: dict[str, LabelWithReason] = {}
    # It is unknown which case of a pair is the larger one, so try both orders.
    for small, large in chain.from_iterable(permutations(of_mode, 2) for of_mode in records_by_mode.values()):
        if (
            _is_larger_case(small, large)
            and _is_device_busy(large, threads)
            and (reason := _describe_flat_time(small, large))
        ):
            labels.setdefault(large.case.id, LabelWithReason(Label.FLAT_TIME, reason))
    return labels


def _is_larger_case(small_record: Record, large_record: Record) -> bool:
    """Returns whether the second case declares at least twice the FLOPs and bytes (or tokens) of the first, and has no
    smaller parameter.

    If no bytes are declared, the minimum memory of the state is compared instead of the bytes. FLOPs alone do not show
    that a case is larger: a product of two rows has twice the FLOPs of a product of one row, but takes as long, because
    both read all weights.
    """
    small_work, large_work = small_record.work, large_record.work
    if not (small_work.flops or small_work.bytes or small_work.tokens) or large_work.tokens < small_work.tokens:
        return False
    counts = [
        (small_work.flops, large_work.flops),
        (small_work.bytes or small_work.least_memory, large_work.bytes or large_work.least_memory),
    ]
    if not (small_work.flops or small_work.bytes):
        counts.append((small_work.tokens, large_work.tokens))
    if not all(count >= _LARGER_WORK_RATIO * small_count for small_count, count in counts):
        return False
    small_params, params = dict(small_record.case.params), dict(large_record.case.params)
    return small_params.keys() == params.keys() and all(
        _is_at_least(params[name], value) for name, value in small_params.items()
    )


def _is_at_least(value: Scalar, least_value: Scalar) -> bool:
    if isinstance(value, str | bool) or isinstance(least_value, str | bool):
        return value == least_value
    return value >= least_value


def _describe_flat_time(small_record: Record, large_record: Record) -> str:
    """Describes the times and work of two sizes if the larger size provably takes no longer. Returns '' otherwise."""
    assert small_record.timing is not None and large_record.timing is not None
    small_seconds, seconds = verdicts.best_seconds(small_record.timing), verdicts.best_seconds(large_record.timing)
    # 1. Skip steps whose time the host may set, because such a time need not grow with the work.
    # `products.operators` counts all operators of the step, not only its products.
    operator_count = None if small_record.products is None else small_record.products.operators
    if operator_count is None or small_seconds <= _OPERATOR_SECONDS * operator_count:
        return ""
    if (
        compute_host_share(small_record.timing, small_record.case.device) > HOST_MAY_LIMIT_SHARE
        or seconds > _MAX_FLAT_TIME_RATIO * small_seconds
    ):
        return ""
    # 2. Require that the larger case is not surely slower, and surely not much slower.
    error = _ADDED_STANDARD_ERRORS * math.hypot(
        _estimate_best_case_error(small_record.timing), _estimate_best_case_error(large_record.timing)
    )
    log_time_ratio = math.log(seconds / small_seconds)
    if log_time_ratio - error > 0 or log_time_ratio + error > math.log(_MAX_FLAT_TIME_RATIO):
        return ""
    words = f"{units.seconds(seconds)} for {_describe_work(large_record.work)}"
    return f"{words}, {units.seconds(small_seconds)} for {_describe_work(small_record.work)}"


def _estimate_best_case_error(timing: Timing) -> float:
    """Returns the standard error of the logarithm of the best-case time. It is estimated from the times of all cells
    (timed parts of a step).
    """
    seconds_by_cell = verdicts.cell_seconds(timing, calls=verdicts.count_common_calls(timing))
    return stats.resample_best_case(seconds_by_cell).error


def _is_device_busy(record: Record, threads: int) -> bool:
    """Returns whether a case used the whole device. A single CPU thread always does. Otherwise the declared FLOPs or
    bytes per second must be more than half of a measured peak.
    """
    if threads == 1 and record.case.device.startswith("cpu"):
        return True
    if record.ceiling is None or record.timing is None:
        return False
    half_step_seconds = verdicts.best_seconds(record.timing) / 2
    flops_per_second, bytes_per_second = record.ceiling.flops or math.inf, record.ceiling.bytes or math.inf
    return (
        record.work.flops > half_step_seconds * flops_per_second
        or record.work.bytes > half_step_seconds * bytes_per_second
    )


def _describe_work(work: Work) -> str:
    if work.flops:
        return units.count(work.flops, "FLOP")
    return units.count(work.bytes, "B") if work.bytes else units.count(work.tokens, "tokens")


# A comparison of two cases is void if their clocks differ by more than CLOCK_TOLERANCE, and if the lower bound of this
# difference is above _CERTAIN_CLOCK_DIFFERENCE. Drivers report clocks in steps of 15 MHz, which is 0.8% of a fast
# clock.
CLOCK_TOLERANCE = 0.01
_CERTAIN_CLOCK_DIFFERENCE = 0.005
# Clocks are compared only if this many rounds have readings. Fewer do not show how much readings differ by chance.
MIN_CLOCK_READINGS = 4


def label_clock_offset(case: Timing, reference_timings: Sequence[Timing], reference: str) -> Iterator[LabelWithReason]:
    """Yields a hard label if the clock during the case differed from the clock during its reference.

    Clocks are compared round by round, so heat that slows down the whole round has no effect. All timings of the
    reference count equally.
    """
    # 1. Compare the clocks in each round that has a reading of every timing.
    case_clocks = _read_sm_clocks(case)
    reference_sm_clocks = [_read_sm_clocks(timing) for timing in reference_timings]
    log_clock_ratios: dict[int, float] = {}
    for round_number, clock in case_clocks.items():
        reference_clock_logs = [
            math.log(clocks[round_number]) for clocks in reference_sm_clocks if round_number in clocks
        ]
        if reference_sm_clocks and len(reference_clock_logs) == len(reference_sm_clocks):
            log_clock_ratios[round_number] = math.log(clock) - fmean(reference_clock_logs)
    if len(log_clock_ratios) < MIN_CLOCK_READINGS:
        return
    # 2. Require a difference that is large and certain.
    mean_log_ratio, log_half_width = mean_with_half_width([*log_clock_ratios.values()])
    is_small = abs(mean_log_ratio) <= math.log1p(CLOCK_TOLERANCE)
    if is_small or abs(mean_log_ratio) - log_half_width <= math.log1p(_CERTAIN_CLOCK_DIFFERENCE):
        return
    # 3. Describe the mean clocks of the compared rounds.
    clock_text = units.count(_average_clock([case], log_clock_ratios), "Hz")
    reference_clock_text = units.count(_average_clock(reference_timings, log_clock_ratios), "Hz")
    reason = (
        f"SM clock {clock_text} against {reference}'s {reference_clock_text}, {units.change(math.exp(mean_log_ratio))}"
    )
    yield LabelWithReason(Label.CLOCK_OFFSET, reason, hard=True)


def _read_sm_clocks(timing: Timing) -> dict[int, float]:
    """Returns the clock of each round. Drops impossible values, which an edited file may contain."""
    clocks = {slot.round: slot.clock for slot in timing.slots if slot.clock is not None}
    return {round_number: clock for round_number, clock in clocks.items() if 0 < clock < math.inf}


def _collect_slot_samples(timings: Sequence[Timing]) -> list[SlotSample]:
    return list(chain.from_iterable(timing.slots for timing in timings))


def _average_clock(timings: Sequence[Timing], rounds: Container[int]) -> float:
    """Returns the mean clock of several timings over some rounds, or 0 if no clock is known."""
    slots_of_rounds = [slot for slot in _collect_slot_samples(timings) if slot.round in rounds]
    # `Timing.clock` computes the mean, so give it a timing with the slots of all timings.
    return replace(timings[0], slots=tuple(slots_of_rounds)).clock or 0.0


def label_unsettled_device(watch: DeviceWatch | None) -> Iterator[LabelWithReason]:
    """Yields a label if clock or temperature of the device were still changing when the first round began."""
    warm_up = watch.warm_up if watch is not None else None
    if warm_up is None or warm_up.settled or not warm_up.looks:
        return
    clock_samples = warm_up.looks
    warm_up_slopes = fit_device_slopes(clock_samples)
    words = [f"after {units.seconds(warm_up.seconds)} of warming up"]
    if warm_up_slopes.clock is not None:
        words.append(f"clock {units.count(clock_samples[-1].clock, 'Hz')}, {100 * warm_up_slopes.clock:+.1f}% a second")
    if warm_up_slopes.temperature is not None:
        words.append(f"{clock_samples[-1].temperature:g} degC, {warm_up_slopes.temperature:+.1f} a second")
    yield LabelWithReason(Label.UNSETTLED, ", ".join(words))


# An upper bound for the number of slots in a round.
_MAX_SLOTS_PER_ROUND = 1000


class SlotPositionEffect(NamedTuple):
    """How much longer a slot takes at this position in its round than the other slots of the round, as a ratio.
    Positions are counted from 0.
    """

    position: int
    ratio: Interval

    @property
    def label(self) -> LabelWithReason:
        round_position_text = (
            "the first of its round" if self.position == 0 else f"number {self.position + 1} of its round"
        )
        point, low, high = map(units.change, (self.ratio.point, self.ratio.low, self.ratio.high))
        return LabelWithReason(
            Label.POSITION, f"{round_position_text} takes {point} time [{low}, {high}] compared with the other slots"
        )


def find_position_effect(timings: Sequence[Timing]) -> SlotPositionEffect | None:
    """Returns the position in a round with the most certain effect on time, or None if no position has an effect.

    The mean time of a slot (a timed turn of one case) is divided by the median of its case, and compared with the other
    slots of its round. So a machine that slows down over many rounds causes no effect. In 1 of 100 groups, some
    position seems to have an effect by chance.
    """
    # 1. For each slot, compare its log time ratio with the mean of the other slots in its round.
    log_time_ratios = _tabulate_slot_times(timings)
    # Drop rounds with a single slot, which has no other slots to be compared with.
    log_time_ratios = log_time_ratios[(~np.isnan(log_time_ratios)).sum(axis=1) > 1]
    counts = (~np.isnan(log_time_ratios)).sum(axis=1, keepdims=True)
    difference_from_round_mean = log_time_ratios - np.nansum(log_time_ratios, axis=1, keepdims=True) / counts
    # The mean of a round includes the slot itself. This factor makes it a difference from the other slots.
    difference_from_other_slots = difference_from_round_mean * counts / (counts - 1)
    # The variance that a slot's difference would have if the slots of its round were in random order.
    variance_by_round = np.nansum(difference_from_other_slots**2, axis=1, keepdims=True) / counts
    # 2. With two positions per round, test only the first: if it is slower, the second is faster by the same amount.
    tested_slot_positions = [
        slot_position
        for slot_position in range(log_time_ratios.shape[1])
        if (~np.isnan(log_time_ratios[:, slot_position])).sum() >= MIN_ROUNDS_FOR_VERDICT
    ]
    if log_time_ratios.shape[1] == 2:
        tested_slot_positions = tested_slot_positions[:1]
    # FINAL_LEVEL is the confidence level of decisions after the last round. Divide the error that it allows by the
    # number of tested positions (Bonferroni), because each test may err.
    normal_quantile = NormalDist().inv_cdf(1 - (1 - FINAL_LEVEL) / 2 / max(1, len(tested_slot_positions)))
    # 3. Choose the position with the most certain effect.
    max_effect_in_errors, surest_position_effect = 0.0, None
    for slot_position in tested_slot_positions:
        rounds_with_slot = ~np.isnan(log_time_ratios[:, slot_position])
        point = float(difference_from_other_slots[rounds_with_slot, slot_position].mean())
        error = math.sqrt(float(variance_by_round[rounds_with_slot].sum())) / int(rounds_with_slot.sum())
        if abs(point) > normal_quantile * error and abs(point) / error > max_effect_in_errors:
            max_effect_in_errors = abs(point) / error
            middle_ratio, low, high = (math.exp(point + side * normal_quantile * error) for side in (0, -1, 1))
            surest_position_effect = SlotPositionEffect(slot_position, Interval(middle_ratio, low, high, FINAL_LEVEL))
    return surest_position_effect


def _is_valid_position(position: int | None) -> TypeGuard[int]:
    """Returns whether a position is valid. Older runs have no positions, and an edited file may contain any number."""
    return position is not None and 0 <= position < _MAX_SLOTS_PER_ROUND


def _tabulate_slot_times(timings: Sequence[Timing]) -> FloatArray:
    """Returns the relative times of slots: a row for each round, a column for each position in the round.

    A relative time is the logarithm of a slot's mean time divided by the median of its case. Positions without a slot
    are NaN.
    """
    slots = _collect_slot_samples(timings)
    round_numbers = sorted({slot.round for slot in slots})
    rows = {number: row for row, number in enumerate(round_numbers)}
    slot_position_count = 1 + max((slot.place for slot in slots if _is_valid_position(slot.place)), default=-1)
    table: FloatArray = np.full((len(rows), slot_position_count), np.nan)
    for timing in timings:
        seconds = mean_seconds(timing, [slot.round for slot in timing.slots])
        if not len(seconds) or seconds.min() <= 0:
            continue
        slot_log_ratios = np.log(seconds / np.median(seconds))
        for slot, log_time_ratio in zip(timing.slots, slot_log_ratios, strict=True):
            if _is_valid_position(slot.place):
                table[rows[slot.round], slot.place] = log_time_ratio
    return table
