"""MX blocks against the OCP definition in float64, bit for bit, at every exponent that a scale can have."""

from __future__ import annotations

import torch

from fp8bench.formats.codes import unpack
from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from fp8bench.formats.recipes import ScaleRounding, Scaling
from fp8bench.formats.scaled import quantise, values
from tests.counts import counts, for_each
from tests.formats.scaling_definitions import a_million, differing, gaussian, mx_exponents, reference, wide

ELEMENTS = [E4M3, E5M2, E3M2, E2M3, E2M1]
MODES = [ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL]
each_format = for_each("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
each_mode = for_each("mode", MODES, ids=str)


def mx(mode: ScaleRounding) -> Scaling:
    return Scaling(1, 32, E8M0, mode)


@each_mode
@each_format
@counts(1 << 6, 1 << 10)
def test_values_of_each_kind_follow_the_definition(count: int, fmt: Format, mode: ScaleRounding) -> None:
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
    """The largest float32 rounds up to 2^128 where its scale lets it; FLOOR's saturates before."""
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert values(x, E4M3, mx(ScaleRounding.FLOOR)).eq(1.75 * 2.0**127).all()
    assert values(x, E4M3, mx(ScaleRounding.RCEIL)).isposinf().all()
