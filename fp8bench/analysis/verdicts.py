"""From samples to verdicts: faster, slower, same or cannot tell, and why.

A verdict is FASTER or SLOWER when the ratio's interval lies wholly outside the band, SAME when it lies wholly inside
+-2%, else UNSURE. The band is +-0.5%, or as much as the reference provably differs from its own control (how far the
A/A interval stays away from 1), if that is more. With the far end of the A/A interval as the band, sampling noise would
count twice: only 14% instead of 90% of slow-downs of 2.5% in a 30 ms step were found, with no alarm either way. The far
end is printed as noise floor. Both entries of the reference count.

The best case sees only the fastest calls: it does not notice a step that is three times slower on three of four calls.
So a second figure may take the verdict away: the mean over all calls, paired by round, less the time that the thread
waited for a core. FASTER and SLOWER must not contradict it; SAME needs it wholly inside +-3.5%. With the waiting left
in, a mean on a loaded machine has ten times as much noise.

The cells of a step may make up for each other. A step that waits for a clock, or for a batch that another thread
prepares, always takes the same time, and still its fastest cells, of different rounds, sum to less than any step that
ran. The arm that varies more, or is cut finer, would then seem faster. So if an arm's best case lies below its fastest
step by more than the noise floor, whole steps are compared. On a loaded machine this happens to honest steps too.

Fewer rounds than a plain command takes give no 99% interval: 8% of 900 samples of ten rounds did not hold the ratio of
the long run that they were part of, because clocks and neighbours change slower than that. They give the range of the
rounds, with a level of 0, and a verdict needs all of it.

These rules use samples alone, while rounds come and at the end; `findings` adds what else is known about a case.
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
# For the mean over all calls, which has more noise. Not 5%, or a mean that moved by 5% would sometimes pass.
TYPICAL_SAME = 0.035
# If the mean differs from the best case by this much, calls differ from each other.
UNEVEN = 0.05
# Before the last round, a decision needs more evidence: each look is one more chance to err.
EARLY_LEVEL = 0.998
EARLY_SAME = 0.01
# An early decision also needs a narrow interval: +-2%, or this share of a large ratio's logarithm.
EARLY_HALF_WIDTH = 0.02
_EARLY_SHARE = 1 / 30
FINAL_LEVEL = 0.99
LEAST_FOR_VERDICT = 10
# Arms of one suite differ by less: a product without casts is one cell, with casts two or three.
_FINER = 2.5


def cells(timing: Timing, calls: int, rounds: Sequence[int] | None = None, whole: bool = False) -> stats.Floats:
    """Returns seconds by round and cell: the minimum over the first `calls` calls of each slot.

    Every slot must have that many calls. With `whole`, a step is one cell.
    """
    slots = _slots_of(timing, rounds)
    shape = (len(slots), calls, len(timing.segments.phases))
    numbers = chain.from_iterable(chain.from_iterable(slot.calls_ns[:calls] for slot in slots))
    by_call = np.fromiter(numbers, np.float64, math.prod(shape)).reshape(shape)
    if whole:
        by_call = by_call.sum(axis=2, keepdims=True)
    seconds: stats.Floats = by_call.min(axis=1) * 1e-9
    return seconds


def _slots_of(timing: Timing, rounds: Sequence[int] | None) -> Sequence[SlotSample]:
    if rounds is None:
        return timing.slots
    chosen = set(rounds)
    return [slot for slot in timing.slots if slot.round in chosen]


def totals(timing: Timing) -> stats.Floats:
    """Returns the seconds of every call, in the order in which they ran."""
    calls = chain.from_iterable(slot.calls_ns for slot in timing.slots)
    return np.array([sum(call) for call in calls], dtype=np.float64) * 1e-9


def fewest_calls(*timings: Timing) -> int:
    """Returns the number of calls that every slot has."""
    slots = chain.from_iterable(timing.slots for timing in timings)
    return min(len(slot.calls_ns) for slot in slots)


def common_rounds(timings: Sequence[Timing]) -> list[int]:
    """Returns the rounds in which all timings have a slot."""
    common = {slot.round for slot in timings[0].slots}
    for timing in timings[1:]:
        common &= {slot.round for slot in timing.slots}
    return sorted(common)


def below_every_step(timing: Timing, calls: int = 0, rounds: Sequence[int] | None = None) -> float:
    """Returns the share by which the best case by cells is below the fastest step; 0 if it is not."""
    calls = calls or fewest_calls(timing)
    best = float(stats.best_by_segment(cells(timing, calls, rounds)).sum())
    fastest = float(cells(timing, calls, rounds, whole=True).min())
    return max(0.0, 1 - best / fastest) if fastest > 0 else 0.0


def cells_make_up(timings: Sequence[Timing], rounds: Sequence[int], floor: float) -> bool:
    """Whether the cells of a timing compensate for each other by more than the floor."""
    calls = fewest_calls(*timings)
    return any(below_every_step(timing, calls, rounds) > floor for timing in timings)


def best_ratio(
    timings: Sequence[Timing], rounds: Sequence[int], level: float = FINAL_LEVEL, whole: bool | None = None
) -> Interval:
    """Returns the first timing's best case over that of the others, in their common rounds."""
    samples = to_comparable(timings, rounds, whole)
    best = list(map(stats.best_case, samples))
    return _to_ratio(best, [sample.sum(axis=1) for sample in samples], level)


