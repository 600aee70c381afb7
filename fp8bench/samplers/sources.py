"""Where energy comes from: a counter of joules, or a sensor of watts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class SourceKind(StrEnum):
    """The sources, best first. Figures of different kinds do not compare: they have differed by a factor of 1.7."""

    COUNTER = "counter"
    RAPL = "rapl"
    INSTANT = "instant"
    AVERAGE = "average"
    NONE = "none"


@dataclass(frozen=True)
class Source:
    """One of them. `read` says joules of a counter, watts of a sensor, or raises NoReading; it may hang.

    `period` is how often a counter changes, measured, 0 as long as it is not; `settle` how long a sensor averages.
    """

    kind: SourceKind
    read: Callable[[], float]
    period: float = 0.0
    settle: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is a counter."""
        return self.kind in (SourceKind.COUNTER, SourceKind.RAPL)
