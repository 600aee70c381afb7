"""Where energy comes from: a counter of joules, or a sensor of watts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.samplers.tick_slope import Rhythm


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

    `rhythm` is how a counter changes, None as long as nobody has measured it; `settle` how long a sensor averages.
    """

    kind: SourceKind
    read: Callable[[], float]
    rhythm: Rhythm | None = None
    settle: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is a counter."""
        return self.kind in (SourceKind.COUNTER, SourceKind.RAPL)
