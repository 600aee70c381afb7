"""The energy, the memory and the largest batch of a case, and the state of its device.

Units are joules, watts, bytes, hertz and degrees Celsius. None means unknown, and `why` has the reason. An unknown
value is never 0. Throttle reasons are NVML's bit mask, whose bits are named in `BITS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.ranks import RankMemory
from fp8bench.model.stopping import Settling
from fp8bench.model.words import MemoryRole


@dataclass(frozen=True)
class EnergyWindow:
    """A time window in which one case ran `steps` times.

    `joules` is the energy of the complete window, idle time included. An energy counter changed `intervals` times in
    the measured part of the window. `uncertainty` is the largest relative error of that part, or None for a power
    sensor, whose error is unknown. `sm_clock` is the median clock, `temperature` the highest temperature, and
    `throttle` has all bits that occurred.
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
    """Windows in which one phase of a case ran alone, `steps` times each. If windows are missing, `why` is the
    reason.
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
    settling: Settling | None = None
    clock: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class EnergyUse:
    """The energy windows of one case, and the idle power of the device with the same states in memory.

    `source` is 'counter', 'rapl', 'instant', 'average' or 'none'. Figures of different sources cannot be compared.
    `phases` holds the windows of single phases, if they were requested. `power_limits` are the limits in watts that
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

    `throttle` has every bit that was set in any sample. `held` has (limit, seconds): for how many of the group's
    `seconds` the limit lowered the clocks, by the driver's counters. `others` counts other processes that use the
    device. If the device is partitioned, `slices` counts its other parts. `sm_clock` is the mean over the sampled
    slots, weighted by duration. `warm_up` describes how the device settled before the rounds; None if it reports
    neither clock nor temperature.
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
    equals `peak` for a case that emulates nothing. If it is None, `off_device` has the reason. `forward` has the
    roles of the memory that is held between the first forward pass and backward, a moment that all precisions have.
    With several ranks, all figures are those of the rank with the most memory, and `ranks` has every rank.
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
    """A note in a trace of memory: an emulation begins. A real device would not make the allocations from here up to
    the next EmulationEnd.
    """


@dataclass(frozen=True)
class EmulationEnd:
    """A note in a trace of memory: an emulation has ended. Instead of the blocks at the `replaced` addresses, a real
    device would hold the memory of notes `Laid`. All other blocks of the emulation that still exist count as memory
    from now on.
    """

    replaced: tuple[int, ...] = ()


@dataclass(frozen=True)
class Laid:
    """A note in a trace of memory: from here on, a real device would hold `size` more bytes, until a note `Lifted`
    with the same key. If an address is given, it would hold the existing block at that address until then, even if
    the block is released earlier.
    """

    key: int
    size: int
    address: int = 0


@dataclass(frozen=True)
class Lifted:
    """A note in a trace of memory: from here on, a real device would no longer hold the bytes that the note `Laid`
    with the same key has added.
    """

    key: int


DeviceNote = Emulating | EmulationEnd | Laid | Lifted


@dataclass(frozen=True)
class HeldBlock:
    """One allocation that existed at the highest point of memory.

    `phase` is the phase in which it was made, '' if it was made before the measured part of the step. The flags are
    true in these cases. `backward`: a backward pass made it. `awaited`: a forward pass made it, and it still existed
    when backward began. `lasting`: it still existed at the end. `brief`: it was freed within the part of a phase that
    made it (in backward, a part is a node of the autograd graph). `said` are the roles that were noted for its
    address.
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
    """The highest point of memory in a part of a step, the blocks that existed at that point, and the highest points
    of its phases.

    `held` is () if single allocations are unknown, and `why` has the reason. The blocks may sum to less than `peak`.
    `on_device` is the highest point on a real device instead of an emulation; None if the emulation left no notes.
    `forward` are the blocks that existed when the first backward pass began; () without such a pass.
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


# Sources that count energy. A power sensor is not one of them, and its error is unknown.
COUNTERS = frozenset({"counter", "rapl"})
# The fewest changes of an energy counter within a window.
LEAST_INTERVALS = 10
# Words in the reason why a window has no energy, if the energy counter changed too rarely. Reasons are recognised by
# them.
TICK_INTERVALS = "tick interval(s) of the energy counter"
# The bits of nvmlClocksEventReason*, which older drivers call nvmlClocksThrottleReason*.
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
# The bits of throttling by which the hardware protects itself. Times that are measured then are not the speed of the
# device.
HARDWARE = 0x8 | 0x40 | 0x80
# The bit of the power cap. Large matrix products often reach the cap on current GPUs.
POWER_CAP = 0x4
# Throttle reasons that are not faults: somebody chose the clocks, or the power cap limits them.
CHOSEN = frozenset({"idle", "application-clocks", "sync-boost", "display-clocks", BITS[POWER_CAP]})


@dataclass(frozen=True)
class Violation:
    """A limit for which NVML counts how many nanoseconds it throttled the clocks: a policy of
    nvmlDeviceGetViolationStatus, or a field.
    """

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
    """Returns the names of the reasons in a throttle mask, except idling. A bit without a name gives a name such as
    'bit 0x800'.
    """
    bits = [1 << number for number in range(mask.bit_length()) if mask & 1 << number]
    return tuple(BITS.get(bit, f"bit {bit:#x}") for bit in bits if bit != 0x1)
