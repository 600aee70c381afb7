"""Defines a run, its environment, and the findings from its samples. Also defines the plan of a fleet, of which each
cell is measured as a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fp8bench.errors import UsageError
from fp8bench.model.measured import Interval, Record
from fp8bench.model.planned import Case, DeviceFacts, Plan, Scalar
from fp8bench.model.request import Request
from fp8bench.model.words import LABELS_OF_OTHER_WORK, Label, Status, Verdict

# The `origin` of runs that profile a user's model.
PROFILE_ORIGIN = "profile"
# The `origin` of runs that compare callables, and the name of their workload.
BENCH = "bench"

CEILINGS = "ceilings"
# If the ratio differs from 1 by at least this many noise floors, labels of disturbances, such as 'noisy', do not cast
# doubt on the verdict.
_LARGE_EFFECT_NOISE_FACTOR = 3


# The largest share of a step's time that time stamps may take on a GPU. If they would take more, phases are marked in
# only one of several steps.
MARKS_SHARE = 0.005


@dataclass(frozen=True)
class Overheads:
    """The cost of measuring on this machine in seconds: of a marker, of a marker that does nothing, of a time stamp,
    and of a pair of events on the device (None if it could not be measured).

    If a GPU idles while its queue is filled, although it should be busy, `why_idle` is the reason; otherwise ''.
    """

    marker_on: float
    marker_off: float
    stamp: float
    event_pair: float | None = None
    why_idle: str = ""

    @property
    def stamp_cost(self) -> float:
        """The cost of a time stamp on the host or on the device, whichever is larger."""
        return max(self.stamp, self.event_pair or 0.0)


@dataclass(frozen=True)
class Environment:
    """The machine, software and settings of a run, by name."""

    facts: Mapping[str, Scalar | None]

    def get(self, name: str) -> Scalar | None:
        return self.facts.get(name)

    def also(self, facts: Mapping[str, Scalar | None]) -> Environment:
        return Environment({**self.facts, **facts})


@dataclass(frozen=True)
class Resumption:
    """When and in which environment an unfinished run was resumed."""

    started: str
    command: str
    environment: Environment


@dataclass(frozen=True)
class Run:
    """One run: its header and its records. `path` is its file, '' if it is not stored. `origin` is the command that
    made the run. If the run belongs to a fleet's plan, `cell` names its part of the plan, such as '8f3a2c1d/4'. `notes`
    were written during the run. `troubles` were found when the file was read.
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
        record_statuses = {record.status for record in self.records}
        return Status.OK in record_statuses and Status.FAILED not in record_statuses


@dataclass(frozen=True)
class PhaseGain:
    """The seconds of one phase in a step of the case, and in a step of its reference.

    `saved_seconds` is positive if the phase is faster in the case. `low` and `high` are the bounds of the saved
    seconds. `control` is the difference between the reference and its control, which run the same code.
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
        """Whether the phase surely takes more or less time than in the reference: the interval of the saved seconds
        excludes 0, and the saved seconds exceed the difference between the reference and its control, which run the
        same code.
        """
        return (self.low > 0 or self.high < 0) and abs(self.saved_seconds) > self.control


@dataclass(frozen=True)
class Finding:
    """The conclusions from the samples of one case. They are computed from its record whenever they are needed.

    `phases` are the best-case seconds of each phase, which sum to `best_seconds`. Phases in `below_floor` are too short
    to be distinguished from the cost of their markers. `ratio` compares the best-case times of case and reference, and
    `typical` compares their means over all calls. `floor` is the noise floor: how far the interval of the A/A ratio
    (between two copies of the reference) reaches from 1. `why` is the reason for a missing verdict, or an objection to
    the verdict. `label_reasons` explain some labels. `hard` are the labels of this case or its reference that prevent a
    verdict. The saved seconds in `gains` sum to the difference that `ratio` measures.
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
        """Returns whether a label casts doubt on a verdict that is based on this ratio. If the ratio is far from 1,
        only the labels in LABELS_OF_OTHER_WORK do.
        """
        labels = {label for label in self.labels if label.casts_doubt}
        return bool(labels & LABELS_OF_OTHER_WORK) or (bool(labels) and not self._outweighs_doubts(ratio))

    def _outweighs_doubts(self, ratio: Interval | None) -> bool:
        if ratio is None or self.floor is None or not 0 < ratio.point < math.inf:
            return False
        return abs(math.log(ratio.point)) >= _LARGE_EFFECT_NOISE_FACTOR * math.log1p(self.floor)

    @property
    def is_judged(self) -> bool:
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME)

    @property
    def verdict_words(self) -> str:
        """The verdict as a text, with 'perhaps' if a label casts doubt on it: 'perhaps faster'."""
        return f"perhaps {self.verdict}" if self.is_judged and self.doubtful else self.verdict.value


