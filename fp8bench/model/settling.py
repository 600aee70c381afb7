"""When a device has settled: its clock and its temperature do not move any more. Values in, decision out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

# What is judged: the slopes of straight lines through the looks of the last seconds, of so many looks at least.
STRETCH = 4.0
_FEWEST = 5
# Of its mean, a second; and degrees a second.
CLOCK_SLOPE = 0.002
TEMPERATURE_SLOPE = 0.3


@dataclass(frozen=True)
class ClockLook:
    """Hertz and degrees Celsius at so many seconds; None where nobody could say."""

    at: float
    clock: float | None
    temperature: float | None


@dataclass(frozen=True)
class Settling:
    """What one case ran before something was measured: looks meanwhile, the first one before it ran at all.

    `settled` says whether clock and temperature stood still in the end, `limit` for how many seconds it might have run.
    """

    looks: tuple[ClockLook, ...] = ()
    settled: bool = False
    limit: float = 0.0

    @property
    def seconds(self) -> float:
        return self.looks[-1].at - self.looks[0].at if self.looks else 0.0


@dataclass(frozen=True)
class Slopes:
    """How fast a clock moves, as a share of it a second, and a temperature, in degrees; None where nobody knows."""

    clock: float | None
    temperature: float | None

    @property
    def flat(self) -> bool:
        """Whether what is known of them is small enough; nothing known is not."""
        bounds = ((self.clock, CLOCK_SLOPE), (self.temperature, TEMPERATURE_SLOPE))
        known = [abs(slope) <= bound for slope, bound in bounds if slope is not None]
        return bool(known) and all(known)


def slopes(looks: Sequence[ClockLook]) -> Slopes:
    """Over the last stretch; unknown as long as there is none."""
    last = [one for one in looks if one.at >= looks[-1].at - STRETCH]
    if not looks or looks[-1].at - looks[0].at < STRETCH:
        return Slopes(None, None)
    clocks = [(one.at, one.clock) for one in last if one.clock is not None and 0 < one.clock < math.inf]
    heats = [(one.at, one.temperature) for one in last if one.temperature is not None]
    clock = _slope(clocks)
    return Slopes(None if clock is None else clock / fmean(hertz for _, hertz in clocks), _slope(heats))


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    if len({at for at, _ in points}) < _FEWEST:
        return None
    return linear_regression(*zip(*points, strict=True)).slope
