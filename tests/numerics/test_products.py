"""Reference products, the separate errors of casts and kernel, and short sums number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8bench.formats.grids import E4M3, E5M2, Format
from fp8bench.formats.quantise import round_to
from fp8bench.formats.recipes import HOPPER_SUM_BITS, Accumulator
from fp8bench.numerics.products import (
    INSTRUCTION_SUM_LENGTH,
    PROMOTION_LENGTH,
    choose_product_error_rows,
    exact_product,
    measure_product_errors,
    multiply_in_float32,
    short_product,
    sum_like_hopper_units,
)
from tests.counts import for_each
from tests.formats.scaling_definitions import gaussian


@for_each("columns", [1, 1024, 1100])
def test_exact_product_is_the_product_of_those_rows(columns: int) -> None:
    a, b = gaussian(9, 33).to(torch.bfloat16), gaussian(columns, 33, seed=1)
    rows = (0, 4, 8)
    result = exact_product(a, b, rows)
    expected = torch.stack([(a[row].double() * b.double()).sum(1) for row in rows])
    assert exact_product(a, b, ()).shape == (0, columns)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


@for_each(
    ("sides", "cap", "rows"),
    [
        ((5, 10, 10), 1e6, range(5)),  # all of them where affordable
        ((1000, 64, 64), 10 * 2 * 64 * 64, range(50, 1000, 100)),
        ((0, 10, 10), 1e6, ()),
        ((3, 0, 0), 1e6, range(3)),
        ((7, 10, 10), 0, (3,)),
    ],
)
def test_rows_are_spread_and_within_the_cap(sides: tuple[int, int, int], cap: float, rows: Sequence[int]) -> None:
    assert choose_product_error_rows(*sides, flops_cap=cap) == tuple(rows)


def test_values_product_sums_in_float32_and_rounds_once() -> None:
    a, b = gaussian(6, 40), gaussian(7, 40, seed=1)
    assert torch.equal(multiply_in_float32(a, b, torch.bfloat16), (a @ b.t()).to(torch.bfloat16))
    assert multiply_in_float32(a.to(torch.bfloat16), b, torch.float32).dtype == torch.float32


ROWS = tuple(range(0, 64, 3))


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 512, generator=generator), torch.randn(48, 512, generator=generator)


def test_an_exact_kernel_has_the_casts_error_alone() -> None:
    a, b = operands()
    low = round_to(a, E4M3), round_to(b, E4M3)
    whole, kernel = measure_product_errors(low[0].double() @ low[1].double().t(), (a, b), low, ROWS)
    assert kernel == pytest.approx(0, abs=1e-15)
    # Separately measured: an SQNR of 28.5 dB with E4M3 on both sides.
    assert -20 * math.log10(whole) == pytest.approx(28.5, abs=0.3)


def test_what_a_short_accumulator_adds_is_the_kernels() -> None:
    a, b = operands()
    total = torch.zeros(64, 48, dtype=torch.bfloat16)
    for part in range(0, 512, 32):
        total += (a[:, part : part + 32] @ b[:, part : part + 32].t()).to(torch.bfloat16)
    whole, kernel = measure_product_errors(total, (a, b), (a, b), ROWS)
    assert whole == kernel > 2e-3


def test_errors_that_are_independent_add_up_as_squares() -> None:
    a, b = operands()
    low = round_to(a, E4M3), round_to(b, E4M3)
    casts, _ = measure_product_errors(low[0].double() @ low[1].double().t(), (a, b), low, ROWS)
    whole, kernel = measure_product_errors(round_to(multiply_in_float32(*low, torch.float32), E4M3), (a, b), low, ROWS)
    assert whole == pytest.approx(math.hypot(casts, kernel), rel=0.05)
    assert kernel == pytest.approx(10 ** (-31.56 / 20), rel=0.05)


def cut(value: Fraction, bits: int) -> Fraction:
    if not value:
        return value
    magnitude, exponent = abs(value), 0
    while magnitude >= 2**bits:
        magnitude, exponent = magnitude / 2, exponent + 1
    while magnitude < 2 ** (bits - 1):
        magnitude, exponent = magnitude * 2, exponent - 1
    return (1 if value > 0 else -1) * Fraction(int(magnitude)) * Fraction(2) ** exponent


def by_hand(row: list[float], column: list[float], accumulator: Accumulator, bits: int) -> np.float32:
    """One element of the product: exact sums of 32, truncated, and promoted every 128 or never."""
    total, stored = np.float32(0), Fraction(0)
    for start in range(0, len(row), INSTRUCTION_SUM_LENGTH):
        part = slice(start, start + INSTRUCTION_SUM_LENGTH)
        products = sum((Fraction(a) * Fraction(b) for a, b in zip(row[part], column[part], strict=True)), Fraction(0))
        stored = cut(stored + products, bits)
        if accumulator is Accumulator.PROMOTED and (start + INSTRUCTION_SUM_LENGTH) % PROMOTION_LENGTH == 0:
            total, stored = total + np.float32(float(stored)), Fraction(0)
    return total + np.float32(float(stored))


def short_operands(fmt: Format, k: int, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    a, b = (
        torch.randn(rows, k, generator=generator) * 2.0 ** (spread * torch.randn(rows, k, generator=generator))
        for rows in (3, 4)
    )
    return round_to(a, fmt) * 2.0**-5, round_to(b, fmt) * 2.0**7


LENGTHS = (1, 31, 32, 96, 128, 129, 500)


@for_each(
    ("accumulator", "bits", "k"),
    [
        *product((Accumulator.SHORT, Accumulator.PROMOTED), (HOPPER_SUM_BITS,), LENGTHS),
        *((Accumulator.SHORT, bits, 129) for bits in (2, 8, 23)),
    ],
)
@for_each("fmt", [E4M3, E5M2])
def test_every_element_is_the_one_added_by_hand(accumulator: Accumulator, bits: int, fmt: Format, k: int) -> None:
    for spread in (0.5, 4.0):
        a, b = short_operands(fmt, k, spread)
        result = short_product(a, b, accumulator, bits)
        pairs = product(a.tolist(), b.tolist())
        expected = [by_hand(row, column, accumulator, bits) for row, column in pairs]
        assert result.dtype == torch.float32
        assert np.array_equal(result.numpy().flatten(), np.array(expected, np.float32))


def test_what_is_lost_is_what_was_published() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (round_to(torch.rand(16, 4096, generator=generator), E4M3) for _ in range(2))
    exact = a.double() @ b.double().t()
    lost = {
        item: float(((exact - short_product(a, b, item)) / exact).mean())
        for item in (Accumulator.SHORT, Accumulator.PROMOTED)
    }
    assert 2e-3 < lost[Accumulator.SHORT] < 4e-3
    assert 0 < lost[Accumulator.PROMOTED] < 3 * 2.0**-HOPPER_SUM_BITS


def test_nothing_and_what_is_not_finite() -> None:
    empty = torch.empty(2, 0)
    for accumulator in (Accumulator.SHORT, Accumulator.PROMOTED):
        assert torch.equal(short_product(empty, empty, accumulator), torch.zeros(2, 2))
        a = torch.tensor([[1.0, float("inf")], [1.0, float("nan")], [1.0, 2.0]])
        result = short_product(a, torch.ones(1, 2), accumulator).flatten().tolist()
        assert result[0] == float("inf") and np.isnan(result[1]) and result[2] == 3.0


MEASURED = Path(__file__).resolve().parents[2] / "reports" / "gpu_h200_202611" / "unit_sums.npz"


def values_of(kept: np.ndarray, name: str) -> Tensor:
    """E4M3, and E5M2 for some first operands: units cannot multiply two E5M2 operands."""
    e5 = name.startswith("e5") and name.endswith("_a")
    return torch.from_numpy(kept).view(torch.float8_e5m2 if e5 else torch.float8_e4m3fn).to(torch.float32)


def units_by_hand(row: Sequence[float], column: Sequence[float]) -> Fraction:
    stored = Fraction(0)
    for start in range(0, len(row), INSTRUCTION_SUM_LENGTH):
        pairs = [
            pair for pair in zip(row[start:], column[start : start + INSTRUCTION_SUM_LENGTH], strict=False) if all(pair)
        ]
        exponents = [math.frexp(a)[1] + math.frexp(b)[1] - 2 for a, b in pairs]
        terms = [Fraction(a) * Fraction(b) for a, b in pairs]
        if stored:
            terms, exponents = [*terms, stored], [*exponents, math.frexp(float(stored))[1] - 1]
        if not terms:
            continue
        last = Fraction(2) ** (max(exponents) - HOPPER_SUM_BITS + 1)
        stored = sum((math.trunc(term / last) for term in terms), 0) * last
        if stored:
            last = Fraction(2) ** (math.frexp(float(stored))[1] - HOPPER_SUM_BITS)
            stored = math.trunc(stored / last) * last
    return stored


def test_sums_of_units_are_those_that_a_gpu_made() -> None:
    with np.load(MEASURED) as stored:
        results = [name for name in stored.files if name.endswith(("fast", "promoted"))]
        for name in results:
            operands, how = name.rsplit("_", 1)
            a, b = (values_of(stored[name], name) for name in (f"{operands}_a", f"{operands}_b"))
            length = PROMOTION_LENGTH if how == "promoted" else a.shape[1]
            total = torch.zeros(len(a), len(b))
            for start in range(0, a.shape[1], length):
                total += sum_like_hopper_units(a[:, start : start + length], b[:, start : start + length]).to(
                    torch.float32
                )
            assert np.array_equal(total.numpy(), stored[name]), name
            assert not np.array_equal((a @ b.t()).numpy(), stored[name])
    assert len(results) == 12


@for_each("fmt", [E4M3, E5M2])
def test_sums_of_units_by_hand(fmt: Format) -> None:
    for k in (1, 31, 96):
        a, b = short_operands(fmt, k, 4.0)
        expected = [float(units_by_hand(row, column)) for row, column in product(a.tolist(), b.tolist())]
        assert sum_like_hopper_units(a, b).flatten().tolist() == expected
