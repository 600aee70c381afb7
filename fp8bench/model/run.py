"""A run, its environment, and findings from its samples; and the cells of a fleet's plan, each of them a run."""

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

# The origin of runs of a user's model.
PROFILE = "profile"
# The origin, and the workload, of runs that compare callables.
BENCH = "bench"

CEILINGS = "ceilings"
# An effect this many times the floor outweighs labels of disturbances.
_LARGE = 3


# On a GPU stamps may take this share of a step; with more, only one step in several has its phases marked.
MARKS_SHARE = 0.005


@dataclass(frozen=True)
class Overheads:
    """The cost of measuring on this machine, in seconds; None where it could not be measured.

    `why_idle` is the reason if a GPU idles, and does not work, while its queue is filled; '' elsewhere.
    """

    marker_on: float
    marker_off: float
    stamp: float
    event_pair: float | None = None
    why_idle: str = ""

    @property
    def stamp_cost(self) -> float:
        """The cost of a stamp on the host or on the device, whichever is more."""
        return max(self.stamp, self.event_pair or 0.0)


@dataclass(frozen=True)
class Environment:
    """Machine, software and settings of a run: names to plain values."""

    facts: Mapping[str, Scalar | None]

    def get(self, name: str) -> Scalar | None:
        return self.facts.get(name)

    def also(self, facts: Mapping[str, Scalar | None]) -> Environment:
        return Environment({**self.facts, **facts})


@dataclass(frozen=True)
class Resumption:
    """When, and in which environment, an unfinished run was resumed."""

    started: str
    command: str
    environment: Environment


@dataclass(frozen=True)
class Run:
    """One run: header and records. `path` is where it is stored, '' if it is not; `origin` the command that made it.

    `cell` names the part of a fleet's plan ('8f3a2c1d/4'), '' for none. `notes` were taken while it ran; `troubles`
    were met when its file was read.
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

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"<Run {self.id}: {self.request.suite}, {len(self.records)} cases, {state}, {self.path or 'not stored'}>"

    @property
    def ok(self) -> bool:
        statuses = {record.status for record in self.records}
        return Status.OK in statuses and Status.FAILED not in statuses


@dataclass(frozen=True)
class PhaseGain:
    """Seconds of one phase in a step of the case and of its reference.

    `saved` is positive where the case is faster; `low` and `high` bound it. `control` is how far reference and control,
    which run the same code, differ.
    """

    phase: str
    seconds: float
    reference_seconds: float
    low: float
    high: float
    control: float = 0.0

    @property
    def saved_seconds(self) -> float:
        return self.reference_seconds - self.seconds

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0 and identical code differs by less."""
        return (self.low > 0 or self.high < 0) and abs(self.saved_seconds) > self.control


@dataclass(frozen=True)
class Finding:
    """The finding from the samples of one case; computed from the record whenever it is needed.

    `phases` are best-case seconds that sum to `best_seconds`; those in `below_floor` are too short to distinguish from
    the cost of their markers. `ratio` is that of best cases, `typical` that of the means over all calls. `floor` is how
    far the A/A interval reaches from 1. `why` is the reason for a missing verdict, or against it. `label_reasons`
    explain some labels of this case; `hard` are those of it or of its reference that exclude a verdict. `gains` sum to
    the difference that `ratio` measures.
    """

    case: Case
    verdict: Verdict
    best_seconds: float | None = None
    median_seconds: float | None = None
    spread: float | None = None
    ratio: Interval | None = None
    floor: float | None = None
    phases: tuple[tuple[str, float], ...] = ()
    below_floor: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()
    why: str = ""
    label_reasons: tuple[tuple[Label, str], ...] = ()
    hard: tuple[Label, ...] = ()
    typical: Interval | None = None
    gains: tuple[PhaseGain, ...] = ()

    @property
    def doubtful(self) -> bool:
        return self.doubts(self.ratio)

    def doubts(self, ratio: Interval | None) -> bool:
        """Whether a label forbids showing a verdict by that ratio as a plain fact. A large effect outweighs
        disturbances."""
        labels = {label for label in self.labels if label.casts_doubt}
        return bool(labels & OF_ANOTHER_KIND) or (bool(labels) and not self._outweighs(ratio))

    def _outweighs(self, ratio: Interval | None) -> bool:
        if ratio is None or self.floor is None or not 0 < ratio.point < math.inf:
            return False
        return abs(math.log(ratio.point)) >= _LARGE * math.log1p(self.floor)

    @property
    def is_judged(self) -> bool:
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)

    @property
    def verdict_words(self) -> str:
        """Returns the verdict in words: 'faster', or 'perhaps faster' where a label casts doubt on it."""
        return f"perhaps {self.verdict}" if self.is_judged and self.doubtful else self.verdict.value


