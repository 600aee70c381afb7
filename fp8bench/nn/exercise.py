"""Runs one layer by itself: forward, or forward and backward, with random tensors around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8bench.model import MemoryRole
from fp8bench.nn.whole_layers import surround
from fp8bench.numerics.distributions import drawn
from fp8bench.numerics.norms import joint_relative_frobenius, relative_frobenius
from fp8bench.protocols import Phases, Setup, SilentPhases
from fp8bench.protocols.axes import VALUES


@dataclass
class Exercise:
    """A layer and its inputs. `pull` is the gradient of its output; None means forward only."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    pull: Tensor | None

    def step(self, phase: Phases) -> None:
        """Runs one pass. Work that the layer does not mark is ELEMENTWISE; all memory is freed inside."""
        if self.pull is None:
            with phase.elementwise, torch.no_grad():
                self.layer(*self.inputs, phase)
            return
        with phase.elementwise:
            output = self.layer(*self.inputs, phase)
        with phase.elementwise:
            # Not backward(): it would copy gradients that a layer passes on unchanged, those of a sum.
            torch.autograd.grad(output, self.leaves(), self.pull)
            del output

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.ACTIVATIONS: self.inputs, MemoryRole.GRADIENTS: self.pull}

    def leaves(self) -> list[Tensor]:
        return [*self.inputs, *self.layer.parameters()]

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.pull is None:
            with torch.no_grad():
                return self.layer(*self.inputs, SilentPhases()), ()
        output: Tensor = self.layer(*self.inputs, SilentPhases())
        return output.detach(), torch.autograd.grad(output, self.leaves(), self.pull)

    def errors(self, exact: Exercise, settles: bool = False) -> dict[str, float]:
        """Errors of output and gradients against `exact`, taken in a second pass if the arithmetic `settles`."""
        if settles:
            self.outcome()
        output, gradients = self.outcome()
        reference, reference_gradients = exact.outcome()
        figures = {"output_error": relative_frobenius(output, reference)}
        if self.pull is not None:
            figures["gradient_error"] = joint_relative_frobenius(gradients, reference_gradients)
        return figures


def exercise(
    setup: Setup,
    build: Callable[[], nn.Module],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    training: bool,
    spread: float = 1.0,
) -> Exercise:
    """A layer and inputs in `dtype` on the case's device, from its seed: the same values for every dtype.

    Inputs are Gaussian with standard deviation `spread`, unless the case asks for other values. The incoming gradient
    is of order one, as with loss scaling.
    """
    params = setup.params
    # fork_rng restores the process's own random state.
    gpus = [setup.facts.index] if setup.facts.accelerated else []
    with torch.random.fork_rng(gpus, device_type=setup.facts.kind), torch.device(setup.facts.key):
        torch.manual_seed(setup.seed)
        layer = build()
        surround(layer)
        if VALUES.of(params) != "normal":
            with torch.no_grad():
                for weight in layer.parameters():
                    if weight.dim() > 1:
                        weight.copy_(drawn(params, weight.shape) * weight.square().mean().sqrt())
        # Weights are drawn in float32 and widened, so that a reference has the same ones.
        if dtype is torch.float64:
            layer = layer.double()
        inputs = tuple((spread * drawn(params, shape)).to(dtype).requires_grad_(training) for shape in shapes)
        if not training:
            return Exercise(layer, inputs, None)
        # The gradient needs the shape of the output, which only a forward pass knows.
        with torch.no_grad():
            output = layer(*inputs, SilentPhases())
        return Exercise(layer, inputs, drawn(params, output.shape).to(output.dtype))
