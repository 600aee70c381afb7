"""Quality-adjusted speed-up: how much sooner an arm comes to the reference's loss, not only how fast its steps are.

In each seed it is the ratio of speeds, by steps of the same number, times the ratio of the steps that both take to one
loss. Its interval is Student's over the logarithms of the seeds: each seed gives one paired number of its own, and a
bootstrap of five covers too little (suites/verdicts.py measures both).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fp8bench.analysis.learning.curves import Curve, last_of
from fp8bench.analysis.learning.judging import SHOWN, gap_of
from fp8bench.model import Interval

# The loss that both are to reach is the reference's after this share of its steps: an arm that learns more slowly has
# the rest to get there.
TARGET = 0.75


@dataclass(frozen=True)
class AdjustedSpeed:
    """Above 1 is faster: `raw` by steps alone, `adjusted` to the same loss.

    In `never` of its seeds the arm does not get there. It is counted with all its steps, so that `adjusted` is no more
    than a bound: at most so fast.
    """

    raw: Interval
    adjusted: Interval
    never: int


def adjusted_speed(pairs: Sequence[tuple[Curve, Curve]]) -> AdjustedSpeed | None:
    """Of an arm beside its reference, (reference, arm) in each seed; None for fewer than two that say both."""
    logs = []
    for reference, arm in pairs:
        raw, steps = _log_speed(reference, arm), log_steps(reference.losses, arm.losses)
        if raw is not None and steps is not None:
            logs.append((raw, raw + steps[0], steps[1]))
    if len(logs) < 2:
        return None
    raw_logs, adjusted_logs, reached = zip(*logs, strict=True)
    return AdjustedSpeed(_ratio(raw_logs), _ratio(adjusted_logs), reached.count(False))


def log_steps(reference: Sequence[float], arm: Sequence[float]) -> tuple[float, bool] | None:
    """The logarithm of how many times fewer steps the arm takes to the target, and whether it gets there.

    One that does not is counted with all its steps. None where a loss is not finite.
    """
    if not all(map(math.isfinite, (*reference, *arm))):
        return None
    window = last_of(len(reference))
    old, new = (_envelope(losses, window) for losses in (reference, arm))
    target = old[max(0, round(TARGET * len(reference)) - window)]
    own, other = _reached(old, target, window), _reached(new, target, window)
    assert own is not None
    return math.log(own / (len(arm) if other is None else other)), other is not None


def _log_speed(reference: Curve, arm: Curve) -> float | None:
    """The median over the steps that were timed in both: those of one number are of neighbouring slices."""
    logs = [
        math.log(new.tokens / new.seconds * old.seconds / old.tokens)
        for old, new in zip(reference.rows, arm.rows, strict=True) if old.seconds > 0 and new.seconds > 0
    ]  # fmt: skip
    return statistics.median(logs) if logs else None


def _envelope(losses: Sequence[float], window: int) -> list[float]:
    """The least that the mean over a window has been so far; the first one is of the first whole window."""
    sums = [0.0, *accumulate(losses)]
    return list(accumulate(((late - early) / window for early, late in zip(sums, sums[window:], strict=False)), min))


def _reached(envelope: Sequence[float], target: float, window: int) -> float | None:
    """After how many steps it is as low as the target, between two of them by a straight line."""
    if envelope[0] <= target:
        return float(window)
    for place, (before, after) in enumerate(pairwise(envelope)):
        if after <= target:
            return window + place + (before - target) / (before - after)
    return None


def _ratio(logs: Sequence[float]) -> Interval:
    found = gap_of(logs)
    assert found is not None and found.shown is not None
    low, high = (math.exp(min(700.0, max(-700.0, one))) for one in (found.shown.low, found.shown.high))
    return Interval(math.exp(found.point), low, high, SHOWN)
