"""Figures of several ranks: how much their times differ, how much of a collective is waiting, how much communication
hides behind products, and how much faster they are than one rank.

A figure of a handful of rounds is their median with its interval, or the reason without one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.metric import Metric, MetricSources
from fp8bench.model import MemoryUse, Record, Timing, specs
from fp8bench.model.ranks import Overlap, Transfer
from fp8bench.model.specs import MetricSpec

# An interval of rounds contains the true median at least this often.
CONFIDENCE = 0.9
# Products and communication run in sequence must take as long as the sum of both alone, within these factors; otherwise
# they disturb each other.
SUM_MAY_BE = (0.9, 1.1)
# Wider intervals are not shown. The limit is relative to the time of both at once for `exposed`, absolute for `hidden`,
# relative to the value for an efficiency (80% that may be 60% or 100%).
EXPOSED_WITHIN = 0.25
HIDDEN_WITHIN = 0.5
EFFICIENCY_WITHIN = 0.5


class Middle(NamedTuple):
    """The median of rounds with its interval."""

    value: float
    low: float
    high: float


class Untold(NamedTuple):
    """The reason for a missing figure, and a word shown in its place."""

    word: str
    why: str


FEW = Untold("few", "rounds are too few to say within what it is")
OFF = Untold(
    "off", "both in turn do not take {} to {} of the sum of both alone: they disturb each other".format(*SUM_MAY_BE)
)
SHORT = Untold("short", "both at once take less time than one of them alone: something else disturbs the rounds")
WIDE_OVERLAP = Untold(
    "wide",
    f"rounds leave exposed time within more than {EXPOSED_WITHIN:.0%} of both at once, the hidden share within more "
    f"than {100 * HIDDEN_WITHIN:.0f} points",
)
WIDE_EFFICIENCY = Untold("wide", f"rounds leave an efficiency within more than {EFFICIENCY_WITHIN:.0%} of it")
WAITING = Untold(units.NONE, "what a pipeline exposes is its waiting, too")
UNPAIRED = Untold(units.NONE, "one rank and all of them were not measured in the same rounds")


def middle(values: Sequence[float]) -> Middle | Untold:
    """Returns the median, and two of the values that bracket it with CONFIDENCE for any distribution.

    With 5 values these are the smallest and the largest (94%), with 8 the second from either end (93%). With fewer
    values, or if any is not finite, returns the reason instead.
    """
    ordered, count = sorted(values), len(values)
    if not all(map(math.isfinite, ordered)):
        return FEW
    outside, place = 0.0, 0
    while place < count:
        outside += 2 * math.comb(count, place) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        place += 1
    return Middle(statistics.median(ordered), ordered[place - 1], ordered[-place]) if place else FEW


@dataclass(frozen=True)
class RankTimes:
    """Medians of one rank's step, its communication, and the part of that spent waiting for the others, in seconds."""

    rank: int
    step: float
    communication: float
    waiting: float


def rank_times(timing: Timing) -> tuple[RankTimes, ...]:
    """Returns the medians over all calls; () if there was one process.

    A collective ends for a rank when the last one has arrived: the least time that any rank spends in it is the
    collective's own, the rest is waiting.
    """
    calls = list(calls_of(timing))
    if not calls:
        return ()
    medians = []
    for rank in range(len(calls[0][0])):
        step = statistics.median(steps[rank] for steps, _ in calls)
        inside = statistics.median(communication[rank] for _, communication in calls)
        waiting = statistics.median(communication[rank] - min(communication) for _, communication in calls)
        medians.append(RankTimes(rank, step * 1e-9, inside * 1e-9, waiting * 1e-9))
    return tuple(medians)


def skew(timing: Timing) -> float | None:
    """Returns the median over calls of how much longer the slowest rank takes than the fastest, as a share of its
    time."""
    calls = [steps for steps, _ in calls_of(timing)]
    return statistics.median((max(steps) - min(steps)) / max(steps) for steps in calls) if calls else None


def memory_skew(use: MemoryUse) -> float | None:
    """Returns how much less memory the smallest rank uses than the largest, as a share of the largest."""
    most = max((rank.peak for rank in use.ranks), default=0)
    return (most - min(rank.peak for rank in use.ranks)) / most if most else None


