"""Float32 scales, of tensors, rows and blocks, against their definition in float64, bit for bit."""

from __future__ import annotations

import torch

from fp8bench.formats.grids import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, TF32, Format
from fp8bench.formats.recipes import (
    BLOCK,
    BLOCK_POWER_OF_TWO,
    ROW,
    ROW_POWER_OF_TWO,
    SQUARE,
    SQUARE_POWER_OF_TWO,
    TENSOR,
    TENSOR_POWER_OF_TWO,
    Scaling,
)
from fp8bench.formats.scaled import factor, quantise, values
from tests.counts import counts, for_each
from tests.formats.scaling_definitions import a_million, differing, gaussian, outliers, reference, wide

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


@for_each("scaling", [Scaling(3, 0), Scaling(1, 7), Scaling(2, 5)], ids=lambda one: one.name)
def test_blocks_of_any_extent(scaling: Scaling) -> None:
    for x in (gaussian(8, 23), gaussian(3, 5), gaussian(1, 1)):
        assert differing(values(x, E4M3, scaling), reference(x, E4M3, scaling)) == 0


@each_float8
@for_each("exponent", range(-149, 128, 9))
def test_factors_at_every_size(fmt: Format, exponent: int) -> None:
    amax = torch.tensor([1.0, 1.75, 1.9999999], dtype=torch.float64).mul(2.0**exponent).to(torch.float32)[:, None]
    exact, inverse = factor(amax, fmt, ROW)
    wanted = (fmt.largest / amax.double()).clamp(max=2.0**126)
    assert torch.equal(exact, wanted.to(torch.float32))
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


@for_each("scaling", [BLOCK, ROW, SQUARE], ids=lambda one: one.name)
def test_blocks_beside_one_that_is_not_finite_know_nothing_of_it(scaling: Scaling) -> None:
    x = gaussian(256, 256)
    spoilt = x.clone()
    spoilt[200, 200], spoilt[201, 201] = torch.inf, torch.nan
    left, clean = values(spoilt, E4M3, scaling), values(x, E4M3, scaling)
    changed = left.ne(clean).nonzero()
    assert changed[:, 0].min() >= (128 if scaling is SQUARE else 200)
    assert scaling is ROW or changed[:, 1].min() >= 128
    assert left.isnan().sum() == 1 and left[200, 200] == 448
