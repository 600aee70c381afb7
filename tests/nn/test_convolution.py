"""The convolution against torch's own, its three contractions, the phases it marks, and the block around it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from fp8bench.devices.cpu import HostStamper
from fp8bench.formats.grids import E2M1
from fp8bench.formats.scaled import values
from fp8bench.formats.scalings import NVFP4
from fp8bench.model import CELL_PHASES
from fp8bench.nn.arithmetics import EmulatedArithmetic, PlainArithmetic
from fp8bench.nn.convolution import BatchNorm, Convolution, ResidualBlock
from fp8bench.nn.recipe_arithmetic import ScaledArithmetic
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker.clock import PhaseClock
from tests.facts import CPU, H200

Outcome = tuple[Tensor, Tensor, Tensor]


def layer(arithmetic: Arithmetic, inputs: int = 32, outputs: int = 64) -> Convolution:
    torch.manual_seed(1)
    return Convolution(inputs, outputs, arithmetic)


def given(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(convolution: Convolution, x: Tensor, pull: Tensor) -> Outcome:
    """Output, input gradient and weight gradient."""
    x = x.detach().requires_grad_()
    y = convolution(x, SilentPhases())
    x_gradient, weight_gradient = torch.autograd.grad(y, (x, convolution.weight), pull.to(y.dtype))
    return y.detach(), x_gradient, weight_gradient


def as_torch(weight: Tensor) -> Tensor:
    """(outputs, window x inputs) as (outputs, inputs, 3, 3), spelt out."""
    inputs = weight.shape[1] // 9
    moved = torch.empty(weight.shape[0], inputs, 3, 3, dtype=weight.dtype)
    for row in range(3):
        for column in range(3):
            start = (3 * row + column) * inputs
            moved[:, :, row, column] = weight[:, start : start + inputs]
    return moved


def as_rows(weight: Tensor) -> Tensor:
    """The way back."""
    return torch.cat([weight[:, :, row, column] for row in range(3) for column in range(3)], dim=1)


def torchs_own(weight: Tensor, x: Tensor, pull: Tensor) -> Outcome:
    """The same by F.conv2d and autograd, in fp64, channels second."""
    images = x.detach().double().permute(0, 3, 1, 2).contiguous().requires_grad_()
    windows = as_torch(weight.detach().double()).requires_grad_()
    y = functional.conv2d(images, windows, padding=1)
    gradients = torch.autograd.grad(y, (images, windows), pull.double().permute(0, 3, 1, 2).contiguous())
    return y.detach().permute(0, 2, 3, 1), gradients[0].permute(0, 2, 3, 1), as_rows(gradients[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize(("batch", "height", "width", "inputs", "outputs"), [(2, 6, 5, 3, 7), (1, 1, 1, 4, 4)])
def test_forward_and_gradients_are_torchs_own(
    dtype: torch.dtype, tolerance: float, batch: int, height: int, width: int, inputs: int, outputs: int
) -> None:
    """Images of one pixel included."""
    convolution = layer(PlainArithmetic(dtype), inputs, outputs).to(dtype)
    x, pull = given(batch, height, width, inputs, dtype=dtype), given(batch, height, width, outputs, seed=3)
    found, exact = outcome(convolution, x, pull), torchs_own(convolution.weight, x, pull)
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape and one.dtype == dtype
        assert relative_frobenius(one, other) < tolerance


@pytest.mark.parametrize(
    ("name", "limit"),
    [("fp32", 1e-6), ("tf32", 1e-3), ("fp16", 2e-3), ("bf16", 1e-2), ("fp8", 0.1), ("mxfp8", 0.1), ("nvfp4", 0.3),
     ("mxfp4", 0.4)],
)  # fmt: skip
def test_every_precision_is_close_to_the_exact_result(name: str, limit: float) -> None:
    """As close as its bits allow, and no closer than its name says."""
    convolution = layer(precisions.get(name).arithmetic(CPU))
    x, pull = given(4, 8, 8, 32), given(4, 8, 8, 64, seed=3)
    for one, other in zip(outcome(convolution, x, pull), torchs_own(convolution.weight, x, pull), strict=True):
        assert limit / 100 < relative_frobenius(one, other) < limit


def blocks(tensor: Tensor) -> Tensor:
    return values(tensor, E2M1, NVFP4)


def rounded(tensor: Tensor, role: Role) -> Tensor:
    return blocks(tensor)


def test_block_scaled_products_round_along_their_own_contractions() -> None:
    """Pixels along channels for the output, gradients along output channels, both along positions for the weights."""
    convolution = layer(EmulatedArithmetic(torch.float32, rounded, keeps_source=True))
    x, pull = given(2, 8, 8, 32), given(2, 8, 8, 64, seed=3)
    weight = convolution.weight.detach()
    y, x_gradient, weight_gradient = outcome(convolution, x, pull)

    def along_last(tensor: Tensor) -> Tensor:
        return blocks(tensor.reshape(-1, tensor.shape[-1])).view(tensor.shape)

    def along_positions(tensor: Tensor) -> Tensor:
        return blocks(tensor.reshape(-1, tensor.shape[-1]).t()).t().reshape(tensor.shape)

    wanted_y, _, _ = torchs_own(blocks(weight), along_last(x), pull)
    _, wanted_x, _ = torchs_own(blocks(weight.t()).t(), x, along_last(pull))
    _, _, wanted_weight = torchs_own(weight, along_positions(x), along_positions(pull))
    for one, other in ((y, wanted_y), (x_gradient, wanted_x), (weight_gradient, wanted_weight)):
        assert relative_frobenius(one, other) < 1e-6
    across = torchs_own(blocks(weight), along_positions(x), along_positions(pull))
    assert relative_frobenius(y, across[0]) > 0.01
    assert relative_frobenius(weight_gradient, torchs_own(weight, along_last(x), along_last(pull))[2]) > 0.01
    assert relative_frobenius(x_gradient, torchs_own(blocks(weight), x, along_last(pull))[1]) > 0.01


@pytest.mark.parametrize("keeps_source", [False, True])
def test_operands_are_cast_once_unless_scales_run_along_the_contraction(keeps_source: bool) -> None:
    """As matrices with the contraction last."""
    seen: list[tuple[Role, tuple[int, ...]]] = []

    def note(tensor: Tensor, role: Role) -> Tensor:
        seen.append((role, tuple(tensor.shape)))
        return tensor.detach().float()

    convolution = layer(EmulatedArithmetic(torch.float32, note, keeps_source))
    x, pull = given(2, 4, 4, 32), given(2, 4, 4, 64)
    for one, other in zip(outcome(convolution, x, pull), torchs_own(convolution.weight, x, pull), strict=True):
        assert relative_frobenius(one, other) < 1e-6
    once = [(Role.INPUT, (32, 32)), (Role.WEIGHT, (64, 288)), (Role.GRADIENT, (32, 64))]
    turned = [(Role.WEIGHT, (288, 64)), (Role.GRADIENT, (64, 32)), (Role.INPUT, (32, 32))]
    assert seen == (once + turned if keeps_source else once)


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "fp8:weight-gradient=bf16"])
def test_codes_of_a_native_precision_are_convolved_as_their_values(name: str) -> None:
    """Hardware's FP8 multiplies matrices; the convolution takes codes and scales apart again."""
    x, pull = given(2, 6, 6, 16), given(2, 6, 6, 16, seed=3)
    native = layer(precisions.get(name).arithmetic(H200), 16, 16)
    emulated = layer(precisions.get(name).arithmetic(CPU), 16, 16)
    assert isinstance(native.arithmetic, ScaledArithmetic) and not isinstance(emulated.arithmetic, ScaledArithmetic)
    for one, other in zip(outcome(native, x, pull), outcome(emulated, x, pull), strict=True):
        assert relative_frobenius(one, other) < 1e-3


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
def test_the_master_weights_gradient_is_fp32(name: str) -> None:
    """The output has the carrier's dtype, the input's gradient the input's."""
    arithmetic = precisions.get(name).arithmetic(CPU)
    y, x_gradient, weight_gradient = outcome(layer(arithmetic), given(1, 4, 4, 32), given(1, 4, 4, 64))
    assert y.dtype == arithmetic.carrier == torch.bfloat16 and y.is_contiguous()
    assert x_gradient.dtype == torch.float32 and weight_gradient.dtype == torch.float32


