"""Recipes beyond rounding: products by role, rotations, random numbers, short sums, and the memory of layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fp8bench.formats.grids import E2M1, E4M3, E5M2
from fp8bench.formats.recipes import HOPPER_SUM_BITS, MX, TENSOR, Accumulator, Recipe, Treatment
from fp8bench.formats.scaled import values
from fp8bench.model import DeviceFacts
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.nn.rotations import rotate
from fp8bench.nn.tensor_scales import ScaleAndInverse
from fp8bench.numerics.products import short_product
from fp8bench.protocols import Arithmetic, Operand, Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import B200, CPU, H200
from tests.formats.scaling_definitions import gaussian
from tests.nn.layers import outcome


def of(mode: str, layer: str = "") -> RecipeArithmetic:
    result = precisions.get(mode).arithmetic(CPU).layer(layer)
    assert isinstance(result, RecipeArithmetic)
    return result


def test_rotated_operands_are_rounded_after_they_were_turned() -> None:
    arithmetic = of("mxfp4:hadamard=on")
    source = gaussian(48, 64)
    for role in Role:
        operand = arithmetic.cast(source, role)
        assert torch.equal(operand.data, values(source, E2M1, MX))
        result = arithmetic.turn(operand, source, role).data
        assert torch.equal(result, arithmetic.cast_transpose(source.t(), role).data)
        if role is Role.WEIGHT:
            assert torch.equal(result, values(source.t(), E2M1, MX))
        else:
            signs = arithmetic._signs
            assert torch.equal(result, values(rotate(source.t(), signs), E2M1, MX))
            assert not torch.equal(result, values(source.t(), E2M1, MX))


def test_random_numbers_differ_from_cast_to_cast_and_can_be_had_again() -> None:
    source = gaussian(64, 64)

    def casts(name: str) -> list[Tensor]:
        arithmetic = of("mxfp4:stochastic=on", name)
        first = arithmetic.cast(source, Role.GRADIENT)
        turn = arithmetic.turn(first, source, Role.GRADIENT)
        return [first.data, turn.data.t(), arithmetic.cast(source, Role.GRADIENT).data]

    one, again, other = casts("a"), casts("a"), casts("b")
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    for a, b in itertools.combinations([*one, *other], 2):
        assert not torch.equal(a, b)
    arithmetic = of("mxfp4:stochastic=on")
    assert torch.equal(arithmetic.cast(source, Role.INPUT).data, arithmetic.cast(source, Role.INPUT).data)


@for_each("facts", [CPU, H200, B200])
@for_each(
    "mode",
    [
        "fp8",
        "fp8-delayed:history=2",
        "fp8-rowwise",
        "fp8:weight-gradient=bf16",
        "mxfp8",
        "nvfp4",
        "nvfp4:hadamard=off",
        "nvfp4:hadamard=off:gw=bf16",
        "fp8-block",
    ],
)
def test_both_operands_are_those_of_a_cast_and_a_turn(mode: str, facts: DeviceFacts) -> None:
    """Bit for bit, cast after cast; none if a separate cast is needed, and a gradient stays one.

    Native NVFP4 rotates and draws for both at once.
    """
    one, other = (precisions.get(mode).arithmetic(facts).layer("a") for _ in range(2))
    both: set[Role] = set()
    for step, role in itertools.product(range(2), Role):
        source = gaussian(48, 64, seed=step) * 4.0**step
        operand, turned = one.cast_both(source, role)
        expected = other.cast(source, role)
        assert_same(operand, expected)
        expected = other.turn(expected, source, role)
        assert_same(one.turn(operand, source, role) if turned is None else turned, expected)
        both.update([] if turned is None else [role])
    per_tensor = set(Role) if mode in ("fp8", "fp8-delayed:history=2") else set()
    assert both >= per_tensor
    if mode.startswith("nvfp4"):
        assert both == (set(Role) if facts is B200 and "gw" not in mode else {Role.WEIGHT})


def assert_same(one: Operand, other: Operand) -> None:
    assert one.gradient == other.gradient and (one.scale is None) == (other.scale is None)
    for mine, theirs in ((one.data, other.data), (one.scale, other.scale)):
        if mine is not None and theirs is not None:
            numbers, expected = (
                item.view(torch.uint8) if item.dtype == torch.float4_e2m1fn_x2 else item.float()
                for item in (mine, theirs)
            )
            assert mine.is_contiguous() == theirs.is_contiguous() and torch.equal(numbers, expected)


@for_each("mode", ["fp8:accumulator=short", "fp8:accumulator=8", "fp8-block:accumulator=promoted"])
def test_sums_of_few_bits_are_taken_in_all_three_products(mode: str) -> None:
    arithmetic = of(mode)
    assert arithmetic.explicit
    torch.manual_seed(0)
    layer, x, g = Linear(300, 70, arithmetic), gaussian(200, 300).bfloat16(), gaussian(200, 70).bfloat16()
    kind, weight = arithmetic.recipe.accumulator, layer.weight.detach()
    bits = 8 if mode.endswith("8") else HOPPER_SUM_BITS
    assert kind is (Accumulator.PROMOTED if "promoted" in mode else Accumulator.SHORT)
    operands = (
        (x, Role.INPUT, weight, Role.WEIGHT),
        (g, Role.GRADIENT, weight.t(), Role.WEIGHT),
        (g.t(), Role.GRADIENT, x.t(), Role.INPUT),
    )
    for result, (a, role_a, b, role_b) in zip(outcome(layer, x, g), operands, strict=True):
        expected = short_product(arithmetic.cast(a, role_a).data, arithmetic.cast(b, role_b).data, kind, bits)
        assert torch.equal(result.float(), expected.bfloat16().float())


def test_delayed_scales_are_those_of_one_layer_and_one_role() -> None:
    both: list[Arithmetic] = [of("fp8-delayed:history=1", name) for name in "ab"]
    large = torch.full((2, 2), 1000.0)
    assert both[0].cast(large, Role.INPUT).data.max() == 448.0
    assert both[0].cast(large, Role.INPUT).data.max() == pytest.approx(1000.0)
    assert both[0].cast(large, Role.WEIGHT).data.max() == 448.0
    assert both[1].cast(large, Role.INPUT).data.max() == 448.0


def test_given_scales_take_the_place_of_those_of_the_recipe() -> None:
    class Fixed:
        def next(self, x: Tensor, again: bool = False, amax: Tensor | None = None) -> ScaleAndInverse:
            return ScaleAndInverse(torch.tensor(2.0), torch.tensor(0.5))

    recipe = Recipe(Treatment(E4M3, TENSOR), Treatment(E4M3, TENSOR), Treatment(E5M2, TENSOR))
    arithmetic, x = RecipeArithmetic(recipe, scales={Role.INPUT: Fixed()}), 100 * gaussian(16, 16)
    assert torch.equal(arithmetic.cast(x, Role.INPUT).data, values(x, E4M3, TENSOR, scale=torch.tensor(2.0)))
    assert torch.equal(arithmetic.cast(x, Role.GRADIENT).data, values(x, E5M2, TENSOR))
