"""What parts of an untimed step take how much of it, in a worker that times nothing else.

On a processor each operator is timed as it is called. Of a device its kernels are what counts, as torch's profiler
tells them, each with the operator that launched it: nobody waits for an operator. A compiled step is its kernels. The
same step is taken without anybody looking in between, so that what looking costs is nobody's share.
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

from fp8bench.model import DeviceFacts
from fp8bench.model.step import Shares, SharesFrom
from fp8bench.profiler import recorded
from fp8bench.protocols import Device, Phases, Setup, SilentPhases, Workload
from fp8bench.tape.profiled import profiled, seconds_by_operator
from fp8bench.tape.timed_calls import OperatorTimes, shares_of, shares_of_kernels
from fp8bench.worker.state_tensors import modules_of
from fp8bench.worker.static_scales import step
from fp8bench.worker.tape_pass import uncompiled
from fp8bench.worker.tracing import traced_phases

# So many steps are looked at; fewer where they are long.
STEPS = 5
SECONDS = 3.0
_NAMED = "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"


@dataclass(frozen=True)
class _LookedAtSteps:
    run: Callable[[Phases], object]
    wait: Callable[[], None]
    facts: DeviceFacts
    profiled: bool = False

    @property
    def clock(self) -> Callable[[], int]:
        """Nanoseconds. Of a step that is all one thread's they are its own, which nobody else's work makes longer;
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
    """Of a state's steps: what the first one makes and keeps is there by then."""
    with _kernels_named():
        state = workload.prepare(setup)
        index = setup.facts.index
        steps = _LookedAtSteps(
            lambda phases: step(workload, state, setup.scales, phases), lambda: device.synchronise(index),
            setup.facts,
        )  # fmt: skip
        with uncompiled() as compiled:
            steps.plain()
        if compiled:
            return _of_compiled(replace(steps, profiled=True))
        return _of_kernels(steps, state) if setup.facts.accelerated else _of_operators(steps, state)


def _of_operators(steps: _LookedAtSteps, state: Any) -> Shares:
    mode = OperatorTimes(modules_of(state), steps.clock)
    looked, plain = [], []
    for _ in _few():
        with mode.watching() as calls:
            steps.run(mode.phases)
        looked.append(calls)
        plain.append(steps.plain())
    return shares_of(looked[1:] or looked, plain[1:] or plain)


def _of_kernels(steps: _LookedAtSteps, state: Any) -> Shares:
    mode = OperatorTimes(modules_of(state), ranged=True)
    plain = [steps.plain() for _ in _few()]

    def look() -> None:
        with mode.watching():
            steps.run(mode.phases)
        steps.wait()

    look()
    inside, outside = seconds_by_operator(recorded(look, steps.facts.kind))
    return shares_of_kernels(mode.calls, inside, outside, median(plain))


def _of_compiled(steps: _LookedAtSteps) -> Shares:
    from torch.profiler import record_function

    phases = traced_phases(record_function)
    steps.plain()  # compiles what no step has compiled yet
    plain = [steps.plain() for _ in _few()]

    def look() -> None:
        for _ in range(STEPS):
            steps.run(phases)
        steps.wait()

    recorded(look, steps.facts.kind)  # torch's profiler is slow at first
    known = profiled(recorded(look, steps.facts.kind), STEPS)
    return Shares(known.parts, median(plain), SharesFrom.COMPILED, known.fused)


def _few() -> Iterator[int]:
    begun = time.perf_counter()
    for turn in range(1 + STEPS):
        yield turn
        if time.perf_counter() - begun > SECONDS:
            return


@contextmanager
def _kernels_named() -> Iterator[None]:
    """On a processor kernels that are compiled in the body tell torch's profiler their names; on a GPU they always do.
    Torch's compiler reads the variable when it is imported, which it is where something is compiled."""
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
