"""Turns samples into verdicts: faster, slower, same or unsure, with the reason.

The ratio of a case to its reference decides. It is FASTER or SLOWER if the ratio's interval is outside a band around
1, SAME if the interval is inside +-2%, otherwise UNSURE. The band is +-0.5%, or the proven difference between the
reference and its own control, if that is larger. That difference is the distance of the A/A interval from 1. The far
end of the A/A interval is only printed as noise floor. As a band it would count sampling noise twice and find only
14% instead of 90% of slow-downs of 2.5% in a 30 ms step.

The best case uses only the fastest calls, so it misses a step that is three times slower in three of four calls.
Therefore the mean over all calls, paired by round, can remove a verdict. FASTER and SLOWER must not contradict the
mean, and SAME needs the mean inside +-3.5%. Time that the thread waited for a core is subtracted, because it makes
the mean of a loaded machine ten times as noisy.

A cell is a part of a step between two marks. A step that waits for a clock or for another thread's batch always takes
the same time, but its cells may compensate for each other. Its fastest cells come from different rounds and sum to
less than any step. The case that varies more or has more cells would then seem faster. So whole steps are compared if
a best case is below its fastest step by more than the noise floor. On a loaded machine this also happens to normal
steps.

Few rounds give no 99% interval. Of 900 samples of ten rounds, 8% missed the ratio of the long run that they were
taken from, because clocks and other programs change more slowly. Ten rounds therefore give only their range, with
level 0, and a verdict needs the whole range.

These rules use samples alone, during the measurement and at the end. The module `findings` adds labels and other
facts.
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

BAND = 0.005
SAME = 0.02
# For SAME, the mean over all calls may differ from 1 by this much. That is more than the best case may differ,
# because the mean has more noise. With 5%, a mean that changed by 5% would sometimes pass.
SAME_MEAN = 0.035
# If the mean differs from the best case by this much, the calls of a case differ from each other.
UNEVEN_RATIO = 0.05
# A decision before the last round needs more evidence, because each check is an additional chance of an error.
EARLY_LEVEL = 0.998
EARLY_SAME = 0.01
# An early decision also needs an interval that is narrow compared with the effect, the logarithm of the ratio. Its
# half-width is at most a third of the effect, but always between 1% and 2%, or a thirtieth of a large effect. With 2%
# for every effect, runs that found 3% ended after 24 of 56 rounds. The spread between such short runs then hid these 3%
# from later runs of the case.
_EARLY_HALF_WIDTH_SHARE = 1 / 3
_EARLY_HALF_WIDTHS = (0.01, 0.02)
_EARLY_HALF_WIDTH_SHARE_OF_LARGE_EFFECT = 1 / 30
FINAL_LEVEL = 0.99
MIN_ROUNDS_FOR_VERDICT = 10
# If one case has this many times as many cells as another, whole steps are compared. Cases of one suite differ by
# less: a product without casts is one cell, with casts it is two or three.
_MAX_CELL_COUNT_RATIO = 2.5


def cell_seconds(
    timing: Timing, calls: int, rounds: Sequence[int] | None = None, whole_steps: bool = False
) -> stats.Floats:
    """Returns the seconds of each cell (column) in each round (row): the minimum over the first `calls` calls of a
    slot.

    Every slot must have that many calls. With `whole_steps`, a step counts as one cell.
    """
    selected_slots = _select_slots(timing, rounds)
    shape = (len(selected_slots), calls, len(timing.segments.phases))
    nanoseconds = chain.from_iterable(chain.from_iterable(slot.calls_ns[:calls] for slot in selected_slots))
    by_call = np.fromiter(nanoseconds, np.float64, math.prod(shape)).reshape(shape)
    if whole_steps:
        by_call = by_call.sum(axis=2, keepdims=True)
    seconds: stats.Floats = by_call.min(axis=1) * 1e-9
    return seconds


def _select_slots(timing: Timing, rounds: Sequence[int] | None) -> Sequence[SlotSample]:
    if rounds is None:
        return timing.slots
    chosen_rounds = set(rounds)
    return [slot for slot in timing.slots if slot.round in chosen_rounds]


def step_seconds_of_calls(timing: Timing) -> stats.Floats:
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
    """Returns how far the sum of the fastest cells is below the time of the fastest step, as a share of that time.
    Returns 0 if it is not below.
    """
    calls = calls or count_common_calls(timing)
    best_seconds = float(stats.best_by_segment(cell_seconds(timing, calls, rounds)).sum())
    fastest_step_seconds = float(cell_seconds(timing, calls, rounds, whole_steps=True).min())
    return max(0.0, 1 - best_seconds / fastest_step_seconds) if fastest_step_seconds > 0 else 0.0


def do_cells_compensate(timings: Sequence[Timing], rounds: Sequence[int], floor: float) -> bool:
    """Returns whether the cells of any timing compensate for each other. They do if their fastest times sum to less
    than the fastest step, by more than the noise floor.
    """
    calls = count_common_calls(*timings)
    return any(share_below_fastest_step(timing, calls, rounds) > floor for timing in timings)


def best_ratio(
    timings: Sequence[Timing], rounds: Sequence[int], level: float = FINAL_LEVEL, whole_steps: bool | None = None
) -> Interval:
    """Returns the best case of the first timing divided by that of the other timings, in these rounds."""
    samples = to_comparable(timings, rounds, whole_steps)
    best_cases = list(map(stats.resample_best_case, samples))
    return _to_ratio(best_cases, [sample.sum(axis=1) for sample in samples], level)


def _to_ratio(arms: Sequence[stats.Resampled], seconds: Sequence[stats.Floats], level: float) -> Interval:
    """Returns the ratio of the first case to the other cases with an interval. With few rounds, the interval is only
    the range.
    """
    ratio = stats.ratio(arms[0], arms[1:], level)
    return stats.replace_interval_by_range(ratio, seconds) if len(seconds[0]) < LEAST_ROUNDS else ratio


def to_comparable(timings: Sequence[Timing], rounds: Sequence[int], whole_steps: bool | None) -> list[stats.Floats]:
    """Returns the seconds of the cells of each timing. If the cells are not comparable, returns the seconds of whole
    steps instead. All timings use the same number of calls per slot, because a minimum over more calls is lower. A
    sum of minimums over more cells is also lower, so whole steps are used if one case has many more cells. For
    example, a model without marks is one cell, but a copy of it with marked products has dozens. Whole steps are also
    used if `whole_steps` is True, or if it is None and cells compensate for each other.
    """
    calls = count_common_calls(*timings)
    if whole_steps is None:
        whole_steps = do_cells_compensate(timings, rounds, BAND)
    samples = [] if whole_steps else [cell_seconds(timing, calls, rounds) for timing in timings]
    if whole_steps or are_cut_unevenly(samples):
        return [cell_seconds(timing, calls, rounds, whole_steps=True) for timing in timings]
    return samples


def are_cut_unevenly(samples: Sequence[stats.Floats]) -> bool:
    """Returns whether the cases' numbers of cells differ so much that only whole steps are comparable."""
    cell_counts = [_effective_cell_count(sample) for sample in samples]
    return max(cell_counts) > _MAX_CELL_COUNT_RATIO * min(cell_counts)


