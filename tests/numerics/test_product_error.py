"""Total and kernel error of a product, apart."""

from __future__ import annotations

import math

import pytest
import torch

from fp8bench.formats.grids import E4M3
from fp8bench.formats.quantise import round_to
from fp8bench.numerics.products import product_error, rows_within, values_product

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
