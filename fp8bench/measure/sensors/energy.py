"""Measures the energy of work in a window: a thread samples one energy source during the window.

Windows never raise or hang: a missing number has a reason. Outside of windows no thread runs. A thread that wakes up
takes 30 to 150 us of a processor, so it sleeps while the energy counter cannot change. It polls continuously for the
first change (tick) of the counter. Then it only counts ticks, up to the tenth, by one reading half-way between two
ticks. After the tenth, any tick may be the last one, so the thread wakes up just before each tick.
"""

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

from fp8bench.measure.sensors.driver import Clock, NoAnswer, describe_driver_silence, wait_for_thread_end
from fp8bench.measure.sensors.mean_power import (
    MAX_BRISK_POWER_UNCERTAINTY,
    MAX_UNCERTAINTY,
    MIN_TICK_INTERVALS,
    CounterRhythm,
    CounterTick,
    PowerSample,
    PowerStretch,
    has_enough_samples,
    is_resolved,
    measure_mean_power,
    measure_tick_power,
)
from fp8bench.model.readings import NoReading, Reading, ReadingOrUnavailable, Readings, UnavailableReading

# Seconds between two readings: of a counter that will soon change, of a counter that changes often, and of a power
# sensor.
TICK_PAUSE_SECONDS = 2e-3
FAST_COUNTER_PAUSE_SECONDS = 20e-3
POWER_PAUSE_SECONDS = 10e-3
# The thread wakes up for a tick (change of the counter) at most once in this many seconds. If a counter changes more
# often, the thread skips some ticks.
_TICK_INTERVAL_SECONDS = 0.05
# The share of one processor's time that reading a source may take, on average. More is allowed at the start of a
# window, as if the window had begun _CPU_ADVANCE_SECONDS earlier.
_MAX_CPU_SHARE = 0.005
_CPU_ADVANCE_SECONDS = 1.0
# If reading takes too much CPU time, a pause or the tick interval grows by this factor, up to its limit below.
_READING_PAUSE_GROWTH = 1.5
_MAX_TICK_INTERVAL_SECONDS = 0.4
_MAX_READING_PAUSE_SECONDS = 50e-3
# The longest pause between two readings near a tick. It makes the time of each end of a window uncertain by up to 5 ms,
# which is 0.5% of a window of one second.
_MAX_NEAR_TICK_PAUSE_SECONDS = 5e-3


