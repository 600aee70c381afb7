"""The suite accumulate: sums the gradients of several micro-batches in a buffer of the case's precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from fp8bench.model import DeviceFacts, MemoryRole, Scalars, Support, TensorStatistics, Work
from fp8bench.nn.shared_workloads import find_storage_support
from fp8bench.protocols import Arithmetic, Grid, Operand, Phases, Precision, Role, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    from torch import Tensor

GRADIENT_BYTES_BY_DTYPE = {"fp32": 4, "bf16": 2}


@dataclass
class PlainBuffer:
    """A buffer of plain tensors, to which gradients are added in place. The first micro-batch is copied into the
    buffer, so that the buffer need not be set to zero.
    """

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
    """A gradient buffer in a low-precision format with scales. Each micro-batch restores the sums to fp32, adds its
    gradients, and casts the sums again. The first micro-batch is only cast.

    All tensors are restored before any is cast again, so that a step has few and long phases. In between, all sums
    exist in fp32. Each tensor has its own arithmetic, which may keep a history of scales.
    """

    _tensor_arithmetics: Sequence[Arithmetic]
    _sum_operands: list[Operand] = field(default_factory=list)

    def add(self, gradients: list[Tensor], phase: Phases, first: bool) -> None:
        import torch

        if first:
            with phase.cast:
                self._store_cast_sums(gradients)
            return
        with phase.cast:
            restored_sums = self.values()
        with phase.accumulate:
            torch._foreach_add_(restored_sums, gradients)
        with phase.cast:
            self._store_cast_sums(restored_sums)
            del restored_sums  # the phase includes the time of freeing these tensors

    def values(self) -> list[Tensor]:
        import torch

        arithmetics_and_operands = zip(self._tensor_arithmetics, self._sum_operands, strict=True)
        return [arithmetic.restore(operand, torch.float32) for arithmetic, operand in arithmetics_and_operands]

    def _store_cast_sums(self, sums: Sequence[Tensor]) -> None:
        arithmetic_sum_pairs = zip(self._tensor_arithmetics, sums, strict=True)
        self._sum_operands = [arithmetic.cast(tensor, Role.GRADIENT) for arithmetic, tensor in arithmetic_sum_pairs]


@dataclass
class BufferState:
    """The gradients of all micro-batches, and the buffer in which they are summed."""

    micro_batches: list[list[Tensor]]
    buffer: PlainBuffer | ScaledBuffer

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.GRADIENTS: (self.micro_batches, self.buffer)}


@workloads.register("accumulate")
class Accumulate(Workload):
    """Sums the same gradients in every step, in a buffer of the case's precision: a PlainBuffer in fp32, bf16 and fp16,
    and a ScaledBuffer in fp8 and smaller formats, which have scales.
    """

    name = "accumulate"
    summary = "gradients of several micro-batches added up in a buffer of each precision"
    history = Grid(
        cpu={"width": ("256",), "micro_batches": ("8",)},
        gpu={"width": ("2048",), "micro_batches": ("8",)},
        phases=("cast", "accumulate"),
        errors=("accumulate_error", "accumulate_vanished"),
        per="bytes",  # the time for a fixed number of the gradients' bytes has a history too
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tensors, width = ("16", "2048") if facts.accelerated else ("8", "256")
        return (
            Axis.count("micro_batches", "micro-batches in a step, at least two", "2", "4", "8", "16", low=2, high=1024),
            Axis.count("tensors", "gradients in a micro-batch, one a layer", tensors, high=4096),
            Axis.count("width", "rows and columns of each gradient", width, high=1 << 16),
            Axis.choice(
                "gradients", "dtype of the gradients before they are summed: fp32 or bf16", *GRADIENT_BYTES_BY_DTYPE
            ),
        )

    def work(self, params: Scalars) -> Work:
        tensors, width, micro_batches = read_integers(params, "tensors", "width", "micro_batches")
        elements = tensors * width**2
        gradient_bytes = float(GRADIENT_BYTES_BY_DTYPE[str(params["gradients"])] * micro_batches * elements)
        # The bytes of a step are those of its input (`Work`), so they leave out the buffer. The least memory includes a
        # buffer of half a byte for each element.
        return Work(bytes=gradient_bytes, least_memory=gradient_bytes + elements / 2)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        return find_storage_support(precision, facts, without="there is no buffer of it")

    def prepare(self, setup: Setup) -> BufferState:
        import torch

        dtype = torch.float32 if setup.params["gradients"] == "fp32" else torch.bfloat16
        micro_batches = _draw_micro_batches(setup)
        for index, gradients in enumerate(micro_batches):
            micro_batches[index] = [(gradient * setup.loss_scale).to(dtype) for gradient in gradients]
        arithmetic = setup.arithmetic
        if arithmetic.plain:
            gradient_sums = [torch.zeros_like(tensor, dtype=arithmetic.carrier) for tensor in micro_batches[0]]
            return BufferState(micro_batches, PlainBuffer(gradient_sums))
        # Each tensor gets its own arithmetic, because delayed scales differ between tensors.
        arithmetics = [arithmetic.layer(f"buffer.{index}") for index in range(len(micro_batches[0]))]
        return BufferState(micro_batches, ScaledBuffer(arithmetics))

    def step(self, state: BufferState, phase: Phases) -> None:
        for index, gradients in enumerate(state.micro_batches):
            state.buffer.add(gradients, phase, first=index == 0)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the sums of one step with fp64 sums of the same gradients. So the error shows only what the buffer
        loses.
        """
        import torch

        from fp8bench.numerics import norms

        state = self.prepare(setup)
        # Delayed scales fit the sums only after a first step.
        if setup.arithmetic.settles:
            self.step(state, SilentPhases())
        self.step(state, SilentPhases())
        first_gradients, *remaining_batches = state.micro_batches
        exact_sums = [tensor.to(torch.float64) for tensor in first_gradients]
        for gradients in remaining_batches:
            torch._foreach_add_(exact_sums, gradients)
        # Computed and exact sums contain the loss scale, which cancels out in their ratio.
        gradient_sums = state.buffer.values()
        return {
            "accumulate_error": norms.joint_relative_frobenius(gradient_sums, exact_sums),
            "accumulate_vanished": norms.compute_vanished_share(gradient_sums, exact_sums),
        }

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import compute_statistics

        gradients = chain.from_iterable(_draw_micro_batches(setup))
        return compute_statistics(("gradients", Role.GRADIENT.value, gradient) for gradient in gradients)


def _draw_micro_batches(setup: Setup) -> list[list[Tensor]]:
    from fp8bench.numerics import distributions

    tensors, width, micro_batches = read_integers(setup.params, "tensors", "width", "micro_batches")
    generator = distributions.make_seeded_generator(setup.facts.key, setup.seed)
    source = distributions.GradientSource([(width, width)] * tensors, generator)
    return [source.draw() for _ in range(micro_batches)]