def _effective_cell_count(samples: stats.Floats) -> float:
    """Returns the effective number of cells of a step: the number of equally long cells with the same entropy."""
    cell_shares = samples.sum(axis=0)
    cell_shares = cell_shares[cell_shares > 0] / max(float(cell_shares.sum()), 1e-300)
    return float(np.exp(-(cell_shares * np.log(cell_shares)).sum()))


def mean_ratio(timings: Sequence[Timing], rounds: Sequence[int], level: float = FINAL_LEVEL) -> Interval:
    """Returns the first timing's mean over all calls, divided by that of the other timings."""
    samples = [mean_seconds(timing, rounds) for timing in timings]
    return _to_ratio(list(map(stats.resample_mean, samples)), samples, level)


def mean_seconds(timing: Timing, rounds: Sequence[int]) -> stats.Floats:
    """Returns the seconds of a call in each round: the mean over all calls of the slot, without time spent waiting
    for a core.
    """
    return np.array([_mean_call_seconds(slot) for slot in _select_slots(timing, rounds)])


# A slot's calls, with the marks between them, take at least this share of their thread's CPU time.
_MIN_BUSY_SHARE = 0.75


def _mean_call_seconds(slot: SlotSample) -> float:
    seconds = sum(map(sum, slot.calls_ns)) * 1e-9
    running_seconds = seconds - (slot.waited_seconds or 0.0)
    busy_seconds = min(seconds, slot.thread_seconds or 0.0)
    # If the thread waited between two calls, that waiting must not be subtracted from the calls.
    if running_seconds < _MIN_BUSY_SHARE * busy_seconds:
        running_seconds = busy_seconds
    # The time of calls is positive, even if the system reports more waiting than time.
    return (running_seconds if running_seconds > 0 else seconds) / len(slot.calls_ns)


