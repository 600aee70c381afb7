"""A workload that a test scripts, and a second way of counting what its tensors take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8bench.model import Case, DeviceFacts, Scalar, Work
from fp8bench.protocols import Phases, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions
from fp8bench.worker import bench, untimed_passes

CPU = DeviceFacts("cpu", 0, "a processor", 16 << 30, "2.13.0")


def setup_of(case: Case) -> Setup:
    precision = precisions.get(case.precision)
    arithmetic = precision.arithmetic(CPU)
    return Setup(case, CPU, 0, arithmetic, arithmetic, {}, precision.loss_scale)


class Scripted(Workload):
    """A workload with the test's state and step, by default the state's own."""

    name = "scripted"
    summary = "what a test says"

    def __init__(
        self,
        make: Callable[[Setup], Any],
        step: Callable[[Any, Phases], None] = lambda state, phase: state.step(phase),
    ) -> None:
        self._make = make
        self._step = step

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return ()

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work()

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


class Storages(TorchDispatchMode):
    """Follows every storage that an operation takes or returns until it is freed.

    Memory within an operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.highest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, made)):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.held:
                    self.held[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.highest = max(self.highest, sum(self.held.values()))
        return made
