"""The worker's side of measuring: states, steps and slots. It answers; it decides nothing.

Runs in a process of its own (worker.py) or in the caller's (handle.LocalWorker). Only here, in what it calls, is
torch imported.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from fp8bench.measure import fusing
from fp8bench.measure.answers import errors_of, gradient_error_of, losses_of, statistics_of, wrong_of
from fp8bench.measure.calibration import calibrate, loop_pairs
from fp8bench.measure.clock import PhaseClock
from fp8bench.measure.conduct import apart, aside, silent_step, still_running, threads
from fp8bench.measure.filling import fill
from fp8bench.measure.loaded import modules_under
from fp8bench.measure.operators import operators_of
from fp8bench.measure.raw import RawSlot, RawStep, Settings
from fp8bench.measure.remembering import remember
from fp8bench.measure.static_scales import Calibrations, step
from fp8bench.measure.switches import unchanged
from fp8bench.measure.tracing import record, write
from fp8bench.model import Case, DeviceFacts, LayerScale, MemoryUse, OperatorTime, Overheads, Scalar, TensorStatistics
from fp8bench.protocols import Arithmetic, Device, Precision, ScaleBook, Setup, SilentPhases, Stamper, Workload
from fp8bench.registry import devices, import_user_modules, precisions, workloads
from fp8bench.samplers.host import counters
from fp8bench.samplers.readings import Read, Reading, grown


def _known(read: Read) -> float | None:
    return read.number if isinstance(read, Reading) else None


@dataclass
class _Prepared:
    workload: Workload
    precision: Precision
    device: Device
    index: int
    state: Any
    clock: PhaseClock
    stamper: Stamper
    started: frozenset[Thread]
    scales: ScaleBook | None

    @property
    def begin(self) -> Callable[[], None]:
        """What comes before a timed step: nothing of it is timed but the clock's own start."""
        book, clock = self.scales, self.clock
        if book is None:
            return clock.begin

        def begin() -> None:
            book.begin_step()
            clock.begin()

        return begin


