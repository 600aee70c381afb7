"""Scalings against their definitions in float64, written here again from the specifications."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8bench.formats.grids import E2M1, E4M3, E5M2, FP16, Format
from fp8bench.formats.scaling import (
    ScaleRounding,
    mx_values,
    nvfp4_values,
    per_tensor_codes,
    per_tensor_scale,
    per_tensor_values,
)

Doubles = npt.NDArray[np.float64]
FLOOR, RCEIL = ScaleRounding.FLOOR, ScaleRounding.RCEIL


def rounded(exact: Doubles, fmt: Format) -> Doubles:
    """Nearest value of the format, saturating."""
    exact = np.clip(exact, -fmt.largest, fmt.largest)
    _, exponent = np.frexp(exact)
    step = np.ldexp(1.0, np.maximum(exponent - 1, fmt.min_exponent) - fmt.mantissa_bits)
    result: Doubles = np.rint(exact / step) * step
    return result


def mx_reference(values: torch.Tensor, fmt: Format, rounding: ScaleRounding) -> torch.Tensor:
    """OCP MX from the definition, block by block, in float64."""
    exact = values.to(torch.float64).numpy()
    result = np.zeros_like(exact)
    for start in range(0, exact.shape[1], 32):
        block = exact[:, start : start + 32]
        amax = np.abs(block).max(axis=1, keepdims=True)
        if rounding is FLOOR:
            exponent = np.frexp(amax)[1] - 1 - (math.frexp(fmt.largest)[1] - 1)
        else:
            mantissa, exponent = np.frexp(amax / fmt.largest)
            exponent = exponent - (mantissa == 0.5)
        scale = np.ldexp(1.0, np.clip(np.where(amax > 0, exponent, -127), -127, 127))
        result[:, start : start + 32] = rounded(block / scale, fmt) * scale
    return torch.from_numpy(result).to(torch.float32)


def nvfp4_reference(values: torch.Tensor) -> torch.Tensor:
    """NVFP4 from the definition in float64; the two stored scales and their product are float32."""
    exact = values.to(torch.float64).numpy()
    tensor_scale = np.float64(np.float32(np.abs(exact).max() / (448 * 6)))
    result = np.zeros_like(exact)
    for start in range(0, exact.shape[1], 16):
        block = exact[:, start : start + 16]
        block_scale = rounded(np.abs(block).max(axis=1, keepdims=True) / 6 / tensor_scale, E4M3)
        scale = (block_scale * tensor_scale).astype(np.float32).astype(np.float64)
        result[:, start : start + 16] = rounded(block / np.where(scale > 0, scale, np.inf), E2M1) * scale
    return torch.from_numpy(result).to(torch.float32)


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def wide(rows: int, columns: int) -> torch.Tensor:
    """Numbers over float32's whole range, every row at its own magnitude, subnormals and zeros included."""
    generator = torch.Generator().manual_seed(5)
    exponents = torch.linspace(-146, 124, rows).round()[:, None].to(torch.float64)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * torch.exp2(exponents)
    return torch.where(torch.rand(rows, columns, generator=generator) < 0.1, 0.0, values).to(torch.float32)


def sqnr(values: torch.Tensor, source: torch.Tensor) -> float:
    noise = (values.double() - source.double()).square().sum()
    return float(10 * torch.log10(source.double().square().sum() / noise))


@pytest.mark.parametrize("rounding", list(ScaleRounding))
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("columns", [256, 77, 5])
def test_mx_follows_the_definition(fmt: Format, rounding: ScaleRounding, columns: int) -> None:
    for values in (gaussian(512, columns), wide(512, columns)):
        assert torch.equal(mx_values(values, fmt, rounding), mx_reference(values, fmt, rounding))


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=lambda fmt: fmt.name)
def test_mx_scale_at_the_boundary(fmt: Format) -> None:
    """Blocks whose largest value is the format's largest, times powers of two, or a float32 step beside it."""
    tops = torch.tensor([fmt.largest * 2.0**k for k in range(-20, 20)])
    beside = torch.cat([tops, torch.nextafter(tops, tops * 2), torch.nextafter(tops, torch.zeros_like(tops))])
    values = gaussian(len(beside), 32).clamp(-1, 1) * beside[:, None]
    values[:, 7] = beside
    for rounding in ScaleRounding:
        assert torch.equal(mx_values(values, fmt, rounding), mx_reference(values, fmt, rounding))
    assert torch.equal(mx_values(tops[:, None], fmt, RCEIL)[:, 0], tops)


@pytest.mark.parametrize("columns", [256, 77, 5])
def test_nvfp4_follows_the_definition(columns: int) -> None:
    values = gaussian(512, columns)
    values[3:5] = 0
    values[9] *= 1e-4
    assert torch.equal(nvfp4_values(values), nvfp4_reference(values))


def test_nvfp4_follows_the_definition_with_a_power_of_two_as_tensor_scale() -> None:
    values = gaussian(512, 128).clamp(-4, 4)
    values[0, 0] = 448 * 6 / 2.0**9
    assert torch.equal(nvfp4_values(values), nvfp4_reference(values))


