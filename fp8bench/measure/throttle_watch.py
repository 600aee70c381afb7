"""What a device says of itself while cases are timed: throttling, clocks, temperature, between the slots.

Never within one: a call to the driver may hold up what the device is given to do. The looks of a case are those right
after its own slots, when clocks and reasons are still those of its work. What the driver counts (for how long a limit
held the clocks back) is read before and after the whole session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from statistics import median

from fp8bench.measure.sensors.meter import Looks
from fp8bench.model import DeviceWatch
from fp8bench.model.readings import Reading, Readings, Unavailable, grown

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
        throttle = _known(looks, "throttle")
        clocks, temperatures = _known(looks, "sm_clock"), _known(looks, "temperature")
        memory = _known(looks, "memory_clock")
        return DeviceWatch(
            looks=len(looks),
            seconds=self._seconds,
            throttle=reduce(or_, map(int, throttle)) if throttle else None,
            held=tuple((name, seconds) for name, seconds in held.items() if seconds > 0),
            sm_clock=median(clocks) if clocks else None,
            sm_clock_lowest=min(clocks, default=None),
            memory_clock=median(memory) if memory else None,
            temperature=max(temperatures, default=None),
            why=_missing([*looks, self._counted]),
        )


def _known(looks: Sequence[Readings], name: str) -> list[float]:
    """What the looks say of one value, as far as they do."""
    return [read.number for look in looks if isinstance(read := look[name], Reading)]


def _missing(readings: Sequence[Readings]) -> str:
    """What could not be read, by reason; '' if everything could."""
    names: dict[str, list[str]] = {}
    for one in readings:
        for name, read in one.items():
            if isinstance(read, Unavailable):
                names.setdefault(read.reason, []).append(name)
    return "; ".join(f"{', '.join(dict.fromkeys(found))}: {reason}" for reason, found in names.items())
