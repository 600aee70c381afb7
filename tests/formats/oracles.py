"""Three independent oracles of each format's numbers and rounding: ml_dtypes (numpy for fp16.

None for tf32), gfloat, and the definition as a table of all numbers, written here. Deliberate differences of the first
two are noted next to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from fp8bench.formats.grids import FORMATS, Format, Overflow

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int64]

ALL = list(FORMATS.values())
EVERY_OVERFLOW = [(fmt, overflow) for fmt in ALL for overflow in fmt.overflows]
# Signalling NaNs and overflow are part of the inputs.
asked_of_numpy = np.errstate(invalid="ignore", over="ignore")
LARGEST32 = float(np.finfo(np.float32).max)

ML_DTYPES: dict[str, type] = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
# ml_dtypes on overflow: NaN if there is no infinity, the largest number if there is no NaN either.
ML_DTYPES_OVERFLOW = {
    **dict.fromkeys(("e4m3fn", "e4m3fnuz", "e5m2fnuz", "e8m0"), Overflow.NAN),
    **dict.fromkeys(("e5m2", "bf16", "fp16"), Overflow.INFINITY),
    **dict.fromkeys(("e3m2", "e2m3", "e2m1"), Overflow.SATURATE),
}


def _unnamed(name: str, bits: int, precision: int, bias: int, *, fnuz: bool) -> gfloat.FormatInfo:
    """A format without a name in gfloat, which can compute with it."""
    return gfloat.FormatInfo(
        name,
        bits,
        precision,
        bias=bias,
        is_signed=True,
        domain=gfloat.Domain.Finite if fnuz else gfloat.Domain.Extended,
        has_nz=not fnuz,
        num_high_nans=0 if fnuz else (1 << (precision - 1)) - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )


GFLOAT: dict[str, gfloat.FormatInfo] = {
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e4m3fnuz": _unnamed("e4m3fnuz", 8, 4, 8, fnuz=True),
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e5m2fnuz": _unnamed("e5m2fnuz", 8, 3, 16, fnuz=True),
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
    "e8m0": gfloat.formats.format_info_ocp_e8m0,
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp16": gfloat.formats.format_info_binary16,
    "tf32": _unnamed("tf32", 19, 11, 127, fnuz=False),
}


@dataclass(frozen=True)
class Definition:
    """A format as in its specification.

    `special`: 'ieee' (an exponent of ones is infinity or NaN), 'fn' (only the code of ones is NaN), 'fnuz' (only -0's
    code is NaN), 'finite' (neither), 'scale' (no sign and no zero, the code of ones is NaN).
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str

    @property
    def bits(self) -> int:
        return (self.special != "scale") + self.exponent_bits + self.mantissa_bits


DEFINITIONS = {
    "e4m3fn": Definition(4, 3, 7, "fn"),
    "e4m3fnuz": Definition(4, 3, 8, "fnuz"),
    "e5m2": Definition(5, 2, 15, "ieee"),
    "e5m2fnuz": Definition(5, 2, 16, "fnuz"),
    "e3m2": Definition(3, 2, 3, "finite"),
    "e2m3": Definition(2, 3, 1, "finite"),
    "e2m1": Definition(2, 1, 1, "finite"),
    "e8m0": Definition(8, 0, 127, "scale"),
    "bf16": Definition(8, 7, 127, "ieee"),
    "fp16": Definition(5, 10, 15, "ieee"),
    "tf32": Definition(8, 10, 127, "ieee"),
}


