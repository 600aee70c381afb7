"""The formats' numbers against their definitions', ml_dtypes', numpy's and gfloat's."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fp8bench.formats.grids import E8M0, TF32, Format, Overflow
from tests.counts import for_each
from tests.formats.oracles import ALL, DEFINITIONS, GFLOAT, ML_DTYPES, ladder, numbers

each_format = for_each("fmt", ALL, ids=lambda fmt: fmt.name)


@each_format
def test_limits_are_those_of_all_the_codes(fmt: Format) -> None:
    values = numbers(fmt.name)
    finite = values[np.isfinite(values)]
    positive = np.unique(finite[finite > 0])
    assert fmt.bits == DEFINITIONS[fmt.name].bits
    assert fmt.largest == positive[-1]
    assert fmt.smallest_subnormal == positive[0]
    assert 2.0**fmt.max_exponent <= fmt.largest < 2.0 ** (fmt.max_exponent + 1)
    assert fmt.has_infinity == bool(np.isinf(values).any())
    assert fmt.has_nan == bool(np.isnan(values).any())
    assert fmt.signed == bool((finite < 0).any())
    assert fmt.zeros == bool((finite == 0).any())
    assert fmt.signed_zero == bool((np.signbit(finite) & (finite == 0)).any())


@each_format
def test_the_smallest_normal_has_a_full_mantissa_above_it(fmt: Format) -> None:
    rungs = ladder(fmt.name)
    start = int(np.searchsorted(rungs, fmt.smallest_normal))
    assert rungs[start] == fmt.smallest_normal
    assert rungs[start + (1 << fmt.mantissa_bits)] == 2 * fmt.smallest_normal
    assert set(np.diff(rungs[: start + 1])) <= {fmt.smallest_subnormal}
    assert fmt.smallest_normal == 2.0**fmt.min_exponent


@for_each("fmt", [fmt for fmt in ALL if fmt is not TF32], ids=lambda fmt: fmt.name)
def test_limits_agree_with_ml_dtypes_and_numpy(fmt: Format) -> None:
    dtype = ML_DTYPES[fmt.name]
    info = np.finfo(np.float16) if dtype is np.float16 else ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.bits == info.bits
    if fmt is not E8M0:  # of which ml_dtypes says that it has a subnormal, 2^-127, and no mantissa at all
        assert fmt.smallest_subnormal == float(info.smallest_subnormal)
        assert fmt.mantissa_bits == info.nmant


@each_format
def test_limits_agree_with_gfloat(fmt: Format) -> None:
    info = GFLOAT[fmt.name]
    assert fmt.bits == info.bits
    assert fmt.bias == info.bias
    assert fmt.largest == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.smallest_subnormal == info.smallest
    assert fmt.signed == info.is_signed
    assert fmt.zeros == info.has_zero
    assert fmt.signed_zero == info.has_nz
    assert fmt.has_nan == (info.num_nans > 0)
    assert fmt.has_infinity == (info.num_infs > 0)


def test_ways_of_overflowing_are_those_there_are_codes_for() -> None:
    saturate, infinity, nan = Overflow
    assert {fmt.name: fmt.overflows for fmt in ALL} == {
        "e4m3fn": (saturate, nan),
        "e4m3fnuz": (saturate, nan),
        "e5m2": (saturate, infinity),
        "e5m2fnuz": (saturate, nan),
        "e3m2": (saturate,),
        "e2m3": (saturate,),
        "e2m1": (saturate,),
        "e8m0": (saturate, nan),
        "bf16": (saturate, infinity),
        "fp16": (saturate, infinity),
        "tf32": (saturate, infinity),
    }
