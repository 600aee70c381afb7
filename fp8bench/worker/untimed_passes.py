"""Answers requests that measure no times for verdicts, such as memory, errors and traces. Each request prepares new
states.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import NotRepeatable
from fp8bench.model import (
    Case,
    DeviceFacts,
    Measurement,
    MemoryUse,
    Products,
    Shares,
    StepEffect,
    Tape,
    TensorStatistics,
)
from fp8bench.model.raw import Settings
from fp8bench.model.step import Coverage
from fp8bench.protocols import Device, Setup, SilentPhases, Workload
from fp8bench.registry import devices, precisions, workloads
from fp8bench.worker.checked_results import check_error_figures, check_gradient_error, check_losses, check_statistics
from fp8bench.worker.device_layout import find_hardware
from fp8bench.worker.memory_pass import make_memory_pass_preparer, measure_step_memory, try_batch
from fp8bench.worker.static_scales import CalibrationResults
from fp8bench.worker.static_scales import step as take_step
from fp8bench.worker.step_counters import count_step_allocations
from fp8bench.worker.step_guards import RunningTasks, guard_untimed_pass
from fp8bench.worker.switches import precision_scope, restore_switches
from fp8bench.worker.tracing import mark_slot, record_trace, write_trace

# The number of warm-up steps. The first step creates objects that later steps use again.
_WARM_UP_STEPS = 2
# `pace` stops after timed steps that took this many seconds together.
_MAX_PACE_STEPS_SECONDS = 10.0


class ResidentState(NamedTuple):
    """A state that stays in memory, so that the parent can ask the driver how much memory this process uses.

    `started` has the threads and processes of a state. Here it is empty, because an untimed pass must not leave any
    running.
    """

    device: Device
    state: Any
    started: RunningTasks = RunningTasks()


class UntimedPasses:
    """The part of Bench that answers requests without timed steps for verdicts. `_kept` holds the states that stay in
    memory after their request. `_used` is the device of the last request.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kept: dict[str, ResidentState] = {}
        self._calibrations = CalibrationResults()
        self._used: tuple[Device, int] | None = None
        # The key and the exact results of the last case whose errors were measured.
        self._exact: Any = None
        # False for ranks, which do not measure memory growth: it takes a different number of steps on each rank, but
        # all ranks must take the same number.
        self._alone = True

    def examine(self, case: Case, facts: DeviceFacts) -> tuple[str, ...]:
        """Returns the workload's remarks on a case. Raises an error if the case is impossible for a reason that only
        the workload knows.
        """
        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            return tuple(workload.examine(setup()) or ())

    def error(self, case: Case, facts: DeviceFacts) -> dict[str, float] | str:
        # Cases that differ only in precision share their exact results. Read the stored results now, because
        # `_open_untimed_pass` deletes them.
        key = case.workload, case.params, facts.key, case.ranks
        stored_exact_results = self._exact

        def share_exact_results(make: Callable[[], Any]) -> Any:
            are_exact_results_stored = stored_exact_results is not None and stored_exact_results[0] == key
            self._exact = stored_exact_results if are_exact_results_stored else (key, make())
            return self._exact[1]

        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            if reason := workload.error_refused(dict(case.params)):
                return str(reason)
            try:
                return check_error_figures(workload.error(replace(setup(), shared=share_exact_results)))
            except NotRepeatable as error:
                return str(error)

    def statistics(self, case: Case, facts: DeviceFacts) -> tuple[TensorStatistics, ...]:
        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            return check_statistics(workload.statistics(setup()))

    def products(self, case: Case, facts: DeviceFacts) -> Products:
        from fp8bench.worker.products import inspect_products

        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            return inspect_products(workload, setup, facts)

    def effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        """Returns whether the results of a step change if its inputs change."""
        from fp8bench.worker.step_effect import check_step_effect

        with self._open_untimed_pass(case, facts, frees=True) as (workload, device, setup):
            return check_step_effect(workload, setup(), device, facts.index)

    def tape(self, case: Case, facts: DeviceFacts) -> Tape:
        """Returns the operators of one step, and their sums by phase."""
        from fp8bench.worker.tape_pass import record_tape

        with self._open_untimed_pass(case, facts, frees=True) as (workload, device, setup):
            stamper = device.stamper(facts.index)
            return record_tape(workload, setup(), precisions.get(case.precision), stamper)

    def shares(self, case: Case, facts: DeviceFacts) -> Shares | str:
        """Returns how the time of a step divides among its operators, or the reason why a compiled step has no such
        figures.
        """
        from fp8bench.worker.tape_pass import measure_step_shares

        with self._open_untimed_pass(case, facts, frees=True) as (workload, device, setup):
            return measure_step_shares(workload, setup(), device)

    def counters(
        self, case: Case, facts: DeviceFacts, unprobed: str
    ) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
        """Returns counts of memory allocations in steps, and the reasons for counts that are missing. `unprobed` is the
        reason if this worker has no allocator probe.
        """
        with self._open_untimed_pass(case, facts, frees=True) as (workload, device, setup):
            return count_step_allocations(workload, setup(), device, facts.index, unprobed)

    def coverage(self, case: Case, facts: DeviceFacts) -> Coverage | None:
        """Returns how many products of a user's model the case converts. Returns None if the workload has no such
        model.
        """
        from fp8bench.tape.coverage import measure_coverage

        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            covered = workload.covered(setup())
            if covered is None:
                return None
            # `covered.held` has the weights that the conversion lists before it changes a model.
            coverage = measure_coverage(covered.model, covered.held, covered.step, multiple=covered.multiple)
            return replace(coverage, loss=covered.loss())

    def memory(self, case: Case, facts: DeviceFacts, key: str = "", leaks: bool = True) -> MemoryUse | str:
        """Returns how many bytes each purpose (weights, gradients, ...) takes at the peak of a step, or why it is
        unknown.

        With `leaks`, also measures whether memory grows. With a key, the state stays in memory until it is released,
        so that the parent can ask the driver for the memory of this process.
        """
        with self._open_untimed_pass(case, facts) as (workload, device, setup):
            hardware = find_hardware(case, workload, facts)
            make = make_memory_pass_preparer(workload, setup, hardware)
            memory_use, state = measure_step_memory(make, device, facts.index, self._alone and leaks, hardware)
        if isinstance(memory_use, str):
            return memory_use
        if key:
            self._kept[key] = ResidentState(device, state)
        del state
        gc.collect(1)
        device.empty_cache()
        return memory_use

    def try_batch(self, case: Case, facts: DeviceFacts, memory_limit: int | None) -> int | None:
        """Takes two steps. Returns the peak bytes of the state's tensors, or None if the device does not count them.
        Raises the device's error if its memory, or the limit, is exhausted.
        """
        with self._open_untimed_pass(case, facts) as (workload, device, setup):
            return try_batch(make_memory_pass_preparer(workload, setup), device, facts.index, memory_limit)

    def pace(self, case: Case, facts: DeviceFacts, steps: int) -> tuple[float, ...]:
        """Returns the seconds of each of `steps` steps of a new state, after warm-up steps. Returns fewer if steps are
        long.

        No other case runs between these steps, so their times must not be used for verdicts.
        """
        seconds: list[float] = []
        with self._open_untimed_pass(case, facts, frees=True) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            for _ in range(_WARM_UP_STEPS + steps):
                if sum(seconds[_WARM_UP_STEPS:]) > _MAX_PACE_STEPS_SECONDS:
                    break
                device.synchronise(facts.index)
                start = time.perf_counter()
                take_step(workload, state, setup.scales, SilentPhases())
                device.synchronise(facts.index)
                seconds.append(time.perf_counter() - start)
        return tuple(seconds[_WARM_UP_STEPS:])

    def trace(self, case: Case, facts: DeviceFacts, file: str) -> None:
        """Records a trace of a few steps into a file. Profiled steps are slower."""
        with self._open_untimed_pass(case, facts) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            trace = record_trace(partial(take_step, workload, state, setup.scales), facts.kind)
            # Free the state, so that the next request does not count its memory.
            del state
            gc.collect()
        device.empty_cache()
        write_trace(trace, Path(file))

    def mark_slot(self, case: Case, facts: DeviceFacts) -> None:
        """Runs a slot between cudaProfilerStart and cudaProfilerStop, with an NVTX range for each phase."""
        with self._open_untimed_pass(case, facts) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            mark_slot(partial(take_step, workload, state, setup.scales), device, facts.index, case.id)

    def losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int) -> tuple[float, ...]:
        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            return check_losses(workload.losses(replace(setup(), draw=draw), steps))

    def gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float | None:
        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            return check_gradient_error(workload.gradient_error(setup(), self._make_case_setup(reference, facts)))

    def _select_device(self, facts: DeviceFacts) -> Device:
        # Free the exact results. `error` stores them again if they fit its case.
        self._exact = None
        device = devices.get(facts.kind)
        self._used = device, facts.index
        device.select(facts.index)
        return device

    @contextmanager
    def _open_untimed_pass(
        self, case: Case, facts: DeviceFacts, frees: bool = False
    ) -> Iterator[tuple[Workload, Device, Callable[[], Setup]]]:
        """Runs an untimed pass with the settings of the case's precision. Yields the workload, the device, and a
        function that makes a new setup.

        The `with` block may print, but must leave no thread running and no global setting changed. At the end, waits
        for the device, so that a late error of the device is raised here and not in the next request. With `frees`,
        then returns unused memory to the device.
        """
        device = self._select_device(facts)
        workload = workloads.get(case.workload)
        with precision_scope(precisions.get(case.precision)), restore_switches(), guard_untimed_pass():
            yield workload, device, partial(self._make_case_setup, case, facts)
            device.synchronise(facts.index)
        if frees:
            gc.collect(1)
            device.empty_cache()

    def _make_case_setup(self, case: Case, facts: DeviceFacts) -> Setup:
        precision = precisions.get(case.precision)
        layer_arithmetics = {kind: precisions.get(name).arithmetic(facts) for kind, name in case.precision_map}
        # Layers that a suite keeps in high precision use the carrier precision of the case.
        high_precision_arithmetic = precisions.get(precision.carried_by or precision.mode).arithmetic(facts)
        setup = Setup(
            case,
            facts,
            self._settings.seed,
            precision.arithmetic(facts),
            high_precision_arithmetic,
            layer_arithmetics,
            precision.loss_scale,
            self._settings.corpus,
        )
        return self._calibrations.apply_static_scales(workloads.get(case.workload), setup)
