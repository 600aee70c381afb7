"""Clocks, temperature and throttling of a device while arms take turns.

The driver is asked between slots, never within one, because a call may hold up the device. Before the first round, and
before a long turn, a case runs until clock and temperature stand still: a device that has idled begins at a clock that
it does not keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import Worker
from fp8bench.measure.sensors.driver import Looks
from fp8bench.measure.sensors.energy import SUMMARIES
from fp8bench.measure.sensors.rapl import CLOCK
from fp8bench.model import DeviceWatch
from fp8bench.model.readings import Reading, Readings, grown, reasons_of
from fp8bench.model.stopping import ClockLook, Settling, is_clock_flat, slopes

# How long the arm runs between two looks.
_CHUNK_SECONDS = 0.15


@dataclass(frozen=True)
class Settler:
    """Runs an arm until the device's clock and temperature stand still, or with `brisk` its clock alone."""

    device: Looks
    limit: float
    clock: Callable[[], float] = time.monotonic
    brisk: bool = False

    def settle(self, arm: MeasuredArm, worker: Worker) -> Settling | None:
        """None where the device reports neither clock nor temperature."""
        start = self.clock()
        looks = [self._look(start)]
        if looks[0].clock is None and looks[0].temperature is None:
            return None
        steps = max(1, round(_CHUNK_SECONDS / arm.step_seconds))
        settled = False
        while not settled and looks[-1].at < self.limit:
            worker.within(arm.limits.slot(arm.step_seconds, steps)).loop(arm.key, steps)
            looks.append(self._look(start))
            settled = is_clock_flat(looks) if self.brisk else slopes(looks).flat
        return Settling(tuple(looks), settled, self.limit)

    def _look(self, start: float) -> ClockLook:
        numbers = {name: read.number for name, read in self.device.glance().items() if isinstance(read, Reading)}
        clock = numbers.get("sm_clock", numbers.get(CLOCK))
        return ClockLook(self.clock() - start, clock, numbers.get("temperature"))


# A look takes the driver up to milliseconds, in which the device idles: the share of time that looks may take.
_SHARE = 0.05


class Watch:
    """Looks at the device by arm, in whole rounds, so that drifting clocks are alike for arms that are compared.

    Counters of the driver (for how long a limit held the clocks back) are read before and after the whole session.
    """

    def __init__(
        self,
        device: Looks,
        warm_up: Settling | None = None,
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
        idle_workers: int = 0,
    ) -> None:
        self._idle_workers = idle_workers
        self._device, self._warm_up, self._clock, self._pid = device, warm_up, clock, pid
        self._sharing = self._others()
        self._looks: dict[str, list[Readings]] = {}
        self._round, self._looking, self._due = -1, False, 0.0
        self._before = device.violations()
        self._begun = clock()

    def look(self, arm: MeasuredArm) -> None:
        slot, now = arm.slots[-1], self._clock()
        # All arms of a round are looked at or none, so that they stay comparable.
        if slot.round != self._round:
            self._round, self._looking = slot.round, now >= self._due
        if not self._looking:
            return
        look = self._device.glance()
        self._looks.setdefault(arm.key, []).append(look)
        clock = look["sm_clock"]
        arm.slots[-1] = replace(slot, clock=clock.number if isinstance(clock, Reading) else None)
        # Looking may take a fixed share of the time, however slow the driver is.
        self._due = max(self._due, now) + (self._clock() - now) / _SHARE

    def end(self) -> None:
        self._counted = grown(self._before, self._device.violations())
        self._seconds = self._clock() - self._begun
        now = self._others()
        self._sharing = now if self._sharing is None else max(self._sharing, now or 0)

    def _others(self) -> int | None:
        """Returns how many processes have work on the device, without the run's own workers."""
        read = self._device.others(self._pid) if self._pid is not None else None
        return max(0, int(read.number) - self._idle_workers) if isinstance(read, Reading) else None

    def summarise(self, arm: MeasuredArm) -> DeviceWatch:
        looks = self._looks.get(arm.key, [])
        seconds_held = {name: read.number for name, read in self._counted.items() if isinstance(read, Reading)}
        summary: dict[str, Any] = {}
        for name, (of, summarise) in SUMMARIES.items():
            numbers = [read.number for look in looks if isinstance(read := look[of], Reading)]
            summary[name] = summarise(numbers) if numbers else None
        summary["sm_clock"] = arm.timing().clock
        return DeviceWatch(
            looks=len(looks),
            seconds=self._seconds,
            held=tuple((name, seconds) for name, seconds in seconds_held.items() if seconds > 0),
            why="; ".join(reasons_of(*looks, self._counted)),
            warm_up=self._warm_up,
            others=self._sharing,
            slices=max(0, self._device.shared_by - 1),
            **summary,
        )
