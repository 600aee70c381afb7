"""The figures of a case that two sides have, made alike: as many rounds, calls and cells on both.

The best case of more rounds is lower for that alone, and so is a sum over more stretches. So every run of a case counts
with as many of its first rounds, and as many calls of each, as the run that has fewest; where the marks of a step
changed, a step counts as one stretch on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import NormalDist, median, stdev

from fp8bench.analysis import stats
from fp8bench.analysis.compare.interval import Estimate
from fp8bench.analysis.compare.sides import Sighting
from fp8bench.analysis.metric import Metric
from fp8bench.analysis.metrics import metrics_of
from fp8bench.analysis.verdicts import FINAL_LEVEL, cells, means
from fp8bench.model import Finding, Interval, Label, Status, Timing
from fp8bench.model.specs import RELATIVE, STEP, TIME, Better, Rank

# An emulated case gets so many; of fewer, the fastest three are any three.
LEAST_ROUNDS = 8
# The standard error of a median over that of a mean, of Gaussian samples.
_MEDIANS = math.sqrt(math.pi / 2)
_RATIO, _TYPICAL = attrgetter("ratio"), attrgetter("typical")


@dataclass(frozen=True)
class MatchedFigures:
    """One figure of a case on both sides, an estimate a run. `few`: too few rounds for an interval within a run.

    `beside` are runs of neither side, which say how far runs lie apart. `typical` is the same of all three by the mean
    over all calls.
    """

    metric: str
    unit: str
    before: tuple[Estimate, ...]
    after: tuple[Estimate, ...]
    few: bool = False
    beside: tuple[Estimate, ...] = ()
    typical: tuple[tuple[Estimate, ...], ...] = ()


def timed(
    before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """The time of a step, and that over the reference's of the same rounds, where both sides have them."""
    timings = [
        [timing for one in side if one.record.status is Status.OK and (timing := one.record.timing) and timing.slots]
        for side in (before, after, beside)
    ]
    if not all(timings[:2]):
        return
    all_timings = [timing for side in timings for timing in side]
    rounds = min(timing.num_rounds for timing in all_timings)
    few = rounds < LEAST_ROUNDS
    calls = min(len(slot.calls_ns) for timing in all_timings for slot in timing.slots)
    alike = len({(timing.segments, timing.varying) for timing in all_timings}) == 1
    alike = alike and not any(_whole_steps(one) for side in (before, after, beside) for one in side)
    old, new, others = (tuple(_best_case(one, rounds, calls, alike) for one in side) for side in timings)
    yield MatchedFigures(
        TIME, "s", old, new, few, others, tuple(tuple(_mean(one, rounds) for one in side) for side in timings)
    )
    if len({one.reference for one in (*before, *after, *beside)}) == 1:
        sides = (before, after, beside)
        old, new, others = (tuple(_ratios(side, _RATIO)) for side in sides)
        if old and new:
            typical = tuple(tuple(_ratios(side, _TYPICAL)) for side in sides)
            yield MatchedFigures(RELATIVE, "x", old, new, few, others, typical if all(typical[:2]) else ())


def sensed(
    before: Sequence[Sighting], after: Sequence[Sighting], beside: Sequence[Sighting] = ()
) -> Iterator[MatchedFigures]:
    """Energy and its like: an estimate a run, whose error is that of the median of its samples."""
    sides = [list(map(_costs, side)) for side in (before, after, beside)]
    for metric in _names(sides[1]):
        if metric.noisy:
            old, new, others = (tuple(_sensed(side, metric)) for side in sides)
            if old and new:
                yield MatchedFigures(metric.name, metric.unit, old, new, beside=others)


def counted(before: Sequence[Sighting], after: Sequence[Sighting]) -> Iterator[tuple[Metric, list[float], list[float]]]:
    """Memory and errors, which no clock measures: a value a run of what both sides have, in the order of the second."""
    sides = [list(map(_costs, side)) for side in (before, after)]
    for metric in _names(sides[1]):
        if not metric.noisy:
            old, new = ([value for found in _alike(side, metric) for value in found] for side in sides)
            if old and new:
                yield metric, old, new


_Costs = Mapping[str, Metric]


def _costs(sighting: Sighting) -> _Costs:
    """What was measured beside times, where less is better, by name."""
    if sighting.record.status is not Status.OK:
        return {}
    told = (one for one in metrics_of(sighting.record, None) if one.rank is Rank.MAIN and one.phase == STEP)
    return {one.name: one for one in told if one.better is Better.LOWER and one.name != TIME and one.samples()}


def _names(side: Sequence[_Costs]) -> Iterable[Metric]:
    """Each figure once, as the newest run has it."""
    return {name: metric for found in side for name, metric in found.items()}.values()


def _alike(side: Sequence[_Costs], metric: Metric) -> Iterator[tuple[float, ...]]:
    """The samples of each run; joules of another source do not compare."""
    for found in side:
        if metric.name in found and found[metric.name].source == metric.source:
            yield found[metric.name].samples()


def _sensed(side: Sequence[_Costs], metric: Metric) -> Iterator[Estimate]:
    for samples in _alike(side, metric):
        logs = [math.log(value) for value in samples if 0 < value < math.inf]
        if logs:
            error = _MEDIANS * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
            yield Estimate(median(logs), error)


def _whole_steps(sighting: Sighting) -> bool:
    return sighting.finding is not None and Label.WHOLE_STEPS in sighting.finding.labels


def _best_case(timing: Timing, rounds: int, calls: int, alike: bool) -> Estimate:
    first = [slot.round for slot in timing.slots[:rounds]]
    samples = cells(timing, calls, first)
    best = stats.best_case(samples if alike else samples.sum(axis=1, keepdims=True))
    return Estimate(best.point, best.error)


def _mean(timing: Timing, rounds: int) -> Estimate:
    mean = stats.mean_case(means(timing, [slot.round for slot in timing.slots[:rounds]]))
    return Estimate(mean.point, mean.error)


def _ratios(side: Sequence[Sighting], of: Callable[[Finding], Interval | None]) -> Iterator[Estimate]:
    """The ratios to the reference, with the standard errors that their intervals stand for."""
    reach = NormalDist().inv_cdf((1 + FINAL_LEVEL) / 2)
    for one in side:
        ratio = of(one.finding) if one.finding is not None else None
        if ratio is not None and one.record.status is Status.OK and math.isfinite(ratio.half_width):
            yield Estimate(math.log(ratio.point), ratio.half_width / reach)
