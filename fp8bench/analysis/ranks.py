"""Figures of a case with several ranks: differences between their times, waiting in collectives, communication that
is hidden behind products, and the speed-up over one rank.

A figure that was measured in a few rounds is their median with an interval, or the reason why the figure is missing.
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

# An interval contains the true median with at least this probability.
CONFIDENCE = 0.9
# Run one after the other, products and communication must take the sum of their separate times, within these factors.
# Otherwise they disturb each other.
CHECK_SUM_LIMITS = (0.9, 1.1)
# Figures with wider intervals are not shown. The width for exposed time is relative to the time of products and
# communication at once. The width for the hidden share is a difference of two shares. The width for an efficiency is
# relative to the efficiency: 80% is still shown if its interval is 60% to 100%.
MAX_EXPOSED_WIDTH = 0.25
MAX_HIDDEN_WIDTH = 0.5
MAX_EFFICIENCY_WIDTH = 0.5


class Middle(NamedTuple):
    """The median of several rounds with its interval."""

    value: float
    low: float
    high: float


class Untold(NamedTuple):
    """The reason why a figure is missing, and a word that is shown in the figure's place."""

    word: str
    why: str


TOO_FEW_ROUNDS = Untold("few", "too few rounds for an interval")
SUM_MISMATCH = Untold(
    "off",
    "products and communication in turn do not take {} to {} of the sum of both alone: they disturb each other".format(
        *CHECK_SUM_LIMITS
    ),
)
FASTER_THAN_ALONE = Untold(
    "short", "products and communication at once take less time than one alone: other programs disturb the rounds"
)
WIDE_OVERLAP = Untold(
    "wide",
    f"the interval of exposed time is wider than {MAX_EXPOSED_WIDTH:.0%} of the step, or that of the hidden share "
    f"wider than {100 * MAX_HIDDEN_WIDTH:.0f} points",
)
WIDE_EFFICIENCY = Untold(
    "wide", f"the interval of the efficiency is wider than {MAX_EFFICIENCY_WIDTH:.0%} of its value"
)
PIPELINE_WAITING = Untold(units.NONE, "a pipeline's exposed time includes waiting")
UNPAIRED = Untold(units.NONE, "one rank alone and all ranks were not measured in the same rounds")


def find_median_interval(values: Sequence[float]) -> Middle | Untold:
    """Returns the median of the values with an interval that contains the true median with at least the probability
    CONFIDENCE. The ends of the interval are two of the values, so it needs no assumption about the distribution. With
    5 values they are the smallest and the largest (94%), with 8 values the second from either end (93%). Returns the
    reason if there are fewer values or any value is not finite.
    """
    ordered, count = sorted(values), len(values)
    if not all(map(math.isfinite, ordered)):
        return TOO_FEW_ROUNDS
    probability_outside, rank = 0.0, 0
    while rank < count:
        probability_outside += 2 * math.comb(count, rank) / 2**count
        if probability_outside > 1 - CONFIDENCE:
            break
        rank += 1
    return Middle(statistics.median(ordered), ordered[rank - 1], ordered[-rank]) if rank else TOO_FEW_ROUNDS


@dataclass(frozen=True)
class RankTimes:
    """Medians in seconds for one rank: its step, its communication, and the part of its communication that is waiting
    for other ranks.
    """

    rank: int
    step: float
    communication: float
    waiting: float


def rank_times(timing: Timing) -> tuple[RankTimes, ...]:
    """Returns the medians over all calls for each rank. Returns () if there was one process.

    A collective ends when the last rank has arrived. So the shortest time of any rank is the time of the collective
    itself. The rest of a rank's time is waiting.
    """
    calls = list(iterate_rank_calls(timing))
    if not calls:
        return ()
    medians = []
    for rank in range(len(calls[0][0])):
        step_ns = statistics.median(steps[rank] for steps, _ in calls)
        communication_ns = statistics.median(communication[rank] for _, communication in calls)
        waiting_ns = statistics.median(communication[rank] - min(communication) for _, communication in calls)
        medians.append(RankTimes(rank, step_ns * 1e-9, communication_ns * 1e-9, waiting_ns * 1e-9))
    return tuple(medians)


def compute_rank_skew(timing: Timing) -> float | None:
    """Returns how much longer the slowest rank takes than the fastest, as a share of the slowest rank's time. The
    result is the median over calls.
    """
    calls = [steps for steps, _ in iterate_rank_calls(timing)]
    return statistics.median((max(steps) - min(steps)) / max(steps) for steps in calls) if calls else None


def compute_memory_skew(use: MemoryUse) -> float | None:
    """Returns the difference between the largest and the smallest peak memory of the ranks, as a share of the
    largest.
    """
    largest_peak = max((rank.peak for rank in use.ranks), default=0)
    return (largest_peak - min(rank.peak for rank in use.ranks)) / largest_peak if largest_peak else None


