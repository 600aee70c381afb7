"""What was measured of a case, and what it is held against: how much a device does at most, what products ran on."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fp8bench.model.consumed import Capacity, DeviceWatch, EnergyUse, MemoryUse, SustainedTurn
from fp8bench.model.planned import Case, Scalar, Support, Work
from fp8bench.model.ranks import FailedRank, Overlap, RankCalls, RankScaling, Sent, Transfer
from fp8bench.model.step import Coverage, Shares, Tape
from fp8bench.model.words import Provenance, Status

# Runs that differ by more bound nothing.
WIDEST_SPREAD = 0.05


class Limit(StrEnum):
    """What a device does at most: products, copies and triads (a = b + s c) beyond its last cache, copies wherever they
    are fastest, launches of the least that there is to do, and copies from the host's memory to its own."""

    PRODUCT = "product"
    COPY = "copy"
    TRIAD = "triad"
    CACHED = "cached copy"
    LAUNCH = "launch"
    LOAD = "host to device"


@dataclass(frozen=True)
class Rate:
    """What a device was seen to do in a second, once in each of `runs`: FLOPs, bytes read and written, or launches.

    `precision` is that of products. `shape` (M, N and K of a product, the bytes of one array) won a search of so many
    (`searched`), and was then measured again: what it won by is in `runs` only where there is one run. Without any,
    `why` says what went wrong.
    """

    limit: Limit
    precision: str = ""
    runs: tuple[float, ...] = ()
    searched: int = 1
    shape: tuple[int, ...] = ()
    why: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.runs) if self.runs else None

    @property
    def spread(self) -> float:
        """From the lowest to the highest run, over their median."""
        return (max(self.runs) - min(self.runs)) / statistics.median(self.runs) if self.runs else 0.0

    @property
    def steady(self) -> bool:
        """Whether its runs agree so well that nothing can do more than it says."""
        return bool(self.runs) and self.spread <= WIDEST_SPREAD


@dataclass(frozen=True)
class Ceilings:
    """The most that a device was seen to do, kept for a machine: a quick look of one run, or several runs of all.

    `when` it was, and `under` which settings, by name; `device` is the device's name.
    """

    rates: tuple[Rate, ...] = ()
    when: str = ""
    under: tuple[tuple[str, Scalar], ...] = ()
    device: str = ""

    @property
    def whole(self) -> bool:
        """Whether there are several runs; a quick look is of one, with one thread of a processor."""
        return any(len(rate.runs) > 1 for rate in self.rates)

    def rate(self, limit: Limit, precision: str = "") -> Rate | None:
        """None where it was not measured."""
        wanted = limit, precision
        return next((rate for rate in self.rates if rate.runs and (rate.limit, rate.precision) == wanted), None)

    def bound(self, limit: Limit, precision: str = "") -> float | None:
        """What nothing can be above; None where nobody knows, or runs differ too much."""
        rate = self.rate(limit, precision)
        return rate.value if rate is not None and rate.steady else None

    def times(self, threads: int) -> Ceilings:
        """A quick look, of so many threads, if none ever waits for another one."""
        many = (replace(rate, runs=tuple(run * threads for run in rate.runs)) for rate in self.rates)
        return replace(self, rates=tuple(many))


@dataclass(frozen=True)
class Ceiling:
    """Of one case: the most FLOPs and bytes a second that it can be; None where nobody knows.

    `rates` are those of its device that were measured in several runs, steady or not; `device` is its name.
    """

    flops: float | None = None
    bytes: float | None = None
    rates: tuple[Rate, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class GivenTensors:
    """The tensors of one shape that a step is given: those that it does not write, or trains. The sum of all their
    numbers, that of the squares, and how many are subnormal."""

    shape: tuple[int, ...]
    tensors: int = 0
    total: float = 0.0
    squares: float = 0.0
    subnormals: int = 0

    @property
    def sums(self) -> tuple[float, float, int]:
        return self.total, self.squares, self.subnormals

    @property
    def elements(self) -> int:
        return self.tensors * math.prod(self.shape)

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.elements)


