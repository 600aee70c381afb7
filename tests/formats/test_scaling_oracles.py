"""Scaled values against their definitions in float64, bit for bit: float32 scales, MX at every exponent, NVFP4."""

from __future__ import annotations

from itertools import product

import torch

from fp8bench.formats.codes import decode, unpack_codes
from fp8bench.formats.grids import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, TF32, Format
from fp8bench.formats.recipes import (
    BLOCK,
    BLOCK_POWER_OF_TWO,
    NVFP4,
    NVFP4_ROUNDED_UP,
    NVFP4_SQUARE,
    ROW,
    ROW_POWER_OF_TWO,
    SQUARE,
    SQUARE_POWER_OF_TWO,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    ScaleRounding,
    Scaling,
)
from fp8bench.formats.scaled import factor, quantise, values
from tests.counts import counts, for_each
from tests.formats.scaling_definitions import (
    MX_MODES,
    a_million,
    differing,
    gaussian,
    mx,
    mx_exponents,
    octaves,
    outliers,
    reference,
    wide,
)

ALL = [TENSOR, TENSOR_POWER_OF_TWO, ROW, ROW_POWER_OF_TWO, BLOCK, BLOCK_POWER_OF_TWO, SQUARE, SQUARE_POWER_OF_TWO]
each_scaling = for_each("scaling", ALL)
each_float8 = for_each("fmt", [E4M3, E5M2])
ELEMENTS = [E4M3, E5M2, E3M2, E2M3, E2M1]
each_format = for_each("fmt", ELEMENTS)
each_mode = for_each("mode", MX_MODES)
NVFP4_SCALINGS = [NVFP4, NVFP4_ROUNDED_UP, NVFP4_SQUARE, Scaling(16, 16, E4M3, ScaleRounding.UP)]
each_nvfp4 = for_each("scaling", NVFP4_SCALINGS)


PAIRS = [
    *product([E4M3, E5M2], ALL),
    *product(ELEMENTS, map(mx, MX_MODES)),
    *product([E2M1], NVFP4_SCALINGS),
]


@for_each(("fmt", "scaling"), PAIRS)
@counts(1 << 4, 1 << 10)
def test_values_of_each_kind_follow_the_definition(count: int, fmt: Format, scaling: Scaling) -> None:
    for kind, x in a_million(count).items():
        assert differing(values(x, fmt, scaling), reference(x, fmt, scaling)) == 0, kind


UNEVEN = [*product([E3M2, E2M3, E2M1, BF16, FP16, TF32], ALL)]
UNEVEN += [(E4M3, Scaling(3, 0)), (E4M3, Scaling(1, 7)), (E4M3, Scaling(2, 5))]


@for_each(("fmt", "scaling"), [*PAIRS, *UNEVEN])
def test_every_format_and_uneven_ends(fmt: Format, scaling: Scaling) -> None:
    for x in (outliers(64, 128), outliers(130, 257), gaussian(1, 1), wide(65, 77), gaussian(3, 200) * 1e-38):
        assert differing(values(x, fmt, scaling), reference(x, fmt, scaling)) == 0


@each_float8
@for_each("exponent", range(-149, 128, 9))
def test_factors_at_every_size(fmt: Format, exponent: int) -> None:
    amax = torch.tensor([1.0, 1.75, 1.9999999], dtype=torch.float64).mul(2.0**exponent).to(torch.float32)[:, None]
    exact, inverse = factor(amax, fmt, ROW)
    expected = (fmt.largest / amax.double()).clamp(max=2.0**126)
    assert torch.equal(exact, expected.to(torch.float32))
    assert torch.equal(inverse, (1 / exact.double()).to(torch.float32)) and inverse.min() >= 2.0**-126
    power, inverse = factor(amax, fmt, ROW_POWER_OF_TWO)
    assert torch.equal(torch.frexp(power).mantissa, torch.full_like(power, 0.5))
    assert torch.all((power <= exact) & (exact < 2 * power)) and torch.equal(power * inverse, torch.ones_like(power))


@each_scaling
def test_a_scale_that_no_value_can_give_is_one(scaling: Scaling) -> None:
    for x in (
        torch.zeros(3, 130),
        torch.tensor([[torch.inf, 1.0, 600.0]]),
        torch.tensor([[torch.nan, 1.0, -torch.inf]]),
    ):
        stored = quantise(x, E4M3, scaling).scales
        assert stored is not None and stored.eq(1).all()
        left = values(x, E4M3, scaling)
        assert torch.equal(left.isnan(), x.isnan())
        assert torch.equal(left.nan_to_num(0.0), x.clamp(-448, 448).nan_to_num(0.0))


