"""Chooses the energy source of a device, and opens windows that measure its energy.

NVIDIA devices use NVML, processors the files of Linux (RAPL).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from fp8bench.measure.sensors import rapl
from fp8bench.measure.sensors.driver import DRIVER_CALL_TIMEOUT, HOST_CLOCK, Clock, NoAnswer
from fp8bench.measure.sensors.energy import Energy, NoWindow, Sampler, Source, SourceKind, WorkloadWindow
from fp8bench.measure.sensors.mean_power import MIN_TICK_INTERVALS, measure_counter_rhythm
from fp8bench.measure.sensors.nvml import (
    NVML_LIBRARY,
    READ_TOTAL_ENERGY,
    AbsentDevice,
    DeviceReader,
    Library,
    NvmlDevice,
    instant_power,
)
from fp8bench.measure.sensors.nvml_match import DeviceIdentity
from fp8bench.measure.sensors.rapl import HostDevice
from fp8bench.model import DeviceFacts
from fp8bench.model.readings import NoReading, Reading, UnavailableReading

# After this many seconds a window ends even if its energy is not precise enough.
MAX_WINDOW_SECONDS = 5.0
IDLE_SECONDS = 3.0
# A source is tried before it is used. The trial ends after this many seconds, or earlier after this many changes of a
# counter (ticks) or this many samples of a power sensor. It also measures how often a counter changes, which needs
# _MIN_COUNTER_TICKS.
_TRIAL_SECONDS = 2.5
_TRIAL_TICKS = 7
_TRIAL_SAMPLES = 3
_MIN_COUNTER_TICKS = 3


class Meter(AbstractContextManager["Meter"]):
    """Measures the energy of one device by its first source that works, and reads the device's state.

    `refused` has the reason for each better source that does not work. `no_energy_reason` explains empty `sources`.
    Without any source, windows end at once, with these reasons. `hung` is called when a source stops answering.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        device: DeviceReader,
        no_energy_reason: str = "",
        clock: Clock = HOST_CLOCK,
        timeout: float = DRIVER_CALL_TIMEOUT,
        hung: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.device = device
        self.refused: tuple[tuple[SourceKind, str], ...] = ()
        self._no_energy_reason = no_energy_reason
        self._power_limits: tuple[float, ...] = ()
        self._idle: Energy | UnavailableReading | None = None
        self._clock, self._timeout, self._hung = clock, timeout, hung
        self.source: Source | None = None
        self.read_power_limits()  # the power limit at the beginning of the run
        for source in sources:
            try:
                self.source = self._try_energy_source(source)
                break
            except NoReading as failure:
                self.refused = (*self.refused, (source.kind, failure.reason))

    @property
    def kind(self) -> SourceKind:
        return self.source.kind if self.source else SourceKind.NONE

    @property
    def why(self) -> str:
        """Why the best energy source, or any source, cannot be used; '' if the best one is used."""
        return self._no_energy_reason or "; ".join(f"{kind}: {reason}" for kind, reason in self.refused)

    def window(self, cap: float = MAX_WINDOW_SECONDS, every_tick: bool = False) -> WorkloadWindow | NoWindow:
        """Opens a window in which a workload runs and its energy is measured. After `cap` seconds the window ends in
        any case.

        With `every_tick`, the sampler reads the energy counter just before and after each of its changes (ticks). So
        a shorter window is precise enough.
        """
        if self.source is None:
            return NoWindow(self.why)
        # The sampler's thread reads the device's state without a timeout: `_stop_sampler` has one for this thread.
        sampler = Sampler(self.source, self._clock, look=self.device.read_in_this_thread, every_tick=every_tick)
        return WorkloadWindow(sampler, self.source, self._clock, cap, self._stop_sampler)

    def measure_idle(self, seconds: float = IDLE_SECONDS) -> Energy | UnavailableReading:
        """Measures the energy while the caller does nothing. The device keeps the contexts that are open on it."""
        with self.window() as window:
            idle_end_time = self._clock.now() + seconds
            self._clock.wait(lambda: window.has_failed or self._clock.now() >= idle_end_time)
        return window.energy

    def measure_idle_energy_once(self, seconds: float = IDLE_SECONDS) -> Energy | UnavailableReading:
        """Measures the idle energy when it is first called. Returns the same result on every later call. If the
        measurement fails, the next call tries again.
        """
        if not isinstance(self._idle, Energy):
            self._idle = self.measure_idle(seconds)
        return self._idle

    def read_power_limits(self) -> tuple[float, ...]:
        """Returns the device's power limits in watts since the first call, oldest first. If the limit has changed,
        the new one is added.
        """
        read = self.device.power_limit()
        if isinstance(read, Reading) and (not self._power_limits or self._power_limits[-1] != read.number):
            self._power_limits = (*self._power_limits, float(read.number))
        return self._power_limits

    def close(self) -> None:
        self.device.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _stop_sampler(self, sampler: Sampler) -> None:
        """Ends a sampler, and raises NoReading if it failed. A source that hangs is not used again, because every
        further window would wait for the timeout.
        """
        try:
            sampler.stop(self._timeout)
        except NoAnswer as failure:
            self.source, self._no_energy_reason = None, failure.reason
            self._hung(failure.reason)
            raise

    def _try_energy_source(self, source: Source) -> Source:
        clock = self._clock
        sampler = Sampler(source, clock, satisfied=_has_tried_source)
        sampler.start()
        deadline = clock.now() + _TRIAL_SECONDS
        clock.wait(lambda: sampler.is_enough or clock.now() >= deadline)
        self._stop_sampler(sampler)
        return _add_counter_rhythm(source, sampler) if source.is_counter else source


