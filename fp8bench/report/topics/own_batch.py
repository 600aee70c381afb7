"""Each precision at the largest batch that its memory allows, next to the batch that all have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fp8bench import units
from fp8bench.model import Capacity, Phase
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import Elements, Text
from fp8bench.report.panels import Result, phases_of

_TOKENS, _HOUR = 1e9, 3600.0
_HOW = (
    "Steps with the own batch were timed one case after the other, not in rounds, so a few percent mean nothing. The "
    "last column is computed: every case takes as many tokens a step, in micro-batches of its own batch and one update."
)


@dataclass(frozen=True)
class OwnBatch:
    """A case or arm with its largest batch. Rates are in tokens a second, `shared_rate` is that of the common batch;
    `update` is the time of the optimizer's update in seconds. Both are None where unknown."""

    name: str
    search: Capacity
    shared_rate: float | None
    update: float | None

    @property
    def seconds(self) -> float:
        """The mean of the fastest quarter of the timed steps."""
        fastest = sorted(self.search.seconds)
        return fmean(fastest[: max(1, len(fastest) // 4)])

    @property
    def rate(self) -> float:
        return self.search.tokens / self.seconds

    def accumulated_rate(self, tokens: int) -> float | None:
        """Returns the rate of steps of `tokens` tokens in several micro-batches; None if the update's time is
        unknown."""
        if self.update is None or self.update >= self.seconds:
            return None
        return tokens / (tokens / self.search.tokens * (self.seconds - self.update) + self.update)


def own_batch_of(result: Result, search: Capacity) -> OwnBatch:
    tokens, best = result.record.work.tokens, result.best
    update = dict(phases_of(result)).get(Phase.OPTIMIZER_STEP)
    return OwnBatch(result.mode, search, tokens / best if best else None, update)


def own_batches(searches: Iterable[OwnBatch]) -> Elements:
    rows = [row for row in searches if row.search.seconds and row.search.tokens]
    if not rows:
        return
    most = max(row.search.tokens for row in rows)
    cols: Cols[OwnBatch] = [
        Col("case", "name"),
        Col("same batch", "shared_rate", show=units.count),
        Col("own batch", "search.batch", show=str),
        Col("step", "seconds", show=units.seconds),
        Col("memory", "search.peak", unit="B"),
        Col("tokens/s", "rate", show=units.count),
        Col("h for 1 G tokens", lambda row: _TOKENS / row.rate / _HOUR, show="{:.3g}".format),
        Col(f"at {units.count(most)} a step", lambda row: row.accumulated_rate(most), show=units.count),
    ]
    yield table("own-batch", "tokens/s of each precision at its own largest batch", cols, rows)
    yield Text(_HOW)
