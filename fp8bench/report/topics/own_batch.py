"""Each precision at the largest batch that its memory allows, next to the batch that all have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from fp8bench import units
from fp8bench.model import Capacity, Phase
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Elements, Text
from fp8bench.report.panels import Result, phases_of

_TOKENS, _HOUR = 1e9, 3600.0
_HOW = (
    "Steps with its own batch were timed one case after the other, without rounds: a few percent mean nothing. At "
    "equal tokens a step a case accumulates micro-batches of its own; that is derived: the update counts once."
)


@dataclass(frozen=True)
class OwnBatch:
    """A case or arm with its largest batch. Rates are in tokens a second, `shared_rate` is that of the batch that all
    have; `update` are the seconds of the optimizer's update. Both are None where unknown."""

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
        """The rate of steps of so many tokens, in micro-batches of its own; None if the update's time is unknown."""
        if self.update is None or self.update >= self.seconds:
            return None
        return tokens / (tokens / self.search.tokens * (self.seconds - self.update) + self.update)


def own_batch_of(result: Result, search: Capacity) -> OwnBatch:
    tokens, best = result.record.work.tokens, result.best
    update = dict(phases_of(result)).get(Phase.OPTIMIZER_STEP)
    return OwnBatch(result.mode, search, tokens / best if best else None, update)


def own_batches(every: Iterable[OwnBatch]) -> Elements:
    rows = [row for row in every if row.search.seconds and row.search.tokens]
    if not rows:
        return
    most = max(row.search.tokens for row in rows)
    cols: list[Col[OwnBatch]] = [
        Col("case", lambda row: row.name),
        Col("same batch", lambda row: row.shared_rate, show=units.count),
        Col("own batch", lambda row: str(row.search.batch), number=True),
        Col("step", lambda row: row.seconds, show=units.seconds),
        Col("memory", lambda row: row.search.peak, unit="B"),
        Col("tokens/s", lambda row: row.rate, show=units.count),
        Col("h for 1 G tokens", lambda row: _TOKENS / row.rate / _HOUR, show="{:.3g}".format),
        Col(f"at {units.count(most)} a step", lambda row: row.accumulated_rate(most), show=units.count),
    ]
    yield table("own-batch", "tokens/s of each precision at its own largest batch", cols, rows)
    yield Text(_HOW)