class SamplerPolling:
    """Computes how long the sampler sleeps between two readings. It adapts to how far the counter's changes (ticks)
    deviate from its period, and to the CPU time that readings take. `blind` means that the counter may change more than
    once during the sleep, so that the time of the next tick is unknown. With `every_tick`, the sampler wakes up for
    each tick, so that the ends of a short window (1.2 s) are precise. Readings then take more CPU time.
    """

    def __init__(self, counts: bool, rhythm: CounterRhythm | None = None, every_tick: bool = False) -> None:
        # A counter that changes this often leaves no time to sleep between its ticks.
        is_fast_counter = rhythm is not None and rhythm.period < 3 * TICK_PAUSE_SECONDS
        self.blind = False
        self._rhythm = None if is_fast_counter else rhythm
        self._pause = (
            (FAST_COUNTER_PAUSE_SECONDS if is_fast_counter else TICK_PAUSE_SECONDS) if counts else POWER_PAUSE_SECONDS
        )
        self._margin = 2 * TICK_PAUSE_SECONDS + rhythm.spread if rhythm else 0.0
        self._every_tick = every_tick
        self._tick_interval = 0.0 if every_tick else _TICK_INTERVAL_SECONDS
        self._first_tick_at = 0.0
        self._last_wake_at = math.inf  # when the sampler last woke up before a tick
        self._is_resting = False

    def next(self, now: float, tick: CounterTick | None, count: int) -> float:
        was_resting, self._is_resting, was_blind, self.blind = self._is_resting, False, self.blind, False
        if was_resting:
            self._last_wake_at = now
        if tick is None or was_blind or self._rhythm is None:
            return self._pause
        energy_counter_period = self._rhythm.period
        if count == 1:
            self._first_tick_at = tick.time
        # The counter ticks (changes) once per period. If its last tick was noticed late, that tick's time is not known
        # precisely, so compute it as the time of the first tick plus a whole number of periods.
        has_precise_time = tick.time_range < energy_counter_period / 2
        last_tick_at = (
            tick.time
            if has_precise_time
            else self._first_tick_at + (now - self._first_tick_at) // energy_counter_period * energy_counter_period
        )
        if count < MIN_TICK_INTERVALS and not self._every_tick:
            # Read half-way between the next two ticks.
            return max(last_tick_at + 1.5 * energy_counter_period - now, self._pause)
        if (self._every_tick or count > MIN_TICK_INTERVALS) and (
            was_resting or tick.time - self._last_wake_at > 2 * self._margin
        ):
            # The sampler woke up too late: the tick came while it slept, or it missed the tick and `tick` is the next
            # one.
            self._margin = min(2 * self._margin, energy_counter_period)
        return self._compute_pause_until_tick(energy_counter_period, last_tick_at - now)

    def _compute_pause_until_tick(self, period: float, last_tick: float) -> float:
        """Returns how many seconds to sleep, to wake up just before the next tick. `last_tick` is the time of the last
        tick relative to now.
        """
        awaited_tick_count = max(1, math.ceil(self._tick_interval / period))
        seconds = last_tick + awaited_tick_count * period - self._margin
        self._is_resting = seconds > self._pause
        self.blind = self._is_resting and awaited_tick_count > 1
        return max(seconds, self._pause)

    def limit_polling_cost(self, cpu_seconds: float, seconds: float) -> None:
        if cpu_seconds <= _MAX_CPU_SHARE * (seconds + _CPU_ADVANCE_SECONDS):
            return
        if self._rhythm is None:
            self._pause = min(_READING_PAUSE_GROWTH * self._pause, _MAX_READING_PAUSE_SECONDS)
        elif self._every_tick:
            self._pause = min(_READING_PAUSE_GROWTH * self._pause, _MAX_NEAR_TICK_PAUSE_SECONDS)
        else:
            self._tick_interval = min(_READING_PAUSE_GROWTH * self._tick_interval, _MAX_TICK_INTERVAL_SECONDS)


class SourceKind(StrEnum):
    """Kinds of energy sources, best first. Figures of different kinds are not comparable: they have differed by a
    factor of 1.7.
    """

    COUNTER = "counter"
    RAPL = "rapl"
    INSTANT = "instant"
    NONE = "none"


@dataclass(frozen=True)
class Source:
    """An energy source. `read` returns the joules of a counter or the watts of a sensor. It may raise NoReading, or
    hang. `counter_rhythm` is how often a counter changes, None until it is measured.
    """

    kind: SourceKind
    read: Callable[[], float]
    counter_rhythm: CounterRhythm | None = None

    @property
    def is_counter(self) -> bool:
        return self.kind in (SourceKind.COUNTER, SourceKind.RAPL)


THREAD_NAME = "fp8bench-sampler"
# Seconds between two readings of the device's state.
_STATE_READING_INTERVAL_SECONDS = 0.2
# Seconds between two checks of how much CPU time sampling has taken, and of whether the energy is precise enough.
_PRECISION_CHECK_INTERVAL_SECONDS = 0.05
_MAX_TICK_AGE_FACTOR = 1.5


