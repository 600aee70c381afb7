"""When a sampler looks, so that it sees ticks in time and costs the workload next to nothing.

A thread that wakes up takes 30 to 150 us of a processor, most of it for waking. So nobody looks where nothing can be
seen. The first tick of a window is looked for all the time. Those up to the tenth only have to be counted: one look a
period, halfway between two of them. From there on any may be the last, and is waited for from just before it is due.
"""

from __future__ import annotations

import math

from fp8bench.samplers.tick_slope import INTERVALS, Rhythm, Tick

# Seconds between two looks where a tick may come; at a counter that is faster than that; and at a power sensor.
PAUSE = 2e-3
FAST_PAUSE = 20e-3
POWER_PAUSE = 10e-3
# Ticks that may be the last are waited for about so often: of a faster counter some are passed over.
_SPARSE = 0.05
# What looking may take of one processor: a share of the time, and that of so many seconds in advance.
_BUDGET = 0.005
_ADVANCE = 1.0
_SPARSER = 1.5
_SPARSEST = 0.4
_LONGEST_PAUSE = 50e-3


class Pace:
    """Says how long to sleep; learns how early a tick may come, and what looking costs.

    `blind`: ticks are passed over while it sleeps, so that the change seen at the next look is none to go by.
    """

    def __init__(self, counts: bool, rhythm: Rhythm | None = None) -> None:
        fast = rhythm is not None and rhythm.period < 3 * PAUSE
        self.blind = False
        self._rhythm = None if fast else rhythm
        self._pause = (FAST_PAUSE if fast else PAUSE) if counts else POWER_PAUSE
        self._margin = 2 * PAUSE + rhythm.spread if rhythm else 0.0
        self._sparse = _SPARSE
        self._first = 0.0
        self._awake = math.inf  # when it last woke up to wait for a tick
        self._resting = False

    def next(self, now: float, tick: Tick | None, count: int) -> float:
        """How long to sleep after a look that saw a tick, the `count`th, or none."""
        rested, self._resting, blind, self.blind = self._resting, False, self.blind, False
        if rested:
            self._awake = now
        if tick is None or blind or self._rhythm is None:
            return self._pause
        period = self._rhythm.period
        if count == 1:
            self._first = tick.at
        sharp = tick.late < period / 2
        last = tick.at if sharp else self._first + (now - self._first) // period * period
        if count < INTERVALS:
            return max(last + 1.5 * period - now, self._pause)
        if count > INTERVALS and (rested or tick.at - self._awake > 2 * self._margin):
            # It was there at the first look already, or passed unseen and this is the one behind it.
            self._margin = min(2 * self._margin, period)
        return self._rest(period, last - now)

    def _rest(self, period: float, since: float) -> float:
        """How long to sleep until just before the tick to wait for; `since` is the last one, seen from now."""
        turns = max(1, math.ceil(self._sparse / period))
        rest = since + turns * period - self._margin
        self._resting = rest > self._pause
        self.blind = self._resting and turns > 1
        return max(rest, self._pause)

    def mind(self, cpu_seconds: float, seconds: float) -> None:
        """Looks less often where looking has taken more than its share of the time."""
        if cpu_seconds <= _BUDGET * (seconds + _ADVANCE):
            return
        if self._rhythm is None:
            self._pause = min(_SPARSER * self._pause, _LONGEST_PAUSE)
        else:
            self._sparse = min(_SPARSER * self._sparse, _SPARSEST)
