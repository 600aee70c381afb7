"""Energy of what runs while a window is open.

A window is looked at by one thread of its own, which ends with it: outside of windows nothing runs. It never raises and
never hangs; where there is no number there is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from statistics import median
from types import TracebackType
from typing import Self

from fp8bench.measure.sensors.mean_power import mean_power, slope
from fp8bench.measure.sensors.sampler_thread import Sampler, Source, SourceKind
from fp8bench.measure.sensors.timeouts import Clock, silence
from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable


def _union(numbers: Sequence[float]) -> float:
    return reduce(or_, (int(number) for number in numbers))


# Name -> of which value, and what of its looks.
_SUMMARIES: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "throttle": ("throttle", _union),
    "sm_clock": ("sm_clock", median),
    "sm_clock_lowest": ("sm_clock", min),
    "memory_clock": ("memory_clock", median),
    "temperature": ("temperature", max),
}


def watched(looks: Sequence[Readings]) -> Readings:
    """All throttle reasons of the window, the median and lowest clocks, the highest temperature.

    A value that failed in one look is unavailable: what it was then may have been what matters.
    """
    return {name: _summary([look[of] for look in looks], how) for name, (of, how) in _SUMMARIES.items()}


def _summary(reads: Sequence[Read], how: Callable[[Sequence[float]], float]) -> Read:
    if not reads:
        return Unavailable("the window ended before anyone looked")
    failed = next((read for read in reads if isinstance(read, Unavailable)), None)
    if failed is not None:
        return failed
    known = [read for read in reads if isinstance(read, Reading)]
    return Reading(how([read.number for read in known]), known[0].unit, known[0].source)


@dataclass(frozen=True)
class Energy:
    """The energy of a window of `seconds`: the mean power of the stretch in which it was measured, times that length.

    With a counter the stretch lies between two ticks, `intervals` apart, and its `counted_joules` are exact whatever
    the power did; `uncertainty` is the share by which its length, and so `watts`, can be off. With a sensor it lies
    between two readings, and `uncertainty` is None: nobody knows. `watched` has the device's state meanwhile;
    `sampler_seconds` is the processor time that `polls` looks took.
    """

    source: SourceKind
    watts: float
    seconds: float
    intervals: int
    counted_joules: float
    counted_seconds: float
    uncertainty: float | None
    watched: Readings
    polls: int
    sampler_seconds: float

    @property
    def joules(self) -> float:
        """Of the whole window."""
        return self.watts * self.seconds


class Window:
    """`with meter.window() as window:` runs the workload until `window.enough`; then `window.energy` says."""

    energy: Energy | Unavailable = Unavailable("the window has not ended yet")

    def __init__(
        self, sampler: Sampler, source: Source, clock: Clock, cap: float, timeout: float, hung: Callable[[str], None]
    ) -> None:
        self._sampler, self._source, self._clock = sampler, source, clock
        self._cap, self._timeout, self._hung = cap, timeout, hung
        self._start = 0.0

    @property
    def enough(self) -> bool:
        """Whether more of the workload would not help: there is enough, or there will never be."""
        return self._sampler.enough or self._clock.now() >= self._start + self._cap

    @property
    def failed(self) -> bool:
        """Whether there will be no number."""
        return bool(self._sampler.failure)

    def __enter__(self) -> Self:
        self._sampler.start()
        self._start = self._clock.now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self._clock.now() - self._start
        try:
            if not self._sampler.stop(self._timeout):
                self._hung(silence("the energy source", self._timeout))
                raise NoReading(silence("the energy source", self._timeout))
            self._sampler.check()
            self.energy = self._measured(seconds)
        except NoReading as failure:
            self.energy = Unavailable(failure.reason)

    def _measured(self, seconds: float) -> Energy:
        sampler, kind = self._sampler, self._source.kind
        looks = (watched(sampler.looks), sampler.polls, sampler.cpu_seconds)
        if self._source.counts:
            by_ticks = slope(sampler.ticks)
            return Energy(
                kind, by_ticks.watts, seconds, by_ticks.intervals, by_ticks.joules, by_ticks.seconds,
                by_ticks.uncertainty, *looks,
            )  # fmt: skip
        mean = mean_power(sampler.samples, sampler.begun, self._source.settle)
        joules = mean.watts * mean.seconds
        return Energy(kind, mean.watts, seconds, mean.samples - 1, joules, mean.seconds, None, *looks)


class NoWindow:
    """The window of a device without a source: there is nothing to wait for."""

    enough = failed = True

    def __init__(self, why: str) -> None:
        self.energy = Unavailable(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None
