"""What of a pipeline's time nobody computes in: what is measured, and what schedules leave where sending is free."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from fp8bench.analysis.metric import Metric, Told
from fp8bench.analysis.ranks import calls_of
from fp8bench.model import Record, specs


@dataclass(frozen=True)
class Bubble:
    """Time that stages wait or send over the time that they compute, and (p-1)/m of p stages and m microbatches.

    The latter is what GPipe and 1F1B have where stages take equally long and sending takes no time.
    """

    measured: float
    ideal: float


def microbatches_of(record: Record) -> int | None:
    found = dict(record.case.params).get("microbatches")
    return found if isinstance(found, int) else None


def bubble(record: Record) -> Bubble | None:
    """Over all ranks, the median of calls; None of what is no pipeline."""
    microbatches = microbatches_of(record)
    if record.timing is None or microbatches is None:
        return None
    shares = [
        sum(communication) / busy
        for steps, communication in calls_of(record.timing)
        if (busy := sum(steps) - sum(communication)) > 0
    ]
    return Bubble(statistics.median(shares), (record.case.ranks - 1) / microbatches) if shares else None


def pipeline_metrics(told: Told) -> Iterator[Metric]:
    """In percent of the time that ranks compute."""
    if (found := bubble(told.record)) is not None:
        yield Metric(specs.BUBBLE, found.measured * 100)
        yield Metric(specs.IDEAL_BUBBLE, found.ideal * 100)
