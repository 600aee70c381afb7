"""Gradients of several micro-batches added up in a buffer of some precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from fp8bench.model import DeviceFacts, MemoryRole, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.shared_workloads import storage_support
from fp8bench.protocols import Arithmetic, Grid, Operand, Phases, Precision, Role, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"fp32": 4, "bf16": 2}


@dataclass
class PlainBuffer:
    """Tensors in a dtype of torch, added to in place. The first micro-batch is copied, so nothing is zeroed."""

    _sums: list[Tensor]

    def add(self, gradients: list[Tensor], phase: Phases, first: bool) -> None:
        import torch

        with phase.accumulate:
            if first:
                torch._foreach_copy_(self._sums, gradients)
            else:
                torch._foreach_add_(self._sums, gradients)

    def values(self) -> list[Tensor]:
        return self._sums


@dataclass
class ScaledBuffer:
    """Codes with scales: each micro-batch restores them to fp32, adds, and casts again; the first is only cast. Whole
    lists are restored and cast at a time, so that a step has few and long phases: in between, the sums of all tensors
    exist in fp32. Each tensor has a separate arithmetic, which may remember scales."""

    _arithmetics: Sequence[Arithmetic]
    _operands: list[Operand] = field(default_factory=list)

    def add(self, gradients: list[Tensor], phase: Phases, first: bool) -> None:
        import torch

        if first:
            with phase.cast:
                self._keep(gradients)
            return
        with phase.cast:
            sums = self.values()
        with phase.accumulate:
            torch._foreach_add_(sums, gradients)
        with phase.cast:
            self._keep(sums)
            del sums  # freeing memory takes time that must count for a phase

    def values(self) -> list[Tensor]:
        import torch

        pairs = zip(self._arithmetics, self._operands, strict=True)
        return [arithmetic.restore(operand, torch.float32) for arithmetic, operand in pairs]

    def _keep(self, sums: Sequence[Tensor]) -> None:
        pairs = zip(self._arithmetics, sums, strict=True)
        self._operands = [arithmetic.cast(tensor, Role.GRADIENT) for arithmetic, tensor in pairs]


@dataclass
class BufferState:
    """The gradients of every micro-batch, and the buffer."""

    micro_batches: list[list[Tensor]]
    buffer: PlainBuffer | ScaledBuffer

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.GRADIENTS: (self.micro_batches, self.buffer)}


@workloads.register("accumulate")
class Accumulate(Workload):
    """Sums gradients in a buffer of the case's precision; gradients are the same for all. fp32, bf16 and fp16 buffers
    are added to in place. fp8 and below have scales, so that every micro-batch restores, casts and rounds the whole
    buffer."""

    name = "accumulate"
    summary = "gradients of several micro-batches added up in a buffer of each precision"
    history = Grid(
        cpu={"width": ("256",), "micro_batches": ("8",)},
        gpu={"width": ("2048",), "micro_batches": ("8",)},
        phases=("cast", "accumulate"),
        errors=("accumulate_error", "accumulate_vanished"),
        per="bytes",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tensors, width = ("16", "2048") if facts.accelerated else ("8", "256")
        return (
            Axis.count("micro_batches", "micro-batches in a step, at least two", "2", "4", "8", "16", low=2, high=1024),
            Axis.count("tensors", "gradients in a micro-batch, one a layer", tensors, high=4096),
            Axis.count("width", "rows and columns of each gradient", width, high=1 << 16),
            Axis.choice("gradients", "what gradients arrive in: fp32 or bf16", *BYTES),
        )

    def work(self, params: Scalars) -> Work:
        count = int(params["tensors"]) * int(params["width"]) ** 2
        gradients = float(BYTES[str(params["gradients"])] * int(params["micro_batches"]) * count)
        # The gradients plus a buffer with at least half a byte per element.
        return Work(bytes=gradients, least_memory=gradients + count / 2)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return storage_support(precision, facts, "there is no buffer of it")

    def prepare(self, setup: Setup) -> BufferState:
        import torch

        dtype = torch.float32 if setup.case.param("gradients") == "fp32" else torch.bfloat16
        scale = setup.loss_scale
        micro_batches = _micro_batches(setup)
        for index, gradients in enumerate(micro_batches):
            micro_batches[index] = [(gradient * scale).to(dtype) for gradient in gradients]
        arithmetic = setup.arithmetic
        # A separate arithmetic per tensor, because delayed scales differ between tensors.
        if arithmetic.plain:
            sums = [torch.zeros_like(tensor, dtype=arithmetic.carrier) for tensor in micro_batches[0]]
            return BufferState(micro_batches, PlainBuffer(sums))
        arithmetics = [arithmetic.layer(f"buffer.{index}") for index in range(len(micro_batches[0]))]
        return BufferState(micro_batches, ScaledBuffer(arithmetics))

    def step(self, state: BufferState, phase: Phases) -> None:
        for index, gradients in enumerate(state.micro_batches):
            state.buffer.add(gradients, phase, first=index == 0)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the sums of one step with fp64 sums of the same gradients: what the buffer alone loses."""
        import torch

        from fp8bench.numerics import norms

        state = self.prepare(setup)
        if setup.arithmetic.settles:
            self.step(state, SilentPhases())
        self.step(state, SilentPhases())
        first, *remaining = state.micro_batches
        exact = [tensor.to(torch.float64) for tensor in first]
        for gradients in remaining:
            torch._foreach_add_(exact, gradients)
        # Both contain the loss scale, which cancels in their ratio.
        sums = state.buffer.values()
        return {
            "accumulate_error": norms.joint_relative_frobenius(sums, exact),
            "accumulate_vanished": norms.vanished_share(sums, exact),
        }

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import statistics_of

        kind = ("gradients", Role.GRADIENT.value)
        return statistics_of((*kind, gradient) for gradient in chain.from_iterable(_micro_batches(setup)))


def _micro_batches(setup: Setup) -> list[list[Tensor]]:
    from fp8bench.numerics import distributions

    case = setup.case
    width = int(case.param("width"))
    generator = distributions.seeded_generator(setup.facts.key, setup.seed)
    source = distributions.GradientSource([(width, width)] * int(case.param("tensors")), generator)
    return [source.draw() for _ in range(int(case.param("micro_batches")))]
