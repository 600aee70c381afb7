"""The energy, the memory and the largest batch of a case, and the state of its device.

Units are joules, watts, bytes, hertz and degrees Celsius. None means unknown, and `why` has the reason. An unknown
value is never 0. `throttle` fields have NVML's bit mask of throttle reasons, whose bits `THROTTLE_REASONS` names.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.ranks import RankMemory
from fp8bench.model.stopping import DeviceSettling
from fp8bench.model.words import MemoryRole


@dataclass(frozen=True)
class EnergyWindow:
    """A time window in which one case ran `steps` times.

    `joules` is the energy of the complete window, idle time included. An energy counter changed `intervals` times in
    the measured part of the window. `uncertainty` is the largest relative error of that part, or None for a power
    sensor, whose error is unknown. `sm_clock` is the median clock, `temperature` the highest temperature, and
    `throttle` has all bits that were set during the window.
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
    """Energy windows in which one phase of a case ran alone, `steps` times in each window. If windows are missing,
    `why` is the reason.
    """

    phase: str
    windows: tuple[EnergyWindow, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class SustainedTurn:
    """Several seconds in which one case ran without a break, after the device had settled.

    The turn consists of chunks. Each chunk ran `steps` steps back to back, and `seconds` has the time of each chunk.
    `settling` is None if the device reports neither clock nor temperature. `clock` is the device's clock right after
    the turn, and `watts` its mean power during the turn.
    """

    steps: int
    seconds: tuple[float, ...]
    settling: DeviceSettling | None = None
    clock: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class EnergyUse:
    """The energy windows of one case, and the power of the idle device while the case's tensors were in memory.

    `source` is 'counter', 'rapl', 'instant', 'average' or 'none'. Figures of different sources cannot be compared.
    `phases` holds the windows of single phases, if these were requested. `power_limits` are the limits in watts that
    the device has had since the run began: several if somebody changed the limit, () if unknown. If a window or the
    idle power is missing, `why` is the reason.
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
    """The state of a device while a case was timed, from `looks` samples between the slots of the case.

    `throttle` has every bit that was set in any sample. `held` has pairs (limit, seconds): for how many of the group's
    `seconds` the limit lowered the clocks, according to the driver's counters. `others` counts other processes that use
    the device. If the device is partitioned, `slices` counts its other partitions. `sm_clock` is the mean over the
    sampled slots, weighted by duration. `warm_up` describes how the device settled before the rounds; None if the
    device reports neither clock nor temperature.
    """

    looks: int
    seconds: float
    throttle: int | None = None
    held: tuple[tuple[str, float], ...] = ()
    sm_clock: float | None = None
    sm_clock_lowest: float | None = None
    temperature: float | None = None
    why: str = ""
    warm_up: DeviceSettling | None = None
    others: int | None = None
    slices: int = 0


@dataclass(frozen=True)
class PhaseMemory:
    """The most bytes that tensors used at once within one phase, and the most bytes that the allocator had reserved."""

    phase: str
    allocated: int
    reserved: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a step at its highest point, in bytes.

    `peak` is the memory of tensors, and `roles` divides it by purpose (`fp8bench.model.MemoryRole`). `reserved` is
    what the allocator has reserved. `process` is what the driver counts for the worker's process right after the
    step, its context included. `resident` is the most of the machine's memory that the process used during the step.
    `leak` is how much the memory of tensors (also on the host) grows with every step; None if not measured.

    `on_device` is the peak on hardware that has the low-precision formats, derived from the same allocations. It
    equals `peak` for a case that emulates nothing. If it is None, `off_device` has the reason. `forward` divides by
    purpose the memory that is held between the first forward pass and the backward pass, a moment that occurs in
    every precision. With several ranks, all figures are those of the rank with the most memory, and `ranks` has every
    rank.
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
class EmulationStart:
    """Entry in a memory trace: an emulation begins. Until the next EmulationEnd, allocations do not count as memory of
    hardware with the emulated formats.
    """


@dataclass(frozen=True)
class EmulationEnd:
    """Entry in a memory trace: an emulation ends. From here on, blocks of the emulation that still exist also count as
    memory of hardware with the emulated formats, except for the blocks at the `replaced` addresses. Such hardware
    stores their values in its own formats, with the sizes of the `Laid` entries.
    """

    replaced: tuple[int, ...] = ()


@dataclass(frozen=True)
class Laid:
    """Entry in a memory trace: hardware with the emulated formats would hold `size` more bytes, until the `Lifted`
    entry with the same key. With an `address`, no bytes are added: until then the hardware would keep the existing
    block at this address, even if the trace frees the block earlier.
    """

    key: int
    size: int
    address: int = 0


@dataclass(frozen=True)
class Lifted:
    """Entry in a memory trace: hardware with the emulated formats no longer needs the memory of the `Laid` entry with
    the same key.
    """

    key: int


DeviceNote = EmulationStart | EmulationEnd | Laid | Lifted


@dataclass(frozen=True)
class HeldBlock:
    """One allocation that existed at the highest point of memory.

    `phase` is the phase in which it was made, '' if it was made before the measured part of the step. `backward`: a
    backward pass made it. `awaited`: a forward pass made it, and it still existed when backward began. `lasting`: it
    still existed at the end. `brief`: it was freed within the part of a phase that made it (in backward, a part is a
    node of the autograd graph). `said` are the memory roles that were declared for its address.
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
    """The highest point of memory in a part of a step, the blocks that existed at that point (`held`), and the highest
    point in each phase.

    If single allocations cannot be observed, `held` is () and `why` is the reason. The blocks may sum to less than
    `peak`. `on_device` is the highest point on a device that has the emulated formats; None if the trace has no entries
    about the emulation. `forward` are the blocks that existed when the first backward pass began; () if the part has no
    such pass.
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
    """The largest batch for which a state and two steps fit into memory. It was found by running this batch and the
    next larger one.

    `axis` is the parameter that was varied, in steps of `grain`. `batch` is None if the search found no answer, and 0
    if not even the smallest batch fits. `beyond` is the next batch, which does not fit; None if the axis ends before.
    `why` is the reason for a missing answer, or why `beyond` does not fit. `attempts` counts the batches that were
    run. `limit` is the allowed bytes (None: all of the device).

    In a step with `batch`, `tokens` is the number of tokens, `peak` the bytes of tensors, and `seconds` are the times
    of single steps. `update` is the time of the optimizer's update, if phases do not show it. For an emulated case,
    `on_device` is the largest batch on hardware that has the formats, estimated from the memory of `batch` and of
    half of it.
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


# The sources that count energy. The other sources are power sensors, whose errors are unknown.
ENERGY_COUNTERS = frozenset({"counter", "rapl"})
# An energy counter must change at least this many times within a window.
MIN_COUNTER_CHANGES = 10
# The reason why a window has no energy contains these words if the energy counter changed too rarely. Other code
# recognises the reason by them.
TICK_INTERVALS = "tick interval(s) of the energy counter"
# The bits of nvmlClocksEventReason*, which older drivers call nvmlClocksThrottleReason*.
THROTTLE_REASONS: dict[int, str] = {
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
# The throttle bits that are set while the hardware protects itself. Times that are measured then do not show the speed
# of the device.
HARDWARE_THROTTLE_BITS = 0x8 | 0x40 | 0x80
# The bit of the power cap. Large matrix products often reach the cap on current GPUs.
POWER_CAP_BIT = 0x4
# The throttle reasons that are not faults: somebody chose the clocks, or the power cap limits them.
HARMLESS_THROTTLE_REASONS = frozenset(
    {"idle", "application-clocks", "sync-boost", "display-clocks", THROTTLE_REASONS[POWER_CAP_BIT]}
)


@dataclass(frozen=True)
class ThrottlingLimit:
    """A limit that throttles the clocks, such as the power cap, and how to read for how long it did: with
    nvmlDeviceGetViolationStatus if `policy` is set, otherwise as the NVML field with the number `field`.
    """

    name: str
    policy: int | None = None
    field: int | None = None


VIOLATIONS: tuple[ThrottlingLimit, ...] = (
    ThrottlingLimit("power-cap", policy=0),
    ThrottlingLimit("thermal", policy=1),
    ThrottlingLimit("sw-thermal", field=269),
    ThrottlingLimit("hw-thermal", field=270),
    ThrottlingLimit("hw-power-brake", field=271),
)


def list_throttle_reasons(mask: int) -> tuple[str, ...]:
    """Returns the names of the reasons in a throttle mask, without 'idle'. A bit that has no name is listed as
    'bit 0x800'.
    """
    bits = [1 << number for number in range(mask.bit_length()) if mask & 1 << number]
    return tuple(THROTTLE_REASONS.get(bit, f"bit {bit:#x}") for bit in bits if bit != 0x1)
