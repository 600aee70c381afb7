"""The worker's side of measuring: states, steps and slots. It answers; it decides nothing.

Runs in a process of its own (worker.py) or in the caller's (handle.LocalWorker). Only here, in what it calls, is
torch imported.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.model import (
    Case,
    Ceilings,
    DeviceFacts,
    LayerScale,
    MemoryUse,
    OperatorTime,
    Overheads,
    Products,
    Rotation,
    Scalar,
    StepEffect,
    Tape,
    TensorStatistics,
)
from fp8bench.model.conformity import Conformity
from fp8bench.model.raw import Filling, RawReplay, RawSlot, Settings, StateCheck
from fp8bench.protocols import Device, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import CACHE, COLD, ROTATING
from fp8bench.registry import devices, precisions, workloads
from fp8bench.user_code import import_user_modules, modules_under
from fp8bench.worker import caches, ceilings, fusing, tape_pass
from fp8bench.worker.beside import Beside, none_left_by_a_fault, running, still_running
from fp8bench.worker.checked_results import errors_of, gradient_error_of, losses_of, statistics_of
from fp8bench.worker.clock import PhaseClock, calibrate, loop_pairs
from fp8bench.worker.conformity import conformities
from fp8bench.worker.faults import Fault
from fp8bench.worker.finite import FiniteState
from fp8bench.worker.gpu_libraries import torch_build
from fp8bench.worker.memory_pass import memory_of_step, of_workload, try_batch
from fp8bench.worker.prepared import Prepared, State
from fp8bench.worker.products import products_of_step
from fp8bench.worker.static_scales import Calibrations, step
from fp8bench.worker.step_effect import effect_of
from fp8bench.worker.step_guards import apart, aside
from fp8bench.worker.switches import recorded, refuse_bent, switches, unchanged, under
from fp8bench.worker.trace_operators import operators_of
from fp8bench.worker.tracing import record, write
from fp8bench.worker.trial import Trials, installed, why_not


class _Kept(NamedTuple):
    device: Device
    state: Any
    started: Beside = Beside()


class Bench:
    """States by key, and what can be asked of them. `_kept` are those of a pass that are looked at from outside."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self._settings = settings
        self._prepared: dict[str, Prepared] = {}
        self._kept: dict[str, _Kept] = {}
        self._calibrations = Calibrations()
        self._used: tuple[Device, int] | None = None
        self._trials = Trials()
        refuse_bent()
        import_user_modules(settings.imports, switches())
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(settings.threads)
        self._switches = recorded()

    def close(self) -> None:
        """Put the process's threads back: without isolation it is the user's own."""
        import torch

        self._prepared.clear()
        self._kept.clear()
        torch.set_num_threads(self._threads_before)

    def probe(self) -> tuple[DeviceFacts, ...]:
        """Every device on this machine."""
        packages = installed()
        found = (facts for kind in devices.names() for facts in devices.get(kind).available())
        return tuple(replace(facts, packages=packages) for facts in found)

    def backend(self, name: str) -> str:
        """Why a backend that is installed cannot be used, '' if it can. Imports it."""
        return why_not(name)

    def trial(self, case: Case, facts: DeviceFacts) -> str:
        """What is wrong with the products of a case's precisions where somebody else's code makes them; '' if nothing.

        Looked at once for every precision in the life of a worker.
        """
        devices.get(facts.kind).select(facts.index)
        with unchanged(), aside():
            return self._trials.wrong(case, facts)

    def software(self) -> dict[str, Scalar | None]:
        """torch's build, and what every switch was at before anything was measured."""
        return {**torch_build(), **self._switches}

    def versions(self, suites: tuple[str, ...]) -> dict[str, str]:
        """The versions of those of some suites that are known here."""
        known = workloads.names(hidden=True)
        return {name: workloads.get(name).version for name in suites if name in known}

    def modules_under(self, folder: str) -> tuple[str, ...]:
        """The modules loaded from below a folder, links resolved; fp8bench's own are not the user's code."""
        return modules_under(Path(folder))

    def prepare(self, key: str, case: Case, facts: DeviceFacts) -> None:
        """Build the state of a case under `key` and run one untimed step, so that first-call costs lie behind it."""
        device = self._selected(facts)
        workload, precision = workloads.get(case.workload), precisions.get(case.precision)
        before = running()
        fusing.forget_waiting()  # passes have asked too, and what they ask for is never compiled
        cache = CACHE.of(dict(case.params))
        with under(precision), unchanged(), aside(), none_left_by_a_fault():
            begun = partial(self._begun, workload, case, facts)
            first = begun()
            states = caches.rotation(first, begun, facts, device) if cache == ROTATING else (first,)
        flush = caches.flush_of(facts) if cache == COLD else None
        device.synchronise(facts.index)
        stamper = device.stamper(facts.index)
        started = running() - before
        self._prepared[key] = Prepared(
            workload, precision, device, facts.index, states, PhaseClock(stamper), stamper, started, flush
        )  # fmt: skip
        gc.collect()

    def _begun(self, workload: Workload, case: Case, facts: DeviceFacts) -> State:
        """A state that has run its first step."""
        setup = self._setup(case, facts)
        held = workload.prepare(setup)
        finite = FiniteState(held)
        step(workload, held, setup.scales, SilentPhases())
        finite.begin(held)
        return State(held, setup.scales, finite, (setup.arithmetic, *setup.layers.values()))

    def rotation(self, key: str) -> Rotation:
        """How many states its calls take in turn."""
        prepared = self._prepared[key]
        return Rotation(len(prepared.states), caches.bytes_of(prepared.state))

    def calibrate(self, case: Case, facts: DeviceFacts) -> None:
        """Find the case's scales in data, where it asks for them. Whatever else needs them does so too."""
        with self._apart(case, facts) as (_, _, setup):
            setup()
        gc.collect()

    def quantisers(self) -> tuple[int, str]:
        """How many quantisers states have asked for wait to be compiled; why others stay eager, '' if none does."""
        return fusing.waiting(), fusing.why_eager()

    def compiler(self, facts: DeviceFacts) -> str:
        """Whether quantisers compile for a device, in words."""
        self._selected(facts)
        with unchanged(), aside():
            return fusing.tried(facts.key)

    def compile_quantisers(self, key: str) -> None:
        """Compile those that wait, and run a state's untimed step again: first calls are dear."""
        prepared = self._prepared_as(key)
        before = running()
        with under(prepared.precision), unchanged(), aside():
            fusing.compile_waiting()
            step(prepared.workload, prepared.state, prepared.scales, SilentPhases())
        prepared.device.synchronise(prepared.index)
        still_running(running() - before)  # what compiling has started may end before anything is timed
        gc.collect()

    def slot(self, key: str, calls: int, discard: int, filling: Filling | None = None) -> RawSlot:
        """Run `discard` calls and then `calls` timed ones, back to back."""
        return self._prepared_as(key).slot(calls, discard, filling)

    def capture(self, key: str) -> str:
        """Why a step of a state cannot be done again in one launch; '' where it can from here on."""
        return self._prepared_as(key).capture()

    def replay(self, key: str, calls: int, discard: int, filling: Filling | None) -> RawSlot:
        """As `slot`, of steps that are done again in one launch each."""
        return self._prepared_as(key).replayed(calls, discard, filling)

    def loop(self, key: str, steps: int) -> float:
        """Run so many steps back to back; the seconds of all. Somebody else looks at the device meanwhile."""
        return self._prepared_as(key).loop(steps)

    def hold_phase(self, key: str, phase: str, most_bytes: int) -> RawReplay:
        """Keep one phase of a state's step, so that it can be done over and over by itself; or say why it cannot."""
        return self._prepared_as(key).hold_phase(phase, most_bytes)

    def loop_phase(self, key: str, times: int) -> float:
        """Do the phase that is kept so often; the seconds of all. Somebody else looks at the device meanwhile."""
        return self._prepared_as(key).loop_phase(times)

    def drop_phase(self, key: str) -> str:
        """Give back what is kept for a phase; what doing it has spoilt."""
        return self._prepared_as(key).drop_phase()

    def error(self, case: Case, facts: DeviceFacts) -> dict[str, float] | str:
        """The workload's numerical errors for one case, or why there are none."""
        with self._apart(case, facts) as (workload, _, setup):
            if why := workload.error_refused(dict(case.params)):
                return str(why)
            return errors_of(workload.error(setup()))

    def statistics(self, case: Case, facts: DeviceFacts) -> tuple[TensorStatistics, ...]:
        """The values that one case works on."""
        with self._apart(case, facts) as (workload, _, setup):
            return statistics_of(workload.statistics(setup()))

    def products(self, case: Case, facts: DeviceFacts) -> Products:
        """How many operators a step runs, and what its products run on."""
        with self._apart(case, facts) as (workload, _, setup):
            return products_of_step(workload, setup, facts)

    def effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        """Whether what a step gives changes with what it is given."""
        with self._apart(case, facts) as (workload, device, setup):
            found = effect_of(workload, setup(), device, facts.index)
        gc.collect(1)
        device.empty_cache()
        return found

    def tape(self, case: Case, facts: DeviceFacts) -> Tape:
        """The operators of a step."""
        with self._apart(case, facts) as (workload, _, setup):
            found = tape_pass.tape_of_step(workload, setup(), precisions.get(case.precision))
        gc.collect(1)
        return found

    def memory(self, case: Case, facts: DeviceFacts, key: str = "") -> MemoryUse | str:
        """What a step's memory is made of at its highest point, or why nobody can say.

        With a key its state stays until that is released: somebody may want to look at the process from outside.
        """
        with self._apart(case, facts) as (workload, device, setup):
            use, state = memory_of_step(of_workload(workload, setup), device, facts.index)
        if isinstance(use, str):
            return use
        if key:
            self._kept[key] = _Kept(device, state)
        del state
        gc.collect(1)
        device.empty_cache()
        return use

    def try_batch(self, case: Case, facts: DeviceFacts, memory_limit: int | None) -> int | None:
        """Prepare a case and run two steps in so much memory; bytes of tensors at the highest point."""
        with self._apart(case, facts) as (workload, device, setup):
            return try_batch(of_workload(workload, setup), device, facts.index, memory_limit)

    def trace(self, case: Case, facts: DeviceFacts, file: str) -> tuple[OperatorTime, ...]:
        """Record a few steps into a file, and say what takes their time. The profiler makes them slower."""
        with self._apart(case, facts) as (workload, device, make_setup):
            setup = make_setup()
            state = workload.prepare(setup)
            trace = record(partial(step, workload, state, setup.scales), facts.kind)
            del state
            gc.collect()
        device.empty_cache()
        write(trace, Path(file))
        return operators_of(trace["traceEvents"])

    def losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int) -> tuple[float, ...]:
        """The losses of a case's first training steps, from that draw of its weights."""
        with self._apart(case, facts) as (workload, _, setup):
            return losses_of(workload.losses(replace(setup(), draw=draw), steps))

    def gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float | None:
        """How far a case's first gradients are from those of another case. Both run under the first one's switches."""
        with self._apart(case, facts) as (workload, _, setup):
            return gradient_error_of(workload.gradient_error(setup(), self._setup(reference, facts)))

    def check(self, key: str) -> StateCheck:
        """What is wrong with a state after its steps."""
        return self._prepared_as(key).check()

    def scales(self, key: str) -> tuple[LayerScale, ...]:
        """The scales that a state has from data, or that a backend keeps for it, as they are after its steps."""
        prepared = self._prepared[key]
        states = prepared.scales.states() if prepared.scales is not None else ()
        return (*states, *(scale for one in prepared.states[0].arithmetics for scale in one.layer_scales()))

    def release(self, key: str) -> tuple[str, ...]:
        """Forget a state and give its memory back; returns what it leaves running. Unknown keys are fine."""
        held = self._kept.pop(key, None) or self._prepared.pop(key, None)
        if held is None:
            return ()
        device, started = held.device, held.started
        del held
        gc.collect()
        device.empty_cache()
        return tuple(still_running(started))

    def overheads(self, facts: DeviceFacts) -> Overheads:
        """What looking costs with that device's clock."""
        return calibrate(self._selected(facts), facts.index)

    def answers(self, facts: DeviceFacts) -> None:
        """Open a device and wait for it: what it says if it cannot be is raised."""
        self._selected(facts).synchronise(facts.index)

    def ceilings(self, facts: DeviceFacts, seconds: float, runs: int = 1) -> Ceilings:
        """The most that a device does; a quick look, of one run, has a processor with one thread: several would wait
        for each other if it is busy."""
        import torch

        device = self._selected(facts)
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if runs == 1 else threads)
        try:
            return ceilings.measured(device, facts, seconds, runs)
        finally:
            torch.set_num_threads(threads)

    def conform(self, mode: str, facts: DeviceFacts) -> tuple[Conformity, ...]:
        """Every cast and product of a precision, by the device's kernels and by the emulation."""
        device, precision = self._selected(facts), precisions.get(mode)
        with under(precision), unchanged(), apart():
            found = conformities(precision, facts, self._settings.seed)
        device.empty_cache()
        return found

    def bare_loop(self, case: Case, facts: DeviceFacts, steps: int, rounds: int) -> tuple[list[float], list[float]]:
        """Seconds a step in the harness and in a bare loop, alternating, one pair a round."""
        key = f"bare-loop:{case.id}"
        self.prepare(key, case, facts)
        try:
            prepared = self._prepared[key]
            with prepared.precision.scope():
                bare = partial(prepared.workload.step, prepared.state, SilentPhases())
                return loop_pairs(bare, lambda: self.slot(key, steps, 0), steps, rounds)
        finally:
            self.release(key)

    def recovered(self, fault: Fault) -> Fault:
        """Give back what an aborted request holds. A device that then does not answer was out of more than memory.

        After an assert or an illegal address every call fails in this process, by whatever words: cuBLAS says that it
        was not initialised, as it does without memory.
        """
        try:
            gc.collect()
            for kind in devices.names():  # the request that failed may have been the first: nothing is prepared yet
                devices.get(kind).empty_cache()
            if self._used is not None:
                device, index = self._used
                device.synchronise(index)
        except Exception:  # noqa: BLE001 - whatever a broken device says
            return fault._replace(out_of_memory=False)
        return fault

    def _selected(self, facts: DeviceFacts) -> Device:
        """A device, which the calling thread works on from now on."""
        device = devices.get(facts.kind)
        self._used = device, facts.index
        device.select(facts.index)
        return device

    def _prepared_as(self, key: str) -> Prepared:
        prepared = self._prepared[key]
        self._used = prepared.device, prepared.index
        prepared.device.select(prepared.index)
        return prepared

    @contextmanager
    def _apart(self, case: Case, facts: DeviceFacts) -> Iterator[tuple[Workload, Device, Callable[[], Setup]]]:
        """A pass of its own in a case's precision: it may print, and leaves neither switches nor threads changed.

        What it works with; the setup is made anew each time it is asked for. A device says late what was wrong with
        the work it was given: it is waited for, so that the next request is not the one that fails.
        """
        device, workload = self._selected(facts), workloads.get(case.workload)
        with under(precisions.get(case.precision)), unchanged(), apart():
            yield workload, device, partial(self._setup, case, facts)
            device.synchronise(facts.index)

    def _setup(self, case: Case, facts: DeviceFacts) -> Setup:
        precision = precisions.get(case.precision)
        arithmetic = precision.arithmetic(facts)
        layers = {kind: precisions.get(name).arithmetic(facts) for kind, name in case.precision_map}
        high = precisions.get(precision.carried_by or precision.name).arithmetic(facts)
        seed, corpus = self._settings.seed, self._settings.corpus
        setup = Setup(case, facts, seed, arithmetic, high, layers, precision.loss_scale, corpus)
        return self._calibrations.applied(workloads.get(case.workload), setup)
