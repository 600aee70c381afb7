"""Rounding against ml_dtypes and against a second witness in float64, bit by bit, signs of zero included.

ml_dtypes differs by design where a value is too large (E4M3 gives NaN, E5M2 infinity; here both saturate), so its
input is clamped first. Its E2M1 turns NaN into -0 and is only asked about numbers. It has no TF32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8bench.formats.grids import E2M1, E4M3, E5M2, FORMATS, TF32, Format
from fp8bench.formats.quantise import round_to

Floats = npt.NDArray[np.float32]
ORACLES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
EIGHT_BITS_AND_LESS = [E4M3, E5M2, E2M1]
ALL = list(FORMATS.values())
LARGEST32 = float(np.finfo(np.float32).max)


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """Every finite bit pattern of a 16-bit dtype."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def random_bits(count: int = 1 << 20) -> Floats:
    """float32 numbers with every exponent equally likely, subnormals and huge ones among them."""
    bits = np.random.default_rng(1).integers(0, 1 << 32, count, dtype=np.uint32)
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


def around_halfway(fmt: Format) -> Floats:
    """Every midpoint between neighbours of the grid (some, for TF32), and the float32 numbers beside it."""
    if fmt is TF32:
        bits = (np.random.default_rng(2).integers(0, 1 << 18, 20_000, dtype=np.uint32) << 13) | 0x1000
        middles = bits.view(np.float32)
    else:
        step = fmt.smallest_subnormal
        octaves = range(int(np.log2(fmt.largest / fmt.smallest_normal)) + 1)
        starts = [fmt.smallest_normal * 2.0**octave for octave in octaves]
        ticks = np.arange(1 << fmt.mantissa_bits) + 0.5
        grid = [(np.arange(1 << fmt.mantissa_bits) + 0.5) * step]
        grid += [start * (1 + ticks / (1 << fmt.mantissa_bits)) for start in starts]
        middles = np.concatenate(grid).astype(np.float32)
    middles = middles[np.isfinite(middles)]
    up, down = np.nextafter(middles, np.float32(LARGEST32)), np.nextafter(middles, np.float32(0))
    positive = np.concatenate([middles, up, down])
    return np.concatenate([positive, -positive])


EDGES = np.array([0.0, -0.0, 1e-45, -1e-45, LARGEST32, -LARGEST32, 2.0**106, 2.0**109, -(2.0**126)], np.float32)


def oracle(values: Floats, fmt: Format) -> Floats:
    """What ml_dtypes makes of it."""
    clamped = np.clip(values, -fmt.largest, fmt.largest).astype(np.float32)
    result: Floats = clamped.astype(ORACLES[fmt.name]).astype(np.float32)
    return result


def witness(values: Floats, fmt: Format) -> Floats:
    """The definition in float64: the nearest multiple of the step at the value's exponent."""
    exact = values.astype(np.float64)
    if fmt.saturates:
        exact = np.clip(exact, -fmt.largest, fmt.largest)
    _, exponent = np.frexp(exact)
    step = np.ldexp(1.0, np.maximum(exponent - 1, fmt.min_exponent) - fmt.mantissa_bits)
    rounded = np.rint(exact / step) * step
    if not fmt.saturates:
        rounded = np.where(np.abs(rounded) > fmt.largest, np.copysign(np.inf, exact), rounded)
    result: Floats = np.copysign(rounded, exact).astype(np.float32)
    return result


def mismatches(ours: torch.Tensor, expected: Floats) -> int:
    """How many float32 numbers differ in any bit."""
    assert ours.dtype == torch.float32
    return int((ours.contiguous().numpy().view(np.uint32) != expected.view(np.uint32)).sum())


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number(fmt: Format, dtype: torch.dtype) -> None:
    values = every_finite(dtype)
    wide = values.to(torch.float32).numpy()
    assert mismatches(round_to(values, fmt), witness(wide, fmt)) == 0
    if fmt.name in ORACLES:
        assert mismatches(round_to(values, fmt), oracle(wide, fmt)) == 0


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_random_and_awkward_float32(fmt: Format) -> None:
    near_range = np.random.default_rng(3).standard_normal(1 << 18).astype(np.float32) * np.float32(fmt.largest / 8)
    values = np.concatenate([random_bits(), near_range, around_halfway(fmt), EDGES])
    rounded = round_to(torch.from_numpy(values), fmt)
    assert mismatches(rounded, witness(values, fmt)) == 0
    if fmt.name in ORACLES:
        assert mismatches(rounded, oracle(values, fmt)) == 0


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_nan_stays_and_infinity_saturates_or_stays(fmt: Format) -> None:
    all_ones = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # a carry would overflow
    assert round_to(all_ones, fmt).isnan().all()
    assert round_to(torch.tensor([float("nan")]), fmt).isnan().all()
    end = fmt.largest if fmt.saturates else float("inf")
    assert round_to(torch.tensor([float("inf"), -float("inf")]), fmt).tolist() == [end, -end]


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_shapes_and_strides(fmt: Format) -> None:
    base = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(round_to(base.t(), fmt), round_to(base, fmt).t())
    assert torch.equal(round_to(base[::2, 1::3], fmt), round_to(base, fmt)[::2, 1::3])
    assert torch.equal(round_to(base[:1].expand(4, 10), fmt), round_to(base[:1], fmt).expand(4, 10))
    assert round_to(torch.empty(0, 3), fmt).shape == (0, 3)
    assert round_to(torch.tensor(1.0), fmt).item() == 1.0


def test_input_is_left_alone_and_no_gradient_flows() -> None:
    values = torch.full((8,), 1000.3, requires_grad=True)
    for fmt in ALL:
        assert not round_to(values, fmt).requires_grad
    assert values.tolist() == torch.full((8,), 1000.3).tolist()


def test_out_is_filled_and_may_be_the_input() -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    expected = round_to(values, E4M3)
    narrow = torch.empty(5, 7, dtype=torch.bfloat16)
    assert round_to(values, E4M3, out=narrow) is narrow
    assert torch.equal(narrow.float(), expected)
    assert round_to(values, E4M3, out=values) is values
    assert torch.equal(values, expected)


def test_e2m1_has_eight_magnitudes() -> None:
    grid = set(round_to(torch.linspace(0, 10, 4001), E2M1).tolist())
    assert sorted(grid) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