def _to_ratio(arms: Sequence[stats.Resampled], seconds: Sequence[stats.Floats], level: float) -> Interval:
    """Returns the ratio of the first arm to the others, with an interval, or with the range over few rounds."""
    ratio = stats.ratio(arms[0], arms[1:], level)
    return stats.extent(ratio, seconds) if len(seconds[0]) < LEAST_ROUNDS else ratio


def to_comparable(timings: Sequence[Timing], rounds: Sequence[int], whole: bool | None) -> list[stats.Floats]:
    """Returns the cells of each timing, or its whole steps if cells do not compare.

    All use the same number of calls per slot, because a minimum over more calls is lower. For the same reason whole
    steps are compared if one arm has many more cells than another (an unmarked model is one cell, a copy with marked
    products dozens). They are also compared if `whole` is True, or if it is None and cells compensate for each other.
    """
    calls = fewest_calls(*timings)
    if whole is None:
        whole = cells_make_up(timings, rounds, BAND)
    samples = [] if whole else [cells(timing, calls, rounds) for timing in timings]
    if whole or are_cut_unevenly(samples):
        return [cells(timing, calls, rounds, whole=True) for timing in timings]
    return samples


def are_cut_unevenly(samples: Sequence[stats.Floats]) -> bool:
    """Whether the arms' steps have too different numbers of cells, so that only whole steps compare."""
    parts = [_parts(sample) for sample in samples]
    return max(parts) > _FINER * min(parts)


def _parts(samples: stats.Floats) -> float:
    """Returns the effective number of cells of a step: how many equal ones would have the same entropy."""
    shares = samples.sum(axis=0)
    shares = shares[shares > 0] / max(float(shares.sum()), 1e-300)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def mean_ratio(timings: Sequence[Timing], rounds: Sequence[int], level: float = FINAL_LEVEL) -> Interval:
    """Returns the first timing's mean over all calls, over that of the others."""
    samples = [means(timing, rounds) for timing in timings]
    return _to_ratio(list(map(stats.mean_case, samples)), samples, level)


def means(timing: Timing, rounds: Sequence[int]) -> stats.Floats:
    """Returns seconds per call by round: the mean over all calls of the slot, without waiting for a core."""
    return np.array([_mean_call(slot) for slot in _slots_of(timing, rounds)])


# Calls and the marks between them take at least this share of their thread's CPU time.
_LEAST_BUSY = 0.75


def _mean_call(slot: SlotSample) -> float:
    seconds = sum(map(sum, slot.calls_ns)) * 1e-9
    running = seconds - (slot.waited_seconds or 0.0)
    busy = min(seconds, slot.thread_seconds or 0.0)
    # The thread may have waited between two calls, which counts for no call.
    if running < _LEAST_BUSY * busy:
        running = busy
    # Calls took some time, whatever the system reports.
    return (running if running > 0 else seconds) / len(slot.calls_ns)


def entries_of(reference: Timing, control: Timing | None) -> list[Timing]:
    """Returns the timings of a reference and, if it ran, of its control."""
    return [reference] if control is None or not control.slots else [reference, control]


def aa_interval(reference: Timing, control: Timing | None) -> Interval | None:
    """Returns the A/A interval; None without a control."""
    if control is None or not (rounds := common_rounds([control, reference])):
        return None
    return _floor([reference, control], rounds)[0]


