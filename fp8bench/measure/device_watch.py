"""Reads the clocks, the temperature and the throttling of a device during the rounds of a session.

The driver is asked only between slots, because a call may stall the device. Before the first round, and before a long
window, a case runs until clock and temperature are constant. An idle device would start at a clock that it cannot
sustain.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import Worker
from fp8bench.measure.sensors.energy import SUMMARIES
from fp8bench.measure.sensors.nvml import DeviceReader
from fp8bench.measure.sensors.rapl import CPU_CLOCK
from fp8bench.model import DeviceWatch
from fp8bench.model.readings import Reading, Readings, describe_missing_readings, subtract_counters
from fp8bench.model.stopping import ClockSample, DeviceSettling, fit_device_slopes, is_clock_flat

# The arm runs for this many seconds between two readings of the device.
_SECONDS_BETWEEN_READINGS = 0.15


@dataclass(frozen=True)
class Settler:
    """Runs an arm until the device's clock and temperature are constant, or only the clock if `settles_clock_only` (in
    runs of about 10 s).
    """

    device: DeviceReader
    limit: float
    clock: Callable[[], float] = time.monotonic
    settles_clock_only: bool = False

    def warm_up_device(self, arm: MeasuredArm, worker: Worker) -> DeviceSettling | None:
        """Runs an arm until the device has settled or the time limit is reached. Returns the readings, or None if the
        device reports neither clock nor temperature.
        """
        start = self.clock()
        clock_samples = [self._read_clock_and_temperature(start)]
        if clock_samples[0].clock is None and clock_samples[0].temperature is None:
            return None
        steps_per_run = max(1, round(_SECONDS_BETWEEN_READINGS / arm.step_seconds))
        has_device_settled = False
        while not has_device_settled and clock_samples[-1].at < self.limit:
            worker.with_time_limit(arm.limits.for_slot(arm.step_seconds, steps_per_run)).loop(arm.key, steps_per_run)
            clock_samples.append(self._read_clock_and_temperature(start))
            has_device_settled = (
                is_clock_flat(clock_samples) if self.settles_clock_only else fit_device_slopes(clock_samples).is_flat
            )
        return DeviceSettling(tuple(clock_samples), has_device_settled, self.limit)

    def _read_clock_and_temperature(self, start: float) -> ClockSample:
        values = {
            name: read.number for name, read in self.device.read_changing_state().items() if isinstance(read, Reading)
        }
        clock_hertz = values.get("sm_clock", values.get(CPU_CLOCK))
        return ClockSample(self.clock() - start, clock_hertz, values.get("temperature"))


# The part of the time that may be spent on reading the driver. A reading takes up to milliseconds, in which the
# device idles.
_DRIVER_READING_TIME_SHARE = 0.05


class SessionWatch:
    """Reads the device's state after slots (timed turns of an arm), and stores the readings by arm. In each round, the
    state is read either after every slot or after none, so that a drift of the clocks affects all compared arms alike.
    The driver's counters of throttled time are read before and after the session.
    """

    def __init__(
        self,
        device: DeviceReader,
        warm_up: DeviceSettling | None = None,
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
        idle_workers: int = 0,
    ) -> None:
        self._idle_workers = idle_workers
        self._device, self._warm_up, self._clock, self._pid = device, warm_up, clock, pid
        self._other_processes = self._count_other_processes()
        self._readings: dict[str, list[Readings]] = {}
        self._round, self._reads_this_round, self._next_reading_at = -1, False, 0.0
        self._throttled_seconds_at_start = device.read_throttled_seconds()
        self._started_at = clock()

    def read_state_after_slot(self, arm: MeasuredArm) -> None:
        slot, seconds = arm.slots[-1], self._clock()
        # Read the device's state after all slots of a round or after none, so that the arms stay comparable.
        if slot.round != self._round:
            self._round, self._reads_this_round = slot.round, seconds >= self._next_reading_at
        if not self._reads_this_round:
            return
        state = self._device.read_changing_state()
        self._readings.setdefault(arm.key, []).append(state)
        clock_reading = state["sm_clock"]
        arm.slots[-1] = replace(slot, clock=clock_reading.number if isinstance(clock_reading, Reading) else None)
        # The slower the driver is, the later the next reading is due. So reading takes a fixed part of the time.
        self._next_reading_at = (
            max(self._next_reading_at, seconds) + (self._clock() - seconds) / _DRIVER_READING_TIME_SHARE
        )

    def finish(self) -> None:
        self._throttled = subtract_counters(self._throttled_seconds_at_start, self._device.read_throttled_seconds())
        self._seconds = self._clock() - self._started_at
        other_processes = self._count_other_processes()
        # A process may have begun or ended during the session, so keep the larger number.
        self._other_processes = (
            other_processes if self._other_processes is None else max(self._other_processes, other_processes or 0)
        )

    def _count_other_processes(self) -> int | None:
        """Returns how many processes have work on the device, not counting the run's own workers; None if unknown."""
        process_count = self._device.count_other_processes(self._pid) if self._pid is not None else None
        return max(0, int(process_count.number) - self._idle_workers) if isinstance(process_count, Reading) else None

    def summarise_arm(self, arm: MeasuredArm) -> DeviceWatch:
        arm_readings = self._readings.get(arm.key, [])
        throttled_seconds = {name: read.number for name, read in self._throttled.items() if isinstance(read, Reading)}
        summary: dict[str, Any] = {}
        for name, (value_name, summarise) in SUMMARIES.items():
            numbers = [read.number for look in arm_readings if isinstance(read := look[value_name], Reading)]
            summary[name] = summarise(numbers) if numbers else None
        summary["sm_clock"] = arm.timing().clock
        return DeviceWatch(
            looks=len(arm_readings),
            seconds=self._seconds,
            held=tuple((name, seconds) for name, seconds in throttled_seconds.items() if seconds > 0),
            why="; ".join(describe_missing_readings(*arm_readings, self._throttled)),
            warm_up=self._warm_up,
            others=self._other_processes,
            slices=max(0, self._device.mig_instance_count - 1),
            **summary,
        )
