"""Energy, memory and the largest batch of a case, and the state of its device.

Joules, watts, bytes, hertz, degrees. None means unknown; then `why` has the reason. An unknown value is never 0.
Throttle reasons are NVML's mask, whose bits are named here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.ranks import RankMemory
from fp8bench.model.stopping import Settling
from fp8bench.model.words import MemoryRole


@dataclass(frozen=True)
class EnergyWindow:
    """A stretch in which one case ran `steps` times.

    `joules` are those of the whole window, idling included. A counter changed `intervals` times in the measured part of
    it; `uncertainty` is the largest relative error of that part, None with a sensor of power, where it is unknown. The
    clock is the median one, the temperature the highest; `throttle` has all bits that were seen.
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
class PhaseEnergy:
    """Windows in which one phase of a case ran `steps` times by itself; `why` has the reason for missing ones."""

    phase: str
    windows: tuple[EnergyWindow, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class SustainedTurn:
    """Seconds in which one case ran over and over, after the device had settled for it.

    Each chunk has `steps` steps back to back and took one of the `seconds`. `settling` is None where the device shows
    neither clock nor temperature. `clock` is the device's right after the turn, `watts` its mean power during it.
    """

    steps: int
    seconds: tuple[float, ...]
    settling: Settling | None = None
    clock: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class EnergyUse:
    """The windows of one case, and the watts that the device takes while it idles with the same states.

    `source` is 'counter', 'rapl', 'instant', 'average' or 'none': figures of different ones do not compare. `phases`
    are windows of its phases, where they were asked for. `power_limits` are those that the device has had since the run
    began, in watts: several if somebody changed it, () if unknown. `why` has the reason for a missing window or idle
    power.
    """

    source: str
    windows: tuple[EnergyWindow, ...] = ()
    idle_before: float | None = None
    idle_after: float | None = None
    why: str = ""
    phases: tuple[PhaseEnergy, ...] = ()
    power_limits: tuple[float, ...] = ()


@dataclass(frozen=True)
class DeviceWatch:
    """State of a device while a case was timed, from `looks` looks between its slots.

    `throttle` has every bit that was set in any look. `held` has, for each limit, how many of the `seconds` of the
    whole group it held the clocks back, by the driver's count. `others` are other processes with work on the device,
    `slices` the other parts that it is split into. `sm_clock` is the mean over the slots that were looked at, weighted
    by duration. `warm_up` is how the device settled before the rounds, None where it showed neither clock nor
    temperature.
    """

    looks: int
    seconds: float
    throttle: int | None = None
    held: tuple[tuple[str, float], ...] = ()
    sm_clock: float | None = None
    sm_clock_lowest: float | None = None
    temperature: float | None = None
    why: str = ""
    warm_up: Settling | None = None
    others: int | None = None
    slices: int = 0


@dataclass(frozen=True)
class PhaseMemory:
    """The most that was allocated at once within one phase, and the most that the allocator had reserved."""

    phase: str
    allocated: int
    reserved: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a step at its highest point.

    `peak` are bytes of tensors; `roles` sum to it (`fp8bench.model.MemoryRole`). `on_device` is the peak on hardware
    that has the formats, derived from the same allocations, and the peak itself for a case that emulates nothing; None
    where unknown, and then `off_device` has the reason. `process` is what the driver counts for the worker's process on
    the device right after the step, its context included; `resident` the most that the process had in the machine's
    memory during it. `leak` are the bytes by which tensors, on the host too, grow with every step, 0 where they do not;
    None where that was not looked at. With several ranks all this is that of the rank that takes most, and `ranks` has
    all. `forward` are the roles of what is held between the first forward pass and backward: the same moment in every
    precision.
    """

    peak: int
    roles: tuple[tuple[str, int], ...] = ()
    phases: tuple[PhaseMemory, ...] = ()
    reserved: int | None = None
    process: int | None = None
    resident: int | None = None
    why: str = ""
    leak: float | None = None
    ranks: tuple[RankMemory, ...] = ()
    on_device: int | None = None
    off_device: str = ""
    forward: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Emulating:
    """Allocations from here to the next EmulationEnd belong to an emulation, and take nothing on a real device."""


@dataclass(frozen=True)
class EmulationEnd:
    """Ends the emulation. Blocks at these addresses have a replacement on a device; others that remain count from now
    on, those that have gone never did."""

    replaced: tuple[int, ...] = ()


@dataclass(frozen=True)
class Laid:
    """A device holds `size` more bytes until they are `Lifted`; with an address, as long as the block there."""

    key: int
    size: int
    address: int = 0


@dataclass(frozen=True)
class Lifted:
    """The value under that key is no longer held."""

    key: int


DeviceNote = Emulating | EmulationEnd | Laid | Lifted


@dataclass(frozen=True)
class HeldBlock:
    """One allocation that was held at the highest point.

    `phase` is where the step was when it was made, '' before the stretch; `backward`: a backward pass made it;
    `awaited`: a forward pass made it and it was still held when backward began; `brief`: it went within the piece of a
    phase (in backward: the node of autograd's graph) that had made it; `lasting`: it was there at the end. `said` are
    roles noted for its address in the meantime.
    """

    address: int
    size: int
    phase: str = ""
    backward: bool = False
    awaited: bool = False
    brief: bool = False
    lasting: bool = False
    said: tuple[MemoryRole, ...] = ()


@dataclass(frozen=True)
class MemoryCourse:
    """The highest point of a stretch, the blocks that were held there, and the highest points of its phases.

    `held` is () where single allocations are unknown; then `why` has the reason. They may sum to less than `peak`.
    `on_device` is the highest point with an emulation's tensors replaced as noted, None without such notes. `forward`
    is what was held when the first backward pass began, () without one.
    """

    peak: int
    held: tuple[HeldBlock, ...] = ()
    phases: tuple[PhaseMemory, ...] = ()
    reserved: int | None = None
    why: str = ""
    on_device: int | None = None
    forward: tuple[HeldBlock, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """The largest batch for which a state and two steps fit, by running it and the next one, which does not fit.

    `axis` is the parameter that was varied, in steps of `grain`. `batch` is None where the search had no answer, and 0
    where not even the smallest fits; `why` has the reason, or why `beyond`, the next batch, does not fit. `beyond` is
    None where the axis ends before the memory does. `tokens` are those of a step with `batch`, 0 where it has none;
    `peak` the bytes of tensors at the highest point; `limit` the bytes allowed, None for as many as the device gives.
    `attempts` counts what was run. For an emulated case `on_device` is the largest batch on hardware that has its
    formats, by the line through what `batch` and half of it would take there; None where unknown. `seconds` are those
    of single steps with `batch`, of cases that are not emulated, `update` those of its update where phases do not show
    it.
    """

    axis: str
    limit: int | None = None
    batch: int | None = None
    grain: int = 1
    tokens: int = 0
    peak: int | None = None
    beyond: int | None = None
    why: str = ""
    attempts: int = 0
    on_device: int | None = None
    seconds: tuple[float, ...] = ()
    update: float | None = None


# Sources that count energy. Sensors of power do not, and their error is unknown.
COUNTERS = frozenset({"counter", "rapl"})
# How often a counter has to change in a window.
LEAST_INTERVALS = 10
# For the reason of a window in which it did not.
TICK_INTERVALS = "tick interval(s) of the energy counter"
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
# The hardware protects itself: figures from that time are not this device's speed.
HARDWARE = 0x8 | 0x40 | 0x80
# Usual for large products on current GPUs.
POWER_CAP = 0x4
# Reasons other than faults: clocks that somebody chose, or that the power cap allows.
CHOSEN = frozenset({"idle", "application-clocks", "sync-boost", "display-clocks", BITS[POWER_CAP]})


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
    """Names of a mask's reasons, 'bit 0x800' for an unnamed one; idling is left out."""
    bits = [1 << number for number in range(mask.bit_length()) if mask & 1 << number]
    return tuple(BITS.get(bit, f"bit {bit:#x}") for bit in bits if bit != 0x1)
