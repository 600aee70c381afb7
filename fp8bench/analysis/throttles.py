"""Whether a device held its clocks back while a case was timed, why, and whether its hardware did."""

from __future__ import annotations

import math

from fp8bench import units
from fp8bench.model import DeviceWatch
from fp8bench.throttling import BITS, POWER_CAP, capped_by_power, reasons_in, slowed_by_hardware

# What a driver counts for a shorter share of the time is no matter.
HELD_SHARE = 0.005
_POWER_CAP = BITS[POWER_CAP]
# Clocks that somebody chose, or that the cap allows, are the device's own.
CHOSEN = frozenset({"idle", "application-clocks", "sync-boost", "display-clocks", _POWER_CAP})
_OF_HARDWARE = frozenset({"hw-thermal", "hw-power-brake"})


def throttle_reasons(watch: DeviceWatch | None) -> tuple[str, ...]:
    """'hw-thermal', 'sw-thermal 12% of the time': by the bits that were seen, and by what the driver counted."""
    if watch is None:
        return ()
    held = _held(watch)
    if held.keys() & {"sw-thermal", "hw-thermal"}:  # 'thermal' is what is in them, without saying which
        held.pop("thermal", None)
    names = dict.fromkeys([*reasons_in(watch.throttle or 0), *held])
    return tuple(f"{name}{_how_long(held.get(name))}" for name in names if name not in CHOSEN)


def throttled_by_hardware(watch: DeviceWatch | None) -> bool:
    """Whether the hardware slowed itself down to survive; heat that no software limit accounts for counts as that."""
    if watch is None:
        return False
    held = _held(watch)
    heat = held.get("thermal", 0.0) - dict(_shares(watch)).get("sw-thermal", 0.0)
    return slowed_by_hardware(watch.throttle or 0) or bool(held.keys() & _OF_HARDWARE) or heat > HELD_SHARE


def power_capped(watch: DeviceWatch | None) -> bool:
    """Whether the clocks were those that the power cap allows."""
    return watch is not None and (capped_by_power(watch.throttle or 0) or _POWER_CAP in _held(watch))


def clock_of(watch: DeviceWatch | None) -> str:
    """'SM clock 1.41 GHz', the middle one; '' where it is not known."""
    hertz = watch.sm_clock if watch is not None else None
    return f"SM clock {units.count(hertz, 'Hz')}" if hertz is not None and 0 < hertz < math.inf else ""


def _shares(watch: DeviceWatch) -> list[tuple[str, float]]:
    """For which share of the time each limit held the clocks back."""
    return [(name, min(1.0, seconds / watch.seconds)) for name, seconds in watch.held] if watch.seconds > 0 else []


def _held(watch: DeviceWatch) -> dict[str, float]:
    """The same of those that did so for long enough to matter."""
    return {name: share for name, share in _shares(watch) if share > HELD_SHARE}


def _how_long(share: float | None) -> str:
    return f" {units.percent(share, 0 if share >= 0.01 else 1)} of the time" if share is not None else ""
