"""From samples to verdicts: faster, slower, same or unsure, and why.

A verdict is FASTER or SLOWER when the ratio's interval lies wholly outside the band, SAME when it lies wholly inside
+-2%, else UNSURE. The band is +-0.5%, or as much as the reference provably differs from its own control (how far the
A/A interval stays away from 1), if that is more. Taking the far end of the A/A interval as the band instead counts
the sampling noise twice: of slow-downs of 2.5% in a 30 ms step it left 14% found instead of 90%, at no alarm either
way. The far end is what is printed as noise floor. The reference counts by both its entries.

Only the best-case estimator (stats.ratio) gives verdicts; the ratio of medians is shown beside it. These rules look at
samples alone, while rounds come and in the end; `findings` knows what else there is to say of a case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from fp8bench.analysis import stats
from fp8bench.model import CELL_PHASES, Interval, Timing, Verdict

BAND = 0.005
SAME = 0.02
# While rounds still come, a decision needs more: each look is another chance to err.
EARLY_LEVEL = 0.998
EARLY_SAME = 0.01
# The ratio itself is wanted too, not only on which side of 1 it lies.
EARLY_HALF_WIDTH = 0.02
FINAL_LEVEL = 0.99
LEAST_FOR_VERDICT = 10


def cells(timing: Timing, calls: int, rounds: Sequence[int] | None = None) -> stats.Floats:
    """Seconds by round and cell: the minimum over the first `calls` calls of each slot, which has as many at least."""
    wanted = None if rounds is None else set(rounds)
    chosen = [slot for slot in timing.slots if wanted is None or slot.round in wanted]
    shape = (len(chosen), calls, len(timing.segments.phases))
    flat = chain.from_iterable(chain.from_iterable(slot.calls_ns[:calls] for slot in chosen))
    found: stats.Floats = np.fromiter(flat, np.float64, math.prod(shape)).reshape(shape).min(axis=1) * 1e-9
    return found


def totals(timing: Timing) -> stats.Floats:
    """Seconds of every call, in the order they ran."""
    return np.array([sum(call) for slot in timing.slots for call in slot.calls_ns], dtype=np.float64) * 1e-9


def _fewest_calls(*timings: Timing) -> int:
    return min(len(slot.calls_ns) for timing in timings for slot in timing.slots)


def best_cases(timings: Sequence[Timing]) -> tuple[list[stats.BestCase], int]:
    """Best cases over the rounds that all were in, and how many those are.

    All give the same number of calls a slot: a minimum over more calls would be lower for that alone.
    """
    rounds = sorted(set.intersection(*({slot.round for slot in timing.slots} for timing in timings)))
    if not rounds:
        return [], 0
    calls = _fewest_calls(*timings)
    return [stats.best_case(cells(timing, calls, rounds)) for timing in timings], len(rounds)


def noise(reference: Timing, control: Timing | None) -> Interval | None:
    """The A/A interval; None without a control."""
    best = best_cases([control, reference])[0] if control is not None and control.slots else []
    return stats.ratio(best[0], best[1:], FINAL_LEVEL) if best else None


def band_of(aa: Interval | None) -> float:
    """The half-width of the band inside which nothing is called faster or slower."""
    return max(BAND, aa.clearance) if aa is not None else BAND


def rule(interval: Interval, band: float, same: float = SAME) -> Verdict:
    """The verdict an interval and a band allow."""
    if interval.low > 1 + band:
        return Verdict.SLOWER
    if interval.high < 1 - band:
        return Verdict.FASTER
    if interval.low > 1 - same and interval.high < 1 + same:
        return Verdict.SAME
    return Verdict.UNSURE


def decided(case: Timing, reference: Timing, control: Timing | None) -> bool:
    """Whether measuring may stop for this case: a clear verdict and a narrow interval, at an early look's level."""
    known = _judge(case, reference, control, EARLY_LEVEL, EARLY_SAME)
    return known is not None and known[0] is not Verdict.UNSURE and known[1].half_width <= EARLY_HALF_WIDTH


def conclude(
    case: Timing, reference: Timing, control: Timing | None
) -> tuple[Verdict, Interval, Interval | None] | None:
    """The final verdict on native samples, with its interval and the A/A interval of the same rounds."""
    return _judge(case, reference, control, FINAL_LEVEL, SAME)


def _judge(
    case: Timing, reference: Timing, control: Timing | None, level: float, same: float
) -> tuple[Verdict, Interval, Interval | None] | None:
    entries = [reference] if control is None or not control.slots else [reference, control]
    best, rounds = best_cases([case, *entries])
    if not rounds:
        return None
    interval = stats.ratio(best[0], best[1:], level)
    aa = stats.ratio(best[2], best[1:2], FINAL_LEVEL) if len(entries) == 2 else None
    verdict = rule(interval, band_of(aa), same) if rounds >= LEAST_FOR_VERDICT else Verdict.UNSURE
    return verdict, interval, aa


def best_phases(timing: Timing) -> tuple[tuple[str, float], ...]:
    """Best-case seconds of each phase: the sum of its cells' fastest rounds. They sum to the step."""
    best = stats.best_by_segment(cells(timing, _fewest_calls(timing)))
    sums = dict.fromkeys(CELL_PHASES, 0.0)
    for phase, seconds in zip(timing.segments.phases, best, strict=True):
        sums[phase] += float(seconds)
    return tuple(sums.items())