def reference_timings_of(reference: Timing, control: Timing | None) -> list[Timing]:
    """Returns the timings of a reference and of its control, if that ran."""
    return [reference] if control is None or not control.slots else [reference, control]


def aa_interval(reference: Timing, control: Timing | None) -> Interval | None:
    """Returns the ratio of the control's time to the reference's, which run identical code. Returns None without a
    control.
    """
    if control is None or not (rounds := find_common_rounds([control, reference])):
        return None
    return _estimate_noise_floor([reference, control], rounds)[0]


def needs_whole_steps(reference: Timing, control: Timing | None) -> bool:
    reference_timings = reference_timings_of(reference, control)
    rounds = find_common_rounds(reference_timings)
    return bool(rounds) and _estimate_noise_floor(reference_timings, rounds)[1]


def _estimate_noise_floor(
    reference_timings: Sequence[Timing], rounds: Sequence[int], case: Timing | None = None
) -> tuple[Interval | None, bool]:
    """Returns the A/A interval of a reference and its control, and whether whole steps are compared. Without a
    control, the interval is None.

    The A/A interval that is computed from cells is too wide if cells compensate for each other. So if whole steps of
    the reference and its control agree better, their interval decides how much cells may compensate.
    """
    timings = [*reference_timings, case] if case is not None else reference_timings
    if len(reference_timings) < 2:
        return None, do_cells_compensate(timings, rounds, BAND)
    aa_of_cells = best_ratio(reference_timings[::-1], rounds, whole_steps=False)
    if not do_cells_compensate(timings, rounds, BAND):
        return aa_of_cells, False
    aa_of_whole_steps = best_ratio(reference_timings[::-1], rounds, whole_steps=True)
    whole_steps = do_cells_compensate(timings, rounds, max(BAND, min(aa_of_cells.reach, aa_of_whole_steps.reach)))
    return aa_of_whole_steps if whole_steps else aa_of_cells, whole_steps


def verdict_band(aa: Interval | None) -> float:
    """Returns the half-width of the band around 1. A case inside the band is neither faster nor slower."""
    return max(BAND, aa.distance_from_one) if aa is not None else BAND


def decide_verdict(interval: Interval, band: float, same: float = SAME) -> Verdict:
    if interval.low > 1 + band:
        return Verdict.SLOWER
    if interval.high < 1 - band:
        return Verdict.FASTER
    if interval.low > 1 - same and interval.high < 1 + same:
        return Verdict.SAME
    return Verdict.UNSURE


class Conclusion(NamedTuple):
    """A verdict with the ratios that it follows from: of best cases (`ratio`), of means over all calls (`typical`),
    and of identical code (`aa`). `whole` is True if whole steps were compared instead of cells.
    """

    verdict: Verdict
    ratio: Interval
    typical: Interval
    aa: Interval | None
    whole: bool = False


def is_uneven(ratio: Interval, mean_ratio: Interval) -> bool:
    """Returns whether the ratio of means over all calls differs from the ratio of the fastest calls by more than
    their noise.
    """
    ratio_distance = max(mean_ratio.low / ratio.high, ratio.low / mean_ratio.high)
    return ratio_distance > 1 + UNEVEN_RATIO or _are_opposite(ratio, mean_ratio)


