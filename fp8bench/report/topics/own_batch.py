"""Each precision at the largest batch that its memory allows, next to the batch that all have."""

from __future__ import annotations

from collections.abc import Sequence
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
    "equal tokens a step a case accumulates micro-batches of its own; that is derived from the optimizer's phase."
)


@dataclass(frozen=True)
class OwnBatch:
    """A case with its largest batch. Rates are in tokens a second."""

    result: Result
    search: Capacity

    @property
    def seconds(self) -> float:
        """The mean of the fastest quarter of the timed steps."""
        fastest = sorted(self.search.seconds)
        return fmean(fastest[: max(1, len(fastest) // 4)])

    @property
    def rate(self) -> float:
        return self.search.tokens / self.seconds

    @property
    def shared_rate(self) -> float | None:
        """The rate with the batch that all cases have."""
        best, tokens = self.result.best, self.result.record.work.tokens
        return tokens / best if best else None

    def accumulated_rate(self, tokens: int) -> float | None:
        """The rate of steps of so many tokens, in micro-batches of its own; None if the update's time is unknown."""
        update = dict(phases_of(self.result)).get(Phase.OPTIMIZER_STEP)
        if update is None or not 0 < update < self.seconds:
            return None
        return tokens / (tokens / self.search.tokens * (self.seconds - update) + update)


def own_batches(searches: Sequence[tuple[Result, Capacity]]) -> Elements:
    rows = [OwnBatch(result, search) for result, search in searches if search.seconds and search.tokens]
    if not rows:
        return
    most = max(row.search.tokens for row in rows)
    cols: list[Col[OwnBatch]] = [
        Col("case", lambda row: row.result.mode),
        Col("same batch", lambda row: row.shared_rate, show=units.count),
        Col("its own", lambda row: str(row.search.batch), number=True),
        Col("step", lambda row: row.seconds, show=units.seconds),
        Col("peak memory", lambda row: row.search.peak, unit="B"),
        Col("tokens/s", lambda row: row.rate, show=units.count),
        Col("hours for 1 G tokens", lambda row: _TOKENS / row.rate / _HOUR, show="{:.3g}".format),
        Col(f"tokens/s at {units.count(most)} a step", lambda row: row.accumulated_rate(most), show=units.count),
    ]
    yield table("own-batch", "tokens/s of each precision at its own largest batch", cols, rows)
    yield Text(_HOW)
