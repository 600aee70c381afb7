"""What several ranks took: how far apart they are, and what of a collective is waiting."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fp8bench.analysis.metric import Better, Metric, Rank
from fp8bench.model import MemoryUse, Provenance, Record, Timing
from fp8bench.model.metric_names import OwnMetric


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


def rank_metrics(record: Record, seconds: float | None) -> Iterator[Metric]:
    """Figures of several ranks; `seconds` is the median step. Rates of emulated cases are what emulating costs."""
    timing, transfer = record.timing, record.transfer
    if timing is not None and (apart := skew(timing)) is not None:
        yield _figure(OwnMetric.RANK_SKEW, "%", apart * 100, Better.LOWER)
        true = true_communication(timing)
        if true is not None:
            yield _figure(OwnMetric.COMMUNICATION, "s", true, Better.LOWER)
        for one in rank_times(timing):
            yield _of_rank(one.rank, OwnMetric.RANK_TIME, "s", one.step)
            if true is not None:
                yield _of_rank(one.rank, OwnMetric.RANK_COMMUNICATION, "s", one.communication)
                yield _of_rank(one.rank, OwnMetric.RANK_WAITING, "s", one.waiting)
    if record.memory is not None and (apart := memory_skew(record.memory)) is not None:
        yield _figure(OwnMetric.MEMORY_SKEW, "%", apart * 100, Better.LOWER)
        for held in record.memory.ranks:
            yield _of_rank(held.rank, OwnMetric.RANK_MEMORY, "B", float(held.peak))
    if transfer is None:
        return
    wire = transfer.wire
    yield replace(_figure(OwnMetric.WIRE_BYTES, "B", wire, Better.LOWER), samples=lambda: (wire,))
    yield _figure(OwnMetric.LOGICAL_BYTES, "B", transfer.logical)
    if seconds:
        yield _figure(OwnMetric.ALGBW, "B/s", transfer.payload / seconds, Better.HIGHER)
        yield _figure(OwnMetric.BUSBW, "B/s", transfer.payload / seconds * transfer.bus_factor, Better.HIGHER)
        yield _figure(OwnMetric.EFFECTIVE_BUSBW, "B/s", transfer.logical / seconds * transfer.bus_factor, Better.HIGHER)


def _figure(name: str, unit: str, value: float | None, better: Better = Better.NONE) -> Metric:
    return Metric(name, unit, value, provenance=Provenance.DERIVED, better=better, rank=Rank.DETAIL)


def _of_rank(rank: int, name: str, unit: str, value: float) -> Metric:
    return replace(_figure(name, unit, value, Better.LOWER), of_rank=rank)


def calls_of(timing: Timing) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Steps of all ranks, and their communication, call by call, in nanoseconds."""
    for slot in timing.slots:
        if slot.ranks:
            steps = zip(*(one.step_ns for one in slot.ranks), strict=True)
            communication = zip(*(one.communication_ns for one in slot.ranks), strict=True)
            yield from zip(steps, communication, strict=True)
