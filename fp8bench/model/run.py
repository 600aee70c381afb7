"""A run, what it was made under, and what its samples say; and a plan that is cut into cells, each of them a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.errors import UsageError
from fp8bench.model.measured import Interval, Record
from fp8bench.model.planned import Case, DeviceFacts, Plan, Scalar
from fp8bench.model.request import Request
from fp8bench.model.words import OF_ANOTHER_KIND, Label, Status, Verdict

# The door of runs of a model of one's own.
PROFILE = "profile"
# The suite that measures what a device does at most.
CEILINGS = "ceilings"
# An effect so many times as large as identical code may differ by stands beside a label for what disturbed it.
_LARGE = 3


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

    def also(self, facts: Mapping[str, Scalar | None]) -> Environment:
        return Environment({**self.facts, **facts})


@dataclass(frozen=True)
class Resumption:
    """When and under what an unfinished run was gone on with."""

    started: str
    command: str
    environment: Environment


@dataclass(frozen=True)
class Run:
    """One run: header and records. `path` is where it is stored ('' if it is not), `origin` the door it came in by.

    `cell` is the part of a fleet's plan that it is ('8f3a2c1d/4'), '' where it is none; of such a run `bits` say what
    its devices computed before anything was measured, and `clock_ahead` how many seconds this machine's clock was ahead
    of the one that stamps the store's files, None where it gave no time.

    `notes` were taken while it ran; `troubles` were met by whoever read the file.
    """

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
    notes: tuple[str, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    origin: str = "suite"
    cell: str = ""
    bits: tuple[OperationBits, ...] = ()
    clock_ahead: float | None = None

    def __repr__(self) -> str:
        """On one line: all the samples would fill pages."""
        state = "finished" if self.finished else "unfinished"
        return f"<Run {self.id}: {self.request.suite}, {len(self.records)} cases, {state}, {self.path or 'not stored'}>"

    @property
    def fleet_plan(self) -> str:
        """The id of the plan that it is a cell of, '' for none."""
        return self.cell.rpartition("/")[0]

    @property
    def ok(self) -> bool:
        """Whether something was measured and nothing failed."""
        statuses = {record.status for record in self.records}
        return Status.OK in statuses and Status.FAILED not in statuses


@dataclass(frozen=True)
class Finding:
    """What the samples of one case say. Derived from the record at any time, never stored as the only truth.

    `phases` are best-case seconds that sum to `best_seconds`; those in `below_floor` are too short to be told from
    the cost of their own markers. `ratio` is that of best cases, `typical` that of the means over all calls; a case
    called the same would not have been with one in `rarest` calls that takes twice as long. `floor` is how far the
    A/A interval reaches from 1. `why` says why it has no verdict, or what a reader may hold against the one it has.
    `label_reasons` is what there is to say of some labels beyond their meaning; `hard` are those, its own or its
    reference's, that leave it no verdict.
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
    label_reasons: tuple[tuple[Label, str], ...] = ()
    hard: tuple[Label, ...] = ()
    typical: Interval | None = None
    rarest: int | None = None

    @property
    def doubtful(self) -> bool:
        """Whether a label forbids showing the verdict as a plain fact."""
        return self.doubts(self.ratio)

    def doubts(self, ratio: Interval | None) -> bool:
        """The same of a verdict by that ratio: what disturbs a time does not undo a large effect."""
        labels = {label for label in self.labels if label.casts_doubt}
        return bool(labels & OF_ANOTHER_KIND) or (bool(labels) and not self._outweighs(ratio))

    def _outweighs(self, ratio: Interval | None) -> bool:
        if ratio is None or self.floor is None or not 0 < ratio.point < math.inf:
            return False
        return abs(math.log(ratio.point)) >= _LARGE * math.log1p(self.floor)

    @property
    def judged(self) -> bool:
        """Whether it has a verdict on speed."""
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)

    @property
    def verdict_words(self) -> str:
        """The verdict as everyone is told it: 'faster', 'perhaps faster' where a label casts doubt on it."""
        return f"perhaps {self.verdict}" if self.judged and self.doubtful else self.verdict.value