def _has_tried_source(sampler: Sampler) -> bool:
    # A counter has only ticks, and a power sensor has only samples.
    return len(sampler.ticks) >= _TRIAL_TICKS or len(sampler.samples) >= _TRIAL_SAMPLES


def _add_counter_rhythm(source: Source, sampler: Sampler) -> Source:
    if len(sampler.ticks) < _MIN_COUNTER_TICKS:
        raise NoReading(f"the counter changed only {len(sampler.ticks)} time(s) in {_TRIAL_SECONDS:g} s")
    counter_rhythm = measure_counter_rhythm(sampler.ticks)
    if (MIN_TICK_INTERVALS + 1) * counter_rhythm.period > MAX_WINDOW_SECONDS:
        raise NoReading(
            f"the counter changes every {counter_rhythm.period:.2g} s: {MIN_TICK_INTERVALS} intervals do not fit in "
            f"{MAX_WINDOW_SECONDS:g} s"
        )
    return replace(source, counter_rhythm=counter_rhythm)


# The environment variable that names an NVML device (UUID or PCI address) to read in place of the cases' device.
NVML_DEVICE_VARIABLE = "FP8BENCH_NVML_DEVICE"
_NO_ENERGY_REASON = "--no-energy was given"


def open_meter(facts: DeviceFacts, environ: Mapping[str, str] = os.environ, energy: bool = True) -> Meter:
    """Opens the meter of the device that cases run on. Each source that is tried takes up to 3 s.

    Without `energy` no source is tried: the meter reads the device's state, and windows have no energy.
    """
    device_name = environ.get(NVML_DEVICE_VARIABLE, "")
    if device_name:
        # A PCI address contains a colon, and a UUID does not.
        meter_device_identity = (
            DeviceIdentity(pci_address=device_name) if ":" in device_name else DeviceIdentity(uuid=device_name)
        )
        return open_nvml_meter(meter_device_identity, energy=energy)
    if facts.kind == "cpu":
        return open_rapl_meter(energy=energy)
    if facts.kind != "cuda" or facts.hip:
        return _make_unavailable_meter(
            f"fp8bench cannot read the energy of {'AMD' if facts.hip else facts.kind} devices"
        )
    return open_nvml_meter(DeviceIdentity(facts.uuid, facts.pci), energy=energy)


def open_nvml_meter(
    identity: DeviceIdentity, clock: Clock = HOST_CLOCK, library: Library = NVML_LIBRARY, energy: bool = True
) -> Meter:
    try:
        device = NvmlDevice(identity, library)
    except NoReading as failure:
        return _make_unavailable_meter(failure.reason, clock)
    # The best source comes first: the meter uses the first one that works.
    sources = (
        Source(SourceKind.COUNTER, lambda: READ_TOTAL_ENERGY(device.ask).number),
        Source(SourceKind.INSTANT, lambda: instant_power(device.ask).number),
    )
    if not energy:
        return Meter((), device, _NO_ENERGY_REASON, clock)
    if (instance_count := device.mig_instance_count) > 1:
        return Meter(
            (),
            device,
            f"{instance_count} MIG instances share the GPU, and only the energy of the whole GPU is known",
            clock,
        )
    return Meter(sources, device, "", clock, library.timeout, library.mark_library_hung)


def _make_unavailable_meter(reason: str, clock: Clock = HOST_CLOCK) -> Meter:
    return Meter((), AbsentDevice(reason), reason, clock)


def open_rapl_meter(root: Path = rapl.RAPL_FOLDER, clock: Clock = HOST_CLOCK, energy: bool = True) -> Meter:
    # The reason for each value of the device's state that cannot be read. On a GPU, NVML reads these values.
    unavailable_value_reason = "a CPU has no NVML"
    host = HostDevice(unavailable_value_reason)
    device = host if host.has_sensor_files else AbsentDevice(unavailable_value_reason)
    if not energy:
        return Meter((), device, _NO_ENERGY_REASON, clock)
    try:
        energy_counter = rapl.EnergyCounter(rapl.list_energy_domains(root), clock.now)
    except NoReading as failure:
        return Meter((), device, failure.reason, clock)
    return Meter((Source(SourceKind.RAPL, energy_counter.read),), device, "", clock)


class Meters(ExitStack):
    """Opens the meter of each device when it is first needed, by `open_meter`."""

    def __init__(self, energy: bool = True, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__()
        self._energy, self._environ = energy, environ
        self._opened: dict[str, Meter] = {}

    def of(self, facts: DeviceFacts) -> Meter:
        if facts.key not in self._opened:
            self._opened[facts.key] = self.enter_context(open_meter(facts, self._environ, self._energy))
        return self._opened[facts.key]
