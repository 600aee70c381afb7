"""Native products with block scales, as far as a CPU can check: codes, layouts, and torch's shape rules.

No CPU has their kernel; a replacement reads codes and scales at the places that cuBLAS documents.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fp8bench.formats.codes import decode
from fp8bench.formats.grids import E2M1
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.block_arithmetic import BlockArithmetic
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import B200, CPU, H200
from tests.formats.scaling_definitions import gaussian
from tests.nn.layers import linear, outcome

HOPPER = ("fp8-block", "fp8-block:scale=exact", "fp8-block:weight-gradient=bf16")
BLACKWELL = ("mxfp8", "mxfp8:scale=floor", "nvfp4", "nvfp4:weights=1d:stochastic=off", "nvfp4:hadamard=off")
MODES = [(mode, H200) for mode in HOPPER] + [(mode, B200) for mode in BLACKWELL]
each_mode = for_each("mode", [*HOPPER, *BLACKWELL])
SPANS = {
    ScalingType.BlockWise1x128.value: 128,
    ScalingType.BlockWise128x128.value: 128,
    ScalingType.BlockWise1x32.value: 32,
    ScalingType.BlockWise1x16.value: 16,
}


def pair(mode: str) -> tuple[BlockArithmetic, RecipeArithmetic]:
    native, emulated = (precisions.get(mode).arithmetic(facts).layer("one") for facts in (dict(MODES)[mode], CPU))
    assert isinstance(native, BlockArithmetic) and type(emulated) is RecipeArithmetic
    return native, emulated


def sources(height: int = 256, width: int = 384) -> Tensor:
    """Rows and columns vary so much in size that a misplaced scale gives a large error."""
    sizes = torch.logspace(-3, 3, height)[:, None] * torch.logspace(2, -2, width)
    return gaussian(height, width) * sizes


@for_each("role", list(Role))
@each_mode
def test_codes_are_the_emulated_values(mode: str, role: Role) -> None:
    native, emulated = pair(mode)
    for tensor in (sources(), sources(48, 64).to(torch.bfloat16), sources(130, 96), torch.zeros(16, 32)):
        operand, theirs = native.cast(tensor, role), emulated.cast(tensor, role)
        assert operand.scale is not None and operand.data.is_contiguous() and operand.data.element_size() == 1
        assert torch.equal(native.restore(operand, torch.float32), theirs.data)
        ours, expected = native.turn(operand, tensor, role), emulated.turn(theirs, tensor, role)
        assert torch.equal(native.restore(ours, torch.float32), expected.data.float())


@for_each("role", list(Role))
@each_mode
def test_codes_without_a_scale_are_codes_too(mode: str, role: Role) -> None:
    native, emulated = pair(mode)
    for tensor in (sources(), sources(48, 64).to(torch.bfloat16), sources(130, 96).t(), torch.zeros(0, 32)):
        operand, theirs = native.cast_without_scale(tensor, role), emulated.cast_without_scale(tensor, role)
        assert operand.scale is None and operand.data.is_contiguous()
        halved = 1 + (native.treatments[role].fmt is E2M1)
        assert operand.data.untyped_storage().nbytes() * halved == tensor.numel()
        assert torch.equal(native.restore(operand, torch.float32), theirs.data)


@for_each("mode", BLACKWELL)
def test_odd_rows_come_back_as_long_as_they_were(mode: str) -> None:
    """Two E2M1 codes share a byte, and the last byte is half full."""
    native, emulated = pair(mode)
    tensor = sources(48, 33)
    for cast in ("cast", "cast_transpose", "cast_without_scale"):
        operand, theirs = (getattr(each, cast)(tensor, Role.WEIGHT) for each in (native, emulated))
        assert torch.equal(native.restore(operand, torch.float32), theirs.data.float())
    straight, turned = native.cast_both(tensor, Role.GRADIENT)
    assert turned is None or native.restore(turned, torch.float32).shape == (33, 48)
    assert native.restore(straight, torch.float32).shape == (48, 33)


def test_the_squares_of_weights_are_turned_without_another_cast() -> None:
    native, _ = pair("fp8-block")
    operand = native.cast(sources(), Role.WEIGHT)
    turned = native.turn(operand, torch.full((256, 384), torch.nan), Role.WEIGHT)
    assert torch.equal(native.restore(turned, torch.float32), native.restore(operand, torch.float32).t())


def documented(codes: Tensor, scales: list[Tensor], kinds: list[int], swizzles: list[int]) -> Tensor:
    """The values of an operand from the scale places documented by torch and cuBLAS, one by one in fp64."""
    values = codes.to(torch.float64) if codes.element_size() == 1 and codes.dtype != torch.float4_e2m1fn_x2 else None
    if values is None:
        halves = codes.view(torch.uint8)
        both = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)
        values = decode(both, E2M1).to(torch.float64)
    span, (rows, columns) = SPANS[kinds[0]], values.shape
    for row in range(rows):
        for block in range(-(-columns // span)):
            if kinds[0] == ScalingType.BlockWise128x128.value:
                scale = scales[0][block, row // 128]
            elif kinds[0] == ScalingType.BlockWise1x128.value:
                scale = scales[0][row, block]
            else:
                assert swizzles[0] == SwizzleType.SWIZZLE_32_4_4.value and scales[0].dim() == 1
                wide = math.ceil(columns / span / 4)
                tile = (row // 128) * wide + block // 4
                scale = scales[0][tile * 512 + (row % 32) * 16 + row % 128 // 32 * 4 + block % 4]
            values[row, block * span : (block + 1) * span] *= scale.to(torch.float64)
    for scale in scales[1:]:
        values *= scale.to(torch.float64)
    return values


def kernel(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    """Multiplies part by part, with the codes and scales that the documentation assigns to each."""
    scales_a, kinds_a, swizzles_a, scales_b, kinds_b, swizzles_b, bias, output, contraction, fast = others
    assert bias is None and contraction == [] and not fast
    exact = documented(a, scales_a, kinds_a, swizzles_a) @ documented(b.t(), scales_b, kinds_b, swizzles_b).t()
    return exact.to(output)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._meta_registrations import meta_scaled_mm_v2

    def checked(a: Tensor, b: Tensor, *others: Any) -> Tensor:
        result = kernel(a, b, *others)
        assert result.shape == meta_scaled_mm_v2(a, b, *others).shape
        return result

    monkeypatch.setattr("torch._meta_registrations.device_hint", lambda tensor: "cuda")
    monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "default", checked)


@pytest.mark.usefixtures("cuda")
@each_mode
def test_layers_are_the_emulated_ones(mode: str) -> None:
    outcomes = [outcome(linear(one, 256, 128), sources(256, 256), sources(256, 128)) for one in pair(mode)]
    for native, emulated in zip(*outcomes, strict=True):
        assert native.dtype == emulated.dtype and relative_frobenius(native.double(), emulated.double()) < 4e-3


@each_mode
def test_nan_and_infinity_stay_what_emulation_makes_of_them(mode: str) -> None:
    native, emulated = pair(mode)
    for bad in (torch.nan, torch.inf, -torch.inf):
        tensor = sources(128, 256)
        tensor[5, 7] = bad
        result = native.restore(native.cast(tensor, Role.INPUT), torch.float32)
        expected = emulated.cast(tensor, Role.INPUT).data
        if bad != bad:
            assert torch.equal(result.isnan(), expected.isnan())
        else:
            assert result[5, 7].abs() >= expected[5].abs()[expected[5].isfinite()].max()