@dataclass(frozen=True)
class Products:
    """What an untimed step ran: so many `operators`, and products up to the first with an operand of its formats.

    `low` says whether there was one, None where nobody knows which formats that would be. `count` products were looked
    at, and `operands` are the dtypes that they read. `attention` are the kernels that torch's attention took. `wide`
    says that native products had values of their formats in wider dtypes, and none codes; `looks_like` in what
    precision a product of the arithmetic really was, by its numbers, '' where it kept its promise. `kernels` are the
    names of those that multiplied in a profiled step, if there was one. `given` are the tensors that a step has.
    """

    count: int
    low: bool | None
    operands: tuple[str, ...] = ()
    operators: int = 0
    attention: tuple[str, ...] = ()
    wide: bool = False
    looks_like: str = ""
    kernels: tuple[str, ...] = ()
    given: tuple[GivenTensors, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Raw samples of one metric, in the metric's unit."""

    metric: str
    unit: str
    samples: tuple[float, ...]
    provenance: Provenance = Provenance.MEASURED
    phase: str | None = None
    description: str = ""


@dataclass(frozen=True)
class TensorStatistics:
    """What values a product (or a batch) is made of, before any scaling.

    `kind` is the layer kind, or what else the values are; `role` the one they have in a product, '' if they have none.
    `amax` is the largest magnitude of `count` values; `outside` holds for each format, by name, the share of values
    above its largest and the share of those that are not zero and would become zero.
    """

    kind: str
    role: str
    count: int
    amax: float
    outside: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class LayerScale:
    """The scale from data of one role's tensor in one layer, as it was after the last step.

    `scale` is what values are multiplied by: the format's largest over `amax`. It was renewed `renewals` times since it
    was first found, by age or by saturation.
    """

    layer: str
    role: str
    amax: float
    scale: float
    renewals: int = 0


@dataclass(frozen=True)
class StepEffect:
    """Whether what a step gives changes with what it is given, timed as well as looked at; None where nobody can tell.

    `why` says what was seen.
    """

    changes: bool | None
    why: str = ""


@dataclass(frozen=True)
class Rotation:
    """How many states take turns, so that none is in a cache when its turn comes again, and the bytes of one."""

    states: int
    state_bytes: int


@dataclass(frozen=True)
class OperatorTime:
    """What one operator, or one kernel of the device, takes of a step in one phase: its own time, without its callees'.

    From a trace, whose recording makes steps longer than they are. `calls` are those of a step, and begin in the phase.
    `name` is '' for the rest of the phase: operators that are not listed, with the time that lies in none.
    """

    phase: str
    name: str
    calls: float
    seconds: float
    on_device: bool = False


@dataclass(frozen=True)
class Segments:
    """The cells of a step: the time one phase took within one stretch of the step.

    `phases[i]` is the phase of cell i and `blocks[i]` the stretch it lies in.
    """

    phases: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SlotSample:
    """One slot: the calls of one case in one round.

    `calls_ns[c][i]` is the time of cell i in call c; `cpu_seconds` is process CPU time over the slot, `wall_seconds`
    the host clock over the same stretch, `host_seconds` what the host took to enqueue a step (0 where it is the
    step itself). `thread_seconds` is the processor time of the thread that runs the steps, `preemptions` how often the
    system took the core from the process although it had work, `stolen_seconds` what a hypervisor took from all cores
    meanwhile, in steps of 10 ms; `waited_seconds` how long the thread had work and no core, where the host's clock
    timed the calls. It is so many slots after the first of its round (`place`). `clock` is the device's right after it,
    in hertz. None where nobody said, or looked. Of several ranks `calls_ns` are the slowest rank's, call by call, and
    `ranks` what each of them took. `memory_retries` is how often the device's memory sufficed only
    once what torch kept of it had been given back.
    """

    round: int
    calls_ns: tuple[tuple[int, ...], ...]
    wall_seconds: float
    cpu_seconds: float
    host_seconds: float = 0.0
    thread_seconds: float | None = None
    preemptions: int | None = None
    stolen_seconds: float | None = None
    waited_seconds: float | None = None
    place: int | None = None
    clock: float | None = None
    ranks: tuple[RankCalls, ...] = ()
    memory_retries: int | None = None


@dataclass(frozen=True)
class Timing:
    """All raw samples of one arm; nothing is thrown away.

    `entries` says how many stretches of each phase the marks of a step made; `varying` that they differed from step
    to step, so that there is one cell a phase. `eager` says why quantisers that could have been one compiled kernel
    each ran as separate operations, '' if none did; `fused` that some ran compiled; `vector_bits` how wide a CPU's
    vectors are in those, where there were widths to choose from.
    """

    segments: Segments
    slots: tuple[SlotSample, ...]
    entries: tuple[tuple[str, int], ...] = ()
    varying: bool = False
    eager: str = ""
    fused: bool = False
    vector_bits: tuple[int, ...] = ()

    @property
    def num_rounds(self) -> int:
        return len(self.slots)

    @property
    def num_calls(self) -> int:
        return sum(len(slot.calls_ns) for slot in self.slots)

    @property
    def clock(self) -> float | None:
        """The device's mean clock in hertz over the slots that were looked at, each by how long it took."""
        looked = [(slot.clock, slot.wall_seconds) for slot in self.slots if slot.clock is not None]
        seconds = sum(wall for _, wall in looked)
        return sum(clock * wall for clock, wall in looked) / seconds if seconds > 0 else None


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval: time of the case over time of the reference (below 1 is faster)."""

    point: float
    low: float
    high: float
    level: float

    @property
    def half_width(self) -> float:
        """Half the interval's width in log units, about the relative half-width."""
        if self.low <= 0 or not math.isfinite(self.high):
            return math.inf
        return 0.5 * math.log(self.high / self.low)

    @property
    def reach(self) -> float:
        """How far the interval reaches from 1, as a share."""
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def clearance(self) -> float:
        """How far the interval stays away from 1, as a share; 0 if 1 lies inside."""
        return max(0.0, self.low - 1, 1 - self.high)

    @property
    def inverse(self) -> Interval:
        """The same the other way round: a speed-up, above 1 is faster."""
        return Interval(1 / self.point, _inverse(self.high), _inverse(self.low), self.level)


def _inverse(bound: float) -> float:
    if math.isnan(bound):
        return bound
    return 1 / bound if bound > 0 else math.inf


@dataclass(frozen=True)
class Fresh:
    """Rounds of a case after it had been chosen as the fastest of so many `candidates`: with the reference and its
    control, and nobody else. What it was chosen by is no part of them."""

    timing: Timing
    reference: Timing
    control: Timing | None
    candidates: int


@dataclass(frozen=True)
class Reruns:
    """How far apart runs of a case lie on a machine, learned of so many earlier `runs` of it and of others.

    `spread` is the standard deviation of the logarithms of their ratios, with so many degrees of `freedom`.
    """

    spread: float
    freedom: int
    runs: int


@dataclass(frozen=True)
class Replays:
    """Steps that a device did again as one launch each: their times, in one cell, or why there are none.

    `loaded` is what was brought to the device ahead of each, and is not in its time; '' where steps take nothing from
    their host.
    """

    timing: Timing | None = None
    why: str = ""
    loaded: str = ""


@dataclass(frozen=True)
class Record:
    """What became of one case.

    `control` is the second entry of the reference in the same rounds (the A/A control). `paired_with` holds the
    reference's samples where this case was measured with the reference apart from the rest of its group; None means the
    samples in the reference's own record. `paired` says whether it shared rounds with the reference at all.
    `stopped` says why measuring ended. `statistics` describe the data, and stand with the reference alone: they do not
    depend on the precision. `trace` is the file of a trace within the folder that was asked for, '' without one, and
    `operators` are what takes most in it, phase by phase. `scales` are those that came from data, if any did.
    `energy`, `watch`, `memory` and `capacity` are None where they were not asked for, or nobody there could answer.
    `not_finite` is the share of the state's numbers that are not finite after timing, where the workload says that this
    may be. `ceiling` is the most that it can do where it ran, `products` what its products ran on, `effect` whether its
    steps do anything; None where nobody looked. `sustained` are its turns of seconds, the n-th of all cases of a group
    in one round of turns; () where nobody asked for them. `fresh` are the rounds of the fastest of several, which its
    ratio is told by; `timing` stays what it was chosen by. `rotation` is there where calls do not all have the
    same state, `replays` where a device might do a step again in one launch. `tape` are the operators of a step,
    `coverage` which of a user's model's products can be converted, `shares` what parts of a step take of it.
    `late_flops` are the products of a step after its timing, with the clock that timed it.
    `reruns` is what runs of it differed by before this one, None where too little was known; `sessions` are the ratios
    of the sessions before this one, of which the interval is the hull.
    `transfer` is what a step of several ranks moves, `overlap` how far that hides, `failed_rank` which of them failed
    the case.
    """

    case: Case
    support: Support
    status: Status
    work: Work = field(default_factory=Work)
    is_reference: bool = False
    reason: str = ""
    detail: str = ""
    timing: Timing | None = None
    control: Timing | None = None
    paired_with: Timing | None = None
    paired: bool = True
    measurements: tuple[Measurement, ...] = ()
    stopped: str = ""
    statistics: tuple[TensorStatistics, ...] = ()
    trace: str = ""
    operators: tuple[OperatorTime, ...] = ()
    scales: tuple[LayerScale, ...] = ()
    energy: EnergyUse | None = None
    watch: DeviceWatch | None = None
    memory: MemoryUse | None = None
    capacity: Capacity | None = None
    not_finite: float = 0.0
    ceiling: Ceiling | None = None
    products: Products | None = None
    effect: StepEffect | None = None
    sustained: tuple[SustainedTurn, ...] = ()
    fresh: Fresh | None = None
    rotation: Rotation | None = None
    replays: Replays | None = None
    tape: Tape | None = None
    coverage: Coverage | None = None
    shares: Shares | None = None
    transfer: Transfer | None = None
    overlap: Overlap | None = None
    sent: tuple[Sent, ...] = ()
    scaling: RankScaling | None = None
    failed_rank: FailedRank | None = None
    late_flops: int | None = None
    reruns: Reruns | None = None
    sessions: tuple[Interval, ...] = ()

    def measurement(self, metric: str) -> Measurement | None:
        return next((m for m in self.measurements if m.metric == metric), None)
