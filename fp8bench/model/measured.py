"""The results of a case, and the ceilings of its device: the highest measured rates, with which results are
compared.
"""

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

# A rate is not used as an upper bound if its repeated measurements differ by more than this relative amount.
MAX_RATE_SPREAD = 0.05


class Limit(StrEnum):
    """The limits of a device, and what is timed to measure each. PRODUCT: matrix products. COPY and TRIAD (a = b + s *
    c): memory traffic of arrays larger than the last-level cache. CACHED: copies of smaller arrays, of the fastest
    size. LAUNCH: launches of the smallest kernel. LOAD: copies from host memory to the device.
    """

    PRODUCT = "product"
    COPY = "copy"
    TRIAD = "triad"
    CACHED = "cached copy"
    LAUNCH = "launch"
    LOAD = "host to device"


@dataclass(frozen=True)
class Rate:
    """The rate that a device reached, per second: of FLOPs, of bytes read and written, or of launches. `precision` is
    that of a product.

    `searched` shapes were tried (M, N and K of a product, or the bytes of one array). The fastest one is `shape`. It
    was measured again several times, and `runs` has the rate of each time. If `runs` is empty, `why` is the reason.
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
    def is_steady(self) -> bool:
        return bool(self.runs) and self.spread <= MAX_RATE_SPREAD


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of FLOPs, bytes and launches per second that a device reached, each measured several times.

    `when` is the time of the measurement, `under` has the settings at that time by name, and `device` is the name of
    the device.
    """

    rates: tuple[Rate, ...] = ()
    when: str = ""
    under: tuple[tuple[str, Scalar], ...] = ()
    device: str = ""

    def rate(self, limit: Limit, precision: str = "") -> Rate | None:
        rate_key = limit, precision
        return next((rate for rate in self.rates if rate.runs and (rate.limit, rate.precision) == rate_key), None)

    def best(self, limit: Limit, precision: str = "") -> float | None:
        """Returns the highest measured rate of a limit, even if its runs differ much. Returns None if the rate is
        unknown.
        """
        rate = self.rate(limit, precision)
        return None if rate is None else max(rate.runs)

    def bound(self, limit: Limit, precision: str = "") -> float | None:
        """Returns an upper bound for the rate of a limit. Returns None if the rate is unknown or its runs differ too
        much.
        """
        rate = self.rate(limit, precision)
        return rate.value if rate is not None and rate.is_steady else None


@dataclass(frozen=True)
class Ceiling:
    """The highest rates of FLOPs and bytes per second that one case can reach; None if unknown.

    `rates` are all measured rates of the case's device, even those whose runs differ too much. `device` is the name of
    the device.
    """

    flops: float | None = None
    bytes: float | None = None
    rates: tuple[Rate, ...] = ()
    device: str = ""


@dataclass(frozen=True)
class GivenTensors:
    """All tensors of one shape that exist before a step and that the step only reads (inputs) or trains (weights). The
    fields are the number of tensors, and over all their values the sum, the sum of squares, and the number of subnormal
    values. `scattered` counts the tensors in which no two numbers are next to each other in memory.
    """

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
    """Observations of the matrix products of an untimed step. The products were checked until one had an operand in the
    case's formats.

    `low` is whether a product had such an operand; None if the formats are unknown. `count` products were checked, and
    `operands` are the dtypes of their operands. `operators` counts the operators of the whole step. `attention` are the
    kernels of torch's attention. `wide` means that native products received values of their formats in wider dtypes,
    and no codes. If a product did not compute in the case's precision, `looks_like` is the precision that its numbers
    show, otherwise ''. `kernels` are the kernels of products in a profiled step, if there was one. `given` are the
    tensors that the step reads or trains. `cast_before` counts the weights that were stored in the case's formats
    before the step, without a declared memory role.
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
    """The raw samples of one figure, such as 'peak_memory', in `unit`."""

    metric: str
    unit: str
    samples: tuple[float, ...]
    provenance: Provenance = Provenance.MEASURED
    phase: str | None = None
    description: str = ""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of the values of a product's operand, or of a batch, before scaling.

    `kind` is the kind of layer or of values, and `role` is the role of the operand in a product, or ''. `amax` is the
    largest magnitude of all `count` values. `outside` has a row for each format: the name of the format, the share of
    values above its largest number, and the share of nonzero values that it would round to zero.
    """

    kind: str
    role: str
    count: int
    amax: float
    outside: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class LayerScale:
    """The scale of one tensor (a role in one layer) after the last step, if scales are derived from data.

    Values are multiplied by `scale`, which is the largest number of the format divided by `amax`. It was computed again
    `renewals` times, because enough steps had passed or because too many values saturated.
    """

    layer: str
    role: str
    amax: float
    scale: float
    renewals: int = 0


@dataclass(frozen=True)
class StepEffect:
    """Whether the results of a step change if its inputs change, both in a timed and in an untimed step. `changes` is
    None if this is unknown, and `why` describes what was observed.
    """

    changes: bool | None
    why: str = ""


@dataclass(frozen=True)
class Rotation:
    """How many states (copies of the tensors of a case) the calls of a slot use in turn, and the bytes of one state.
    There are enough states that a state is no longer in the cache when it is used again.
    """

    states: int
    state_bytes: int


