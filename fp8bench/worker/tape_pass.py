"""Records the operators of an untimed step, and how much of the step's time each part takes, in a worker that times
nothing else.

The tape lists the operators of a step. For the tape, compiled functions run uncompiled, because the operators in a
fused kernel are invisible. On a CPU, time shares are measured by timing each operator call. On a GPU the host does
not wait for operators. There, torch's profiler gives the times of kernels, and the operators that launched them. A
compiled step has no time shares. The same steps also run unobserved, so that no share includes the cost of observing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from fp8bench.model import CELL_PHASES, DeviceFacts, Tape
from fp8bench.model.step import Shares
from fp8bench.profiler import record_events
from fp8bench.protocols import Device, Phases, Precision, Setup, SilentPhases, Stamper, Workload
from fp8bench.tape.counting import count_operator_calls
from fp8bench.tape.recorder import OperatorTape
from fp8bench.tape.timed_calls import OperatorTimes, compute_kernel_shares, compute_step_shares, sum_kernel_seconds
from fp8bench.worker.clock import PhaseStampClock
from fp8bench.worker.fusing import disable_compiling
from fp8bench.worker.state_tensors import find_models
from fp8bench.worker.static_scales import step

_COMPILED_STEP_NOTE = "torch.compile: operators, bytes and launches are those of the step uncompiled"
# The most steps that are measured for time shares, and the seconds after which no more steps follow.
MAX_STEPS = 5
MAX_SECONDS = 3.0
_COMPILED_STEP_REASON = "a compiled step calls no operator by itself; measure the step uncompiled"


def record_tape(workload: Workload, setup: Setup, precision: Precision, stamper: Stamper) -> Tape:
    operator_tape = OperatorTape()
    clock = PhaseStampClock(stamper, lambda code: operator_tape.enter(CELL_PHASES[code]))
    state = workload.prepare(setup)
    with disable_compiling():
        # The first step creates moments and caches, unlike later steps.
        step(workload, state, setup.scales, clock)
    clock.begin()
    with disable_compiling() as compiled, operator_tape:
        step(workload, state, setup.scales, clock)
    tape = count_operator_calls(operator_tape.calls, precision.float32_products != "highest")
    return replace(tape, fused=_COMPILED_STEP_NOTE) if compiled else tape


@dataclass(frozen=True)
class _StepRunner:
    run: Callable[[Phases], object]
    wait: Callable[[], None]
    facts: DeviceFacts

    @property
    def clock(self) -> Callable[[], int]:
        """Returns a clock in nanoseconds. If a step has one thread, it is the thread's CPU time, because other
        programs do not lengthen this time.
        """
        is_single_threaded = not self.facts.accelerated and torch.get_num_threads() == 1
        return time.thread_time_ns if is_single_threaded else time.perf_counter_ns

    def time_unwatched_step(self) -> float:
        clock = self.clock
        start = clock()
        self.run(SilentPhases())
        self.wait()
        return (clock() - start) * 1e-9


def measure_step_shares(workload: Workload, setup: Setup, device: Device) -> Shares | str:
    """Returns how the time of a step divides among its parts, or the reason why a compiled step has no such figures."""
    state = workload.prepare(setup)
    index = setup.facts.index
    shared_steps = _StepRunner(
        lambda phases: step(workload, state, setup.scales, phases), lambda: device.synchronise(index), setup.facts
    )
    with disable_compiling() as compiled:
        shared_steps.time_unwatched_step()
    if compiled:
        return _COMPILED_STEP_REASON
    return (
        _measure_kernel_shares(shared_steps, state)
        if setup.facts.accelerated
        else _measure_operator_shares(shared_steps, state)
    )


def _measure_operator_shares(steps: _StepRunner, state: Any) -> Shares:
    operator_times = OperatorTimes(find_models(state), steps.clock)
    timed_calls_by_step = []
    unwatched_step_seconds = []
    # Observed and unobserved steps alternate, so that slow changes of the machine affect both kinds.
    for _ in _iterate_turns_until_limit():
        with operator_times.time_calls() as calls:
            steps.run(operator_times.phases)
        timed_calls_by_step.append(calls)
        unwatched_step_seconds.append(steps.time_unwatched_step())
    # The first observed and the first unobserved step are warm-ups. They are dropped if there are further steps.
    return compute_step_shares(
        timed_calls_by_step[1:] or timed_calls_by_step, unwatched_step_seconds[1:] or unwatched_step_seconds
    )


def _measure_kernel_shares(steps: _StepRunner, state: Any) -> Shares:
    operator_times = OperatorTimes(find_models(state), in_profiler_ranges=True)
    unwatched_step_seconds = [steps.time_unwatched_step() for _ in _iterate_turns_until_limit()]

    def take_observed_step() -> None:
        with operator_times.time_calls():
            steps.run(operator_times.phases)
        steps.wait()

    # Run the first observed step without the profiler, because it also starts the observation.
    take_observed_step()
    operator_kernels, other_kernels = sum_kernel_seconds(record_events(take_observed_step, steps.facts.kind))
    return compute_kernel_shares(operator_times.calls, operator_kernels, other_kernels, median(unwatched_step_seconds))


def _iterate_turns_until_limit() -> Iterator[int]:
    start = time.perf_counter()
    for turn in range(1 + MAX_STEPS):  # on a CPU, the first turn is a warm-up
        yield turn
        if time.perf_counter() - start > MAX_SECONDS:
            return
