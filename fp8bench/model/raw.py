"""The settings of a worker, and the raw samples that it answers with."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.model.ranks import RankCalls

# Raised when a request, or a value that goes to a worker or comes back, changes so that an older worker and a newer
# parent, or the reverse, would misunderstand each other. tests/worker/test_handshake.py holds what it stands for.
PROTOCOL = 5
# Set to 'eager' it turns the compiling of quantisers off.
QUANTISERS_VARIABLE = "FP8BENCH_QUANTISERS"
# Set to 'unchecked' native products are timed without being compared with fp64: for a runtime that computes nothing.
PRODUCTS_VARIABLE = "FP8BENCH_PRODUCTS"


@dataclass(frozen=True)
class Settings:
    """The settings of a worker."""

    threads: int = 1
    seed: int = 0
    imports: tuple[str, ...] = ()
    corpus: str | None = None


@dataclass(frozen=True)
class StateCheck:
    """The fault of a state after its steps, or ''; and the share of its numbers that are not finite, where the workload
    allows that."""

    wrong: str = ""
    not_finite: float = 0.0


@dataclass(frozen=True)
class RawStep:
    """One timed step: codes[i] is the phase of intervals_ns[i]."""

    codes: tuple[int, ...]
    intervals_ns: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return sum(self.intervals_ns) * 1e-9


@dataclass(frozen=True)
class Filling:
    """Before each `calls` calls the device is kept busy for `seconds`, so that the host runs ahead and no call meets an
    empty queue."""

    calls: int
    seconds: float


@dataclass(frozen=True)
class RawReplay:
    """One phase of a step done again by itself: its time, its operators and the bytes kept for it; or why that cannot
    be."""

    seconds: float = 0.0
    operators: int = 0
    bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class RawSlot:
    """The timed steps of a slot, with host and process clocks over all of them, and what the system counted in that
    time. `host_seconds` is what the host took to enqueue a step, in the fastest call: where a queue is full, the host
    waits for the device. `eager_quantisers` and `fused_quantisers` count calls, discarded ones included, that ran as
    separate operations and compiled. `vector_bits` are the compiled ones', where there were several widths. With
    several ranks `steps` are the slowest rank's, call by call, and `ranks` what each took.
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