class Sampler:
    """Samples an energy source in a thread. Other threads may read `is_enough` at any time, and all other attributes
    only after the end of this thread.

    `failure` is the reason why the source failed, '' if it did not. `ended` is true if the thread ended normally.
    """

    def __init__(
        self,
        source: Source,
        clock: Clock,
        look: Callable[[], Readings] | None = None,
        satisfied: Callable[[Sampler], bool] | None = None,
        every_tick: bool = False,
    ) -> None:
        self.ticks: list[CounterTick] = []
        self.samples: list[PowerSample] = []
        self.looks: list[Readings] = []
        self.begun = 0.0
        self.failure = ""
        self.is_enough = False
        self.ended = False
        self._energy_source, self._clock, self._look, self._has_enough = (
            source,
            clock,
            look,
            satisfied or Sampler.is_resolved,
        )
        self._stop = threading.Event()
        self._every_tick = every_tick
        self._polling = SamplerPolling(source.is_counter, source.counter_rhythm, every_tick)
        # The largest expected age of the counter's value: the longest time between two changes, with a margin.
        self._max_age = _MAX_TICK_AGE_FACTOR * source.counter_rhythm.longest if source.counter_rhythm else math.inf
        self._state_due = self._check_due = 0.0
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_resolved(self) -> bool:
        if self._energy_source.is_counter:
            return is_resolved(self.ticks, MAX_BRISK_POWER_UNCERTAINTY if self._every_tick else MAX_UNCERTAINTY)
        return has_enough_samples(self.samples)

    def stop(self, timeout: float) -> None:
        """Ends the thread. Raises NoReading if the source or the thread failed, and NoAnswer if a call hangs."""
        self._stop.set()
        if not wait_for_thread_end(self._thread, timeout):
            raise NoAnswer(describe_driver_silence("the energy source", timeout))
        if self.failure or not self.ended:
            raise NoReading(self.failure or "the sampler's thread ended early")

    def _run(self) -> None:
        self._cpu_at_start = self._clock.cpu()
        self.begun = self._clock.now()
        self._state_due = self.begun
        try:
            if self._energy_source.is_counter:
                self._sample_energy_counter()
            else:
                self._sample_power_sensor()
            self.ended = True
        except NoReading as failure:
            self.failure = failure.reason
            self.ended = True
        finally:
            # The energy gets no more precise without this thread, so no window may wait for it.
            self.is_enough = True

    def _sample_energy_counter(self) -> None:
        clock, read = self._clock, self._energy_source.read
        read_start_time = clock.now()
        last_joules, counter_tick = read(), None
        last_counter_change_time = clock.now()
        while not clock.sleep(self._polling.next(clock.now(), counter_tick, len(self.ticks)), self._stop):
            previous_read_start, read_start_time = read_start_time, clock.now()
            joules = read()
            read_end_time = clock.now()
            if joules < last_joules:
                raise NoReading(f"the energy counter went back from {last_joules:.6g} J to {joules:.6g} J")
            # The counter changed at some time between the start of the previous reading and the end of this one.
            counter_tick = (
                CounterTick(max(previous_read_start, read_start_time - self._max_age), read_end_time, joules)
                if joules > last_joules
                else None
            )
            if counter_tick is None and read_start_time - last_counter_change_time > self._max_age:
                # The counter is slower than its measured period, so the times of its ticks are wrong.
                self.ticks.clear()
                self._max_age = math.inf
                self._polling = SamplerPolling(counts=True)
            if counter_tick is not None:
                last_joules, last_counter_change_time = joules, read_end_time
                if not self._polling.blind:
                    self.ticks.append(counter_tick)
                    # Read the device's state right after a tick, when no other tick can be missed.
                    self._read_state_if_due(read_end_time)
            self._check_sampling_if_due(read_end_time)

    def _sample_power_sensor(self) -> None:
        clock, read = self._clock, self._energy_source.read
        while not clock.sleep(self._polling.next(clock.now(), None, 0), self._stop):
            read_start_time = clock.now()
            watts = read()
            read_end_time = clock.now()
            # The sensor measured at an unknown time within the call, so the sample gets the time in the middle of the
            # call.
            self.samples.append(PowerSample((read_start_time + read_end_time) / 2, watts))
            self._read_state_if_due(read_end_time)
            self._check_sampling_if_due(read_end_time)

    def _read_state_if_due(self, now: float) -> None:
        if self._look is not None and now >= self._state_due:
            self._state_due = now + _STATE_READING_INTERVAL_SECONDS
            self.looks.append(self._look())

    def _check_sampling_if_due(self, now: float) -> None:
        if now >= self._check_due:
            self._check_due = now + _PRECISION_CHECK_INTERVAL_SECONDS
            self._polling.limit_polling_cost(self._clock.cpu() - self._cpu_at_start, now - self.begun)
            self.is_enough = self.is_enough or self._has_enough(self)


