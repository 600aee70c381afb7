"""Throttling as a device reports it, by bits and by counters, against what the label must say."""

from __future__ import annotations

import math

from fp8bench.analysis.labels import Labelled, limits_of
from fp8bench.model import DeviceWatch, Label
from tests.counts import for_each

CHOSEN = 0x1 | 0x2 | 0x4 | 0x10 | 0x100


def watch(throttle: int | None = 0, seconds: float = 10.0, **held: float) -> DeviceWatch:
    """Looks that saw these bits, and seconds for which limits held ('hw_thermal' is hw-thermal)."""
    named = tuple((name.replace("_", "-"), value) for name, value in held.items())
    return DeviceWatch(5, seconds, throttle, named)


@for_each(
    ("one", "reasons", "hard"),
    [
        (None, (), False),
        (watch(None), (), False),
        (watch(0), (), False),
        (watch(CHOSEN), (), False),
        (watch(CHOSEN | 0x8), ("hw-slowdown",), True),
        (watch(0x20), ("sw-thermal",), False),
        (watch(0x40), ("hw-thermal",), True),
        (watch(0x80), ("hw-power-brake",), True),
        (watch(0x20 | 0x40), ("sw-thermal", "hw-thermal"), True),
        (watch(0x200), ("board-limit",), False),
        (watch(0x400 | 0x2), ("reliability",), False),
        (watch(0x800), ("bit 0x800",), False),
        (watch(hw_thermal=0.05), (), False),
        (watch(hw_thermal=0.06), ("hw-thermal 0.6% of the time",), True),
        (watch(hw_power_brake=1.24), ("hw-power-brake 12% of the time",), True),
        (watch(sw_thermal=5.0), ("sw-thermal 50% of the time",), False),
        (watch(thermal=5.0), ("thermal 50% of the time",), True),
        (watch(thermal=5.0, sw_thermal=5.0), ("sw-thermal 50% of the time",), False),
        (watch(thermal=5.0, sw_thermal=4.96), ("sw-thermal 50% of the time",), False),
        (watch(thermal=5.0, sw_thermal=4.9), ("sw-thermal 49% of the time",), True),
        (watch(thermal=5.0, hw_thermal=5.0), ("hw-thermal 50% of the time",), True),
        (watch(power_cap=9.0), (), False),
        (watch(0x40, hw_thermal=1.0), ("hw-thermal 10% of the time",), True),
        (watch(0x20, hw_thermal=1.0), ("sw-thermal", "hw-thermal 10% of the time"), True),
        (watch(None, sw_thermal=11.0), ("sw-thermal 100% of the time",), False),
        (watch(seconds=0.0, hw_thermal=1.0), (), False),
    ],
)
def test_throttled(one: DeviceWatch | None, reasons: tuple[str, ...], hard: bool) -> None:
    """By bits: clocks that were chosen, and the power cap, are none; 0x8, 0x40 and 0x80 are the hardware's own.

    By counters: more than 0.5% of the time, 0.05 s here. 'thermal' has both kinds of heat in it: what software does
    not explain is the hardware's.
    """
    expected = [Labelled(Label.THROTTLED, ", ".join(reasons), hard)] if reasons else []
    assert [found for found in limits_of(one) if found.label is Label.THROTTLED] == expected


@for_each(
    ("one", "on"),
    [
        (None, False), (watch(None), False), (watch(0x8), False), (watch(0x4), True), (watch(0x44), True),
        (watch(power_cap=0.05), False), (watch(power_cap=0.051), True),
    ],
)  # fmt: skip
def test_power_cap(one: DeviceWatch | None, on: bool) -> None:
    """Its bit, or its counter."""
    assert (Label.POWER_CAPPED in [found.label for found in limits_of(one)]) == on


def test_the_clock_in_words() -> None:
    for hertz, words in (
        (1.41e9, "SM clock 1.41 GHz"),
        *((unknown, "") for unknown in (None, 0.0, math.nan, math.inf)),
    ):
        assert list(limits_of(DeviceWatch(1, 1.0, 0x4, sm_clock=hertz))) == [Labelled(Label.POWER_CAPPED, words)]
