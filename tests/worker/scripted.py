"""A workload that a test scripts, and a second way of counting what its tensors take."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.model import Case, DeviceFacts, Scalars, Work
from fp8bench.protocols import Phases, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions
from fp8bench.worker import bench, untimed_passes

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")


def setup_of(case: Case) -> Setup:
    precision = precisions.get(case.precision)
    arithmetic = precision.arithmetic(CPU)
    return Setup(case, CPU, 0, arithmetic, arithmetic, {}, precision.loss_scale)


class Stub(Workload):
    """A workload without axes, work and state, whose step does nothing."""

    name = "stub"
    summary = "what a test says"

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return ()

    def work(self, params: Scalars) -> Work:
        return Work()

    def prepare(self, setup: Setup) -> Any:
        return None

    def step(self, state: Any, phase: Phases) -> None:
        return None


class Scripted(Stub):
    """A workload with the test's state and step, by default the state's own."""

    def __init__(
        self,
        make: Callable[[Setup], Any],
        step: Callable[[Any, Phases], None] = lambda state, phase: state.step(phase),
    ) -> None:
        self._make = make
        self._step = step

    def prepare(self, setup: Setup) -> Any:
        return self._make(setup)

    def step(self, state: Any, phase: Phases) -> None:
        self._step(state, phase)


Script = Callable[..., Case]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    def make(*parts: Any, precision: str = "fp32") -> Case:
        for module in (bench, untimed_passes):
            monkeypatch.setattr(module, "workloads", SimpleNamespace(get=lambda name: Scripted(*parts)))
        return Case("scripted", (), precision, "cpu")

    return make
