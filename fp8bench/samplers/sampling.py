"""The sampler's thread: looks at one source as long as a window is open, and at the device's state now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from fp8bench.samplers.clock import Clock
from fp8bench.samplers.mean_power import PowerSample, sufficient
from fp8bench.samplers.pace import Pace
from fp8bench.samplers.readings import NoReading, Readings
from fp8bench.samplers.sources import Source
from fp8bench.samplers.tick_slope import Tick, resolved

NAME = "fp8bench-sampler"
# Seconds between two looks at the state, and between two thoughts about the cost and whether there is enough.
_STATE = 0.2
_THOUGHT = 0.05
_SPARE = 1.5


class Sampler:
    """What one thread sees. It writes, others read: `enough` at any time, all else when the thread has ended.

    `failure` says why a source failed while it was looked at, '' if it did not; `ended` that the thread came to its
    end, whatever it was; `call_seconds` is what the fastest call took.
    """

    def __init__(
        self,
        source: Source,
        clock: Clock,
        look: Callable[[], Readings] | None = None,
        satisfied: Callable[[Sampler], bool] | None = None,
    ) -> None:
        self.ticks: list[Tick] = []
        self.samples: list[PowerSample] = []
        self.looks: list[Readings] = []
        self.polls = 0
        self.call_seconds = math.inf
        self.begun = 0.0
        self.cpu_seconds = 0.0
        self.failure = ""
        self.enough = False
        self.ended = False
        self._source, self._clock, self._look, self._satisfied = source, clock, look, satisfied or Sampler.resolved
        self._stop = threading.Event()
        self._pace = Pace(source.counts, source.rhythm)
        # What a counter shows is never older than its longest interval, and something to spare.
        self._oldest = _SPARE * source.rhythm.longest if source.rhythm else math.inf
        self._state_due = self._thought_due = 0.0
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def start(self) -> None:
        """The thread begins to look."""
        self._thread.start()

    def resolved(self) -> bool:
        """Whether there is enough for a number that is as sharp as it need be."""
        if self._source.counts:
            return resolved(self.ticks)
        return sufficient(self.samples, self.begun, self._source.settle)

    def stop(self, patience: float) -> bool:
        """The thread ends; False where it does not within that time, because a call hangs."""
        self._stop.set()
        self._thread.join(patience)
        return not self._thread.is_alive()

    def check(self) -> None:
        """After the end: raises NoReading if the source failed, or the thread did."""
        if self.failure or not self.ended:
            raise NoReading(self.failure or "the sampler's thread broke off")

    def _run(self) -> None:
        self._cpu_before = self._clock.cpu()
        self.begun = self._clock.now()
        self._state_due = self.begun
        try:
            if self._source.counts:
                self._follow_counter()
            else:
                self._follow_sensor()
            self.ended = True
        except NoReading as failure:
            self.failure = failure.reason
            self.ended = True
        finally:
            self.cpu_seconds = self._clock.cpu() - self._cpu_before
            self.enough = True

    def _follow_counter(self) -> None:
        clock, read = self._clock, self._source.read
        asked = clock.now()
        last, tick = read(), None
        changed = clock.now()
        while not clock.sleep(self._pace.next(clock.now(), tick, len(self.ticks)), self._stop):
            before, asked = asked, clock.now()
            joules = read()
            seen = clock.now()
            if joules < last:
                raise NoReading(f"the energy counter went back from {last:.6g} J to {joules:.6g} J")
            tick = Tick(max(before, asked - self._oldest), seen, joules) if joules > last else None
            if tick is None and asked - changed > self._oldest:
                self._start_again()
            if tick is not None:
                last, changed = joules, seen
                if not self._pace.blind:
                    self.ticks.append(tick)
                    # Right after a tick nothing is missed while the state is looked at.
                    self._look_around(seen)
            self._noted(asked, seen)

    def _start_again(self) -> None:
        """The counter has become slower than its rhythm says: what was dated by it is worth nothing."""
        self.ticks.clear()
        self._oldest = math.inf
        self._pace = Pace(counts=True)

    def _follow_sensor(self) -> None:
        clock, read = self._clock, self._source.read
        while not clock.sleep(self._pace.next(clock.now(), None, 0), self._stop):
            asked = clock.now()
            watts = read()
            seen = clock.now()
            self.samples.append(PowerSample((asked + seen) / 2, watts))
            self._look_around(seen)
            self._noted(asked, seen)

    def _look_around(self, now: float) -> None:
        if self._look is not None and now >= self._state_due:
            self._state_due = now + _STATE
            self.looks.append(self._look())

    def _noted(self, asked: float, now: float) -> None:
        """After each look; now and then also whether looking is too dear, and whether there is enough."""
        self.polls += 1
        self.call_seconds = min(self.call_seconds, now - asked)
        if now >= self._thought_due:
            self._thought_due = now + _THOUGHT
            self._pace.mind(self._clock.cpu() - self._cpu_before, now - self.begun)
            self.enough = self.enough or self._satisfied(self)
