"""The linear layer against torch's own, and the phases it marks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from fp8bench.formats.grids import E4M3
from fp8bench.formats.scaled import values
from fp8bench.formats.scalings import MX
from fp8bench.model import CELL_PHASES
from fp8bench.nn.arithmetics import EmulatedArithmetic, PlainArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases, Stamper
from fp8bench.registry import precisions
from fp8bench.worker.clock import PhaseClock
from tests.facts import CPU


class CountingStamper(Stamper):
    """A clock that ticks once a stamp."""

    def __init__(self) -> None:
        self.ticks = 0

    def source(self):  # type: ignore[no-untyped-def]
        def stamp() -> int:
            self.ticks += 1
            return self.ticks

        return stamp

    def intervals_ns(self, stamps):  # type: ignore[no-untyped-def]
        return [1] * (len(stamps) - 1)


def layer(arithmetic: Arithmetic, inputs: int = 64, outputs: int = 32) -> Linear:
    torch.manual_seed(1)
    return Linear(inputs, outputs, arithmetic)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def forward_and_gradients(linear: Linear, x: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().requires_grad_()
    linear.weight.grad = None
    y = linear(x, SilentPhases())
    y.backward(pull.to(y.dtype))
    assert x.grad is not None and linear.weight.grad is not None
    return y.detach(), x.grad, linear.weight.grad


def torchs_own(linear: Linear, x: Tensor, pull: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same by F.linear and autograd, in fp64."""
    x = x.detach().double().requires_grad_()
    weight = linear.weight.detach().double().requires_grad_()
    y = functional.linear(x, weight)
    y.backward(pull.double())
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (1, 64)])
def test_forward_and_gradients_are_torchs_own(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    """In any number of leading dimensions."""
    linear = layer(PlainArithmetic(dtype)).to(dtype)
    x, pull = given(*shape, dtype=dtype), torch.randn(*shape[:-1], 32, dtype=dtype)
    found, exact = forward_and_gradients(linear, x, pull), torchs_own(linear, x, pull)
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
    linear = layer(precisions.get(name).arithmetic(CPU), 128, 64)
    x, pull = given(96, 128), torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    for one, other in zip(forward_and_gradients(linear, x, pull), torchs_own(linear, x, pull), strict=True):
        assert limit / 100 < relative_frobenius(one, other) < limit


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4"])
def test_the_master_weights_gradient_is_fp32(name: str) -> None:
    """The output and the input's gradient have the carrier's dtype and the input's."""
    arithmetic = precisions.get(name).arithmetic(CPU)
    y, x_gradient, weight_gradient = forward_and_gradients(layer(arithmetic), given(8, 64), torch.ones(8, 32))
    assert y.dtype == arithmetic.carrier == torch.bfloat16
    assert x_gradient.dtype == torch.float32 and weight_gradient.dtype == torch.float32


def phases_of(arithmetic: Arithmetic, x: Tensor) -> tuple[list[str], list[str]]:
    """The phases marked in forward and in backward, in order, neighbours that repeat joined."""
    clock = PhaseClock(CountingStamper())
    linear = layer(arithmetic)
    clock.begin()
    y = linear(x, clock)
    forward, _ = clock.end()
    clock.begin()
    y.sum().backward()
    backward, _ = clock.end()

    def marked(codes: list[int]) -> list[str]:
        return [CELL_PHASES[code] for code in codes if CELL_PHASES[code] != "unattributed"]

    return marked(forward), marked(backward)


def test_casts_and_products_are_marked_in_order() -> None:
    """Backward too, which our own Function marks."""
    forward, backward = phases_of(precisions.get("bf16").arithmetic(CPU), given(8, 64))
    assert forward == ["cast", "gemm"]
    # The gradient's cast, the turned weight, the input's product, the turned operands, the weight's product, to fp32.
    assert backward == ["cast", "cast", "gemm", "cast", "gemm", "cast"]


def test_where_a_cast_changes_nothing_none_is_marked() -> None:
    """fp32 shows products only."""
    assert phases_of(precisions.get("fp32").arithmetic(CPU), given(8, 64)) == (["gemm"], ["gemm", "gemm"])


def test_an_input_without_gradient_costs_no_product() -> None:
    """The first layer of a model computes its weight's gradient only."""
    _, backward = phases_of(precisions.get("fp32").arithmetic(CPU), given(8, 64).detach())
    assert backward == ["gemm"]


def test_a_frozen_weight_costs_no_product() -> None:
    """Then only the input's gradient is computed."""
    linear = layer(PlainArithmetic(torch.float32))
    linear.weight.requires_grad_(False)
    x = given(8, 64)
    linear(x, SilentPhases()).sum().backward()
    assert linear.weight.grad is None and x.grad is not None


class Recording(EmulatedArithmetic):
    """Rounds nothing, and writes down what is cast."""

    def __init__(self, keeps_source: bool) -> None:
        super().__init__(torch.float32, self._note, keeps_source)
        self.casts_seen: list[tuple[Role, tuple[int, ...]]] = []

    def _note(self, tensor: Tensor, role: Role) -> Tensor:
        self.casts_seen.append((role, tuple(tensor.shape)))
        return tensor.detach().float()


@pytest.mark.parametrize("keeps_source", [False, True])
def test_the_second_orientation_is_cast_from_the_source_where_scales_demand_it(keeps_source: bool) -> None:
    """Block scales run along the contraction; elsewhere the codes are turned, not cast again."""
    arithmetic = Recording(keeps_source)
    linear = layer(arithmetic)
    x, pull = given(8, 64), torch.randn(8, 32)
    found = forward_and_gradients(linear, x, pull)
    for one, other in zip(found, torchs_own(linear, x, pull), strict=True):
        assert relative_frobenius(one, other) < 1e-6
    once = [(Role.INPUT, (8, 64)), (Role.WEIGHT, (32, 64)), (Role.GRADIENT, (8, 32))]
    turned = [(Role.WEIGHT, (64, 32)), (Role.GRADIENT, (32, 8)), (Role.INPUT, (64, 8))]
    assert arithmetic.casts_seen == (once + turned if keeps_source else once)


def test_block_scaled_gradients_are_those_of_each_orientations_own_blocks() -> None:
    """The weight gradient is the product of operands rounded along the tokens."""

    def blocks(tensor: Tensor) -> Tensor:
        return values(tensor, E4M3, MX)

    def rounded(tensor: Tensor, role: Role) -> Tensor:
        return blocks(tensor)

    linear = layer(EmulatedArithmetic(torch.float32, rounded, keeps_source=True))
    x, pull = given(64, 64), torch.randn(64, 32)
    y, x_gradient, weight_gradient = forward_and_gradients(linear, x, pull)
    weight = linear.weight.detach()
    x = x.detach()
    assert torch.equal(y, blocks(x) @ blocks(weight).t())
    assert torch.equal(x_gradient, blocks(pull) @ blocks(weight.t()).t())
    assert torch.equal(weight_gradient, blocks(pull.t()) @ blocks(x.t()).t())


def test_an_operand_with_a_scale_is_saved_and_given_back() -> None:
    """Codes and scales are two tensors."""

    class Halved(Arithmetic):
        carrier = torch.float32

        def cast(self, tensor: Tensor, role: Role) -> Operand:
            return Operand(tensor.detach() / 2, torch.tensor(2.0))

        def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
            assert a.scale is not None and b.scale is not None
            return ((a.data * a.scale) @ (b.data * b.scale).t()).to(dtype)

        def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
            return Operand(operand.data.t(), operand.scale)

    linear = layer(Halved())
    x, pull = given(8, 64), torch.randn(8, 32)
    for one, other in zip(forward_and_gradients(linear, x, pull), torchs_own(linear, x, pull), strict=True):
        assert relative_frobenius(one, other) < 1e-6
