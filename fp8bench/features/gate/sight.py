"""What a gate could have seen: of each figure the smallest slow-down that it would have found."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

# Of builds with such a slow-down, in so large a share it is found, where nobody asks for another one.
USUAL_POWER = 0.8
# A history of so many nights that cannot see its threshold is not young any more.
NIGHTS = 14


@dataclass(frozen=True)
class Sight:
    """How small a slow-down of one figure would have been seen, as a share: 0.05 is 5% slower.

    `seen` would have been told from chance in both looks, whatever its threshold, and `fails` would have failed by its
    threshold, too: in as many builds as `Sights.power` says; math.inf where none would. `threshold` is the least that
    may fail. `unknown` says why nobody knows the noise: then both are at least so large. Of a history there
    are `nights` so far, and with `missing` more of them its threshold would be seen; None if with no number of them.
    """

    case: str
    metric: str
    threshold: float
    seen: float
    fails: float
    unknown: str = ""
    nights: int | None = None
    missing: int | None = None

    @property
    def enough(self) -> bool:
        """Whether a slow-down as large as its threshold would be seen."""
        return self.seen <= self.threshold and not self.unknown

    @property
    def is_young(self) -> bool:
        """Whether there is hope for a history: it is short, or a few more nights would do."""
        return self.nights is not None and not self.enough and (self.nights < NIGHTS or self.missing is not None)


@dataclass(frozen=True)
class Sights:
    """Those of all figures that vary, the most blind first. `required`: where one is blind, the gate ends with 4."""

    figures: tuple[Sight, ...] = ()
    power: float = USUAL_POWER
    required: bool = False

    @property
    def blind(self) -> tuple[Sight, ...]:
        """Figures whose threshold could not have been seen, and will not be with a few more nights."""
        return tuple(one for one in self.figures if not one.enough and not one.is_young)

    @property
    def young(self) -> tuple[Sight, ...]:
        return tuple(one for one in self.figures if one.is_young)

    @property
    def fails(self) -> bool:
        return self.required and bool(self.blind)

    @property
    def median(self) -> float:
        return statistics.median_low([one.seen for one in self.figures]) if self.figures else math.nan


NO_SIGHTS = Sights()
