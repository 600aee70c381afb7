"""Values, all frozen: what is asked, what will run, what was measured.

Units inside: seconds, bytes, joules; integer nanoseconds in raw clock samples, where the name says so.
Nothing here knows torch, files or text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Scalar = int | float | str | bool
Params = tuple[tuple[str, Scalar], ...]


class Phase(StrEnum):
    """What a stretch of a step is for. Closed, so that workloads compare."""

    DATA_LOAD = "data_load"
    CAST = "cast"
    GEMM = "gemm"
    ATTENTION = "attention"
    ACCUMULATE = "accumulate"
    OPTIMIZER_STEP = "optimizer_step"
    ELEMENTWISE = "elementwise"


UNATTRIBUTED = "unattributed"
PHASES: tuple[str, ...] = tuple(Phase)
# The order of phases in clocks, cells and tables; unattributed time is what a step leaves over.
CELL_PHASES: tuple[str, ...] = (*PHASES, UNATTRIBUTED)


class Level(StrEnum):
    """How a device does a precision."""

    NATIVE = "native"
    EMULATED = "emulated"
    REFUSED = "refused"


@dataclass(frozen=True)
class Support:
    """How a device does a precision, and why."""

    level: Level
    reason: str


class Status(StrEnum):
    """What became of a case."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


class Provenance(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    DERIVED = "derived"


class Label(StrEnum):
    """A machine-readable reason for doubt."""

    NOISY = "noisy"
    CONTENDED = "contended"
    LAUNCH_BOUND = "launch-bound"
    BELOW_FLOOR = "below-floor"
    BIMODAL = "bimodal"
    DRIFT = "drift"
    FEW_SAMPLES = "few-samples"
    UNPAIRED = "unpaired"
    VARYING = "varying-steps"


class Verdict(StrEnum):
    """The answer to 'is it faster than the reference?'."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNSURE = "unsure"
    REFERENCE = "reference"
    EMULATED = "emulated"
    NONE = "none"


@dataclass(frozen=True)
class Metric:
    """What a number means: its name, unit, description and which way is better."""

    name: str
    unit: str
    description: str
    lower_is_better: bool = True


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
class Work:
    """What one step does, by count: 0 where the notion does not apply."""

    flops: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class DeviceFacts:
    """All the plan needs to know of a device; plans are pure functions of it."""

    kind: str
    index: int
    name: str
    memory_bytes: int
    torch: str
    capability: tuple[int, int] | None = None
    cuda: str | None = None
    hip: str | None = None
    arch: str = ""

    @property
    def key(self) -> str:
        """How a person names it: 'cpu', 'cuda:0'."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def accelerated(self) -> bool:
        """Whether it is a GPU, where workloads get their real sizes."""
        return self.kind != "cpu"


def _shown(name: str, value: Scalar) -> str:
    return f"{name}={value}"


@dataclass(frozen=True)
class Case:
    """One thing to measure: workload x parameters x precision x device.

    `precision_map` names the layer kinds that do not take the case's own precision.
    """

    workload: str
    params: Params
    precision: str
    device: str
    precision_map: tuple[tuple[str, str], ...] = ()

    @property
    def mode(self) -> str:
        """The precision with its map: 'fp8', 'fp8{mlp=bf16}'."""
        inside = ",".join(f"{kind}={name}" for kind, name in self.precision_map)
        return f"{self.precision}{{{inside}}}" if inside else self.precision

    @property
    def setting(self) -> str:
        """What the case shares with its group: 'gemm[k=512,m=512] on cpu'."""
        inside = ",".join(_shown(name, value) for name, value in self.params)
        return f"{self.workload}[{inside}]@{self.device}"

    @property
    def id(self) -> str:
        """Readable and unique within a run."""
        return f"{self.setting}/{self.mode}"

    def param(self, name: str) -> Scalar:
        """The value of one axis."""
        for key, value in self.params:
            if key == name:
                return value
        raise KeyError(name)


@dataclass(frozen=True)
class PlannedCase:
    """A case with what the device makes of it; `skip` says why it will not run."""

    case: Case
    support: Support
    work: Work
    skip: str = ""

    @property
    def runs(self) -> bool:
        return not self.skip


@dataclass(frozen=True)
class Group:
    """Cases that differ in precision only. Measured together, interleaved.

    `reference` is the index of the case the others are held against.
    """

    cases: tuple[PlannedCase, ...]
    reference: int

    @property
    def setting(self) -> str:
        return self.cases[0].case.setting


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, in order."""

    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    @property
    def num_cases(self) -> int:
        return sum(len(group.cases) for group in self.groups)


@dataclass(frozen=True)
class Request:
    """What the user asked for, as given: nothing here depends on the machine."""

    suite: str
    dtypes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    reference: str | None = None
    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    precision_map: tuple[tuple[str, str], ...] = ()
    data: str | None = None
    quick: bool = False
    budget: float | None = None
    rounds: int | None = None
    seed: int = 0
    threads: int = 1
    imports: tuple[str, ...] = ()
    isolation: bool = True


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
    step itself).
    """

    round: int
    calls_ns: tuple[tuple[int, ...], ...]
    wall_seconds: float
    cpu_seconds: float
    host_seconds: float = 0.0


@dataclass(frozen=True)
class Timing:
    """All raw samples of one arm; nothing is thrown away."""

    segments: Segments
    slots: tuple[SlotSample, ...]
    marks: int = 0
    varying: bool = False

    @property
    def num_rounds(self) -> int:
        return len(self.slots)

    @property
    def num_calls(self) -> int:
        return sum(len(slot.calls_ns) for slot in self.slots)


@dataclass(frozen=True)
class Record:
    """What became of one case.

    `control` is the second entry of the reference in the same rounds (the A/A control). `paired_with` holds the
    reference's samples where this case sat with the reference apart from the rest of its group; None means the
    samples in the reference's own record. `paired` says whether it shared rounds with the reference at all.
    `stopped` says why measuring ended.
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

    def measurement(self, metric: str) -> Measurement | None:
        """The measurement of that name, if there is one."""
        return next((m for m in self.measurements if m.metric == metric), None)


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


@dataclass(frozen=True)
class Finding:
    """What the samples of one case say. Derived from the record at any time, never stored as the only truth.

    `phases` are best-case seconds that sum to `best_seconds`; those in `below_floor` are too short to be told from
    the cost of their own markers. `floor` is how far the A/A interval reaches from 1.
    """

    case: Case
    verdict: Verdict
    best_seconds: float | None = None
    median_seconds: float | None = None
    spread: float | None = None
    ratio: Interval | None = None
    median_ratio: float | None = None
    floor: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    below_floor: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Overheads:
    """What looking costs on this machine, in seconds; None where it could not be measured."""

    marker_on: float
    marker_off: float
    stamp: float
    event_pair: float | None = None


@dataclass(frozen=True)
class Environment:
    """The machine, the software and the settings a run was made under: names to plain values."""

    facts: Mapping[str, Scalar | None]

    def get(self, name: str) -> Scalar | None:
        return self.facts.get(name)


@dataclass(frozen=True)
class Run:
    """One run: header and records. `path` is where it is stored ('' if it is not)."""

    id: str
    started: str
    command: str
    request: Request
    plan: Plan
    environment: Environment
    devices: tuple[DeviceFacts, ...]
    overheads: tuple[tuple[str, Overheads], ...] = ()
    records: tuple[Record, ...] = ()
    path: str = ""
    finished: bool = False
    troubles: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was measured and nothing failed."""
        statuses = {record.status for record in self.records}
        return Status.OK in statuses and Status.FAILED not in statuses
