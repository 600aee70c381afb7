"""Scalings in float64 and numpy, rewritten from their definitions: the OCP MX specification, NVIDIA's NVFP4.

Only values that a definition stores in float32 are rounded to it (`single`). Calls nothing of fp8bench's formats; reads
only bits, bias and largest number.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from fp8bench.formats.grids import E2M1, E4M3, E8M0, Format
from fp8bench.formats.recipes import ScaleRounding, Scaling

Doubles = npt.NDArray[np.float64]
Wholes = npt.NDArray[np.int64]
MX_MODES = [ScaleRounding.FLOOR, ScaleRounding.EVEN, ScaleRounding.CEIL, ScaleRounding.RCEIL]


def mx(mode: ScaleRounding) -> Scaling:
    return Scaling(1, 32, E8M0, mode)


def reference(x: torch.Tensor, fmt: Format, scaling: Scaling) -> torch.Tensor:
    """The dequantised matrix for a format and scaling, as float32."""
    exact = x.to(torch.float64).numpy()
    height, width = exact.shape
    rows, columns = scaling.rows or max(height, 1), scaling.columns or max(width, 1)
    filled = np.pad(exact, ((0, -height % rows), (0, -width % columns)))
    down, across = filled.shape[0] // rows, filled.shape[1] // columns
    blocks = filled.reshape(down, rows, across, columns).transpose(0, 2, 1, 3).reshape(down * across, rows * columns)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        left = _values(blocks, fmt, scaling, float(np.abs(exact).max(initial=0.0)))
    matrix = left.reshape(down, across, rows, columns).transpose(0, 2, 1, 3).reshape(filled.shape)
    return torch.from_numpy(matrix[:height, :width].astype(np.float32))


def mx_exponents(amax: Doubles, fmt: Format, rounding: ScaleRounding) -> Wholes:
    """Exponents of the scales of blocks with finite magnitudes."""
    exponent, top = _exponent(amax), int(np.log2(fmt.largest))
    if rounding is ScaleRounding.FLOOR:
        result = exponent - top
    elif rounding is ScaleRounding.EVEN:
        step = _power(exponent - fmt.mantissa_bits)
        result = _exponent(np.rint(amax / step) * step) - top
    elif rounding is ScaleRounding.CEIL:
        result = exponent + (amax > _power(exponent)) - top
    else:
        result = exponent - top
        result = result + (amax > fmt.largest * _power(result))
    return np.where(amax > 0, np.clip(result, -127, 127), -127)


def rounded(exact: Doubles, fmt: Format) -> Doubles:
    """The nearest value of the format, ties to even, saturating."""
    exact = np.clip(exact, -fmt.largest, fmt.largest)
    step = _step(exact, fmt)
    result: Doubles = np.rint(exact / step) * step
    return result


def single(exact: Doubles) -> Doubles:
    return np.asarray(exact, dtype=np.float64).astype(np.float32).astype(np.float64)


def differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Values that differ in any bit; all NaNs are equal."""
    assert left.dtype == right.dtype == torch.float32 and left.shape == right.shape
    same = (left.view(torch.int32) == right.view(torch.int32)) | (left.isnan() & right.isnan())
    return int((~same).sum())


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outliers(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Gaussian, with one in a thousand a hundred times as large."""
    chosen = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 100)) < 1e-3
    return gaussian(rows, columns, seed=seed) * torch.where(chosen, 100.0, 1.0)


def octaves(rows: int, columns: int, seed: int = 7) -> torch.Tensor:
    """Gaussian in 16-element squares scaled from 1 to 2^-30, which covers all NVFP4 block scales and zero."""
    size = torch.rand(rows // 16, columns // 16, generator=torch.Generator().manual_seed(seed)).mul(-30).exp2()
    return gaussian(rows, columns, seed=seed) * size.repeat_interleave(16, 0).repeat_interleave(16, 1)


def wide(rows: int, columns: int, seed: int = 2) -> torch.Tensor:
    """Every float32 exponent equally likely per run of 16, spread over ten octaves within it, one in ten zero."""
    random = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-150, 127, (rows, -(-columns // 16)), generator=random).repeat_interleave(16, 1)
    spread = 10 * torch.rand(rows, columns, generator=random, dtype=torch.float64)
    values = torch.randn(rows, columns, generator=random, dtype=torch.float64) * torch.exp2(
        exponents[:, :columns] - spread
    )
    return torch.where(torch.rand(rows, columns, generator=random) < 0.1, 0.0, values).to(torch.float32)


def patterns(rows: int, columns: int, seed: int = 3) -> torch.Tensor:
    """Random bits: independent finite float32 numbers."""
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, columns), generator=random, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return torch.where(values.isfinite(), values, 1.0)


@cache
def a_million(rows: int = 1 << 10) -> dict[str, torch.Tensor]:
    """A million numbers of each kind, or fewer rows of a thousand for reading only."""
    return {make.__name__: make(rows, 1 << 10) for make in (gaussian, outliers, octaves, wide, patterns)}


def _values(blocks: Doubles, fmt: Format, scaling: Scaling, tensor_amax: float) -> Doubles:
    amax = np.abs(blocks).max(axis=1, keepdims=True, initial=0.0)
    if scaling.scale is E8M0:
        scale = _power(mx_exponents(amax, fmt, scaling.rounding))
        return single(rounded(blocks / scale, fmt) * scale)
    if scaling.scale is E4M3:
        tensor_scale = np.maximum(single(np.float64(tensor_amax / (448 * 6))), 2.0**-126) if tensor_amax else 1.0
        quotient = single(single(amax / 6) / tensor_scale)
        above = np.minimum(np.ceil(quotient / _step(quotient, E4M3)) * _step(quotient, E4M3), 448)
        block_scale = above if scaling.rounding is ScaleRounding.UP else rounded(quotient, E4M3)
        scale = single(block_scale * tensor_scale)
        elements = rounded(single(blocks / np.where(scale > 0, scale, np.inf)), E2M1)
        return single(elements * scale)
    factor = np.where(amax > 0, np.minimum(single(fmt.largest / amax), 2.0**126), 1.0)
    if scaling.rounding is ScaleRounding.POWER_OF_TWO:
        factor = _power(_exponent(factor))
    return single(rounded(single(blocks * factor), fmt) * single(1 / factor))


def _exponent(values: Doubles) -> Wholes:
    """Exponent of the power of two at or below each magnitude (float32 subnormals are normal here); -1023 for zero."""
    return ((np.ascontiguousarray(values).view(np.int64) >> 52) & 0x7FF) - 1023


def _power(exponent: Wholes) -> Doubles:
    return ((np.maximum(exponent, -1022) + 1023) << 52).view(np.float64)


def _step(values: Doubles, fmt: Format) -> Doubles:
    return _power(np.maximum(_exponent(values), fmt.min_exponent) - fmt.mantissa_bits)
