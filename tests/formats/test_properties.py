"""Stochastic rounding against a format's numbers, and the noise that rounding leaves."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.formats.grids import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, TF32, Format, Overflow
from fp8bench.formats.quantise import ROUNDING_RANDOM_BITS, round_to, round_values
from fp8bench.formats.recipes import NVFP4, NVFP4_ROUNDED_UP, TENSOR, ScaleRounding, Scaling
from fp8bench.formats.scaled import values
from tests.counts import for_each
from tests.formats.oracles import (
    ALL,
    EVERY_OVERFLOW,
    by_definition,
    ended,
    ladder,
    mismatches,
    neighbours,
    numbers,
    random_patterns,
    same_bits,
)

each_format = for_each("fmt", ALL)
each_overflow = for_each(("fmt", "overflow"), EVERY_OVERFLOW)
SIGNED = [fmt for fmt in ALL if fmt.signed]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit; all NaNs are equal."""
    return mismatches(one, other.numpy()) == 0


def seed_of(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int64)


@each_overflow
def test_a_stochastic_result_is_one_of_the_two_neighbours(fmt: Format, overflow: Overflow) -> None:
    values = random_patterns(fmt.name, 1 << 18)
    result = round_to(torch.from_numpy(values), fmt, overflow=overflow, seed=seed_of(3)).numpy()
    code, low, _ = neighbours(values, fmt.name)
    either = [ended(code, values, fmt.name, overflow), ended(code + 1, values, fmt.name, overflow)]
    is_low, is_high = (same_bits(result, candidate) for candidate in either)
    beyond = np.abs(values) >= ladder(fmt.name)[-1]
    assert (is_low | is_high).all()
    assert is_high[beyond].all()
    moved = is_high & ~is_low & ~beyond
    assert moved.any()
    exact = (np.abs(values) == low) & ~beyond
    assert is_low[exact].all()


@each_format
def test_numbers_of_the_format_never_move(fmt: Format) -> None:
    values = torch.from_numpy(numbers(fmt.name).astype(np.float32))
    for overflow in fmt.overflows:
        expected = by_definition(values.numpy(), fmt.name, overflow)
        for number in range(2):
            result = round_to(values, fmt, overflow=overflow, seed=seed_of(number))
            assert mismatches(result, expected) == 0


def random_numbers_in_turn(fmt: Format) -> torch.Tensor:
    """2^16 random numbers that represent all 2^24 for a value with 16 dropped bits (13 for tf32)."""
    if fmt in (BF16, TF32):  # uses as many of the lowest bits as the mantissa drops
        return torch.arange(1 << 16, dtype=torch.int32)
    return torch.arange(0, 1 << ROUNDING_RANDOM_BITS, 1 << (ROUNDING_RANDOM_BITS - 16), dtype=torch.int32)


