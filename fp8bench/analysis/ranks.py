"""What several ranks took: how far apart they are, and what of a collective is waiting."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fp8bench.analysis.metric import Metric, Told
from fp8bench.model import MemoryUse, Timing, specs


@dataclass(frozen=True)
class RankTimes:
    """One rank's step and communication, in seconds, and how long of the latter it waited for the others: medians."""

    rank: int
    step: float
    communication: float
    waiting: float


def rank_times(timing: Timing) -> tuple[RankTimes, ...]:
    """Of each rank over all calls; () where there was one process.

    A collective is over for a rank when the last one has come: the least that any rank was in it is what it takes, the
    rest is waiting.
    """
    calls = list(calls_of(timing))
    if not calls:
        return ()
    ranks = range(len(calls[0][0]))
    true = [min(communication) for _, communication in calls]
    return tuple(
        RankTimes(
            rank,
            statistics.median(steps[rank] for steps, _ in calls) * 1e-9,
            statistics.median(communication[rank] for _, communication in calls) * 1e-9,
            statistics.median(own[rank] - least for (_, own), least in zip(calls, true, strict=True)) * 1e-9,
        )
        for rank in ranks
    )


def skew(timing: Timing) -> float | None:
    """How much longer a call is for the slowest rank than for the fastest, as a share of it: the median of calls."""
    calls = [steps for steps, _ in calls_of(timing)]
    return statistics.median((max(steps) - min(steps)) / max(steps) for steps in calls) if calls else None


def memory_skew(use: MemoryUse) -> float | None:
    """How much more the rank takes that takes most than the one that takes least, as a share of it."""
    most = max((one.peak for one in use.ranks), default=0)
    return (most - min(one.peak for one in use.ranks)) / most if most else None


def round_times(timing: Timing) -> tuple[tuple[float, ...], ...]:
    """For each rank the median of its calls in each round, in seconds."""
    slots = [slot for slot in timing.slots if slot.ranks]
    count = len(slots[0].ranks) if slots else 0
    return tuple(tuple(statistics.median(slot.ranks[rank].step_ns) * 1e-9 for slot in slots) for rank in range(count))


def true_communication(timing: Timing) -> float | None:
    """What a step's collectives take once everybody is there: the median of the least over ranks, in seconds."""
    calls = [communication for _, communication in calls_of(timing)]
    return statistics.median(map(min, calls)) * 1e-9 if calls and any(map(any, calls)) else None


def frontier(ways: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """The places of those (bytes, decibels) of which no other sends as little with as small an error."""
    return tuple(
        place
        for place, (sent, sqnr) in enumerate(ways)
        if not any(other != (sent, sqnr) and other[0] <= sent and other[1] >= sqnr for other in ways)
    )


def rank_metrics(told: Told) -> Iterator[Metric]:
    """Figures of several ranks. Rates of emulated cases are what emulating costs."""
    timing, use, transfer = told.record.timing, told.record.memory, told.record.transfer
    if timing is not None and (apart := skew(timing)) is not None:
        yield Metric(specs.RANK_SKEW, apart * 100)
        true = true_communication(timing)
        if true is not None:
            yield Metric(specs.COMMUNICATION, true)
        for one in rank_times(timing):
            yield Metric(specs.RANK_TIME, one.step, of_rank=one.rank)
            if true is not None:
                yield Metric(specs.RANK_COMMUNICATION, one.communication, of_rank=one.rank)
                yield Metric(specs.RANK_WAITING, one.waiting, of_rank=one.rank)
    if use is not None and (apart := memory_skew(use)) is not None:
        yield Metric(specs.MEMORY_SKEW, apart * 100)
        for held in use.ranks:
            yield Metric(specs.RANK_MEMORY, float(held.peak), of_rank=held.rank)
    if transfer is None:
        return
    yield Metric(specs.WIRE_BYTES, transfer.wire, samples=partial(tuple, (transfer.wire,)))
    yield Metric(specs.LOGICAL_BYTES, transfer.logical)
    if told.finding is not None and (seconds := told.finding.median_seconds):
        yield Metric(specs.ALGBW, transfer.payload / seconds)
        yield Metric(specs.BUSBW, transfer.payload / seconds * transfer.bus_factor)
        yield Metric(specs.EFFECTIVE_BUSBW, transfer.logical / seconds * transfer.bus_factor)


def calls_of(timing: Timing) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Steps of all ranks, and their communication, call by call, in nanoseconds."""
    for slot in timing.slots:
        if slot.ranks:
            steps = zip(*(one.step_ns for one in slot.ranks), strict=True)
            communication = zip(*(one.communication_ns for one in slot.ranks), strict=True)
            yield from zip(steps, communication, strict=True)
