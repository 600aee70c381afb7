"""Energy of what runs while a window is open.

A window is looked at by one thread of its own, which ends with it: outside of windows nothing runs. It never raises and
never hangs; where there is no number there is the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fp8bench.samplers.clock import Clock
from fp8bench.samplers.mean_power import mean_power
from fp8bench.samplers.patience import silence
from fp8bench.samplers.readings import NoReading, Readings, Unavailable
from fp8bench.samplers.sampling import Sampler
from fp8bench.samplers.sources import Source, SourceKind
from fp8bench.samplers.tick_slope import slope
from fp8bench.samplers.watching import watched


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
        self, sampler: Sampler, source: Source, clock: Clock, cap: float, patience: float, hung: Callable[[str], None]
    ) -> None:
        self._sampler, self._source, self._clock = sampler, source, clock
        self._cap, self._patience, self._hung = cap, patience, hung
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
            if not self._sampler.stop(self._patience):
                self._hung(silence("the energy source", self._patience))
                raise NoReading(silence("the energy source", self._patience))
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
