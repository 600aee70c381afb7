"""Rounding against three witnesses, bit by bit, signs of zero included: no tolerance, no mismatch.

Where one of them differs by design it is not asked. Random numbers by place are held against numpy's unsigned integers,
in every stretch of a huge tensor, bit by bit even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8bench.formats.grids import E2M1, E2M3, E3M2, E5M2, E8M0, Format, Overflow
from fp8bench.formats.quantise import (
    ROUNDING_RANDOM_BITS,
    compute_element_random_bits,
    compute_seed_key,
    random_bits,
    round_to,
)
from tests.counts import counts, for_each
from tests.formats.oracles import (
    ALL,
    EVERY_OVERFLOW,
    ML_DTYPES,
    ML_DTYPES_OVERFLOW,
    Floats,
    Mask,
    by_definition,
    by_gfloat,
    by_ml_dtypes,
    every_pattern,
    ladder,
    mismatches,
    random_patterns,
)

FINITE = [E3M2, E2M3, E2M1]


each_format = for_each("fmt", ALL)
each_overflow = for_each(("fmt", "overflow"), EVERY_OVERFLOW)


def check(values: Floats, ours: torch.Tensor, fmt: Format, overflow: Overflow) -> None:
    """Asserts agreement with every oracle that has the format and overflow rule."""
    assert mismatches(ours, by_definition(values, fmt.name, overflow)) == 0
    asked = numbers_for_gfloat(values, fmt)
    assert mismatches(ours.numpy()[asked], by_gfloat(values[asked], fmt.name, overflow)) == 0
    if fmt.name in ML_DTYPES and overflow in (Overflow.SATURATE, ML_DTYPES_OVERFLOW[fmt.name]):
        asked = numbers_for_ml_dtypes(values, fmt)
        assert mismatches(ours.numpy()[asked], by_ml_dtypes(values[asked], fmt.name, overflow)) == 0


def numbers_for_gfloat(values: Floats, fmt: Format) -> Mask:
    """gfloat's e8m0 deliberately differs at ties, below the smallest number and where there is no code."""
    if fmt is not E8M0:
        return np.ones(values.shape, bool)
    with np.errstate(invalid="ignore"):  # some CPUs warn about signalling NaNs
        tie = np.frexp(values)[0] == 0.75
    return (values >= fmt.smallest_normal) & ~tie


def numbers_for_ml_dtypes(values: Floats, fmt: Format) -> Mask:
    """Without NaN for FP4 and FP6, and the half octave above e8m0's smallest number, which ml_dtypes rounds up."""
    if fmt in FINITE:
        return ~np.isnan(values)
    if fmt is E8M0:
        return (values <= fmt.smallest_normal) | (values >= 1.5 * fmt.smallest_normal) | np.isnan(values)
    return np.ones(values.shape, bool)


@each_overflow
@for_each("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(fmt: Format, overflow: Overflow, dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    check(values.to(torch.float32).numpy(), round_to(values, fmt, overflow=overflow), fmt, overflow)


@each_overflow
@counts(1 << 15, 1 << 22)
def test_random_float32_patterns(count: int, fmt: Format, overflow: Overflow) -> None:
    values = random_patterns(fmt.name, count)
    assert len(values) > count and np.isnan(values).any() and np.isinf(values).any()
    check(values, round_to(torch.from_numpy(values), fmt, overflow=overflow), fmt, overflow)


def test_the_first_value_that_overflows_lies_halfway() -> None:
    for fmt in ALL:
        largest, following = ladder(fmt.name)[-2:]
        middle = np.float32(largest / 2 + following / 2)
        before = np.nextafter(middle, np.float32(0))
        even = fmt is not E8M0 and (len(ladder(fmt.name)) - 2) % 2 == 0
        for overflow in fmt.overflows:
            at, below = round_to(torch.tensor([middle, before]), fmt, overflow=overflow).tolist()
            assert below == largest
            assert (at == largest) == (even or overflow is Overflow.SATURATE)


def test_e8m0_has_no_zero_no_sign_and_ties_go_up() -> None:
    """As in ml_dtypes."""
    values = torch.tensor([0.0, -0.0, -1.0, -torch.inf, torch.nan, 1.5, 3.0, 1e-45])
    rounded = round_to(values, E8M0)
    assert rounded[:5].isnan().all()
    assert rounded[5:].tolist() == [2.0, 4.0, 2.0**-127]


@each_format
def test_shapes_and_strides(fmt: Format) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        base = (torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).abs() * 3).to(dtype)
        plain = round_to(base.float(), fmt)
        assert torch.equal(round_to(base.t()[1::2], fmt), plain.t()[1::2])
        assert torch.equal(round_to(base[::2, 1::3], fmt), plain[::2, 1::3])
        assert torch.equal(round_to(base[:1].expand(4, 10), fmt), plain[:1].expand(4, 10))
        assert torch.equal(round_to(base.view(2, 3, 5, 2), fmt), plain.view(2, 3, 5, 2))
        assert torch.equal(round_to(base.view(-1).unfold(0, 5, 3), fmt), plain.view(-1).unfold(0, 5, 3))
    assert round_to(torch.empty(0, 3), fmt).shape == (0, 3)
    scalar = round_to(torch.tensor(1.0), fmt)
    assert (scalar.shape, scalar.item()) == ((), 1.0)


