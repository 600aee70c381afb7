"""Every scaling, with any tensor: storage returns the same values."""

from __future__ import annotations

import itertools
from math import prod

import torch

from fp8bench.errors import RecipeRefused
from fp8bench.formats.codes import decode, unpack_codes
from fp8bench.formats.grids import E2M1, E2M3, E4M3, E5M2, E8M0, FORMATS, Format
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import (
    BLOCK,
    MX,
    MX_ELEMENTS,
    NVFP4,
    NVFP4_ROUNDED_UP,
    NVFP4_SQUARE,
    ROW,
    SQUARE,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    ScaleRounding,
    Scaling,
)
from fp8bench.formats.scaled import ScaledTensor, factor, quantise, values
from tests.counts import for_each
from tests.formats.scaling_definitions import differing, gaussian, outliers, patterns

MX_FLOOR = Scaling(1, 32, E8M0, ScaleRounding.FLOOR)
SCALINGS = [None, TENSOR, TENSOR_POWER_OF_TWO, ROW, Scaling(3, 0), BLOCK, SQUARE, MX, MX_FLOOR, NVFP4, NVFP4_ROUNDED_UP]
SCALINGS.append(NVFP4_SQUARE)
SHAPES = [(), (1,), (70,), (0,), (0, 40), (40, 0), (2, 3, 50), (2, 0, 3), (33, 130), (2, 1, 32, 64)]
SEED = torch.tensor([11])


def admitted(fmt: Format, scaling: Scaling | None) -> bool:
    if scaling is None:
        return True
    try:
        scaling.check(fmt)
    except RecipeRefused:
        return False
    return fmt is not E8M0


PAIRS = [(fmt, scaling) for fmt in FORMATS.values() for scaling in SCALINGS if admitted(fmt, scaling)]
each_pair = for_each(("fmt", "scaling"), PAIRS)
# One case for each path through the code.
each_kind = for_each(
    ("fmt", "scaling"),
    [
        (E4M3, None),
        (E4M3, TENSOR),
        (E5M2, ROW),
        (E4M3, BLOCK),
        (E4M3, SQUARE),
        (E2M3, MX),
        (E2M1, NVFP4),
        (E2M1, NVFP4_SQUARE),
    ],
)


def dequantised(stored: ScaledTensor) -> torch.Tensor:
    """Dequantises stored values: every element times its block's scale."""
    shape, scaling, scales = stored.shape, stored.scaling, stored.scales
    height, width = prod(shape[:-1]), shape[-1] if shape else 1
    codes = unpack_codes(stored.codes, stored.fmt, width).reshape(height, width)
    elements = decode(codes, stored.fmt)
    if scaling is None or scales is None:
        return elements.view(shape)
    if scaling.scale is not None:
        scales = decode(scales, scaling.scale)
    if stored.tensor_scale is not None:
        scales = scales * stored.tensor_scale
    if scaling.rows:
        scales = scales.repeat_interleave(scaling.rows, 0)[:height]
        scales = scales.repeat_interleave(scaling.columns or width, 1)[:, :width]
    return (elements * scales).view(shape)


@each_pair
def test_what_is_stored_gives_back_the_values(fmt: Format, scaling: Scaling | None) -> None:
    random, infinite = torch.Generator().manual_seed(3), torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    infinite[0, 3], infinite[1, 5], infinite[1, 40] = torch.inf, -torch.inf, 3e38
    tensors = [torch.randn(shape, generator=random) * 5 for shape in SHAPES]
    seeds = itertools.cycle((None, SEED))
    for x, seed in (*zip(tensors, seeds, strict=False), (patterns(64, 160), None), (infinite, None), (infinite, SEED)):
        left, stored = values(x, fmt, scaling, seed=seed), quantise(x, fmt, scaling, seed=seed)
        assert left.shape == x.shape == stored.shape and left.is_contiguous()
        assert differing(dequantised(stored), left) == 0, x.shape


