"""What only the linear layer says; test_products.py has what it shares with the convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3
from fp8bench.formats.scaled import values
from fp8bench.formats.scalings import MX
from fp8bench.nn.arithmetics import EmulatedArithmetic, PlainArithmetic
from fp8bench.protocols import Role, SilentPhases
from tests.nn.layers import given, linear, outcome


def test_a_frozen_weight_costs_no_product() -> None:
    """Then only the input's gradient is computed."""
    layer = linear(PlainArithmetic(torch.float32))
    layer.weight.requires_grad_(False)
    x = given(8, 64).requires_grad_()
    layer(x, SilentPhases()).sum().backward()
    assert layer.weight.grad is None and x.grad is not None


def test_block_scaled_gradients_are_those_of_each_orientations_own_blocks() -> None:
    """The weight gradient is the product of operands rounded along the tokens."""

    def blocks(tensor: Tensor, role: Role = Role.INPUT) -> Tensor:
        return values(tensor, E4M3, MX)

    layer = linear(EmulatedArithmetic(torch.float32, blocks, keeps_source=True))
    x, pull = given(64, 64), torch.randn(64, 32)
    y, x_gradient, weight_gradient = outcome(layer, x, pull)
    weight = layer.weight.detach()
    assert torch.equal(y, blocks(x) @ blocks(weight).t())
    assert torch.equal(x_gradient, blocks(pull) @ blocks(weight.t()).t())
    assert torch.equal(weight_gradient, blocks(pull.t()) @ blocks(x.t()).t())
