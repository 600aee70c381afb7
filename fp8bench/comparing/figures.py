"""The figures of a case that two sides have, made alike: as many rounds, calls and cells on both.

The best case of more rounds is lower for that alone, and so is a sum over more stretches. So every run of a case counts
with as many of its first rounds, and as many calls of each, as the run that has fewest; where the marks of a step
changed, a step counts as one stretch on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median, stdev

from fp8bench import stats
from fp8bench.analysis.verdicts import FINAL_LEVEL, cells
from fp8bench.comparing.across import Estimate
from fp8bench.comparing.sides import Sighting
from fp8bench.model import Status, Timing

TIME = "time"
RELATIVE = "relative_time"
# An emulated case gets so many; of fewer, the fastest three are any three.
LEAST_ROUNDS = 8
# More of these is better, or neither more nor less is. Other figures of the same tensors say what they would say.
_NOT_LOWER_ENDS = ("_db",)
# What a sensor or a clock says, once for each window: never the same twice.
_NOISY_UNITS = frozenset({"s", "J", "W"})
# The standard error of a median over that of a mean, of Gaussian samples.
_MEDIANS = math.sqrt(math.pi / 2)
_NOT_LOWER = frozenset({"utilisation_percent", "dynamic_range_octaves", "subnormal_percent"})


@dataclass(frozen=True)
class Figures:
    """One figure of a case on both sides, an estimate a run. `few`: too few rounds for an interval within a run.

    `beside` are runs of neither side, which say how far runs lie apart.
    """

    metric: str
    unit: str
    before: tuple[Estimate, ...]
    after: tuple[Estimate, ...]
    few: bool = False
    beside: tuple[Estimate, ...] = ()


@dataclass(frozen=True)
class Values:
    """One figure that a step comes to and no clock measures, on both sides, a value a run."""

    metric: str
    unit: str
    before: tuple[float, ...]
    after: tuple[float, ...]


def timed(before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting] = ()) -> Iterator[Figures]:
    """The time of a step, and that over the reference's of the same rounds, where both sides have them."""
    timings = [_timings(side) for side in (before, after, beside)]
    if not all(timings[:2]):
        return
    rounds = min(timing.num_rounds for side in timings for timing in side)
    few = rounds < LEAST_ROUNDS
    old, new, others = _best_cases(timings, rounds)
    yield Figures(TIME, "s", old, new, few, others)
    if len({one.reference for one in (*before, *after, *beside)}) == 1:
        old, new, others = (tuple(_ratios(side)) for side in (before, after, beside))
        if old and new:
            yield Figures(RELATIVE, "x", old, new, few, others)


def sensed(before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting] = ()) -> Iterator[Figures]:
    """Energy and its like: an estimate a run, whose error is that of the median of its samples."""
    for name, unit in _names(after).items():
        if unit in _NOISY_UNITS:
            old, new, others = (tuple(_sensed(side, name)) for side in (before, after, beside))
            if old and new:
                yield Figures(name, unit, old, new, beside=others)


def counted(before: Sequence[Sighting], after: Sequence[Sighting]) -> Iterator[Values]:
    """Memory and errors: what both sides have, in the order of the second."""
    for name, unit in _names(after).items():
        if unit not in _NOISY_UNITS:
            values = [[value for one in side for value in _samples(one, name)] for side in (before, after)]
            if all(values):
                yield Values(name, unit, tuple(values[0]), tuple(values[1]))


def _names(after: Sequence[Sighting]) -> dict[str, str]:
    """What was measured beside times, and in which unit, where less is better."""
    found = {one.metric: one.unit for sighting in after for one in sighting.record.measurements}
    return {name: unit for name, unit in found.items() if is_cost(name)}


def is_cost(name: str) -> bool:
    """Whether less of a figure is better, so that it can be compared at all."""
    return not name.endswith(_NOT_LOWER_ENDS) and name not in _NOT_LOWER


def _sensed(side: Sequence[Sighting], metric: str) -> Iterator[Estimate]:
    for one in side:
        logs = [math.log(value) for value in _samples(one, metric) if 0 < value < math.inf]
        if logs:
            error = _MEDIANS * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
            yield Estimate(median(logs), error)


def _timings(side: Sequence[Sighting]) -> list[Timing]:
    kept = [one.record.timing for one in side if one.record.status is Status.OK]
    return [timing for timing in kept if timing is not None and timing.slots]


def _samples(sighting: Sighting, metric: str) -> tuple[float, ...]:
    found = sighting.record.measurement(metric)
    return found.samples if found is not None and sighting.record.status is Status.OK else ()


def _best_cases(sides: Sequence[Sequence[Timing]], rounds: int) -> list[tuple[Estimate, ...]]:
    timings = [timing for side in sides for timing in side]
    calls = min(len(slot.calls_ns) for timing in timings for slot in timing.slots)
    alike = len({(timing.segments, timing.varying) for timing in timings}) == 1
    return [tuple(_best_case(one, rounds, calls, alike) for one in side) for side in sides]


def _best_case(timing: Timing, rounds: int, calls: int, alike: bool) -> Estimate:
    first = [slot.round for slot in timing.slots[:rounds]]
    samples = cells(timing, calls, first)
    best = stats.best_case(samples if alike else samples.sum(axis=1, keepdims=True))
    return Estimate(best.point, best.error)


def _ratios(side: Sequence[Sighting]) -> Iterator[Estimate]:
    """The ratios to the reference, with the standard errors that their intervals stand for."""
    reach = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
    for one in side:
        ratio = one.finding.ratio if one.finding is not None else None
        if ratio is not None and one.record.status is Status.OK and math.isfinite(ratio.half_width):
            yield Estimate(math.log(ratio.point), ratio.half_width / reach)
