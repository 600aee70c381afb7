"""What a device says of itself while arms take turns: clocks, heat, and what held the clocks back.

Between the slots, never within one: a call to the driver may hold up what the device is given to do. What is read right
after a slot is still that of its work.

Before the first round, and before a long turn, a case runs until the device's clock and temperature stand still: the
first rounds of a device that has idled are at a clock that it does not keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import Worker
from fp8bench.measure.sensors.energy import SUMMARIES
from fp8bench.measure.sensors.looks import Looks
from fp8bench.measure.sensors.rapl import CLOCK
from fp8bench.model import DeviceWatch
from fp8bench.model.readings import Reading, Readings, grown, reasons_of
from fp8bench.model.stopping import ClockLook, Settling, slopes

# Between two looks. A look takes the driver up to milliseconds, in which the device idles.
_CHUNK_SECONDS = 0.15


@dataclass(frozen=True)
class Settler:
    """Asks a worker to run, and a device how it is."""

    device: Looks
    limit: float
    clock: Callable[[], float] = time.monotonic

    def settle(self, arm: MeasuredArm, worker: Worker) -> Settling | None:
        """None where the device tells neither its clock nor its temperature: nobody could say when it is enough."""
        start = self.clock()
        looks = [self._look(start)]
        if looks[0].clock is None and looks[0].temperature is None:
            return None
        steps = max(1, round(_CHUNK_SECONDS / arm.step_seconds))
        settled = False
        while not settled and looks[-1].at < self.limit:
            worker.within(arm.limits.slot(arm.step_seconds, steps)).loop(arm.key, steps)
            looks.append(self._look(start))
            settled = slopes(looks).flat
        return Settling(tuple(looks), settled, self.limit)

    def _look(self, start: float) -> ClockLook:
        seen = {name: read.number for name, read in self.device.glance().items() if isinstance(read, Reading)}
        clock = seen.get("sm_clock", seen.get(CLOCK))
        return ClockLook(self.clock() - start, clock, seen.get("temperature"))


# A look takes the driver up to milliseconds, in which the device idles: of the time, looks take so much at most.
_SHARE = 0.05


class Watch:
    """Looks by arm, in whole rounds: clocks that drift are then alike for all arms that are held against each other.

    What the driver counts (for how long a limit held the clocks back) is read before and after the whole session.
    """

    def __init__(
        self,
        device: Looks,
        warm_up: Settling | None = None,
        clock: Callable[[], float] = time.monotonic,
        pid: int | None = None,
    ) -> None:
        self._device, self._warm_up, self._clock, self._pid = device, warm_up, clock, pid
        self._sharing = self._others()
        self._looks: dict[str, list[Readings]] = {}
        self._round, self._looking, self._due = -1, False, 0.0
        self._before = device.violations()
        self._begun = clock()

    def look(self, arm: MeasuredArm) -> None:
        slot, now = arm.slots[-1], self._clock()
        if slot.round != self._round:
            self._round, self._looking = slot.round, now >= self._due
        if not self._looking:
            return
        seen = self._device.glance()
        self._looks.setdefault(arm.key, []).append(seen)
        clock = seen["sm_clock"]
        arm.slots[-1] = replace(slot, clock=clock.number if isinstance(clock, Reading) else None)
        self._due = max(self._due, now) + (self._clock() - now) / _SHARE

    def end(self) -> None:
        self._counted = grown(self._before, self._device.violations())
        self._seconds = self._clock() - self._begun
        self._sharing = max(self._sharing, self._others(), key=lambda sharing: sharing.get("others", 0))

    def _others(self) -> dict[str, int]:
        """How many processes beside the worker have work there, and their bytes, as far as the driver says."""
        if self._pid is None:
            return {}
        read = self._device.others(self._pid)
        return {name: int(reading.number) for name, reading in read.items() if isinstance(reading, Reading)}

    def seen(self, arm: MeasuredArm) -> DeviceWatch:
        looks = self._looks.get(arm.key, [])
        held = {name: read.number for name, read in self._counted.items() if isinstance(read, Reading)}
        known = {
            name: [read.number for look in looks if isinstance(read := look[of], Reading)]
            for name, (of, _) in SUMMARIES.items()
        }
        summary: dict[str, Any] = {
            name: how(known[name]) if known[name] else None for name, (_, how) in SUMMARIES.items()
        }
        summary["sm_clock"] = arm.timing().clock
        return DeviceWatch(
            looks=len(looks),
            seconds=self._seconds,
            held=tuple((name, seconds) for name, seconds in held.items() if seconds > 0),
            why="; ".join(reasons_of(*looks, self._counted)),
            warm_up=self._warm_up,
            others=self._sharing.get("others"),
            others_memory=self._sharing.get("others_memory"),
            slices=max(0, self._device.shared_by - 1),
            **summary,
        )