def compares_whole_steps(reference: Timing, control: Timing | None) -> bool:
    entries = entries_of(reference, control)
    rounds = common_rounds(entries)
    return bool(rounds) and _floor(entries, rounds)[1]


def _floor(
    entries: Sequence[Timing], rounds: Sequence[int], case: Timing | None = None
) -> tuple[Interval | None, bool]:
    """Returns the A/A interval of a reference and its control, if it has one, and whether whole steps are compared.

    Cells that compensate for each other also widen the A/A interval of cells; so the noise floor is that of whole steps
    if these agree better.
    """
    timings = [*entries, case] if case is not None else entries
    if len(entries) < 2:
        return None, cells_make_up(timings, rounds, BAND)
    aa = best_ratio(entries[::-1], rounds, whole=False)
    if not cells_make_up(timings, rounds, BAND):
        return aa, False
    by_steps = best_ratio(entries[::-1], rounds, whole=True)
    whole = cells_make_up(timings, rounds, max(BAND, min(aa.reach, by_steps.reach)))
    return by_steps if whole else aa, whole


def band_of(aa: Interval | None) -> float:
    """Returns the half-width of the band inside which nothing is called faster or slower."""
    return max(BAND, aa.clearance) if aa is not None else BAND


def rule(interval: Interval, band: float, same: float = SAME) -> Verdict:
    if interval.low > 1 + band:
        return Verdict.SLOWER
    if interval.high < 1 - band:
        return Verdict.FASTER
    if interval.low > 1 - same and interval.high < 1 + same:
        return Verdict.SAME
    return Verdict.UNSURE


class Conclusion(NamedTuple):
    """The ratio of best cases, that of the means over all calls, and the A/A interval. `whole`: whole steps were
    compared."""

    verdict: Verdict
    ratio: Interval
    typical: Interval
    aa: Interval | None
    whole: bool = False


def is_uneven(ratio: Interval, typical: Interval) -> bool:
    """Whether the mean over all calls differs from the fastest calls beyond the noise of both."""
    apart = max(typical.low / ratio.high, ratio.low / typical.high)
    return apart > 1 + UNEVEN or _opposite(ratio, typical)


def agrees(verdict: Verdict, ratio: Interval, typical: Interval) -> bool:
    """Whether the mean over all calls agrees with a verdict from the best case."""
    if verdict is Verdict.SAME:
        return typical.low > 1 - TYPICAL_SAME and typical.high < 1 + TYPICAL_SAME
    if verdict is Verdict.FASTER:
        return typical.point < 1 + BAND and not _opposite(ratio, typical)
    return verdict is Verdict.SLOWER and typical.point > 1 - BAND and not _opposite(ratio, typical)


def _opposite(ratio: Interval, typical: Interval) -> bool:
    return (ratio.high < 1 < typical.low) or (typical.high < 1 < ratio.low)


def is_decided(case: Timing, reference: Timing, control: Timing | None) -> bool:
    """Whether measuring may stop for this case: a clear verdict and a narrow interval at the early level."""
    early = conclude(case, reference, control, EARLY_LEVEL, EARLY_SAME)
    if early is None or early.verdict is Verdict.UNSURE:
        return False
    width = early.ratio.half_width
    if width <= EARLY_HALF_WIDTH:
        return True
    return math.isfinite(width) and width <= _EARLY_SHARE * abs(math.log(early.ratio.point))