def measure_communication(timing: Timing) -> float | None:
    """Returns the seconds that a step's collectives take without waiting. In each call this is the shortest time of
    any rank. The result is the median over calls.
    """
    calls = [communication for _, communication in iterate_rank_calls(timing)]
    return statistics.median(map(min, calls)) * 1e-9 if calls and any(map(any, calls)) else None


def find_pareto_points(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Returns the indices of the (bytes, decibels) pairs that are not dominated. A pair is dominated if another pair
    is at least as good in bytes (fewer) and in decibels (more), and better in one of them.

    Bytes that agree in three digits count as equal, because they differ only by a few scales.
    """
    rounded_points = [(float(f"{sent:.3g}"), sqnr) for sent, sqnr in points]
    return tuple(
        index
        for index, point in enumerate(rounded_points)
        if not any(_dominates(rival, point) for rival in rounded_points)
    )


def _dominates(rival: tuple[float, float], point: tuple[float, float]) -> bool:
    return rival != point and rival[0] <= point[0] and rival[1] >= point[1]


def iterate_rank_calls(timing: Timing) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields, for each call, the step times and the communication times of all ranks in nanoseconds."""
    for slot in timing.slots:
        if slot.ranks:
            steps = zip(*(rank.step_ns for rank in slot.ranks), strict=True)
            communication = zip(*(rank.communication_ns for rank in slot.ranks), strict=True)
            yield from zip(steps, communication, strict=True)


class Bubble(NamedTuple):
    """The idle time of pipeline stages divided by their computing time, and the ideal value of this ratio: (p-1)/m
    for p stages and m microbatches.

    The ideal is that of GPipe and 1F1B with stages of equal time and free communication.
    """

    measured: float
    ideal: float


def count_microbatches(record: Record) -> int | None:
    """Returns the number of microbatches, or None if the case is not a pipeline."""
    count = dict(record.case.params).get("microbatches")
    return count if isinstance(count, int) else None


def measure_bubble(record: Record) -> Bubble | None:
    """Returns the bubble of a pipeline: the median over calls, where each call counts the time of all ranks together.
    Returns None if the case is not a pipeline.
    """
    microbatches = count_microbatches(record)
    if record.timing is None or microbatches is None:
        return None
    shares = [
        sum(communication) / busy
        for steps, communication in iterate_rank_calls(record.timing)
        if (busy := sum(steps) - sum(communication)) > 0
    ]
    return Bubble(statistics.median(shares), (record.case.ranks - 1) / microbatches) if shares else None


class OverlapFigures(NamedTuple):
    """The seconds that communication adds to the products (`exposed`), and the share of communication that is hidden
    behind the products.

    Noise may make either of them negative. `check_sum` is the time of products and communication one after the other,
    divided by the sum of their separate times.
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
    """Computes the overlap of communication and products in each round, because slow rounds then cancel in the
    differences.
    """
    rounds = tuple(map(_Round, overlap.compute, overlap.communication, overlap.both, overlap.in_turn))
    if overlap.why or not rounds or not all(parts.compute > 0 and parts.communication > 0 for parts in rounds):
        missing_figure = Untold(units.NONE, overlap.why or "it has no recorded rounds")
        return OverlapFigures(missing_figure, missing_figure)
    check_sum = statistics.median(parts.in_turn / (parts.compute + parts.communication) for parts in rounds)
    if not CHECK_SUM_LIMITS[0] <= check_sum <= CHECK_SUM_LIMITS[1]:
        return OverlapFigures(SUM_MISMATCH, SUM_MISMATCH, check_sum)
    exposed_seconds = find_median_interval([parts.both - parts.compute for parts in rounds])
    beyond_longer_part = find_median_interval(
        [parts.both - max(parts.compute, parts.communication) for parts in rounds]
    )
    hidden_share = find_median_interval([1 - (parts.both - parts.compute) / parts.communication for parts in rounds])
    if (
        isinstance(exposed_seconds, Untold)
        or isinstance(beyond_longer_part, Untold)
        or isinstance(hidden_share, Untold)
    ):
        return OverlapFigures(TOO_FEW_ROUNDS, TOO_FEW_ROUNDS, check_sum)
    if beyond_longer_part.high < 0:
        return OverlapFigures(FASTER_THAN_ALONE, FASTER_THAN_ALONE, check_sum)
    max_exposed_width = MAX_EXPOSED_WIDTH * statistics.median(parts.both for parts in rounds)
    return OverlapFigures(
        WIDE_OVERLAP if exposed_seconds.high - exposed_seconds.low > max_exposed_width else exposed_seconds,
        WIDE_OVERLAP if hidden_share.high - hidden_share.low > MAX_HIDDEN_WIDTH else hidden_share,
        check_sum,
    )


def find_overlap(record: Record) -> OverlapFigures | None:
    """Returns the overlap of communication and products in a case. For a pipeline, the hidden share is missing,
    because a pipeline's step also contains waiting.
    """
    if record.overlap is None:
        return None
    figures = overlap_figures(record.overlap)
    if isinstance(figures.exposed, Untold) or count_microbatches(record) is None:
        return figures
    return figures._replace(hidden=PIPELINE_WAITING)


class Efficiency(NamedTuple):
    """How well a case scales over n ranks. `strong_scaling` is the speed-up over one rank divided by n.
    `weak_scaling` is the speed of n ranks divided by the speed of one rank with the same work per rank. Noise may make
    either larger than 1.
    """

    strong_scaling: Middle | Untold
    weak_scaling: Middle | Untold


def compute_efficiency(record: Record) -> Efficiency | None:
    """Returns how well a case scales over ranks. Each round gives one value, because slow rounds then cancel. Returns
    None if one rank was not measured alone.
    """
    rounds = record.scaling
    if rounds is None:
        return None
    strong_scaling = _compute_speed_share(rounds.whole, rounds.together, 1 / record.case.ranks)
    return Efficiency(strong_scaling, _compute_speed_share(rounds.share, rounds.together))


def _compute_speed_share(alone: Sequence[float], together: Sequence[float], factor: float = 1.0) -> Middle | Untold:
    if not alone or len(alone) != len(together) or not all(value > 0 for value in (*alone, *together)):
        return UNPAIRED  # the times are not from the same rounds
    speed_share = find_median_interval(
        [value / all_ranks * factor for value, all_ranks in zip(alone, together, strict=True)]
    )
    is_too_wide = (
        isinstance(speed_share, Middle)
        and speed_share.high - speed_share.low > MAX_EFFICIENCY_WIDTH * speed_share.value
    )
    return WIDE_EFFICIENCY if is_too_wide else speed_share


def count_sent_bytes(record: Record) -> tuple[float, ...]:
    """Returns the bytes that each rank sends in a step, or () if they were not counted."""
    if not record.sent:
        return ()
    bytes_by_rank = [0.0] * record.case.ranks
    for message in record.sent:
        if 0 <= message.rank < len(bytes_by_rank):
            bytes_by_rank[message.rank] += message.bytes
    return tuple(bytes_by_rank)


def rank_metrics(sources: MetricSources) -> Iterator[Metric]:
    """Yields the metrics of a case with several ranks. Rates of emulated cases only show the cost of emulation."""
    record = sources.record
    if record.timing is not None and (skew := compute_rank_skew(record.timing)) is not None:
        yield Metric(specs.RANK_SKEW, skew * 100)
        if (communication := measure_communication(record.timing)) is not None:
            yield Metric(specs.COMMUNICATION, communication)
    if record.memory is not None and (skew := compute_memory_skew(record.memory)) is not None:
        yield Metric(specs.MEMORY_SKEW, skew * 100)
    if record.transfer is not None:
        yield from _transfer_metrics(record.transfer, sources.finding.median_seconds if sources.finding else None)
    if (overlap := find_overlap(record)) is not None:
        yield _make_metric(specs.EXPOSED_TIME, overlap.exposed)
        yield _make_metric(specs.HIDDEN_COMMUNICATION, overlap.hidden, 100.0)
    if (idle := measure_bubble(record)) is not None:
        yield Metric(specs.BUBBLE, idle.measured * 100)
        yield Metric(specs.IDEAL_BUBBLE, idle.ideal * 100)
    if (gain := compute_efficiency(record)) is not None:
        yield _make_metric(specs.STRONG_SCALING, gain.strong_scaling, 100)
        yield _make_metric(specs.WEAK_SCALING, gain.weak_scaling, 100)
    if sent := count_sent_bytes(record):
        yield Metric(specs.WIRE_BYTES, float(max(sent)))


def _transfer_metrics(transfer: Transfer, seconds: float | None) -> Iterator[Metric]:
    yield Metric(specs.WIRE_BYTES, transfer.wire, samples=partial(tuple, (transfer.wire,)))
    yield Metric(specs.LOGICAL_BYTES, transfer.logical)
    if seconds:
        yield Metric(specs.ALGBW, transfer.payload / seconds)
        yield Metric(specs.BUSBW, transfer.payload / seconds * transfer.bus_factor)
        yield Metric(specs.EFFECTIVE_BUSBW, transfer.logical / seconds * transfer.bus_factor)


def _make_metric(spec: MetricSpec, figure: Middle | Untold, factor: float = 1.0) -> Metric:
    if isinstance(figure, Untold):
        return Metric(spec, why=figure.why)
    return Metric(spec, figure.value * factor, bounds=(figure.low * factor, figure.high * factor))
