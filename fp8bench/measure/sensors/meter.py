"""The energy of a device: which source it has, and windows over it.

NVML for NVIDIA, files of the system for processors (RAPL).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from fp8bench.measure.sensors import rapl
from fp8bench.measure.sensors.driver import HOST, TIMEOUT, Clock, Looks, NoAnswer
from fp8bench.measure.sensors.energy import Energy, NoWindow, Sampler, Source, SourceKind, Window
from fp8bench.measure.sensors.mean_power import INTERVALS, rhythm
from fp8bench.measure.sensors.nvml import (
    ENERGY,
    LIBRARY,
    AbsentDevice,
    Library,
    NvmlDevice,
    instant_power,
)
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.measure.sensors.rapl import HostDevice
from fp8bench.model import DeviceFacts
from fp8bench.model.readings import NoReading, Reading, Unavailable

# Seconds after which a window that has not enough never will.
CAP = 5.0
IDLE = 3.0
# How many seconds a counter may take to show its rhythm, and in how many ticks.
_CALIBRATION = 2.5
_TICKS = 7
_FEWEST_TICKS = 3
_FEWEST_SAMPLES = 3


class Meter(AbstractContextManager["Meter"]):
    """One device's energy by the first of its sources that works, and its state.

    `refused` has the reason for each better source that does not work. Without a source, windows end at once with the
    reasons. `hung` is called when a source stops answering.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        device: Looks,
        why_none: str = "",
        clock: Clock = HOST,
        timeout: float = TIMEOUT,
        hung: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.device = device
        self.refused: tuple[tuple[SourceKind, str], ...] = ()
        self._why_none = why_none
        self._power_limits: tuple[float, ...] = ()
        self._idle: Energy | Unavailable | None = None
        self._clock, self._timeout, self._hung = clock, timeout, hung
        self.source: Source | None = None
        self.power_limits()  # as the run begins
        for source in sources:
            try:
                self.source = self._try_source(source)
                break
            except NoReading as failure:
                self.refused = (*self.refused, (source.kind, failure.reason))

    @property
    def kind(self) -> SourceKind:
        return self.source.kind if self.source else SourceKind.NONE

    @property
    def why(self) -> str:
        """Why a source, or a better one, is missing; '' for the best source."""
        return self._why_none or "; ".join(f"{kind}: {reason}" for kind, reason in self.refused)

    def window(self, cap: float = CAP, every_tick: bool = False) -> Window | NoWindow:
        """Opens a window to run a workload in; after `cap` seconds it is over whatever it has seen.

        With `every_tick` the counter is looked at around each of its ticks, and a shorter window is enough.
        """
        if self.source is None:
            return NoWindow(self.why)
        sampler = Sampler(self.source, self._clock, self.device.changing, every_tick=every_tick)
        return Window(sampler, self.source, self._clock, cap, self._end)

    def idle(self, seconds: float = IDLE) -> Energy | Unavailable:
        """The energy while the caller does nothing: the device keeps whatever context it has open."""
        with self.window() as window:
            end = self._clock.now() + seconds
            self._clock.wait(lambda: window.has_failed or self._clock.now() >= end)
        return window.energy

    def idle_once(self, seconds: float = IDLE) -> Energy | Unavailable:
        """Measures the idle energy until it has a figure, and returns that from then on."""
        if not isinstance(self._idle, Energy):
            self._idle = self.idle(seconds)
        return self._idle

    def power_limits(self) -> tuple[float, ...]:
        """The limits in watts that the device has had since it was first asked; the last one is the present one."""
        read = self.device.power_limit()
        if isinstance(read, Reading) and (not self._power_limits or self._power_limits[-1] != read.number):
            self._power_limits = (*self._power_limits, float(read.number))
        return self._power_limits

    def close(self) -> None:
        self.device.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _end(self, sampler: Sampler) -> None:
        """Raises NoReading if the sampler failed. A source that hangs is given up: each wait would take as long."""
        try:
            sampler.stop(self._timeout)
        except NoAnswer as failure:
            self.source, self._why_none = None, failure.reason
            self._hung(failure.reason)
            raise

    def _try_source(self, source: Source) -> Source:
        clock = self._clock
        sampler = Sampler(
            source, clock, None, lambda looking: len(looking.ticks) >= _TICKS or len(looking.samples) >= _FEWEST_SAMPLES
        )
        sampler.start()
        end = clock.now() + _CALIBRATION
        clock.wait(lambda: sampler.enough or clock.now() >= end)
        self._end(sampler)
        return _with_rhythm(source, sampler) if source.counts else source


