"""The error metric, its edges included."""

from __future__ import annotations

import math

import pytest
import torch

from fp8bench.numerics.errors import relative_frobenius


def test_by_hand() -> None:
    assert relative_frobenius(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


def test_sums_in_double_precision() -> None:
    reference = torch.ones(1 << 20)
    value = reference.clone()
    value[0] += 2**-12
    assert relative_frobenius(value, reference) == pytest.approx(2**-12 / 2**10, rel=1e-12)


def test_zero_reference() -> None:
    zero = torch.zeros(3)
    assert relative_frobenius(zero, zero) == 0.0
    assert relative_frobenius(torch.ones(3), zero) == math.inf
    assert math.isnan(relative_frobenius(torch.full((3,), math.nan), zero))
    assert relative_frobenius(torch.empty(0), torch.empty(0)) == 0.0


def test_nan_is_not_hidden() -> None:
    assert math.isnan(relative_frobenius(torch.tensor([math.nan]), torch.tensor([1.0])))


def test_low_precision_input_is_widened() -> None:
    value = torch.tensor([1.5], dtype=torch.bfloat16)
    assert relative_frobenius(value, torch.tensor([1.0], dtype=torch.float64)) == 0.5


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        relative_frobenius(torch.ones(3, 1), torch.ones(3))