@cache
def numbers(name: str) -> Doubles:
    """The number of every code of a format, by definition."""
    fmt = DEFINITIONS[name]
    codes = np.arange(1 << fmt.bits, dtype=np.int64)
    mantissa = codes & ((1 << fmt.mantissa_bits) - 1)
    exponent = (codes >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    negative = (codes >> (fmt.exponent_bits + fmt.mantissa_bits)) == 1
    normal = (exponent > 0) | (fmt.special == "scale")
    significand = mantissa / (1 << fmt.mantissa_bits) + normal
    values = np.ldexp(significand, np.where(normal, exponent, 1) - fmt.bias)
    values = np.where(negative, -values, values)
    ones = exponent == (1 << fmt.exponent_bits) - 1
    if fmt.special == "ieee":
        values = np.where(ones, np.where(mantissa == 0, np.copysign(np.inf, values), np.nan), values)
    elif fmt.special in ("fn", "scale"):
        values = np.where(ones & (mantissa == (1 << fmt.mantissa_bits) - 1), np.nan, values)
    elif fmt.special == "fnuz":
        values[1 << (fmt.bits - 1)] = np.nan
    result: Doubles = values
    return result


@cache
def ladder(name: str) -> Doubles:
    """Every finite non-negative number in ascending order, and the next one beyond; each at its code."""
    below_sign = numbers(name)[: 1 << (DEFINITIONS[name].exponent_bits + DEFINITIONS[name].mantissa_bits)]
    finite = below_sign[np.isfinite(below_sign)]
    following = 2 * finite[-1] if name == "e8m0" else 2 * finite[-1] - finite[-2]
    return np.append(finite, following)


@asked_of_numpy
def neighbours(values: Floats, name: str) -> tuple[Codes, Doubles, Doubles]:
    """The number at or below each magnitude, its code, and the next number above."""
    rungs = ladder(name)
    code = np.clip(np.searchsorted(rungs, np.abs(values).astype(np.float64), side="right") - 1, 0, len(rungs) - 2)
    return code, rungs[code], rungs[code + 1]


@asked_of_numpy
def by_definition(values: Floats, name: str, overflow: Overflow) -> Floats:
    """The nearer neighbour, ties to the even code; e8m0's ties go up, and it has no number below 0.

    Keeps the value's sign, for zero too if the format has -0.
    """
    magnitude = np.abs(values).astype(np.float64)
    code, low, high = neighbours(values, name)
    up, down = high - magnitude, magnitude - low
    code = code + ((up < down) | ((up == down) & ((code % 2 == 1) | (name == "e8m0"))))
    return ended(code, values, name, overflow)


@asked_of_numpy
def ended(code: Codes, values: Floats, name: str, overflow: Overflow) -> Floats:
    """The numbers at these indices with the values' signs; the last index is overflow."""
    rungs = ladder(name).copy()
    rungs[-1] = {Overflow.SATURATE: rungs[-2], Overflow.INFINITY: np.inf, Overflow.NAN: np.nan}[overflow]
    result = np.copysign(rungs[code], values)
    if name == "e8m0":
        result = np.where(values > 0, result, np.nan)
    elif DEFINITIONS[name].special == "fnuz":
        result = np.where(result == 0, 0.0, result)
    return np.where(np.isnan(values), np.nan, result).astype(np.float32)


@asked_of_numpy
def by_ml_dtypes(values: Floats, name: str, overflow: Overflow) -> Floats:
    """Rounds by ml_dtypes, which overflows in one way only; to saturate, its input is clamped.

    Not for tf32 or NaN in FP4 and FP6.
    """
    if overflow is Overflow.SATURATE:
        values = np.clip(values, -ladder(name)[-2], ladder(name)[-2]).astype(np.float32)
    else:
        assert overflow is ML_DTYPES_OVERFLOW[name]
    result: Floats = values.astype(ML_DTYPES[name]).astype(np.float32)
    return result


@asked_of_numpy
def by_gfloat(values: Floats, name: str, overflow: Overflow) -> Floats:
    """Rounds by gfloat, which keeps NaN everywhere. For e8m0 only numbers above 2^-127 that are not ties."""
    result = gfloat.round_ndarray(GFLOAT[name], values.astype(np.float64), sat=overflow is Overflow.SATURATE)
    return np.asarray(result).astype(np.float32)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16-bit dtype, infinities and NaNs included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@lru_cache(maxsize=2)
def random_patterns(name: str, count: int = 1 << 22) -> Floats:
    """Random float32 numbers for a format, and known difficult values.

    Half are random bits (all exponents equally likely, NaNs included), a quarter have the format's magnitudes, and a
    quarter are at midpoints or one float32 step from them.
    """
    rng = np.random.default_rng(list(name.encode()))
    rungs = ladder(name)
    anything = rng.integers(0, 1 << 32, count // 2, dtype=np.uint32).view(np.float32)
    smallest = np.log2(rungs[rungs > 0][0]) - 2
    exponents = rng.uniform(max(smallest, -148.0), min(np.log2(rungs[-1]) + 2, 127.9), count // 4)
    near = np.exp2(exponents).astype(np.float32) * rng.choice(np.array([-1, 1], np.float32), count // 4)
    place = rng.integers(0, len(rungs) - 1, count // 4)
    middle = (rungs[place] / 2 + rungs[place + 1] / 2).astype(np.float32)
    bits = middle.view(np.uint32) + rng.integers(-1, 2, count // 4)
    halfway = (bits | (rng.integers(0, 2, count // 4) << 31)).astype(np.uint32).view(np.float32)
    return np.concatenate([anything, near, halfway, EDGES])


_HUGE = [2.0**exponent for exponent in (103, 104, 105, 106, 107, 108, 109, 110, 126, 127)]
_MAGNITUDES = np.array([0, 1e-45, 1e-40, 2.0**-127, 2.0**-126, 1, LARGEST32, np.inf, *_HUGE], np.float32)
_NAN_BITS = np.array([0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F801FFF, 0xFFFFFFFF, 0xFF800001], np.uint32)
EDGES: Floats = np.concatenate([_MAGNITUDES, -_MAGNITUDES, _NAN_BITS.view(np.float32)])


def name_of(value: object) -> str:
    """The name of a parameter in test ids."""
    return value.name if isinstance(value, Format) else str(value)


def mismatches(ours: torch.Tensor | Floats, expected: Floats) -> int:
    """The number of float32 values that differ in any bit; all NaNs are equal, zeros of different sign are not."""
    result = ours.contiguous().numpy() if isinstance(ours, torch.Tensor) else ours
    assert result.shape == expected.shape
    return int((~same_bits(result, expected)).sum())


def same_bits(one: Floats, other: Floats) -> Mask:
    """Mask of float32 numbers that are equal in every bit, or both NaN."""
    assert one.dtype == other.dtype == np.float32
    result: Mask = (one.view(np.uint32) == other.view(np.uint32)) | (np.isnan(one) & np.isnan(other))
    return result


def exactly(fmt: Format, values: npt.ArrayLike) -> Floats:
    """The values in float32, which represents every number of every format."""
    doubles = np.asarray(values, np.float64)
    result = doubles.astype(np.float32)
    assert np.array_equal(result.astype(np.float64), doubles, equal_nan=True), fmt.name
    return result
