"""The energy of the work during a window, and the thread that samples one source in it. Windows never raise or hang; a
missing number has its reason. Outside of windows nothing runs. A thread that wakes up takes 30 to 150 us of a
processor, so it sleeps while nothing can be seen. It polls continuously for the first tick of a window. Ticks up to the
tenth only have to be counted: one look a period, halfway between two of them. From there on any tick may be the last,
so it is waited for from just before it is due."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import or_
from statistics import median
from typing import Any, Self

from fp8bench.measure.sensors.driver import Clock, NoAnswer, has_ended, silence
from fp8bench.measure.sensors.mean_power import (
    INTERVALS,
    RESOLVED,
    RESOLVED_BRISKLY,
    PowerSample,
    PowerStretch,
    Rhythm,
    Tick,
    is_resolved,
    mean_power,
    slope,
    sufficient,
)
from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable

# Seconds between two looks: where a tick may come; at a counter faster than that; at a power sensor.
PAUSE = 2e-3
FAST_PAUSE = 20e-3
POWER_PAUSE = 10e-3
# Seconds between two ticks that are waited for: of a faster counter some are passed over.
_SPARSE = 0.05
# The share of one processor that looking may take, and how many seconds of it may be spent in advance.
_BUDGET = 0.005
_ADVANCE = 1.0
_SPARSER = 1.5
_SPARSEST = 0.4
_LONGEST_PAUSE = 50e-3
# Between looks for a tick that is waited for: 0.5% of a window of a second at each end.
_DULLEST_PAUSE = 5e-3


class Polling:
    """Decides how long to sleep; learns how early a tick may come, and what looking costs.

    `blind`: ticks pass unseen while it sleeps, so the next change cannot be dated. With `every_tick` each tick is
    waited for, so that a window of 1.2 s begins and ends sharply; looking may then cost more.
    """

    def __init__(self, counts: bool, rhythm: Rhythm | None = None, every_tick: bool = False) -> None:
        fast = rhythm is not None and rhythm.period < 3 * PAUSE
        self.blind = False
        self._rhythm = None if fast else rhythm
        self._pause = (FAST_PAUSE if fast else PAUSE) if counts else POWER_PAUSE
        self._margin = 2 * PAUSE + rhythm.spread if rhythm else 0.0
        self._every_tick = every_tick
        self._sparse = 0.0 if every_tick else _SPARSE
        self._first = 0.0
        self._awake = math.inf  # when it last woke up to wait for a tick
        self._resting = False

    def next(self, now: float, tick: Tick | None, count: int) -> float:
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
        if count < INTERVALS and not self._every_tick:
            return max(last + 1.5 * period - now, self._pause)
        if (self._every_tick or count > INTERVALS) and (rested or tick.at - self._awake > 2 * self._margin):
            # The tick was there at the first look already, or passed unseen and this is the next one.
            self._margin = min(2 * self._margin, period)
        return self._rest(period, last - now)

    def _rest(self, period: float, since: float) -> float:
        """How long to sleep until just before the next tick; `since` is the last one relative to now."""
        turns = max(1, math.ceil(self._sparse / period))
        seconds = since + turns * period - self._margin
        self._resting = seconds > self._pause
        self.blind = self._resting and turns > 1
        return max(seconds, self._pause)

    def limit_cost(self, cpu_seconds: float, seconds: float) -> None:
        if cpu_seconds <= _BUDGET * (seconds + _ADVANCE):
            return
        if self._rhythm is None:
            self._pause = min(_SPARSER * self._pause, _LONGEST_PAUSE)
        elif self._every_tick:
            self._pause = min(_SPARSER * self._pause, _DULLEST_PAUSE)
        else:
            self._sparse = min(_SPARSER * self._sparse, _SPARSEST)


class SourceKind(StrEnum):
    """Kinds of energy sources, best first. Their figures do not compare: they have differed by a factor of 1.7."""

    COUNTER = "counter"
    RAPL = "rapl"
    INSTANT = "instant"
    NONE = "none"


@dataclass(frozen=True)
class Source:
    """`read` returns joules of a counter or watts of a sensor, or raises NoReading; it may hang.

    `rhythm` is how a counter changes, None until measured.
    """

    kind: SourceKind
    read: Callable[[], float]
    rhythm: Rhythm | None = None

    @property
    def counts(self) -> bool:
        return self.kind in (SourceKind.COUNTER, SourceKind.RAPL)


NAME = "fp8bench-sampler"
# Seconds between two looks at the state, and between two checks of the cost and whether there is enough.
_STATE = 0.2
_CHECK = 0.05
_SPARE = 1.5


class Sampler:
    """The samples of one thread. The thread writes; others may read `enough` at any time, the rest after it has ended.

    `failure` is why the source failed, '' if it did not; `ended` is true once the thread has ended normally.
    """

    def __init__(
        self,
        source: Source,
        clock: Clock,
        look: Callable[[], Readings] | None = None,
        satisfied: Callable[[Sampler], bool] | None = None,
        every_tick: bool = False,
    ) -> None:
        self.ticks: list[Tick] = []
        self.samples: list[PowerSample] = []
        self.looks: list[Readings] = []
        self.begun = 0.0
        self.failure = ""
        self.enough = False
        self.ended = False
        self._source, self._clock, self._look, self._satisfied = source, clock, look, satisfied or Sampler.is_resolved
        self._stop = threading.Event()
        self._every_tick = every_tick
        self._polling = Polling(source.counts, source.rhythm, every_tick)
        # A counter's value is never older than its longest interval, with something to spare.
        self._oldest = _SPARE * source.rhythm.longest if source.rhythm else math.inf
        self._state_due = self._check_due = 0.0
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_resolved(self) -> bool:
        if self._source.counts:
            return is_resolved(self.ticks, RESOLVED_BRISKLY if self._every_tick else RESOLVED)
        return sufficient(self.samples)

    def stop(self, timeout: float) -> None:
        """Ends the thread. Raises NoReading if the source or the thread failed, NoAnswer if a call hangs."""
        self._stop.set()
        if not has_ended(self._thread, timeout):
            raise NoAnswer(silence("the energy source", timeout))
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
            self.enough = True

    def _follow_counter(self) -> None:
        clock, read = self._clock, self._source.read
        asked = clock.now()
        last, tick = read(), None
        changed = clock.now()
        while not clock.sleep(self._polling.next(clock.now(), tick, len(self.ticks)), self._stop):
            previous, asked = asked, clock.now()
            joules = read()
            answered = clock.now()
            if joules < last:
                raise NoReading(f"the energy counter went back from {last:.6g} J to {joules:.6g} J")
            # A tick is between the last question that saw the old value and the answer that saw the new one.
            tick = Tick(max(previous, asked - self._oldest), answered, joules) if joules > last else None
            if tick is None and asked - changed > self._oldest:
                # The counter is slower than its period: ticks dated by the period are useless.
                self.ticks.clear()
                self._oldest = math.inf
                self._polling = Polling(counts=True)
            if tick is not None:
                last, changed = joules, answered
                if not self._polling.blind:
                    self.ticks.append(tick)
                    # Read the device's state right after a tick, when no other tick can be missed.
                    self._look_around(answered)
            self._after_look(answered)

    def _follow_sensor(self) -> None:
        clock, read = self._clock, self._source.read
        while not clock.sleep(self._polling.next(clock.now(), None, 0), self._stop):
            asked = clock.now()
            watts = read()
            answered = clock.now()
            # A sensor's value is dated to the middle of the question: nobody knows when it was taken.
            self.samples.append(PowerSample((asked + answered) / 2, watts))
            self._look_around(answered)
            self._after_look(answered)

    def _look_around(self, now: float) -> None:
        if self._look is not None and now >= self._state_due:
            self._state_due = now + _STATE
            self.looks.append(self._look())

    def _after_look(self, now: float) -> None:
        if now >= self._check_due:
            self._check_due = now + _CHECK
            self._polling.limit_cost(self._clock.cpu() - self._cpu_before, now - self.begun)
            self.enough = self.enough or self._satisfied(self)


# Name -> value of the looks and how they are summarised: all throttle reasons, median and lowest clock, highest heat.
SUMMARIES: dict[str, tuple[str, Callable[[Sequence[float]], Any]]] = {
    "throttle": ("throttle", lambda masks: reduce(or_, map(int, masks))),
    "sm_clock": ("sm_clock", median),
    "sm_clock_lowest": ("sm_clock", min),
    "temperature": ("temperature", max),
}


def summarise_looks(looks: Sequence[Readings]) -> Readings:
    """A summary of looks. A value that failed in one look is unavailable: the missing one may have mattered."""
    summaries = {}
    for name, (of, summarise) in SUMMARIES.items():
        summaries[name] = _summary([look[of] for look in looks], summarise)
    return summaries


def _summary(reads: Sequence[Read], how: Callable[[Sequence[float]], float]) -> Read:
    if not reads:
        return Unavailable("the window ended before anyone looked")
    failed = next((read for read in reads if isinstance(read, Unavailable)), None)
    if failed is not None:
        return failed
    readings = [read for read in reads if isinstance(read, Reading)]
    return Reading(how([read.number for read in readings]), readings[0].unit, readings[0].source)


@dataclass(frozen=True)
class Energy:
    """The energy of a window of `seconds`: the mean power of the measured `stretch` times that length.

    `watched` is the device's state during the window.
    """

    source: SourceKind
    stretch: PowerStretch
    seconds: float
    watched: Readings

    @property
    def watts(self) -> float:
        return self.stretch.watts

    @property
    def joules(self) -> float:
        return self.watts * self.seconds


_OPEN = Unavailable("the window has not ended yet")


@dataclass
class Window:
    """`with meter.window() as window:` run the workload until `window.enough`; then `window.energy` has the result."""

    _sampler: Sampler
    _source: Source
    _clock: Clock
    _cap: float
    _end: Callable[[Sampler], None]
    _start: float = 0.0
    energy: Energy | Unavailable = _OPEN

    @property
    def enough(self) -> bool:
        """Whether more of the workload would not help: there is enough, or there will never be."""
        return self._sampler.enough or self._clock.now() >= self._start + self._cap

    @property
    def has_failed(self) -> bool:
        return bool(self._sampler.failure)

    def __enter__(self) -> Self:
        self._sampler.start()
        self._start = self._clock.now()
        return self

    def __exit__(self, *exc: object) -> None:
        seconds = self._clock.now() - self._start
        try:
            self._end(self._sampler)
            self.energy = Energy(self._source.kind, self._stretch(), seconds, summarise_looks(self._sampler.looks))
        except NoReading as failure:
            self.energy = Unavailable(failure.reason)

    def _stretch(self) -> PowerStretch:
        if self._source.counts:
            return slope(self._sampler.ticks)
        return mean_power(self._sampler.samples)


class NoWindow(AbstractContextManager["NoWindow"]):
    """The window of a device without a source: `enough` at once."""

    enough = has_failed = True

    def __init__(self, reason: str) -> None:
        self.energy = Unavailable(reason)

    def __exit__(self, *error: object) -> None:
        return None
