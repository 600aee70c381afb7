"""What several ranks gain over one that takes the same step alone, and what they send for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from fp8bench.analysis.metric import Better, Metric, Rank
from fp8bench.model import Provenance, Record
from fp8bench.model.metric_names import OwnMetric


@dataclass(frozen=True)
class Efficiency:
    """Of seconds of one rank with the whole batch (`whole`) and with its share of it, and of all ranks together.

    `strong` is what is left of n ranks' speed-up by n, `weak` what is left of one rank's pace while each has as much
    to do. Neither is cut to 1.
    """

    whole: float
    share: float
    together: float
    strong: float
    weak: float


def efficiency(record: Record) -> Efficiency | None:
    """By the medians of the rounds; None where one rank did not take such a step."""
    found = record.scaling
    if found is None:
        return None
    whole, share, together = map(statistics.median, (found.whole, found.share, found.together))
    return Efficiency(whole, share, together, whole / (record.case.ranks * together), share / together)


def sent_by_rank(record: Record) -> tuple[float, ...]:
    """Bytes that each rank sends in a step, by its number; () where they are not counted."""
    if not record.sent:
        return ()
    return tuple(sum(one.bytes for one in record.sent if one.rank == rank) for rank in range(record.case.ranks))


def scaling_metrics(record: Record) -> Iterator[Metric]:
    """Efficiencies in percent, and the bytes of the rank that sends most."""
    if (found := efficiency(record)) is not None:
        yield _figure(OwnMetric.STRONG_SCALING, "%", found.strong * 100, Better.HIGHER)
        yield _figure(OwnMetric.WEAK_SCALING, "%", found.weak * 100, Better.HIGHER)
    if sent := sent_by_rank(record):
        yield _figure(OwnMetric.WIRE_BYTES, "B", max(sent), Better.LOWER)


def _figure(name: str, unit: str, value: float, better: Better) -> Metric:
    return Metric(name, unit, value, provenance=Provenance.DERIVED, better=better, rank=Rank.DETAIL)
