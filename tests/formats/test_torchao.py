"""torchao's scalings compared bit for bit where they follow the definitions.

Deliberate differences are stated and tested; nothing of torchao is copied.
"""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from fp8bench.formats.codes import decode
from fp8bench.formats.grids import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, Format
from fp8bench.formats.recipes import NVFP4, ROW, ROW_POWER_OF_TWO, TENSOR, TENSOR_POWER_OF_TWO, ScaleRounding, Scaling
from fp8bench.formats.scaled import factor, quantise, values
from tests.counts import counts, for_each
from tests.formats.scaling_definitions import MX_MODES, a_million, differing, mx, patterns, wide

with warnings.catch_warnings():
    # It warns of kernels built for other versions of Python and torch, which are unused here.
    warnings.simplefilter("ignore")
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    pytest.importorskip("torchao", reason="needs torchao, whose scalings these are held against")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

pytestmark = pytest.mark.slow
DTYPES = {
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E3M2: DTYPE_FP6_E3M2,
    E2M3: DTYPE_FP6_E2M3,
    E2M1: torch.float4_e2m1fn_x2,
}
each_format = for_each("fmt", list(DTYPES))
each_mode = for_each("mode", MX_MODES)


def of_torchao(x: torch.Tensor, fmt: Format, mode: ScaleRounding) -> MXTensor:
    return MXTensor.to_mx(x, DTYPES[fmt], 32, ScaleCalculationMode[mode.name])


def nvfp4_of_torchao(x: torch.Tensor) -> NVFP4Tensor:
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))


def codes(scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None
    return scales.view(torch.uint8)


@each_mode
@each_format
@for_each("dtype", [torch.float32, torch.bfloat16])
@counts(1 << 6, 1 << 10)
def test_mx_agrees_on_many_values(count: int, fmt: Format, mode: ScaleRounding, dtype: torch.dtype) -> None:
    for kind in ("gaussian", "outliers"):
        x = a_million(count)[kind].to(dtype)
        theirs, stored = of_torchao(x, fmt, mode), quantise(x, fmt, mx(mode))
        assert torch.equal(codes(theirs.scale), codes(stored.scales))
        assert torch.equal(theirs.qdata.view(torch.uint8), stored.codes)
        assert differing(theirs.dequantize(torch.float32), values(x, fmt, mx(mode))) == 0


@each_mode
@each_format
def test_mx_agrees_at_every_exponent_but_the_lowest(fmt: Format, mode: ScaleRounding) -> None:
    """torchao uses 2^-126 (RCEIL: 1) for the scale 2^-127 when encoding, but not when decoding."""
    x = wide(1 << 8, 1 << 10)
    theirs, stored = of_torchao(x, fmt, mode), quantise(x, fmt, mx(mode))
    assert torch.equal(codes(theirs.scale), codes(stored.scales))
    usual = codes(stored.scales) > 0
    in_usual = usual.repeat_interleave(32, 1)
    left, right = values(x, fmt, mx(mode)), theirs.dequantize(torch.float32)
    assert in_usual.sum() > 0.9 * x.numel()
    assert differing(left[in_usual], right[in_usual]) == 0
    assert differing(left[~in_usual], right[~in_usual]) > 50


@for_each("kind", ["gaussian", "outliers", "octaves", "patterns"])
def test_nvfp4_agrees_where_block_scales_are_normal(kind: str) -> None:
    """torchao keeps block scales at 2^-6 or above, so smaller blocks lose bits that e4m3 could keep."""
    x = a_million()[kind]
    theirs, stored = nvfp4_of_torchao(x), quantise(x, E2M1, NVFP4)
    normal = decode(codes(stored.scales), E4M3) >= 2.0**-6
    inside = normal.repeat_interleave(16, 1)
    left, right = values(x, E2M1, NVFP4), theirs.dequantize(torch.float32)
    assert inside.sum() == {"gaussian": 1 << 20, "outliers": 1 << 20}.get(kind, inside.sum()) and inside.sum() > 400_000
    assert torch.equal(stored.tensor_scale, theirs.per_tensor_scale) if stored.tensor_scale is not None else False
    assert torch.equal(codes(theirs.scale)[normal], codes(stored.scales)[normal])
    assert torch.equal(theirs.qdata[inside[:, ::2]], stored.codes[inside[:, ::2]])
    assert differing(left[inside], right[inside]) == 0
    assert torch.all(theirs.scale.to(torch.float32)[~normal] == 2.0**-6)
    assert differing(left[~inside], right[~inside]) >= (0 if inside.all() else 1000)


@for_each("fmt", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ])
@for_each("scaling", [TENSOR, TENSOR_POWER_OF_TWO, ROW, ROW_POWER_OF_TWO])
def test_float8_factors_and_codes_agree(fmt: Format, scaling: Scaling) -> None:
    """Except zeros and magnitudes under 1e-12, which torchao scales as 1e-12."""
    dtype = {**DTYPES, E4M3FNUZ: torch.float8_e4m3fnuz, E5M2FNUZ: torch.float8_e5m2fnuz}[fmt]
    few = a_million(1 << 6)
    for x in (few["gaussian"], few["outliers"], wide(1 << 8, 1 << 10), patterns(1 << 8, 1 << 10)):
        rows = x[x.abs().amax(1) > 1e-12]
        theirs = tensor_to_scale(
            rows,
            dtype,
            scaling_granularity=ScalingGranularity.AXISWISE if scaling.rows else ScalingGranularity.TENSORWISE,
            axiswise_dim=-1 if scaling.rows else None,
            round_scales_to_power_of_2=scaling.rounding is ScaleRounding.POWER_OF_TWO,
        )
        assert torch.equal(theirs, factor(rows, fmt, scaling)[0])
        assert torch.equal(to_fp8_saturated(rows * theirs, dtype).view(torch.uint8), quantise(rows, fmt, scaling).codes)
