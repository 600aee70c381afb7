"""Results of a case, and the references for them: the ceilings of its device, the kernels of its products."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from enum import StrEnum

from fp8bench.model.consumed import Capacity, DeviceWatch, EnergyUse, MemoryUse, SustainedTurn
from fp8bench.model.planned import Case, Scalar, Support, Work
from fp8bench.model.ranks import FailedRank, Overlap, RankCalls, RankScaling, Sent, Transfer
from fp8bench.model.step import Coverage, LateSteps, Shares, Tape
from fp8bench.model.words import Provenance, Status

# Runs that differ by more give no upper bound.
WIDEST_SPREAD = 0.05


class Limit(StrEnum):
    """The most that a device reaches: products; copies and triads (a = b + s c) beyond its last cache; copies where
    they are fastest; launches of the smallest kernel; copies from the host's memory."""

    PRODUCT = "product"
    COPY = "copy"
    TRIAD = "triad"
    CACHED = "cached copy"
    LAUNCH = "launch"
    LOAD = "host to device"


@dataclass(frozen=True)
class Rate:
    """FLOPs, bytes read and written, or launches a second that a device reached, once in each of `runs`.

    `precision` is that of products. `shape` (M, N and K of a product, the bytes of one array) won a search among
    `searched`, and was then measured again. Without runs, `why` has the reason.
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
        return (max(self.runs) - min(self.runs)) / statistics.median(self.runs) if self.runs else 0.0

    @property
    def steady(self) -> bool:
        return bool(self.runs) and self.spread <= WIDEST_SPREAD


@dataclass(frozen=True)
class Ceilings:
    """The most that a device was seen to do, in several runs of all rates.

    `when` they were measured, `under` which settings, by name; `device` is the device's name.
    """

    rates: tuple[Rate, ...] = ()
    when: str = ""
    under: tuple[tuple[str, Scalar], ...] = ()
    device: str = ""

    def rate(self, limit: Limit, precision: str = "") -> Rate | None:
        key = limit, precision
        return next((rate for rate in self.rates if rate.runs and (rate.limit, rate.precision) == key), None)

    def best(self, limit: Limit, precision: str = "") -> float | None:
        """Returns the most of all runs, steady or not."""
        rate = self.rate(limit, precision)
        return None if rate is None else max(rate.runs)

    def bound(self, limit: Limit, precision: str = "") -> float | None:
        """An upper bound; None where it is unknown or runs differ too much."""
        rate = self.rate(limit, precision)
        return rate.value if rate is not None and rate.steady else None


@dataclass(frozen=True)
class Ceiling:
    """The most FLOPs and bytes a second that one case can reach; None where unknown.

    `rates` of its device were measured in several runs, steady or not; `device` is its name.
    """

    flops: float | None = None
    bytes: float | None = None
    rates: tuple[Rate, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class GivenTensors:
    """The tensors of one shape that a step reads only, or trains: how many, the sums of their numbers and squares, and
    how many numbers are subnormal. `scattered` are those with no two numbers side by side."""

    shape: tuple[int, ...]
    tensors: int = 0
    total: float = 0.0
    squares: float = 0.0
    subnormals: int = 0
    scattered: int = 0

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
    """The operators of an untimed step: `operators` in all, and its products up to the first with an operand in the
    case's formats.

    `low` is whether there was such a product, None where the formats are unknown. `count` products were looked at, and
    read `operands` of these dtypes. `attention` are the kernels that torch's attention took. `wide`: native products
    had values of their formats in wider dtypes, and no codes. `looks_like` is the precision that a product's numbers
    show, '' where it kept its promise. `kernels` multiplied in a profiled step, if there was one. `given` are the
    tensors of a step. `cast_before` counts the tensors in the case's formats that products read as weights, though no
    step casts them and the state names no role of them.
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
    cast_before: int = 0


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
    """The values of a product's operand (or of a batch) before any scaling.

    `kind` is the layer kind, or what else the values are; `role` the one they have in a product, '' for none. `amax` is
    the largest magnitude of `count` values; `outside` holds for each format, by name, the share of values above its
    largest and the share of nonzero values that would become zero.
    """

    kind: str
    role: str
    count: int
    amax: float
    outside: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class LayerScale:
    """The scale from data of one role's tensor in one layer, after the last step.

    Values are multiplied by `scale`: the format's largest over `amax`. It was renewed `renewals` times, by age or by
    saturation.
    """

    layer: str
    role: str
    amax: float
    scale: float
    renewals: int = 0


@dataclass(frozen=True)
class StepEffect:
    """Whether a step's results change with its inputs, timed as well as untimed; None where that is unknown. `why`
    describes what was observed."""

    changes: bool | None
    why: str = ""


@dataclass(frozen=True)
class Rotation:
    """How many states take turns, so that none is cached when its turn comes again, and the bytes of one."""

    states: int
    state_bytes: int


