"""Native casts to MX and NVFP4: equal to stored tensors in their layout, and compiled equal to eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.formats.codes import unpack_codes
from fp8bench.formats.grids import E2M1, E4M3, E5M2, E8M0, Format
from fp8bench.formats.quantise import Draw
from fp8bench.formats.recipes import MX, NVFP4, NVFP4_ROUNDED_UP, NVFP4_SQUARE, ScaleRounding, Scaling
from fp8bench.formats.scale_layouts import (
    read_square_scales,
    store_by_columns,
    store_square_scales,
    swizzle,
    unswizzle_scales,
)
from fp8bench.formats.scaled import quantise
from fp8bench.formats.tiled_codes import tiled_codes, tiled_codes_both, unscaled_codes
from tests.counts import for_each, sampled
from tests.formats.scaling_definitions import gaussian
from tests.formats.test_operators import AWKWARD, BF16, F16, F32, Operators, assert_fused, counted

MX_FLOOR = Scaling(1, 32, E8M0, ScaleRounding.FLOOR)
SEED = torch.tensor([11])


class Cast(NamedTuple):
    """A cast to test."""

    fmt: Format
    scaling: Scaling
    source: torch.dtype
    seed: Tensor | None = None

    def __str__(self) -> str:
        source = str(self.source).removeprefix("torch.")
        return f"{self.fmt.name} {self.scaling.name} {source}{' stochastic' * (self.seed is not None)}"


CASTS = [
    Cast(E4M3, MX, BF16),
    Cast(E5M2, MX_FLOOR, F32),
    Cast(E4M3, MX, F16, SEED),
    Cast(E2M1, MX, BF16),
    Cast(E2M1, NVFP4, BF16),
    Cast(E2M1, NVFP4_ROUNDED_UP, F32, SEED),
    Cast(E2M1, NVFP4_SQUARE, F32),
]


def pieces(source: torch.dtype) -> Iterator[Tensor]:
    """Matrices that fill their tiles, only their blocks, or neither; transposed; slices; one row."""
    x = AWKWARD.to(source)
    whole = torch.cat([x, x.flip(0)])[:256].contiguous()
    yield from (whole, whole.t(), x, x.t(), x[:, :128], x[:45, :200], x[:45, :200].t(), x[:1], x[:, :1], x[:64:2, ::2])
    yield from (whole.repeat(2, 2), torch.zeros(128, 128, dtype=source), x[:130, :96].contiguous().t())


def cast(x: Tensor, how: Cast) -> list[Tensor]:
    draw = None if how.seed is None else seeded(how.seed.to(x.device))
    return [one.view(torch.uint8) for one in tiled_codes(x, how.fmt, how.scaling, draw)]


def seeded(seed: Tensor, steps: tuple[int, ...] = (1,)) -> Draw:
    """A random draw that starts with this seed."""
    return Draw(seed - steps[0], torch.zeros_like(seed), steps)


def stored(x: Tensor, how: Cast) -> list[Tensor]:
    """The same from stored tensors, laid out afterwards."""
    result = quantise(x, how.fmt, how.scaling, seed=how.seed)
    assert result.scales is not None
    each = result.scales.repeat_interleave(how.scaling.rows, 0)[: len(x)]
    above = [] if result.tensor_scale is None else [result.tensor_scale.reshape(1).view(torch.uint8)]
    return [result.codes.view(torch.uint8), torch.cat([swizzle(each), *above])]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(found, wanted, strict=True))


@for_each("how", CASTS)
def test_codes_are_stored_ones(how: Cast) -> None:
    """Stored ones are compared with definitions in test_scaled.py, scale positions below."""
    for x in pieces(how.source):
        assert same(cast(x, how), stored(x, how)), (x.shape, x.stride())


def both_ways(x: Tensor, how: Cast) -> list[Tensor]:
    """For the matrix and its transpose."""
    return [one.view(torch.uint8) for pair in tiled_codes_both(x, x.t(), how.fmt, how.scaling) for one in pair]


@for_each("how", [one for one in CASTS if one.seed is None])
def test_both_ways_are_each_by_itself(how: Cast) -> None:
    for x in pieces(how.source):
        assert same(both_ways(x, how), [*stored(x, how), *stored(x.t(), how)]), (x.shape, x.stride())


@for_each("how", [CASTS[2], CASTS[5]])
def test_both_ways_take_seeds_that_follow_each_other(how: Cast) -> None:
    assert how.seed is not None
    for x in pieces(how.source):
        draw = seeded(how.seed, (1, 2))
        both = tiled_codes_both(x, x.t(), how.fmt, how.scaling, draw)
        expected = [*stored(x, how), *stored(x.t(), how._replace(seed=how.seed + 1))]
        assert same([one.view(torch.uint8) for pair in both for one in pair], expected), (x.shape, x.stride())
        assert torch.equal(draw.after, how.seed + 1)


def test_each_way_may_have_a_largest_magnitude_of_its_own() -> None:
    x, other = gaussian(128, 64), 8 * gaussian(64, 128)
    peaks = [one.abs().amax(1) for one in (x, other)]
    result = tiled_codes_both(x, other, E2M1, NVFP4, amaxes=peaks)
    for pair, source in zip(result, (x, other), strict=True):
        assert same([one.view(torch.uint8) for one in pair], stored(source, CASTS[4]))
    shared = tiled_codes_both(x, other, E2M1, NVFP4)
    assert not torch.equal(shared[1][1], result[1][1]) and torch.equal(shared[0][1], result[0][1])


def unscaled(x: Tensor) -> list[Tensor]:
    return [unscaled_codes(x).view(torch.uint8)]


def test_e2m1_codes_without_a_scale_are_those_of_ml_dtypes() -> None:
    """NaN, which has no code, becomes the largest, as in a GPU's saturating conversion."""
    halves = torch.arange(-32, 33) / 4  # every number, every tie, and values beyond
    x = torch.cat([halves, torch.tensor([torch.inf, -torch.inf, 1e-45, -0.0, torch.nan])]).repeat(3, 1)
    for tensor in (x, x.t(), x[:, ::2], x[:1].to(BF16)):
        expected = (
            tensor.float().nan_to_num(6.0).numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        )
        (codes,) = unscaled(tensor)
        result = unpack_codes(codes, E2M1)
        assert np.array_equal(result[:, : tensor.shape[1]].numpy(), expected) and not result[:, tensor.shape[1] :].any()