def mean_agrees(verdict: Verdict, ratio: Interval, mean_ratio: Interval) -> bool:
    """Returns whether the mean over all calls agrees with a verdict from the best case."""
    if verdict is Verdict.SAME:
        return mean_ratio.low > 1 - SAME_MEAN and mean_ratio.high < 1 + SAME_MEAN
    if verdict is Verdict.FASTER:
        return mean_ratio.point < 1 + BAND and not _are_opposite(ratio, mean_ratio)
    return verdict is Verdict.SLOWER and mean_ratio.point > 1 - BAND and not _are_opposite(ratio, mean_ratio)


def _are_opposite(ratio: Interval, mean_ratio: Interval) -> bool:
    return (ratio.high < 1 < mean_ratio.low) or (mean_ratio.high < 1 < ratio.low)


def is_decided(case: Timing, reference: Timing, control: Timing | None) -> bool:
    """Returns whether measuring may stop for this case. It may if the verdict is clear and its interval is narrow.
    Both are judged at the stricter level of early decisions.
    """
    early_conclusion = conclude(case, reference, control, EARLY_LEVEL, EARLY_SAME)
    if early_conclusion is None or early_conclusion.verdict is Verdict.UNSURE:
        return False
    ratio = early_conclusion.ratio
    if not math.isfinite(ratio.half_width):
        return False
    effect = abs(math.log(ratio.point))
    narrowest, widest = _EARLY_HALF_WIDTHS
    max_half_width = min(max(narrowest, _EARLY_HALF_WIDTH_SHARE * effect), widest)
    return ratio.half_width <= max(max_half_width, _EARLY_HALF_WIDTH_SHARE_OF_LARGE_EFFECT * effect)


def conclude(
    case: Timing,
    reference: Timing,
    control: Timing | None,
    level: float = FINAL_LEVEL,
    same: float = SAME,
    reach: float = 0.0,
    sessions: Sequence[Interval] = (),
    held_up: bool = False,
    earlier: tuple[float, float] = (math.inf, -math.inf),
) -> Conclusion | None:
    """Returns the verdict on the samples of a native case, with its intervals. Returns None if the case has no rounds
    in common with its reference. Runs may differ more than rounds, so the ratio's interval extends at least `reach`
    from its point, as a logarithm. With ratios of earlier `sessions`, the interval contains all their intervals, and
    the point is the mean of all ratios. If other programs disturbed the fastest rounds (`held_up`), the interval also
    contains the mean over all calls. Without a `reach`, such an interval is only a range, with level 0. `earlier` is
    the range of ratios in earlier runs, as logarithms, which the interval contains.
    """
    reference_timings = reference_timings_of(reference, control)
    rounds = find_common_rounds([case, *reference_timings])
    if not rounds:
        return None
    # 1. Compute the ratio of best cases and the ratio of means.
    aa, whole_steps = _estimate_noise_floor(reference_timings, rounds, case)
    ratio = best_ratio([case, *reference_timings], rounds, level, whole_steps)
    ratio_of_means = mean_ratio([case, *reference_timings], rounds, level)
    # 2. Widen the interval by differences that these rounds cannot show.
    if held_up and ratio.level:  # no call was undisturbed, so the time of such a call is unknown
        low, high = min(ratio.low, ratio_of_means.low), max(ratio.high, ratio_of_means.high)
        ratio = replace(ratio, low=low, high=high, level=level if reach else 0.0)
    valid_sessions = [session for session in sessions if 0 < session.low <= session.point <= session.high < math.inf]
    reach /= math.sqrt(1 + len(valid_sessions))
    ratio = _widen_interval(_merge_intervals([*valid_sessions, ratio]), reach, earlier)
    # 3. Derive the verdict.
    verdict = decide_verdict(ratio, verdict_band(aa), same) if len(rounds) >= MIN_ROUNDS_FOR_VERDICT else Verdict.UNSURE
    if not mean_agrees(verdict, ratio, ratio_of_means):
        verdict = Verdict.UNSURE
    return Conclusion(verdict, ratio, ratio_of_means, aa, whole_steps)


