"""One layer exercised apart from any model: forward, or forward and backward, with random tensors around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8bench.model import MemoryRole, Scalar
from fp8bench.nn.whole_layers import surrounded
from fp8bench.numerics.distributions import drawn
from fp8bench.numerics.norms import joint_relative_frobenius, relative_frobenius
from fp8bench.protocols import Phases, Setup, SilentPhases
from fp8bench.protocols.axes import VALUES


@dataclass
class Exercise:
    """A layer, called with its inputs and the phases. `pull` is the gradient its output gets; None is forward only."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    pull: Tensor | None

    def step(self, phase: Phases) -> None:
        """One pass. What the layer does not mark itself is ELEMENTWISE; all it makes is given back inside."""
        if self.pull is None:
            with phase.elementwise, torch.no_grad():
                self.layer(*self.inputs, phase)
            return
        with phase.elementwise:
            output = self.layer(*self.inputs, phase)
        with phase.elementwise:
            # Not backward(): it would copy gradients that a model hands on as they are (those of a sum).
            torch.autograd.grad(output, self.leaves(), self.pull)
            del output

    def memory_roles(self) -> dict[MemoryRole, object]:
        """Inputs need gradients as weights do, and are none."""
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
        """Output and, in training, gradients against those in fp64; of a second pass where an arithmetic `settles`."""
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
    """Inputs in `dtype` and a layer on the case's device, from its seed: the same values for every dtype.

    Gaussian, unless the case asks for other values: `spread` is the inputs' standard deviation. The gradient that comes
    in is of order one, as loss scaling would have it.
    """
    params = dict(setup.case.params)
    # The process's own random state is put back.
    gpus = [setup.facts.index] if setup.facts.accelerated else []
    with torch.random.fork_rng(gpus, device_type=setup.facts.kind), torch.device(setup.facts.key):
        torch.manual_seed(setup.seed)
        layer = build()
        surrounded(layer)
        _refill(layer, params)
        if dtype is torch.float64:
            layer = layer.double()
        inputs = tuple((spread * drawn(params, shape)).to(dtype).requires_grad_(training) for shape in shapes)
        if not training:
            return Exercise(layer, inputs, None)
        with torch.no_grad():
            output = layer(*inputs, SilentPhases())
        return Exercise(layer, inputs, drawn(params, output.shape).to(output.dtype))


def _refill(layer: nn.Module, params: Mapping[str, Scalar]) -> None:
    """A layer's weights made of a case's kind of values, as large as they were; what are no matrices stay."""
    if VALUES.of(params) == "normal":
        return
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.copy_(drawn(params, weight.shape) * weight.square().mean().sqrt())
