"""Figures of a case with several ranks: differences between their times, waiting in collectives, communication that is
hidden behind products, and the speed-up over one rank.

A figure that was measured in a few rounds is the median of its values with an interval, or the reason why it is
missing.
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
INTERVAL_CONFIDENCE = 0.9
# As a check, products and communication also run one after the other. The time of this sequence, divided by the sum of
# their separate times, must be within these limits.
TIME_SUM_RATIO_LIMITS = (0.9, 1.1)
# A figure is not shown if its interval is wider than this. For exposed time, the width is relative to the time of
# simultaneous products and communication. For the hidden share, it is a difference of two shares. For an efficiency, it
# is relative: 80% is still shown if its interval is 60% to 100%.
MAX_EXPOSED_WIDTH = 0.25
MAX_HIDDEN_INTERVAL_WIDTH = 0.5
MAX_EFFICIENCY_INTERVAL_WIDTH = 0.5


class MedianInterval(NamedTuple):
    """The median of several rounds with its interval."""

    value: float
    low: float
    high: float


class MissingFigure(NamedTuple):
    """The reason why a figure is missing, and the text that is shown instead of the figure."""

    substitute_text: str
    why: str


TOO_FEW_ROUNDS = MissingFigure("few", "too few rounds for an interval")
TIME_SUM_MISMATCH = MissingFigure(
    "off",
    "products and communication in sequence do not take {} to {} times the sum of their separate times: "
    "they disturb each other".format(*TIME_SUM_RATIO_LIMITS),
)
FASTER_THAN_ALONE = MissingFigure(
    "short",
    "simultaneous products and communication take less time than one of them alone: other programs disturb the rounds",
)
OVERLAP_INTERVAL_TOO_WIDE = MissingFigure(
    "wide",
    f"the interval of exposed time is wider than {MAX_EXPOSED_WIDTH:.0%} of the step, or that of the hidden share "
    f"wider than {100 * MAX_HIDDEN_INTERVAL_WIDTH:.0f} points",
)
TOO_WIDE_EFFICIENCY = MissingFigure(
    "wide", f"the interval of the efficiency is wider than {MAX_EFFICIENCY_INTERVAL_WIDTH:.0%} of its value"
)
PIPELINE_WAITING = MissingFigure(units.NONE, "a pipeline's exposed time includes waiting")
UNPAIRED_EFFICIENCY = MissingFigure(units.NONE, "one rank alone and all ranks were not measured in the same rounds")


def find_median_interval(values: Sequence[float]) -> MedianInterval | MissingFigure:
    """Returns the median of the values with an interval that contains the true median with at least the probability
    INTERVAL_CONFIDENCE. Returns why they are missing if there are too few values or any value is not finite.

    The ends of the interval are two of the values, so it needs no assumption about the distribution. With 5 values they
    are the smallest and the largest (94%), with 8 values the second from either end (93%).
    """
    sorted_values, count = sorted(values), len(values)
    if not all(map(math.isfinite, sorted_values)):
        return TOO_FEW_ROUNDS
    probability_outside, value_rank = 0.0, 0
    while value_rank < count:
        # With probability comb(n, k) / 2^n, exactly k of n values are below the true median. It is as likely that
        # exactly k are above it.
        probability_outside += 2 * math.comb(count, value_rank) / 2**count
        if probability_outside > 1 - INTERVAL_CONFIDENCE:
            break
        value_rank += 1
    return (
        MedianInterval(statistics.median(sorted_values), sorted_values[value_rank - 1], sorted_values[-value_rank])
        if value_rank
        else TOO_FEW_ROUNDS
    )


@dataclass(frozen=True)
class RankTimes:
    """Medians in seconds for one rank: its step, its communication, and the part of its communication that is waiting
    for other ranks.
    """

    rank: int
    step_seconds: float
    communication_seconds: float
    waiting_seconds: float


def rank_times(timing: Timing) -> tuple[RankTimes, ...]:
    """Returns the medians over all calls for each rank. Returns () if there was one process.

    A collective ends when the last rank has arrived. So the shortest time of any rank is the time of the collective
    itself. The rest of a rank's time is waiting.
    """
    calls = list(iterate_rank_calls(timing))
    if not calls:
        return ()
    median_times = []
    for rank in range(len(calls[0][0])):
        step_ns = statistics.median(steps[rank] for steps, _ in calls)
        communication_ns = statistics.median(communication[rank] for _, communication in calls)
        median_wait_nanoseconds = statistics.median(
            communication[rank] - min(communication) for _, communication in calls
        )
        median_times.append(RankTimes(rank, step_ns * 1e-9, communication_ns * 1e-9, median_wait_nanoseconds * 1e-9))
    return tuple(median_times)


def compute_rank_skew(timing: Timing) -> float | None:
    """Returns how much longer the slowest rank takes than the fastest, as a share of the slowest rank's time. The
    result is the median over calls.
    """
    calls = [steps for steps, _ in iterate_rank_calls(timing)]
    return statistics.median((max(steps) - min(steps)) / max(steps) for steps in calls) if calls else None


def compute_memory_skew(memory_use: MemoryUse) -> float | None:
    """Returns the difference between the largest and the smallest peak memory of the ranks, as a share of the
    largest.
    """
    largest_peak = max((rank.peak for rank in memory_use.ranks), default=0)
    return (largest_peak - min(rank.peak for rank in memory_use.ranks)) / largest_peak if largest_peak else None


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
    rounded_points = [(float(f"{sent_bytes:.3g}"), sqnr) for sent_bytes, sqnr in points]
    return tuple(
        index
        for index, point in enumerate(rounded_points)
        if not any(_dominates_point(other_point, point) for other_point in rounded_points)
    )


def _dominates_point(other_point: tuple[float, float], point: tuple[float, float]) -> bool:
    return other_point != point and other_point[0] <= point[0] and other_point[1] >= point[1]


def iterate_rank_calls(timing: Timing) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields, for each call, the step times and the communication times of all ranks in nanoseconds."""
    for slot in timing.slots:
        if slot.ranks:
            steps = zip(*(rank.step_ns for rank in slot.ranks), strict=True)
            communication = zip(*(rank.communication_ns for rank in slot.ranks), strict=True)
            yield from zip(steps, communication, strict=True)