@pytest.mark.slow
@pytest.mark.parametrize("source", sampled([BF16], [F32, BF16]), ids=str)
def test_compiled_codes_without_a_scale_are_eager_ones(source: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fused(monkeypatch, unscaled, [*pieces(source)], same)


@for_each("device", ["cpu", "meta"])
def test_a_call_is_one_operator_under_a_dispatch_mode(device: str) -> None:
    """NVFP4's tensor scale is a second one; full tiles need nothing else."""
    x, draw = torch.zeros(256, 256, device=device), seeded(SEED.to(device))
    with Operators() as seen:
        tiled_codes(x.t(), E4M3, MX)
        tiled_codes(x, E2M1, NVFP4, draw, x.view(-1))
    allowed = ("empty", "detach", "aten.t.", "view", "slice", "alias", "permute")
    assert [name for name in seen.names if not any(word in name for word in allowed)] == [
        f"fp8bench.{name}.default" for name in ("tiled_codes", "tensor_scales", "tiled_codes")
    ]
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        tiled_codes(torch.zeros(32, 32, dtype=torch.float64), E4M3, MX)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [CASTS[0], CASTS[4], CASTS[6]], ids=str)
def test_compiled_both_ways_are_each_by_itself(how: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for both, and one for a tensor's scale."""
    x = AWKWARD.to(how.source)
    many = [torch.cat([x, x.flip(0)])[:256, :128].contiguous(), x[:128].contiguous(), x[:128].repeat(3, 1)]
    assert_fused(monkeypatch, lambda one: both_ways(one, how), many, same)
    assert counted()[1] == (1 + (how.scaling.scale is E4M3)) * len(many)


@pytest.mark.slow
@pytest.mark.parametrize("how", sampled([CASTS[0]], [CASTS[0], CASTS[5], CASTS[6]]), ids=str)
def test_compiled_is_eager_bit_by_bit(how: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fused(monkeypatch, lambda x: cast(x, how), [*pieces(how.source)], same)


SHAPES = [(1, 1), (1, 7), (9, 1), (128, 4), (33, 7), (129, 5), (300, 12), (256, 8)]


def numbered(down: int, across: int) -> torch.Tensor:
    """Distinct, non-zero numbers within a tile."""
    return (torch.arange(down * across) % 251 + 1).to(torch.uint8).view(down, across)


@for_each(("down", "across"), SHAPES)
def test_a_scale_lies_where_its_tile_says(down: int, across: int) -> None:
    """cuBLAS's formula: tiles of 128 x 4 in row-major order; padding is zero."""
    scales = numbered(down, across)
    laid = swizzle(scales)
    wide = -(-across // 4)
    expected = torch.zeros(-(-down // 128) * wide * 512, dtype=torch.uint8)
    for row in range(down):
        for column in range(across):
            tile = (row // 128) * wide + column // 4
            expected[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4] = scales[row, column]
    assert laid.is_contiguous() and torch.equal(laid, expected)
    assert torch.equal(unswizzle_scales(laid, down, across), scales)


@for_each(("down", "across"), SHAPES)
def test_float_scales_lie_by_columns(down: int, across: int) -> None:
    """The shapes and strides that torch requires on compute capability 9.0; padding is zero."""
    scales = numbered(down, across).float()
    laid, turned, filled = store_by_columns(scales), store_square_scales(scales), -(-across // 4) * 4
    assert torch.equal(laid, scales) and laid.shape == (down, across)
    assert laid.stride() == (1, down)
    assert turned.shape == (filled, down) and turned.stride() == (1, filled)
    assert torch.equal(turned[:across].t(), scales) and not turned[across:].any()
    assert torch.equal(read_square_scales(turned, across), scales)
