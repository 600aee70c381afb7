"""A suite that lists do not show, for the self-test. It runs another suite's step with a known slow-down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8bench.model import Case, DeviceFacts, Scalars, Work
from fp8bench.protocols import Phases, Setup, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class PlantedState:
    """A workload that is slowed down, its state, and the number of tiny calls that are added to each step."""

    workload: Workload
    inner_state: Any
    call_count: int
    tiny_tensor: Tensor
    on_device: bool = False


# A GPU kernel that sleeps this many clock cycles takes about as long as a tiny call on a CPU.
_TINY_CALL_CYCLES = 100


@workloads.register("_planted")
class Planted(Workload):
    """Runs another workload and then tiny calls, which slow down its step. This suite is not listed. `base` names the
    other workload. A parameter `base.x` is the other workload's parameter `x`.
    """

    name = "_planted"
    summary = "another workload's step with a slow-down injected into it (self-test)"
    uses_corpus = True

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis.choice(
                "base",
                "the workload that is slowed down",
                "gemm",
                "transformer",
            ),
            Axis.count("extra", "tiny calls added to a step", "0", low=0),
        )

    def work(self, params: Scalars) -> Work:
        return Work()

    def prepare(self, setup: Setup) -> PlantedState:
        import torch

        case = setup.case
        base_workload_name = str(case.param("base"))
        workload = workloads.get(base_workload_name)
        params = tuple((name.removeprefix("base."), value) for name, value in case.params if name.startswith("base."))
        base_workload_state = workload.prepare(
            replace(setup, case=Case(base_workload_name, params, case.precision, case.device))
        )
        return PlantedState(
            workload, base_workload_state, int(case.param("extra")), torch.zeros(64), setup.facts.accelerated
        )

    def step(self, state: PlantedState, phase: Phases) -> None:
        state.workload.step(state.inner_state, phase)
        call_count = state.call_count
        if call_count and state.on_device:
            from torch import cuda

            with phase.gemm:  # slow down the GPU itself, because its time does not include the host's work
                cuda._sleep(call_count * _TINY_CALL_CYCLES)  # type: ignore[no-untyped-call]
        elif call_count:
            with phase.gemm:
                # A call of `is_contiguous` takes about 50 ns. A single torch operator would add 1 or 2% to a product of
                # 0.3 ms.
                call_tiny_operation = state.tiny_tensor.is_contiguous
                for _ in range(call_count):
                    call_tiny_operation()