class PipelineBubble(NamedTuple):
    """The idle time of pipeline stages divided by their computing time, and the ideal value of this ratio: (p-1)/m
    for p stages and m microbatches.

    The ideal is that of GPipe and 1F1B with stages of equal time and free communication.
    """

    measured_ratio: float
    ideal_ratio: float


def count_microbatches(record: Record) -> int | None:
    """Returns the number of microbatches, or None if the case is not a pipeline."""
    count = dict(record.case.params).get("microbatches")
    return count if isinstance(count, int) else None


def measure_pipeline_bubble(record: Record) -> PipelineBubble | None:
    """Returns the bubble of a pipeline: the communication time of all ranks divided by their computing time, as the
    median over calls. Returns None if the case is not a pipeline.
    """
    microbatches = count_microbatches(record)
    if record.timing is None or microbatches is None:
        return None
    shares = [
        sum(communication) / busy_ns
        for steps, communication in iterate_rank_calls(record.timing)
        if (busy_ns := sum(steps) - sum(communication)) > 0
    ]
    return PipelineBubble(statistics.median(shares), (record.case.ranks - 1) / microbatches) if shares else None


class OverlapFigures(NamedTuple):
    """The seconds by which communication lengthens the products (`exposed_seconds`), and the share of communication
    that is hidden behind the products.

    Noise may make either figure negative. `check_sum` should be about 1: it is the time of products and communication
    that run one after the other, divided by the sum of their separate times.
    """

    exposed_seconds: MedianInterval | MissingFigure
    hidden_communication_share: MedianInterval | MissingFigure
    check_sum: float | None = None


class _RoundSeconds(NamedTuple):
    compute: float
    communication: float
    simultaneous: float
    consecutive_seconds: float


def compute_overlap_figures(overlap: Overlap) -> OverlapFigures:
    """Computes the overlap of communication and products. Differences are computed in each round, so that a slow round
    cancels out.
    """
    rounds = tuple(map(_RoundSeconds, overlap.compute, overlap.communication, overlap.both, overlap.in_turn))
    if overlap.why or not rounds or not all(seconds.compute > 0 and seconds.communication > 0 for seconds in rounds):
        missing_figure = MissingFigure(units.NONE, overlap.why or "it has no recorded rounds")
        return OverlapFigures(missing_figure, missing_figure)
    # 1. Check that products and communication do not disturb each other when they run one after the other.
    consecutive_to_sum_ratio = statistics.median(
        seconds.consecutive_seconds / (seconds.compute + seconds.communication) for seconds in rounds
    )
    if not TIME_SUM_RATIO_LIMITS[0] <= consecutive_to_sum_ratio <= TIME_SUM_RATIO_LIMITS[1]:
        return OverlapFigures(TIME_SUM_MISMATCH, TIME_SUM_MISMATCH, consecutive_to_sum_ratio)
    # 2. Compute the exposed seconds and the hidden share.
    exposed_seconds = find_median_interval([seconds.simultaneous - seconds.compute for seconds in rounds])
    seconds_over_longer_part = find_median_interval(
        [seconds.simultaneous - max(seconds.compute, seconds.communication) for seconds in rounds]
    )
    hidden_share = find_median_interval(
        [1 - (seconds.simultaneous - seconds.compute) / seconds.communication for seconds in rounds]
    )
    if (
        isinstance(exposed_seconds, MissingFigure)
        or isinstance(seconds_over_longer_part, MissingFigure)
        or isinstance(hidden_share, MissingFigure)
    ):
        return OverlapFigures(TOO_FEW_ROUNDS, TOO_FEW_ROUNDS, consecutive_to_sum_ratio)
    # 3. Withhold figures that are impossible, or whose interval is too wide.
    if seconds_over_longer_part.high < 0:
        return OverlapFigures(FASTER_THAN_ALONE, FASTER_THAN_ALONE, consecutive_to_sum_ratio)
    max_exposed_interval_width = MAX_EXPOSED_WIDTH * statistics.median(seconds.simultaneous for seconds in rounds)
    return OverlapFigures(
        OVERLAP_INTERVAL_TOO_WIDE
        if exposed_seconds.high - exposed_seconds.low > max_exposed_interval_width
        else exposed_seconds,
        OVERLAP_INTERVAL_TOO_WIDE if hidden_share.high - hidden_share.low > MAX_HIDDEN_INTERVAL_WIDTH else hidden_share,
        consecutive_to_sum_ratio,
    )


