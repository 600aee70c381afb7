"""Runs one layer alone, forward or forward and backward, on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8bench.model import MemoryRole
from fp8bench.nn.whole_layers import wrap_model_forward
from fp8bench.numerics.distributions import draw_values
from fp8bench.numerics.norms import joint_relative_frobenius, relative_frobenius
from fp8bench.protocols import Phases, Setup, SilentPhases
from fp8bench.protocols.axes import VALUES


@dataclass
class LayerExercise:
    """A layer with its inputs. `output_gradient` is the incoming gradient, or None to run forward only."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    output_gradient: Tensor | None

    def step(self, phase: Phases) -> None:
        """Runs one pass. Work outside of the layer's own phases counts as ELEMENTWISE. All memory of the pass is
        freed before it returns.
        """
        if self.output_gradient is None:
            with phase.elementwise, torch.no_grad():
                self.layer(*self.inputs, phase)
            return
        with phase.elementwise:
            output = self.layer(*self.inputs, phase)
        with phase.elementwise:
            # Use autograd.grad: backward() would copy the gradients that a layer passes on unchanged.
            torch.autograd.grad(output, self.list_leaf_tensors(), self.output_gradient)
            del output

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.ACTIVATIONS: self.inputs, MemoryRole.GRADIENTS: self.output_gradient}

    def list_leaf_tensors(self) -> list[Tensor]:
        return [*self.inputs, *self.layer.parameters()]

    def outcome(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Runs the same pass as `step` without phases. Returns the output, and the gradients of `list_leaf_tensors` or
        () if the pass is forward only.
        """
        if self.output_gradient is None:
            with torch.no_grad():
                return self.layer(*self.inputs, SilentPhases()), ()
        output: Tensor = self.layer(*self.inputs, SilentPhases())
        return output.detach(), torch.autograd.grad(output, self.list_leaf_tensors(), self.output_gradient)

    def measure_errors(self, exact: LayerExercise, settles: bool = False) -> dict[str, float]:
        """Returns the relative errors of output and gradients compared with `exact`. With `settles`, a pass runs
        before the measured one, because the arithmetic's scales come from earlier casts.
        """
        if settles:
            self.outcome()
        output, gradients = self.outcome()
        reference, reference_gradients = exact.outcome()
        figures = {"output_error": relative_frobenius(output, reference)}
        if self.output_gradient is not None:
            figures["gradient_error"] = joint_relative_frobenius(gradients, reference_gradients)
        return figures


def make_exercise(
    setup: Setup,
    build: Callable[[], nn.Module],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    training: bool,
    deviation: float = 1.0,
) -> LayerExercise:
    """Makes a layer and its inputs in `dtype` on the case's device, from the case's seed.

    The same values are drawn for every dtype. Inputs are Gaussian with the standard deviation `deviation`, unless the
    case asks for other values. The incoming gradient is of order one, as with loss scaling.
    """
    params = setup.params
    # fork_rng restores the process's random state afterwards.
    gpu_indices = [setup.facts.index] if setup.facts.accelerated else []
    with torch.random.fork_rng(gpu_indices, device_type=setup.facts.kind), torch.device(setup.facts.key):
        torch.manual_seed(setup.seed)
        layer = build()
        wrap_model_forward(layer)
        if VALUES.of(params) != "normal":
            with torch.no_grad():
                for weight in layer.parameters():
                    # Replace matrices by values of the same magnitude. Vectors, such as the weights of norms, stay
                    # unchanged.
                    if weight.dim() > 1:
                        weight.copy_(draw_values(params, weight.shape) * weight.square().mean().sqrt())
        # Weights are drawn in float32 and then widened, so that a float64 reference has the same weights.
        if dtype is torch.float64:
            layer = layer.double()
        inputs = tuple((deviation * draw_values(params, shape)).to(dtype).requires_grad_(training) for shape in shapes)
        if not training:
            return LayerExercise(layer, inputs, None)
        # The gradient has the shape of the output, which only a forward pass shows.
        with torch.no_grad():
            output = layer(*inputs, SilentPhases())
        return LayerExercise(layer, inputs, draw_values(params, output.shape).to(output.dtype))
