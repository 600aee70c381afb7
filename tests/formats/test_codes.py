"""The formats' numbers, and every code both ways, against the definition, ml_dtypes (numpy for fp16) and gfloat."""

from __future__ import annotations

import gfloat
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.formats.codes import code_dtype, decode, encode, pack_codes, unpack_codes
from fp8bench.formats.grids import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    TF32,
    Format,
)
from fp8bench.formats.quantise import round_to
from tests.counts import for_each
from tests.formats.oracles import (
    ALL,
    DEFINITIONS,
    GFLOAT,
    ML_DTYPES,
    every_pattern,
    exactly,
    ladder,
    mismatches,
    numbers,
    random_patterns,
)

each_format = for_each("fmt", ALL)
TORCH_BYTES = {
    E4M3: torch.float8_e4m3fn,
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2: torch.float8_e5m2,
    E5M2FNUZ: torch.float8_e5m2fnuz,
    E8M0: torch.float8_e8m0fnu,
}


def every_code(fmt: Format) -> torch.Tensor:
    """In ascending order as unsigned numbers."""
    return torch.arange(1 << fmt.bits, dtype=torch.int32).to(code_dtype(fmt))


@each_format
def test_every_code_decodes_as_each_witness_says(fmt: Format) -> None:
    """The definition, gfloat, ml_dtypes or numpy, and torch's dtype, if they have the format."""
    codes = every_code(fmt)
    result = decode(codes, fmt)
    assert mismatches(result, exactly(fmt, numbers(fmt.name))) == 0
    by_gfloat = gfloat.decode_ndarray(GFLOAT[fmt.name], np.arange(1 << fmt.bits, dtype=np.int64))
    assert mismatches(result, exactly(fmt, by_gfloat)) == 0
    if fmt is not TF32:
        bits = np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8)
        with np.errstate(invalid="ignore"):
            assert mismatches(result, bits.view(ML_DTYPES[fmt.name]).astype(np.float32)) == 0
    if fmt in TORCH_BYTES:
        assert mismatches(result, codes.view(TORCH_BYTES[fmt]).to(torch.float32).numpy()) == 0


NAN_CODES = {
    "e4m3fn": 0x7F,
    "e4m3fnuz": 0x80,
    "e5m2": 0x7E,
    "e5m2fnuz": 0x80,
    "e8m0": 0xFF,
    "bf16": 0x7FC0,
    "fp16": 0x7E00,
    "tf32": 0x1FF << 9,
}


@for_each("name", NAN_CODES)
def test_every_nan_has_one_code(name: str) -> None:
    """Whatever its sign and payload, which casts treat differently by device."""
    fmt = next(fmt for fmt in ALL if fmt.name == name)
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF])
    nans = bits.to(torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert set(encode(nans, fmt).tolist()) == {NAN_CODES[name]}
    assert decode(encode(nans, fmt), fmt).isnan().all()


@each_format
def test_random_values_survive(fmt: Format) -> None:
    source = torch.from_numpy(random_patterns(fmt.name, 1 << 18))
    if not fmt.has_nan:
        source = source.nan_to_num(0.0)
    for overflow in fmt.overflows:
        values = round_to(source, fmt, overflow=overflow)
        codes = encode(values, fmt)
        assert mismatches(decode(codes, fmt), values.numpy()) == 0


@each_format
@for_each("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_encode_as_wide_ones(fmt: Format, dtype: torch.dtype) -> None:
    patterns = every_pattern(dtype)
    wide = patterns.to(torch.float32)
    rounded = round_to(patterns, fmt)
    on_grid = (rounded == wide) | (wide.isnan() & fmt.has_nan)
    assert torch.equal(encode(patterns[on_grid], fmt), encode(wide[on_grid], fmt))
    assert on_grid.any()


@each_format
def test_shapes_strides_and_gradients(fmt: Format) -> None:
    base = round_to(torch.rand(6, 10, generator=torch.Generator().manual_seed(0)) + 0.5, fmt)
    codes = encode(base, fmt)
    assert torch.equal(encode(base.t()[::2], fmt), codes.t()[::2])
    assert torch.equal(encode(base[:1].expand(4, 10), fmt), codes[:1].expand(4, 10))
    assert torch.equal(decode(codes.t()[:, 1::2], fmt), base.t()[:, 1::2])
    assert encode(torch.empty(0, 3), fmt).shape == decode(torch.empty(0, 3, dtype=code_dtype(fmt)), fmt).shape == (0, 3)
    assert encode(torch.tensor(1.0), fmt).shape == decode(encode(torch.tensor(1.0), fmt), fmt).shape == ()
    tracked = base.clone().requires_grad_()
    assert torch.equal(encode(tracked, fmt), codes)


@each_format
def test_long_tensors_are_the_same_as_their_parts(fmt: Format) -> None:
    values = decode(every_code(fmt), fmt)
    values = values[~values.isnan()]
    many = values.repeat((200_000 // len(values)) + 1)[:200_000]
    codes = encode(many, fmt)
    for part in (slice(0, 100), slice(65_500, 65_600), slice(-100, None)):
        assert torch.equal(codes[part], encode(many[part], fmt))
        assert torch.equal(decode(codes, fmt)[part], many[part])


def test_the_first_of_two_e2m1_codes_lies_in_the_lower_half() -> None:
    codes = encode(torch.tensor([1.0, -6.0, 0.5]), E2M1)
    assert codes.tolist() == [2, 15, 1]
    assert pack_codes(codes, E2M1).tolist() == [0xF2, 0x01]
    assert unpack_codes(pack_codes(codes, E2M1), E2M1, 3).tolist() == [2, 15, 1]
    assert unpack_codes(pack_codes(codes, E2M1), E2M1).tolist() == [2, 15, 1, 0]


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), seed=st.integers(0, 100))
def test_packing_is_undone_by_unpacking(shape: list[int], seed: int) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_codes(codes, E2M1)
    assert packed.shape == (*shape[:-1], (shape[-1] + 1) // 2)
    assert torch.equal(unpack_codes(packed, E2M1, shape[-1]), codes)
    if len(shape) > 1:
        turned = codes.transpose(0, -1)
        assert torch.equal(unpack_codes(pack_codes(turned, E2M1), E2M1, turned.shape[-1]), turned)


@pytest.mark.gpu
@each_format
def test_a_gpu_encodes_and_decodes_as_the_processor_does(fmt: Format) -> None:
    values = round_to(torch.from_numpy(random_patterns(fmt.name, 1 << 18)), fmt)
    if not fmt.has_nan:
        values = values.nan_to_num(0.0)
    codes = encode(values, fmt)
    assert torch.equal(encode(values.cuda(), fmt).cpu(), codes)
    assert mismatches(decode(codes.cuda(), fmt).cpu(), values.numpy()) == 0
    assert torch.equal(pack_codes(codes.cuda(), fmt).cpu(), pack_codes(codes, fmt))


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
