"""The error metric, its edges included."""

from __future__ import annotations

import math

import pytest
import torch

from fp8bench.numerics.norms import joint_relative_frobenius, relative_error, relative_frobenius, vanished_share
from tests.counts import for_each


@for_each(
    ("value", "reference", "error"),
    [
        ([3.0, 5.0], [3.0, 4.0], 0.2), ([math.nan], [1.0], math.nan), ([0.0], [0.0], 0.0), ([1.0], [0.0], math.inf),
        ([math.nan], [0.0], math.nan), ([], [], 0.0),
    ],
)  # fmt: skip
def test_by_hand(value: list[float], reference: list[float], error: float) -> None:
    """NaN is not hidden; a reference of zeros makes all or nothing of it."""
    found = relative_frobenius(torch.tensor(value), torch.tensor(reference))
    assert found == pytest.approx(error, rel=1e-6, abs=0, nan_ok=True)


@for_each(
    ("value", "reference", "error"),
    [(3.0, -4.0, 1.75), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (math.nan, 0.0, math.nan), (0.0, 2.0, 1.0)],
)
def test_numbers_by_the_same_rule(value: float, reference: float, error: float) -> None:
    assert relative_error(value, reference) == pytest.approx(error, rel=1e-12, abs=0, nan_ok=True)


def test_sums_in_double_precision() -> None:
    reference = torch.ones(1 << 20)
    value = reference.clone()
    value[0] += 2**-12
    assert relative_frobenius(value, reference) == pytest.approx(2**-12 / 2**10, rel=1e-12)


def test_low_precision_input_is_widened() -> None:
    value = torch.tensor([1.5], dtype=torch.bfloat16)
    assert relative_frobenius(value, torch.tensor([1.0], dtype=torch.float64)) == 0.5


def test_shapes_must_agree() -> None:
    """Of many tensors there must be as many, too."""
    with pytest.raises(ValueError, match="shapes differ"):
        relative_frobenius(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(ValueError, match="shapes differ"):
        vanished_share([torch.ones(3, 1)], [torch.ones(3)])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        vanished_share([torch.ones(3)], [])


def test_what_vanished_is_counted_over_all_tensors() -> None:
    """Zeros of the reference are no loss, and neither are values that are wrong but there."""
    values = [torch.tensor([[0.0, -0.0], [0.0, 9.0]]), torch.tensor([0.0, math.nan, 1e-38, 0.0])]
    references = [torch.tensor([[1e-30, -2.0], [0.0, 1.0]]), torch.tensor([math.inf, 1.0, 1.0, 0.0])]
    assert vanished_share(values, references) == 3 / 8
    assert vanished_share(references, references) == 0.0 == vanished_share([], [])
    assert vanished_share([torch.ones(0)], [torch.ones(0)]) == 0.0


def test_what_vanished_is_what_a_norm_does_not_see() -> None:
    """Ninety-nine of a hundred values are gone, and the norm is exact to eight digits."""
    reference = torch.full((100,), 1e-10)
    reference[0] = 1.0
    value = torch.where(reference == 1, reference, 0.0)
    assert joint_relative_frobenius([value], [reference]) < 1e-8 and vanished_share([value], [reference]) == 0.99
