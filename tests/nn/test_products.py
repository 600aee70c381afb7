"""Linear layers and convolutions: products against torch's own, casts and phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fp8bench.devices.cpu import HostStamper
from fp8bench.formats.grids import E2M1
from fp8bench.formats.recipes import NVFP4
from fp8bench.formats.scaled import values
from fp8bench.model import CELL_PHASES
from fp8bench.nn.arithmetics import EmulatedArithmetic, PlainArithmetic, ScaledArithmetic
from fp8bench.nn.convolution import Convolution
from fp8bench.nn.linear import Linear, region
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Arithmetic, Operand, Role, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker.clock import PhaseStampClock
from tests.counts import for_each
from tests.facts import H200
from tests.nn.layers import (
    Outcome,
    arithmetic_of,
    convolution,
    given,
    linear,
    outcome,
    torchs_convolution,
    torchs_linear,
)


class Kind(NamedTuple):
    """A layer, the same by torch, and shapes of inputs and outputs."""

    make: Callable[..., Linear | Convolution]
    exact: Callable[[Tensor, Tensor, Tensor], Outcome]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # Tolerance of a bf16 backward.
    marks: tuple[str, ...]

    def layer(self, arithmetic: Arithmetic) -> Linear | Convolution:
        return self.make(arithmetic, self.inputs[-1], self.outputs[-1])

    def is_close(self, layer: Linear | Convolution, most: float, least: float = -1.0) -> None:
        dtype = torch.float64 if layer.arithmetic.carrier is torch.float64 else torch.float32
        x, pull = given(*self.inputs, dtype=dtype), given(*self.outputs, dtype=dtype, seed=3)
        for ours, theirs in zip(outcome(layer, x, pull), self.exact(layer.weight, x, pull), strict=True):
            assert ours.shape == theirs.shape and least < relative_frobenius(ours, theirs) < most


# A linear layer casts all operands before its products; a convolution turns each product's operands before it.
LINEAR = Kind(linear, torchs_linear, (96, 128), (96, 64), ("cast", "gemm", "gemm", "cast"))
CONVOLUTION = Kind(
    convolution, torchs_convolution, (4, 8, 8, 32), (4, 8, 8, 64), ("cast", "cast", "gemm", "cast", "gemm", "cast")
)
each_kind = pytest.mark.parametrize("kind", [LINEAR, CONVOLUTION], ids=["linear", "convolution"])


@for_each(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@for_each(
    "kind",
    [
        LINEAR._replace(inputs=(5, 64), outputs=(5, 32)),
        LINEAR._replace(inputs=(2, 3, 64), outputs=(2, 3, 32)),
        LINEAR._replace(inputs=(1, 64), outputs=(1, 32)),
        CONVOLUTION._replace(inputs=(2, 6, 5, 3), outputs=(2, 6, 5, 7)),
        CONVOLUTION._replace(inputs=(1, 1, 1, 4), outputs=(1, 1, 1, 4)),
    ],
)
def test_forward_and_gradients_are_torchs_own(kind: Kind, dtype: torch.dtype, tolerance: float) -> None:
    layer = kind.layer(PlainArithmetic(dtype)).to(dtype)
    kind.is_close(layer, tolerance)
    assert {tensor.dtype for tensor in outcome(layer, given(*kind.inputs, dtype=dtype), given(*kind.outputs))} == {
        dtype
    }


def phases_of(kind: Kind, name: str, needs_gradient: bool = True) -> tuple[list[str], list[str]]:
    clock = PhaseStampClock(HostStamper())
    layer, x = kind.layer(arithmetic_of(name)), given(*kind.inputs).requires_grad_(needs_gradient)
    clock.begin()
    y = layer(x, clock)
    forward, _ = clock.end()
    clock.begin()
    y.backward(torch.ones_like(y))
    backward, _ = clock.end()

    def marked(codes: list[int]) -> list[str]:
        return [CELL_PHASES[code] for code in codes if CELL_PHASES[code] != "unattributed"]

    return marked(forward), marked(backward)


@each_kind
def test_casts_and_products_are_marked_in_order(kind: Kind) -> None:
    # The last cast converts the weight's gradient to fp32.
    assert phases_of(kind, "bf16") == (["cast", "gemm"], [*kind.marks])
    assert phases_of(kind, "fp32") == (["gemm"], ["gemm", "gemm"])
    assert phases_of(kind, "fp32", needs_gradient=False) == (["gemm"], ["gemm"])


@each_kind
@pytest.mark.parametrize("keeps_source", [False, True])
def test_the_second_orientation_is_cast_from_the_source_where_scales_demand_it(kind: Kind, keeps_source: bool) -> None:
    """Block scales run along the contraction; otherwise the codes are transposed."""
    seen: list[tuple[Role, tuple[int, ...]]] = []

    def note(tensor: Tensor, role: Role) -> Tensor:
        seen.append((role, tuple(tensor.shape)))
        return tensor.detach().float()

    layer = kind.layer(EmulatedArithmetic(torch.float32, note, keeps_source))
    kind.is_close(layer, 1e-6)
    rows = given(*kind.inputs)[..., 0].numel()
    shapes = {
        Role.INPUT: (rows, kind.inputs[-1]),
        Role.WEIGHT: tuple(layer.weight.shape),
        Role.GRADIENT: (rows, kind.outputs[-1]),
    }
    turned = [(role, shapes[role][::-1]) for role in (Role.WEIGHT, Role.GRADIENT, Role.INPUT)]
    assert seen == [*shapes.items(), *(turned if keeps_source else [])]


class Halved(Arithmetic):
    """Codes and scales are two tensors."""

    carrier = torch.float32

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return Operand(tensor.detach() / 2, torch.tensor(2.0))

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        assert a.scale is not None and b.scale is not None
        return ((a.data * a.scale) @ (b.data * b.scale).t()).to(dtype)


class Both(Halved):
    """Returns both orientations of a cast, and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Role]] = []

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        self.asked.append(("cast", role))
        return super().cast(tensor, role)

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        self.asked.append(("both", role))
        operand = super().cast(tensor, role)
        return operand, Operand(operand.data.t().contiguous(), operand.scale)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        raise AssertionError("it was turned already")


