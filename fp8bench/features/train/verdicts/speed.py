"""Quality-adjusted speed-up: how much sooner an arm comes to a loss, not only how fast its steps are.

It is the ratio of speeds, by steps of the same number, times the ratio of the steps that both take to one loss: the
worse of their two endpoints, which both reach. When the better one had that loss is told by the course of its losses in
the last two thirds of the steps, a parabola over the logarithm of the steps. To look for the first step that is as low
as some loss was tried: the noise of batches decides which step that is, and arms that differ by one unit in the last
place were told half as fast.

The interval is Student's over seeds that are left out in turn (a jackknife): gap, course and speed are uncertain
together. A bootstrap of five seeds covers too little (suites/verdicts.py measures both).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8bench.analysis.compare.interval import quantile
from fp8bench.features.train.values import UNPAIRED
from fp8bench.features.train.verdicts.curves import Curve, last_of
from fp8bench.features.train.verdicts.judging import LEAST_PAIRS, SHOWN, gap_of
from fp8bench.model import Interval

# The logarithm of a third: the course is that of the last two thirds, and says nothing of what lies before them.
_LEAST = -math.log(3)
_LEAST_POINTS = 10


@dataclass(frozen=True)
class AdjustedSpeed:
    """Above 1 is faster: `raw` by steps alone, `adjusted` to the same loss.

    `fewer_steps` is how many times fewer steps the arm takes to that loss. With `bounded` the arm ended with a loss
    that its reference had left behind after a third of its steps: it is at most so fast. None is not known, because
    the loss of the better one does not surely fall any more.
    """

    raw: Interval
    adjusted: Interval | None
    bounded: bool = False
    fewer_steps: Interval | None = None


def adjusted_speed(pairs: Sequence[tuple[Curve, Curve]]) -> AdjustedSpeed | None:
    """Of an arm beside its reference, (reference, arm) in each seed; None for fewer than five that were timed."""
    timed = [(pair, log) for pair in pairs if (log := _log_speed(*pair)) is not None]
    if len(timed) < LEAST_PAIRS:
        return None
    every, speeds = [pair for pair, _ in timed], [log for _, log in timed]
    found = gap_of(speeds)
    assert found is not None and found.shown is not None
    raw, steps = _exp(found.shown), log_steps(every)
    if steps is None:
        return AdjustedSpeed(raw, None)
    point = found.point + max(steps, _LEAST)
    if steps < _LEAST:
        bound, few = (_exp(Interval(one, -math.inf, one, SHOWN)) for one in (point, _LEAST))
        return AdjustedSpeed(raw, bound, bounded=True, fewer_steps=few)
    lefts = [
        max(left, _LEAST)
        for seed in range(len(every))
        if (left := log_steps(every[:seed] + every[seed + 1 :])) is not None
    ]
    if len(lefts) < len(every):
        return AdjustedSpeed(raw, None)
    others = [statistics.fmean(speeds[:seed] + speeds[seed + 1 :]) + left for seed, left in enumerate(lefts)]
    return AdjustedSpeed(raw, _jackknifed(point, others), fewer_steps=_jackknifed(max(steps, _LEAST), lefts))


def _jackknifed(point: float, others: Sequence[float]) -> Interval:
    """From a logarithm and what it is without each seed in turn."""
    error = math.sqrt((len(others) - 1) * statistics.pvariance(others))
    reach = quantile(SHOWN, len(others) - 1) * error
    return _exp(Interval(point, point - reach, point + reach, SHOWN))


def log_steps(pairs: Sequence[tuple[Curve, Curve]]) -> float | None:
    """The logarithm of how many times fewer steps the arm takes; minus infinity for less than a third as many.

    None where the loss of the better one does not fall, or has not been followed so far back.
    """
    rise = statistics.fmean(arm.endpoint - reference.endpoint for reference, arm in pairs)
    better, sign = (1, -1.0) if rise < 0 else (0, 1.0)
    place = _place_above([pair[better].losses for pair in pairs], sign * rise)
    return None if place is None or (sign < 0 and place < _LEAST) else sign * place


def _place_above(curves: Sequence[Sequence[float]], rise: float) -> float | None:
    """Where the mean of curves lay so far above its endpoint: the logarithm of that step over the endpoint's.

    Minus infinity where that is before the last two thirds; None where the losses there do not fall all along.
    """
    steps = len(curves[0])
    places = np.log(np.arange(1, steps + 1) / (steps - (last_of(steps) - 1) / 2))
    losses = np.array(curves).mean(axis=0)
    known = (places >= _LEAST) & np.isfinite(losses)
    if known.sum() < _LEAST_POINTS:
        return None
    bend, slope, _ = (float(one) for one in np.polyfit(places[known], losses[known], 2))
    if max(slope, slope + 2 * bend * _LEAST) >= 0:
        bend, slope = 0.0, float(np.polyfit(places[known], losses[known], 1)[0])
    if slope >= 0:
        return None
    if rise > _LEAST * (slope + bend * _LEAST):
        return -math.inf
    # The root of bend x^2 + slope x = rise that is 0 where nothing rises, in a form that bears a bend of 0.
    root = math.sqrt(max(0.0, slope * slope + 4 * bend * rise))
    return -2 * rise / (root - slope)


def _log_speed(reference: Curve, arm: Curve) -> float | None:
    """The median over the steps that were timed in both: those of one number are of neighbouring slices.

    None where no reference was beside the arm.
    """
    if UNPAIRED in arm.events:
        return None
    usual = {row.step: row.seconds for row in reference.rows}
    beside = arm.beside or usual
    logs = [
        math.log(new.tokens / new.seconds * base / old.tokens)
        for old, new in zip(reference.rows, arm.rows, strict=True)
        if (base := beside.get(new.step, 0.0)) > 0 and new.seconds > 0
    ]
    return statistics.median(logs) if logs else None


def _exp(logs: Interval) -> Interval:
    point, low, high = (math.exp(min(700.0, max(-700.0, one))) for one in (logs.point, logs.low, logs.high))
    return Interval(point, low, high, logs.level)