def phases_of(name: str, needs_gradient: bool = True) -> tuple[list[str], list[str]]:
    """The phases marked in forward and in backward."""
    clock = PhaseClock(HostStamper())
    convolution = layer(precisions.get(name).arithmetic(CPU))
    x = given(1, 4, 4, 32).requires_grad_(needs_gradient)
    marks = []
    clock.begin()
    y = convolution(x, clock)
    marks.append(clock.end()[0])
    clock.begin()
    y.backward(torch.ones_like(y))
    marks.append(clock.end()[0])
    forward, backward = (
        [CELL_PHASES[code] for code in codes if CELL_PHASES[code] != "unattributed"] for codes in marks
    )
    return forward, backward


def test_casts_and_products_are_marked_in_order() -> None:
    """Backward too, which our own Function marks; fp32 casts nothing, a first layer needs no input gradient."""
    assert phases_of("bf16") == (["cast", "gemm"], ["cast", "cast", "gemm", "cast", "gemm", "cast"])
    assert phases_of("fp32") == (["gemm"], ["gemm", "gemm"])
    assert phases_of("fp32", needs_gradient=False) == (["gemm"], ["gemm"])


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
    for index, convolution in enumerate((block.first, block.second)):
        y = functional.conv2d(hidden, as_torch(convolution.weight.detach()), padding=1)
        mean, variance = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), correction=0, keepdim=True)
        normal = (y - mean) / (variance + 1e-5).sqrt()
        hidden = torch.relu(normal + (images if index else 0))
    assert relative_frobenius(block(x, SilentPhases()), hidden.permute(0, 2, 3, 1)) < 1e-12
    assert not torch.equal(block.first.weight, block.second.weight)


def test_weights_keep_the_spread_of_what_follows_a_relu() -> None:
    """He's initialisation: variance 2 over the contraction."""
    weight = layer(PlainArithmetic(torch.float32), 64, 64).weight
    assert weight.shape == (64, 576) and float(weight.detach().std()) == pytest.approx((2 / 576) ** 0.5, rel=0.05)


def test_an_operand_with_a_scale_is_saved_and_given_back() -> None:
    """Codes and scales are two tensors."""

    class Halved(Arithmetic):
        carrier = torch.float32

        def cast(self, tensor: Tensor, role: Role) -> Operand:
            return Operand(tensor.detach() / 2, torch.tensor(2.0))

        def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
            raise AssertionError("a convolution is no matrix product")

        def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
            return Operand(operand.data.t(), operand.scale)

    convolution = layer(Halved())
    x, pull = given(2, 4, 4, 32), given(2, 4, 4, 64)
    for one, other in zip(outcome(convolution, x, pull), torchs_own(convolution.weight, x, pull), strict=True):
        assert relative_frobenius(one, other) < 1e-6