def _with_rhythm(source: Source, sampler: Sampler) -> Source:
    if len(sampler.ticks) < _FEWEST_TICKS:
        raise NoReading(f"the counter changed {len(sampler.ticks)} time(s) in {_CALIBRATION:g} s")
    pace = rhythm(sampler.ticks)
    if (INTERVALS + 1) * pace.period > CAP:
        raise NoReading(f"the counter changes every {pace.period:.2g} s: {INTERVALS} intervals do not fit in {CAP:g} s")
    return replace(source, rhythm=pace)


# Names an NVML device (UUID or PCI address) to read instead of the cases' own.
NVML_DEVICE = "FP8BENCH_NVML_DEVICE"
_UNWANTED = "--no-energy was given"


def meter_for(facts: DeviceFacts, environ: Mapping[str, str] = os.environ, energy: bool = True) -> Meter:
    """Opens the meter of the device that cases run on. Takes up to 3 s per source that has to be tried.

    Without `energy` no source is tried: the device reports its state, and its windows have no energy.
    """
    named = environ.get(NVML_DEVICE, "")
    if named:
        identity = DeviceIdentity(pci=named) if ":" in named else DeviceIdentity(uuid=named)
        return nvml_meter(identity, energy=energy)
    if facts.kind == "cpu":
        return rapl_meter(energy=energy)
    if facts.kind != "cuda" or facts.hip:
        return _absent(f"nothing is known that reads the energy of {'AMD' if facts.hip else facts.kind} devices")
    return nvml_meter(DeviceIdentity(facts.uuid, facts.pci), energy=energy)


def nvml_meter(identity: DeviceIdentity, clock: Clock = HOST, library: Library = LIBRARY, energy: bool = True) -> Meter:
    try:
        device = NvmlDevice(identity, library)
    except NoReading as failure:
        return _absent(failure.reason, clock)
    sources = (
        Source(SourceKind.COUNTER, lambda: ENERGY(device.ask).number),
        Source(SourceKind.INSTANT, lambda: instant_power(device.ask).number),
    )
    if not energy:
        return Meter((), device, _UNWANTED, clock)
    if (parts := device.shared_by) > 1:
        return Meter((), device, f"{parts} MIG instances share the GPU, and its energy is known as a whole only", clock)
    return Meter(sources, device, "", clock, library.timeout, library.give_up)


def _absent(reason: str, clock: Clock = HOST) -> Meter:
    return Meter((), AbsentDevice(reason), reason, clock)


def rapl_meter(root: Path = rapl.ROOT, clock: Clock = HOST, energy: bool = True) -> Meter:
    reason = "a CPU has no NVML"
    host = HostDevice(reason)
    device = host if host.tells else AbsentDevice(reason)
    if not energy:
        return Meter((), device, _UNWANTED, clock)
    try:
        counter = rapl.EnergyCounter(rapl.domains(root), clock.now)
    except NoReading as failure:
        return Meter((), device, failure.reason, clock)
    return Meter((Source(SourceKind.RAPL, counter.read),), device, "", clock)


class Meters(ExitStack):
    """The meters of a run's devices, opened when first needed. Opening takes up to 3 s, unless `energy` is false."""

    def __init__(self, energy: bool = True, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self._energy, self._environ = energy, environ
        self._opened: dict[str, Meter] = {}

    def of(self, facts: DeviceFacts) -> Meter:
        if facts.key not in self._opened:
            self._opened[facts.key] = self.enter_context(meter_for(facts, self._environ, self._energy))
        return self._opened[facts.key]