@dataclass(frozen=True)
class Cell:
    """One part of a fleet's plan: a group, whose `cases` one process measures together.

    `kind` is the kind of device for which the cell was planned, such as 'cpu' or 'h200', '' if unknown. A machine
    needs at least `gpus` GPUs to measure the cell.
    """

    setting: str
    cases: tuple[str, ...] = ()
    kind: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class FleetPlan:
    """A request, and the cells into which this version of fp8bench divided it."""

    id: str
    created: str
    command: str
    request: Request
    cells: tuple[Cell, ...]
    fp8bench: str

    def name_of(self, number: int) -> str:
        return f"{self.id}/{number}"


@dataclass(frozen=True)
class CellAttempt:
    """An attempt to measure a cell: on which host, when, and the exit code of the process (None while it runs)."""

    host: str
    process: int
    started: str
    seconds: float = 0.0
    code: int | None = None


class CellStatus(StrEnum):
    """The status of a cell. DONE: it has a complete run. BEGUN: its run was interrupted. FAILED: its process ended
    without a complete run. DAMAGED: its files were changed, so it is unknown whether it is done.
    """

    DONE = "done"
    RUNNING = "running"
    BEGUN = "begun"
    FAILED = "failed"
    DAMAGED = "damaged"
    WAITING = "waiting"


@dataclass(frozen=True)
class CellState:
    """The progress of a cell. `run` is the newest run of the cell, `machine` is the machine of this run, and `cases`
    counts the cases of this run by status. `why` is the reason why the cell failed, or names the cases that failed.
    `damage` describes changed files.
    """

    number: int
    cell: Cell
    status: CellStatus
    run: str = ""
    machine: str = ""
    why: str = ""
    attempts: tuple[CellAttempt, ...] = ()
    cases: tuple[tuple[str, int], ...] = ()
    damage: tuple[str, ...] = ()


# Environment variables that torch and its libraries read. Variables that torch itself sets are left out.
TORCH_VARIABLES = (
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
# Environment variables that lower the precision of products in every case, whatever its precision is.
PRECISION_LOWERING_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE")
# In the environment of a run, the names of torch's switches begin with SWITCH_PREFIX. The fact SWITCHES_SET lists the
# switches that were changed.
SWITCH_PREFIX = "switch "
SWITCHES_SET = "switches_set"
# The name of a fact: the number of cores that other processes used when a run began.
BUSY_CORES_FACT = "busy_cores"
# The facts about software and settings that affect times. If one of them differs, comparisons and histories give no
# verdict.
TIME_CONDITION_FACTS = (
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
# The facts about a device that its driver reports as settings.
DEVICE_SETTINGS = ("driver", "power_cap", "ecc", "mig")


def is_switched_on(variable: str, environment: Mapping[str, str], on: str, off: str, purpose: str) -> bool:
    """Returns whether an environment variable has the value `on` or is unset. Raises UsageError for a value other than
    `on` and `off`. `purpose` completes the error's advice to set it to `off`.
    """
    value = environment.get(variable, "") or on
    if value not in (on, off):
        raise UsageError(f"{variable} is {value!r:.80}. Set it to {off} {purpose}, or to {on}, which is the default.")
    return value == on