def saved(layer: Linear, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    stored: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return layer(x, SilentPhases()), stored


def test_operands_that_no_gradient_needs_are_neither_turned_nor_kept() -> None:
    layer, x = linear(Both()), given(8, 64)
    assert isinstance(layer.arithmetic, Both)
    y, stored = saved(layer, x)
    y.sum().backward()
    assert layer.arithmetic.asked == [("both", Role.INPUT), ("cast", Role.WEIGHT), ("both", Role.GRADIENT)]
    assert [tuple(tensor.shape) for tensor in stored] == [(64, 8), ()] and layer.weight.grad is not None
    layer.arithmetic.asked.clear()
    layer.weight.requires_grad_(False)
    y, stored = saved(layer, x.requires_grad_())
    y.sum().backward()
    assert layer.arithmetic.asked == [("cast", Role.INPUT), ("both", Role.WEIGHT), ("cast", Role.GRADIENT)]
    assert [tuple(tensor.shape) for tensor in stored] == [(64, 32), ()]
    layer.arithmetic.asked.clear()
    with torch.no_grad():
        layer(x, SilentPhases())
    assert layer.arithmetic.asked == [("cast", Role.INPUT), ("cast", Role.WEIGHT)]


class Diary:
    """A marker that records when it is entered and left."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def __enter__(self) -> None:
        self.pages.append("in")

    def __exit__(self, *exc: object) -> None:
        self.pages.append("out")

    @property
    def open(self) -> bool:
        return self.pages[-1:] == ["in"]


class Watched(torch.autograd.Function):
    """Doubles, and records whether a marker is open in each direction."""

    @staticmethod
    def forward(ctx, x, diary, seen):  # type: ignore[no-untyped-def]
        ctx.diary, ctx.seen = diary, seen
        seen.append(("forward", diary.open))
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.seen.append(("backward", ctx.diary.open))
        return 2 * gradient, None, None


def test_the_marker_is_open_in_forward_and_in_backward_and_nowhere_else() -> None:
    diary = Diary()
    inside: list[tuple[str, bool]] = []
    outside: list[tuple[str, bool]] = []
    x = torch.ones(3, requires_grad=True)
    before = Watched.apply(x, diary, outside)
    middle = region(diary, lambda y: Watched.apply(y, diary, inside), before)
    after = Watched.apply(middle, diary, outside)
    after.sum().backward()
    assert inside == [("forward", True), ("backward", True)]
    assert outside == [("forward", False)] * 2 + [("backward", False)] * 2
    assert diary.pages == ["in", "out"] * 2
    assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 8.0))


def test_without_gradients_the_region_is_a_plain_block() -> None:
    diary, ones = Diary(), torch.ones(3)
    with pytest.raises(ValueError, match="needs no gradient"):
        region(diary, torch.add, torch.ones(3, requires_grad=True), ones)
    assert diary.pages == []
    with torch.no_grad():
        assert torch.equal(region(diary, torch.add, ones, ones), ones + ones)
        with pytest.raises(RuntimeError):
            region(diary, torch.mm, ones, ones)
    assert diary.pages == ["in", "out"] * 2


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
    for ours, theirs in ((y, wanted_y), (x_gradient, wanted_x), (weight_gradient, wanted_weight)):
        assert relative_frobenius(ours, theirs) < 1e-6


@for_each("name", ["fp8", "fp8-rowwise", "fp8:weight-gradient=bf16"])
def test_codes_of_a_native_precision_are_convolved_as_their_values(name: str) -> None:
    """Hardware multiplies only FP8 matrices, so the convolution decodes codes and scales."""
    x, pull = given(2, 6, 6, 16), given(2, 6, 6, 16, seed=3)
    native = convolution(precisions.get(name).arithmetic(H200), 16, 16)
    emulated = convolution(arithmetic_of(name), 16, 16)
    assert isinstance(native.arithmetic, ScaledArithmetic) and not isinstance(emulated.arithmetic, ScaledArithmetic)
    for ours, theirs in zip(outcome(native, x, pull), outcome(emulated, x, pull), strict=True):
        assert relative_frobenius(ours, theirs) < 1e-3
