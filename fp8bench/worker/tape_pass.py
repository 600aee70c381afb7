"""What an untimed step runs, and which of its parts take how much of it, in a worker that times nothing else.

The tape lists the operators of a step. A compiled function runs uncompiled for it: the operators inside a fused kernel
show nowhere else.

Shares are measured on a processor by timing each operator as it is called. On a GPU nobody waits for an operator, so
torch's profiler tells the time of its kernels, each with the operator that launched it; a compiled step is its
kernels. The same steps run unwatched in between, so that the cost of watching is in nobody's share.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from fp8bench.model import CELL_PHASES, DeviceFacts, Tape
from fp8bench.model.step import Shares, SharesFrom
from fp8bench.profiler import recorded
from fp8bench.protocols import Device, Phases, Precision, Setup, SilentPhases, Stamper, Workload
from fp8bench.tape.counting import counted
from fp8bench.tape.profiled import profiled, seconds_by_operator
from fp8bench.tape.recorder import OperatorTape
from fp8bench.tape.timed_calls import OperatorTimes, shares_of, shares_of_kernels
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.fusing import uncompiled
from fp8bench.worker.state_tensors import modules_of
from fp8bench.worker.static_scales import step
from fp8bench.worker.tracing import traced_phases

_FUSED = "torch.compile: operators, bytes and launches are those of the step uncompiled"
# How many steps are measured for shares; fewer once they have taken so many seconds.
STEPS = 5
SECONDS = 3.0
_NAMED = "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"


def tape_of_step(workload: Workload, setup: Setup, precision: Precision, stamper: Stamper) -> Tape:
    mode = OperatorTape()
    clock = PhaseClock(stamper, lambda code: mode.enter(CELL_PHASES[code]))
    state = workload.prepare(setup)
    with uncompiled():
        step(workload, state, setup.scales, clock)
    clock.begin()
    with uncompiled() as compiled, mode:
        step(workload, state, setup.scales, clock)
    tape = counted(mode.calls, precision.float32_products != "highest")
    return replace(tape, fused=_FUSED) if compiled else tape


@dataclass(frozen=True)
class _SharedSteps:
    run: Callable[[Phases], object]
    wait: Callable[[], None]
    facts: DeviceFacts
    profiled: bool = False

    @property
    def clock(self) -> Callable[[], int]:
        """Counts nanoseconds: the thread's own where a step has one thread, so that others' work does not lengthen it.
        torch's profiler has no such clock."""
        alone = not self.facts.accelerated and not self.profiled and torch.get_num_threads() == 1
        return time.thread_time_ns if alone else time.perf_counter_ns

    def plain(self) -> float:
        clock = self.clock
        begun = clock()
        self.run(SilentPhases())
        self.wait()
        return (clock() - begun) * 1e-9


def shares_of_step(workload: Workload, setup: Setup, device: Device) -> Shares:
    with _kernels_named():
        state = workload.prepare(setup)
        index = setup.facts.index
        steps = _SharedSteps(
            lambda phases: step(workload, state, setup.scales, phases), lambda: device.synchronise(index),
            setup.facts,
        )  # fmt: skip
        with uncompiled() as compiled:
            steps.plain()
        if compiled:
            return _compiled_shares(replace(steps, profiled=True))
        return _kernel_shares(steps, state) if setup.facts.accelerated else _operator_shares(steps, state)


def _operator_shares(steps: _SharedSteps, state: Any) -> Shares:
    mode = OperatorTimes(modules_of(state), steps.clock)
    watched, plain = [], []
    for _ in _turns():
        with mode.watching() as calls:
            steps.run(mode.phases)
        watched.append(calls)
        plain.append(steps.plain())
    return shares_of(watched[1:] or watched, plain[1:] or plain)


def _kernel_shares(steps: _SharedSteps, state: Any) -> Shares:
    mode = OperatorTimes(modules_of(state), ranged=True)
    plain = [steps.plain() for _ in _turns()]

    def look() -> None:
        with mode.watching():
            steps.run(mode.phases)
        steps.wait()

    look()
    inside, outside = seconds_by_operator(recorded(look, steps.facts.kind))
    return shares_of_kernels(mode.calls, inside, outside, median(plain))


def _compiled_shares(steps: _SharedSteps) -> Shares:
    from torch.profiler import record_function

    phases = traced_phases(record_function)
    steps.plain()  # compiles what no step has compiled yet
    plain = [steps.plain() for _ in _turns()]

    def look() -> None:
        for _ in range(STEPS):
            steps.run(phases)
        steps.wait()

    recorded(look, steps.facts.kind)  # torch's profiler is slow at first
    known = profiled(recorded(look, steps.facts.kind), STEPS)
    return Shares(known.parts, median(plain), SharesFrom.COMPILED, known.fused)


def _turns() -> Iterator[int]:
    begun = time.perf_counter()
    for turn in range(1 + STEPS):
        yield turn
        if time.perf_counter() - begun > SECONDS:
            return


@contextmanager
def _kernels_named() -> Iterator[None]:
    """Has kernels that are compiled for a processor tell torch's profiler their names, as those of a GPU always do.
    torch's compiler reads the variable when it is imported, which it is where something is compiled."""
    config = sys.modules.get("torch._inductor.config")
    before = config.cpp.enable_kernel_profile if config is not None else False
    if config is not None:
        config.cpp.enable_kernel_profile = True
    else:
        os.environ[_NAMED] = "1"
    try:
        yield
    finally:
        os.environ.pop(_NAMED, None)
        if (config := sys.modules.get("torch._inductor.config")) is not None:
            config.cpp.enable_kernel_profile = before
