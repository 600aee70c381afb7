"""The settings of a worker, and the raw samples that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.ranks import RankCalls

# The version of the protocol between the parent process and the worker. It is raised when processes of an older and a
# newer version would misunderstand each other. tests/worker/test_handshake.py records what each version covers.
PROTOCOL = 5
# If this environment variable is 'eager', quantisers are not compiled.
QUANTISERS_VARIABLE = "FP8BENCH_QUANTISERS"
# If this environment variable is 'unchecked', native products are timed without comparing their results with fp64. A
# simulated CUDA runtime needs this, because its products compute nothing.
PRODUCT_CHECKS_VARIABLE = "FP8BENCH_PRODUCTS"


@dataclass(frozen=True)
class Settings:
    """The settings with which a worker starts. `corpus` is the path of the token file, if a suite reads text."""

    threads: int = 1
    seed: int = 0
    imports: tuple[str, ...] = ()
    corpus: str | None = None


@dataclass(frozen=True)
class StateCheck:
    """The result of checking the tensors of a case after its steps. `wrong` describes the fault, or is ''. For
    workloads that allow infinite and NaN numbers, `not_finite` is their share.
    """

    wrong: str = ""
    not_finite: float = 0.0


@dataclass(frozen=True)
class RawStep:
    """One timed step, as the intervals between its phase markers: `codes[i]` is the phase of `intervals_ns[i]`."""

    codes: tuple[int, ...]
    intervals_ns: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return sum(self.intervals_ns) * 1e-9


@dataclass(frozen=True)
class Filling:
    """How the queue of a device is kept filled. Before every `calls` calls, the device gets work for `seconds`, so that
    the host can enqueue these calls before the device reaches them.
    """

    calls: int
    seconds: float


@dataclass(frozen=True)
class RawReplay:
    """One phase of a step that was repeated alone: its time, the number of its operators and the bytes that were stored
    to repeat it. If the phase cannot be repeated, `why` is the reason.
    """

    seconds: float = 0.0
    operators: int = 0
    bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class RawSlot:
    """The timed steps of a slot, with the host clock, the process clock and the system's counters over all these steps.

    `host_seconds` is the time that the host took to enqueue a step, in the fastest call. It contains waiting for the
    device if the queue was full. `eager_quantisers` counts calls of quantisers that ran as separate operations, and
    `fused_quantisers` counts calls of compiled quantisers. Both also count calls in discarded steps. `vector_bits` are
    the vector widths of compiled quantisers, if several exist. With several ranks, `steps` holds the slowest rank of
    each call, and `ranks` has every rank.

    `thread_seconds` is the CPU time of the thread that runs the steps, and `waited_seconds` is how long this thread had
    work but no core. Both are None if unknown.
    """

    steps: tuple[RawStep, ...]
    wall_seconds: float
    cpu_seconds: float
    host_seconds: float
    eager_quantisers: int = 0
    fused_quantisers: int = 0
    thread_seconds: float | None = None
    preemptions: int | None = None
    stolen_seconds: float | None = None
    waited_seconds: float | None = None
    vector_bits: tuple[int, ...] = ()
    ranks: tuple[RankCalls, ...] = ()
    memory_retries: int | None = None
