"""What a case took beside time: energy, memory, the largest batch, and the state its device was in.

Joules, watts, bytes, hertz, degrees. None means that nobody could say; then `why` says why. Nothing is 0 because it is
not known. Why a GPU's clocks are lower than they could be is NVML's mask, whose bits have their names here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.ranks import RankMemory
from fp8bench.model.stopping import Settling
from fp8bench.model.words import MemoryRole


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
class PhaseEnergy:
    """Windows in which one phase of a case was done over and over by itself: their `steps` are times that it was done.

    `why` says why there are none, or fewer.
    """

    phase: str
    windows: tuple[EnergyWindow, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class SustainedTurn:
    """Seconds in which one case ran over and over, after it had run until the device settled for it.

    Each chunk has so many `steps` back to back, and took so many of the `seconds`. `settling` is None where the device
    tells neither clock nor temperature: nobody knows then whether it had settled. `clock` is the device's right after
    the turn; `watts` its mean power in it. None where nobody could say.
    """

    steps: int
    seconds: tuple[float, ...]
    settling: Settling | None = None
    clock: float | None = None
    watts: float | None = None


@dataclass(frozen=True)
class EnergyUse:
    """The windows of one case, and what the device takes while it idles beside the same states, in watts.

    `source` is 'counter', 'rapl', 'instant', 'average' or 'none': figures of different ones do not compare. `phases`
    are the windows of its phases, where somebody asked. `power_limits` are those that the device has had since the run
    began, in watts: several where somebody changed it; () where nobody tells. `why` says why a window or an idle power
    is missing, '' if none is.
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
    """What a device said of itself while a case was timed, looked at between its slots, `looks` times.

    `throttle` has every bit that was set in any look (`fp8bench.model.consumed` names them). `held` says for how many
    of the `seconds` in which the whole group was timed each limit held the clocks back, as the driver counts it.
    `others` are the processes beside the worker that had work on it then, with `others_memory` bytes, `slices` the
    other parts that it is split into.
    `sm_clock` is the mean over its slots that were looked at, each by how long it took. `warm_up` is how the device was
    while the first case of the session ran ahead of the rounds, None where it told neither clock nor temperature.
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
    warm_up: Settling | None = None
    others: int | None = None
    others_memory: int | None = None
    slices: int = 0


@dataclass(frozen=True)
class PhaseMemory:
    """The most that was allocated at once within one phase, and the most that the allocator had reserved for it."""

    phase: str
    allocated: int
    reserved: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """What a step's memory is made of at its highest point.

    `peak` are bytes of tensors; `roles` say what they are, and sum to it (`fp8bench.model.MemoryRole`). `on_device` is
    what it would be where the hardware keeps the formats, derived from the same allocations: of a case that emulates
    nothing the peak itself; None where nobody can say, and then `off_device` says why. `process` is
    what the driver counts for the worker's process on the device, its context included, right after the step;
    `resident` the most that the process had in the machine's memory during it. `leak` are the bytes by which
    tensors, on the host too, take more with every step, 0 where they do not; None where nobody looked. Of several
    ranks it is that of the one that takes most, and `ranks` has all. `forward` are the roles of what is held where the
    first forward pass has ended and nothing of backward has begun: the same moment in every precision.
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
    """What is allocated from here on is an emulation's: it counts on no device until the note is said to have ended."""


@dataclass(frozen=True)
class EmulationEnd:
    """The end of that. What lies at these addresses has something else in its place; what else is still there counts
    from now on, and what has gone meanwhile never did."""

    replaced: tuple[int, ...] = ()


@dataclass(frozen=True)
class Laid:
    """A device holds so many bytes more until they are `Lifted`; with an address what lies there, for as long."""

    key: int
    size: int
    address: int = 0


@dataclass(frozen=True)
class Lifted:
    """What was laid under that key is gone."""

    key: int


DeviceNote = Emulating | EmulationEnd | Laid | Lifted


@dataclass(frozen=True)
class HeldBlock:
    """One allocation that was held at the highest point.

    `phase` is what the step was at when it was made, '' before the stretch; `backward` says that a backward pass made
    it, `awaited` that a forward pass did and that it was still held when a backward pass began, `brief` that it went
    within the piece of a phase (in backward: the node of autograd's graph) that had made it, `lasting` that it was
    there at the end. `said` is what was said of its address meanwhile.
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
    """The highest point of a stretch, what was held there, and the highest points of its phases.

    `held` are () where nobody could see single allocations; then `why` says why. They may sum to less than `peak`.
    `on_device` is the highest point where an emulation's tensors are replaced as notes said; None where none did.
    `forward` is what was held when the first backward pass began, () where there was none.
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
    """The largest batch of which a state and two steps fit: by runs of it, and of the next one, which does not.

    `axis` is the parameter that was varied, in steps of `grain`. `batch` is None where no search came to an answer, and
    0 where not even the smallest fits; `why` says why, or why `beyond`, the next batch, does not fit. `beyond` is None
    where the axis ends before the memory does. `tokens` are those of a step with `batch`, 0 where the notion does not
    apply; `peak` are the bytes of its tensors at the highest point of preparing and two steps, `limit` those that were
    allowed: None for as many as the device gives. `attempts` counts what was run. Of an emulated case `on_device` is
    the largest batch where hardware keeps its formats, by the line through what `batch` and half of it would take
    there; None where nobody can say.
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


# The sources of energy that count it; sensors of power do not, and nobody knows how far they are off.
COUNTERS = frozenset({"counter", "rapl"})
# How often a counter has to change in a window.
LEAST_INTERVALS = 10
# In the reason of a window in which it did not.
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
# The hardware slows itself down to survive: what was measured meanwhile is not this device's speed.
HARDWARE = 0x8 | 0x40 | 0x80
# Usual for large products on current GPUs.
POWER_CAP = 0x4
# Clocks that somebody chose, or that the cap allows, are the device's own.
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
    """The reasons of a mask by name, 'bit 0x800' for one that has none yet; idling is none."""
    bits = [1 << number for number in range(mask.bit_length()) if mask & 1 << number]
    return tuple(BITS.get(bit, f"bit {bit:#x}") for bit in bits if bit != 0x1)
