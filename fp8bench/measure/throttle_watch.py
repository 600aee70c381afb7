"""What a device says of itself while cases are timed: throttling, clocks, temperature, between the slots.

Never within one: a call to the driver may hold up what the device is given to do. The looks of a case are those right
after its own slots, when clocks and reasons are still those of its work. What the driver counts (for how long a limit
held the clocks back) is read before and after the whole session.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fp8bench.measure.sensors.energy import SUMMARIES
from fp8bench.measure.sensors.nvml import Looks
from fp8bench.model import DeviceWatch
from fp8bench.model.readings import Reading, Readings, grown, reasons_of

# A look takes the driver up to milliseconds, in which the device idles.
_EVERY = 0.25


class Watch:
    """The looks of one session, by the key of the arm that ran last."""

    def __init__(self, device: Looks, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._clock = device, clock
        self._looks: dict[str, list[Readings]] = {}
        self._due = dict[str, float]()
        self._before = device.violations()
        self._begun = clock()

    def look(self, key: str) -> None:
        """Right after a slot of that arm; now and then it is worth a look."""
        now = self._clock()
        if now >= self._due.get(key, 0.0):
            self._looks.setdefault(key, []).append(self._device.glance())
            self._due[key] = self._clock() + _EVERY

    def end(self) -> None:
        """The session is over: what was counted meanwhile is read."""
        self._counted = grown(self._before, self._device.violations())
        self._seconds = self._clock() - self._begun

    def seen(self, key: str) -> DeviceWatch:
        """What there was to be seen of one arm; after `end`."""
        looks = self._looks.get(key, [])
        held = {name: read.number for name, read in self._counted.items() if isinstance(read, Reading)}
        known = {
            name: [read.number for look in looks if isinstance(read := look[of], Reading)]
            for name, (of, _) in SUMMARIES.items()
        }
        return DeviceWatch(
            looks=len(looks),
            seconds=self._seconds,
            held=tuple((name, seconds) for name, seconds in held.items() if seconds > 0),
            why="; ".join(reasons_of(*looks, self._counted)),
            **{name: how(known[name]) if known[name] else None for name, (_, how) in SUMMARIES.items()},
        )
