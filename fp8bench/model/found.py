"""What the samples of a case say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8bench.model.planned import Case
from fp8bench.model.words import Label, Verdict


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval: time of the case over time of the reference (below 1 is faster)."""

    point: float
    low: float
    high: float
    level: float

    @property
    def half_width(self) -> float:
        """Half the interval's width in log units, about the relative half-width."""
        if self.low <= 0 or not math.isfinite(self.high):
            return math.inf
        return 0.5 * math.log(self.high / self.low)

    @property
    def reach(self) -> float:
        """How far the interval reaches from 1, as a share."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def clearance(self) -> float:
        """How far the interval stays away from 1, as a share; 0 if 1 lies inside."""
        return max(0.0, self.low - 1, 1 - self.high)

    @property
    def inverse(self) -> Interval:
        """The same the other way round: a speed-up, above 1 is faster."""
        return Interval(1 / self.point, _inverse(self.high), _inverse(self.low), self.level)


def _inverse(bound: float) -> float:
    if math.isnan(bound):
        return bound
    return 1 / bound if bound > 0 else math.inf


@dataclass(frozen=True)
class Finding:
    """What the samples of one case say. Derived from the record at any time, never stored as the only truth.

    `phases` are best-case seconds that sum to `best_seconds`; those in `below_floor` are too short to be told from
    the cost of their own markers. `ratio` is that of best cases, `typical` that of the means over all calls; of slower
    calls, one in `rarest` would have been seen. `floor` is how far the A/A interval reaches from 1. `why` says why it
    has no verdict, or what a reader may hold against the one it has. `label_reasons` is what there is to say of some
    labels beyond their meaning; `hard` are those, its own or its reference's, that leave it no verdict.
    """

    case: Case
    verdict: Verdict
    best_seconds: float | None = None
    median_seconds: float | None = None
    spread: float | None = None
    ratio: Interval | None = None
    median_ratio: float | None = None
    floor: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    below_floor: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    why: str = ""
    label_reasons: tuple[tuple[Label, str], ...] = ()
    hard: tuple[Label, ...] = ()
    typical: Interval | None = None
    rarest: int | None = None

    @property
    def doubtful(self) -> bool:
        """Whether a label forbids showing the verdict as a plain fact."""
        return any(label.casts_doubt for label in self.labels)

    @property
    def judged(self) -> bool:
        """Whether it has a verdict on speed."""
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)

    @property
    def verdict_words(self) -> str:
        """The verdict as everyone is told it: 'faster', 'perhaps faster' where a label casts doubt on it."""
        return f"perhaps {self.verdict}" if self.judged and self.doubtful else self.verdict.value
