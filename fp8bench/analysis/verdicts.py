"""Turns samples into verdicts: faster, slower, same or unsure, with the reason.

The ratio of a case to its reference decides. The case is FASTER or SLOWER if the interval of this ratio is outside a
band around 1, SAME if the interval is inside +-2%, otherwise UNSURE. The band is +-0.5%, or the proven difference
between the reference and its control, if that is larger. The proven difference is the distance of the A/A interval from
1. The far end of the A/A interval is only printed as noise floor. As a band it would count sampling noise twice and
find only 14% instead of 90% of slow-downs of 2.5% in a 30 ms step.

The best case uses only the fastest calls, so it misses a step that is three times slower in three of four calls.
Therefore the mean over all calls, paired by round, can remove a verdict. FASTER and SLOWER must not contradict the
mean, and SAME needs the mean inside +-3.5%. Time that the thread waited for a core is subtracted, because it makes the
mean of a loaded machine ten times as noisy.

A cell is a part of a step between two marks. A step that waits for a clock or for another thread's batch always takes
the same time, but its cells may compensate for each other. Its fastest cells come from different rounds and sum to less
than any step. The case that varies more or has more cells would then seem faster. So whole steps are compared if a best
case is below its fastest step by more than the noise floor. On a loaded machine this also happens to normal steps.

Few rounds give no 99% interval. Of 900 samples of ten rounds, 8% missed the ratio of the long run that they were taken
from, because clocks and other programs change more slowly. Ten rounds therefore give only the range of their ratios,
with level 0, and a verdict needs this whole range.

These rules use samples alone, during the measurement and at the end. The module `findings` adds labels and other facts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from fp8bench.analysis import stats
from fp8bench.model import CELL_PHASES, Interval, SlotSample, Timing, Verdict
from fp8bench.model.stopping import LEAST_ROUNDS

# The half-widths of two bands around 1. A ratio whose interval is outside the first band is FASTER or SLOWER, and one
# whose interval is inside the second is SAME.
VERDICT_BAND = 0.005
SAME_BAND = 0.02
# For SAME, the ratio of means over all calls, with its interval, must be within this distance from 1. The limit is
# wider than that of the best case, because means have more noise. With a limit of 5%, a mean that changed by 5% would
# sometimes pass.
SAME_VERDICT_MEANS_BAND = 0.035
# The calls of a case are uneven if there is a gap of more than this share between the interval of its best-case ratio
# and the interval of its mean ratio.
UNEVEN_RATIO = 0.05
# A decision before the last round needs more evidence, because each check is an additional chance of an error.
EARLY_LEVEL = 0.998
EARLY_SAME_BAND = 0.01
# An early verdict also needs a narrow interval. Its half-width may be at most a third of the effect (the logarithm of
# the ratio). This limit is kept between 1% and 2%, or is a thirtieth of the effect if that is more. With 2% for every
# effect, runs that found 3% ended after 24 of 56 rounds. Comparisons of such short runs could not detect a change of
# 3%.
_EARLY_HALF_WIDTH_SHARE = 1 / 3
_EARLY_HALF_WIDTHS = (0.01, 0.02)
_EARLY_HALF_WIDTH_SHARE_OF_LARGE_EFFECT = 1 / 30
FINAL_LEVEL = 0.99
MIN_ROUNDS_FOR_VERDICT = 10
# Whole steps are compared if one case has more than this many times as many cells (timed parts of a step) as another.
# Cases of one suite usually differ by less: a product is one cell without casts, and two or three with casts.
_MAX_CELL_COUNT_RATIO = 2.5


def cell_seconds(
    timing: Timing, calls: int, rounds: Sequence[int] | None = None, whole_steps: bool = False
) -> stats.FloatArray:
    """Returns the seconds of each cell (column) in each round (row): the minimum over the first `calls` calls of a
    slot.

    Every slot must have that many calls. With `whole_steps`, a step counts as one cell.
    """
    selected_slots = _select_slots_of_rounds(timing, rounds)
    shape = (len(selected_slots), calls, len(timing.segments.phases))
    cell_nanoseconds = chain.from_iterable(chain.from_iterable(slot.calls_ns[:calls] for slot in selected_slots))
    seconds_by_call = np.fromiter(cell_nanoseconds, np.float64, math.prod(shape)).reshape(shape)
    if whole_steps:
        seconds_by_call = seconds_by_call.sum(axis=2, keepdims=True)
    seconds: stats.FloatArray = seconds_by_call.min(axis=1) * 1e-9
    return seconds


def _select_slots_of_rounds(timing: Timing, rounds: Sequence[int] | None) -> Sequence[SlotSample]:
    if rounds is None:
        return timing.slots
    chosen_rounds = set(rounds)
    return [slot for slot in timing.slots if slot.round in chosen_rounds]


def step_seconds_of_calls(timing: Timing) -> stats.FloatArray:
    """Returns the seconds of every call in the order in which they ran."""
    calls = chain.from_iterable(slot.calls_ns for slot in timing.slots)
    return np.array([sum(call) for call in calls], dtype=np.float64) * 1e-9


def count_common_calls(*timings: Timing) -> int:
    """Returns the number of calls that every slot of the timings has."""
    all_slots = chain.from_iterable(timing.slots for timing in timings)
    return min(len(slot.calls_ns) for slot in all_slots)


def find_common_rounds(timings: Sequence[Timing]) -> list[int]:
    """Returns the rounds in which all timings have a slot."""
    shared_rounds = {slot.round for slot in timings[0].slots}
    for timing in timings[1:]:
        shared_rounds &= {slot.round for slot in timing.slots}
    return sorted(shared_rounds)


def share_below_fastest_step(timing: Timing, calls: int = 0, rounds: Sequence[int] | None = None) -> float:
    """Returns how far the sum of the fastest cells (parts of a step) is below the time of the fastest step, as a share
    of that time. Returns 0 if it is not below.
    """
    calls = calls or count_common_calls(timing)
    best_seconds = float(stats.find_best_by_segment(cell_seconds(timing, calls, rounds)).sum())
    fastest_step_seconds = float(cell_seconds(timing, calls, rounds, whole_steps=True).min())
    return max(0.0, 1 - best_seconds / fastest_step_seconds) if fastest_step_seconds > 0 else 0.0


def do_cells_compensate(timings: Sequence[Timing], rounds: Sequence[int], floor: float) -> bool:
    """Returns whether the cells (parts of a step) of any timing compensate for each other: their fastest times sum to
    less than the fastest step, by a larger share than `floor`.
    """
    common_call_count = count_common_calls(*timings)
    return any(share_below_fastest_step(timing, common_call_count, rounds) > floor for timing in timings)


def best_ratio(
    timings: Sequence[Timing], rounds: Sequence[int], level: float = FINAL_LEVEL, whole_steps: bool | None = None
) -> Interval:
    """Returns the best case of the first timing divided by the best case of the other timings, in these rounds."""
    samples = select_comparable_times(timings, rounds, whole_steps)
    best_cases = list(map(stats.resample_best_case, samples))
    return _to_ratio_interval(best_cases, [sample.sum(axis=1) for sample in samples], level)


def _to_ratio_interval(
    arms: Sequence[stats.ResampledLogSeconds], seconds: Sequence[stats.FloatArray], level: float
) -> Interval:
    """Returns the time of the first arm divided by the geometric mean of the other arms, with an interval. With few
    rounds, the interval is only the range.
    """
    ratio = stats.ratio(arms[0], arms[1:], level)
    return stats.replace_interval_by_range(ratio, seconds) if len(seconds[0]) < LEAST_ROUNDS else ratio


def select_comparable_times(
    timings: Sequence[Timing], rounds: Sequence[int], whole_steps: bool | None
) -> list[stats.FloatArray]:
    """Returns the seconds of the cells (parts of a step) of each timing, or of whole steps if the cells are not
    comparable.

    All timings use equally many calls per slot, because a minimum over more calls is lower. A sum of minimums over more
    cells is also lower, so whole steps are used if one case has many more cells than another. For example, a model
    without marks is one cell, and its copy with marked products has dozens. Whole steps are also used if `whole_steps`
    is True, or if it is None and `do_cells_compensate` is true.
    """
    common_call_count = count_common_calls(*timings)
    if whole_steps is None:
        whole_steps = do_cells_compensate(timings, rounds, VERDICT_BAND)
    samples = [] if whole_steps else [cell_seconds(timing, common_call_count, rounds) for timing in timings]
    if whole_steps or are_cell_counts_uneven(samples):
        return [cell_seconds(timing, common_call_count, rounds, whole_steps=True) for timing in timings]
    return samples


def are_cell_counts_uneven(samples: Sequence[stats.FloatArray]) -> bool:
    """Returns whether the numbers of cells (parts of a step) differ too much between cases to compare anything except
    whole steps.
    """
    effective_cell_counts = [_compute_effective_cell_count(sample) for sample in samples]
    return max(effective_cell_counts) > _MAX_CELL_COUNT_RATIO * min(effective_cell_counts)


def _compute_effective_cell_count(samples: stats.FloatArray) -> float:
    """Returns how many equally long cells (parts of a step) would have the same entropy as the cells of a step."""
    cell_time_shares = samples.sum(axis=0)
    cell_time_shares = cell_time_shares[cell_time_shares > 0] / max(float(cell_time_shares.sum()), 1e-300)
    return float(np.exp(-(cell_time_shares * np.log(cell_time_shares)).sum()))


def mean_ratio(timings: Sequence[Timing], rounds: Sequence[int], level: float = FINAL_LEVEL) -> Interval:
    """Returns the mean over all calls of the first timing, divided by the mean of the other timings."""
    samples = [mean_seconds(timing, rounds) for timing in timings]
    return _to_ratio_interval(list(map(stats.resample_mean, samples)), samples, level)


def mean_seconds(timing: Timing, rounds: Sequence[int]) -> stats.FloatArray:
    """Returns the mean seconds of a call in each round, without time spent waiting for a core."""
    return np.array([_mean_call_seconds(slot) for slot in _select_slots_of_rounds(timing, rounds)])


# The calls of a slot, with the phase marks between them, use at least this share of the slot's CPU time in the thread
# that runs the steps.
_MIN_CALLS_CPU_TIME_SHARE = 0.75


def _mean_call_seconds(slot: SlotSample) -> float:
    seconds = sum(map(sum, slot.calls_ns)) * 1e-9
    running_seconds = seconds - (slot.waited_seconds or 0.0)
    busy_seconds = min(seconds, slot.thread_seconds or 0.0)
    # If the thread waited between two calls, this waiting must not be subtracted from the calls.
    if running_seconds < _MIN_CALLS_CPU_TIME_SHARE * busy_seconds:
        running_seconds = busy_seconds
    # If the system reports more waiting than the calls took, ignore the waiting, because their time must be positive.
    return (running_seconds if running_seconds > 0 else seconds) / len(slot.calls_ns)


def list_reference_timings(reference: Timing, control: Timing | None) -> list[Timing]:
    """Returns the timings of a reference and of its control, if that ran."""
    return [reference] if control is None or not control.slots else [reference, control]


def compute_aa_interval(reference: Timing, control: Timing | None) -> Interval | None:
    """Returns the ratio of the control's time to the reference's. Both run identical code, so the interval shows noise.
    Returns None without a control.
    """
    if control is None or not (rounds := find_common_rounds([control, reference])):
        return None
    return _estimate_noise_floor([reference, control], rounds)[0]


def needs_whole_steps(reference: Timing, control: Timing | None) -> bool:
    reference_timings = list_reference_timings(reference, control)
    rounds = find_common_rounds(reference_timings)
    return bool(rounds) and _estimate_noise_floor(reference_timings, rounds)[1]


def _estimate_noise_floor(
    reference_timings: Sequence[Timing], rounds: Sequence[int], case: Timing | None = None
) -> tuple[Interval | None, bool]:
    """Returns the A/A interval of a reference and its control, and whether whole steps are compared. Without a control,
    the interval is None.

    If cells (parts of a step) compensate for each other, the A/A interval computed from cells is too wide. Whole steps
    are compared only if cells compensate by more than the narrower of two intervals: that of cells and that of whole
    steps.
    """
    timings = [*reference_timings, case] if case is not None else reference_timings
    if len(reference_timings) < 2:
        return None, do_cells_compensate(timings, rounds, VERDICT_BAND)
    # Reverse the timings, because the A/A ratio is the control's time over the reference's.
    aa_interval_of_cells = best_ratio(reference_timings[::-1], rounds, whole_steps=False)
    if not do_cells_compensate(timings, rounds, VERDICT_BAND):
        return aa_interval_of_cells, False
    aa_of_whole_steps = best_ratio(reference_timings[::-1], rounds, whole_steps=True)
    whole_steps = do_cells_compensate(
        timings, rounds, max(VERDICT_BAND, min(aa_interval_of_cells.reach, aa_of_whole_steps.reach))
    )
    return aa_of_whole_steps if whole_steps else aa_interval_of_cells, whole_steps


def compute_verdict_band(aa: Interval | None) -> float:
    """Returns the half-width of the band around a ratio of 1 in which a case is neither faster nor slower."""
    return max(VERDICT_BAND, aa.distance_from_one) if aa is not None else VERDICT_BAND


def decide_verdict(interval: Interval, band_half_width: float, same_half_width: float = SAME_BAND) -> Verdict:
    if interval.low > 1 + band_half_width:
        return Verdict.SLOWER
    if interval.high < 1 - band_half_width:
        return Verdict.FASTER
    if interval.low > 1 - same_half_width and interval.high < 1 + same_half_width:
        return Verdict.SAME
    return Verdict.UNSURE


class Conclusion(NamedTuple):
    """A verdict with the ratios that it follows from: of best cases (`ratio`), of means over all calls
    (`ratio_of_means`), and of identical code (`aa`). `whole_steps` is True if whole steps were compared instead of
    cells.
    """

    verdict: Verdict
    ratio: Interval
    ratio_of_means: Interval
    aa: Interval | None
    whole_steps: bool = False


def is_uneven(ratio: Interval, mean_ratio: Interval) -> bool:
    """Returns whether the mean over all calls contradicts the fastest calls: the intervals of their ratios are more
    than UNEVEN_RATIO apart, or on opposite sides of 1.
    """
    interval_distance = max(mean_ratio.low / ratio.high, ratio.low / mean_ratio.high)
    return interval_distance > 1 + UNEVEN_RATIO or _have_opposite_directions(ratio, mean_ratio)


def mean_agrees_with_verdict(verdict: Verdict, ratio: Interval, mean_ratio: Interval) -> bool:
    """Returns whether the mean over all calls agrees with a verdict from the best case."""
    if verdict is Verdict.SAME:
        return mean_ratio.low > 1 - SAME_VERDICT_MEANS_BAND and mean_ratio.high < 1 + SAME_VERDICT_MEANS_BAND
    if verdict is Verdict.FASTER:
        return mean_ratio.point < 1 + VERDICT_BAND and not _have_opposite_directions(ratio, mean_ratio)
    return (
        verdict is Verdict.SLOWER
        and mean_ratio.point > 1 - VERDICT_BAND
        and not _have_opposite_directions(ratio, mean_ratio)
    )


def _have_opposite_directions(ratio: Interval, mean_ratio: Interval) -> bool:
    return (ratio.high < 1 < mean_ratio.low) or (mean_ratio.high < 1 < ratio.low)


def is_case_decided(case: Timing, reference: Timing, control: Timing | None) -> bool:
    """Returns whether measuring may stop for this case, because its verdict is clear and its interval is narrow. Both
    are judged at the stricter level of early decisions.
    """
    early_conclusion = conclude_comparison(case, reference, control, EARLY_LEVEL, EARLY_SAME_BAND)
    if early_conclusion is None or early_conclusion.verdict is Verdict.UNSURE:
        return False
    ratio = early_conclusion.ratio
    if not math.isfinite(ratio.half_width):
        return False
    log_effect_size = abs(math.log(ratio.point))
    narrowest, widest = _EARLY_HALF_WIDTHS
    max_half_width = min(max(narrowest, _EARLY_HALF_WIDTH_SHARE * log_effect_size), widest)
    return ratio.half_width <= max(max_half_width, _EARLY_HALF_WIDTH_SHARE_OF_LARGE_EFFECT * log_effect_size)


def conclude_comparison(
    case: Timing,
    reference: Timing,
    control: Timing | None,
    level: float = FINAL_LEVEL,
    same_half_width: float = SAME_BAND,
    min_half_width: float = 0.0,
    sessions: Sequence[Interval] = (),
    held_up: bool = False,
    earlier_log_ratios: tuple[float, float] = (math.inf, -math.inf),
) -> Conclusion | None:
    """Returns the verdict on the samples of a native case, with its intervals. Returns None if the case has no rounds
    in common with its reference.

    Four arguments may widen the interval of the ratio. It extends at least `min_half_width` from its point, as a
    logarithm, because runs may differ more than rounds. It contains the intervals of earlier `sessions`, and its point
    is then the mean of all ratios. It contains `earlier_log_ratios`, the range of ratios in earlier runs as logarithms.
    If other programs disturbed the fastest rounds (`held_up`), it also contains the mean over all calls. Without a
    `min_half_width`, such an interval is only a range, with level 0.
    """
    reference_timings = list_reference_timings(reference, control)
    rounds = find_common_rounds([case, *reference_timings])
    if not rounds:
        return None
    # 1. Compute the ratio of best cases and the ratio of means.
    aa_ratio, whole_steps = _estimate_noise_floor(reference_timings, rounds, case)
    ratio = best_ratio([case, *reference_timings], rounds, level, whole_steps)
    ratio_of_means = mean_ratio([case, *reference_timings], rounds, level)
    # 2. Widen the interval by disturbances and by differences between runs, which these rounds cannot show.
    if held_up and ratio.level:  # the time of an undisturbed call is unknown
        low, high = min(ratio.low, ratio_of_means.low), max(ratio.high, ratio_of_means.high)
        ratio = replace(ratio, low=low, high=high, level=level if min_half_width else 0.0)
    valid_sessions = [session for session in sessions if 0 < session.low <= session.point <= session.high < math.inf]
    # The mean of several sessions varies less than one session.
    min_half_width /= math.sqrt(1 + len(valid_sessions))
    ratio = _widen_interval(_merge_intervals([*valid_sessions, ratio]), min_half_width, earlier_log_ratios)
    # 3. Derive the verdict.
    verdict = (
        decide_verdict(ratio, compute_verdict_band(aa_ratio), same_half_width)
        if len(rounds) >= MIN_ROUNDS_FOR_VERDICT
        else Verdict.UNSURE
    )
    if not mean_agrees_with_verdict(verdict, ratio, ratio_of_means):
        verdict = Verdict.UNSURE
    return Conclusion(verdict, ratio, ratio_of_means, aa_ratio, whole_steps)


def _merge_intervals(ratios: Sequence[Interval]) -> Interval:
    """Returns the smallest interval that contains all intervals. Its point is the geometric mean of their points, and
    its level is that of the last interval.
    """
    if len(ratios) == 1:
        return ratios[0]
    point = math.exp(float(np.mean([math.log(ratio.point) for ratio in ratios])))
    low, high = min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios)
    return replace(ratios[-1], point=point, low=low, high=high)


def log_of_best_ratio(case: Timing, reference: Timing, control: Timing | None) -> float | None:
    """Returns the logarithm of a case's best-case ratio to its reference, or None if there are too few rounds for an
    interval.
    """
    reference_timings = list_reference_timings(reference, control)
    rounds = find_common_rounds([case, *reference_timings])
    if len(rounds) < LEAST_ROUNDS:
        return None
    samples = select_comparable_times(
        [case, *reference_timings], rounds, _estimate_noise_floor(reference_timings, rounds, case)[1]
    )
    case_seconds, *seconds = (float(stats.find_best_by_segment(sample).sum()) for sample in samples)
    if case_seconds <= 0 or min(seconds) <= 0:
        return None
    return math.log(case_seconds) - float(np.mean(np.log(seconds)))


def _widen_interval(ratio: Interval, min_half_width: float, earlier_log_ratios: tuple[float, float]) -> Interval:
    """Widens an interval so that it extends at least `min_half_width` from its point and contains the range
    `earlier_log_ratios`. Both are logarithms. An interval that is only the range of a few rounds is returned unchanged.
    """
    if not ratio.level or not 0 < ratio.low <= ratio.high < math.inf:
        return ratio
    low, high = ratio.point * math.exp(-min_half_width), ratio.point * math.exp(min_half_width)
    lowest_ratio, highest_ratio = map(math.exp, earlier_log_ratios)
    return replace(ratio, low=min(ratio.low, low, lowest_ratio), high=max(ratio.high, high, highest_ratio))


def compute_best_phase_seconds(timing: Timing, whole_steps: bool | None = None) -> tuple[tuple[str, float], ...]:
    """Returns the best-case seconds of each phase, which sum to the best case of the step.

    With `whole_steps`, all phases are taken from the fastest steps, otherwise each cell (a part of a step) is taken
    from its own fastest rounds. If `whole_steps` is None, whole steps are used if the fastest cells sum to clearly less
    than the fastest step.
    """
    common_call_count = count_common_calls(timing)
    if whole_steps is None:
        whole_steps = share_below_fastest_step(timing) > VERDICT_BAND
    best_cell_seconds = (
        stats.average_fastest_steps(fastest_step_cells(timing, common_call_count))
        if whole_steps
        else stats.find_best_by_segment(cell_seconds(timing, common_call_count))
    )
    seconds_by_phase = dict.fromkeys(CELL_PHASES, 0.0)
    for phase, seconds in zip(timing.segments.phases, best_cell_seconds, strict=True):
        seconds_by_phase[phase] += float(seconds)
    return tuple(seconds_by_phase.items())


def best_seconds(timing: Timing, whole_steps: bool | None = None) -> float:
    return sum(seconds for _, seconds in compute_best_phase_seconds(timing, whole_steps))


def fastest_step_cells(timing: Timing, calls: int, rounds: Sequence[int] | None = None) -> stats.FloatArray:
    """Returns the seconds of each cell (a part of a step) in the fastest step of each round, with shape (rounds,
    cells).
    """
    steps = [min(slot.calls_ns[:calls], key=sum) for slot in _select_slots_of_rounds(timing, rounds)]
    return np.array(steps, dtype=np.float64) * 1e-9


def find_fastest_candidate(candidates: Sequence[Timing], reference: Timing, control: Timing | None) -> int | None:
    """Returns the index of the candidate with the lowest best-case time relative to the reference, or None if no
    candidate is faster than the reference.
    """
    reference_timings = list_reference_timings(reference, control)
    fastest_arm_index, smallest_ratio = None, 1.0
    for index, timing in enumerate(candidates):
        rounds = find_common_rounds([timing, *reference_timings])
        if rounds and (point := best_ratio([timing, *reference_timings], rounds).point) < smallest_ratio:
            fastest_arm_index, smallest_ratio = index, point
    return fastest_arm_index
