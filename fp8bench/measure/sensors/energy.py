"""Energy of what runs while a window is open.

A window is looked at by one thread of its own, which ends with it: outside of windows nothing runs. It never raises and
never hangs; where there is no number there is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from statistics import median
from typing import Any, Self

from fp8bench.measure.sensors.mean_power import PowerStretch, mean_power, slope
from fp8bench.measure.sensors.sampler_thread import Sampler, Source, SourceKind
from fp8bench.measure.sensors.timeouts import Clock
from fp8bench.model.readings import NoReading, Read, Reading, Readings, Unavailable

# Name -> of which value, and what of its looks: all throttle reasons, the median and lowest clocks, the highest heat.
SUMMARIES: dict[str, tuple[str, Callable[[Sequence[float]], Any]]] = {
    "throttle": ("throttle", lambda masks: reduce(or_, map(int, masks))),
    "sm_clock": ("sm_clock", median),
    "sm_clock_lowest": ("sm_clock", min),
    "memory_clock": ("memory_clock", median),
    "temperature": ("temperature", max),
}


def watched(looks: Sequence[Readings]) -> Readings:
    """What looks come to. A value that failed in one is unavailable: what it was then may have been what matters."""
    return {name: _summary([look[of] for look in looks], how) for name, (of, how) in SUMMARIES.items()}


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
    """The energy of a window of `seconds`: the mean power of the `stretch` that was measured, times that length.

    `watched` has the device's state meanwhile; `sampler_seconds` is the processor time that `polls` looks took.
    """

    source: SourceKind
    stretch: PowerStretch
    seconds: float
    watched: Readings
    polls: int
    sampler_seconds: float

    @property
    def watts(self) -> float:
        return self.stretch.watts

    @property
    def joules(self) -> float:
        """Of the whole window."""
        return self.watts * self.seconds


_OPEN = Unavailable("the window has not ended yet")


@dataclass
class Window:
    """`with meter.window() as window:` runs the workload until `window.enough`; then `window.energy` says."""

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
    def failed(self) -> bool:
        return bool(self._sampler.failure)

    def __enter__(self) -> Self:
        self._sampler.start()
        self._start = self._clock.now()
        return self

    def __exit__(self, *exc: object) -> None:
        seconds = self._clock.now() - self._start
        try:
            self._end(self._sampler)
            self.energy = Energy(
                self._source.kind, self._stretch(), seconds, watched(self._sampler.looks), self._sampler.polls,
                self._sampler.cpu_seconds,
            )  # fmt: skip
        except NoReading as failure:
            self.energy = Unavailable(failure.reason)

    def _stretch(self) -> PowerStretch:
        if self._source.counts:
            return slope(self._sampler.ticks)
        return mean_power(self._sampler.samples, self._sampler.begun, self._source.settle)


class NoWindow(AbstractContextManager["NoWindow"]):
    """The window of a device without a source: there is nothing to wait for."""

    enough = failed = True

    def __init__(self, why: str) -> None:
        self.energy = Unavailable(why)

    def __exit__(self, *error: object) -> None:
        return None
