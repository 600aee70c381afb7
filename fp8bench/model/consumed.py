"""What a case took beside time: energy, memory, and the state its device was in. Joules, watts, bytes, hertz, degrees.

None means that nobody could say; then `why` says why. Nothing is 0 because it is not known.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EnergyWindow:
    """A stretch in which one case ran over and over, `steps` times.

    `joules` are those of the whole window, idling included. A counter changed `intervals` times in the part of it that
    was measured; `uncertainty` is the share by which that part can be off, None where a sensor of power was read:
    nobody knows. The clock is the median one, the temperature the highest; `throttle` has all bits that were seen.
    """

    steps: int
    seconds: float
    joules: float
    intervals: int
    uncertainty: float | None = None
    sm_clock: float | None = None
    temperature: float | None = None
    throttle: int | None = None


@dataclass(frozen=True)
class EnergyUse:
    """The windows of one case, and what the device takes while it idles beside the same states, in watts.

    `source` is 'counter', 'rapl', 'instant', 'average' or 'none': figures of different ones do not compare. `why` says
    why a window or an idle power is missing, '' if none is.
    """

    source: str
    windows: tuple[EnergyWindow, ...] = ()
    idle_before: float | None = None
    idle_after: float | None = None
    why: str = ""


@dataclass(frozen=True)
class DeviceWatch:
    """What a device said of itself while a case was timed, looked at between its slots, `looks` times.

    `throttle` has every bit that was set in any look (`fp8bench.throttling` names them). `held` says for how many of
    the `seconds` in which the whole group was timed each limit held the clocks back, as the driver counts it.
    """

    looks: int
    seconds: float
    throttle: int | None = None
    held: tuple[tuple[str, float], ...] = ()
    sm_clock: float | None = None
    sm_clock_lowest: float | None = None
    memory_clock: float | None = None
    temperature: float | None = None
    why: str = ""


@dataclass(frozen=True)
class PhaseMemory:
    """The most that was allocated at once within one phase, and the most that the allocator had reserved for it."""

    phase: str
    allocated: int
    reserved: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """What a step's memory is made of at its highest point.

    `peak` are bytes of tensors; `roles` say what they are, and sum to it (`fp8bench.model.MemoryRole`). `process` is
    what the driver counts for the worker's process on the device, its context included, right after the step;
    `resident` the most that the process had in the machine's memory during it.
    """

    peak: int
    roles: tuple[tuple[str, int], ...] = ()
    phases: tuple[PhaseMemory, ...] = ()
    reserved: int | None = None
    process: int | None = None
    resident: int | None = None
    why: str = ""
