"""Answers the parent's requests: prepares states of cases, and runs steps and slots of them.

It runs in a worker process (worker/main.py) or in the caller's process (LocalWorker of measure/handle.py). Only this
module, and modules that it calls, import torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8bench.model import (
    Case,
    DeviceFacts,
    LateSteps,
    LayerScale,
    Overheads,
    Rate,
    Rotation,
    Scalar,
)
from fp8bench.model.promises import Conformity
from fp8bench.model.raw import Filling, RawReplay, RawSlot, RawStep, Settings, StateCheck
from fp8bench.protocols import Phases, SilentPhases, Stamper, Workload
from fp8bench.protocols.axes import CACHE, COLD, ROTATING
from fp8bench.registry import devices, precisions, workloads
from fp8bench.user_code import import_user_modules, modules_under
from fp8bench.worker import ceilings, fusing
from fp8bench.worker.clock import PhaseStampClock, find_shared_phase_marks, measure_overheads, time_alternating_loops
from fp8bench.worker.faults import FaultDescription
from fp8bench.worker.finite import InitialFiniteElements
from fp8bench.worker.prepared import (
    PreparedCase,
    State,
    count_bytes,
    make_cache_flush,
    make_rotation,
    skip_rank_barrier,
)
from fp8bench.worker.static_scales import step
from fp8bench.worker.step_guards import (
    end_processes_on_error,
    guard_untimed_pass,
    list_running_tasks,
    stdout_to_stderr,
    wait_for_running_tasks,
)
from fp8bench.worker.switches import (
    precision_scope,
    read_recorded_switches,
    refuse_distorted_reference,
    restore_switches,
    switches,
)
from fp8bench.worker.untimed_passes import UntimedPasses


def _is_built_in_workload(workload: Workload) -> bool:
    """Returns whether all kernels of a workload are launched by fp8bench's code. False for a user's workload, and for
    the suite `model`, which runs a user's model.
    """
    module = type(workload).__module__
    return module.startswith("fp8bench.") and module != "fp8bench.workloads.model"


class Bench(UntimedPasses):
    """Answers the parent's requests: each public method is one kind of request. Keeps the prepared states of cases by
    key.
    """

    def __init__(self, settings: Settings) -> None:
        import torch

        from fp8bench.worker.trial import ProductTrials

        super().__init__(settings)
        self._prepared: dict[str, PreparedCase] = {}
        self._trials = ProductTrials()
        self._make_clock: Callable[[Stamper], PhaseStampClock] = PhaseStampClock
        self._make_unmarked_phases: Callable[[], Phases] = SilentPhases
        self._meet_ranks: Callable[[], None] = skip_rank_barrier
        self._any_rank: Callable[[bool], bool] = bool  # with a single process, "any rank" is this one
        refuse_distorted_reference()
        import_user_modules(settings.imports, switches())
        # Without isolation, this is the caller's process, which gets its number of threads back.
        self._original_threads = torch.get_num_threads()
        torch.set_num_threads(settings.threads)
        self._switches = read_recorded_switches()

    def close(self) -> None:
        import torch

        self._prepared.clear()
        self._kept.clear()
        torch.set_num_threads(self._original_threads)

    def probe(self) -> tuple[DeviceFacts, ...]:
        from fp8bench.worker.trial import list_installed_packages

        installed_packages = list_installed_packages()
        available_devices = [facts for kind in devices.names() for facts in devices.get(kind).available()]
        return tuple(replace(facts, packages=installed_packages) for facts in available_devices)

    def backend(self, name: str) -> str:
        """Imports a backend that is installed. Returns why the backend cannot be used, or ''."""
        from fp8bench.worker.trial import explain_missing_backend

        return explain_missing_backend(name)

    def trial(self, case: Case, facts: DeviceFacts) -> str:
        """Checks whether an external library computes the products of a case correctly. Each precision is checked
        once per worker. Returns a description of the error, or ''.
        """
        devices.get(facts.kind).select(facts.index)
        with restore_switches(), stdout_to_stderr():
            return self._trials.find_error(case, facts)

    def software(self) -> dict[str, Scalar | None]:
        """Returns facts about torch's build, and the values of all recorded switches before the first measurement."""
        from fp8bench.worker.torch_state import describe_torch_build

        return {**describe_torch_build(), **self._switches}

    def versions(self, suites: tuple[str, ...]) -> dict[str, str]:
        registered_suites = workloads.names(hidden=True)
        return {name: workloads.get(name).version for name in suites if name in registered_suites}

    def modules_under(self, folder: str) -> tuple[str, ...]:
        return modules_under(Path(folder))

    def prepare(self, key: str, case: Case, facts: DeviceFacts) -> None:
        """Builds the state of a case under `key`, and runs one untimed step, so that one-time work is not timed."""
        device = self._select_device(facts)
        workload = workloads.get(case.workload)
        precision = precisions.get(case.precision)
        running_tasks_before = list_running_tasks()
        fusing.forget_waiting_quantisers()  # quantisers that only untimed passes requested need no compilation
        cache_mode = CACHE.of(dict(case.params))
        phase_mark_codes: list[int] = []
        stamp_sharing_indices: list[int] = []
        # 1. Run the first step, which allocates memory, and chooses or compiles kernels.
        with precision_scope(precision), restore_switches(), stdout_to_stderr(), end_processes_on_error():
            make_stepped_state = partial(self._make_state_after_step, workload, case, facts)
            first_state = make_stepped_state()
            states = (
                make_rotation(first_state, make_stepped_state, facts, device)
                if cache_mode == ROTATING
                else (first_state,)
            )
            # On a GPU, adjacent phases may share a time stamp if no kernel is launched between them. A user's suite or
            # model shares no stamps, because torch may not see its kernels. A compiled model shares none either,
            # because its first call must be like the timed ones.
            is_compiled = dict(case.params).get("compile", "no") != "no"
            if facts.accelerated and not is_compiled and _is_built_in_workload(workload):
                phase_mark_codes, stamp_sharing_indices = find_shared_phase_marks(
                    partial(step, workload, first_state.held, first_state.scales)
                )
        # 2. For a cold cache, make the function that flushes the cache before each call.
        flush_cache = make_cache_flush(facts) if cache_mode == COLD else None
        device.synchronise(facts.index)
        stamper = device.stamper(facts.index)
        clock = self._make_clock(stamper)
        if stamp_sharing_indices:
            clock.share(phase_mark_codes, stamp_sharing_indices)
        tasks_started_by_case = list_running_tasks() - running_tasks_before
        # 3. Store the state for timed slots. Store also the threads and processes that its preparation started, because
        # `release` reports them.
        self._prepared[key] = PreparedCase(
            workload,
            precision,
            device,
            facts.index,
            states,
            clock,
            stamper,
            tasks_started_by_case,
            flush_cache,
            facts.cache_bytes,
            wait_for_ranks=self._meet_ranks,
            is_true_on_any_rank=self._any_rank,
        )
        # Collect garbage now, because it is not collected in timed slots.
        gc.collect()

    def _make_state_after_step(self, workload: Workload, case: Case, facts: DeviceFacts) -> State:
        setup = self._make_case_setup(case, facts)
        prepared_workload_state = workload.prepare(setup)
        # Create the checker before the step, because only numbers that were finite before can be lost.
        finiteness_checker = InitialFiniteElements(prepared_workload_state)
        step(workload, prepared_workload_state, setup.scales, self._make_unmarked_phases())
        finiteness_checker.begin(prepared_workload_state)
        return State(
            prepared_workload_state, setup.scales, finiteness_checker, (setup.arithmetic, *setup.layers.values())
        )

    def rotation(self, key: str) -> Rotation:
        prepared_case = self._prepared[key]
        return Rotation(len(prepared_case.states), count_bytes(prepared_case.state))

    def calibrate(self, case: Case, facts: DeviceFacts) -> None:
        """Calibrates the static scales of a case with data, if the case has them. Later requests use these scales."""
        with self._open_untimed_pass(case, facts) as (_, _, setup):
            setup()
        gc.collect()

    def quantisers(self) -> tuple[int, str]:
        """Returns how many quantisers (emulated casts) wait for compilation, and why quantisers that could not be
        compiled run eagerly ('' if no compilation failed).
        """
        return fusing.count_waiting_quantisers(), fusing.explain_eager_quantisers()

    def compiler(self, facts: DeviceFacts) -> str:
        self._select_device(facts)
        with restore_switches(), stdout_to_stderr():
            return fusing.try_to_compile(facts.key)

    def compile_quantisers(self, key: str) -> None:
        """Compiles the waiting quantisers, and runs an untimed step, because the first calls of compiled quantisers
        are slow.
        """
        prepared_case = self._select_case(key)
        running_tasks_before = list_running_tasks()
        with precision_scope(prepared_case.precision), restore_switches(), stdout_to_stderr():
            fusing.compile_waiting_quantisers()
            step(prepared_case.workload, prepared_case.state, prepared_case.scales, SilentPhases())
        prepared_case.device.synchronise(prepared_case.index)
        # also waits for the compiler's background work, which would disturb the timing
        wait_for_running_tasks(list_running_tasks() - running_tasks_before)
        gc.collect()

    def slot(self, key: str, calls: int, discard: int, filling: Filling | None = None) -> RawSlot:
        return self._select_case(key).slot(calls, discard, filling)

    def capture(self, key: str) -> str:
        return self._select_case(key).capture()

    def replay(self, key: str, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        return self._select_case(key).replay_slot(calls, discard, filling)

    def replay_phases(self, key: str) -> RawStep | None:
        return self._select_case(key).replay_phases()

    def loop(self, key: str, steps: int) -> float:
        return self._select_case(key).loop(steps)

    def hold_phase(self, key: str, phase: str, most_bytes: int) -> RawReplay:
        return self._select_case(key).hold_phase(phase, most_bytes)

    def loop_phase(self, key: str, times: int) -> float:
        return self._select_case(key).loop_phase(times)

    def drop_phase(self, key: str) -> str:
        return self._select_case(key).drop_phase()

    def begin_late(self, key: str) -> None:
        self._select_case(key).begin_late()

    def is_late_due(self, key: str) -> bool:
        return self._select_case(key).is_late_due

    def end_late(self, key: str) -> LateSteps:
        return self._select_case(key).end_late()

    def check(self, key: str) -> StateCheck:
        return self._select_case(key).check()

    def scales(self, key: str) -> tuple[LayerScale, ...]:
        prepared_case = self._prepared[key]
        static_scales = prepared_case.scales.states() if prepared_case.scales is not None else ()
        arithmetics = prepared_case.states[0].arithmetics
        return (*static_scales, *(scale for arithmetic in arithmetics for scale in arithmetic.layer_scales()))

    def release(self, key: str) -> tuple[str, ...]:
        """Frees a state. Returns the names of the threads and processes that it leaves running; () for an unknown
        key.
        """
        released_case = self._kept.pop(key, None) or self._prepared.pop(key, None)
        if released_case is None:
            return ()
        device = released_case.device
        tasks_started_by_case = released_case.started
        # The last reference to the state must be deleted before its memory can be freed.
        del released_case
        gc.collect()
        device.empty_cache()
        return tuple(wait_for_running_tasks(tasks_started_by_case))

    def overheads(self, facts: DeviceFacts) -> Overheads:
        return measure_overheads(self._select_device(facts), facts.index)

    def answers(self, facts: DeviceFacts) -> None:
        """Waits for a device, and raises the device's error if it does not work."""
        self._select_device(facts).synchronise(facts.index)

    def ceiling_rates(self, facts: DeviceFacts) -> tuple[Rate, ...]:
        return tuple(ceilings.list_rates(facts))

    def ceiling(self, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
        return ceilings.measure_next_run(self._select_device(facts), facts, rate, seconds)

    def conform(self, mode: str, facts: DeviceFacts) -> tuple[Conformity, ...]:
        from fp8bench.worker.conformity import compare_arithmetics

        device = self._select_device(facts)
        precision = precisions.get(mode)
        with precision_scope(precision), restore_switches(), guard_untimed_pass():
            conformities = compare_arithmetics(precision, facts, self._settings.seed)
        device.empty_cache()
        return conformities

    def bare_loop(self, case: Case, facts: DeviceFacts, steps: int, rounds: int) -> tuple[list[float], list[float]]:
        key = f"bare-loop:{case.id}"
        self.prepare(key, case, facts)
        # Both loops use the same state, because the addresses of its tensors affect the time of a step.
        try:
            prepared_case = self._prepared[key]
            with prepared_case.precision.scope():
                take_unmarked_step = partial(prepared_case.workload.step, prepared_case.state, SilentPhases())
                return time_alternating_loops(take_unmarked_step, lambda: self.slot(key, steps, 0), steps, rounds)
        finally:
            self.release(key)

    def recover(self, fault: FaultDescription) -> FaultDescription:
        """Frees the memory of a failed request. If the device does not work afterwards, returns a fault that is not a
        lack of memory.

        After a device-side assert or an illegal address, every cuBLAS call reports that it is not initialised. It gives
        the same error when memory is exhausted.
        """
        self._exact = None
        try:
            gc.collect()
            # the failed request may have been the first one, so that no device is known yet
            for kind in devices.names():
                devices.get(kind).empty_cache()
            if self._used is not None:
                device, index = self._used
                device.synchronise(index)
        except Exception:  # noqa: BLE001 - whatever a broken device says
            return fault._replace(out_of_memory=False)
        return fault

    def _select_case(self, key: str) -> PreparedCase:
        prepared_case = self._prepared[key]
        self._used = prepared_case.device, prepared_case.index
        prepared_case.device.select(prepared_case.index)
        return prepared_case
