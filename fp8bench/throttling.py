"""Why a GPU's clocks are lower than they could be: the bits of NVML's mask, and how long each limit has held."""

from __future__ import annotations

from dataclasses import dataclass

# nvmlClocksEventReason*, called nvmlClocksThrottleReason* by older drivers; the bits are the same.
BITS: dict[int, str] = {
    0x1: "idle",
    0x2: "application-clocks",
    0x4: "power-cap",
    0x8: "hw-slowdown",
    0x10: "sync-boost",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "hw-power-brake",
    0x100: "display-clocks",
    0x200: "board-limit",
    0x400: "reliability",
}
# The hardware slows itself down to survive: what was measured meanwhile is not this device's speed.
HARDWARE = 0x8 | 0x40 | 0x80
THERMAL = 0x20 | 0x40
# Usual for large products on current GPUs.
POWER_CAP = 0x4


@dataclass(frozen=True)
class Violation:
    """A limit whose time NVML counts, in nanoseconds: by a policy of nvmlDeviceGetViolationStatus or by a field."""

    name: str
    policy: int | None = None
    field: int | None = None


VIOLATIONS: tuple[Violation, ...] = (
    Violation("power-cap", policy=0),
    Violation("thermal", policy=1),
    Violation("sw-thermal", field=269),
    Violation("hw-thermal", field=270),
    Violation("hw-power-brake", field=271),
)


def reasons_in(mask: int) -> tuple[str, ...]:
    """The reasons of a mask by name, 'bit 0x800' for one that has none yet; idling is none."""
    bits = [1 << number for number in range(mask.bit_length()) if mask & 1 << number]
    return tuple(BITS.get(bit, f"bit {bit:#x}") for bit in bits if bit != 0x1)


def slowed_by_hardware(mask: int) -> bool:
    """Whether the hardware slowed itself down (heat, a power brake): a case measured so has no verdict."""
    return bool(mask & HARDWARE)


def capped_by_power(mask: int) -> bool:
    """Whether the clocks are those that the power cap allows."""
    return bool(mask & POWER_CAP)