@dataclass(frozen=True)
class Segments:
    """The cells into which the time of a step is divided. Cell i is the time of phase `phases[i]` within block
    `blocks[i]` of the step.
    """

    phases: tuple[str, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SlotSample:
    """One slot: the calls of one case in one round. A field is None if it was not measured.

    `calls_ns[c][i]` is the time of cell i in call c. For the complete slot, `cpu_seconds` is the CPU time of the
    process, and `wall_seconds` the time of the host clock. `thread_seconds` is the CPU time of the thread that runs
    the steps. `host_seconds` is the time that the host took to enqueue a step; 0 if the host runs the step itself.
    `place` is the position of the slot in its round, and `clock` the device's clock in hertz right after the slot.

    `preemptions` counts how often the system took the core although the thread had work. `stolen_seconds` is the time
    that a hypervisor took from all cores, rounded to 10 ms. `waited_seconds` is how long the thread had work but no
    core, if the host clock timed the calls. `memory_retries` counts allocations that succeeded only after torch
    returned its cached memory. With several ranks, `calls_ns` is the time of the slowest rank in each call, and
    `ranks` has every rank.
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
    """All raw samples of one arm (a case that is timed in rounds).

    `entries` counts how often a step enters each phase. `varying` means that the sequence of phases differed
    between steps, so each phase has only one cell. `eager` is the reason why quantisers that could be compiled ran as
    separate operations, or ''. `fused` means that some quantisers ran compiled. `vector_bits` are the widths of the
    vectors of compiled quantisers, on a CPU that has several widths.
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
        """The mean clock of the device in hertz, over the slots with a known clock, weighted by duration."""
        clock_samples = [(slot.clock, slot.wall_seconds) for slot in self.slots if slot.clock is not None]
        seconds = sum(wall for _, wall in clock_samples)
        return sum(clock * wall for clock, wall in clock_samples) / seconds if seconds > 0 else None


@dataclass(frozen=True)
class Interval:
    """The time of the case divided by that of the reference (below 1 is faster), with an interval of the ratio."""

    point: float
    low: float
    high: float
    level: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval on a logarithmic scale, which is about half its relative width."""
        if self.low <= 0 or not math.isfinite(self.high):
            return math.inf
        return 0.5 * math.log(self.high / self.low)

    @property
    def reach(self) -> float:
        return max(abs(self.low - 1), abs(self.high - 1))

    @property
    def distance_from_one(self) -> float:
        """How far the interval is from 1; 0 if the interval contains 1."""
        return max(0.0, self.low - 1, 1 - self.high)

    @property
    def inverse(self) -> Interval:
        """The ratio as a speed-up: the reference's time divided by the case's (above 1 is faster)."""
        return Interval(1 / self.point, _invert_ratio_bound(self.high), _invert_ratio_bound(self.low), self.level)


def _invert_ratio_bound(bound: float) -> float:
    return bound if math.isnan(bound) else 1 / bound if bound > 0 else math.inf


@dataclass(frozen=True)
class FreshRounds:
    """New rounds of a case that was chosen as the fastest of `candidates` cases. Only this case, the reference and the
    control (a second copy of the reference) were measured in them.

    The samples by which the case was chosen are left out, so that the choice does not bias its ratio.
    """

    timing: Timing
    reference: Timing
    control: Timing | None
    candidates: int


@dataclass(frozen=True)
class Reruns:
    """How much runs of the same case differ on this machine, estimated from `runs` earlier runs of this and other
    cases.

    `spread` is the standard deviation of the logarithms of the runs' ratios, with `freedom` degrees of freedom. When an
    interval is widened to cover this spread, `max_reach` is the largest half-width, on a logarithmic scale. `own_runs`
    counts the earlier runs of this case (None in files of older versions), and `low` and `high` are the lowest and
    highest logarithm of their ratios.
    """

    spread: float
    freedom: int
    runs: int
    own_runs: int | None = None
    max_reach: float = math.inf
    low: float = math.inf
    high: float = -math.inf


@dataclass(frozen=True)
class ReplayTimes:
    """The times of captured steps that a device replayed with one launch per step. The time of a step is not divided
    into cells. If the times are missing, `why` is the reason.

    `loaded` names what was copied to the device before each replay, outside the measured time; '' for steps that load
    nothing. `phases` has the seconds of each phase in a second captured graph that also records events. It is empty if
    the device cannot record events in a graph.
    """

    timing: Timing | None = None
    why: str = ""
    loaded: str = ""
    phases: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Record:
    """The result of one case. A field is None or empty if it was not requested or cannot be known.

    Time: `timing` holds the samples, `control` those of a second copy of the reference in the same rounds (the A/A
    control). `paired`: the case shared rounds with the reference. If the case was timed later, in separate
    rounds, `paired_with` holds the reference's samples of these rounds; None means the samples in the reference's
    record. `stopped` is the reason why measuring ended. `fresh` are new rounds of a case that was the fastest of
    several: its ratio is computed from these, and `timing` is only the basis of the choice. `sustained` are the turns
    of several seconds; the n-th turns of all cases of a group form one round. `late` describes steps after the timing,
    and `late_flops` counts the FLOPs of such a step if they are the same in every step. `reruns` is how much earlier
    runs differed. `sessions` are the ratios of earlier sessions, and the interval spans all of them.

    Content of a step: `ceiling` is the most that the case can reach, `products` describes how its products ran,
    `effect` whether its steps do anything, `tape` lists its operators, `coverage` shows which products of a user's
    model can be converted, and `shares` how its time divides. `rotation` is set if calls use several states, `replays`
    if a device may repeat a step in one launch. `statistics` describe the data; only the reference has them, because
    they do not depend on the precision. `scales` are those derived from data. `not_finite` is the share of the state's
    numbers that are not finite after timing, for workloads that allow this. `trace` is the trace file within the
    requested folder.

    Ranks: `transfer` is what a step of several ranks moves between them, `overlap` is how much of this time computing
    hides, and `failed_rank` is the rank that made the case fail.
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
    fresh: FreshRounds | None = None
    rotation: Rotation | None = None
    replays: ReplayTimes | None = None
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