def test_input_is_left_alone_and_no_gradient_flows() -> None:
    values = torch.full((8,), 1000.3, requires_grad=True)
    for fmt in ALL:
        for overflow in fmt.overflows:
            assert not round_to(values, fmt, overflow=overflow).requires_grad
    assert values.tolist() == torch.full((8,), 1000.3).tolist()


def test_out_is_filled_and_may_be_the_input() -> None:
    for values in (torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), every_pattern(torch.bfloat16)):
        expected = round_to(values, E5M2).float().numpy()
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            other = torch.empty(values.shape, dtype=dtype)
            assert round_to(values, E5M2, out=other) is other
            assert mismatches(other.float(), expected) == 0
        turned = torch.empty(values.shape[::-1]).permute(*reversed(range(values.dim())))
        assert mismatches(round_to(values, E5M2, out=turned), expected) == 0
        assert round_to(values, E5M2, out=values) is values
        assert mismatches(values.float(), expected) == 0


@pytest.mark.gpu
@each_overflow
def test_a_gpu_rounds_as_the_processor_does(fmt: Format, overflow: Overflow) -> None:
    values = torch.from_numpy(random_patterns(fmt.name))
    result = round_to(values.cuda(), fmt, overflow=overflow).cpu()
    assert mismatches(result, round_to(values, fmt, overflow=overflow).numpy()) == 0


Words = npt.NDArray[np.uint32]
SEEDS = [0, 1, -1, 12345678901234567, 1 << 32, -(1 << 63)]


def mixed(word: Words) -> Words:
    """Wellons' bijection lowbias32 as its author writes it, on unsigned numbers."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))


def witness(index: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.int32]:
    """The number of each position, in unsigned arithmetic."""
    low, high = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    unsigned = seed % (1 << 64)
    golden = np.uint32(0x9E3779B9)
    with np.errstate(over="ignore"):
        key = mixed(mixed(high * golden + np.uint32(unsigned >> 32)) + np.uint32(unsigned & 0xFFFFFFFF))
        return (mixed(mixed(low + key) + key * golden) >> np.uint32(32 - ROUNDING_RANDOM_BITS)).astype(np.int32)


@for_each("seed", SEEDS)
def test_every_place_has_the_number_of_unsigned_arithmetic(seed: int) -> None:
    result = random_bits((300, 257), torch.tensor([seed]))
    assert result.dtype == torch.int32 and result.shape == (300, 257)
    assert np.array_equal(result.numpy().ravel(), witness(np.arange(300 * 257, dtype=np.uint64), seed))


@for_each("seed", SEEDS)
def test_beyond_32_bits_of_index_numbers_go_on_by_another_key(seed: int) -> None:
    places = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (3 << 32) + 5])
    keys = compute_seed_key(torch.tensor([seed]), places >> 32)
    result = compute_element_random_bits(places.to(torch.int32), keys)
    assert np.array_equal(result.numpy(), witness(places.numpy().astype(np.uint64), seed))
    assert keys[-1] != keys[0] != keys[5] == keys[6]
    assert torch.equal(keys[0], compute_seed_key(torch.tensor(seed)))


def test_places_count_and_nothing_else() -> None:
    seed = torch.tensor(5)
    flat = random_bits((6 * 35,), seed)
    assert torch.equal(random_bits((6, 35), seed).flatten(), flat)
    assert torch.equal(random_bits((2, 3, 5, 7), seed).flatten(), flat)
    assert torch.equal(random_bits((3 * 35,), seed), flat[: 3 * 35])
    assert random_bits((0, 4), seed).shape == (0, 4) and random_bits((), seed).shape == ()


def test_bits_are_set_every_second_time_and_alone() -> None:
    """Within 5 standard errors: each of the 24 bits, and each together with the neighbour's same bit."""
    count = 1 << 18
    numbers = random_bits((count,), torch.tensor(3)).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1 << ROUNDING_RANDOM_BITS
    bits = (numbers[:, None] >> np.arange(ROUNDING_RANDOM_BITS)) & 1
    neighbours = bits[1:] ^ bits[:-1]
    for set_bits in (bits, neighbours):
        assert np.abs(set_bits.mean(0) - 0.5).max() < 5 * 0.5 / count**0.5


def test_seeds_side_by_side_have_nothing_in_common() -> None:
    count = 1 << 18
    rows = torch.stack([random_bits((count,), torch.tensor(seed)) for seed in range(8)]).double()
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 5 / count**0.5
