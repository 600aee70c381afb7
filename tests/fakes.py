"""A worker that measures nothing: scripted steps advance a fake clock by nanoseconds.

It tests rounds and groups with exact numbers and without sleeping. A script belongs to a mode ('fp8'); the control may
have a different one ("fp32'"). Faults are scripted by request number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8bench.errors import WorkerError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.measure.arm import MeasuredArm
from fp8bench.measure.handle import Worker
from fp8bench.model import (
    CELL_PHASES,
    Case,
    DeviceFacts,
    Group,
    LayerScale,
    Level,
    MemoryUse,
    PlannedCase,
    Products,
    Record,
    Rotation,
    Segments,
    SlotSample,
    Status,
    StepEffect,
    Support,
    TensorStatistics,
    Timing,
    Work,
)
from fp8bench.model.raw import Filling, RawSlot, RawStep, StateCheck
from fp8bench.protocols import SilentObserver

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0+cpu")
GPU = DeviceFacts("cuda", 0, "a GPU", 80 << 30, "2.13.0", (9, 0))
PARAMS = (("m", 64), ("n", 64), ("k", 64))
MS = 1_000_000
CAST, GEMM, UNATTRIBUTED = (CELL_PHASES.index(name) for name in ("cast", "gemm", "unattributed"))

Step = tuple[Sequence[int], Sequence[int]]


def gemm_steps(*nanoseconds: int) -> Callable[[int], Step]:
    """Steps of one phase that cycle through `nanoseconds`."""
    return lambda call: ((GEMM,), (nanoseconds[call % len(nanoseconds)],))


@dataclass
class Fault:
    """`error` strikes at the `at`-th request of that name (from 1), and at every later one up to `until`."""

    name: str
    error: Exception
    at: int = 1
    until: int | None = None


@dataclass
class Script:
    """The behaviour of one mode: step times, preparation time, memory, faults.

    `memory` is its share of the worker's capacity, `peak` its answer in the memory pass. `quantisers` are those
    requested by the first step and by each later one; `uncompilable` is the reason why none compiles.
    """

    step: Callable[[int], Step] = field(default_factory=lambda: gemm_steps(10 * MS))
    memory: int = 1
    preparing_ns: int = 0
    faults: Sequence[Fault] = ()
    errors: Mapping[str, float] | str = field(default_factory=dict)
    statistics: tuple[TensorStatistics, ...] = ()
    wrong: str = ""
    threads_left: Sequence[str] = ()
    peak: int | None = None
    scales: tuple[LayerScale, ...] = ()
    quantisers: Sequence[int] = ()
    uncompilable: str = ""
    effect: StepEffect | None = None
    wrong_product: str = ""
    uncapturable: str = ""
    replay_phases: RawStep | None = None


def broken(name: str, at: int = 1, error: Exception | None = None) -> Script:
    """A script with one fault, by default an exception of the workload."""
    return Script(faults=[Fault(name, error or WorkerFault("ValueError", "no such thing", "the trace"), at)])


def lasting(milliseconds: float, **options: Any) -> Script:
    """A script whose every step is one product of this length."""
    return Script(gemm_steps(round(milliseconds * MS)), **options)


class FakeWorker(Worker):
    """A fake worker.

    `log` holds every request as (name, label, ...); a label is the mode, with a prime for the control. `unanswered` is
    the device's message if it cannot be opened. `restarts` counts ended processes. Like a real worker, it restarts at
    the next request, but not just to release lost states.
    """

    def __init__(self, scripts: Mapping[str, Script], capacity: int = 1000) -> None:
        self.scripts = scripts
        self.capacity = capacity
        self.now_ns = 0
        self.restarts = 0
        self.alive = False
        self.log: list[tuple[Any, ...]] = []
        self.limits: list[tuple[str, float]] = []
        self.remembered: list[str] = []
        self.unanswered: WorkerError | None = None
        self._labels: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._asked: dict[tuple[str, str], int] = {}
        self._compiled: dict[str, int] = {}
        self._failed: dict[str, str] = {}

    def clock(self) -> float:
        return self.now_ns / 1e9

    def slots(self, label: str | None = None) -> list[tuple[Any, ...]]:
        """The requested slots, optionally of one label."""
        return [entry for entry in self.log if entry[0] == "slot" and label in (None, entry[1])]

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        self.alive = True
        self.limits.append((name, limit))
        return getattr(self, f"_{name}")(*arguments)

    def release(self, key: str) -> tuple[str, ...]:
        return super().release(key) if self.alive else ()

    def close(self) -> None:
        self.alive = False
        self._calls.clear()
        self._compiled.clear()
        self._failed.clear()

    def restart(self) -> None:
        self.restarts += self.alive
        self.close()

    @property
    def held(self) -> list[str]:
        """The labels of the stored states."""
        return [self._labels[key] for key in self._calls]

    def _strike(self, name: str, label: str) -> None:
        """Counts the request and raises its scripted fault. A lost worker loses its states."""
        asked = self._asked[name, label] = self._asked.get((name, label), 0) + 1
        for fault in self._script(label).faults:
            if fault.name == name and fault.at <= asked <= (fault.until or fault.at):
                if isinstance(fault.error, WorkerLost | WorkerHung):
                    self.restart()
                raise fault.error

    def _script(self, label: str) -> Script:
        return self.scripts.get(label) or self.scripts.get(label.rstrip("'")) or Script()

    def _prepare(self, key: str, case: Case, facts: DeviceFacts) -> None:
        label = case.mode + "'" * ("'" in key)
        self.log.append(("prepare", label))
        assert key not in self._calls, f"{key} was prepared twice"
        self._strike("prepare", label)
        if sum(self._script(other).memory for other in self.held) + self._script(label).memory > self.capacity:
            raise WorkerFault("OutOfMemoryError", "no memory left", "the trace", out_of_memory=True)
        self._labels[key], self._calls[key] = label, 0
        self.now_ns += self._script(label).preparing_ns

    def _trial(self, case: Case, facts: DeviceFacts) -> str:
        self.log.append(("trial", case.mode))
        self._strike("trial", case.mode)
        return self._script(case.mode).wrong_product

    def _waiting(self, label: str) -> int:
        """The number of quantisers that a mode has requested and not compiled. Modes share none."""
        mode = label.rstrip("'")
        steps = 1 + max(
            (count for key, count in self._calls.items() if self._labels[key].rstrip("'") == mode), default=0
        )
        asked = sum(self._script(label).quantisers[:steps])
        return 0 if mode in self._failed else asked - self._compiled.get(mode, 0)

    def _quantisers(self) -> tuple[int, str]:
        modes = dict.fromkeys(label.rstrip("'") for label in self.held)
        return sum(self._waiting(mode) for mode in modes), next(iter(self._failed.values()), "")

    def _compile_quantisers(self, key: str) -> None:
        label = self._labels[key]
        mode = label.rstrip("'")
        waiting = self._waiting(label)
        self.log.append(("compile", label, waiting))
        assert waiting, "nothing waits to be compiled"
        self._strike("compile", label)
        if self._script(label).uncompilable:
            self._failed[mode] = self._script(label).uncompilable
        else:
            self._compiled[mode] = self._compiled.get(mode, 0) + waiting
        self._calls[key] += 1

    def _calibrate(self, case: Case, facts: DeviceFacts) -> None:
        self.log.append(("calibrate", case.mode))
        self._strike("calibrate", case.mode)

    def _scales(self, key: str) -> tuple[LayerScale, ...]:
        return self._script(self._labels[key]).scales

    def _slot(self, key: str, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        assert key in self._calls, f"{key} has no state"
        label = self._labels[key]
        self.log.append(("slot", label, calls, discard, *filter(None, [filling])))
        self._strike("slot", label)
        first = self._calls[key]
        self._calls[key] += calls + discard
        steps = [self._script(label).step(first + call) for call in range(discard + calls)]
        self.now_ns += sum(sum(intervals) for _, intervals in steps)
        kept = steps[discard:]
        seconds = sum(sum(intervals) for _, intervals in kept) / 1e9
        mode, asked = label.rstrip("'"), sum(self._script(label).quantisers[: 1 + self._calls[key]])
        fused = min(asked, self._compiled.get(mode, 0)) * (calls + discard)
        eager = asked * (calls + discard) - fused
        raw = tuple(RawStep(tuple(codes), tuple(ns)) for codes, ns in kept)
        return RawSlot(raw, seconds, seconds, seconds / calls, eager, fused, vector_bits=(256,) if fused else ())

    def _loop(self, key: str, steps: int) -> float:
        label = self._labels[key]
        self.log.append(("loop", label, steps))
        self._strike("loop", label)
        nanoseconds = steps * sum(self._script(label).step(0)[1])
        self.now_ns += nanoseconds
        return nanoseconds / 1e9

    def _capture(self, key: str) -> str:
        label = self._labels[key]
        self.log.append(("capture", label))
        self._strike("capture", label)
        return self._script(label).uncapturable

    def _replay(self, key: str, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        """A replay takes half as long as a step."""
        label = self._labels[key]
        self.log.append(("replay", label, calls, discard, filling))
        self._strike("replay", label)
        steps = [self._script(label).step(call)[1] for call in range(calls)]
        raw = tuple(RawStep((UNATTRIBUTED,), (sum(intervals) // 2,)) for intervals in steps)
        return RawSlot(raw, 1.0, 1.0, 2e-5)

    def _replay_phases(self, key: str) -> RawStep | None:
        self.log.append(("replay_phases", self._labels[key]))
        self._strike("replay_phases", self._labels[key])
        return self._script(self._labels[key]).replay_phases

    def _rotation(self, key: str) -> Rotation:
        return Rotation(12, 5 << 20)

    def _release(self, key: str) -> tuple[str, ...]:
        held = self._calls.pop(key, None)
        if key in self.remembered:
            self.remembered.remove(key)
        label = self._labels.get(key, "?")
        self.log.append(("release", label))
        return tuple(self._script(label).threads_left) if held is not None else ()

    def _check(self, key: str) -> StateCheck:
        label = self._labels[key]
        self._strike("check", label)
        return StateCheck(self._script(label).wrong)

    def _answers(self, facts: DeviceFacts) -> None:
        self.log.append(("answers", facts.key))
        if self.unanswered is not None:
            raise self.unanswered

    def _statistics(self, case: Case, facts: DeviceFacts) -> tuple[TensorStatistics, ...]:
        self._strike("statistics", case.mode)
        return self._script(case.mode).statistics

    def _effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        self._strike("effect", case.mode)
        return self._script(case.mode).effect or StepEffect(True)

    def _memory(self, case: Case, facts: DeviceFacts, key: str, leaks: bool = True) -> MemoryUse | str:
        self.log.append(("memory", case.mode))
        assert not self.held, "memory was measured while states were held"
        self._strike("memory", case.mode)
        peak = self._script(case.mode).peak
        if key:
            self.remembered.append(key)
        return "the script has none" if peak is None else MemoryUse(peak)

    def _trace(self, case: Case, facts: DeviceFacts, file: str) -> None:
        self.log.append(("trace", case.mode, file))
        assert not self.held, "a trace was recorded while states were held"
        self._strike("trace", case.mode)

    def _products(self, case: Case, facts: DeviceFacts) -> Products:
        self.log.append(("products", case.mode))
        self._strike("products", case.mode)
        return Products(0, None)

    def _error(self, case: Case, facts: DeviceFacts) -> dict[str, float] | str:
        self.log.append(("error", case.mode))
        self._strike("error", case.mode)
        errors = self._script(case.mode).errors
        return errors if isinstance(errors, str) else dict(errors)


class Listener(SilentObserver):
    """Records every event it receives."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float]] = []

    def working(self, case: Case, doing: str, share: float) -> None:
        self.told.append((case.mode, doing, share))


