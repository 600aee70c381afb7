"""Untimed requests about a case, each with separate states."""

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
from fp8bench.worker.checked_results import errors_of, gradient_error_of, losses_of, statistics_of
from fp8bench.worker.device_layout import hardware_of
from fp8bench.worker.memory_pass import memory_of_step, of_workload, try_batch
from fp8bench.worker.static_scales import Calibrations, step
from fp8bench.worker.step_counters import counters_of_step
from fp8bench.worker.step_guards import Running, apart
from fp8bench.worker.switches import restore_switches, under
from fp8bench.worker.tracing import mark_slot, record, write

# Steps before those that are timed: the first one makes what later ones keep.
_WARM_STEPS = 2
# After this time no further step is timed.
_ENOUGH_SECONDS = 10.0


class KeptState(NamedTuple):
    """A state that is observed from outside the process."""

    device: Device
    state: Any
    started: Running = Running()


class UntimedPasses:
    """The untimed part of Bench. `_kept` are states that are observed from outside; `_used` is the device of the last
    request."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kept: dict[str, KeptState] = {}
        self._calibrations = Calibrations()
        self._used: tuple[Device, int] | None = None
        # The exact results for the errors of the last case, and their key.
        self._exact: tuple[object, Any] | None = None
        # False for ranks, which must all take the same number of steps; looking for leaks takes as many as it needs.
        self._alone = True

    def examine(self, case: Case, facts: DeviceFacts) -> tuple[str, ...]:
        """Raises for an impossible case that only the workload can detect; returns its remarks."""
        with self._apart(case, facts) as (workload, _, setup):
            return tuple(workload.examine(setup()) or ())

    def error(self, case: Case, facts: DeviceFacts) -> dict[str, float] | str:
        # _apart forgets what was kept, as any other request should.
        kept_exact = self._exact
        with self._apart(case, facts) as (workload, _, setup):
            if reason := workload.error_refused(dict(case.params)):
                return str(reason)
            shared = partial(self._once, (case.workload, case.params, facts.key, case.ranks), kept_exact)
            try:
                return errors_of(workload.error(replace(setup(), shared=shared)))
            except NotRepeatable as error:
                return str(error)

    def _once(self, key: object, kept_value: tuple[object, Any] | None, make: Callable[[], Any]) -> Any:
        """Returns the value kept for `key`, or makes it; the next request other than `error` drops it."""
        self._exact = kept_value if kept_value is not None and kept_value[0] == key else (key, make())
        return self._exact[1]

    def statistics(self, case: Case, facts: DeviceFacts) -> tuple[TensorStatistics, ...]:
        with self._apart(case, facts) as (workload, _, setup):
            return statistics_of(workload.statistics(setup()))

    def products(self, case: Case, facts: DeviceFacts) -> Products:
        from fp8bench.worker.products import products_of_step

        with self._apart(case, facts) as (workload, _, setup):
            return products_of_step(workload, setup, facts)

    def effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        from fp8bench.worker.step_effect import effect_of

        with self._apart(case, facts, frees=True) as (workload, device, setup):
            return effect_of(workload, setup(), device, facts.index)

    def tape(self, case: Case, facts: DeviceFacts) -> Tape:
        from fp8bench.worker.tape_pass import tape_of_step

        with self._apart(case, facts, frees=True) as (workload, device, setup):
            stamper = device.stamper(facts.index)
            return tape_of_step(workload, setup(), precisions.get(case.precision), stamper)

    def shares(self, case: Case, facts: DeviceFacts) -> Shares | str:
        from fp8bench.worker.tape_pass import shares_of_step

        with self._apart(case, facts, frees=True) as (workload, device, setup):
            return shares_of_step(workload, setup(), device)

    def counters(
        self, case: Case, facts: DeviceFacts, unprobed: str
    ) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
        with self._apart(case, facts, frees=True) as (workload, device, setup):
            return counters_of_step(workload, setup(), device, facts.index, unprobed)

    def coverage(self, case: Case, facts: DeviceFacts) -> Coverage | None:
        """Returns how much of a model's products its case converts; None without such a model."""
        with self._apart(case, facts) as (workload, _, setup):
            covered = workload.covered(setup())
            if covered is None:
                return None
            from fp8bench.tape.coverage import coverage_of

            covering = coverage_of(covered.model, covered.held, covered.step, multiple=covered.multiple)
            return replace(covering, loss=covered.loss())

    def memory(self, case: Case, facts: DeviceFacts, key: str = "", leaks: bool = True) -> MemoryUse | str:
        """Returns the composition of a step's memory at its peak, or why it is unknown. With `leaks` also checks
        whether memory grows. With a key the state stays until it is released, so that the process can be observed from
        outside."""
        with self._apart(case, facts) as (workload, device, setup):
            hardware = hardware_of(case, workload, facts)
            make = of_workload(workload, setup, hardware)
            use, state = memory_of_step(make, device, facts.index, self._alone and leaks, hardware)
        if isinstance(use, str):
            return use
        if key:
            self._kept[key] = KeptState(device, state)
        del state
        gc.collect(1)
        device.empty_cache()
        return use

    def try_batch(self, case: Case, facts: DeviceFacts, memory_limit: int | None) -> int | None:
        with self._apart(case, facts) as (workload, device, setup):
            return try_batch(of_workload(workload, setup), device, facts.index, memory_limit)

    def pace(self, case: Case, facts: DeviceFacts, steps: int) -> tuple[float, ...]:
        """Returns the seconds of up to `steps` steps of a new state, after two that warm it up; fewer of long ones. No
        other case takes turns with it, so that verdicts cannot use them."""
        seconds: list[float] = []
        with self._apart(case, facts, frees=True) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            for _ in range(_WARM_STEPS + steps):
                if sum(seconds[_WARM_STEPS:]) > _ENOUGH_SECONDS:
                    break
                device.synchronise(facts.index)
                began = time.perf_counter()
                step(workload, state, setup.scales, SilentPhases())
                device.synchronise(facts.index)
                seconds.append(time.perf_counter() - began)
        return tuple(seconds[_WARM_STEPS:])

    def trace(self, case: Case, facts: DeviceFacts, file: str) -> None:
        """Records a few steps into a file. Profiling makes them slower."""
        with self._apart(case, facts) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            trace = record(partial(step, workload, state, setup.scales), facts.kind)
            # Its memory must not count for the next request.
            del state
            gc.collect()
        device.empty_cache()
        write(trace, Path(file))

    def mark_slot(self, case: Case, facts: DeviceFacts) -> None:
        """Runs a slot between cudaProfilerStart and cudaProfilerStop, with NVTX ranges by phase."""
        with self._apart(case, facts) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            mark_slot(partial(step, workload, state, setup.scales), device, facts.index, case.id)

    def losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int) -> tuple[float, ...]:
        with self._apart(case, facts) as (workload, _, setup):
            return losses_of(workload.losses(replace(setup(), draw=draw), steps))

    def gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float | None:
        with self._apart(case, facts) as (workload, _, setup):
            return gradient_error_of(workload.gradient_error(setup(), self._setup(reference, facts)))

    def _select_device(self, facts: DeviceFacts) -> Device:
        self._exact = None
        device = devices.get(facts.kind)
        self._used = device, facts.index
        device.select(facts.index)
        return device

    @contextmanager
    def _apart(
        self, case: Case, facts: DeviceFacts, frees: bool = False
    ) -> Iterator[tuple[Workload, Device, Callable[[], Setup]]]:
        """Runs a pass in a case's precision: it may print, and must leave neither switches nor threads changed. Yields
        the workload, the device, and a function that makes a new setup. At the end it waits for the device, which
        reports errors late, so that the next request does not fail for this one. Then, if it `frees`, memory is
        returned to the device."""
        device, workload = self._select_device(facts), workloads.get(case.workload)
        with under(precisions.get(case.precision)), restore_switches(), apart():
            yield workload, device, partial(self._setup, case, facts)
            device.synchronise(facts.index)
        if frees:
            gc.collect(1)
            device.empty_cache()

    def _setup(self, case: Case, facts: DeviceFacts) -> Setup:
        precision = precisions.get(case.precision)
        arithmetic = precision.arithmetic(facts)
        layers = {kind: precisions.get(name).arithmetic(facts) for kind, name in case.precision_map}
        # Layers that suites leave high use the precision that carries values.
        high = precisions.get(precision.carried_by or precision.mode).arithmetic(facts)
        seed, corpus = self._settings.seed, self._settings.corpus
        setup = Setup(case, facts, seed, arithmetic, high, layers, precision.loss_scale, corpus)
        return self._calibrations.apply(workloads.get(case.workload), setup)
