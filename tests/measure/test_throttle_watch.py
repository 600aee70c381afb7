"""What a device says of itself between slots."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fp8bench.measure.group import Watch
from fp8bench.measure.sensors.nvml import AbsentDevice
from fp8bench.model.readings import Read, Reading, Readings, Unavailable


def reading(value: float) -> Reading:
    return Reading(value, "", "test")


class Device(AbsentDevice):
    """Says what it is given, look by look; violations grow by a second each time."""

    def __init__(self, *looks: Mapping[str, float | None], violations: tuple[Read, Read] | None = None) -> None:
        super().__init__("not asked")
        self.looks, self.asked = looks, 0
        self._violations = list(violations or (reading(1.0), reading(1.0)))

    def glance(self) -> Readings:
        look = self.looks[self.asked]
        self.asked += 1
        names = ("throttle", "sm_clock", "memory_clock", "temperature")
        return {name: Unavailable("lost") if (value := look[name]) is None else reading(value) for name in names}

    def violations(self) -> Readings:
        return {"thermal": self._violations.pop(0), "power-cap": reading(0.0)}


def look(throttle: int = 0, clock: float | None = 1.5e9, temperature: float | None = 50) -> dict[str, float | None]:
    return {"throttle": throttle, "sm_clock": clock, "memory_clock": 2.6e9, "temperature": temperature}


class Clock:
    """A clock that a test moves."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_looks_belong_to_the_arm_whose_slot_is_over() -> None:
    """All reasons of its own looks, the median and lowest clock, the highest temperature."""
    clock = Clock()
    device = Device(look(0x4), look(0x40, 1.2e9, 80), look(0x4, 1.4e9, 60), look(0x1, 1.6e9, 40))
    watch = Watch(device, clock)
    for key in ("a", "b", "a", "a"):
        watch.look(key)
        clock.now += 1
    watch.end()
    a, b = watch.seen("a"), watch.seen("b")
    assert (a.looks, a.throttle, a.sm_clock, a.sm_clock_lowest, a.temperature) == (3, 0x5, 1.5e9, 1.4e9, 60)
    assert (b.looks, b.throttle, b.sm_clock, b.memory_clock) == (1, 0x40, 1.2e9, 2.6e9)
    assert a.seconds == b.seconds == 4 and a.held == () and a.why == ""


def test_it_does_not_look_after_every_slot() -> None:
    """Each look takes the driver time in which the device idles."""
    clock = Clock()
    device = Device(*[look()] * 10)
    watch = Watch(device, clock)
    for _ in range(100):
        watch.look("a")
        clock.now += 0.01
    assert device.asked == 4


def test_what_held_the_clocks_back_is_counted_over_the_sitting() -> None:
    """By the driver's own count, which also knows what happened between two looks."""
    watch = Watch(Device(violations=(reading(5.0), reading(5.25))), Clock())
    watch.end()
    assert watch.seen("a").held == (("thermal", 0.25),)


@pytest.mark.parametrize(
    ("after", "why"),
    [(Unavailable("it fell off the bus"), "it fell off the bus"), (reading(4.0), "test went back from 5.0 to 4.0 ")],
)
def test_a_count_that_fails_is_a_reason_and_no_zero(after: Read, why: str) -> None:
    """Nor does one that goes backwards count."""
    watch = Watch(Device(violations=(reading(5.0), after)), Clock())
    watch.end()
    seen = watch.seen("a")
    assert seen.held == () and seen.why == f"thermal: {why}" and seen.looks == 0 and seen.throttle is None


def test_a_look_that_fails_leaves_the_others() -> None:
    """What is known stays known, and what is not has its reason."""
    clock = Clock()
    watch = Watch(Device(look(0x4), look(0x4, None, None)), clock)
    watch.look("a")
    clock.now += 1
    watch.look("a")
    watch.end()
    seen = watch.seen("a")
    assert (seen.throttle, seen.sm_clock, seen.temperature) == (0x4, 1.5e9, 50)
    assert seen.why == "sm_clock, temperature: lost"
