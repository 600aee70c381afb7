"""Products to compare with; total and kernel error of a product, apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from fp8bench.formats.grids import E4M3
from fp8bench.formats.quantise import round_to
from fp8bench.numerics.products import exact_product, product_error, rows_within, values_product
from tests.formats.scaling_definitions import gaussian


@pytest.mark.parametrize("columns", [1, 1024, 1100])
def test_exact_product_is_the_product_of_those_rows(columns: int) -> None:
    a, b = gaussian(9, 33).to(torch.bfloat16), gaussian(columns, 33, seed=1)
    rows = (0, 4, 8)
    result = exact_product(a, b, rows)
    expected = torch.stack([(a[row].double() * b.double()).sum(1) for row in rows])
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


def test_exact_product_without_rows() -> None:
    assert exact_product(gaussian(3, 4), gaussian(5, 4), ()).shape == (0, 5)


@pytest.mark.parametrize(
    ("sides", "cap", "rows"),
    [
        ((5, 10, 10), 1e6, range(5)),  # all of them where they are affordable
        ((1000, 64, 64), 10 * 2 * 64 * 64, range(50, 1000, 100)),
        ((0, 10, 10), 1e6, ()),
        ((3, 0, 0), 1e6, range(3)),
    ],
)
def test_rows_are_spread_and_within_the_cap(sides: tuple[int, int, int], cap: float, rows: Sequence[int]) -> None:
    assert rows_within(*sides, flops_cap=cap) == tuple(rows)


@pytest.mark.parametrize("m", [1, 2, 7, 100])
def test_rows_are_distinct_and_inside(m: int) -> None:
    for cap in (0, 300, 1000, 1e9):
        rows = rows_within(m, 10, 10, flops_cap=cap)
        assert 1 <= len(rows) == len(set(rows)) <= m
        assert all(0 <= row < m for row in rows)


def test_values_product_sums_in_float32_and_rounds_once() -> None:
    a, b = gaussian(6, 40), gaussian(7, 40, seed=1)
    assert torch.equal(values_product(a, b, torch.bfloat16), (a @ b.t()).to(torch.bfloat16))
    assert values_product(a.to(torch.bfloat16), b, torch.float32).dtype == torch.float32


ROWS = tuple(range(0, 64, 3))


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 512, generator=generator), torch.randn(48, 512, generator=generator)


def test_an_exact_kernel_has_the_casts_error_alone() -> None:
    """Rounded operands, summed in fp64."""
    a, b = operands()
    low = round_to(a, E4M3), round_to(b, E4M3)
    found = product_error(low[0].double() @ low[1].double().t(), (a, b), low, ROWS)
    assert found.kernel == pytest.approx(0, abs=1e-15)
    # Facts measured apart: an SQNR of 28.5 dB with E4M3 on both sides.
    assert -20 * math.log10(found.total) == pytest.approx(28.5, abs=0.3)


def test_what_a_short_accumulator_adds_is_the_kernels() -> None:
    """A sum in bf16 over fp32 operands: no cast has lost anything."""
    a, b = operands()
    total = torch.zeros(64, 48, dtype=torch.bfloat16)
    for part in range(0, 512, 32):
        total += (a[:, part : part + 32] @ b[:, part : part + 32].t()).to(torch.bfloat16)
    found = product_error(total, (a, b), (a, b), ROWS)
    assert found.total == found.kernel > 2e-3


def test_errors_that_are_independent_add_up_as_squares() -> None:
    """Those of casts and of rounding the result."""
    a, b = operands()
    low = round_to(a, E4M3), round_to(b, E4M3)
    casts = product_error(low[0].double() @ low[1].double().t(), (a, b), low, ROWS)
    both = product_error(round_to(values_product(*low, torch.float32), E4M3), (a, b), low, ROWS)
    assert both.total == pytest.approx(math.hypot(casts.total, both.kernel), rel=0.05)
    assert both.kernel == pytest.approx(10 ** (-31.56 / 20), rel=0.05)


def test_only_the_rows_that_are_asked_for_count() -> None:
    """What stands in others is not looked at."""
    a, b = operands()
    product = values_product(a, b, torch.float32)
    rows = rows_within(64, 48, 512, flops_cap=4 * 2 * 48 * 512)
    product[[row for row in range(64) if row not in rows]] = math.nan
    assert product_error(product, (a, b), (a, b), rows).total < 1e-6