class Bench:
    """States by key, and what can be asked of them."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self._settings = settings
        self._prepared: dict[str, _Prepared] = {}
        self._remembered: dict[str, tuple[Device, Any]] = {}
        self._calibrations = Calibrations()
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(settings.threads)
        import_user_modules(settings.imports)

    def close(self) -> None:
        """Put the process's threads back: without isolation it is the user's own."""
        import torch

        self._prepared.clear()
        self._remembered.clear()
        torch.set_num_threads(self._threads_before)

    def probe(self) -> tuple[DeviceFacts, ...]:
        """Every device on this machine."""
        return tuple(facts for kind in devices.names() for facts in devices.get(kind).available())

    def software(self) -> dict[str, Scalar | None]:
        """torch's build and the switches that change what it measures."""
        import torch

        return {
            "torch": str(torch.__version__),
            "torch_git": torch.version.git_version,
            "torch_config": torch.__config__.show().strip(),
            "torch_threads": torch.get_num_threads(),
            "torch_interop_threads": torch.get_num_interop_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "cudnn": torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            if torch.cuda.is_available()
            else None,
            "fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
            if torch.cuda.is_available()
            else None,
            "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
            if torch.cuda.is_available()
            else None,
        }

    def versions(self, suites: tuple[str, ...]) -> dict[str, str]:
        """The versions of those of some suites that are known here."""
        known = workloads.names(hidden=True)
        return {name: workloads.get(name).version for name in suites if name in known}

    def modules_under(self, folder: str) -> tuple[str, ...]:
        """The modules loaded from below a folder, links resolved; fp8bench's own are not the user's code."""
        return modules_under(Path(folder))

    def prepare(self, key: str, case: Case, facts: DeviceFacts) -> None:
        """Build the state of a case under `key` and run one untimed step, so that first-call costs lie behind it."""
        device = devices.get(facts.kind)
        device.select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        before = threads()
        fusing.forget_waiting()  # passes have asked too, and what they ask for is never compiled
        with unchanged(), aside(), precision.scope():
            setup = self._setup(case, facts)
            state = workload.prepare(setup)
            step(workload, state, setup, SilentPhases())
        device.synchronise(facts.index)
        stamper = device.stamper(facts.index)
        clock = PhaseClock(stamper)
        started = threads() - before
        self._prepared[key] = _Prepared(
            workload, precision, device, facts.index, state, clock, stamper, started, setup.scales
        )  # fmt: skip
        gc.collect()

    def calibrate(self, case: Case, facts: DeviceFacts) -> None:
        """Find the case's scales in data, where it asks for them. Whatever else needs them does so too."""
        devices.get(facts.kind).select(facts.index)
        with unchanged(), apart(), precisions.get(case.precision).scope():
            self._setup(case, facts)
        gc.collect()

    def quantisers(self) -> tuple[int, str]:
        """How many quantisers states have asked for wait to be compiled; why others stay eager, '' if none does."""
        return fusing.waiting(), fusing.why_eager()

    def compiler(self, facts: DeviceFacts) -> str:
        """Whether quantisers compile for a device, in words."""
        devices.get(facts.kind).select(facts.index)
        with unchanged(), aside():
            return fusing.tried(facts.key)

    def compile_quantisers(self, key: str) -> None:
        """Compile those that wait, and run a state's untimed step again: first calls are dear."""
        one = self._prepared[key]
        one.device.select(one.index)
        before = threads()
        with unchanged(), aside(), one.precision.scope():
            fusing.compile_waiting()
            if one.scales is not None:
                one.scales.begin_step()
            one.workload.step(one.state, SilentPhases())
        one.device.synchronise(one.index)
        still_running(threads() - before)  # what compiling has started may end before anything is timed
        gc.collect()

    def slot(self, key: str, calls: int, discard: int) -> RawSlot:
        """Run `discard` calls and then `calls` timed ones, back to back."""
        one = self._prepared[key]
        one.device.select(one.index)
        clock, begin, timed, state = one.clock, one.begin, one.workload.step, one.state
        marks = []
        eager, fused = fusing.calls()
        gc_was_on = gc.isenabled()
        gc.disable()
        try:
            with unchanged(), silent_step(), one.precision.scope():
                before = counters()  # ahead of the discarded calls: reading it leaves caches cold
                for _ in range(discard):
                    begin()
                    timed(state, clock)
                    clock.end()
                one.device.synchronise(one.index)
                cpu, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
                for _ in range(calls):
                    begin()
                    timed(state, clock)
                    marks.append(clock.end())
                host = time.perf_counter() - wall
                one.device.synchronise(one.index)
                wall, thread, cpu = (
                    time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - cpu,
                )  # fmt: skip
                counted = grown(before, counters())
        finally:
            if gc_was_on:
                gc.enable()
        steps = tuple(RawStep(tuple(codes), tuple(one.stamper.intervals_ns(stamps))) for codes, stamps in marks)
        one.stamper.recycle()
        eager_now, fused_now = fusing.calls()
        preemptions = _known(counted["preemptions"])
        return RawSlot(
            steps, wall, cpu, host / calls, eager_now - eager, fused_now - fused, thread,
            None if preemptions is None else int(preemptions), _known(counted["steal"]),
        )  # fmt: skip

    def loop(self, key: str, steps: int) -> None:
        """Run so many steps back to back and wait for them, untimed: somebody else looks at the device meanwhile."""
        one = self._prepared[key]
        one.device.select(one.index)
        silent = SilentPhases()
        with unchanged(), silent_step(), one.precision.scope():
            for _ in range(steps):
                if one.scales is not None:
                    one.scales.begin_step()
                one.workload.step(one.state, silent)
            one.device.synchronise(one.index)

    def error(self, case: Case, facts: DeviceFacts) -> dict[str, float]:
        """The workload's numerical errors for one case, in a pass of its own."""
        devices.get(facts.kind).select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            return errors_of(workload.error(self._setup(case, facts)))

    def statistics(self, case: Case, facts: DeviceFacts) -> tuple[TensorStatistics, ...]:
        """The values that one case works on, in a pass of its own."""
        devices.get(facts.kind).select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            return statistics_of(workload.statistics(self._setup(case, facts)))

    def memory(self, case: Case, facts: DeviceFacts, key: str = "") -> MemoryUse | str:
        """What a step's memory is made of at its highest point, or why nobody can say; a pass of its own.

        With a key its state stays until that is released: somebody may want to look at the process from outside.
        """
        device = devices.get(facts.kind)
        device.select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            found = remember(workload, lambda: self._setup(case, facts), device, facts.index)
        if isinstance(found, str):
            return found
        if key:
            self._remembered[key] = device, found.state
        use = found.use
        del found
        gc.collect(1)
        device.empty_cache()
        return use

    def fill(self, case: Case, facts: DeviceFacts, memory_limit: int | None) -> int | None:
        """Prepare a case and run two steps in so much memory; bytes of tensors at the highest point."""
        device = devices.get(facts.kind)
        device.select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            return fill(workload, lambda: self._setup(case, facts), device, facts.index, memory_limit)

    def trace(self, case: Case, facts: DeviceFacts, file: str) -> tuple[OperatorTime, ...]:
        """Record a few steps into a file, and say what takes their time.

        A pass of its own with a state of its own: the profiler makes a step slower, and so do the ranges.
        """
        device = devices.get(facts.kind)
        device.select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            setup = self._setup(case, facts)
            state = workload.prepare(setup)
            trace = record(partial(step, workload, state, setup), facts.kind)
            del state
            gc.collect()
        device.empty_cache()
        write(trace, Path(file))
        return operators_of(trace["traceEvents"])

    def losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int) -> tuple[float, ...]:
        """The losses of a case's first training steps, from that draw of its weights."""
        devices.get(facts.kind).select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            return losses_of(workload.losses(replace(self._setup(case, facts), draw=draw), steps))

    def gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float | None:
        """How far a case's first gradients are from those of another case. Both run under the first one's switches."""
        devices.get(facts.kind).select(facts.index)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        with unchanged(), apart(), precision.scope():
            return gradient_error_of(workload.gradient_error(self._setup(case, facts), self._setup(reference, facts)))

    def check(self, key: str) -> str:
        """What is wrong with a state after its steps; '' if nothing is."""
        one = self._prepared[key]
        with unchanged(), apart():
            return wrong_of(one.workload.check(one.state))

    def scales(self, key: str) -> tuple[LayerScale, ...]:
        """The scales that a state has from data, as they are after its steps."""
        book = self._prepared[key].scales
        return book.standings() if book is not None else ()

    def release(self, key: str) -> tuple[str, ...]:
        """Forget a state and give its memory back; returns the threads it leaves behind. Unknown keys are fine."""
        remembered = self._remembered.pop(key, None)
        if remembered is not None:
            device = remembered[0]
            del remembered
            gc.collect()
            device.empty_cache()
            return ()
        one = self._prepared.pop(key, None)
        if one is None:
            return ()
        device, started = one.device, one.started
        del one
        gc.collect()
        device.empty_cache()
        return tuple(still_running(started))

    def overheads(self, facts: DeviceFacts) -> Overheads:
        """What looking costs with that device's clock."""
        device = devices.get(facts.kind)
        device.select(facts.index)
        return calibrate(device, facts.index)

    def bare_loop(self, case: Case, facts: DeviceFacts, steps: int, rounds: int) -> tuple[list[float], list[float]]:
        """Seconds a step in the harness and in a bare loop, alternating, one pair a round."""
        key = f"bare-loop:{case.id}"
        self.prepare(key, case, facts)
        try:
            one = self._prepared[key]
            with one.precision.scope():
                silent = SilentPhases()
                return loop_pairs(
                    lambda: one.workload.step(one.state, silent), lambda: self.slot(key, steps, 0), steps, rounds
                )
        finally:
            self.release(key)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether any device calls that exception an exhausted memory."""
        return any(devices.get(kind).is_out_of_memory(error) for kind in devices.names())

    def recover(self) -> None:
        """Give back what an aborted request may have left behind."""
        gc.collect()
        for kind in devices.names():
            if kind in {one.device.kind for one in self._prepared.values()}:
                devices.get(kind).empty_cache()

    def _setup(self, case: Case, facts: DeviceFacts) -> Setup:
        precision = precisions.get(case.precision)
        arithmetic = precision.arithmetic(facts)
        layers: Mapping[str, Arithmetic] = {
            kind: precisions.get(name).arithmetic(facts) for kind, name in case.precision_map
        }
        high = precisions.get(precision.carried_by or precision.name).arithmetic(facts)
        settings = self._settings
        setup = Setup(case, facts, settings.seed, arithmetic, high, layers, precision.loss_scale, settings.corpus)
        return self._calibrations.applied(workloads.get(case.workload), setup)