@each_pair
def test_storage_takes_the_bytes_it_says(fmt: Format, scaling: Scaling | None) -> None:
    stored = quantise(gaussian(33, 131), fmt, scaling)
    bits = {4: 33 * 66, 6: 33 * 131, 8: 33 * 131, 16: 2 * 33 * 131, 19: 4 * 33 * 131}
    down, across = (1, 1) if scaling is None else (-(-33 // (scaling.rows or 33)), -(-131 // (scaling.columns or 131)))
    width = 0 if scaling is None else 4 if scaling.scale is None else 1
    above = 4 if scaling is not None and scaling.scale is E4M3 else 0
    parts = (stored.codes, stored.scales, stored.tensor_scale)
    assert sum(part.nbytes for part in parts if part is not None) == bits[fmt.bits] + down * across * width + above
    assert stored.codes.is_contiguous()
    if scaling is not None and scaling.rows:
        assert stored.scales is not None and stored.scales.shape == (down, across)


def test_codes_are_those_of_torch() -> None:
    """So that torch's kernels can read the bytes unchanged."""
    x = gaussian(32, 64)
    for fmt, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        stored = quantise(x, fmt, TENSOR)
        assert stored.scales is not None and stored.scales.shape == ()
        assert torch.equal(stored.codes.view(dtype).to(torch.float32) * stored.scales, values(x, fmt, TENSOR))
    mx = quantise(x, E4M3, MX)
    assert mx.scales is not None
    powers = mx.scales.view(torch.float8_e8m0fnu).to(torch.float32).repeat_interleave(32, 1)
    assert torch.equal(mx.codes.view(torch.float8_e4m3fn).to(torch.float32) * powers, values(x, E4M3, MX))
    assert quantise(x, E2M1, NVFP4).codes.view(torch.float4_e2m1fn_x2).shape == (32, 32)


@each_kind
def test_strides_do_not_matter(fmt: Format, scaling: Scaling | None) -> None:
    x = outliers(160, 144)
    for view in (x.t(), x[:, ::2], x[::3], x[:, 5:], x[:1].expand(40, 144), x.view(160, 12, 12).transpose(0, 1)):
        for seed in (None, SEED):
            left = values(view.contiguous(), fmt, scaling, seed=seed)
            assert differing(values(view, fmt, scaling, seed=seed), left) == 0
            assert differing(dequantised(quantise(view, fmt, scaling, seed=seed)), left) == 0
    assert torch.equal(values(x.view(4, 40, 144), fmt, scaling).view(160, 144), values(x, fmt, scaling))
    assert torch.equal(values(x[0], fmt, scaling), values(x[:1], fmt, scaling)[0])


@for_each(
    ("fmt", "scaling", "turns"),
    [
        *((E4M3, one, one in (SQUARE, TENSOR)) for one in (SQUARE, TENSOR, BLOCK, MX, ROW)),
        (E5M2, Scaling(16, 16), True),
        (E2M1, NVFP4_SQUARE, True),
        (E2M1, NVFP4, False),
    ],
)
def test_squares_may_be_transposed_before_or_after_and_others_not(fmt: Format, scaling: Scaling, turns: bool) -> None:
    assert scaling.turns is turns
    for x in (outliers(256, 384), outliers(130, 257), patterns(70, 33)) if turns else (outliers(256, 256),):
        assert (differing(values(x.t(), fmt, scaling).t().contiguous(), values(x, fmt, scaling)) == 0) is turns
        if turns:
            one, other = quantise(x, fmt, scaling), quantise(x.t(), fmt, scaling)
            assert one.scales is not None and other.scales is not None
            assert torch.equal(one.scales, other.scales.t() if other.scales.dim() else other.scales)
            assert fmt is E2M1 or torch.equal(one.codes, other.codes.t())


@each_kind
def test_into_a_given_tensor(fmt: Format, scaling: Scaling | None) -> None:
    x = outliers(33, 130)
    stored, left = x.clone(), values(x, fmt, scaling)
    for out in (torch.empty(33, 130), torch.empty(130, 33).t(), torch.empty(33, 130, dtype=torch.bfloat16)):
        assert values(x, fmt, scaling, out=out) is out
        assert torch.equal(out, left.to(out.dtype))
    assert torch.equal(x, stored), "the input is left alone"
    assert torch.equal(values(x, fmt, scaling, out=x), left), "unless it is where the values are to go"


def test_a_given_factor_takes_the_place_of_the_current_one() -> None:
    x = gaussian(8, 64)
    result, inverse = factor(x, E4M3, TENSOR)
    assert result.shape == inverse.shape == ()
    assert torch.equal(values(x, E4M3, TENSOR, scale=result), values(x, E4M3, TENSOR))
    assert torch.equal(values(x, E4M3, TENSOR, scale=result.view(1)), values(x, E4M3, TENSOR))
    half = torch.tensor(2.0)
    assert torch.equal(values(x, E4M3, TENSOR, scale=half), round_to(x * 2, E4M3) / 2)
    assert values(x, E4M3, TENSOR, scale=torch.tensor(1e4)).abs().max() == 448 * torch.tensor(1e4).reciprocal()
    by_row = torch.arange(1.0, 9.0)[:, None]
    assert torch.equal(values(x, E4M3, ROW, scale=by_row), round_to(x * by_row, E4M3) * by_row.reciprocal())
    assert factor(x.view(2, 4, 64), E4M3, ROW)[0].shape == (2, 4, 1)


@for_each("fmt", [FORMATS[name] for name in MX_ELEMENTS])
def test_nan_is_stored_where_there_is_a_code_for_it(fmt: Format) -> None:
    """In the element if the format has a NaN, otherwise in its block's scale."""
    x = gaussian(4, 64)
    x[1, 40] = torch.nan
    marked = quantise(x, fmt, MX)
    assert marked.scales is not None and marked.scales[1, 1] == 255 and dequantised(marked).isnan().sum() == 32
    for scaling in (None, TENSOR, ROW, BLOCK):
        left = values(x, fmt, scaling)
        assert left.isnan().nonzero().tolist() == [[1, 40]]
        if fmt.has_nan:
            assert differing(dequantised(quantise(x, fmt, scaling)), left) == 0


@for_each(("fmt", "scaling"), [(E4M3, MX), (E2M1, MX), (E2M1, NVFP4_ROUNDED_UP), (E4M3, BLOCK)])
def test_stochastic_rounding_is_unbiased(fmt: Format, scaling: Scaling) -> None:
    """Over 64 seeds each value's mean is the value, within four standard errors of the total.

    NVFP4's nearest block scales clip the largest elements (test_properties.py).
    """
    x = gaussian(64, 128)
    drawn = torch.stack([values(x, fmt, scaling, seed=torch.tensor([seed])) for seed in range(64)]).double()
    below = values(x, fmt, scaling, seed=torch.tensor([0]))
    assert differing(below, values(x, fmt, scaling, seed=torch.tensor([0]))) == 0
    assert drawn.var(0).gt(0).double().mean() > 0.9
    slope = (drawn.mean(0) * x.double()).sum() / x.double().square().sum()
    deviation = (drawn.var(0) / 64 * x.double().square()).sum().sqrt() / x.double().square().sum()
    assert abs(slope - 1) < 4 * deviation