@dataclass(frozen=True)
class Segments:
    """The cells of a step: cell i is the time of phase `phases[i]` within stretch `blocks[i]` of the step."""

    phases: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SlotSample:
    """One slot: the calls of one case in one round. None where something was not measured.

    `calls_ns[c][i]` is the time of cell i in call c. Over the slot, `cpu_seconds` is the process's CPU time and
    `wall_seconds` the host clock. `host_seconds` is what the host took to enqueue a step, 0 where that is the step.
    `thread_seconds` is the processor time of the thread that runs the steps; `preemptions` how often the system took
    the core although it had work; `stolen_seconds` what a hypervisor took from all cores, in steps of 10 ms;
    `waited_seconds` how long the thread had work and no core, where the host's clock timed the calls. `place` is the
    slot's position in its round, `clock` the device's clock in hertz right after it. With several ranks `calls_ns` are
    the slowest rank's, call by call, and `ranks` what each took. `memory_retries` counts allocations that succeeded
    only after torch had given back its cached memory.
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
    """All raw samples of one arm.

    `entries` counts the stretches of each phase that the marks of a step made; `varying` means that they differed from
    step to step, so that there is one cell a phase. `eager` is the reason why quantisers that could have been compiled
    ran as separate operations, '' if none did; `fused` that some ran compiled; `vector_bits` how wide their vectors
    were on a CPU with several widths.
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
        """The device's mean clock in hertz over the slots that have one, weighted by duration."""
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
        """Half the interval's width in log units: about the relative half-width."""
        if self.low <= 0 or not math.isfinite(self.high):
            return math.inf
        return 0.5 * math.log(self.high / self.low)

    @property
    def reach(self) -> float:
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def clearance(self) -> float:
        """How far the interval stays away from 1; 0 if 1 lies inside."""
        return max(0.0, self.low - 1, 1 - self.high)

    @property
    def inverse(self) -> Interval:
        """The same ratio as a speed-up: above 1 is faster."""
        return Interval(1 / self.point, _inverse(self.high), _inverse(self.low), self.level)


def _inverse(bound: float) -> float:
    if math.isnan(bound):
        return bound
    return 1 / bound if bound > 0 else math.inf


@dataclass(frozen=True)
class Fresh:
    """Rounds of a case after it was chosen as the fastest of `candidates`, with the reference and its control only.

    The samples that it was chosen by are not in them.
    """

    timing: Timing
    reference: Timing
    control: Timing | None
    candidates: int


@dataclass(frozen=True)
class Reruns:
    """The spread of runs of a case on a machine, learned from `runs` earlier ones of it and of other cases.

    `spread` is the standard deviation of the logarithms of their ratios, with `freedom` degrees of freedom.
    """

    spread: float
    freedom: int
    runs: int


@dataclass(frozen=True)
class Replays:
    """Times of steps that a device did again as one launch each, in one cell; or the reason for their absence.

    `loaded` is what was brought to the device before each replay, outside of its time; '' for steps that load nothing.
    `phases` are the seconds by phase of a second graph, which also records events; empty where a device cannot.
    """

    timing: Timing | None = None
    why: str = ""
    loaded: str = ""
    phases: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Record:
    """The result of one case. Fields are None or empty where something was not asked for or cannot be known.

    `control` is the second entry of the reference in the same rounds (the A/A control). `paired` is whether the case
    shared rounds with the reference; `paired_with` holds the reference's samples where that was apart from the rest of
    the group, None means the samples in the reference's own record. `stopped` is the reason why measuring ended.
    `statistics` describe the data, with the reference only, because they do not depend on the precision. `trace` is the
    file of a trace within the folder that was asked for. `scales` came from data. `not_finite` is the share of the
    state's numbers that are not finite after timing, where the workload allows that. `ceiling` is the most that it can
    do, `products` what its products ran on, `effect` whether its steps do anything. `sustained` are its turns of
    seconds: the n-th turns of a group are one round. `fresh` are the rounds of the fastest of several, which its ratio
    is computed from; `timing` remains what it was chosen by. `rotation` is there where calls use several states,
    `replays` where a device may do a step again in one launch. `tape` are the operators of a step, `coverage` which
    products of a user's model can be converted, `shares` what parts of a step take. `late` is what steps did after
    their timing, with the clock that timed them; `late_flops` are their products if all multiply as much. `reruns` is
    how much earlier runs of it differed; `sessions` are the ratios of the earlier sessions, of which the interval is
    the hull. `transfer` is what a step of several ranks moves, `overlap` how far computing hides that, `failed_rank`
    the rank that failed the case.
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
    late: LateSteps | None = None
    reruns: Reruns | None = None
    sessions: tuple[Interval, ...] = ()

    @property
    def is_ok(self) -> bool:
        return self.status is Status.OK

    def measurement(self, metric: str) -> Measurement | None:
        return next((m for m in self.measurements if m.metric == metric), None)
