"""A workload with a planted slow-down, for the self-test: another workload's step plus some tiny calls."""

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
    """The other workload with its state, and the number of tiny calls after each step."""

    workload: Workload
    inner: Any
    extra: int
    tiny: Tensor
    on_device: bool = False


# About as long on a GPU as a tiny call on a CPU.
_TINY_CYCLES = 100


@workloads.register("_planted")
class Planted(Workload):
    """Another workload plus tiny calls, hidden from lists. `base` is the other workload; parameters named `base.x` are
    passed on to it."""

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
        base = str(case.param("base"))
        workload = workloads.get(base)
        params = tuple((name.removeprefix("base."), value) for name, value in case.params if name.startswith("base."))
        inner = workload.prepare(replace(setup, case=Case(base, params, case.precision, case.device)))
        return PlantedState(workload, inner, int(case.param("extra")), torch.zeros(64), setup.facts.accelerated)

    def step(self, state: PlantedState, phase: Phases) -> None:
        state.workload.step(state.inner, phase)
        extra = state.extra
        if extra and state.on_device:
            from torch import cuda

            with phase.gemm:  # on the GPU, whose time does not include the host's work
                cuda._sleep(extra * _TINY_CYCLES)  # type: ignore[no-untyped-call]
        elif extra:
            with phase.gemm:
                # Such a call takes about 50 ns; an operator would already cost 1 or 2% of a 0.3 ms product.
                ask = state.tiny.is_contiguous
                for _ in range(extra):
                    ask()