@each_format
def test_the_share_that_goes_up_is_the_rest_of_the_step(fmt: Format) -> None:
    random = random_numbers_in_turn(fmt)
    rungs = ladder(fmt.name)
    rests = 13 if fmt is TF32 else 23 - 7 if fmt is BF16 else 12
    for place in {0, 1, len(rungs) // 2, len(rungs) - 3}:
        if fmt in (BF16, TF32, E8M0) and place < 2:
            continue  # float32 has no bits to spare there
        low, high = rungs[place], rungs[place + 1]
        for share in (0, 1, 5, (1 << rests) // 3, (1 << rests) - 1):
            exact = low + (high - low) * share / (1 << rests)
            value = np.float32(exact)
            assert float(value) == exact
            drawn = round_values(torch.full((1 << 16,), float(value)), fmt, random)
            assert bool(((drawn == low) | (drawn == high)).all())
            assert int((drawn == high).sum()) == share << (16 - rests)


@each_format
def test_the_smallest_rest_goes_up_as_rarely_as_it_should(fmt: Format) -> None:
    value = torch.full((2,), float(np.nextafter(np.float32(1), np.float32(2))))
    if fmt in (BF16, TF32, E8M0):  # rounds up at the largest number that the dropped bits can hold, and at no other
        last = (1 << 23 - fmt.mantissa_bits) - 1
        up, down = last, last - 1
    else:  # rounds up at the numbers below its share
        share = 1 << ROUNDING_RANDOM_BITS - 23 + fmt.mantissa_bits
        up, down = share - 1, share
    drawn = round_values(value, fmt, torch.tensor([up, down], dtype=torch.int32))
    assert drawn.tolist() == [1 + 2.0**-fmt.mantissa_bits, 1]


@each_format
def test_stochastic_rounding_is_unbiased(fmt: Format) -> None:
    """The mean of all values is within 4 standard errors, and the variance is as expected."""
    rng = np.random.default_rng(7)
    rungs = ladder(fmt.name)
    top = min(np.log2(rungs[-2]), 120.0)
    bottom = max(np.log2(fmt.smallest_subnormal) - (fmt is not E8M0), top - 40)
    values = np.exp2(rng.uniform(bottom, top, 1 << 18)).astype(np.float32)
    if fmt.signed:
        values *= rng.choice(np.array([-1, 1], np.float32), len(values))
    _, low, high = neighbours(values, fmt.name)
    result = round_to(torch.from_numpy(values), fmt, seed=seed_of(11)).numpy().astype(np.float64)
    step, magnitude = high - low, np.abs(values).astype(np.float64)
    chance = (magnitude - low) / step
    draws = chance * (1 - chance) > 0
    # In steps of each value's size, so that large values do not dominate.
    errors = ((np.abs(result) - magnitude) / step)[draws]
    variances = (chance * (1 - chance))[draws]
    assert draws.sum() > 100_000
    assert abs(errors.sum()) < 4 * np.sqrt(variances.sum())
    spread = np.sum(variances * (1 - 4 * variances))  # of the squared errors around their means
    assert abs(np.sum(errors**2) - variances.sum()) < 4 * np.sqrt(spread)


@each_format
def test_seeds(fmt: Format) -> None:
    values = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 3 + 0.6
    first = round_to(values, fmt, seed=seed_of(1))
    assert torch.equal(round_to(values, fmt, seed=seed_of(1)), first)
    turned = values.t().contiguous().t()
    assert torch.equal(round_to(turned, fmt, seed=seed_of(1)), first)
    others = [round_to(values, fmt, seed=seed_of(number)) for number in (2, 3, -1, 2**33 + 1)]
    assert all(not torch.equal(other, first) for other in others)
    assert torch.equal(round_to(values, fmt, torch.empty_like(values), seed=seed_of(1)), first)
    assert round_to(torch.empty(0, 3), fmt, seed=seed_of(1)).shape == (0, 3)
    assert round_to(torch.tensor(1.0), fmt, seed=seed_of(1)).shape == ()


@for_each("fmt", SIGNED)
def test_a_value_and_its_negative_are_drawn_alike(fmt: Format) -> None:
    values = torch.from_numpy(random_patterns(fmt.name, 1 << 16))
    plus, minus = (round_to(one, fmt, seed=seed_of(4)) for one in (values, -values))
    assert same(minus, -plus) or (not fmt.signed_zero and torch.equal(minus.nan_to_num(), -plus.nan_to_num()))


@pytest.mark.gpu
@each_overflow
def test_a_gpu_draws_as_the_processor_does(fmt: Format, overflow: Overflow) -> None:
    values = torch.from_numpy(random_patterns(fmt.name, 1 << 18))
    result = round_to(values.cuda(), fmt, overflow=overflow, seed=seed_of(9).cuda()).cpu()
    assert same(result, round_to(values, fmt, overflow=overflow, seed=seed_of(9)))


DEVIATION = 3.0
FLOOR, EVEN, RCEIL, CEIL = (Scaling(1, 32, E8M0, ScaleRounding(name)) for name in ("floor", "even", "rceil", "ceil"))


FIGURES = [
    (E4M3, TENSOR, 31.56),
    (E5M2, TENSOR, 25.57),
    (E4M3, FLOOR, 30.18),
    (E4M3, EVEN, 30.91),
    (E4M3, RCEIL, 31.57),
    (E4M3, CEIL, 31.57),
    (E2M3, FLOOR, 30.99),
    (E3M2, FLOOR, 25.28),
    (E2M1, FLOOR, 18.62),
    (E2M1, EVEN, 18.95),
    (E2M1, RCEIL, 18.58),
    (E2M1, CEIL, 17.14),
    (E2M1, NVFP4, 20.44),
]


@cache
def gaussian(rows: int = 1024) -> torch.Tensor:
    """A million values: two seeds differ by 0.02 dB at most."""
    return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0)) * DEVIATION


def decibels(found: torch.Tensor, source: torch.Tensor) -> float:
    noise = (found.double() - source.double()).square().sum()
    return 10 * math.log10(float(source.double().square().sum() / noise))


def slope(found: torch.Tensor, source: torch.Tensor) -> float:
    """Below 1 where values shrink on average."""
    return float((found.double() * source.double()).sum() / source.double().square().sum())


@for_each(
    ("fmt", "scaling", "expected"),
    FIGURES,
)
def test_noise_of_gaussian_values(fmt: Format, scaling: Scaling, expected: float) -> None:
    assert decibels(values(gaussian(), fmt, scaling), gaussian()) == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
def test_stochastic_rounding_is_biased_under_block_scales_rounded_to_nearest() -> None:
    source = gaussian(4096)
    seed = torch.tensor([1])
    clipped, whole = (values(source, E2M1, scaling, seed=seed) for scaling in (NVFP4, NVFP4_ROUNDED_UP))
    assert slope(clipped, source) == pytest.approx(0.9965, abs=0.0003)
    assert slope(whole, source) == pytest.approx(1, abs=0.0003)
    assert decibels(clipped, source) == pytest.approx(17.3, abs=0.1)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()


def table(title: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the first table below a title."""
    lines = PAGE.split(f"\n## {title}\n")[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells[0], cells[2:]


def test_the_scalings_take_the_roundings_that_are_named_and_no_others() -> None:
    _, rows = table("Scalings")
    blocks = {"all": [(0, 0)], "a row": [(1, 0)], "1 x 16 or 16 x 16": [(1, 16), (16, 16)]}
    for name, block, stored, roundings in rows:
        scale = {"float32": None, "e8m0": E8M0}.get(stored, E4M3)
        named = roundings.split(", ")
        for rows_of_block, columns in blocks.get(block) or [tuple(map(int, block.split(" x ")))]:
            for rounding in ScaleRounding:
                if rounding in named:
                    Scaling(rows_of_block, columns, scale, rounding)
                else:
                    with pytest.raises(UsageError, match="are not rounded by"):
                        Scaling(rows_of_block, columns, scale, rounding)
        assert name


def test_the_noise_is_what_the_tests_hold_it_to() -> None:
    lines = PAGE.split("\nThis table shows the signal to noise in decibels")[1].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    shown = {
        (row[0].strip("`"), column): float(cell)
        for row in rows[:5]
        for column, cell in zip(header[1:], row[1:], strict=True)
        if cell
    }
    columns = {(0, None): "tensor", (1, E4M3): "NVFP4"}
    held = {
        (fmt.name, columns.get((scaling.rows, scaling.scale), str(scaling.rounding))): figure
        for fmt, scaling, figure in FIGURES
    }
    assert shown == held
