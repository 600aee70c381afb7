"""How often a sampler looks, so that it sees a tick in time and costs the workload next to nothing."""

from __future__ import annotations

# Between two looks.
PAUSE = 2e-3
POWER_PAUSE = 10e-3
# After a tick the next one is a period away: this share of it is slept through.
_REST = 0.75
# Of one core. A thread that wakes costs its neighbours about as much again as it takes itself.
_BUDGET = 0.005
_LONGEST = 50e-3
_SLOWER = 1.5


class Pace:
    """When to look next, in seconds from now."""

    def __init__(self, pause: float, period: float = 0.0) -> None:
        self.pause = pause
        self.rest = _REST * period
        self._resting = False

    def next(self, ticked: bool) -> float:
        """How long to sleep after a look that saw a tick or none."""
        if ticked and self._resting:
            # It may have come long before: the counter is faster than it was.
            self.rest /= 2
        self._resting = ticked and self.rest > self.pause
        return self.rest if self._resting else self.pause

    def mind(self, cpu_seconds: float, seconds: float) -> None:
        """Looks less often where looking has taken more than its share of the time."""
        if cpu_seconds > _BUDGET * seconds:
            self.pause = min(_SLOWER * self.pause, _LONGEST)
