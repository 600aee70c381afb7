"""The energy of one device: which source it has, and windows over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from fp8bench.samplers.clock import HOST, Clock
from fp8bench.samplers.energy import Energy, NoWindow, Window
from fp8bench.samplers.patience import PATIENCE, silence
from fp8bench.samplers.readings import NoReading, Read, Readings, Unavailable
from fp8bench.samplers.sampling import Sampler
from fp8bench.samplers.sources import Source, SourceKind
from fp8bench.samplers.tick_slope import INTERVALS, rhythm

# A window that has not enough after so many seconds never will.
CAP = 5.0
IDLE = 3.0
# How long a counter may take to show its rhythm, and by how many ticks it does.
_CALIBRATION = 2.5
_TICKS = 7
_FEWEST_TICKS = 3
_FEWEST_SAMPLES = 3


class Looks(Protocol):
    """What can be asked of a device beside its energy; nvml.NvmlDevice says what each of them means."""

    def facts(self) -> Readings: ...

    def state(self) -> Readings: ...

    def violations(self) -> Readings: ...

    def process_memory(self, pid: int | None = None) -> Read: ...

    def glance(self) -> Readings: ...

    def restless(self) -> Readings: ...

    def close(self) -> None: ...


class Meter:
    """One device's energy by the first of its sources that works, and its state.

    `refused` says of each better source why it is not used. Nothing here raises NoReading: without a source, windows
    end at once with the reasons. `hung` is told when a source stops answering.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        device: Looks,
        why_none: str = "",
        clock: Clock = HOST,
        patience: float = PATIENCE,
        hung: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.device = device
        self.call_seconds: float | None = None
        self.refused: tuple[tuple[SourceKind, str], ...] = ()
        self._why_none = why_none
        self._clock, self._patience, self._hung = clock, patience, hung
        self.source: Source | None = None
        self.source = self._first_that_works(sources)

    @property
    def kind(self) -> SourceKind:
        """The kind of its source."""
        return self.source.kind if self.source else SourceKind.NONE

    @property
    def why(self) -> str:
        """Why there is no source, or no better one; '' if it is the best."""
        return self._why_none or "; ".join(f"{kind}: {reason}" for kind, reason in self.refused)

    def window(self, cap: float = CAP) -> Window | NoWindow:
        """A window to run a workload in; after `cap` seconds it has enough whatever it has seen."""
        if self.source is None:
            return NoWindow(self.why)
        sampler = Sampler(self.source, self._clock, self.device.restless)
        return Window(sampler, self.source, self._clock, cap, self._patience, self._silent)

    def idle(self, seconds: float = IDLE) -> Energy | Unavailable:
        """The energy while the caller does nothing: the device keeps whatever context it has open."""
        with self.window() as window:
            end = self._clock.now() + seconds
            self._clock.wait(lambda: window.failed or self._clock.now() >= end)
        return window.energy

    def close(self) -> None:
        """Lets the device go."""
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _silent(self, why: str) -> None:
        """A source that hangs is not asked again: each time would cost as much patience."""
        self.source = None
        self._why_none = why
        self._hung(why)

    def _first_that_works(self, sources: Sequence[Source]) -> Source | None:
        for source in sources:
            try:
                return self._tried(source)
            except NoReading as failure:
                self.refused = (*self.refused, (source.kind, failure.reason))
        return None

    def _tried(self, source: Source) -> Source:
        """A source that has shown that it works, a counter with its rhythm."""
        clock = self._clock
        sampler = Sampler(
            source, clock, None, lambda one: len(one.ticks) >= _TICKS or len(one.samples) >= _FEWEST_SAMPLES
        )
        sampler.start()
        end = clock.now() + _CALIBRATION
        clock.wait(lambda: sampler.enough or clock.now() >= end)
        if not sampler.stop(self._patience):
            self._silent(silence("the energy source", self._patience))
            raise NoReading(self._why_none)
        sampler.check()
        self.call_seconds = sampler.call_seconds
        return _with_rhythm(source, sampler) if source.counts else source


def _with_rhythm(source: Source, sampler: Sampler) -> Source:
    if len(sampler.ticks) < _FEWEST_TICKS:
        raise NoReading(f"the counter changed {len(sampler.ticks)} time(s) in {_CALIBRATION:g} s")
    found = rhythm(sampler.ticks)
    if (INTERVALS + 1) * found.period > CAP:
        raise NoReading(
            f"the counter changes every {found.period:.2g} s: {INTERVALS} intervals do not fit in {CAP:g} s"
        )
    return replace(source, rhythm=found)
