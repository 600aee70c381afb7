"""What only the convolution says, and the block around it; test_products.py has what it shares with linear ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from fp8bench.formats.grids import E2M1
from fp8bench.formats.recipes import NVFP4
from fp8bench.formats.scaled import values
from fp8bench.nn.arithmetics import EmulatedArithmetic, PlainArithmetic, ScaledArithmetic
from fp8bench.nn.convolution import BatchNorm, ResidualBlock
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Role, SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.nn.layers import as_torch, convolution, given, outcome, torchs_convolution


def blocks(tensor: Tensor, role: Role = Role.INPUT) -> Tensor:
    return values(tensor, E2M1, NVFP4)


def test_block_scaled_products_round_along_their_own_contractions() -> None:
    layer = convolution(EmulatedArithmetic(torch.float32, blocks, keeps_source=True))
    x, pull = given(2, 8, 8, 32), given(2, 8, 8, 64, seed=3)
    weight = layer.weight.detach()
    y, x_gradient, weight_gradient = outcome(layer, x, pull)

    def along_last(tensor: Tensor) -> Tensor:
        return blocks(tensor.reshape(-1, tensor.shape[-1])).view(tensor.shape)

    def along_positions(tensor: Tensor) -> Tensor:
        return blocks(tensor.reshape(-1, tensor.shape[-1]).t()).t().reshape(tensor.shape)

    wanted_y, _, _ = torchs_convolution(blocks(weight), along_last(x), pull)
    _, wanted_x, _ = torchs_convolution(blocks(weight.t()).t(), x, along_last(pull))
    _, _, wanted_weight = torchs_convolution(weight, along_positions(x), along_positions(pull))
    for one, other in ((y, wanted_y), (x_gradient, wanted_x), (weight_gradient, wanted_weight)):
        assert relative_frobenius(one, other) < 1e-6
    across = torchs_convolution(blocks(weight), along_positions(x), along_positions(pull))
    assert relative_frobenius(y, across[0]) > 0.01
    assert relative_frobenius(weight_gradient, torchs_convolution(weight, along_last(x), along_last(pull))[2]) > 0.01
    assert relative_frobenius(x_gradient, torchs_convolution(blocks(weight), x, along_last(pull))[1]) > 0.01


@for_each("name", ["fp8", "fp8-rowwise", "fp8:weight-gradient=bf16"])
def test_codes_of_a_native_precision_are_convolved_as_their_values(name: str) -> None:
    """Hardware's FP8 multiplies matrices; the convolution takes codes and scales apart again."""
    x, pull = given(2, 6, 6, 16), given(2, 6, 6, 16, seed=3)
    native = convolution(precisions.get(name).arithmetic(H200), 16, 16)
    emulated = convolution(precisions.get(name).arithmetic(CPU), 16, 16)
    assert isinstance(native.arithmetic, ScaledArithmetic) and not isinstance(emulated.arithmetic, ScaledArithmetic)
    for one, other in zip(outcome(native, x, pull), outcome(emulated, x, pull), strict=True):
        assert relative_frobenius(one, other) < 1e-3


def test_batch_norm_is_torchs_own() -> None:
    """Statistics of the batch, in fp32 for bf16 images too."""
    norm, own = BatchNorm(5), nn.BatchNorm2d(5, dtype=torch.float64)
    with torch.no_grad():
        for parameter, others in zip(norm.parameters(), own.parameters(), strict=True):
            parameter.copy_(given(5))
            others.copy_(given(5))
    x = given(3, 4, 6, 5, dtype=torch.bfloat16) + 100
    wanted = own(x.double().permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert norm(x).dtype == torch.bfloat16 and norm(x).shape == x.shape
    assert relative_frobenius(norm(x), wanted) < 3e-3
    assert relative_frobenius(norm(x.float()), wanted) < 1e-4


def test_the_block_is_two_convolutions_with_norms_and_a_residual() -> None:
    """By the definition."""
    torch.manual_seed(4)
    block = ResidualBlock(6, lambda name: PlainArithmetic(torch.float64)).double()
    x = given(2, 5, 5, 6, dtype=torch.float64)
    images = x.permute(0, 3, 1, 2)
    hidden = images
    for index, one in enumerate((block.first, block.second)):
        y = functional.conv2d(hidden, as_torch(one.weight.detach()), padding=1)
        mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), correction=0, keepdim=True)
        normal = (y - mean) / (variance + 1e-5).sqrt()
        hidden = torch.relu(normal + (images if index else 0))
    assert relative_frobenius(block(x, SilentPhases()), hidden.permute(0, 2, 3, 1)) < 1e-12
    assert not torch.equal(block.first.weight, block.second.weight)


def test_weights_keep_the_spread_of_what_follows_a_relu() -> None:
    """He's initialisation: variance 2 over the contraction."""
    weight = convolution(PlainArithmetic(torch.float32), 64, 64).weight
    assert weight.shape == (64, 576) and float(weight.detach().std()) == pytest.approx((2 / 576) ** 0.5, rel=0.05)