@pytest.mark.parametrize("quantise", [lambda x: mx_values(x, E4M3), lambda x: mx_values(x, E2M1), nvfp4_values])
def test_block_scalings_at_the_edges(quantise: object) -> None:
    assert callable(quantise)
    assert torch.equal(quantise(torch.zeros(3, 40)), torch.zeros(3, 40))
    mixed = torch.cat([torch.zeros(1, 32), torch.ones(1, 32)], dim=1)
    assert torch.equal(quantise(mixed)[:, :32], torch.zeros(1, 32))
    assert quantise(torch.empty(0, 40)).shape == (0, 40)
    assert quantise(torch.empty(4, 0)).shape == (4, 0)
    tiny = torch.full((1, 32), 1e-44)
    assert quantise(tiny).isfinite().all()
    source = gaussian(64, 48)
    assert torch.equal(quantise(source.t()), quantise(source.t().contiguous()))
    assert torch.equal(quantise(source.to(torch.bfloat16)), quantise(source.to(torch.bfloat16).float()))
    with pytest.raises(ValueError, match="two dimensions"):
        quantise(torch.zeros(32))


@pytest.mark.parametrize("quantise", [lambda x: mx_values(x, E4M3), nvfp4_values])
def test_nan_takes_its_block_and_no_more(quantise: object) -> None:
    assert callable(quantise)
    values = torch.ones(2, 64)
    values[0, 3] = float("nan")
    result = quantise(values)
    assert result[0, :16].isnan().all()
    assert result[0, 32:].isfinite().all()
    assert result[1].isfinite().all()


@pytest.mark.parametrize(
    ("decibel", "quantise"),
    [
        (31.57, lambda x: mx_values(x, E4M3, RCEIL)),
        (30.18, lambda x: mx_values(x, E4M3, FLOOR)),
        (18.58, lambda x: mx_values(x, E2M1, RCEIL)),
        (18.62, lambda x: mx_values(x, E2M1, FLOOR)),
        (20.44, nvfp4_values),
        (31.56, lambda x: per_tensor_values(x, E4M3)),
        (25.57, lambda x: per_tensor_values(x, E5M2)),
    ],
)
def test_noise_of_gaussian_values(decibel: float, quantise: object) -> None:
    """Signal to quantisation noise as measured with other implementations.

    With scales that are powers of two it depends on where the deviation lies within its octave (mxfp8 FLOOR: 30.1
    to 30.9 dB), so the deviation belongs to the number: 3 here.
    """
    assert callable(quantise)
    source = gaussian(1024, 512) * 3
    assert sqnr(quantise(source), source) == pytest.approx(decibel, abs=0.1)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_are_the_emulated_values(fmt: Format, dtype: torch.dtype) -> None:
    for source in (gaussian(96, 80), gaussian(96, 80) * 1e-3, gaussian(96, 80).t(), gaussian(96, 80)[:, ::2]):
        codes, inverse = per_tensor_codes(source.to(dtype), fmt)
        assert codes.is_contiguous()
        assert torch.equal(codes.float() * inverse, per_tensor_values(source.to(dtype), fmt))


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1.0, 1e10])
def test_scaled_fp16_codes_are_those_of_numpy(size: float) -> None:
    """Bit by bit, subnormals and zeros included; the largest magnitude becomes fp16's own and never infinity."""
    source = gaussian(96, 80) * torch.logspace(-9, 0, 96)[:, None] * size
    codes, inverse = per_tensor_codes(source, FP16)
    scale, _ = per_tensor_scale(source, FP16)
    scaled = source.numpy() * scale.numpy()
    wanted = np.clip(scaled, -65504, 65504).astype(np.float16)
    assert codes.dtype == torch.float16
    assert np.array_equal(codes.numpy().view(np.uint16), wanted.view(np.uint16))
    assert codes.abs().max() == 65504 and (codes == 0).any() and (codes.abs() < 2**-14).sum() > (codes == 0).sum()
    assert (codes.float() * inverse).abs().max().item() == pytest.approx(source.abs().max().item(), rel=1e-6)


def test_per_tensor_scale_takes_amax_to_the_largest() -> None:
    scale, inverse = per_tensor_scale(torch.tensor([0.5, -3.5]), E4M3)
    assert (scale.item(), inverse.item()) == (128.0, 1 / 128)
    assert scale.shape == inverse.shape == ()
    assert scale.dtype == inverse.dtype == torch.float32


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [float("nan"), 1.0], [float("inf"), 1.0], [-float("inf")]])
def test_per_tensor_scale_is_one_where_there_is_no_amax(values: list[float]) -> None:
    scale, inverse = per_tensor_scale(torch.tensor(values), E4M3)
    assert (scale.item(), inverse.item()) == (1.0, 1.0)


def test_per_tensor_survives_extremes() -> None:
    assert torch.equal(per_tensor_values(torch.zeros(4, 4), E4M3), torch.zeros(4, 4))
    for amax in (1e-45, 1e-40, 1e-38, 1e38):
        values = per_tensor_values(torch.tensor([amax, -amax, 0.0]), E5M2)
        assert values.isfinite().all()
    assert per_tensor_values(torch.tensor([float("nan"), 2.0]), E4M3)[1] == 2.0
    codes, _ = per_tensor_codes(torch.empty(0, 4), E4M3)
    assert codes.shape == (0, 4)
