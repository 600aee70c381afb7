"""NVFP4 against NVIDIA's definition in float64, bit for bit, wherever its two scales can be."""

from __future__ import annotations

import torch

from fp8bench.formats.codes import decode
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.recipes import NVFP4, NVFP4_SQUARE, NVFP4_UP, ScaleRounding, Scaling
from fp8bench.formats.scaled import quantise, values
from tests.counts import for_each
from tests.formats.scaling_definitions import a_million, differing, gaussian, octaves, outliers, reference

NVFP4_SQUARE_UP = Scaling(16, 16, E4M3, ScaleRounding.UP)
each_scaling = for_each("scaling", [NVFP4, NVFP4_UP, NVFP4_SQUARE, NVFP4_SQUARE_UP], ids=lambda one: one.name)


@each_scaling
def test_a_million_values_of_each_kind_follow_the_definition(scaling: Scaling) -> None:
    for kind, x in a_million().items():
        assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0, kind


@each_scaling
@for_each("exponent", [-149, -140, -130, -126, -120, -115, -110, -60, 60, 120])
def test_tensors_at_either_end_of_float32(scaling: Scaling, exponent: int) -> None:
    """Below 2688 * 2^-126 the tensor scale stays at 2^-126 and the block scales shrink, to zero at last."""
    x = octaves(64, 256).double().clamp(-4, 4).mul(2.0**exponent).to(torch.float32)
    assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0
    if exponent < -115:
        assert quantise(x, E2M1, scaling).tensor_scale == 2.0**-126


@each_scaling
def test_ends_that_fill_no_block(scaling: Scaling) -> None:
    for shape in ((1, 1), (5, 17), (16, 15), (33, 70)):
        x = outliers(*shape)
        assert differing(values(x, E2M1, scaling), reference(x, E2M1, scaling)) == 0


@each_scaling
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
    near, up = quantise(x, E2M1, NVFP4), quantise(x, E2M1, NVFP4_UP)
    assert near.scales is not None and up.scales is not None and near.tensor_scale is not None
    quotient = x.view(-1, 16).abs().amax(1) / 6 / near.tensor_scale
    above, below = decode(up.scales, E4M3).flatten(), decode((up.scales - 1).clamp(max=0x7E), E4M3).flatten()
    assert torch.all((above >= quotient) | (above == 448))
    assert torch.all((below < quotient) | (up.scales.flatten() == 0))
    assert torch.all((near.scales == up.scales) | (near.scales == up.scales - 1))


@each_scaling
def test_blocks_that_lie_whole_octaves_below_the_largest(scaling: Scaling) -> None:
    """Their quotients should be numbers of e4m3, and are so but for rounding, which UP raises to the next."""
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


@each_scaling
def test_what_is_not_finite(scaling: Scaling) -> None:
    """The tensor scale is 1; an infinity becomes the largest element under the largest block scale."""
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


@each_scaling
def test_zeros_alone(scaling: Scaling) -> None:
    x = torch.zeros(17, 40)
    x[3] = -0.0
    assert differing(values(x, E2M1, scaling), x) == 0
    stored = quantise(x, E2M1, scaling)
    assert stored.tensor_scale == 1 and stored.scales is not None and not stored.scales.any()
