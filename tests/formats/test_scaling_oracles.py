"""Scaled values against their definitions in float64, bit for bit: float32 scales, MX at every exponent, NVFP4."""

from __future__ import annotations

import torch

from fp8bench.formats.codes import unpack
from fp8bench.formats.grids import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP16, TF32, Format
from fp8bench.formats.recipes import (
    BLOCK,
    BLOCK_POWER_OF_TWO,
    NVFP4,
    NVFP4_SQUARE,
    NVFP4_UP,
    ROW,
    ROW_POWER_OF_TWO,
    SQUARE,
    SQUARE_POWER_OF_TWO,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    ScaleRounding,
    Scaling,
)
from fp8bench.formats.scaled import quantise, values
from tests.counts import counts, for_each
from tests.formats.scaling_definitions import (
    a_million,
    differing,
    gaussian,
    mx_exponents,
    octaves,
    outliers,
    reference,
    wide,
)

ALL = [TENSOR, TENSOR_POWER_OF_TWO, ROW, ROW_POWER_OF_TWO, BLOCK, BLOCK_POWER_OF_TWO, SQUARE, SQUARE_POWER_OF_TWO]
each_scaling = for_each("scaling", ALL, ids=lambda one: one.name)
each_float8 = for_each("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


@each_scaling
@each_float8
@counts(1 << 6, 1 << 10)
def test_values_of_each_kind_follow_the_definition(count: int, fmt: Format, scaling: Scaling) -> None:
    for kind, x in a_million(count).items():
        assert differing(values(x, fmt, scaling), reference(x, fmt, scaling)) == 0, kind


@each_scaling
@for_each("fmt", [E4M3, E5M2, E3M2, E2M3, E2M1, BF16, FP16, TF32], ids=lambda fmt: fmt.name)
def test_every_format_and_uneven_ends(fmt: Format, scaling: Scaling) -> None:
    for x in (outliers(64, 128), outliers(130, 257), gaussian(1, 1), wide(65, 77), gaussian(3, 200) * 1e-38):
        assert differing(values(x, fmt, scaling), reference(x, fmt, scaling)) == 0


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


ELEMENTS = [E4M3, E5M2, E3M2, E2M3, E2M1]
MODES = [ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL]
each_format = for_each("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
each_mode = for_each("mode", MODES, ids=str)


def mx(mode: ScaleRounding) -> Scaling:
    return Scaling(1, 32, E8M0, mode)


@each_mode
@each_format
@counts(1 << 6, 1 << 10)
def test_mx_values_follow_the_definition(count: int, fmt: Format, mode: ScaleRounding) -> None:
    for kind, x in a_million(count).items():
        assert differing(values(x, fmt, mx(mode)), reference(x, fmt, mx(mode))) == 0, kind


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
    wanted = mx_exponents(amax.double().numpy(), fmt, mode) + 127
    assert stored.flatten().tolist() == wanted.tolist()
    assert stored.min() == 0 and stored.max() == 254 - fmt.max_exponent + (mode is not ScaleRounding.FLOOR)


@each_mode
@each_format
def test_blocks_that_are_not_full(fmt: Format, mode: ScaleRounding) -> None:
    for columns in (1, 5, 31, 33, 77):
        x = wide(64, columns)
        assert differing(values(x, fmt, mx(mode)), reference(x, fmt, mx(mode))) == 0


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
    assert not unpack(stored.codes, fmt, 70)[0, :32].any(), "zeros are stored under a scale of NaN"


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


NVFP4_SQUARE_UP = Scaling(16, 16, E4M3, ScaleRounding.UP)
each_nvfp4 = for_each("scaling", [NVFP4, NVFP4_UP, NVFP4_SQUARE, NVFP4_SQUARE_UP], ids=lambda one: one.name)


@each_nvfp4
def test_nvfp4_values_follow_the_definition(scaling: Scaling) -> None:
    for kind, x in a_million().items():
        assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0, kind


@each_nvfp4
@for_each("exponent", [-149, -140, -130, -126, -120, -115, -110, -60, 60, 120])
def test_tensors_at_either_end_of_float32(scaling: Scaling, exponent: int) -> None:
    x = octaves(64, 256).double().clamp(-4, 4).mul(2.0**exponent).to(torch.float32)
    assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0
    if exponent < -115:
        assert quantise(x, E2M1, scaling).tensor_scale == 2.0**-126


@each_nvfp4
def test_ends_that_fill_no_block(scaling: Scaling) -> None:
    for shape in ((1, 1), (5, 17), (16, 15), (33, 70)):
        x = outliers(*shape)
        assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0


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
