"""The operators of an untimed step, and the share of each of its parts, in a worker that times nothing else.

The tape lists the operators of a step. A compiled function runs uncompiled for it, because the operators inside a fused
kernel are not visible otherwise.

On a CPU shares are measured by timing each operator call. On a GPU nobody waits for an operator, so torch's profiler
gives the time of its kernels, each with the operator that launched it. A compiled step has no shares. The same steps
also run unwatched, so that the cost of watching is in no share.
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
from fp8bench.tape.counting import count_tape
from fp8bench.tape.recorder import OperatorTape
from fp8bench.tape.timed_calls import OperatorTimes, seconds_by_operator, shares_of, shares_of_kernels
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.fusing import without_compiling
from fp8bench.worker.state_tensors import modules_of
from fp8bench.worker.static_scales import step

_FUSED = "torch.compile: operators, bytes and launches are those of the step uncompiled"
# How many steps are measured for shares; fewer once they have taken this many seconds.
STEPS = 5
SECONDS = 3.0
_COMPILED = "a compiled step calls no operator by itself; measure the step uncompiled"


def tape_of_step(workload: Workload, setup: Setup, precision: Precision, stamper: Stamper) -> Tape:
    mode = OperatorTape()
    clock = PhaseClock(stamper, lambda code: mode.enter(CELL_PHASES[code]))
    state = workload.prepare(setup)
    with without_compiling():
        # The first step creates moments and caches, which a usual step does not.
        step(workload, state, setup.scales, clock)
    clock.begin()
    with without_compiling() as compiled, mode:
        step(workload, state, setup.scales, clock)
    tape = count_tape(mode.calls, precision.float32_products != "highest")
    return replace(tape, fused=_FUSED) if compiled else tape


@dataclass(frozen=True)
class _SharedSteps:
    run: Callable[[Phases], object]
    wait: Callable[[], None]
    facts: DeviceFacts

    @property
    def clock(self) -> Callable[[], int]:
        """Counts nanoseconds: the thread's own if a step has one thread, which other programs do not lengthen."""
        alone = not self.facts.accelerated and torch.get_num_threads() == 1
        return time.thread_time_ns if alone else time.perf_counter_ns

    def plain(self) -> float:
        clock = self.clock
        begun = clock()
        self.run(SilentPhases())
        self.wait()
        return (clock() - begun) * 1e-9


def shares_of_step(workload: Workload, setup: Setup, device: Device) -> Shares | str:
    """Returns the shares of a step; a sentence instead for a compiled one."""
    state = workload.prepare(setup)
    index = setup.facts.index
    steps = _SharedSteps(
        lambda phases: step(workload, state, setup.scales, phases), lambda: device.synchronise(index), setup.facts
    )
    with without_compiling() as compiled:
        steps.plain()
    if compiled:
        return _COMPILED
    return _kernel_shares(steps, state) if setup.facts.accelerated else _operator_shares(steps, state)


def _operator_shares(steps: _SharedSteps, state: Any) -> Shares:
    mode = OperatorTimes(modules_of(state), steps.clock)
    watched, plain = [], []
    # Watched and plain steps alternate, so that drift affects both.
    for _ in _turns():
        with mode.watching() as calls:
            steps.run(mode.phases)
        watched.append(calls)
        plain.append(steps.plain())
    # Drop the first of each, which warms up, if more follow.
    return shares_of(watched[1:] or watched, plain[1:] or plain)


def _kernel_shares(steps: _SharedSteps, state: Any) -> Shares:
    mode = OperatorTimes(modules_of(state), ranged=True)
    plain = [steps.plain() for _ in _turns()]

    def look() -> None:
        with mode.watching():
            steps.run(mode.phases)
        steps.wait()

    # Once without the profiler: its first step includes starting it.
    look()
    inside, outside = seconds_by_operator(record_events(look, steps.facts.kind))
    return shares_of_kernels(mode.calls, inside, outside, median(plain))


def _turns() -> Iterator[int]:
    begun = time.perf_counter()
    for turn in range(1 + STEPS):
        yield turn
        if time.perf_counter() - begun > SECONDS:
            return