@dataclass(frozen=True)
class Cell:
    """One group of a fleet's plan: its cases are measured together, by one process. `cases` names them.

    `kind` is the device it was planned for, 'cpu' or 'h200', '' if unknown; a machine needs `gpus` GPUs to have that
    device.
    """

    setting: str
    cases: tuple[str, ...] = ()
    kind: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class FleetPlan:
    """A request, and the cells it was cut into, by the named version of fp8bench."""

    id: str
    created: str
    command: str
    request: Request
    cells: tuple[Cell, ...]
    fp8bench: str

    def name_of(self, number: int) -> str:
        return f"{self.id}/{number}"


@dataclass(frozen=True)
class Attempt:
    """A worker's attempt at a cell: where, when, and the exit code of the process; None while it runs."""

    host: str
    process: int
    started: str
    seconds: float = 0.0
    code: int | None = None


class CellStatus(StrEnum):
    """DONE has a complete run; BEGUN was cut off; FAILED ended without one. The files of a DAMAGED cell were altered,
    so its state is unknown."""

    DONE = "done"
    RUNNING = "running"
    BEGUN = "begun"
    FAILED = "failed"
    DAMAGED = "damaged"
    WAITING = "waiting"


@dataclass(frozen=True)
class CellState:
    """Where a cell stands. `run` is its newest run, `machine` where that was measured; `why` the cell failed, or which
    cases did. `cases` counts that run's cases by status. `damage` names altered files."""

    number: int
    cell: Cell
    status: CellStatus
    run: str = ""
    machine: str = ""
    why: str = ""
    attempts: tuple[Attempt, ...] = ()
    cases: tuple[tuple[str, int], ...] = ()
    damage: tuple[str, ...] = ()


# Variables that the user may set for torch and the libraries below it, without those that these set themselves.
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
# Variables that lower the precision of products whatever the case's precision.
LOWERING = ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE")
# Prefix of a switch's fact in a run's environment; and the fact that lists switches changed from a fresh process.
SWITCH = "switch "
SWITCHES_SET = "switches_set"
# How many cores others kept busy when a run began.
BUSY_CORES = "busy_cores"
# Software and settings that times depend on: neither a comparison nor a history judges across them.
CONDITIONS = (
    "fp8bench",
    "python",
    "torch",
    "torch_git",
    "cudnn",
    "cublaslt",
    "casts",
    SWITCHES_SET,
    "cpu_count",
    "cpu_affinity",
    "cpu_governor",
    "cpu_turbo_off",
    "smt",
    "cgroup_cpu_max",
)
# Settings of a device, by its driver.
DEVICE_SETTINGS = ("driver", "power_cap", "ecc", "mig")


def is_on(variable: str, environment: Mapping[str, str], on: str, off: str, purpose: str) -> bool:
    """Whether an environment variable is `on` or unset. Raises UsageError for anything but `on` and `off`; `purpose`
    completes 'Set it to `off` ...'."""
    value = environment.get(variable, "") or on
    if value not in (on, off):
        raise UsageError(
            f"{variable} is {value!r:.80}. Set it to {off} {purpose}, or to {on}, which is what is done without it."
        )
    return value == on