def conclude(
    case: Timing,
    reference: Timing,
    control: Timing | None,
    level: float = FINAL_LEVEL,
    same: float = SAME,
    reach: float = 0.0,
    sessions: Sequence[Interval] = (),
    held_up: bool = False,
) -> Conclusion | None:
    """Returns the verdict on native samples, with its intervals; None without common rounds.

    The ratio's interval extends at least `reach` from its point, as a logarithm, because runs may differ more than
    rounds. With the ratios of earlier `sessions` it spans all of them, about the mean of their points. If other
    programs `held_up` the fastest rounds, it also spans the mean over all calls; without a `reach` it is then a range
    (level 0).
    """
    entries = entries_of(reference, control)
    rounds = common_rounds([case, *entries])
    if not rounds:
        return None
    # 1. Compute the ratios of best cases and of means.
    aa, whole = _floor(entries, rounds, case)
    ratio = best_ratio([case, *entries], rounds, level, whole)
    typical = mean_ratio([case, *entries], rounds, level)
    # 2. Widen the interval by what these rounds cannot show.
    if held_up and ratio.level:  # nobody knows how fast undisturbed calls would have been
        low, high = min(ratio.low, typical.low), max(ratio.high, typical.high)
        ratio = replace(ratio, low=low, high=high, level=level if reach else 0.0)
    sound = [session for session in sessions if 0 < session.low <= session.point <= session.high < math.inf]
    ratio = _widen(_span([*sound, ratio]), reach / math.sqrt(1 + len(sound)))
    # 3. Derive the verdict.
    verdict = rule(ratio, band_of(aa), same) if len(rounds) >= LEAST_FOR_VERDICT else Verdict.UNSURE
    if not agrees(verdict, ratio, typical):
        verdict = Verdict.UNSURE
    return Conclusion(verdict, ratio, typical, aa, whole)


def _span(ratios: Sequence[Interval]) -> Interval:
    """Returns the smallest interval that contains all of them, with the level of the last."""
    if len(ratios) == 1:
        return ratios[0]
    point = math.exp(float(np.mean([math.log(ratio.point) for ratio in ratios])))
    low, high = min(ratio.low for ratio in ratios), max(ratio.high for ratio in ratios)
    return replace(ratios[-1], point=point, low=low, high=high)


def best_log(case: Timing, reference: Timing, control: Timing | None) -> float | None:
    """Returns the logarithm of the ratio behind a verdict; None if there are too few rounds for an interval."""
    entries = entries_of(reference, control)
    rounds = common_rounds([case, *entries])
    if len(rounds) < LEAST_ROUNDS:
        return None
    samples = to_comparable([case, *entries], rounds, _floor(entries, rounds, case)[1])
    case_seconds, *seconds = (float(stats.best_by_segment(sample).sum()) for sample in samples)
    if case_seconds <= 0 or min(seconds) <= 0:
        return None
    return math.log(case_seconds) - float(np.mean(np.log(seconds)))


def _widen(ratio: Interval, reach: float) -> Interval:
    """Widens an interval to extend this far from its point, as a logarithm; a range over few rounds is unchanged."""
    if not ratio.level or not 0 < ratio.low <= ratio.high < math.inf:
        return ratio
    low, high = ratio.point * math.exp(-reach), ratio.point * math.exp(reach)
    return replace(ratio, low=min(ratio.low, low), high=max(ratio.high, high))


def best_phases(timing: Timing, whole: bool | None = None) -> tuple[tuple[str, float], ...]:
    """Returns best-case seconds of each phase, which sum to the best case of the step.

    They are sums of the fastest rounds of each cell or, with `whole`, the cells of the fastest steps. None chooses
    whole steps if no step was as fast as the sum of its fastest cells.
    """
    calls = fewest_calls(timing)
    if whole is None:
        whole = below_every_step(timing) > BAND
    best = stats.best_steps(fastest_step_cells(timing, calls)) if whole else stats.best_by_segment(cells(timing, calls))
    sums = dict.fromkeys(CELL_PHASES, 0.0)
    for phase, seconds in zip(timing.segments.phases, best, strict=True):
        sums[phase] += float(seconds)
    return tuple(sums.items())


def best_seconds(timing: Timing, whole: bool | None = None) -> float:
    return sum(seconds for _, seconds in best_phases(timing, whole))


def fastest_step_cells(timing: Timing, calls: int, rounds: Sequence[int] | None = None) -> stats.Floats:
    """Returns the cells of the fastest step of each round, in seconds: (rounds, cells)."""
    steps = [min(slot.calls_ns[:calls], key=sum) for slot in _slots_of(timing, rounds)]
    return np.array(steps, dtype=np.float64) * 1e-9


def find_fastest(candidates: Sequence[Timing], reference: Timing, control: Timing | None) -> int | None:
    """Returns the index of the candidate with the smallest best case; None if none is faster than the reference."""
    entries = entries_of(reference, control)
    fastest, least = None, 1.0
    for number, timing in enumerate(candidates):
        rounds = common_rounds([timing, *entries])
        if rounds and (point := best_ratio([timing, *entries], rounds).point) < least:
            fastest, least = number, point
    return fastest