@dataclass(frozen=True)
class Cell:
    """One group of the plan, by its setting: its cases are measured together, by one process. `cases` names them.

    `kind` is what it was planned for, 'cpu' or 'h200', '' where that is not known; a machine that measures it needs so
    many `gpus` for its device to be among them.
    """

    setting: str
    cases: tuple[str, ...] = ()
    kind: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class FleetPlan:
    """A request, and the cells that it was cut into where it was planned, by that version of fp8bench."""

    id: str
    created: str
    command: str
    request: Request
    cells: tuple[Cell, ...]
    fp8bench: str

    def name_of(self, number: int) -> str:
        """What a run of that cell says it is."""
        return f"{self.id}/{number}"


@dataclass(frozen=True)
class Attempt:
    """That a worker had a cell measured: where, when, and how the process ended; None while it has not."""

    host: str
    process: int
    started: str
    seconds: float = 0.0
    code: int | None = None


@dataclass(frozen=True)
class OperationBits:
    """What an operation on a device gave for fixed numbers: a digest of its bits, several where they were not the same
    every time."""

    device: str
    dtype: str
    operation: str
    digests: tuple[str, ...]


class CellStatus(StrEnum):
    """DONE has a whole run; BEGUN was cut off; FAILED ended without one. Of one that is DAMAGED files are not as they
    were written, so that nobody knows whether it was begun, or failed."""

    DONE = "done"
    RUNNING = "running"
    BEGUN = "begun"
    FAILED = "failed"
    DAMAGED = "damaged"
    WAITING = "waiting"


@dataclass(frozen=True)
class CellState:
    """Where a cell stands. `run` is that of its newest run, `machine` where that was measured; `why` it failed, or
    which cases of a run that is done did. `cases` counts what became of that run's, by their status. `damage` says
    which of its files are not as they were written."""

    number: int
    cell: Cell
    status: CellStatus
    run: str = ""
    machine: str = ""
    why: str = ""
    attempts: tuple[Attempt, ...] = ()
    cases: tuple[tuple[str, int], ...] = ()
    damage: tuple[str, ...] = ()


# What torch and the libraries below it read while they run. Others are written by themselves: inductor names its cache
# there, CUDA how it loads.
READ_BY_TORCH = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC", "OMP_SCHEDULE",
    "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "MKL_DYNAMIC",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_VERBOSE",
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_LINALG_PREFER_CUSOLVER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING", "PYTORCH_TUNABLEOP_FILENAME", "PYTORCH_TUNABLEOP_NUMERICAL_CHECK",
    "PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS", "PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS",
    "PYTORCH_TUNABLEOP_MAX_WARMUP_DURATION_MS", "PYTORCH_TUNABLEOP_MAX_WARMUP_ITERATIONS",
    "PYTORCH_TUNABLEOP_ICACHE_FLUSH_ENABLED", "PYTORCH_TUNABLEOP_ROTATING_BUFFER_SIZE",
    "PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED", "PYTORCH_TUNABLEOP_ROCBLAS_ENABLED", "MALLOC_ARENA_MAX", "MALLOC_CONF",
    "LD_PRELOAD",
)  # fmt: skip
# Of these, what lowers the precision of products behind a precision's name.
LOWERING = ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE")
# What a switch's fact in a run's environment begins with; the fact of those that are not as in a fresh process.
SWITCH = "switch "
SWITCHES_SET = "switches_set"


def is_on(variable: str, environment: Mapping[str, str], on: str, off: str, purpose: str) -> bool:
    """Whether a variable of fp8bench's own says `on`, or nothing; `purpose` is what `off` is for ('to do without')."""
    asked = environment.get(variable, "") or on
    if asked not in (on, off):
        raise UsageError(
            f"{variable} is {asked!r:.80}. Set it to {off} {purpose}, or to {on}, which is what is done without it."
        )
    return asked == on
