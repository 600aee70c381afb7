"""Linear and convolution layers, and their results by torch's operators and autograd in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from fp8bench.nn.convolution import Convolution
from fp8bench.nn.linear import Linear
from fp8bench.protocols import Arithmetic, SilentPhases
from fp8bench.registry import precisions
from tests.facts import CPU

# Output, input gradient and weight gradient.
Outcome = tuple[Tensor, Tensor, Tensor]


def arithmetic_of(name: str) -> Arithmetic:
    return precisions.get(name).arithmetic(CPU)


def linear(arithmetic: Arithmetic, inputs: int = 64, outputs: int = 32) -> Linear:
    torch.manual_seed(1)
    return Linear(inputs, outputs, arithmetic)


def convolution(arithmetic: Arithmetic, inputs: int = 32, outputs: int = 64) -> Convolution:
    torch.manual_seed(1)
    return Convolution(inputs, outputs, arithmetic)


def given(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(layer: Linear | Convolution, x: Tensor, pull: Tensor) -> Outcome:
    x = x.detach().requires_grad_()
    y = layer(x, SilentPhases())
    x_gradient, weight_gradient = torch.autograd.grad(y, (x, layer.weight), pull.to(y.dtype))
    return y.detach(), x_gradient, weight_gradient


def torchs_linear(weight: Tensor, x: Tensor, pull: Tensor) -> Outcome:
    weight, x = (item.detach().double().requires_grad_() for item in (weight, x))
    y = functional.linear(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), pull.double())


def torchs_convolution(weight: Tensor, x: Tensor, pull: Tensor) -> Outcome:
    images = x.detach().double().permute(0, 3, 1, 2).contiguous().requires_grad_()
    windows = as_torch(weight.detach().double()).requires_grad_()
    y = functional.conv2d(images, windows, padding=1)
    gradients = torch.autograd.grad(y, (images, windows), pull.double().permute(0, 3, 1, 2).contiguous())
    return y.detach().permute(0, 2, 3, 1), gradients[0].permute(0, 2, 3, 1), as_rows(gradients[1])


def as_torch(weight: Tensor) -> Tensor:
    """Reshapes (outputs, window x inputs) to (outputs, inputs, 3, 3)."""
    inputs = weight.shape[1] // 9
    moved = torch.empty(weight.shape[0], inputs, 3, 3, dtype=weight.dtype)
    for row in range(3):
        for column in range(3):
            start = (3 * row + column) * inputs
            moved[:, :, row, column] = weight[:, start : start + inputs]
    return moved


def as_rows(weight: Tensor) -> Tensor:
    return torch.cat([weight[:, :, row, column] for row in range(3) for column in range(3)], dim=1)
