"""The worker's side of measuring: it prepares states and runs steps and slots when asked; it decides nothing.

It runs in a separate process (worker/main.py) or in the caller's (LocalWorker of measure/handle.py). torch is imported
only here and in what this module calls.
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
from fp8bench.worker.clock import PhaseClock, calibrate, loop_pairs, marks_of_step
from fp8bench.worker.faults import DescribedFault
from fp8bench.worker.finite import FiniteState
from fp8bench.worker.prepared import Prepared, State, asks_nobody, begins_alone, bytes_of, flush_of, rotation
from fp8bench.worker.static_scales import step
from fp8bench.worker.step_guards import apart, aside, nothing_left_on_error, running, still_running
from fp8bench.worker.switches import recorded_values, refuse_distorted_reference, restore_switches, switches, under
from fp8bench.worker.untimed_passes import UntimedPasses


def _is_of_fp8bench(workload: Workload) -> bool:
    """Whether only fp8bench's code launches work between phases; the suite `model` runs a user's model."""
    module = type(workload).__module__
    return module.startswith("fp8bench.") and module != "fp8bench.workloads.model"


class Bench(UntimedPasses):
    """Holds prepared states by key and answers requests about them. Each public method is a request of the parent."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from fp8bench.worker.trial import Trials

        super().__init__(settings)
        self._prepared: dict[str, Prepared] = {}
        self._trials = Trials()
        self._clock: Callable[[Stamper], PhaseClock] = PhaseClock
        self._unmarked: Callable[[], Phases] = SilentPhases
        self._meet: Callable[[], None] = begins_alone
        self._is_so_anywhere: Callable[[bool], bool] = asks_nobody
        refuse_distorted_reference()
        import_user_modules(settings.imports, switches())
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(settings.threads)
        self._switches = recorded_values()

    def close(self) -> None:
        import torch

        self._prepared.clear()
        self._kept.clear()
        torch.set_num_threads(self._threads_before)

    def probe(self) -> tuple[DeviceFacts, ...]:
        from fp8bench.worker.trial import installed_packages

        packages = installed_packages()
        available = [facts for kind in devices.names() for facts in devices.get(kind).available()]
        return tuple(replace(facts, packages=packages) for facts in available)

    def backend(self, name: str) -> str:
        """Imports a backend that is installed; returns why it cannot be used, or ''."""
        from fp8bench.worker.trial import why_not

        return why_not(name)

    def trial(self, case: Case, facts: DeviceFacts) -> str:
        """Tries the products of a case that a foreign library computes, once per worker and precision. Returns what is
        wrong with them, or ''."""
        devices.get(facts.kind).select(facts.index)
        with restore_switches(), aside():
            return self._trials.wrong(case, facts)

    def software(self) -> dict[str, Scalar | None]:
        """Returns facts of torch's build, and the value of every switch before anything was measured."""
        from fp8bench.worker.torch_state import torch_build

        return {**torch_build(), **self._switches}

    def versions(self, suites: tuple[str, ...]) -> dict[str, str]:
        registered = workloads.names(hidden=True)
        return {name: workloads.get(name).version for name in suites if name in registered}

    def modules_under(self, folder: str) -> tuple[str, ...]:
        return modules_under(Path(folder))

    def prepare(self, key: str, case: Case, facts: DeviceFacts) -> None:
        """Builds the state of a case under `key` and runs one untimed step, so that first-call costs are paid."""
        device = self._select_device(facts)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        already_running = running()
        fusing.forget_waiting()  # quantisers that untimed passes called are never compiled
        cache = CACHE.of(dict(case.params))
        marks: list[int] = []
        begins: list[int] = []
        # 1. The first step pays for one-time work: allocations, and kernels that are chosen or compiled.
        with under(precision), restore_switches(), aside(), nothing_left_on_error():
            make = partial(self._state_after_one_step, workload, case, facts)
            first = make()
            states = rotation(first, make, facts, device) if cache == ROTATING else (first,)
            # On a GPU, find the marks that may share a stamp. Not in a user's suite or model, whose kernels may not be
            # seen; nor in a compiled model, which is to be called as it will be timed.
            is_compiled = dict(case.params).get("compile", "no") != "no"
            if facts.accelerated and not is_compiled and _is_of_fp8bench(workload):
                marks, begins = marks_of_step(partial(step, workload, first.held, first.scales))
        # 2. Prepare the contents of the cache before a call.
        flush = flush_of(facts) if cache == COLD else None
        device.synchronise(facts.index)
        stamper = device.stamper(facts.index)
        clock = self._clock(stamper)
        if begins:
            clock.share(marks, begins)
        started = running() - already_running
        # 3. Keep the state for slots, and note what it left running, to report that on release.
        self._prepared[key] = Prepared(
            workload,
            precision,
            device,
            facts.index,
            states,
            clock,
            stamper,
            started,
            flush,
            facts.cache_bytes,
            meet=self._meet,
            is_so_anywhere=self._is_so_anywhere,
        )
        gc.collect()

    def _state_after_one_step(self, workload: Workload, case: Case, facts: DeviceFacts) -> State:
        setup = self._setup(case, facts)
        held = workload.prepare(setup)
        finite = FiniteState(held)
        step(workload, held, setup.scales, self._unmarked())
        finite.begin(held)
        return State(held, setup.scales, finite, (setup.arithmetic, *setup.layers.values()))

    def rotation(self, key: str) -> Rotation:
        prepared = self._prepared[key]
        return Rotation(len(prepared.states), bytes_of(prepared.state))

    def calibrate(self, case: Case, facts: DeviceFacts) -> None:
        """Finds the case's scales in data, if it requests that. Other requests that need the scales do the same."""
        with self._apart(case, facts) as (_, _, setup):
            setup()
        gc.collect()

    def quantisers(self) -> tuple[int, str]:
        """Returns how many quantisers wait to be compiled, and why others stay eager ('' if none does)."""
        return fusing.waiting(), fusing.why_eager()

    def compiler(self, facts: DeviceFacts) -> str:
        self._select_device(facts)
        with restore_switches(), aside():
            return fusing.try_to_compile(facts.key)

    def compile_quantisers(self, key: str) -> None:
        """Compiles the waiting quantisers, and repeats a state's untimed step, because first calls are slow."""
        prepared = self._prepared_as(key)
        already_running = running()
        with under(prepared.precision), restore_switches(), aside():
            fusing.compile_waiting()
            step(prepared.workload, prepared.state, prepared.scales, SilentPhases())
        prepared.device.synchronise(prepared.index)
        still_running(running() - already_running)  # lets background work of the compiler end before anything is timed
        gc.collect()

    def slot(self, key: str, calls: int, discard: int, filling: Filling | None = None) -> RawSlot:
        return self._prepared_as(key).slot(calls, discard, filling)

    def capture(self, key: str) -> str:
        return self._prepared_as(key).capture()

    def replay(self, key: str, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        return self._prepared_as(key).replay_slot(calls, discard, filling)

    def replay_phases(self, key: str) -> RawStep | None:
        return self._prepared_as(key).replay_phases()

    def loop(self, key: str, steps: int) -> float:
        return self._prepared_as(key).loop(steps)

    def hold_phase(self, key: str, phase: str, most_bytes: int) -> RawReplay:
        return self._prepared_as(key).hold_phase(phase, most_bytes)

    def loop_phase(self, key: str, times: int) -> float:
        return self._prepared_as(key).loop_phase(times)

    def drop_phase(self, key: str) -> str:
        return self._prepared_as(key).drop_phase()

    def begin_late(self, key: str) -> None:
        self._prepared_as(key).begin_late()

    def is_late_due(self, key: str) -> bool:
        return self._prepared_as(key).is_late_due

    def end_late(self, key: str) -> LateSteps:
        return self._prepared_as(key).end_late()

    def check(self, key: str) -> StateCheck:
        return self._prepared_as(key).check()

    def scales(self, key: str) -> tuple[LayerScale, ...]:
        prepared = self._prepared[key]
        states = prepared.scales.states() if prepared.scales is not None else ()
        arithmetics = prepared.states[0].arithmetics
        return (*states, *(scale for arithmetic in arithmetics for scale in arithmetic.layer_scales()))

    def release(self, key: str) -> tuple[str, ...]:
        """Forgets a state and frees its memory; returns the names of what it leaves running. Unknown keys are fine."""
        released = self._kept.pop(key, None) or self._prepared.pop(key, None)
        if released is None:
            return ()
        device, started = released.device, released.started
        # The state must be gone before its memory is freed.
        del released
        gc.collect()
        device.empty_cache()
        return tuple(still_running(started))

    def overheads(self, facts: DeviceFacts) -> Overheads:
        return calibrate(self._select_device(facts), facts.index)

    def answers(self, facts: DeviceFacts) -> None:
        """Opens a device and waits for it; raises the device's error if it does not answer."""
        self._select_device(facts).synchronise(facts.index)

    def ceiling_rates(self, facts: DeviceFacts) -> tuple[Rate, ...]:
        return tuple(ceilings.wanted_rates(facts))

    def ceiling(self, facts: DeviceFacts, rate: Rate, seconds: float) -> Rate:
        return ceilings.one_more(self._select_device(facts), facts, rate, seconds)

    def conform(self, mode: str, facts: DeviceFacts) -> tuple[Conformity, ...]:
        from fp8bench.worker.conformity import conformities

        device, precision = self._select_device(facts), precisions.get(mode)
        with under(precision), restore_switches(), apart():
            results = conformities(precision, facts, self._settings.seed)
        device.empty_cache()
        return results

    def bare_loop(self, case: Case, facts: DeviceFacts, steps: int, rounds: int) -> tuple[list[float], list[float]]:
        key = f"bare-loop:{case.id}"
        self.prepare(key, case, facts)
        # Both loops use one state: another one would have different memory addresses.
        try:
            prepared = self._prepared[key]
            with prepared.precision.scope():
                bare = partial(prepared.workload.step, prepared.state, SilentPhases())
                return loop_pairs(bare, lambda: self.slot(key, steps, 0), steps, rounds)
        finally:
            self.release(key)

    def recover(self, fault: DescribedFault) -> DescribedFault:
        """Frees what an aborted request holds. If the device then does not answer, the fault was not exhausted memory:
        after an assert or an illegal address cuBLAS reports in every call that it is not initialised, as it does
        without memory."""
        self._exact = None
        try:
            gc.collect()
            for kind in devices.names():  # the failed request may have been the first, before anything was prepared
                devices.get(kind).empty_cache()
            if self._used is not None:
                device, index = self._used
                device.synchronise(index)
        except Exception:  # noqa: BLE001 - whatever a broken device says
            return fault._replace(out_of_memory=False)
        return fault

    def _prepared_as(self, key: str) -> Prepared:
        prepared = self._prepared[key]
        self._used = prepared.device, prepared.index
        prepared.device.select(prepared.index)
        return prepared