def planned(
    precision: str, level: Level = Level.NATIVE, skip: str = "", flops: float = 0.0, cache: str = "hot"
) -> PlannedCase:
    """One case of the group that all tests of measuring share."""
    case = Case("gemm", PARAMS if cache == "hot" else (*PARAMS, ("cache", cache)), precision, "cpu")
    return PlannedCase(case, Support(level, f"{precision} is {level}"), Work(flops), skip)


def group(*cases: PlannedCase, reference: int = 0) -> Group:
    return Group(cases, reference)


def arm(
    precision: str, level: Level = Level.NATIVE, control: bool = False, cache: str = "hot", facts: DeviceFacts = CPU
) -> MeasuredArm:
    """An arm as a group creates it; the control's key has a prime."""
    one = planned(precision, level, cache=cache)
    return MeasuredArm(one.case.id + "'" * control, one, facts)


def timing(*slots: Sequence[int], phases: Sequence[str] = ("gemm",), start: int = 0) -> Timing:
    """One call per slot: each argument holds the cells of a call in nanoseconds."""
    samples = tuple(
        SlotSample(start + number, (tuple(cells),), sum(cells) / 1e9, sum(cells) / 1e9)
        for number, cells in enumerate(slots)
    )
    return Timing(Segments(tuple(phases), (0,) * len(phases)), samples)


def called(*slots: Sequence[int]) -> Timing:
    """Slots of several calls with one cell each, in nanoseconds."""
    samples = [SlotSample(number, tuple(zip(calls)), 0.0, 0.0) for number, calls in enumerate(slots)]
    return Timing(Segments(("gemm",), (0,)), tuple(samples))


def steady(nanoseconds: int, rounds: int, start: int = 0) -> Timing:
    """The same time in every round."""
    return timing(*[(nanoseconds,)] * rounds, start=start)


def record(
    timing: Timing | None, precision: str = "bf16", level: Level = Level.NATIVE, device: str = "cpu", **options: Any
) -> Record:
    """The record that a group would create from these samples."""
    case = Case("gemm", PARAMS, precision, device)
    return Record(case, Support(level, ""), options.pop("status", Status.OK), timing=timing, **options)


def by_mode(records: Sequence[Record]) -> dict[str, Record]:
    return {record.case.mode: record for record in records}