# For each summary of a device's state: the name of the value, and a function that summarises its readings. The summary
# of throttle reasons has all reasons that occurred.
SUMMARIES: dict[str, tuple[str, Callable[[Sequence[float]], Any]]] = {
    "throttle": ("throttle", lambda masks: reduce(or_, map(int, masks))),
    "sm_clock": ("sm_clock", median),
    "sm_clock_lowest": ("sm_clock", min),
    "temperature": ("temperature", max),
}


def summarise_readings(looks: Sequence[Readings]) -> Readings:
    """Returns one summary of each value over several readings. If a value failed in one reading, its summary is
    unavailable, because the lost reading could change it.
    """
    summaries = {}
    for name, (value_name, summarise) in SUMMARIES.items():
        summaries[name] = _summarise_reads([look[value_name] for look in looks], summarise)
    return summaries


def _summarise_reads(
    reads: Sequence[ReadingOrUnavailable], summarise: Callable[[Sequence[float]], float]
) -> ReadingOrUnavailable:
    if not reads:
        return UnavailableReading("the window ended before the first reading")
    first_unavailable_read = next((read for read in reads if isinstance(read, UnavailableReading)), None)
    if first_unavailable_read is not None:
        return first_unavailable_read
    readings = [read for read in reads if isinstance(read, Reading)]
    return Reading(summarise([read.number for read in readings]), readings[0].unit, readings[0].source)


@dataclass(frozen=True)
class Energy:
    """The energy of a window of `seconds`: the mean power of the measured part (`measured_stretch`), times the window's
    length. `watched` is the device's state during the window.
    """

    source: SourceKind
    measured_stretch: PowerStretch
    seconds: float
    watched: Readings

    @property
    def watts(self) -> float:
        return self.measured_stretch.watts

    @property
    def joules(self) -> float:
        return self.watts * self.seconds


_WINDOW_NOT_ENDED = UnavailableReading("the window has not ended yet")


@dataclass
class WorkloadWindow:
    """The `with` block of a workload: run the workload in it until `window.is_enough`, and read `window.energy`
    afterwards.
    """

    _energy_sampler: Sampler
    _energy_source: Source
    _clock: Clock
    _max_window_seconds: float
    _stop_sampler: Callable[[Sampler], None]
    _started_at: float = 0.0
    energy: Energy | UnavailableReading = _WINDOW_NOT_ENDED

    @property
    def is_enough(self) -> bool:
        """Whether the window can end: its energy is precise enough, or its longest duration is over."""
        return self._energy_sampler.is_enough or self._clock.now() >= self._started_at + self._max_window_seconds

    @property
    def has_failed(self) -> bool:
        return bool(self._energy_sampler.failure)

    def __enter__(self) -> Self:
        self._energy_sampler.start()
        self._started_at = self._clock.now()
        return self

    def __exit__(self, *exc: object) -> None:
        seconds = self._clock.now() - self._started_at
        try:
            self._stop_sampler(self._energy_sampler)
            self.energy = Energy(
                self._energy_source.kind,
                self._measure_power_stretch(),
                seconds,
                summarise_readings(self._energy_sampler.looks),
            )
        except NoReading as failure:
            self.energy = UnavailableReading(failure.reason)

    def _measure_power_stretch(self) -> PowerStretch:
        if self._energy_source.is_counter:
            return measure_tick_power(self._energy_sampler.ticks)
        return measure_mean_power(self._energy_sampler.samples)


class NoWindow(AbstractContextManager["NoWindow"]):
    """Replaces a window on a device without an energy source. `is_enough` is true from the start, so nobody waits for
    its energy.
    """

    is_enough = has_failed = True

    def __init__(self, reason: str) -> None:
        self.energy = UnavailableReading(reason)

    def __exit__(self, *error: object) -> None:
        return None