def _merge_intervals(ratios: Sequence[Interval]) -> Interval:
    """Returns the smallest interval that contains all intervals, with the level of the last one."""
    if len(ratios) == 1:
        return ratios[0]
    point = math.exp(float(np.mean([math.log(ratio.point) for ratio in ratios])))
    low, high = min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios)
    return replace(ratios[-1], point=point, low=low, high=high)


def log_of_best_ratio(case: Timing, reference: Timing, control: Timing | None) -> float | None:
    """Returns the logarithm of the ratio behind a verdict, or None if there are too few rounds for an interval."""
    reference_timings = reference_timings_of(reference, control)
    rounds = find_common_rounds([case, *reference_timings])
    if len(rounds) < LEAST_ROUNDS:
        return None
    samples = to_comparable(
        [case, *reference_timings], rounds, _estimate_noise_floor(reference_timings, rounds, case)[1]
    )
    case_seconds, *seconds = (float(stats.best_by_segment(sample).sum()) for sample in samples)
    if case_seconds <= 0 or min(seconds) <= 0:
        return None
    return math.log(case_seconds) - float(np.mean(np.log(seconds)))


def _widen_interval(ratio: Interval, reach: float, earlier: tuple[float, float]) -> Interval:
    """Widens an interval so that it extends at least `reach` from its point, and contains the `earlier` range, both as
    logarithms. A mere range of few rounds is returned unchanged.
    """
    if not ratio.level or not 0 < ratio.low <= ratio.high < math.inf:
        return ratio
    low, high = ratio.point * math.exp(-reach), ratio.point * math.exp(reach)
    lowest, highest = map(math.exp, earlier)
    return replace(ratio, low=min(ratio.low, low, lowest), high=max(ratio.high, high, highest))


def best_phases(timing: Timing, whole_steps: bool | None = None) -> tuple[tuple[str, float], ...]:
    """Returns the best-case seconds of each phase, which sum to the best case of the step.

    With `whole_steps`, all cells are taken from the fastest steps, otherwise each cell from its own fastest rounds.
    None means whole steps if no step was as fast as the sum of its fastest cells.
    """
    calls = count_common_calls(timing)
    if whole_steps is None:
        whole_steps = share_below_fastest_step(timing) > BAND
    best_cells = (
        stats.best_steps(fastest_step_cells(timing, calls))
        if whole_steps
        else stats.best_by_segment(cell_seconds(timing, calls))
    )
    seconds_by_phase = dict.fromkeys(CELL_PHASES, 0.0)
    for phase, seconds in zip(timing.segments.phases, best_cells, strict=True):
        seconds_by_phase[phase] += float(seconds)
    return tuple(seconds_by_phase.items())


def best_seconds(timing: Timing, whole_steps: bool | None = None) -> float:
    return sum(seconds for _, seconds in best_phases(timing, whole_steps))


def fastest_step_cells(timing: Timing, calls: int, rounds: Sequence[int] | None = None) -> stats.Floats:
    """Returns the seconds of each cell in the fastest step of each round, with shape (rounds, cells)."""
    steps = [min(slot.calls_ns[:calls], key=sum) for slot in _select_slots(timing, rounds)]
    return np.array(steps, dtype=np.float64) * 1e-9


def find_fastest(candidates: Sequence[Timing], reference: Timing, control: Timing | None) -> int | None:
    """Returns the index of the candidate with the smallest best case, or None if no candidate is faster than the
    reference.
    """
    reference_timings = reference_timings_of(reference, control)
    fastest_index, smallest_ratio = None, 1.0
    for index, timing in enumerate(candidates):
        rounds = find_common_rounds([timing, *reference_timings])
        if rounds and (point := best_ratio([timing, *reference_timings], rounds).point) < smallest_ratio:
            fastest_index, smallest_ratio = index, point
    return fastest_index