@for_each("scaling", [BLOCK, ROW, SQUARE])
def test_blocks_beside_one_that_is_not_finite_know_nothing_of_it(scaling: Scaling) -> None:
    x = gaussian(256, 256)
    spoilt = x.clone()
    spoilt[200, 200], spoilt[201, 201] = torch.inf, torch.nan
    left, clean = values(spoilt, E4M3, scaling), values(x, E4M3, scaling)
    changed = left.ne(clean).nonzero()
    assert changed[:, 0].min() >= (128 if scaling is SQUARE else 200)
    assert scaling is ROW or changed[:, 1].min() >= 128
    assert left.isnan().sum() == 1 and left[200, 200] == 448


@each_mode
@each_format
def test_scales_at_every_boundary(fmt: Format, mode: ScaleRounding) -> None:
    """Blocks whose amax is a power of two, the format's largest, or a tie of EVEN's, at every exponent, +-1 ulp."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    tie = 2 - 2.0 ** -(fmt.mantissa_bits + 1)
    mantissas = torch.tensor([1.0, fmt.largest / 2**fmt.max_exponent, tie], dtype=torch.float64)
    at = torch.exp2(exponents)[:, None].mul(mantissas).flatten().to(torch.float32)
    at = at[at > 0]
    amax = torch.cat([at, torch.nextafter(at, at * 2), torch.nextafter(at, torch.zeros_like(at))])
    amax = amax[amax.isfinite()]
    x = gaussian(len(amax), 32).clamp(-1, 1) * amax[:, None]
    x[:, 7] = -amax
    assert differing(values(x, fmt, mx(mode)), reference(x, fmt, mx(mode))) == 0
    stored = quantise(x, fmt, mx(mode)).scales
    assert stored is not None
    expected = mx_exponents(amax.double().numpy(), fmt, mode) + 127
    assert stored.flatten().tolist() == expected.tolist()
    assert stored.min() == 0 and stored.max() == 254 - fmt.max_exponent + (mode is not ScaleRounding.FLOOR)


@each_mode
@each_format
def test_an_infinity_stays_one_and_its_block_has_the_scale_of_two_to_the_128(fmt: Format, mode: ScaleRounding) -> None:
    x = torch.cat([gaussian(2, 32), torch.full((2, 32), 2.0**127)], 1)
    x[0, 3], x[1, 40] = torch.inf, -torch.inf
    left, stored = values(x, fmt, mx(mode)), quantise(x, fmt, mx(mode)).scales
    assert left[0, 3] == torch.inf and left[1, 40] == -torch.inf and left.isinf().sum() == 2
    assert stored is not None and stored[0, 0] == stored[1, 1] == 255 - fmt.max_exponent
    assert torch.equal(left[0, :3], 0.0 * x[0, :3]), "beside it what is small becomes zero"
    assert left[1, 41] == 2.0**127


@each_mode
@each_format
def test_a_nan_makes_its_block_nan_and_no_other(fmt: Format, mode: ScaleRounding) -> None:
    x = gaussian(3, 70)
    x[0, 5] = x[1, 69] = torch.nan
    x[0, 6] = torch.inf
    left, stored = values(x, fmt, mx(mode)), quantise(x, fmt, mx(mode))
    assert left[0, :32].isnan().all() and left[1, 64:].isnan().all() and left.isnan().sum() == 38
    clean = values(x.nan_to_num(0.0), fmt, mx(mode))
    assert torch.equal(left[2], clean[2]) and torch.equal(left[0, 32:], clean[0, 32:])
    assert stored.scales is not None and (stored.scales == 255).nonzero().tolist() == [[0, 0], [1, 2]]
    assert not unpack_codes(stored.codes, fmt, 70)[0, :32].any(), "zeros are stored under a scale of NaN"


@each_mode
@each_format
def test_blocks_of_zeros_and_of_the_tiniest(fmt: Format, mode: ScaleRounding) -> None:
    x = torch.zeros(2, 64)
    x[1, :] = -0.0
    x[1, 40] = 2.0**-149
    left = values(x, fmt, mx(mode))
    assert differing(left, reference(x, fmt, mx(mode))) == 0
    stored = quantise(x, fmt, mx(mode)).scales
    assert stored is not None and not stored.any()
    assert left[1, 0].signbit() and not left[0, 0].signbit()


def test_values_beyond_float32_become_infinity_as_a_product_of_float32_does() -> None:
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert values(x, E4M3, mx(ScaleRounding.FLOOR)).eq(1.75 * 2.0**127).all()
    assert values(x, E4M3, mx(ScaleRounding.RCEIL)).isposinf().all()


@each_nvfp4
@for_each("exponent", [-149, -140, -130, -126, -120, -115, -110, -60, 60, 120])
def test_tensors_at_either_end_of_float32(scaling: Scaling, exponent: int) -> None:
    x = octaves(64, 256).double().clamp(-4, 4).mul(2.0**exponent).to(torch.float32)
    assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0
    if exponent < -115:
        assert quantise(x, E2M1, scaling).tensor_scale == 2.0**-126


@each_nvfp4
def test_every_block_scale_is_met_and_block_scales_of_zero_leave_zeros(scaling: Scaling) -> None:
    x = a_million()["octaves"]
    stored = quantise(x, E2M1, scaling)
    assert stored.scales is not None and stored.tensor_scale is not None
    # 126 codes above zero; one block reaches the largest, since it has the tensor's amax.
    assert len(stored.scales.unique()) >= 120 and stored.scales.max() == 0x7E
    lost = stored.scales == 0
    assert bool(lost.any()) == (scaling.rounding is ScaleRounding.NEAREST)
    left = values(x, E2M1, scaling).view(stored.scales.shape[0], scaling.rows, -1, 16).transpose(1, 2)
    assert not left[lost].any()
    assert torch.equal(
        left[lost].signbit(), x.view(-1, scaling.rows, left.shape[1], 16).transpose(1, 2)[lost].signbit()
    )


def test_up_is_the_scale_at_or_above_the_quotient() -> None:
    x = a_million()["octaves"]
    near, up = quantise(x, E2M1, NVFP4), quantise(x, E2M1, NVFP4_ROUNDED_UP)
    assert near.scales is not None and up.scales is not None and near.tensor_scale is not None
    quotient = x.view(-1, 16).abs().amax(1) / 6 / near.tensor_scale
    above, below = decode(up.scales, E4M3).flatten(), decode((up.scales - 1).clamp(max=0x7E), E4M3).flatten()
    assert torch.all((above >= quotient) | (above == 448))
    assert torch.all((below < quotient) | (up.scales.flatten() == 0))
    assert torch.all((near.scales == up.scales) | (near.scales == up.scales - 1))


@each_nvfp4
def test_blocks_that_lie_whole_octaves_below_the_largest(scaling: Scaling) -> None:
    for amax in torch.rand(300, generator=torch.Generator().manual_seed(4)).tolist():
        x = gaussian(128, 16).clamp(-1, 1)
        x[::16, 0] = 1.0
        x *= amax * torch.arange(8).neg().exp2().repeat_interleave(16)[:, None]
        assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0


def test_under_a_scale_of_zero_all_codes_are_zero_however_large_the_elements() -> None:
    x = torch.full((1, 32), 2.0**100)
    x[0, :16] = 2.0**120
    stored = quantise(-x, E2M1, NVFP4)
    assert stored.scales is not None and stored.scales.tolist() == [[0x7E, 0]]
    assert stored.codes.tolist() == [[0xFF] * 8 + [0x88] * 8]


@each_nvfp4
def test_what_is_not_finite(scaling: Scaling) -> None:
    x = gaussian(32, 64)
    x[0, 0], x[20, 40] = torch.inf, -torch.inf
    left, stored = values(x, E2M1, scaling), quantise(x, E2M1, scaling)
    assert stored.tensor_scale == 1 and left.isfinite().all()
    assert left[0, 0] == 448 * 6 and left[20, 40] == -448 * 6
    x[3, 20] = torch.nan
    left, stored = values(x, E2M1, scaling), quantise(x, E2M1, scaling)
    assert left.isnan().sum() == 16 * scaling.rows and left[3, 16:32].isnan().all()
    assert stored.scales is not None and (stored.scales == 0x7F).sum() == 1
    assert not stored.codes[3, 8:16].any(), "zeros are stored under a scale of NaN"


@each_nvfp4
def test_zeros_alone(scaling: Scaling) -> None:
    x = torch.zeros(17, 40)
    x[3] = -0.0
    assert differing(values(x, E2M1, scaling), x) == 0
    stored = quantise(x, E2M1, scaling)
    assert stored.tensor_scale == 1 and stored.scales is not None and not stored.scales.any()
