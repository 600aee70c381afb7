"""Products to compare with."""

from __future__ import annotations

import pytest
import torch

from fp8bench.numerics.products import exact_product, rows_within, values_product
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


def test_rows_are_all_of_them_where_affordable() -> None:
    assert rows_within(5, 10, 10, flops_cap=1e6) == (0, 1, 2, 3, 4)


def test_rows_are_spread_and_within_the_cap() -> None:
    rows = rows_within(1000, 64, 64, flops_cap=10 * 2 * 64 * 64)
    assert len(rows) == 10
    assert rows == (50, 150, 250, 350, 450, 550, 650, 750, 850, 950)


@pytest.mark.parametrize("m", [1, 2, 7, 100])
def test_rows_are_distinct_and_inside(m: int) -> None:
    for cap in (0, 300, 1000, 1e9):
        rows = rows_within(m, 10, 10, flops_cap=cap)
        assert 1 <= len(rows) == len(set(rows)) <= m
        assert all(0 <= row < m for row in rows)


def test_no_rows_of_nothing() -> None:
    assert rows_within(0, 10, 10) == ()
    assert rows_within(3, 0, 0) == (0, 1, 2)


def test_values_product_sums_in_float32_and_rounds_once() -> None:
    a, b = gaussian(6, 40), gaussian(7, 40, seed=1)
    assert torch.equal(values_product(a, b, torch.bfloat16), (a @ b.t()).to(torch.bfloat16))
    assert values_product(a.to(torch.bfloat16), b, torch.float32).dtype == torch.float32