def true_communication(timing: Timing) -> float | None:
    """Returns the seconds that a step's collectives take once all ranks have arrived: the median over calls of the
    least over ranks."""
    calls = [communication for _, communication in calls_of(timing)]
    return statistics.median(map(min, calls)) * 1e-9 if calls and any(map(any, calls)) else None


def frontier(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Returns the indices of the Pareto-optimal (bytes, decibels) pairs.

    Bytes that agree in three digits count as equal: they differ by a scale or two.
    """
    shown = [(float(f"{sent:.3g}"), sqnr) for sent, sqnr in points]
    return tuple(place for place, point in enumerate(shown) if not any(_beats(rival, point) for rival in shown))


def _beats(rival: tuple[float, float], point: tuple[float, float]) -> bool:
    return rival != point and rival[0] <= point[0] and rival[1] >= point[1]


def calls_of(timing: Timing) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields, call by call, the steps and the communication of all ranks in nanoseconds."""
    for slot in timing.slots:
        if slot.ranks:
            steps = zip(*(rank.step_ns for rank in slot.ranks), strict=True)
            communication = zip(*(rank.communication_ns for rank in slot.ranks), strict=True)
            yield from zip(steps, communication, strict=True)


class Bubble(NamedTuple):
    """The time that stages wait or send over the time that they compute, and the ideal (p-1)/m for p stages and m
    microbatches.

    The ideal is that of GPipe and 1F1B if stages take equally long and sending takes no time.
    """

    measured: float
    ideal: float


def microbatches_of(record: Record) -> int | None:
    """Returns the number of microbatches; None if the case is not a pipeline."""
    count = dict(record.case.params).get("microbatches")
    return count if isinstance(count, int) else None


def bubble(record: Record) -> Bubble | None:
    """Returns the median over calls, all ranks together; None if the case is not a pipeline."""
    microbatches = microbatches_of(record)
    if record.timing is None or microbatches is None:
        return None
    shares = [
        sum(communication) / busy
        for steps, communication in calls_of(record.timing)
        if (busy := sum(steps) - sum(communication)) > 0
    ]
    return Bubble(statistics.median(shares), (record.case.ranks - 1) / microbatches) if shares else None


class OverlapFigures(NamedTuple):
    """Seconds that communication adds to a step beyond its products (`exposed`), and the share of it that is hidden.

    Either may be negative; figures are not clipped, but misleading ones are left out. The check sum is the time of both
    in sequence over the sum of both alone.
    """

    exposed: Middle | Untold
    hidden: Middle | Untold
    check_sum: float | None = None


class _Round(NamedTuple):
    compute: float
    communication: float
    both: float
    in_turn: float


def overlap_figures(overlap: Overlap) -> OverlapFigures:
    """Computes the overlap round by round, so that slow rounds cancel in the differences."""
    rounds = tuple(map(_Round, overlap.compute, overlap.communication, overlap.both, overlap.in_turn))
    if overlap.why or not rounds or not all(parts.compute > 0 and parts.communication > 0 for parts in rounds):
        why = Untold(units.NONE, overlap.why or "no round of it was kept")
        return OverlapFigures(why, why)
    check = statistics.median(parts.in_turn / (parts.compute + parts.communication) for parts in rounds)
    if not SUM_MAY_BE[0] <= check <= SUM_MAY_BE[1]:
        return OverlapFigures(OFF, OFF, check)
    exposed = middle([parts.both - parts.compute for parts in rounds])
    beyond = middle([parts.both - max(parts.compute, parts.communication) for parts in rounds])
    hidden = middle([1 - (parts.both - parts.compute) / parts.communication for parts in rounds])
    if isinstance(exposed, Untold) or isinstance(beyond, Untold) or isinstance(hidden, Untold):
        return OverlapFigures(FEW, FEW, check)
    if beyond.high < 0:
        return OverlapFigures(SHORT, SHORT, check)
    most = EXPOSED_WITHIN * statistics.median(parts.both for parts in rounds)
    return OverlapFigures(
        WIDE_OVERLAP if exposed.high - exposed.low > most else exposed,
        WIDE_OVERLAP if hidden.high - hidden.low > HIDDEN_WITHIN else hidden,
        check,
    )


def overlap_of(record: Record) -> OverlapFigures | None:
    """Returns the overlap of a case; None for a pipeline, whose step also contains waiting."""
    if record.overlap is None:
        return None
    figures = overlap_figures(record.overlap)
    if isinstance(figures.exposed, Untold) or microbatches_of(record) is None:
        return figures
    return figures._replace(hidden=WAITING)


class Efficiency(NamedTuple):
    """`strong` is the speed-up of n ranks over n, `weak` their speed over one rank's with the same work per rank.
    Neither is clipped to 1."""

    strong: Middle | Untold
    weak: Middle | Untold


def efficiency(record: Record) -> Efficiency | None:
    """Returns the efficiency, computed round by round so that slow rounds cancel; None if one rank was not measured
    alone."""
    rounds = record.scaling
    if rounds is None:
        return None
    strong = _share(rounds.whole, rounds.together, 1 / record.case.ranks)
    return Efficiency(strong, _share(rounds.share, rounds.together))


def _share(alone: Sequence[float], together: Sequence[float], times: float = 1.0) -> Middle | Untold:
    if not alone or len(alone) != len(together) or not all(value > 0 for value in (*alone, *together)):
        return UNPAIRED  # they are not rounds of the same run
    share = middle([value / all_ranks * times for value, all_ranks in zip(alone, together, strict=True)])
    wide = isinstance(share, Middle) and share.high - share.low > EFFICIENCY_WITHIN * share.value
    return WIDE_EFFICIENCY if wide else share


def sent_by_rank(record: Record) -> tuple[float, ...]:
    """Returns the bytes that each rank sends in a step; () if they are not counted."""
    if not record.sent:
        return ()
    totals = [0.0] * record.case.ranks
    for message in record.sent:
        if 0 <= message.rank < len(totals):
            totals[message.rank] += message.bytes
    return tuple(totals)


def rank_metrics(sources: MetricSources) -> Iterator[Metric]:
    """Yields the figures of several ranks. Rates of emulated cases only show the cost of emulation."""
    record = sources.record
    if record.timing is not None and (apart := skew(record.timing)) is not None:
        yield Metric(specs.RANK_SKEW, apart * 100)
        if (true := true_communication(record.timing)) is not None:
            yield Metric(specs.COMMUNICATION, true)
    if record.memory is not None and (apart := memory_skew(record.memory)) is not None:
        yield Metric(specs.MEMORY_SKEW, apart * 100)
    if record.transfer is not None:
        yield from _transfer_metrics(record.transfer, sources.finding.median_seconds if sources.finding else None)
    if (overlap := overlap_of(record)) is not None:
        yield _figure_of(specs.EXPOSED, overlap.exposed)
        yield _figure_of(specs.HIDDEN_COMMUNICATION, overlap.hidden, 100.0)
    if (idle := bubble(record)) is not None:
        yield Metric(specs.BUBBLE, idle.measured * 100)
        yield Metric(specs.IDEAL_BUBBLE, idle.ideal * 100)
    if (gain := efficiency(record)) is not None:
        yield _figure_of(specs.STRONG_SCALING, gain.strong, 100)
        yield _figure_of(specs.WEAK_SCALING, gain.weak, 100)
    if sent := sent_by_rank(record):
        yield Metric(specs.WIRE_BYTES, float(max(sent)))


def _transfer_metrics(transfer: Transfer, seconds: float | None) -> Iterator[Metric]:
    yield Metric(specs.WIRE_BYTES, transfer.wire, samples=partial(tuple, (transfer.wire,)))
    yield Metric(specs.LOGICAL_BYTES, transfer.logical)
    if seconds:
        yield Metric(specs.ALGBW, transfer.payload / seconds)
        yield Metric(specs.BUSBW, transfer.payload / seconds * transfer.bus_factor)
        yield Metric(specs.EFFECTIVE_BUSBW, transfer.logical / seconds * transfer.bus_factor)


def _figure_of(spec: MetricSpec, figure: Middle | Untold, times: float = 1.0) -> Metric:
    if isinstance(figure, Untold):
        return Metric(spec, why=figure.why)
    return Metric(spec, figure.value * times, bounds=(figure.low * times, figure.high * times))
