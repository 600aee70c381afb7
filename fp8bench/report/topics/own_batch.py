"""Compares the speed of each precision at the largest batch that fits into memory with its speed at the batch that
all precisions share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fp8bench import units
from fp8bench.model import Capacity, Phase
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import Elements, Text
from fp8bench.report.panels import Result

_GIGATOKEN = 1e9
_SECONDS_PER_HOUR = 3600.0
_OWN_BATCH_METHOD_TEXT = (
    "Each case was timed alone at its own batch, not in rounds with the others, so a few percent mean nothing. The "
    "last column is computed: every case takes this number of tokens in a step, in micro-batches, with one update."
)


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits into memory, for a case or for an arm of a training. Rates are in tokens per second.

    `shared_rate` is the rate at a batch that is the same for all cases. `update` is the time of the optimizer's update
    in seconds. An unknown value is None.
    """

    name: str
    search: Capacity
    shared_rate: float | None
    update: float | None

    @property
    def seconds(self) -> float:
        """The seconds of a step: the mean of the fastest quarter of the timed steps."""
        sorted_seconds = sorted(self.search.seconds)
        return fmean(sorted_seconds[: max(1, len(sorted_seconds) // 4)])

    @property
    def rate(self) -> float:
        return self.search.tokens / self.seconds

    def compute_accumulated_rate(self, tokens: int) -> float | None:
        """Returns the tokens per second of a step that accumulates the gradients of several micro-batches, `tokens`
        tokens in all. Returns None if unknown.
        """
        # `update` comes from a different measurement, so noise may make it longer than this step.
        if self.update is None or self.update >= self.seconds:
            return None
        # Every micro-batch takes a step without the update. A single update follows.
        return tokens / (tokens / self.search.tokens * (self.seconds - self.update) + self.update)


def make_own_batch(result: Result, search: Capacity) -> LargestBatch:
    best_seconds = result.best_seconds
    shared_tokens_per_second = result.record.work.tokens / best_seconds if best_seconds else None
    update_seconds = dict(result.finding.phases).get(Phase.OPTIMIZER_STEP)
    return LargestBatch(result.mode, search, shared_tokens_per_second, update_seconds)


def own_batch_table(searches: Iterable[LargestBatch]) -> Elements:
    rows = [row for row in searches if row.search.seconds and row.search.tokens]
    if not rows:
        return
    max_batch_tokens = max(row.search.tokens for row in rows)
    cols: ColumnList[LargestBatch] = [
        Col("case", "name"),
        Col("same batch", "shared_rate", show=units.count),
        Col("own batch", "search.batch", show=str),
        Col("step", "seconds", show=units.seconds),
        Col("memory", "search.peak", unit="B"),
        Col("tokens/s", "rate", show=units.count),
        Col("h for 1 G tokens", lambda row: _GIGATOKEN / row.rate / _SECONDS_PER_HOUR, show="{:.3g}".format),
        Col(
            f"at {units.count(max_batch_tokens)} a step",
            lambda row: row.compute_accumulated_rate(max_batch_tokens),
            show=units.count,
        ),
    ]
    yield table("own-batch", "tokens/s of each precision at its own largest batch", cols, rows)
    yield Text(_OWN_BATCH_METHOD_TEXT)