def measure_overlap(record: Record) -> OverlapFigures | None:
    """Returns the overlap of communication and products in a case. For a pipeline, the hidden share is missing,
    because a pipeline's step also contains waiting.
    """
    if record.overlap is None:
        return None
    figures = compute_overlap_figures(record.overlap)
    if isinstance(figures.exposed_seconds, MissingFigure) or count_microbatches(record) is None:
        return figures
    return figures._replace(hidden_communication_share=PIPELINE_WAITING)


class Efficiency(NamedTuple):
    """How well a case scales over n ranks. `strong_scaling` is the speed-up over one rank, divided by n. `weak_scaling`
    is the speed of n ranks divided by the speed of one rank that has the same work as each of them. Noise may make
    either figure larger than 1.
    """

    strong_scaling: MedianInterval | MissingFigure
    weak_scaling: MedianInterval | MissingFigure


def compute_efficiency(record: Record) -> Efficiency | None:
    """Returns how well a case scales over ranks. Ratios are computed in each round, so that a slow round cancels out.
    Returns None if one rank was not measured alone.
    """
    rounds = record.scaling
    if rounds is None:
        return None
    strong_scaling = _compute_relative_speed(rounds.whole, rounds.together, 1 / record.case.ranks)
    return Efficiency(strong_scaling, _compute_relative_speed(rounds.share, rounds.together))


def _compute_relative_speed(
    seconds_alone: Sequence[float], seconds_together: Sequence[float], factor: float = 1.0
) -> MedianInterval | MissingFigure:
    if (
        not seconds_alone
        or len(seconds_alone) != len(seconds_together)
        or not all(value > 0 for value in (*seconds_alone, *seconds_together))
    ):
        return UNPAIRED_EFFICIENCY
    relative_speed = find_median_interval(
        [value / all_ranks * factor for value, all_ranks in zip(seconds_alone, seconds_together, strict=True)]
    )
    is_interval_too_wide = (
        isinstance(relative_speed, MedianInterval)
        and relative_speed.high - relative_speed.low > MAX_EFFICIENCY_INTERVAL_WIDTH * relative_speed.value
    )
    return TOO_WIDE_EFFICIENCY if is_interval_too_wide else relative_speed


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
    if (overlap := measure_overlap(record)) is not None:
        yield _make_metric(specs.EXPOSED_COMMUNICATION_TIME, overlap.exposed_seconds)
        yield _make_metric(specs.HIDDEN_COMMUNICATION, overlap.hidden_communication_share, 100.0)
    if (bubble := measure_pipeline_bubble(record)) is not None:
        yield Metric(specs.PIPELINE_BUBBLE, bubble.measured_ratio * 100)
        yield Metric(specs.IDEAL_BUBBLE, bubble.ideal_ratio * 100)
    if (gain := compute_efficiency(record)) is not None:
        yield _make_metric(specs.STRONG_SCALING, gain.strong_scaling, 100)
        yield _make_metric(specs.WEAK_SCALING, gain.weak_scaling, 100)
    if sent_bytes := count_sent_bytes(record):
        yield Metric(specs.WIRE_BYTES, float(max(sent_bytes)))


def _transfer_metrics(transfer: Transfer, seconds: float | None) -> Iterator[Metric]:
    yield Metric(specs.WIRE_BYTES, transfer.wire, samples=partial(tuple, (transfer.wire,)))
    yield Metric(specs.LOGICAL_BYTES, transfer.logical)
    if seconds:
        yield Metric(specs.ALGBW, transfer.payload / seconds)
        yield Metric(specs.BUSBW, transfer.payload / seconds * transfer.bus_factor)
        yield Metric(specs.EFFECTIVE_BUSBW, transfer.logical / seconds * transfer.bus_factor)


def _make_metric(spec: MetricSpec, figure: MedianInterval | MissingFigure, factor: float = 1.0) -> Metric:
    if isinstance(figure, MissingFigure):
        return Metric(spec, why=figure.why)
    return Metric(spec, figure.value * factor, bounds=(figure.low * factor, figure.high * factor))
